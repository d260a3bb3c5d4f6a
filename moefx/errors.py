"""The error catalogue. Every message gives the reason, the user's source line, and the next step.

docs/errors.md lists all classes, each with its cause and its remedy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .inspection.proof_trace import ProofTrace


class MoefxError(Exception):
    """The base of all exceptions that moefx raises on purpose."""


class NoMoEBlockFound(MoefxError):
    """`moefx.compile(strict=True)` rewrote nothing. The message lists the refused blocks with reasons."""


class InvalidPlan(MoefxError, ValueError):
    """A `Plan` field has an invalid value, or does not fit the model or the mesh."""


class NoSuchPass(MoefxError, KeyError):
    """The named pass did not run on the block, so no graph stands after it."""

    __str__ = Exception.__str__  # a KeyError shows its text in quotes


class UnknownArchitecture(MoefxError, ValueError):
    """The planner does not know the model's name, or cannot find the sizes of a module."""


class UnknownPlatform(MoefxError, ValueError):
    """The planner does not know the platform's name, or cannot read the platform file."""


class NothingFits(MoefxError, IndexError):
    """No layout fits, so a ranking has no entries. The message names the layout closest to fitting, and a change."""


class InvalidInput(MoefxError, ValueError):
    """Example inputs, or the inputs of a call, do not fit the model."""


class InvalidCheckpoint(MoefxError, ValueError):
    """The files of a checkpoint do not fit the model, or a tensor cannot be written to such files."""


class CaptureError(MoefxError):
    """A block does not run on abstract tensors. Carries the user's source line."""


class Cause(enum.Enum):
    """The kind of a refusal. It decides what moefx tries next, so that the words of a refusal can change.

    Attributes:
        OTHER: no decision depends on this refusal's kind.
        NOT_ROUTED: no parameter is used for some tokens only.
        NOT_TOGETHER: no single tensor sums the experts' results.
        UNEXPLAINED_INDEX: no integer tensor says which experts the tokens selected.
        FOREIGN_ROW: an output row depends on more than its own input row.
        SINGLE_ELEMENTS: the experts move or pick single elements of a row.
        REPEATED_CHOICE: a token that selects an expert twice does not receive the sum over both slots.
        UNEXPLAINED_DROPS: neither a drop rule nor a mask says which slots are dropped.
        MIXED_POSITIONS: the experts compute with several positions of a sequence at once.
        CONVOLUTIONS: the experts are convolutions over neighbouring tokens.
        NO_SIZES: no sizes for further captures satisfy the restrictions of the attempt.
        FEW_TOKENS: a graph's inputs have one token or none, so sizes do not identify the token dims.
    """

    OTHER = enum.auto()
    NOT_ROUTED = enum.auto()
    NOT_TOGETHER = enum.auto()
    UNEXPLAINED_INDEX = enum.auto()
    FOREIGN_ROW = enum.auto()
    SINGLE_ELEMENTS = enum.auto()
    REPEATED_CHOICE = enum.auto()
    UNEXPLAINED_DROPS = enum.auto()
    MIXED_POSITIONS = enum.auto()
    CONVOLUTIONS = enum.auto()
    NO_SIZES = enum.auto()
    FEW_TOKENS = enum.auto()


class Refused(MoefxError):
    """A block is not (provably) a token-choice mixture of experts.

    Attributes:
        reason: one sentence with the cause.
        culprits: names of the operations or parameters that prevent the rewrite.
        source: `file.py:line` of the user's code, or "".
        remedy: the change after which the block matches, or "".
        cause: the kind of the refusal, for code. The message does not show it.
        trace: the steps of the proof up to here; None if there was no proof.
    """

    trace: ProofTrace | None = None

    def __init__(
        self,
        reason: str,
        *,
        culprits: tuple[str, ...] = (),
        source: str = "",
        remedy: str = "",
        cause: Cause = Cause.OTHER,
    ):
        self.reason, self.culprits, self.source, self.remedy, self.cause = reason, culprits, source, remedy, cause
        where = f" ({source})" if source else ""
        names = f" [{', '.join(culprits)}]" if culprits else ""
        super().__init__(f"{reason}{names}{where}" + (f". {remedy}" if remedy else ""))

    def replace(self, *, source: str, remedy: str) -> Refused:
        """Return a copy with another source line and remedy."""
        refusal = Refused(self.reason, culprits=self.culprits, source=source, remedy=remedy, cause=self.cause)
        refusal.trace = self.trace
        return refusal


def summarize_error(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def refuse_own_bug(error: Exception, source: str) -> Refused:
    """Turn an error in moefx into a refusal: the user's program runs on without the rewrite."""
    remedy = "please report it, with the model if you can"
    return Refused(f"moefx itself failed on it ({summarize_error(error)})", source=source, remedy=remedy)


class CompileTimeout(MoefxError, TimeoutError):
    """Another thread has compiled for ten minutes, and only one compiles at a time."""


class AbsorbedModuleChanged(MoefxError, RuntimeError):
    """A submodule that is part of the rewritten block was replaced, hooked, parametrized or called; or a call failed
    because another part was replaced, and may have had effects before."""


class NotRewritten(MoefxError, RuntimeError):
    """The rewrite does not hold for this call, and the block is spread over a mesh, so it has no original to run."""


class RanksLost(MoefxError, RuntimeError):
    """The ranks of a mesh cannot continue together: one died, stalled, or runs another program."""


class ExpertsOverwritten(MoefxError, RuntimeError):
    """A wrapper or a broadcast copied the experts of one rank to another rank of a model that is spread over a mesh."""


class DoubleBackward(MoefxError, RuntimeError):
    """A second derivative of the fused expert ops was requested; they have only the first."""


class RecomputedChoice(MoefxError, RuntimeError):
    """A recomputation for the backward selected other experts than the forward. Also torch's `CheckpointError`."""


class VerificationFailed(MoefxError, AssertionError):
    """The compiled model is not equivalent to its reference; the message holds the report."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `"; did you mean a or b?"`, or "" if no name is close (see `difflib.get_close_matches`)."""
    import difflib  # not with every `import moefx`

    near = difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""
