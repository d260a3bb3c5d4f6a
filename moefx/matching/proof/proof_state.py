"""The state of a proof: makes captures, and holds the evidence and the guards. `EvidenceAligner` lifts the captures.

`prove` reads a `ProofState` through its properties, and changes it through its methods only. Probes see less of it: see
`proof_view`.
"""

from __future__ import annotations

import contextlib
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
from ...inspection.proof_trace import ProbeRun
from ..lift.canonical_form import CanonicalForm
from ..lift.lift_options import LiftOptions
from ..terms.parameter_slices import find_siblings
from .evidence import Evidence
from .evidence_aligner import EvidenceAligner
from .size_choice import SizeChoice

_MIN_TOKENS = 29  # of the first capture
_MAX_GROWTH = 20  # a forced capture has at most 20 times the nodes of the reference


class ProofState:
    """The state of one proof. `prove` uses all of it, probes use the part in `ProofView`.

    Args:
        max_experts: an upper bound on the number of experts, which decides the number of tokens of captures.
        size_restrictions: comparisons of sizes whose outcome all captures must have; at other sizes the program may do
            something else.

    Attributes:
        evidence: the forms of all captures.
        aligner: lifts captures so that their forms can be compared.
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
        self.aligner = EvidenceAligner(block, self.evidence, self.options)
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
        return self.evidence.expert_parameters

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
        """Lift a capture like the others: see `EvidenceAligner.lift`."""
        return self.aligner.lift(captured, follows_evidence)

    def relift_evidence(self, form: CanonicalForm) -> None:
        """Lift all evidence from the nodes of another form: see `EvidenceAligner.relift_evidence`."""
        self.aligner.relift_evidence(form)

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
        form = self.aligner.align_form(form) if may_relift else form
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


__all__ = ["ProofState"]
