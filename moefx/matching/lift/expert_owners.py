"""The owners of a summand: the experts whose parameters its term uses.

A key is the set of expert parameter slices that a term uses. An expert's number is its position in a stack, a flat
matrix or a list of modules::

    relu(x[0] @ experts.2.up.weight) @ experts.2.down.weight  # a key of two slices, of expert 2
    x[0] @ w[5]                                               # a key of one slice of a stack, of expert 5
    x[0] @ w.view(E * D, F)[5 * D : 6 * D]                    # the same in a flat matrix
"""

from __future__ import annotations

import math
from collections import Counter

from ..terms.parameter_slices import ParameterSlice, get_fqn, guess_experts
from ..terms.term import Term, is_const, is_pointwise_term, pointwise_items
from .parameter_uses import ParameterUses

OwnerKey = tuple[ParameterSlice, ...]  # sorted


class ExpertOwners:
    """Maps terms to experts, and splits rows into the experts' summands.

    Args:
        experts: FQNs of the experts' parameters.
        numbers: expert numbers by FQN of a module or parameter, if no single list numbers the experts
            (see `number_nested_modules` and `number_by_tokens`).
    """

    def __init__(self, uses: ParameterUses, experts: set[str], numbers: dict[str, int] | None = None):
        self.uses, self.experts, self.numbers = uses, experts, numbers or {}
        self._numbers: dict[ParameterSlice, list[int]] = {}
        self._owners: dict[Term, frozenset[int]] = {}
        self._slices: dict[Term, tuple[str, ParameterSlice]] = {}

    def split_summands(self, t: Term) -> list[Term]:
        """Split a row into one summand per expert.

        Sums within one expert (its bias, its residual) stay together, as do sums without experts. Scalar factors are
        distributed over sums of several experts.
        """
        if t.op == "reshape" and math.prod(t.shape) == 1:  # the experts have one output
            return [self.uses.terms.reshape(p, t.shape) for p in self.split_summands(t.args[0])]
        if t.op == "pointwise":
            name, kwargs, *items = t.args
            if name in ("add", "sub") and all(i.shape == t.shape for i in items):
                left, right = map(self.find_experts, items)
                if (len(left) == 1 and left == right) or not self.find_key(t):
                    return [t]
                return [p for part in self.split_operands(t) for p in self.split_summands(part)]
            if name in ("mul", "div", "cast", "detach") and len(self.find_experts(t)) > 1:
                wide = [k for k, a in enumerate(items) if math.prod(a.shape) > 1]
                wide = wide or [k for k, a in enumerate(items) if self.find_key(a)]
                if len(wide) == 1 and not (name == "div" and wide[0] == 1):
                    inner = self.split_summands(items[wide[0]])
                    return [
                        self.uses.terms.pointwise(
                            name, *[p if k == wide[0] else a for k, a in enumerate(items)], **dict(kwargs)
                        )
                        for p in inner
                    ]
        return [] if is_const(t, 0) else [t]

    def split_operands(self, t: Term) -> list[Term]:
        """Return both operands of a sum or difference, with signs; else the term itself, or nothing for zero."""
        if is_pointwise_term(t, "add", "sub") and all(i.shape == t.shape for i in pointwise_items(t)):
            a, b = pointwise_items(t)
            return [a, b if t.args[0] == "add" else self.uses.terms.pointwise("mul", b, self.uses.terms.const(-1))]
        return [] if is_const(t, 0) else [t]

    def find_experts(self, t: Term) -> frozenset[int]:
        """Return the numbers of the experts whose parameters a term uses."""
        numbers = self._owners.get(t)
        if numbers is None:
            numbers = self._owners[t] = frozenset(self.guess_numbers(self.find_key(t), by_slice=True))
        return numbers

    def find_key(self, t: Term) -> OwnerKey:
        """Return the expert parameter slices that a term uses."""
        slices = {self._read_slice(x) for x in self.uses.find_slices(t) if get_fqn(x) in self.experts}
        return tuple(part for _, part in sorted(slices, key=lambda named: named[0]))

    def _read_slice(self, leaf: Term) -> tuple[str, ParameterSlice]:
        """Return a slice with its text, by which slices are sorted."""
        if leaf not in self._slices:
            part = ParameterSlice.from_term(leaf)
            self._slices[leaf] = str(part), part
        return self._slices[leaf]

    def guess_numbers(self, key: OwnerKey, by_slice: bool = False) -> list[int]:
        """Guess the expert number of a key: the first one that fits all its slices, if there is one.

        Args:
            by_slice: if no number fits all slices, return the likeliest number of each slice: the one that most
                slices could have.
        """
        options = [self._list_numbers(p) for p in key]
        common = [i for i in (options[0] if options else []) if all(i in o for o in options)]
        if by_slice and not common and len(key) > 1:
            votes = Counter(i for o in options for i in o)
            return sorted({min(o, key=lambda i: -votes[i]) for o in options if o})
        return common[:1]

    def _list_numbers(self, part: ParameterSlice) -> list[int]:
        if part not in self._numbers:
            parts = part.fqn.split(".")
            names = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
            named_numbers = [self.numbers[name] for name in names if name in self.numbers]
            self._numbers[part] = named_numbers or guess_experts(part, self.uses.children)
        return self._numbers[part]
