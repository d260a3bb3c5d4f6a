"""The state of a proof: captures with their canonical forms, and guards.

`prove` and the probes read a `ProofState` through its properties, and change it through its methods only. The file is
long because it has every change of this state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn

from ..capture.block_arguments import Arguments
from ..capture.capture_result import Capture
from ..capture.code_locations import Source
from ..capture.concolic import capture_block
from ..capture.concrete_routing import Routing
from ..capture.host_reads import Interventions
from ..capture.idle_tests import EmptinessTests
from ..capture.size_guards import SizeGuard, SizeLog
from ..errors import Refused
from ..inspection.proof_trace import ProbeRun
from .graph_nodes import line
from .lift.canonical_form import CanonicalForm, merge_experts
from .lift.distinct_choices import has_distinct_slots
from .lift.lifter import Lifter, LiftOptions
from .lift.repeated_choices import RepeatedChoiceRefused
from .lift.routed_nodes import find_padding_lines, has_rows_of_padding
from .lift.same_form import require_same_form
from .size_choice import SizeChoice
from .terms.node_semantics import find_conditions
from .terms.parameter_slices import find_siblings

_MIN_TOKENS = 29  # of the first capture
_MAX_GROWTH = 20  # nodes of a capture with forced outcomes, in captures without
ValueLines = tuple[tuple[Any, ...] | None, ...]  # of the expert index, and of the values of each group of experts


class ProofState:
    """The evidence of one proof.

    Args:
        max_experts: an upper bound on the number of experts, which decides the number of tokens of captures.
        size_restrictions: guards that restrict the proof to some sizes; at others the program may do something else.

    Attributes:
        siblings: numbers of sibling modules (see `find_siblings`).
        size_choice: chooses the sizes of captures.
        emptiness_tests: the tests for experts without tokens in all captures.
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
        self.siblings = find_siblings(block)
        self.size_choice = SizeChoice(self, first_tokens=max(_MIN_TOKENS, max_experts // 4))
        self.emptiness_tests = EmptinessTests()
        self._arguments = arguments
        self._first: Capture | None = None
        self._forms: list[CanonicalForm] = []
        self._sizes: list[dict[str, int]] = []
        self._guards: list[SizeGuard] = []
        self._expert_parameters: set[str] | None = None
        self._num_experts = 0
        self._weights_per_slot = False
        self._compares_floats = False
        self._comparisons: dict[SizeGuard, list[dict[str, int]]] = {}  # with the sizes of the captures
        self._settled: set[Hashable] = set()
        self._probe_runs: list[ProbeRun] = []
        self._unforced_lengths: set[tuple[Source, ...]] = set()

    # ------------------------------------------------------------------ read
    @property
    def arguments(self) -> Arguments:
        """The arguments of the next captures."""
        return self._arguments

    @property
    def first(self) -> Capture | None:
        """The capture that explains a refusal; None before the first capture."""
        return self._first

    @property
    def forms(self) -> tuple[CanonicalForm, ...]:
        """The canonical forms of all captures."""
        return tuple(self._forms)

    @property
    def reference(self) -> CanonicalForm:
        """The form that those of all other captures must equal."""
        return self._forms[0]

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """The sizes of all captures, in the order of `forms`."""
        return tuple(self._sizes)

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
        """FQNs of the experts' parameters, as far as captures have shown them."""
        return frozenset(self._expert_parameters or ())

    @property
    def probe_runs(self) -> tuple[ProbeRun, ...]:
        """The probes that ran, in order."""
        return tuple(self._probe_runs)

    @property
    def unforced_lengths(self) -> frozenset[tuple[Source, ...]]:
        """Call sites that read an expert's number of rows, and whose outcome could not be forced."""
        return frozenset(self._unforced_lengths)

    @property
    def seen_experts(self) -> set[int]:
        """Experts that ran in some capture."""
        return {e for form in self._forms for g in form.groups for e in g.ids}

    def seen_guards(self) -> list[SizeGuard]:
        """Return the comparisons of sizes that captures made."""
        return [g for form in self._forms for g in form.capture.sizes.guards]

    def side_guards(self) -> tuple[SizeGuard, ...]:
        """Return the comparisons of sizes whose outcome at the example's sizes differs from that in some capture, with
        the example's outcome."""
        example = self._arguments.sizes
        sides = dict.fromkeys(
            g if g.holds(example) else dataclasses.replace(g, value=not g.value) for g in self._comparisons
        )
        tried = [sizes for several in self._comparisons.values() for sizes in several]
        return tuple(g for g in sides if not all(g.holds(sizes) for sizes in tried))

    def other_options(self) -> Iterator[tuple[str, LiftOptions]]:
        """Yield other interpretations of the program with their names, to try if this one is refused."""
        if self._compares_floats and not self.options.symbolic:
            yield "comparisons as parts of activations", LiftOptions(symbolic=True)
        if any(not form.kept_slots.all() for form in self._forms):
            yield "the routed sum after all writes to it", LiftOptions(cut_preference="write")
            yield "the routed sum at any last node", LiftOptions(cut_preference="any")
        is_masked = any(t.example is not None and not t.is_single for t in self._arguments.tensors)
        if self._first is None or not (is_masked or has_rows_of_padding(self._first, self._arguments.width)):
            return
        if lines := find_padding_lines(self.block, self._first, self._arguments.width):
            yield "opaque lines that pad hidden states", LiftOptions(opaque_lines=lines)

    # --------------------------------------------------------------- capture
    def capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None, max_nodes: int = 0
    ) -> Capture:
        """Capture the block once.

        Args:
            interventions: outcomes that are forced.
            max_nodes: the largest number of nodes; 0 for any.

        Raises:
            Refused, CaptureError: the capture cannot be followed. Errors of the program pass through.
        """
        try:
            return self._capture(routing, sizes, interventions, max_nodes)
        except IndexError:
            if (fixed := self._arguments.with_fixed_integers()) is None:
                raise
            self._arguments = fixed
            return self._capture(routing, sizes, interventions, max_nodes)

    def _capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None, max_nodes: int
    ) -> Capture:
        args, kwargs = self._arguments.build_call(sizes, seed=routing.seed)
        if interventions and self._forms:  # a forced number may set how often a loop runs
            max_nodes = _MAX_GROWTH * len(self._forms[0].capture.nodes)
        log = SizeLog(sizes, tuple(self._arguments.fixed.values()))
        try:
            captured = capture_block(
                self.block, args, kwargs, routing, interventions=interventions, sizes=log, max_nodes=max_nodes,
                extra_values=self._arguments.extra_buffer_values,
            )  # fmt: skip
        finally:  # an assertion on a size tells which sizes the program supports
            log.unify_names(self._comparisons)
            for guard in log.guards:
                self._comparisons.setdefault(guard, []).append(sizes)
        if captured.tracer.refusals:
            raise captured.tracer.refusals[0]
        self._compares_floats = self._compares_floats or bool(find_conditions(captured.nodes))
        self.emptiness_tests.add(captured.tracer.emptiness_tests)
        return captured

    # ------------------------------------------------------------------ lift
    def lift(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None
    ) -> CanonicalForm:
        """Capture the block once, and lift the capture like the others."""
        return self.lift_captured(self.capture(routing, sizes, interventions))

    def lift_captured(self, captured: Capture) -> CanonicalForm:
        """Lift a capture with the options and expert parameters of the other captures."""
        return self.lift_with_hint(captured, merge_experts(self._forms) if self._forms else None)

    def lift_with_hint(
        self, captured: Capture, hint: CanonicalForm | None, align_to_last: bool = False
    ) -> CanonicalForm:
        """Lift a capture.

        Args:
            hint: the form of another capture, whose nodes are tried first.
            align_to_last: read values off the last nodes that fit.

        Raises:
            Refused: the capture has no canonical form.
        """
        options = dataclasses.replace(
            self.options, weights_per_slot=self._weights_per_slot, align_to_last=align_to_last
        )
        lifter = Lifter(self.block, captured, hint, options)
        form = lifter.lift(self._expert_parameters)
        self._expert_parameters = self._expert_parameters or lifter.experts
        return dataclasses.replace(form, groups=sorted(form.groups, key=lambda g: g.ids[0]))

    def lift_first(self, captured: Capture) -> CanonicalForm:
        """Lift the first capture.

        If a token may choose an expert twice, prefer weights from nodes with one value per slot: a gate per expert has
        one value for two slots of one expert.
        """
        form, refusal = None, None
        try:
            form = self.lift_with_hint(captured, None)
        except RepeatedChoiceRefused as why:
            refusal = why
        experts = {e for g in form.groups for e in g.ids} if form is not None else set[int]()
        if form is not None and has_distinct_slots(form, experts, follows_masks=False):
            return form
        self._weights_per_slot = True
        try:
            return self.lift_with_hint(captured, None)
        except Refused:
            self._weights_per_slot = False
        if form is None:
            assert refusal is not None
            raise refusal
        return form

    def lift_again(
        self, old: CanonicalForm, hint: CanonicalForm, reference: CanonicalForm, align_to_last: bool = False
    ) -> CanonicalForm:
        """Lift a capture once more, from the nodes of another form, or from the last ones that fit.

        Raises:
            Refused: the new form differs from `reference`.
        """
        new = require_same_form(reference, self.lift_with_hint(old.capture, hint, align_to_last))
        return dataclasses.replace(new, optional_guard=old.optional_guard)

    # ------------------------------------------------------------- agreement
    def require_same_form(self, form: CanonicalForm) -> CanonicalForm:
        """Return a form with its groups in the order of all captures. Raise `Refused` unless it agrees with theirs."""
        return require_same_form(self._forms[0], form)

    def reconcile_form(self, form: CanonicalForm) -> CanonicalForm:
        """Return a form with its groups in the order of all captures.

        If only the new capture drops slots, weights may have to be read from other nodes, which are zero for a dropped
        slot: then lift all captures from these nodes.

        Raises:
            Refused: the forms differ.
        """
        try:
            return require_same_form(self._forms[0], form)
        except Refused:
            if form.kept_slots.all():
                raise
            self._forms = [self.lift_again(one, form, form) for one in self._forms]
            return form

    def reconcile_evidence(self, index: int) -> None:
        """Require a capture of the evidence to agree with the first one, and store it with its groups in that order.

        Raises:
            Refused: the forms differ.
        """
        form = self._forms[index]
        aligned = self.reconcile_form(form)
        if self._forms[index] is form:  # else all captures were lifted again
            self._forms[index] = aligned

    def relift_all_from(self, form: CanonicalForm) -> None:
        """Lift all captures from the nodes of another form.

        Raises:
            Refused: some capture cannot be lifted from these nodes.
        """
        if have_same_lines(find_value_lines(form), find_value_lines(self._forms[0])):
            return
        relifted = [self.lift_again(one, form, form) for one in self._forms]
        if not all(have_same_lines(find_value_lines(one), find_value_lines(form)) for one in relifted):
            raise Refused(
                "the node that supplies a slot's routing weight depends on the routing",
                source=str(form.cut.meta["source"]),
            )
        self._forms = relifted

    # ---------------------------------------------------------------- change
    def set_first(self, captured: Capture) -> None:
        self._first = captured

    def set_num_experts(self, count: int) -> None:
        self._num_experts = count

    def add_evidence(
        self,
        form: CanonicalForm,
        sizes: dict[str, int],
        optional: SizeGuard | None = None,
        forced_read: Source | None = None,
    ) -> None:
        """Add a capture.

        Args:
            optional: the guard that replaces the capture if its form turns out to differ.
            forced_read: the branch of Python code that was forced.
        """
        self._forms.append(dataclasses.replace(form, optional_guard=optional, forced_read=forced_read))
        self._sizes.append(sizes)

    def drop_evidence(self, index: int) -> None:
        """Drop a capture that the proof can do without, and add the guard that replaces it."""
        guard = self._forms[index].optional_guard
        assert guard is not None
        self.add_guard(guard)
        del self._forms[index], self._sizes[index]

    def replace_forms(self, forms: list[CanonicalForm]) -> None:
        """Replace the form of each capture by another form of the same capture."""
        assert len(forms) == len(self._forms)
        self._forms = [*forms]

    def set_reference(self, index: int) -> None:
        """Put a capture first, so that all others must have its form."""
        self._forms.insert(0, self._forms.pop(index))
        self._sizes.insert(0, self._sizes.pop(index))

    def add_guard(self, guard: SizeGuard) -> None:
        """Restrict the proof to sizes at which a condition holds."""
        self._guards.append(guard)

    def settle(self, key: Hashable) -> None:
        """Record that a probe has examined the target `key`."""
        self._settled.add(key)

    def is_settled(self, key: Hashable) -> bool:
        return key in self._settled

    def add_unforced_length(self, calls: tuple[Source, ...]) -> None:
        """Record a call site that reads an expert's number of rows, and whose outcome could not be forced."""
        self._unforced_lengths.add(calls)

    @contextlib.contextmanager
    def record_probe(self, name: str, again: str = "") -> Iterator[None]:
        """Record the run of a probe in the body of a `with` statement."""
        start, captures, guards = time.perf_counter(), len(self._forms), len(self._guards)
        refused = True
        try:
            yield
            refused = False
        finally:
            ms = (time.perf_counter() - start) * 1e3
            counts = len(self._forms) - captures, len(self._guards) - guards
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

    def restart(self, arguments: Arguments, form: CanonicalForm) -> None:
        """Replace the only capture by one with other arguments, and use these for all further captures."""
        self._arguments, self._forms = arguments, [form]

    def capture_again(self, arguments: Arguments) -> None:
        """Repeat all captures with other arguments, and use these for all further captures.

        Raises:
            Refused: a capture has no canonical form with these arguments.
        """
        self._arguments = arguments
        routings = [form.capture.tracer.routing.restart() for form in self._forms]
        self._forms = [self.lift(routing, sizes) for routing, sizes in zip(routings, self._sizes, strict=True)]


def find_value_lines(form: CanonicalForm) -> ValueLines:
    """Return the lines that compute the expert index, and the values of each group of experts that the capture met."""
    chosen = tuple(map(line, form.expert_index.nodes))
    return chosen, *(tuple(line(n) for ref in g.values for n in ref.nodes) if g.ids else None for g in form.groups)


def have_same_lines(lines: ValueLines, others: ValueLines) -> bool:
    """Compare the lines of two captures, for the groups of experts that both have."""
    return all(p == q for p, q in zip(lines, others, strict=True) if p is not None and q is not None)


__all__ = ["LiftOptions", "ProofState", "ValueLines", "find_value_lines", "have_same_lines"]
