"""One capture, lifted to `out[t] = shared(x_t) + sum_k F(x_t, c[t,k]; theta[idx[t,k]])` (design section 3.3).

There is no template of any idiom here. The rows of the node where all routed paths meet are terms; each is a sum;
its summands are assigned to the slots of an integer tensor that explains which experts were used; and the summands
of all tokens and slots are anti-unified: where they differ they must differ as an input row, a routing weight or an
expert parameter does. Anything else is a refusal with its reason.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.captured import Capture, decided_by_floats
from ...errors import Refused
from ...inspection.proof_trace import CutAttempt, ProofTrace
from ...ir.expression_check import is_pointwise
from ..graph_nodes import Line, depends_on_arguments, depends_on_call, describe_node, is_random, line, op_name
from ..terms.parameter_places import strip_moves
from ..terms.sum_expansion import routed_axes
from ..terms.term import OVERWRITTEN, Term, TooLarge, is_const, is_pw
from .anti_unification import Skeletons, Unifier
from .canonical_form import CanonicalForm, Group, count_sequences, has_matrix_products
from .expert_index import ExpertIndex, find_expert_index, find_near_misses, is_all_or_none, uses_all_experts
from .expert_owners import ExpertOwners, OwnerKey
from .repeated_choices import ChoiceSums, RepeatedChoiceRefused, find_repeated
from .residual_terms import assign_identity_slots, find_shared, find_unrouted_value
from .routed_nodes import (
    ParameterReach,
    collect_ancestors,
    find_call_internals,
    find_cut_inputs,
    find_cuts,
    find_families_met_by_all,
    has_integer_choices,
    number_by_tokens,
    propose_expert_parameters,
)
from .value_lookup import ValueLookup

CutPreference = Literal["", "write", "any"]
UNEXPLAINED = "no integer tensor with one entry per token and slot explains which experts were used"
SINGLE_ELEMENTS = "the experts move or pick single elements of a row"
ONE_EXPERT = "there is one expert only that computes anything, which tokens take or leave: of several none is chosen"
NOT_TOGETHER = "the experts' results do not come together in one tensor"
_MOST_CUTS = 12
_MOST_SETS = 2  # of parameters that may be the experts'
_JOINS = {"cat", "stack"}  # of experts' results, say
_CHOICES = {"argmax", "argsort", "max", "sort", "topk"}
_TAKES_ROWS = {"masked_fill", "masked_scatter", "nonzero", "where"}  # by a mask


class NothingRouted(Refused):
    """All that is routed is masked, in this capture at least."""

    def __init__(self, source: str, has_numbers: bool):
        remedy = "an integer argument or buffer that turns all experts off is not followed" if has_numbers else ""
        super().__init__("no expert's result reaches this sum", source=source, remedy=remedy)


class Lifter:
    def __init__(
        self, block: nn.Module, capture: Capture, like: CanonicalForm | None = None, symbolic: bool = False,
        by_slots: bool = False, is_last: bool = False, whole: frozenset[Line] = frozenset(), late: CutPreference = "",
    ):  # fmt: skip
        """`like`: the form of another capture of the block; what chose the experts there is looked at first here.
        `symbolic`, `whole`: see `Semantics`; `by_slots`, `is_last`: see `Lookup`. `late`: prefer the last write, or the
        last node, as the routed sum, on any line. Rows of tokens without an expert may be written after the experts."""
        self.late = late
        self.capture, self.like, self.by_slots, self.is_last = capture, like, by_slots, is_last
        self._new_reach = lambda: ParameterReach(block, capture, symbolic, like, whole)
        self.reach = self._new_reach()
        self.experts: set[str] = set()  # FQNs of the experts' parameters, once lifted
        self.attempts: list[CutAttempt] = []  # the nodes that were tried as the routed sum

    def lift(self, experts: set[str] | None = None) -> CanonicalForm:
        """The canonical form. `experts`: FQNs of the experts' parameters as far as another capture has shown them."""
        try:
            return self._lift_sets(experts)
        except Refused as refusal:
            refusal.trace = ProofTrace(cuts=tuple(self.attempts))
            raise

    def _lift_sets(self, experts: set[str] | None) -> CanonicalForm:
        try:
            if experts is not None:
                return self._lift_experts(experts)
            first: Refused | None = None
            for sets in itertools.islice(propose_expert_parameters(self.reach), _MOST_SETS):
                refusals: dict[int, Refused] = {}  # by the number of parameters
                for some in sets:
                    try:
                        return self._lift_experts(some)
                    except Refused as refusal:
                        refusals.setdefault(len(some), refusal)
                first = first or refusals[max(refusals)]  # the largest set is the complete one
                self.reach = self._new_reach()  # nothing of what was taken apart for these
            alike = find_families_met_by_all(self.reach) if has_integer_choices(self.reach) else None
            if alike:
                with contextlib.suppress(Refused):
                    return self._lift_experts(alike)
            raise (
                first
                or self._explain_layout()
                or Refused("no parameter is used for some tokens only: nothing is routed")
            )
        except TooLarge:
            raise Refused("its rows depend on too much else to be followed: rows are mixed, as in attention") from None

    def _lift_experts(self, experts: set[str]) -> CanonicalForm:
        self.experts = set(experts)
        self.routed, meeting = find_cuts(self.reach, self.experts)
        self.inside = find_call_internals(self.capture, self.routed)
        candidates = self._rank_cuts(meeting)
        if not candidates:
            if left := [e for e in self.capture.effects if e.kind == "attribute" and e.node in self.routed]:
                raise Refused(
                    "the experts set attributes that stay behind, as hooks do that prune or normalise a weight",
                    culprits=tuple(str(e.target) for e in left[:3]),
                    source=str(left[0].node.meta["source"]),
                    remedy="torch.nn.utils.parametrize does it without; prune.remove makes it final",
                )
            raise Refused(
                NOT_TOGETHER,
                culprits=tuple(sorted(self.experts)[:3]),
                source=self._find_expert_source(),
                remedy="the routed sum must be one tensor before it is used further; of several gates over the same "
                "experts make each a module with its sum, which holds the same list of experts",
            )
        first: Refused | None = None
        of_some: Refused | None = None  # of a candidate with the rows of some tokens only: inside of one expert, say
        by_tokens: Refused | None = None
        for numbering, cut in itertools.product(self._enumerate_numberings(), candidates[:_MOST_CUTS]):
            if (numbers := numbering(cut)) is None:
                continue
            self.owners = ExpertOwners(self.reach, self.experts, numbers)
            attempt = CutAttempt(*describe_node(cut))
            try:
                return self._lift_at(cut, attempt)
            except Refused as refusal:
                attempt.reason = refusal.reason
                self.attempts.append(attempt)
                if not refusal.source:
                    refusal = Refused(
                        refusal.reason,
                        culprits=refusal.culprits,
                        source=str(cut.meta["source"]),
                        remedy=refusal.remedy,
                    )
                if math.prod(cut.meta["val"].shape[:-1]) < self.capture.sizes.tokens:
                    of_some = of_some or refusal
                    continue
                if self.reach.T.overwrites and _has_overwrite([self.reach.rows(cut)]):
                    refusal = _refuse_overwrite(cut)
                first = first or refusal
                by_tokens = by_tokens or (refusal if numbers not in ({}, self.reach.nested) else None)
        raise (
            self._explain_random(candidates[0])
            or (by_tokens if not self._are_listed() else None)
            or first
            or of_some
            or AssertionError
        )

    def _are_listed(self) -> bool:
        """Whether some experts are in a list or dictionary of modules."""
        lists = [name for name, m in self.reach.block.named_modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
        return any(fqn.startswith(f"{name}." if name else "") for fqn in self.experts for name in lists)

    def _explain_layout(self) -> Refused | None:
        """A sparse tensor between the experts and the output hides what they do."""
        for n in self.capture.nodes:
            val = n.meta.get("val")
            if isinstance(val, torch.Tensor) and val.layout is not torch.strided:
                return Refused(
                    f"a {val.layout} tensor is computed with, and only strided ones are followed",
                    culprits=(op_name(n),),
                    source=str(n.meta["source"]),
                    remedy="gather and add rows with index, index_add or a dense product instead",
                )
        return None

    def _explain_random(self, cut: fx.Node) -> Refused | None:
        """Random numbers inside of the experts explain any failure."""
        for n in self.routed:
            if n.meta["index"] < cut.meta["index"] and is_random(n):
                return Refused(
                    "the experts draw random numbers (dropout in training?): which row gets which depends on the "
                    "order of the experts",
                    culprits=(op_name(n),),
                    source=str(n.meta["source"]),
                    remedy="set the dropout inside of the experts to 0; in eval mode they are rewritten as they are",
                )
        return None

    def _rank_cuts(self, meeting: list[fx.Node]) -> list[fx.Node]:
        """Nodes that can be the routed sum: those of the fewest rows first, and of these the earliest."""
        found = []
        for position, n in enumerate(meeting):
            val = n.meta.get("val")
            if isinstance(val, FakeTensor) and val.dim() >= 2 and val.is_floating_point():
                found.append((math.prod(val.shape[:-1]), position, n))
        if not found:
            return []
        found.sort(key=lambda c: c[:2])
        at = line(self.like.cut if self.like is not None else found[0][2])

        def likelihood(candidate: tuple[int, int, fx.Node]) -> tuple:
            # Of one line in a loop the last turn: where the last experts have no tokens, theirs may add nothing. The
            # line of another capture counts before the rows: where most are dropped, fewer may be left than tokens.
            rows, position, n = candidate
            if self.late:
                return rows, self.late == "write" and is_pointwise(n.target), -position
            elsewhere = line(n) != at
            return self.like is not None and elsewhere, rows, elsewhere, position if elsewhere else -position

        found.sort(key=likelihood)
        return [n for _, _, n in found]

    def _find_expert_source(self) -> str:
        for n in self.capture.nodes:
            if n.op == "get_attr" and n.meta["fqn"] in self.experts:
                for user in n.users:
                    return str(user.meta["source"])
        return ""

    def _lift_at(self, cut: fx.Node, attempt: CutAttempt) -> CanonicalForm:
        tokens = tuple(cut.meta["val"].shape[:-1])
        routed, rest = self._split_rows(cut)
        attempt.reached += 1
        index, ids, slots = self._find_index(cut, tokens, routed, attempt)
        attempt.reached += 1
        nodes = find_cut_inputs(self.reach, cut, self.routed, self.like)
        known = [e for group in (self.like.groups if self.like is not None else ()) for e in group.ids]
        highest = max([*known, *(int(ids[t, k]) for t, row in enumerate(slots) for k in row)])  # of ids that count
        lookup = ValueLookup(
            self.reach.S, nodes, tokens, ids.shape[1], highest + 1, self.inside, self.like, self.by_slots, self.is_last,
            count_sequences(self.capture, tokens),
        )  # fmt: skip
        common, rest = find_shared(rest, lookup, self.owners, self.like)
        alone, rest = find_unrouted_value(rest, routed, lookup)
        chosen = ids.tolist()
        twice = find_repeated(ids, slots, self.like)
        placed = [
            [(k, part) for k, part in zip(slots[t], parts, strict=True) if chosen[t][k] not in twice.get(t, ())]
            for t, parts in enumerate(routed)
        ]
        for t, parts in enumerate(rest):
            if t not in twice:
                assign_identity_slots(t, parts, chosen[t], placed[t], lookup)
        kept = torch.zeros(ids.shape, dtype=torch.bool)
        skeletons = Skeletons(lookup.rows())
        instances: dict[int, list[tuple[int, int, Term]]] = defaultdict(list)
        for t, parts in enumerate(placed):
            for k, part in parts:
                kept[t, k] = True
                instances[skeletons.hash_form(part)].append((t, k, part))
        for t in twice:
            kept[t] = True  # for now
        lookup.dropped = [(t, k, chosen[t][k]) for t, k in (~kept).nonzero().tolist()]
        lookup.counted = [(t, k, chosen[t][k]) for t, k in kept.nonzero().tolist() if t not in twice]
        attempt.reached += 1
        groups = self._unify_groups(cut, lookup, instances, chosen)
        if twice:
            every = {t: [(t, k, e) for k, e in enumerate(chosen[t])] for t in sorted(twice)}

            def sums() -> ChoiceSums | None:
                found = ChoiceSums(self.capture, self.reach.T, lookup, groups, routed, self.like)
                return (
                    found
                    if all(found.is_sum_of_choices(places, [*routed[t], *rest[t]]) for t, places in every.items())
                    else None
                )

            if (worth := sums()) is None:
                lookup.doubtful = [place for places in every.values() for place in places]
                groups = self._unify_groups(cut, lookup, instances, chosen)
                worth = sums()
            if worth is None:
                raise RepeatedChoiceRefused(str(cut.meta["source"]))
            for t, places in every.items():
                kept[t] = torch.tensor([worth.has_effect(place) for place in places])
        absorbed = {n for n in self.routed if n.meta["index"] <= cut.meta["index"]}
        return CanonicalForm(
            self.capture, cut, tokens, ids.shape[1], index, ids, groups, common, alone, kept, absorbed,
            self.owners.numbers, {*twice},
        )  # fmt: skip

    def _enumerate_numberings(self) -> list[Callable[[fx.Node], dict[str, int] | None]]:
        """Number experts by their place in one list. If that fails, through all lists of a list; then, if they are in
        none, by the tokens that meet their parameters."""
        reach, like = self.reach, self.like
        if like is not None and not (like.expert_numbers and like.expert_numbers != reach.nested):
            return [lambda _: like.expert_numbers]
        known = like.expert_numbers if like is not None else {}
        by_tokens = [lambda cut: number_by_tokens(reach, cut, self.experts, known)]
        return by_tokens if known else [lambda _: {}, *([lambda _: reach.nested] if reach.nested else []), *by_tokens]

    def _unify_groups(
        self,
        cut: fx.Node,
        lookup: ValueLookup,
        instances: dict[int, list[tuple[int, int, Term]]],
        chosen: list[list[int]],
    ) -> list[Group]:
        """What the summands of one form have in common, by form; none where no token shows one."""
        groups = [Unifier(self.owners, lookup, self.routed).unify_group(m, chosen) for m in instances.values()]
        if instances and not any(has_matrix_products(g.body) for g in groups):
            raise Refused(
                "experts are single vectors looked up per token (retrieval), not functions with a matrix product",
                culprits=tuple(sorted(self.experts)[:3]),
            )
        clash = [e for e, n in Counter(e for g in groups for e in g.ids).items() if n > 1]
        if clash:
            raise Refused(
                f"expert {clash[0]} does not always compute the same function", source=str(cut.meta["source"])
            )
        return groups

    def _split_rows(self, cut: fx.Node) -> tuple[list[list[Term]], list[list[Term]]]:
        """What each row of the cut is the sum of: the experts' results, and the rest."""
        routed, rest = [], []
        self.reach.parameters_by_row(cut, self.experts)  # takes sums apart
        for t, row in enumerate(self.reach.rows(cut)):
            parts = self.owners.split_summands(row)
            if any(is_const(p, "nan") for p in parts):  # type: ignore[arg-type]
                raise Refused(f"output row {t} is never written", source=str(cut.meta["source"]))
            mine = {p for p in parts if any(strip_moves(x).args[0] in self.experts for x in self.reach.leaves(p))}
            routed.append([p for p in parts if p in mine])
            rest.append([p for p in parts if p not in mine])
        if self.reach.T.overwrites and _has_overwrite(routed):
            raise _refuse_overwrite(cut)
        if not any(routed):
            raise NothingRouted(str(cut.meta["source"]), any(map(depends_on_call, self.capture.nodes)))
        return routed, rest

    def _find_index(
        self, cut: fx.Node, tokens: tuple[int, ...], routed: list[list[Term]], attempt: CutAttempt
    ) -> ExpertIndex:
        # what the sum is made of first: statistics of another choice may have the same numbers; nothing from behind it
        last, end = collect_ancestors(cut), cut.meta["index"]
        before = (n for n in self.capture.nodes if n not in self.routed and n.meta["index"] < end)
        nodes = sorted(before, key=lambda n: n not in last)
        found = find_expert_index(self.owners, tokens, routed, nodes, self.inside, self.like)
        if found is not None:
            return found
        attempt.indices = find_near_misses(self.owners, tokens, routed, nodes, self.inside)
        if is_all_or_none(self.owners, routed):
            raise Refused(ONE_EXPERT, source=str(cut.meta["source"]))
        if uses_all_experts(self.owners, routed):
            raise Refused(
                "every expert is applied to every token: gates without a selection leave nothing to skip",
                source=str(cut.meta["source"]),
                remedy="select experts per token, for example with topk",
            )
        if parts := self._find_partial_choices(math.prod(tokens)):
            raise Refused(
                f"the tokens are cut into {len(parts)} parts, and experts are chosen for each on its own",
                culprits=tuple(dict.fromkeys(op_name(made) for n in parts for made in decided_by_floats(n))),
                source=str(parts[0].meta["source"]),
                remedy="choose for all tokens at once, or make what is done with a part a module of its own; "
                "torch.compile(model, backend='moefx') takes each part for itself",
            )
        if (times := self._count_gates()) > 1:
            raise Refused(
                f"the same experts are applied {times} times, each time by a choice of its own",
                source=str(cut.meta["source"]),
                remedy="make each choice with its sum a module of its own, which holds the same list of experts",
            )
        moved = self._find_element_move()
        if moved is not None:
            name = op_name(moved.args[0] if op_name(moved) == "getitem" else moved)  # type: ignore[arg-type]
            raise Refused(
                f"{SINGLE_ELEMENTS}: {name} along the last axis is not followed there",
                culprits=(name,),
                source=str(moved.meta["source"]),
            )
        if (together := self._count_shared_choices(routed)) > 1:
            raise Refused(
                f"each choice of a token is used {together} times: mixtures of different experts share it",
                source=str(cut.meta["source"]),
                remedy="make each mixture a module of its own with its choice, or make their experts one each, with "
                "the hidden units side by side",
            )
        if masks := self._find_masks(tokens):
            are_compared = decided_by_floats(masks[0])
            raise Refused(
                f"each expert's tokens follow from a comparison of its own ({len(masks)} on this line)"
                if are_compared
                else f"each expert's tokens follow from a mask of its own ({len(masks)} masks)",
                source=_first_source(masks),
                remedy="compare the scores of all experts at once, as in mask = scores > 0, and use mask[:, e]"
                if are_compared
                else "make one mask for all experts, mask = torch.stack(masks, -1), and add what each makes of its "
                "tokens: here = mask[..., e]; out[here] += expert(x[here])",
            )
        raise Refused(
            UNEXPLAINED,
            source=str(cut.meta["source"]),
            remedy="the experts of a token must follow from that token's own choice (token choice), "
            "not from the other tokens",
        )

    def _count_gates(self) -> int:
        """How many choices the experts are applied by; 1 if the modules with their parameters are called once each."""
        owners = {fqn.rpartition(".")[0] for fqn in self.experts}
        calls = Counter(call.fqn for call in self.capture.calls if call.fqn in owners)
        choices = Counter(op_name(n) for n in self.capture.nodes if op_name(n) in _CHOICES)
        return min(*(calls[owner] for owner in owners), max(choices.values(), default=0)) if owners else 1

    def _count_shared_choices(self, routed: list[list[Term]]) -> int:
        """How many experts are always used by the same tokens; 1 where all are by the same ones."""
        tokens: dict[OwnerKey, set[int]] = defaultdict(set)
        for t, parts in enumerate(routed):
            for p in parts:
                tokens[self.owners.find_key(p)].add(t)
        sizes = Counter(frozenset(used) for used in tokens.values()).values()
        return min(sizes) if len(sizes) > 1 else 1

    def _find_partial_choices(self, tokens: int) -> list[fx.Node]:
        """Choices that a line of the program makes in turn, together of all tokens."""
        turns: dict[tuple, list[fx.Node]] = defaultdict(list)
        for n in self.capture.nodes:
            val = n.meta.get("val")
            if not isinstance(val, torch.Tensor) or isinstance(val, FakeTensor) or n in self.routed:
                continue
            if val.dtype is torch.int64 and val.dim() and decided_by_floats(n):
                turns[line(n)].append(n)
        for parts in turns.values():
            if len(parts) > 1 and sum(len(n.meta["val"]) for n in parts) == tokens == self.capture.sizes.tokens:
                return parts
        return []

    def _find_masks(self, tokens: tuple[int, ...]) -> list[fx.Node]:
        """Masks of all tokens that take rows: comparisons of floats that a line of the program makes in turn, or given
        ones."""
        turns: dict[Line | None, list[fx.Node]] = defaultdict(list)
        for n in self.capture.nodes:
            val = n.meta.get("val")
            if n in self.routed or not isinstance(val, torch.Tensor) or val.dtype is not torch.bool:
                continue
            if tuple(val.shape) not in (tokens, (math.prod(tokens),)):
                continue
            if decided_by_floats(n):
                turns[line(n)].append(n)
            elif depends_on_arguments(n) and any(op_name(user) in _TAKES_ROWS for user in n.users):
                turns[None].append(n)
        return next((masks for masks in turns.values() if len(masks) > 1), [])

    def _find_element_move(self) -> fx.Node | None:
        """The first op on rows of some tokens that moves elements along their last axis, if there is one."""

        def has_parts(n: fx.Node) -> bool:
            if not isinstance(n.meta.get("val"), FakeTensor) or not n.meta["val"].dim():
                return False
            term = self.reach.S.term(n)
            return len(term.shape) - 1 in routed_axes(self.reach.T, term)

        # element by element not all of an expert's parameters are seen to be routed
        of_some = [n for n in self.capture.nodes if n in self.routed or n.meta.get("ragged")]
        for n in of_some:
            inputs = n.all_input_nodes
            if inputs and op_name(n) not in _JOINS and has_parts(n) and not any(map(has_parts, inputs)):
                return n
        return None


def _has_overwrite(rows: list[list[Term]]) -> bool:
    """Whether some row is made of what is written to one place several times."""
    stack, seen = [p for row in rows for p in row], set[Term]()
    while stack:
        t = stack.pop()
        if is_pw(t, OVERWRITTEN):
            return True
        if t not in seen:
            seen.add(t)
            stack += t.terms
    return False


def _refuse_overwrite(cut: fx.Node) -> Refused:
    return Refused(
        "one row is written several times at once: which one stays torch does not say, and gradients reach all",
        source=str(cut.meta["source"]),
        remedy="add them up: out.index_add_(0, rows, y), or out.index_put_((rows,), y, accumulate=True)",
    )


def _first_source(nodes: list[fx.Node]) -> str:
    """The line of the program that makes the first of some values, or uses it if that is an argument."""
    n = nodes[0]
    return str((next(iter(n.users)) if n.op == "placeholder" and n.users else n).meta["source"])
