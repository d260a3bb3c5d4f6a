"""Lift one capture at one cut: the node that is taken as the routed sum.

An example with two experts and one slot, and the cut `out`::

    out[0] = relu(x[0] @ A) * w[0]        # A, B: the experts' parameters
    out[1] = relu(x[1] @ B) * w[1] + x[1]

`x[1]` is a residual summand. The skeletons of the experts' summands are equal, so A and B are one group of experts with
the body `relu(x @ P) * w`. The expert index is the integer tensor [[0], [1]] that names the owner of each summand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict

import torch
from torch import fx

from ...capture.tracing.capture_result import Capture
from ...errors import Refused
from ...inspection.proof_trace import CutAttempt, LiftStep
from ...ir.ancestors import collect_ancestors
from ..terms.parameter_slices import get_fqn
from ..terms.term import OVERWRITTEN, Term, is_const, is_pointwise_term
from .anti_unification import Skeletons, Unifier
from .canonical_form import CanonicalForm, CapturedGroup, NodeRef, count_sequences, has_matrix_products
from .cut_candidates import find_cut_inputs
from .expert_index import ExpertIndex, find_expert_index, find_near_misses
from .expert_owners import ExpertOwners
from .lift_options import LiftOptions
from .lift_refusals import NothingRouted, UnexplainedIndex, explain_overwrite
from .masked_nodes import NodesBehindMasks
from .parameter_uses import ParameterUses
from .repeated_choices import ChoiceSums, RepeatedChoiceRefused, find_repeated
from .residual_terms import assign_identity_slots, find_shared, find_unrouted_value
from .same_form import ONE_FUNCTION
from .value_axes import SlotEffects, ValueAxes
from .value_lookup import ValueLookup

_Summand = tuple[int, int, Term]  # token, slot, term


@dataclasses.dataclass(frozen=True)
class _Residual:
    """The summands in the rows of a cut that are not those of experts with parameters.

    Attributes:
        shared, unrouted_value: those of the canonical form.
        rows: summands without expert parameters, by token. `_assign_slots` moves those of identity experts to slots.
    """

    shared: list[NodeRef]
    unrouted_value: NodeRef | None
    rows: list[list[Term]]


@dataclasses.dataclass(frozen=True)
class _SlotSummands:
    """The summands of the experts, assigned to slots.

    Attributes:
        ids: the selected expert of each slot.
        kept: which slots have a summand, bool [T, K]; all those of the tokens in `repeated`, until these are checked.
        by_skeleton: the summands by the number of their skeleton.
        repeated: the experts that a token selected twice, by token. Their summands have no slot yet.
    """

    ids: list[list[int]]
    kept: torch.Tensor
    by_skeleton: dict[int, list[_Summand]]
    repeated: dict[int, set[int]]

    def find_effects(self) -> SlotEffects:
        """Return which slots count and which are dropped, except those of tokens that selected an expert twice."""
        kept, dropped = self.kept.nonzero().tolist(), (~self.kept).nonzero().tolist()
        return SlotEffects(
            counted=[(t, k, self.ids[t][k]) for t, k in kept if t not in self.repeated],
            dropped=[(t, k, self.ids[t][k]) for t, k in dropped if t not in self.repeated],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutLifter:
    """Finds the expert index for one cut, and unifies the summands of its rows.

    Attributes:
        cut: the node that is taken as the routed sum.
        owners: tells which expert a summand belongs to, for one set of expert parameters.
        expert_nodes: the nodes that depend on expert parameters.
        call_internals: see `find_call_internals`.
        hint: the form of another capture of the block; its nodes are tried first.
        attempt: records the progress.
    """

    cut: fx.Node
    owners: ExpertOwners
    expert_nodes: set[fx.Node]
    call_internals: set[fx.Node]
    hint: CanonicalForm | None
    options: LiftOptions
    attempt: CutAttempt

    @property
    def uses(self) -> ParameterUses:
        return self.owners.uses

    @property
    def capture(self) -> Capture:
        return self.owners.uses.capture

    @functools.cached_property
    def cut_ancestors(self) -> set[fx.Node]:
        """The nodes that the cut depends on, and the cut."""
        return collect_ancestors(self.cut)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The leading axes of the cut."""
        return tuple(self.cut.meta["val"].shape[:-1])

    def lift(self) -> CanonicalForm:
        """Return the canonical form.

        Raises:
            Refused: the cut does not sum routed rows.
        """
        expert_rows, other_rows = self._split_rows()
        self.attempt.start_step(LiftStep.FIND_INDEX)
        index = self._find_index(expert_rows)
        self.attempt.start_step(LiftStep.ASSIGN_SLOTS)
        lookup = self._rank_values(index)
        residual = self._split_residual(expert_rows, other_rows, lookup)
        summands = self._assign_slots(index, expert_rows, residual, lookup)
        lookup = lookup.with_effects(summands.find_effects())
        self.attempt.start_step(LiftStep.UNIFY_EXPERTS)
        groups, kept = self._unify_groups(lookup, summands), summands.kept
        if summands.repeated:
            groups, kept = self._check_repeated(lookup, summands, expert_rows, residual, groups)
        return CanonicalForm(
            capture=self.capture,
            cut=self.cut,
            tokens=self.tokens,
            slots=index.ids.shape[1],
            expert_index=index.ref,
            ids=index.ids,
            groups=groups,
            shared=residual.shared,
            unrouted_value=residual.unrouted_value,
            kept_slots=kept,
            replaced_nodes={n for n in self.expert_nodes if n.meta["index"] <= self.cut.meta["index"]},
            expert_parameters=frozenset(self.owners.experts),
            options=self.options,
            expert_numbers=self.owners.numbers,
            repeated_tokens={*summands.repeated},
        )

    def _split_rows(self) -> tuple[list[list[Term]], list[list[Term]]]:
        """Split each row of the cut into the summands with expert parameters, and the rest."""
        expert_summands, residual, experts = [], [], self.owners.experts
        self.uses.expand_sums(self.cut, experts)
        for t, row in enumerate(self.uses.list_rows(self.cut)):
            parts = self.owners.split_summands(row)
            if any(is_const(p, "nan") for p in parts):  # type: ignore[arg-type]
                raise Refused(
                    f"output row {t} is never written",
                    source=str(self.cut.meta["source"]),
                    remedy="start from torch.zeros_like(x) instead of torch.empty_like(x)",
                )
            of_experts = {p for p in parts if any(get_fqn(x) in experts for x in self.uses.find_slices(p))}
            expert_summands.append([p for p in parts if p in of_experts])
            residual.append([p for p in parts if p not in of_experts])
        if self.uses.terms.overwrites and has_overwrite(expert_summands):
            raise explain_overwrite(self.cut)
        if not any(expert_summands):
            raise NothingRouted(self.capture, self.cut)
        return expert_summands, residual

    def _find_index(self, expert_summands: list[list[Term]]) -> ExpertIndex:
        """Find the selected experts in a node before the cut.

        Inputs of the cut come first: statistics of another selection may hold the same numbers.
        """
        inputs, end = self.cut_ancestors, self.cut.meta["index"]
        before = (n for n in self.capture.nodes if n not in self.expert_nodes and n.meta["index"] < end)
        nodes = sorted(before, key=lambda n: n not in inputs)
        index = find_expert_index(self.owners, self.tokens, expert_summands, nodes, self.call_internals, self.hint)
        if index is None:
            misses = find_near_misses(self.owners, self.tokens, expert_summands, nodes, self.call_internals)
            self.attempt.add_indices(misses)
            raise UnexplainedIndex(self.uses, self.owners, self.expert_nodes, self.cut, expert_summands).explain()
        return index

    def _rank_values(self, index: ExpertIndex) -> ValueLookup:
        """Rank the inputs of the cut, as nodes that may supply a value of the experts."""
        nodes = find_cut_inputs(self.capture, self.cut, self.cut_ancestors, self.expert_nodes, self.hint)
        known = [e for group in (self.hint.groups if self.hint is not None else ()) for e in group.ids]
        highest = max([*known, *(int(index.ids[t, k]) for t, row in enumerate(index.slots) for k in row)])
        axes = ValueAxes(
            tokens=self.tokens,
            slots=index.ids.shape[1],
            experts=highest + 1,
            sequences=count_sequences(self.capture, self.tokens),
        )
        behind = NodesBehindMasks(self.cut_ancestors, self.expert_nodes)
        return ValueLookup.rank(
            self.uses.semantics,
            nodes,
            axes,
            call_internals=self.call_internals,
            hint=self.hint,
            options=self.options,
            find_behind=behind.find,
        )

    def _split_residual(
        self, expert_rows: list[list[Term]], other_rows: list[list[Term]], lookup: ValueLookup
    ) -> _Residual:
        """Find what each row adds to the sum of its experts."""
        shared, rows = find_shared(other_rows, lookup, self.owners, self.hint)
        unrouted_value, rows = find_unrouted_value(rows, expert_rows, lookup)
        return _Residual(shared, unrouted_value, rows)

    def _assign_slots(
        self, index: ExpertIndex, expert_rows: list[list[Term]], residual: _Residual, lookup: ValueLookup
    ) -> _SlotSummands:
        """Assign the summands of each token to its slots, also residual summands to slots of identity experts."""
        ids = index.ids.tolist()
        repeated = find_repeated(index.ids, index.slots, self.hint)
        by_slot = [
            [(k, p) for k, p in zip(index.slots[t], parts, strict=True) if ids[t][k] not in repeated.get(t, ())]
            for t, parts in enumerate(expert_rows)
        ]
        for t, parts in enumerate(residual.rows):
            if t not in repeated:
                assign_identity_slots(t, parts, ids[t], by_slot[t], lookup)
        kept, by_skeleton = torch.zeros(index.ids.shape, dtype=torch.bool), defaultdict[int, list[_Summand]](list)
        skeletons = Skeletons(lookup.list_rows)
        for t, parts in enumerate(by_slot):
            for k, part in parts:
                kept[t, k] = True
                by_skeleton[skeletons.number_skeleton(part)].append((t, k, part))
        kept[list(repeated)] = True
        return _SlotSummands(ids, kept, by_skeleton, repeated)

    def _unify_groups(self, lookup: ValueLookup, summands: _SlotSummands) -> list[CapturedGroup]:
        """Anti-unify the summands of each skeleton to one group of experts.

        Raises:
            Refused: experts are table rows, or an expert computes two functions.
        """
        groups = [
            Unifier(self.owners, lookup, self.expert_nodes).unify_group(instances, summands.ids)
            for instances in summands.by_skeleton.values()
        ]
        if groups and not any(has_matrix_products(g.body) for g in groups):
            raise Refused(
                "experts are single vectors looked up per token (retrieval), not functions with a matrix product",
                culprits=tuple(sorted(self.owners.experts)[:3]),
                source=str(self.cut.meta["source"]),
                remedy="leave it as it is: F.embedding looks vectors up without padding",
            )
        clash = [e for e, n in Counter(e for g in groups for e in g.ids).items() if n > 1]
        if clash:
            raise Refused(
                f"expert {clash[0]} does not always compute the same function",
                source=str(self.cut.meta["source"]),
                remedy=ONE_FUNCTION,
            )
        return groups

    def _check_repeated(
        self, lookup: ValueLookup, summands: _SlotSummands, expert_rows: list[list[Term]], residual: _Residual,
        groups: list[CapturedGroup],
    ) -> tuple[list[CapturedGroup], torch.Tensor]:  # fmt: skip
        """Check that tokens which select an expert twice receive the sum over both slots.

        If they do not, unify once more with weights that are zero for some of their slots.

        Returns:
            The groups, and which slots have an effect, bool [T, K].

        Raises:
            RepeatedChoiceRefused: they receive something else.
        """
        received = {t: [*expert_rows[t], *residual.rows[t]] for t in sorted(summands.repeated)}
        slots = {t: [(t, k, e) for k, e in enumerate(summands.ids[t])] for t in received}
        for attempt in range(2):
            if attempt:
                doubtful = [slot for row in slots.values() for slot in row]
                lookup = lookup.with_effects(dataclasses.replace(lookup.effects, doubtful=doubtful))
                groups = self._unify_groups(lookup, summands)
            sums = ChoiceSums(lookup, groups, expert_rows, capture=self.capture, hint=self.hint)
            if all(sums.is_sum_of_choices(slots[t], parts) for t, parts in received.items()):
                kept = summands.kept.clone()
                for t in received:
                    kept[t] = torch.tensor([sums.has_effect(slot) for slot in slots[t]])
                return groups, kept
        raise RepeatedChoiceRefused(str(self.cut.meta["source"]))


def has_overwrite(rows: list[list[Term]]) -> bool:
    """Return whether some row depends on a write that puts several values at one index."""
    stack, seen = [p for row in rows for p in row], set[Term]()
    while stack:
        t = stack.pop()
        if is_pointwise_term(t, OVERWRITTEN):
            return True
        if t not in seen:
            seen.add(t)
            stack += t.operands
    return False


__all__ = ["CutLifter", "has_overwrite"]
