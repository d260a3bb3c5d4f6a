"""The error catalogue. Every message says what was seen, where in the user's source, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class MoefxError(Exception):
    """Base of everything that moefx raises on purpose."""


class NoMoEBlockFound(MoefxError):
    """`moefx.compile(strict=True)` rewrote nothing. The message lists what looks like a block and why not."""


class InvalidPlan(MoefxError, ValueError):
    """A `Plan` field has an invalid value, or does not fit the model or the mesh."""


class NoSuchPass(MoefxError, KeyError):
    """The named pass did not run on the block, so there is no graph after it."""

    __str__ = Exception.__str__  # a KeyError shows its text in quotes


class UnknownArchitecture(MoefxError, ValueError):
    """The planner has no model of that name, or cannot find a module's sizes."""


class UnknownPlatform(MoefxError, ValueError):
    """The planner has no platform of that name, or cannot read the platform file."""


class NothingFits(MoefxError, IndexError):
    """No layout fits, so a ranking has no entries. Names the layout that lacks the fewest bytes, and a change."""


class InvalidInput(MoefxError, ValueError):
    """Example inputs, or the inputs of a call, do not fit the model."""


class CaptureError(MoefxError):
    """A block could not be run on abstract tensors. Carries the user's source line."""


class Refused(MoefxError):
    """A block is not (provably) a token-choice mixture of experts.

    Attributes:
        reason: one sentence that says what was seen.
        culprits: names of the operations or parameters that prevent the rewrite.
        source: `file.py:line` of the user's code, or "".
        remedy: the change after which the block matches, or "".
    """

    def __init__(self, reason: str, *, culprits: tuple[str, ...] = (), source: str = "", remedy: str = ""):
        self.reason, self.culprits, self.source, self.remedy = reason, culprits, source, remedy
        where = f" ({source})" if source else ""
        what = f" [{', '.join(culprits)}]" if culprits else ""
        super().__init__(f"{reason}{what}{where}" + (f". {remedy}" if remedy else ""))


def summarize_error(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def refuse_own_bug(error: Exception, source: str) -> Refused:
    """Make a refusal of an error in moefx itself: the user's program need not fail for it."""
    remedy = "please report it, with the model if you can"
    return Refused(f"moefx itself failed on it ({summarize_error(error)})", source=source, remedy=remedy)


class AbsorbedModuleChanged(MoefxError, RuntimeError):
    """A submodule whose computation was absorbed into the rewritten block was replaced, hooked or parametrized."""


class NotRewritten(MoefxError, RuntimeError):
    """The rewrite does not hold for this call, and the block is spread over a mesh: no original is left to run."""


class RanksLost(MoefxError, RuntimeError):
    """The ranks of a mesh cannot go on together: one has died or stalled, or runs another program."""


class ExpertsOverwritten(MoefxError, RuntimeError):
    """A wrapper or a broadcast gave the experts of one rank to another rank of a model that is spread over a mesh."""


class DoubleBackward(MoefxError, RuntimeError):
    """The fused expert ops are once differentiable."""


class RecomputedChoice(MoefxError, RuntimeError):
    """A recomputation for the backward chose other experts than the forward did. Also torch's `CheckpointError`."""


class VerificationFailed(MoefxError, AssertionError):
    """The compiled model is not equivalent to its reference; the message holds the report."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """`"; did you mean a or b?"`, or "" if no name is near (see `difflib.get_close_matches`)."""
    import difflib  # not with every `import moefx`

    near = difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""
