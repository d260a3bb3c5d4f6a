"""Force an outcome in a capture, and judge what comes of it: evidence, a guard, or a refusal.

This is the verdict of the probes that force outcomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...capture.captured import Capture, Often
from ...capture.sizes import value_of
from ...capture.source import Source, is_users_own
from ...capture.tracer import Flips
from ...errors import Refused

if TYPE_CHECKING:
    from ..proof_state import ProofState

DECIDE_OUTSIDE = (
    "decide it by an attribute that is set outside of forward, as in if self.is_warming_up, and compile the model as "
    "it is after that; other calls run the original"
)
ASK_ROWS = "to skip an expert without tokens, ask for its rows: if rows.shape[0] == 0"
READ = "a value read from a tensor"
COUNT = "a count of tokens read from a tensor"
BUFFER = "the buffer"
LIMIT = "the number of tokens of an expert read from a tensor"
ZERO = "whether a sum of an expert's rows or weights is zero"
_REPEATS = 3  # times as often as a capture met a read it has another outcome


def force_outcome(
    state: ProofState, source: Source, flips: Flips, what: str, taken: Capture | None = None, is_safe: bool = True
) -> bool:
    """Have the program of a capture, the first one's or another's, go the other way; from here on that is one of the
    captures that must agree. An error there, as a check for NaN ends in, would be one in the original, too; unless
    `is_safe`, only one that the program raises itself: of two masks that are equal in it one alone may have been
    forced. Returns whether the program came to its end."""
    at = find_capture(state, taken)
    tracer, sizes, optional = state.forms[at].capture.tracer, state.sizes[at], state.forms[at].optional
    try:
        forced = state.lift(tracer.routing.again(), sizes, {**tracer.flips, **flips})
        state.require_same_form(forced)
    except Refused as why:
        if optional is None:
            raise refuse_change(source, what) from why
        state.drop_evidence(at)
        return True
    except Exception as error:
        if is_safe or is_users_own(error):
            return False
        raise refuse_change(source, what) from error
    is_read = what in (READ, COUNT, ZERO, LIMIT) or what.startswith(BUFFER)
    state.add_evidence(forced, sizes, optional, source if is_read else None)
    return True


def repeat_outcome(taken: Capture, calls: tuple[Source, ...], value: Any) -> Any:
    """A value for a read to come out as. A boolean does so a few times as often as it was met in a capture, and where
    it compares what it compared there: a loop may ask until it is another."""
    if type(value) is not bool:
        return value
    met = [read for read in taken.reads if read.calls == calls]
    others = frozenset(value_of(read.asked[1]) for read in met if read.asked is not None)
    return Often(value, _REPEATS * len(met) + _REPEATS, others)


def find_capture(state: ProofState, taken: Capture | None) -> int:
    """Of a capture among the state's; the first one's where it is not there."""
    return next((i for i, one in enumerate(state.forms) if one.capture is taken), 0)


def refuse_change(source: Source, what: str) -> Refused:
    remedies = {
        COUNT: ASK_ROWS,
        ZERO: ASK_ROWS,
        LIMIT: "give each of its tokens the same, however many they are; drop tokens by a mask over all choices, as "
        "in weights * (counts <= limit)[ids]",
    }
    return Refused(
        f"{what} changes what is computed: {source.text}",
        source=str(source),
        remedy=DECIDE_OUTSIDE
        if what.startswith(BUFFER)
        else remedies.get(what, "moefx needs one formula for all tokens"),
    )
