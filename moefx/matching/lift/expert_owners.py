"""Whose a summand is: the experts, by their natural numbers, whose parameters reach a term."""

from __future__ import annotations

import math
from collections import Counter

from ..terms.parameter_places import ParameterSlice, guess_experts, strip_moves
from ..terms.term import Term, is_const
from .routed_nodes import ParameterReach

OwnerKey = tuple[ParameterSlice, ...]  # the places of the expert parameters that reach a summand


class ExpertOwners:
    """`experts`: FQNs of the parameters that are the experts'. `numbers`: of modules or parameters that have none by
    their place in one list (see `nested_numbers` and `number_by_tokens`)."""

    def __init__(self, reach: ParameterReach, experts: set[str], numbers: dict[str, int] | None = None):
        self.reach, self.experts, self.numbers = reach, experts, numbers or {}
        self._numbers: dict[ParameterSlice, list[int]] = {}
        self._owners: dict[Term, frozenset[int]] = {}

    def split_summands(self, t: Term) -> list[Term]:
        """The summands of a row, one per expert: what one expert adds up (a bias, a residual) stays together, as does a
        sum that no expert has a part in, and scalar factors are distributed over sums of several experts."""
        if t.op == "reshape" and math.prod(t.shape) == 1:  # of an expert with one output
            return [self.reach.T.reshape(p, t.shape) for p in self.split_summands(t.args[0])]
        if t.op == "pw":
            name, kwargs, *items = t.args
            if name in ("add", "sub") and all(i.shape == t.shape for i in items):
                mine = [self.experts_of(i) for i in items]
                if (len(mine[0]) == 1 and mine[0] == mine[1]) or not self.find_key(t):
                    return [t]
                return [p for part in self.split_operands(t) for p in self.split_summands(part)]
            if name in ("mul", "div", "cast", "detach") and len(self.experts_of(t)) > 1:
                wide = [k for k, a in enumerate(items) if math.prod(a.shape) > 1]
                wide = wide or [k for k, a in enumerate(items) if self.find_key(a)]
                if len(wide) == 1 and not (name == "div" and wide[0] == 1):
                    inner = self.split_summands(items[wide[0]])
                    return [
                        self.reach.T.pw(name, *[p if k == wide[0] else a for k, a in enumerate(items)], **dict(kwargs))
                        for p in inner
                    ]
        return [] if is_const(t, 0) else [t]

    def split_operands(self, t: Term) -> list[Term]:
        """The two that a sum or a difference adds up; anything else as it is, without zeros."""
        if t.op == "pw" and t.args[0] in ("add", "sub") and all(i.shape == t.shape for i in t.args[2:]):
            a, b = t.args[2:]
            return [a, b if t.args[0] == "add" else self.reach.T.pw("mul", b, self.reach.T.const(-1))]
        return [] if is_const(t, 0) else [t]

    def experts_of(self, t: Term) -> frozenset[int]:
        """The experts (by natural index) whose parameters reach a term."""
        found = self._owners.get(t)
        if found is None:
            found = self._owners[t] = frozenset(self.guess_numbers(self.find_key(t), several=True))
        return found

    def find_key(self, t: Term) -> OwnerKey:
        mine = {ParameterSlice.from_term(x) for x in self.reach.leaves(t) if strip_moves(x).args[0] in self.experts}
        return tuple(sorted(mine, key=str))

    def guess_numbers(self, places: OwnerKey, several: bool = False) -> list[int]:
        """The expert numbers that fit all the places of a key; with `several`, of each place on its own the likeliest:
        the one that most of the other places could have too."""
        options = [self._options(p) for p in places]
        common = [i for i in (options[0] if options else []) if all(i in o for o in options)]
        if several and not common and len(places) > 1:
            votes = Counter(i for o in options for i in o)
            return sorted({min(o, key=lambda i: -votes[i]) for o in options if o})
        return common[:1]

    def _options(self, place: ParameterSlice) -> list[int]:
        if place not in self._numbers:
            parts = place.fqn.split(".")
            names = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
            own = [self.numbers[name] for name in names if name in self.numbers]
            self._numbers[place] = own or guess_experts(place, self.reach.children)
        return self._numbers[place]
