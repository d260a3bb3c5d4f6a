"""What a probe may do: the part of a proof that probes see.

A probe is a function of a `ProofView`. It reads the evidence, captures the block in another way, and judges the result:
it adds a form that must agree with the others, adds a guard on sizes, or raises `Refused`::

    def vary_something(proof: ProofView) -> None:
        first = proof.evidence.reference
        form = proof.capture_and_lift(first.capture.routing.restart(), first.sizes, interventions)
        proof.add_form(form)  # raises Refused if the form differs

`ProofState` implements both protocols, and documents each method. `forced_outcome.force_outcome` does these steps for a
forced outcome, with a refusal that names the step.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from ...capture.arguments.block_arguments import Arguments
from ...capture.capture_result import Capture
from ...capture.code_locations import Source
from ...capture.emptiness.idle_tests import EmptinessTests
from ...capture.sizes.size_guards import SizeGuard
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.host_reads import Interventions
from ..lift.canonical_form import CanonicalForm
from ..proof.size_choice import SizeChoice
from ..terms.parameter_slices import Siblings

# ruff: noqa: E704
# fmt: off


class EvidenceView(Protocol):
    """What the captures so far have shown."""

    @property
    def forms(self) -> tuple[CanonicalForm, ...]: ...  # of all captures
    @property
    def reference(self) -> CanonicalForm: ...  # the first form, which the others equal
    @property
    def sizes(self) -> tuple[dict[str, int], ...]: ...  # of all captures
    @property
    def seen_experts(self) -> set[int]: ...  # that ran in some capture
    @property
    def unforced_lengths(self) -> frozenset[tuple[Source, ...]]: ...  # see `ProofView.add_unforced_length`
    @property
    def emptiness_tests(self) -> EmptinessTests: ...  # where Python tests which experts have tokens
    def seen_guards(self) -> list[SizeGuard]: ...  # the comparisons of sizes
    def is_settled(self, key: Hashable) -> bool: ...  # whether a probe has called `settle` for it
    def require_same_form(self, form: CanonicalForm) -> CanonicalForm: ...  # compare, and do not add


class ProofView(Protocol):
    """What a probe may do. It refuses by raising `Refused`."""

    # -- read
    @property
    def evidence(self) -> EvidenceView: ...
    @property
    def block(self) -> nn.Module: ...
    @property
    def arguments(self) -> Arguments: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def size_choice(self) -> SizeChoice: ...  # chooses the sizes of a capture

    # -- capture and lift
    def capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None, max_nodes: int = 0
    ) -> Capture: ...
    def lift(self, captured: Capture, follows_evidence: bool = True) -> CanonicalForm: ...
    def capture_and_lift(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None
    ) -> CanonicalForm: ...
    def trying_arguments(self, arguments: Arguments) -> AbstractContextManager[None]: ...

    # -- add a form, which must agree with the others
    def add_form(
        self, form: CanonicalForm, *, optional: SizeGuard | None = None, forced_read: Source | None = None,
        may_relift: bool = False,
    ) -> CanonicalForm: ...
    def relift_evidence(self, form: CanonicalForm) -> None: ...  # read all forms from the nodes of this one

    # -- add a guard
    def add_guard(self, guard: SizeGuard) -> None: ...
    def replace_by_guard(self, index: int) -> None: ...  # drop a form that has an optional guard

    # -- log a verdict
    def settle(self, key: Hashable) -> None: ...  # this target is examined
    def add_unforced_length(self, calls: tuple[Source, ...]) -> None: ...  # this outcome could not be forced

    # -- count the experts: for `show_all_experts` only
    @property
    def max_experts(self) -> int: ...
    @property
    def siblings(self) -> dict[str, Siblings]: ...
    @property
    def expert_parameters(self) -> frozenset[str]: ...
    def set_num_experts(self, count: int) -> None: ...
    def remake_evidence(self, arguments: Arguments) -> None: ...


# fmt: on
__all__ = ["EvidenceView", "ProofView"]
