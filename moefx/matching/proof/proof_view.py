"""`ProofView`: the part of a proof that probes read and change.

A probe is a function of a `ProofView`. It reads the evidence, captures the block in another way, and judges the result:
it adds a form that must agree with the others, adds a guard on sizes, or raises `Refused`::

    def vary_something(proof: ProofView) -> None:
        first = proof.evidence.reference
        form = proof.capture_and_lift(first.capture.routing.restart(), first.sizes, interventions)
        proof.add_form(form)  # raises Refused if the form differs

`ProofState` implements `ProofView`, and its `Evidence` implements `EvidenceView`. They document each method.
`forced_outcome.force_outcome` does these steps for a forced outcome, with a refusal that names the step.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from ...capture.arguments.block_arguments import Arguments
from ...capture.emptiness.idle_tests import EmptinessTests
from ...capture.environment.code_locations import Source
from ...capture.sizes.size_guards import SizeGuard
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.host_reads import Interventions
from ..lift.canonical_form import CanonicalForm
from ..terms.parameter_slices import Siblings
from .size_choice import SizeChoice


class EvidenceView(Protocol):
    """The results of the captures so far."""

    @property
    def forms(self) -> tuple[CanonicalForm, ...]:
        """The canonical forms of all captures."""
        ...

    @property
    def reference(self) -> CanonicalForm:
        """The first form, which the others equal."""
        ...

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """The sizes of all captures."""
        ...

    @property
    def seen_experts(self) -> set[int]:
        """The experts that ran in some capture."""
        ...

    @property
    def unforced_lengths(self) -> frozenset[tuple[Source, ...]]:
        """The call sites that read an expert's number of rows, and whose outcome could not be forced."""
        ...

    @property
    def emptiness_tests(self) -> EmptinessTests:
        """The places where Python tests which experts have tokens."""
        ...

    def seen_guards(self) -> list[SizeGuard]:
        """Return the comparisons of sizes that captures made."""
        ...

    def is_settled(self, key: Hashable) -> bool:
        """Return whether a probe has called `ProofView.settle` for a target."""
        ...

    def require_same_form(self, form: CanonicalForm) -> CanonicalForm:
        """Return a form with its groups in the order of the reference. Raise `Refused` if it differs."""
        ...


class ProofView(Protocol):
    """The steps that a probe may take. It refuses by raising `Refused`."""

    # -- read
    @property
    def evidence(self) -> EvidenceView:
        """The captures so far."""
        ...

    @property
    def block(self) -> nn.Module:
        """The block to prove."""
        ...

    @property
    def arguments(self) -> Arguments:
        """The arguments of the next captures."""
        ...

    @property
    def num_experts(self) -> int:
        """The number of experts; 0 until it is known."""
        ...

    @property
    def size_choice(self) -> SizeChoice:
        """Chooses the sizes of a capture."""
        ...

    # -- capture and lift
    def capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None, max_nodes: int = 0
    ) -> Capture:
        """Capture the block with a routing, at some sizes."""
        ...

    def lift(self, captured: Capture, follows_evidence: bool = True) -> CanonicalForm:
        """Lift a capture with the options and expert parameters of the other captures."""
        ...

    def capture_and_lift(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None
    ) -> CanonicalForm:
        """Capture the block, and lift the capture."""
        ...

    def trying_arguments(self, arguments: Arguments) -> AbstractContextManager[None]:
        """Use other arguments within a `with` statement."""
        ...

    # -- add a form, which must agree with the others
    def add_form(
        self,
        form: CanonicalForm,
        *,
        optional: SizeGuard | None = None,
        forced_read: Source | None = None,
        may_relift: bool = False,
    ) -> CanonicalForm:
        """Add a form to the evidence. Raises `Refused` if it differs from the others."""
        ...

    def relift_evidence(self, form: CanonicalForm) -> None:
        """Lift all evidence from the nodes of another form."""
        ...

    # -- add a guard
    def add_guard(self, guard: SizeGuard) -> None:
        """Restrict the proof to sizes at which a condition holds."""
        ...

    def replace_by_guard(self, index: int) -> None:
        """Drop a form that has an optional guard, and add the guard."""
        ...

    # -- log a verdict
    def settle(self, key: Hashable) -> None:
        """Log that a probe has examined a target."""
        ...

    def add_unforced_length(self, calls: tuple[Source, ...]) -> None:
        """Log a call site that reads an expert's number of rows, and whose outcome could not be forced."""
        ...

    # -- count the experts: for `show_all_experts` only
    @property
    def max_experts(self) -> int:
        """The largest number of experts to try."""
        ...

    @property
    def siblings(self) -> dict[str, Siblings]:
        """The submodules and parameters that differ in their number only, by the name of each."""
        ...

    @property
    def expert_parameters(self) -> frozenset[str]:
        """The FQNs of the experts' parameters; none without evidence."""
        ...

    def set_num_experts(self, count: int) -> None:
        """Set the number of experts, once all of them are known."""
        ...

    def remake_evidence(self, arguments: Arguments) -> None:
        """Make all evidence again with other arguments, and use these for all further captures."""
        ...


__all__ = ["EvidenceView", "ProofView"]
