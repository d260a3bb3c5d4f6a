"""Lift one capture to its canonical form.

    out[t] = shared(x[t]) + sum over k of F(x[t], weight[t,k]; parameters of expert index[t,k])

No idiom has a pattern here. The lifter works on terms, the expressions of single rows:

1. find the parameters that only some tokens use (the experts'), and a cut: a node that sums all routed rows;
2. split each row of the cut into summands, and these into the experts' and the rest;
3. find an integer tensor that holds the selected experts, and the slot of each summand;
4. anti-unify the summands of all tokens and slots. They may differ in an input row, a routing weight or an expert
   parameter. Any other difference is a refusal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.capture_result import Capture
from ...errors import Cause, Refused
from ...inspection.proof_trace import CutAttempt, ProofTrace
from ...ir.expression_check import is_pointwise
from ..graph_nodes import Line, describe_node, line
from ..terms.parameter_slices import strip_moves
from ..terms.term import OVERWRITTEN, Term, TooLarge, is_const, is_pw
from .anti_unification import Skeletons, Unifier
from .canonical_form import CanonicalForm, CapturedGroup, count_sequences, has_matrix_products
from .expert_index import ExpertIndex, find_expert_index, find_near_misses
from .expert_owners import ExpertOwners
from .expert_parameters import find_experts_used_by_all_tokens, number_by_tokens, propose_expert_parameters
from .lift_refusals import (
    ONE_EXPERT,
    NothingRouted,
    UnexplainedIndex,
    explain_layout,
    explain_no_cut,
    explain_overwrite,
    explain_random,
)
from .repeated_choices import ChoiceSums, RepeatedChoiceRefused, find_repeated
from .residual_terms import assign_identity_slots, find_shared, find_unrouted_value
from .routed_nodes import (
    ParameterUses,
    collect_ancestors,
    find_call_internals,
    find_cut_inputs,
    find_cuts,
    has_integer_choices,
)
from .value_lookup import ValueLookup

CutPreference = Literal["", "write", "any"]
_MAX_CUTS = 12
_MAX_PARAMETER_SETS = 2
_Summand = tuple[int, int, Term]  # token, slot, term


@dataclasses.dataclass(frozen=True)
class LiftOptions:
    """One interpretation of a program.

    Attributes:
        symbolic: comparisons of floats are part of activations, see `Semantics`.
        opaque_lines: lines whose nodes stay opaque, see `Semantics`.
        cut_preference: "" takes the first complete sum. "write" prefers the last write, "any" the last node, on any
            line: rows of tokens without an expert may be written after the experts.
        weights_per_slot: see `ValueLookup`.
        align_to_last: see `ValueLookup`.
    """

    symbolic: bool = False
    opaque_lines: frozenset[Line] = frozenset()
    cut_preference: CutPreference = ""
    weights_per_slot: bool = False
    align_to_last: bool = False


class Lifter:
    """Finds the experts, the cut and the expert index of one capture, and unifies its summands.

    Args:
        block: the captured module.
        hint: the form of another capture of the block; its nodes are tried first.

    Attributes:
        experts: FQNs of the experts' parameters, after `lift`.
    """

    def __init__(self, block: nn.Module, capture: Capture, hint: CanonicalForm | None, options: LiftOptions):
        self.capture, self.hint, self.options = capture, hint, options
        self._new_uses = lambda: ParameterUses(block, capture, options.symbolic, hint, options.opaque_lines)
        self.uses = self._new_uses()
        self.experts: set[str] = set()
        self.attempts: list[CutAttempt] = []  # the nodes that were tried as the routed sum

    def lift(self, experts: set[str] | None = None) -> CanonicalForm:
        """Return the canonical form.

        Args:
            experts: FQNs of the experts' parameters, if another capture has shown them.

        Raises:
            Refused: the capture has no canonical form.
        """
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
            for sets in itertools.islice(propose_expert_parameters(self.uses), _MAX_PARAMETER_SETS):
                refusals: dict[int, Refused] = {}  # by the number of parameters
                for parameters in sets:
                    try:
                        return self._lift_experts(parameters)
                    except Refused as refusal:
                        refusals.setdefault(len(parameters), refusal)
                first = first or refusals[max(refusals)]  # the largest set is the complete one
                self.uses = self._new_uses()  # forget the sums that were written out for these parameters
            if has_integer_choices(self.uses) and (alike := find_experts_used_by_all_tokens(self.uses)):
                with contextlib.suppress(Refused):
                    return self._lift_experts(alike)
            raise (
                first
                or explain_layout(self.capture)
                or Refused("no parameter is used for some tokens only: nothing is routed", cause=Cause.NOT_ROUTED)
            )
        except TooLarge:
            raise Refused(
                "each row depends on too many others to be followed: rows are mixed, as in attention"
            ) from None

    def _lift_experts(self, experts: set[str]) -> CanonicalForm:
        """Lift at the first cut that works, for these expert parameters."""
        self.experts = set(experts)
        self.expert_nodes, common = find_cuts(self.uses, self.experts)
        self.inside = find_call_internals(self.capture, self.expert_nodes)
        cuts = self._rank_cuts(common)
        if not cuts:
            raise explain_no_cut(self.capture, self.expert_nodes, self.experts)
        first: Refused | None = None
        of_part: Refused | None = None  # of a cut with fewer rows than tokens, such as one inside an expert
        by_tokens: Refused | None = None
        for numbering, cut in itertools.product(self._list_numberings(), cuts[:_MAX_CUTS]):
            if (numbers := numbering(cut)) is None:
                continue
            self.owners = ExpertOwners(self.uses, self.experts, numbers)
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
                        cause=refusal.cause,
                    )
                if math.prod(cut.meta["val"].shape[:-1]) < self.capture.sizes.tokens:
                    of_part = of_part or refusal
                    continue
                if self.uses.terms.overwrites and _has_overwrite([self.uses.rows(cut)]):
                    refusal = explain_overwrite(cut)
                first = first or refusal
                by_tokens = by_tokens or (refusal if numbers not in ({}, self.uses.nested) else None)
        by_tokens = by_tokens if not self._are_listed() else None
        refused = explain_random(self.expert_nodes, cuts[0]) or by_tokens or first or of_part
        assert refused is not None, "no cut was tried"
        raise refused

    def _are_listed(self) -> bool:
        """Return whether some experts are in a list or dictionary of modules."""
        lists = [name for name, m in self.uses.block.named_modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
        return any(fqn.startswith(f"{name}." if name else "") for fqn in self.experts for name in lists)

    def _rank_cuts(self, common: list[fx.Node]) -> list[fx.Node]:
        """Sort the candidates for the routed sum, the likeliest first.

        Candidates on the hint's line come first, then those with the fewest rows, then the earliest. If most slots
        are dropped, a cut may have fewer rows than tokens, so the hint's line counts more than the rows. If the
        last experts of a loop have no tokens, several runs of its line are candidates: the last run comes first.
        """
        found = []
        for position, n in enumerate(common):
            val = n.meta.get("val")
            if isinstance(val, FakeTensor) and val.dim() >= 2 and val.is_floating_point():
                found.append((math.prod(val.shape[:-1]), position, n))
        if not found:
            return []
        found.sort(key=lambda c: c[:2])
        preferred = line(self.hint.cut if self.hint is not None else found[0][2])

        def rank(candidate: tuple[int, int, fx.Node]) -> tuple:
            rows, position, n = candidate
            if self.options.cut_preference:
                return rows, self.options.cut_preference == "write" and is_pointwise(n.target), -position
            is_elsewhere = line(n) != preferred
            order = position if is_elsewhere else -position
            return self.hint is not None and is_elsewhere, rows, is_elsewhere, order

        return [n for _, _, n in sorted(found, key=rank)]

    def _list_numberings(self) -> list[Callable[[fx.Node], dict[str, int] | None]]:
        """List the ways to number experts, each a function from a cut to numbers by FQN.

        Number them by their position in one list (no numbers needed); else through all lists of a list; else, if no
        list holds them, by the tokens that use their parameters.
        """
        uses, hint = self.uses, self.hint
        if hint is not None and not (hint.expert_numbers and hint.expert_numbers != uses.nested):
            return [lambda _: hint.expert_numbers]
        known = hint.expert_numbers if hint is not None else {}
        by_tokens = [lambda cut: number_by_tokens(uses, cut, self.experts, known)]
        return by_tokens if known else [lambda _: {}, *([lambda _: uses.nested] if uses.nested else []), *by_tokens]

    # ------------------------------------------------------------------ one cut
    def _lift_at(self, cut: fx.Node, attempt: CutAttempt) -> CanonicalForm:
        """Lift with this node as the routed sum, and record the progress in `attempt`."""
        tokens = tuple(cut.meta["val"].shape[:-1])
        expert_summands, residual = self._split_rows(cut)
        attempt.reached += 1
        index = self._find_index(cut, tokens, expert_summands, attempt)
        attempt.reached += 1
        ids, selected = index.ids, index.ids.tolist()
        lookup = self._new_lookup(cut, tokens, index)
        common, residual = find_shared(residual, lookup, self.owners, self.hint)
        unrouted, residual = find_unrouted_value(residual, expert_summands, lookup)
        repeated = find_repeated(ids, index.slots, self.hint)
        by_slot = [
            [
                (k, part)
                for k, part in zip(index.slots[t], parts, strict=True)
                if selected[t][k] not in repeated.get(t, ())
            ]
            for t, parts in enumerate(expert_summands)
        ]
        for t, parts in enumerate(residual):
            if t not in repeated:
                assign_identity_slots(t, parts, selected[t], by_slot[t], lookup)
        kept = torch.zeros(ids.shape, dtype=torch.bool)
        skeletons = Skeletons(lookup.rows)
        instances: dict[int, list[_Summand]] = defaultdict(list)
        for t, parts in enumerate(by_slot):
            for k, part in parts:
                kept[t, k] = True
                instances[skeletons.hash_skeleton(part)].append((t, k, part))
        kept[list(repeated)] = True  # until the sums are checked below
        lookup.dropped = [(t, k, selected[t][k]) for t, k in (~kept).nonzero().tolist()]
        lookup.counted = [(t, k, selected[t][k]) for t, k in kept.nonzero().tolist() if t not in repeated]
        attempt.reached += 1
        groups = self._unify_groups(cut, lookup, instances, selected)
        if repeated:
            received = {t: [*expert_summands[t], *residual[t]] for t in sorted(repeated)}
            groups, sums = self._check_repeated(cut, lookup, instances, selected, expert_summands, received, groups)
            for t in received:
                kept[t] = torch.tensor([sums.has_effect((t, k, e)) for k, e in enumerate(selected[t])])
        return CanonicalForm(
            capture=self.capture,
            cut=cut,
            tokens=tokens,
            slots=ids.shape[1],
            expert_index=index.ref,
            ids=ids,
            groups=groups,
            shared=common,
            unrouted_value=unrouted,
            kept_slots=kept,
            replaced_nodes={n for n in self.expert_nodes if n.meta["index"] <= cut.meta["index"]},
            expert_numbers=self.owners.numbers,
            repeated_tokens={*repeated},
        )

    def _split_rows(self, cut: fx.Node) -> tuple[list[list[Term]], list[list[Term]]]:
        """Split each row of the cut into the summands with expert parameters, and the rest."""
        expert_summands, residual = [], []
        self.uses.parameters_by_row(cut, self.experts)  # writes out the sums over experts
        for t, row in enumerate(self.uses.rows(cut)):
            parts = self.owners.split_summands(row)
            if any(is_const(p, "nan") for p in parts):  # type: ignore[arg-type]
                raise Refused(f"output row {t} is never written", source=str(cut.meta["source"]))
            of_experts = {p for p in parts if any(strip_moves(x).args[0] in self.experts for x in self.uses.leaves(p))}
            expert_summands.append([p for p in parts if p in of_experts])
            residual.append([p for p in parts if p not in of_experts])
        if self.uses.terms.overwrites and _has_overwrite(expert_summands):
            raise explain_overwrite(cut)
        if not any(expert_summands):
            raise NothingRouted(self.capture, cut)
        return expert_summands, residual

    def _find_index(
        self, cut: fx.Node, tokens: tuple[int, ...], expert_summands: list[list[Term]], attempt: CutAttempt
    ) -> ExpertIndex:
        """Find the selected experts in a node before the cut.

        Inputs of the cut come first: statistics of another selection may hold the same numbers.
        """
        inputs, end = collect_ancestors(cut), cut.meta["index"]
        before = (n for n in self.capture.nodes if n not in self.expert_nodes and n.meta["index"] < end)
        nodes = sorted(before, key=lambda n: n not in inputs)
        index = find_expert_index(self.owners, tokens, expert_summands, nodes, self.inside, self.hint)
        if index is None:
            attempt.indices = find_near_misses(self.owners, tokens, expert_summands, nodes, self.inside)
            raise UnexplainedIndex(self.uses, self.owners, self.expert_nodes, cut, expert_summands).explain()
        return index

    def _new_lookup(self, cut: fx.Node, tokens: tuple[int, ...], index: ExpertIndex) -> ValueLookup:
        nodes = find_cut_inputs(self.uses, cut, self.expert_nodes, self.hint)
        known = [e for group in (self.hint.groups if self.hint is not None else ()) for e in group.ids]
        highest = max([*known, *(int(index.ids[t, k]) for t, row in enumerate(index.slots) for k in row)])
        return ValueLookup(
            self.uses.semantics, nodes, tokens, index.ids.shape[1], highest + 1, self.inside, self.hint,
            self.options.weights_per_slot, self.options.align_to_last, count_sequences(self.capture, tokens),
        )  # fmt: skip

    def _unify_groups(
        self, cut: fx.Node, lookup: ValueLookup, instances: dict[int, list[_Summand]], ids: list[list[int]]
    ) -> list[CapturedGroup]:
        """Anti-unify the summands of each skeleton to one group of experts.

        Raises:
            Refused: experts are table rows, or an expert computes two functions.
        """
        groups = [Unifier(self.owners, lookup, self.expert_nodes).unify_group(m, ids) for m in instances.values()]
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

    def _check_repeated(
        self, cut: fx.Node, lookup: ValueLookup, instances: dict[int, list[_Summand]], ids: list[list[int]],
        expert_summands: list[list[Term]], received: dict[int, list[Term]], groups: list[CapturedGroup],
    ) -> tuple[list[CapturedGroup], ChoiceSums]:  # fmt: skip
        """Check that tokens which select an expert twice receive the sum over both slots.

        If they do not, unify once more with weights that are zero for some of their slots.

        Args:
            received: all summands of each of these tokens.

        Raises:
            RepeatedChoiceRefused: they receive something else.
        """
        slots = {t: [(t, k, e) for k, e in enumerate(ids[t])] for t in received}
        for attempt in range(2):
            if attempt:
                lookup.doubtful = [slot for row in slots.values() for slot in row]
                groups = self._unify_groups(cut, lookup, instances, ids)
            sums = ChoiceSums(self.capture, self.uses.terms, lookup, groups, expert_summands, self.hint)
            if all(sums.is_sum_of_choices(slots[t], parts) for t, parts in received.items()):
                return groups, sums
        raise RepeatedChoiceRefused(str(cut.meta["source"]))


def _has_overwrite(rows: list[list[Term]]) -> bool:
    """Return whether some row depends on a write that puts several values at one index."""
    stack, seen = [p for row in rows for p in row], set[Term]()
    while stack:
        t = stack.pop()
        if is_pw(t, OVERWRITTEN):
            return True
        if t not in seen:
            seen.add(t)
            stack += t.terms
    return False


__all__ = ["ONE_EXPERT", "CutPreference", "Lifter", "NothingRouted"]
