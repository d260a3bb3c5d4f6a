"""Force an outcome in a capture, and judge the result: evidence, a guard, or a refusal.

This is the verdict of the probes that force outcomes.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from ...capture.environment.code_locations import Source, is_internal_error, is_raised_by_program
from ...capture.sizes.symbolic_sizes import peek_value
from ...capture.tracing.capture_result import Capture, LimitedOutcome
from ...capture.tracing.host_reads import Interventions
from ...errors import MoefxError, Refused

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

DECIDE_OUTSIDE = (
    "test an attribute that is set outside of forward, such as `if self.is_warming_up`, and compile the model in its "
    "final state; calls in another state run the original"
)
_MASK_SLOTS = "to drop tokens, multiply the routing weights by a mask over all slots: weights * (counts <= limit)[ids]"
ASK_ROWS = "to skip an expert without tokens, test its number of rows: if rows.shape[0] == 0"
READ_NO_TABLE = (
    "compute with the buffer: ids = self.table[ids] instead of self.experts[int(self.table[e])]; or keep the numbers "
    "in a Python list, as calls after a change of the list compile again"
)
_REPEATS = 3  # force a read this many times as often as the capture had it


class OutcomeKind(enum.Enum):
    """What decides an outcome, in words for the refusal. Python reads all of them but `OP`."""

    VALUE = "a value that Python reads from a tensor"
    COUNT = "a token count that Python reads from a tensor"
    LOAD = "the load of an expert that Python reads from a tensor"
    ZERO_SUM = "a test whether an expert's rows or weights sum to zero"
    BUFFER = "the buffer"
    BUFFER_NUMBER = "a number that Python reads from the buffer"
    OP = ""


@dataclasses.dataclass(frozen=True)
class ForcedStep:
    """The step of the program whose outcome is forced.

    Attributes:
        detail: words that follow those of the kind: the names of the buffers, or what the op computes.
    """

    kind: OutcomeKind
    source: Source
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.detail}".strip()


def force_outcome(
    proof: ProofView,
    step: ForcedStep,
    interventions: Interventions,
    base: Capture | None = None,
    is_safe: bool = True,
) -> bool:
    """Capture again with forced outcomes, and judge the result.

    A form that agrees with all captures becomes evidence. With another form, the block is refused, unless the
    repeated capture has an optional guard: then the guard replaces it. If the program raises an error, the original
    would raise it, too.

    Args:
        base: the capture to repeat; the first one if None. If the proof has dropped it, see `find_capture`.
        is_safe: the forced outcomes can occur together, so any error of the run is the original's, too. Otherwise
            only one of two masks that are always equal may have been forced. An error that torch raises then refuses
            the block, and only an error that the program itself raises is the original's.

    Returns:
        Whether the program ran to its end.

    Raises:
        Refused: the outcome changes the form, or nothing was forced.
    """
    at = find_capture(proof, base, interventions)
    if at is None:  # a guard excludes calls like it
        return True
    form = proof.evidence.forms[at]
    capture, optional = form.capture, form.optional_guard
    try:
        forced = proof.capture_and_lift(
            capture.routing.restart(), form.sizes, {**capture.interventions, **interventions}
        )
        if not _has_forced(forced.capture, interventions):
            raise refuse_change(step)
        forced_read = step.source if step.kind is not OutcomeKind.OP else None
        proof.add_form(forced, optional=optional, forced_read=forced_read)
    except MoefxError as refusal:
        if optional is None:
            raise refuse_change(step) from refusal
        proof.replace_by_guard(at)
        return True
    except Exception as error:
        if is_internal_error(error):
            raise
        if is_safe or is_raised_by_program(error):
            return False
        raise refuse_change(step) from error
    return True


def repeat_outcome(base: Capture, calls: tuple[Source, ...], value: Any) -> Any:
    """Build the forced outcome of a read.

    Force a boolean at the next N reads only, N = 3 * (reads in the capture + 1), and only while it compares with the
    same numbers. Otherwise a loop that waits for the outcome to change never ends.
    """
    if type(value) is not bool:
        return value
    reads = [read for read in base.reads if read.call_stack == calls]
    compared = frozenset(peek_value(read.comparison[1]) for read in reads if read.comparison is not None)
    return LimitedOutcome(value, _REPEATS * (len(reads) + 1), compared)


def find_capture(proof: ProofView, base: Capture | None, interventions: Interventions) -> int | None:
    """Return the index of a capture in the evidence, and 0 without a capture.

    If the proof has dropped the capture, return another one with something to force, or None if there is none.
    """
    indices = range(len(proof.evidence.forms))
    if base is None:
        return 0
    if (at := next((i for i in indices if proof.evidence.forms[i].capture is base), None)) is not None:
        return at
    return next((i for i in indices if _can_force(proof.evidence.forms[i].capture, interventions)), None)


def _can_force(capture: Capture, interventions: Interventions) -> bool:
    """Return whether a capture has one of the outcomes to force: a read of Python, or a decision."""
    sites = {(n.meta["source"], str(n.target)) for n in capture.nodes}
    is_at_site = any(key[:2] in sites for key in interventions if isinstance(key, tuple))
    return is_at_site or _reads_any(capture, interventions)


def _has_forced(capture: Capture, interventions: Interventions) -> bool:
    """Return whether a capture has one of these forced outcomes, not only earlier ones of the capture it repeats.

    An outcome is that of an input, an op or a read of Python.
    """
    return (
        any(isinstance(key, int) for key in interventions)
        or any(n.meta.get("forced") in interventions for n in capture.nodes)
        or _reads_any(capture, interventions)
    )


def _reads_any(capture: Capture, interventions: Interventions) -> bool:
    """Return whether Python reads one of the values to force in a capture."""
    return any(read.call_stack in interventions for read in capture.reads)


_REMEDIES = {
    OutcomeKind.COUNT: ASK_ROWS,
    OutcomeKind.ZERO_SUM: ASK_ROWS,
    OutcomeKind.BUFFER: DECIDE_OUTSIDE,
    OutcomeKind.BUFFER_NUMBER: READ_NO_TABLE,
    OutcomeKind.LOAD: (f"compute the same for each token, however many tokens the expert has; {_MASK_SLOTS}"),
}


def refuse_limit(source: Source, skips_few: bool = False) -> Refused:
    """Build the refusal of a block that skips experts which have tokens, by a comparison of their number with a limit.

    Args:
        source: the comparison.
        skips_few: the experts with fewer tokens than the limit are skipped, so that a few tokens select nothing. A
            mask does the same, and is refused, too.
    """
    return Refused(
        f"the number of tokens that chose an expert decides whether it runs: {source.text}",
        source=str(source),
        remedy="run every expert that has tokens" + ("" if skips_few else f"; {_MASK_SLOTS}"),
    )


def refuse_change(step: ForcedStep) -> Refused:
    """Build the refusal of a block whose form depends on the outcome of a step."""
    return Refused(
        f"the formula depends on {step}: {step.source.text}",
        source=str(step.source),
        remedy=_REMEDIES.get(step.kind, "compute the same formula for all tokens, whatever this value is"),
    )
