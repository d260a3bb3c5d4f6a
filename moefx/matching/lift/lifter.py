"""Lift one capture to its canonical form.

    out[t] = residual(t) + sum over k of F(x[t], weight[t,k]; parameters of expert index[t,k])

No idiom has a pattern here. The lifter works on terms, the expressions of single rows:

1. find the parameters that only some tokens use (the experts'), and a cut: a node that sums all routed rows;
2. split each row of the cut into summands, and these into the experts' and the rest;
3. find an integer tensor that holds the selected experts, and the slot of each summand;
4. anti-unify the summands of all tokens and slots. They may differ in an input row, a routing weight or an expert
   parameter. Any other difference is a refusal.

`Lifter` searches in step 1; `CutLifter` does the other steps for one cut.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
from collections.abc import Callable, Collection

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.capture_result import Capture
from ...errors import Cause, Refused
from ...inspection.proof_trace import CutAttempt, ProofTrace
from ...ir.expressions.expression_check import is_pointwise
from ..facts.graph_nodes import describe_node, line
from ..terms.term import OutOfBounds, TooLarge
from .canonical_form import CanonicalForm
from .cut_candidates import find_call_internals, find_cuts
from .cut_lifter import CutLifter, has_overwrite
from .expert_owners import ExpertOwners
from .expert_parameters import find_experts_used_by_all_tokens, number_by_tokens, propose_expert_parameters
from .integer_choices import has_integer_choices
from .lift_options import LiftOptions
from .lift_refusals import (
    explain_layout,
    explain_no_cut,
    explain_overwrite,
    explain_random,
)
from .parameter_uses import ParameterUses

_MAX_CUTS = 12
_MAX_PARAMETER_SETS = 2


class _CutKind(enum.Enum):
    """Kinds of cuts, by how their experts were numbered (see `Lifter._list_numberings`).

    Attributes:
        NUMBERED_BY_LISTS: the order of lists of parameters numbers the experts.
        NUMBERED_BY_TOKENS: the tokens of each expert number them.
        PART: the cut has fewer rows than tokens, such as one inside an expert.
    """

    NUMBERED_BY_LISTS = enum.auto()
    NUMBERED_BY_TOKENS = enum.auto()
    PART = enum.auto()


class Lifter:
    """Finds the experts, the cut and the expert index of one capture, and unifies its summands.

    Args:
        block: the captured module.
        hint: the form of another capture of the block; its nodes are tried first.
    """

    def __init__(self, block: nn.Module, capture: Capture, hint: CanonicalForm | None, options: LiftOptions):
        self.capture, self.hint, self.options = capture, hint, options
        self._new_uses = lambda: ParameterUses(block, capture, hint=hint, options=options)
        self.uses = self._new_uses()
        self.experts: set[str] = set()
        self.attempts: list[CutAttempt] = []  # the nodes that were tried as the routed sum

    def lift(self, experts: Collection[str] | None = None) -> CanonicalForm:
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

    def _lift_sets(self, experts: Collection[str] | None) -> CanonicalForm:
        """Lift with the given expert parameters, or with the first proposed set that succeeds.

        Raises:
            Refused: no set succeeds. The refusal is that of the largest set of the first proposal.
        """
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
                "each row depends on too many others to be followed: rows are mixed, as in attention",
                remedy="move the operation that mixes rows out of the block",
            ) from None
        except OutOfBounds as error:
            if self.capture.interventions:  # a forced value, which the program never has
                raise
            raise Refused(
                f"{error}: the program raises an error for some sizes or numbers, such as more tokens than a table of "
                "positions has rows",
                remedy="read the table outside of the block, or give it rows for more tokens",
            ) from error

    def _lift_experts(self, experts: Collection[str]) -> CanonicalForm:
        """Lift at the first cut that works, for these expert parameters."""
        self.experts = set(experts)
        expert_nodes, common = find_cuts(self.uses, self.experts)
        call_internals = find_call_internals(self.capture, expert_nodes)
        cuts = self._rank_cuts(common)[:_MAX_CUTS]
        if not cuts:
            raise explain_no_cut(self.capture, expert_nodes, self.experts)
        first: dict[_CutKind, Refused] = {}
        for numbering, cut in itertools.product(self._list_numberings(), cuts):
            if (numbers := numbering(cut)) is None:
                continue
            owners = ExpertOwners(self.uses, self.experts, numbers)
            attempt = CutAttempt(*describe_node(cut))
            try:
                return CutLifter(
                    cut=cut,
                    owners=owners,
                    expert_nodes=expert_nodes,
                    call_internals=call_internals,
                    hint=self.hint,
                    options=self.options,
                    attempt=attempt,
                ).lift()
            except Refused as refusal:
                attempt.fail(refusal.reason)
                self.attempts.append(attempt)
                kind = self._classify_cut(cut, numbers)
                if kind not in first:
                    first[kind] = self._complete_refusal(refusal, cut, kind)
        assert first, "no cut was tried"
        kinds = [_CutKind.NUMBERED_BY_TOKENS, _CutKind.NUMBERED_BY_LISTS, _CutKind.PART]
        if self._are_listed():
            kinds = [_CutKind.NUMBERED_BY_LISTS, _CutKind.NUMBERED_BY_TOKENS, _CutKind.PART]
        likeliest = next(first[kind] for kind in kinds if kind in first)
        raise explain_random(expert_nodes, cuts[0]) or likeliest

    def _classify_cut(self, cut: fx.Node, numbers: dict[str, int]) -> _CutKind:
        if math.prod(cut.meta["val"].shape[:-1]) < self.capture.sizes.tokens:
            return _CutKind.PART
        is_listed = numbers in ({}, self.uses.nested)
        return _CutKind.NUMBERED_BY_LISTS if is_listed else _CutKind.NUMBERED_BY_TOKENS

    def _complete_refusal(self, refusal: Refused, cut: fx.Node, kind: _CutKind) -> Refused:
        """Add the line of the cut to a refusal, or name the overwritten rows that cause it."""
        is_whole = kind is not _CutKind.PART
        if is_whole and self.uses.terms.overwrites and has_overwrite([self.uses.list_rows(cut)]):
            return explain_overwrite(cut)
        if refusal.source:
            return refusal
        return refusal.replace(source=str(cut.meta["source"]), remedy=refusal.remedy)

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
        candidates = []
        for position, n in enumerate(common):
            val = n.meta.get("val")
            if isinstance(val, FakeTensor) and val.dim() >= 2 and val.is_floating_point():
                candidates.append((math.prod(val.shape[:-1]), position, n))
        if not candidates:
            return []
        candidates.sort(key=lambda c: c[:2])
        preferred = line(self.hint.cut if self.hint is not None else candidates[0][2])

        def rank(candidate: tuple[int, int, fx.Node]) -> tuple:
            rows, position, n = candidate
            if self.options.cut_preference != "first":
                return rows, self.options.cut_preference == "last_write" and is_pointwise(n.target), -position
            is_elsewhere = line(n) != preferred
            order = position if is_elsewhere else -position
            return self.hint is not None and is_elsewhere, rows, is_elsewhere, order

        return [n for _, _, n in sorted(candidates, key=rank)]

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


__all__ = ["Lifter"]
