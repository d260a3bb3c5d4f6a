"""The state of a proof: makes and lifts captures, and holds the evidence and the guards.

`prove` reads a `ProofState` through its properties, and changes it through its methods only. Probes see less of it: see
`probes.proof_view`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Hashable, Iterator

from torch import nn

from ...capture.arguments.block_arguments import Arguments
from ...capture.concolic import capture_block
from ...capture.environment.code_locations import Source
from ...capture.sizes.size_guards import SizeGuard, SizeLog
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.host_reads import Interventions
from ...errors import Refused
from ...inspection.proof_trace import ProbeRun
from ..lift.canonical_form import CanonicalForm, merge_experts
from ..lift.distinct_choices import has_distinct_slots
from ..lift.lifter import Lifter, LiftOptions
from ..lift.repeated_choices import RepeatedChoiceRefused
from ..lift.same_form import require_same_form
from ..terms.parameter_slices import find_siblings
from .evidence import Evidence, find_value_lines, have_same_lines
from .size_choice import SizeChoice

_MIN_TOKENS = 29  # of the first capture
_MAX_GROWTH = 20  # nodes of a capture with forced outcomes, in captures without


class ProofState:
    """What `prove` works on, and the probes through a `ProofView`.

    Args:
        max_experts: an upper bound on the number of experts, which decides the number of tokens of captures.
        size_restrictions: comparisons of sizes whose outcome all captures must have; at other sizes the program may do
            something else.

    Attributes:
        evidence: what captures have shown.
        siblings: numbers of sibling modules (see `find_siblings`).
        size_choice: chooses the sizes of captures.
    """

    def __init__(
        self,
        block: nn.Module,
        arguments: Arguments,
        max_experts: int = 8,
        size_restrictions: tuple[SizeGuard, ...] = (),
        options: LiftOptions | None = None,
    ):
        self.block, self.max_experts, self.size_restrictions = block, max_experts, size_restrictions
        self.options = options or LiftOptions()
        self.evidence = Evidence()
        self.siblings = find_siblings(block)
        self.size_choice = SizeChoice(self, first_tokens=max(_MIN_TOKENS, max_experts // 4))
        self._arguments = arguments
        self._guards: list[SizeGuard] = []
        self._num_experts = 0
        self._probe_runs: list[ProbeRun] = []

    # ------------------------------------------------------------------ read
    @property
    def arguments(self) -> Arguments:
        """The arguments of the next captures."""
        return self._arguments

    @property
    def guards(self) -> tuple[SizeGuard, ...]:
        """Conditions on sizes beside the comparisons that the program makes."""
        return tuple(self._guards)

    @property
    def num_experts(self) -> int:
        """The number of experts; 0 until it is known."""
        return self._num_experts

    @property
    def expert_parameters(self) -> frozenset[str]:
        """FQNs of the experts' parameters; none without evidence."""
        forms = self.evidence.forms
        return forms[0].expert_parameters if forms else frozenset()

    @property
    def probe_runs(self) -> tuple[ProbeRun, ...]:
        """The probes that ran, in order."""
        return tuple(self._probe_runs)

    # --------------------------------------------------------------- capture
    def capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None, max_nodes: int = 0
    ) -> Capture:
        """Capture the block once.

        A program may index something with an integer of its call, and the integers of captures vary. If that raises an
        `IndexError`, this and all later captures have the call's own numbers, and the proof holds for these only.

        Args:
            interventions: outcomes that are forced.
            max_nodes: the largest number of nodes; 0 for any. With interventions, a multiple of the reference's nodes
                is a limit, too.

        Raises:
            Refused, CaptureError: the capture cannot be followed. Errors of the program pass through.
        """
        try:
            return self._capture(routing, sizes, interventions, max_nodes)
        except IndexError:
            if interventions or (fixed := self._arguments.with_fixed_integers()) is None:
                raise  # with interventions, a forced number may be the index
            self._arguments = fixed
            return self._capture(routing, sizes, interventions, max_nodes)

    def _capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None, max_nodes: int
    ) -> Capture:
        args, kwargs = self._arguments.build_call(sizes, seed=routing.seed)
        if interventions and self.evidence.forms:  # a forced number may set how often a loop runs
            largest = _MAX_GROWTH * len(self.evidence.reference.capture.nodes)
            max_nodes = min(max_nodes or largest, largest)
        log = SizeLog(sizes, tuple(self._arguments.fixed.values()))
        try:
            captured = capture_block(
                self.block, args, kwargs, routing, interventions=interventions, sizes=log, max_nodes=max_nodes,
                extra_values=self._arguments.extra_buffer_values,
            )  # fmt: skip
        finally:  # an assertion on a size tells which sizes the program supports
            self.evidence.log_comparisons(log, sizes)
        if captured.refusals:
            raise captured.refusals[0]
        self.evidence.log_capture(captured)
        return captured

    # ------------------------------------------------------------------ lift
    def capture_and_lift(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None
    ) -> CanonicalForm:
        """Capture the block once, and lift the capture like the others."""
        return self.lift(self.capture(routing, sizes, interventions))

    def lift(self, captured: Capture, follows_evidence: bool = True) -> CanonicalForm:
        """Lift a capture with the options and expert parameters of the other captures.

        Args:
            follows_evidence: try the nodes of the other captures first.

        Raises:
            Refused: the capture has no canonical form.
        """
        forms = self.evidence.forms if follows_evidence else ()
        return self.lift_with_hint(captured, merge_experts(forms) if forms else None)

    def lift_with_hint(
        self, captured: Capture, hint: CanonicalForm | None, align_to_last: bool = False
    ) -> CanonicalForm:
        """Lift a capture with the options and expert parameters of the evidence, if there is any.

        Args:
            hint: the form of another capture, whose nodes are tried first.
            align_to_last: read values off the last nodes that fit.

        Raises:
            Refused: the capture has no canonical form.
        """
        forms = self.evidence.forms
        options = dataclasses.replace(forms[0].options if forms else self.options, align_to_last=align_to_last)
        return self._lift(captured, hint, options, self.expert_parameters)

    def _lift(
        self, captured: Capture, hint: CanonicalForm | None, options: LiftOptions, experts: frozenset[str]
    ) -> CanonicalForm:
        """Lift a capture. `experts` are the FQNs of the experts' parameters, empty if the lifter must find them."""
        form = Lifter(self.block, captured, hint, options).lift(experts or None)
        return dataclasses.replace(form, groups=sorted(form.groups, key=lambda g: g.ids[0]))

    def lift_first(self, captured: Capture) -> CanonicalForm:
        """Lift the first capture. The options and expert parameters of its form hold for all later lifts.

        If a token may choose an expert twice, prefer weights from nodes with one value per slot: a gate per expert has
        one value for two slots of one expert.

        Raises:
            Refused: the capture has no canonical form.
        """
        first = self._try_lift(captured, self.options)
        parameters = frozenset[str]()
        if isinstance(first, CanonicalForm):
            parameters, experts = first.expert_parameters, {e for g in first.groups for e in g.ids}
            if has_distinct_slots(first, experts, follows_masks=False):
                return first
        elif not isinstance(first, RepeatedChoiceRefused):
            raise first
        per_slot = self._try_lift(captured, dataclasses.replace(self.options, weights_per_slot=True), parameters)
        if isinstance(per_slot, CanonicalForm):
            return per_slot
        if isinstance(first, Refused):
            raise first
        return first

    def _try_lift(
        self, captured: Capture, options: LiftOptions, experts: frozenset[str] = frozenset()
    ) -> CanonicalForm | Refused:
        """Lift a capture without a hint. Return its form or the refusal."""
        try:
            return self._lift(captured, None, options, experts)
        except Refused as refusal:
            return refusal

    def relift(
        self, old: CanonicalForm, hint: CanonicalForm, reference: CanonicalForm, align_to_last: bool = False
    ) -> CanonicalForm:
        """Lift a capture of the evidence once more, from the nodes of another form, or from the last ones that fit.

        Raises:
            Refused: the new form differs from `reference`.
        """
        new = require_same_form(reference, self.lift_with_hint(old.capture, hint, align_to_last))
        return dataclasses.replace(new, optional_guard=old.optional_guard)

    # ------------------------------------------------------------- agreement
    def align_form(self, form: CanonicalForm) -> CanonicalForm:
        """Return a form with its groups in the order of all captures.

        If only the new capture drops slots, weights may have to be read from other nodes, which are zero for a dropped
        slot: then lift all captures from these nodes.

        Raises:
            Refused: the forms differ.
        """
        try:
            return self.evidence.require_same_form(form)
        except Refused:
            if form.kept_slots.all():
                raise
            self.evidence.replace_forms([self.relift(other, form, form) for other in self.evidence.forms])
            return form

    def align_evidence(self) -> None:
        """Require all captures to agree with the first one, and store them with their groups in that order.

        This ends `Evidence.postpone_comparison`: from now on `Evidence.add` compares each new form.

        Raises:
            Refused: the forms differ.
        """
        for index in range(1, len(self.evidence.forms)):
            form = self.evidence.forms[index]
            aligned, forms = self.align_form(form), [*self.evidence.forms]
            if forms[index] is form:  # else all captures were lifted again
                forms[index] = aligned
                self.evidence.replace_forms(forms)
        self.evidence.mark_aligned()

    def relift_evidence(self, form: CanonicalForm) -> None:
        """Lift all evidence from the nodes of another form.

        Raises:
            Refused: some capture cannot be lifted from these nodes.
        """
        if have_same_lines(find_value_lines(form), find_value_lines(self.evidence.reference)):
            return
        relifted = [self.relift(other, form, form) for other in self.evidence.forms]
        if not all(have_same_lines(find_value_lines(other), find_value_lines(form)) for other in relifted):
            raise Refused(
                "the node that supplies a slot's routing weight depends on the routing",
                source=str(form.cut.meta["source"]),
            )
        self.evidence.replace_forms(relifted)

    # ---------------------------------------------------------------- change
    def add_form(
        self,
        form: CanonicalForm,
        *,
        optional: SizeGuard | None = None,
        forced_read: Source | None = None,
        may_relift: bool = False,
    ) -> CanonicalForm:
        """Add the form of a capture to the evidence: see `Evidence.add`.

        Args:
            may_relift: if this form differs because only it drops slots, lift all captures again from its nodes.

        Raises:
            Refused: the form differs from the others.
        """
        form = self.align_form(form) if may_relift else form
        return self.evidence.add(form, optional=optional, forced_read=forced_read, is_aligned=may_relift)

    def replace_by_guard(self, index: int) -> None:
        """Drop a form of the evidence that was added with an optional guard, and add the guard."""
        self.add_guard(self.evidence.drop(index))

    def settle(self, key: Hashable) -> None:
        """Log that a probe has examined a target: see `Evidence.is_settled`."""
        self.evidence.settle(key)

    def add_unforced_length(self, calls: tuple[Source, ...]) -> None:
        """Log a call site that reads an expert's number of rows, and whose outcome could not be forced."""
        self.evidence.add_unforced_length(calls)

    def set_num_experts(self, count: int) -> None:
        """Set the number of experts, once all of them are known."""
        self._num_experts = count

    def add_guard(self, guard: SizeGuard) -> None:
        """Restrict the proof to sizes at which a condition holds."""
        self._guards.append(guard)

    @contextlib.contextmanager
    def record_probe(self, name: str, again: str = "") -> Iterator[None]:
        """Record the run of a probe in the body of a `with` statement."""
        start, forms, guards = time.perf_counter(), len(self.evidence.forms), len(self._guards)
        refused = True
        try:
            yield
            refused = False
        finally:
            ms = (time.perf_counter() - start) * 1e3
            counts = len(self.evidence.forms) - forms, len(self._guards) - guards
            self._probe_runs.append(ProbeRun(name, ms, *counts, again, refused))

    def use_arguments(self, arguments: Arguments) -> None:
        """Use other arguments for all further captures."""
        self._arguments = arguments

    @contextlib.contextmanager
    def trying_arguments(self, arguments: Arguments) -> Iterator[None]:
        """Use other arguments within a `with` statement."""
        before, self._arguments = self._arguments, arguments
        try:
            yield
        finally:
            self._arguments = before

    def remake_evidence(self, arguments: Arguments) -> None:
        """Make all evidence again with other arguments, and use these for all further captures.

        Raises:
            Refused: a capture has no canonical form with these arguments.
        """
        self._arguments = arguments
        routings = [form.capture.routing.restart() for form in self.evidence.forms]
        sizes = self.evidence.sizes
        self.evidence.replace_forms(
            [self.capture_and_lift(*capture_args) for capture_args in zip(routings, sizes, strict=True)]
        )


__all__ = ["LiftOptions", "ProofState"]
