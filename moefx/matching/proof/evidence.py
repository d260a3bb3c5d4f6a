"""The evidence of a proof: the canonical forms of its captures, and a log of the program's behaviour in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from ...capture.emptiness.idle_tests import EmptinessTests
from ...capture.environment.code_locations import Source
from ...capture.sizes.size_guards import SizeGuard, SizeLog
from ...capture.tracing.capture_result import Capture
from ..facts.graph_nodes import line
from ..lift.canonical_form import CanonicalForm
from ..lift.same_form import require_same_form
from ..terms.node_semantics import find_conditions

ValueLines = tuple[tuple[Any, ...] | None, ...]  # of the expert index, and of the values of each group of experts


class Evidence:
    """The canonical forms of captures, and a log of the program's behaviour in all captures.

    All forms agree: `add` raises `Refused` for a form that differs from the reference. Only at its start a proof stores
    forms as they come, to choose the reference among them:

    1. `postpone_comparison` begins.
    2. `add` stores the forms of the first captures, and `set_reference` moves one to the front.
    3. `EvidenceAligner.align_evidence` compares all with that one, and calls `mark_aligned`.

    Attributes:
        emptiness_tests: the tests for experts without tokens in all captures.
    """

    def __init__(self) -> None:
        self.emptiness_tests = EmptinessTests()
        self._diagnosed: Capture | None = None
        self._forms: list[CanonicalForm] = []
        self._compares_forms = True
        self._comparisons: dict[SizeGuard, list[dict[str, int]]] = {}  # with the sizes of the captures
        self._compares_floats = False
        self._unforced_lengths: set[tuple[Source, ...]] = set()
        self._settled: set[Hashable] = set()

    # ------------------------------------------------------------------ read
    @property
    def diagnosed_capture(self) -> Capture | None:
        """The capture in which the cause of a refusal is looked for; None before the first capture."""
        return self._diagnosed

    @property
    def forms(self) -> tuple[CanonicalForm, ...]:
        """The canonical forms of all captures."""
        return tuple(self._forms)

    @property
    def reference(self) -> CanonicalForm:
        """The form that those of all other captures must equal."""
        return self._forms[0]

    @property
    def expert_parameters(self) -> frozenset[str]:
        """FQNs of the experts' parameters; none before the first form."""
        return self._forms[0].expert_parameters if self._forms else frozenset()

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """The sizes of all captures, in the order of `forms`."""
        return tuple(form.sizes for form in self._forms)

    @property
    def seen_experts(self) -> set[int]:
        """Experts that ran in some capture."""
        return {e for form in self._forms for g in form.groups for e in g.ids}

    @property
    def compares_floats(self) -> bool:
        """Whether some capture compares floats."""
        return self._compares_floats

    @property
    def drops_slots(self) -> bool:
        """Whether some capture drops a slot."""
        return any(not form.kept_slots.all() for form in self._forms)

    @property
    def unforced_lengths(self) -> frozenset[tuple[Source, ...]]:
        """Call sites that read an expert's number of rows, and whose outcome could not be forced."""
        return frozenset(self._unforced_lengths)

    def seen_guards(self) -> list[SizeGuard]:
        """Return the comparisons of sizes that captures made."""
        return [g for form in self._forms for g in form.capture.sizes.guards]

    def list_comparisons_unlike(self, example: dict[str, int]) -> tuple[SizeGuard, ...]:
        """Return the comparisons of sizes that some capture decided otherwise than the example, with the example's
        outcome."""
        outcomes = dict.fromkeys(
            g if g.holds(example) else dataclasses.replace(g, value=not g.value) for g in self._comparisons
        )
        tried_sizes = [sizes for sizes_of_outcome in self._comparisons.values() for sizes in sizes_of_outcome]
        return tuple(g for g in outcomes if not all(g.holds(sizes) for sizes in tried_sizes))

    def require_same_form(self, form: CanonicalForm) -> CanonicalForm:
        """Return a form with its groups in the order of all captures. Raise `Refused` unless it agrees with theirs."""
        return require_same_form(self._forms[0], form)

    def is_settled(self, key: Hashable) -> bool:
        """Return whether `settle` has logged this target."""
        return key in self._settled

    # ----------------------------------------------------------------- forms
    def add(
        self,
        form: CanonicalForm,
        *,
        optional: SizeGuard | None = None,
        forced_read: Source | None = None,
        is_aligned: bool = False,
    ) -> CanonicalForm:
        """Append the form of a capture.

        The form must agree with the reference, if there is one, and is stored with its groups in that order. If it
        differs, the evidence is unchanged. Between `postpone_comparison` and `mark_aligned`, store it as it is.

        Args:
            optional: the guard that replaces the capture if its form turns out to differ.
            forced_read: the branch of Python code that was forced.
            is_aligned: `EvidenceAligner.align_form` has returned this form, perhaps after it lifted all others again.

        Returns:
            The form as it is stored.

        Raises:
            Refused: the form differs from the reference.
        """
        if self._compares_forms and self._forms and not is_aligned:
            form = self.require_same_form(form)
        self._forms.append(dataclasses.replace(form, optional_guard=optional, forced_read=forced_read))
        return self._forms[-1]

    def postpone_comparison(self) -> None:
        """Let `add` store forms as they come. `EvidenceAligner.align_evidence` compares them later."""
        self._compares_forms = False

    def mark_aligned(self) -> None:
        """Log that all forms agree, with their groups in one order. From now on `add` compares each new one."""
        self._compares_forms = True

    def replace_forms(self, forms: list[CanonicalForm]) -> None:
        """Replace the form of each capture by another form of the same capture, or of one with the same sizes.

        Keep their number and order. If the old forms agree, the new ones must agree, too.
        """
        assert len(forms) == len(self._forms)
        self._forms = [*forms]

    def set_reference(self, index: int) -> None:
        """Move a form to the front, before `EvidenceAligner.align_evidence` compares all others with it."""
        assert not self._compares_forms
        self._forms.insert(0, self._forms.pop(index))

    def drop(self, index: int) -> SizeGuard:
        """Drop a form that was added with an optional guard, and return that guard, which must join the proof's."""
        guard = self._forms[index].optional_guard
        assert guard is not None
        del self._forms[index]
        return guard

    # ------------------------------------------------------------------- log
    def set_diagnosed_capture(self, captured: Capture) -> None:
        """Set the capture in which the cause of a refusal is looked for, once there is one. It needs no form."""
        self._diagnosed = captured

    def log_capture(self, captured: Capture) -> None:
        """Log the program's comparisons and emptiness tests in a capture, whether or not it gets a form."""
        self._compares_floats = self._compares_floats or bool(find_conditions(captured.nodes))
        self.emptiness_tests.add(captured.emptiness_tests)

    def log_comparisons(self, log: SizeLog, sizes: dict[str, int]) -> None:
        """Log the comparisons of sizes in a capture, which may have failed."""
        log.unify_names(self._comparisons)
        for guard in log.guards:
            self._comparisons.setdefault(guard, []).append(sizes)

    def add_unforced_length(self, calls: tuple[Source, ...]) -> None:
        """Log a call site that reads an expert's number of rows, and whose outcome could not be forced."""
        self._unforced_lengths.add(calls)

    def settle(self, key: Hashable) -> None:
        """Log that a probe has examined the target `key`: it skips the target in its later runs."""
        self._settled.add(key)


def find_value_lines(form: CanonicalForm) -> ValueLines:
    """Return the lines that compute the expert index, and the values of each group of experts that ran."""
    chosen = tuple(map(line, form.expert_index.nodes))
    return chosen, *(tuple(line(n) for ref in g.values for n in ref.nodes) if g.ids else None for g in form.groups)


def have_same_lines(lines: ValueLines, others: ValueLines) -> bool:
    """Compare the lines of two captures, for the groups of experts that both have."""
    return all(p == q for p, q in zip(lines, others, strict=True) if p is not None and q is not None)


__all__ = ["Evidence", "ValueLines", "find_value_lines", "have_same_lines"]
