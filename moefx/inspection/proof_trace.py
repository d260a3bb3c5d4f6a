"""The steps of a proof, which `explain(trace=True)` prints: attempts, probes, and the near miss of a refusal."""

from __future__ import annotations

import dataclasses
import enum
import traceback
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]  # the folder that holds the package
_MAX_CUTS = 4  # printed
_MAX_INDICES = 4  # printed for each


@dataclasses.dataclass(frozen=True)
class AttemptRun:
    """One attempt to prove a block (see `compiler.proof_attempts`).

    Attributes:
        name: its interpretation of the arguments, the program and the sizes.
        failure: why it failed, in a line; "" if it was proven.
    """

    name: str
    ms: float
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class ProbeRun:
    """One run of a probe.

    Attributes:
        added_forms: number of forms that it added to the evidence, less those that it replaced by a guard.
        guards: number of guards that it added.
        again: why it ran again, or "".
        refused: the block was refused there.
    """

    name: str
    ms: float
    added_forms: int
    guards: int
    again: str = ""
    refused: bool = False


@dataclasses.dataclass(frozen=True)
class IndexAttempt:
    """An integer tensor that was tried as the expert index.

    Attributes:
        node: its operation and shape.
        source: the user's `file.py:line`, or "".
        explained: number of tokens whose experts it names.
        reason: why it is not the expert index.
    """

    node: str
    source: str
    explained: int
    reason: str


class LiftStep(enum.IntEnum):
    """The steps that lift a capture at a cut, in order."""

    SPLIT_ROWS = 0
    FIND_INDEX = 1
    ASSIGN_SLOTS = 2
    UNIFY_EXPERTS = 3


_STEP_NAMES = {
    LiftStep.SPLIT_ROWS: "rows as sums",
    LiftStep.FIND_INDEX: "expert index",
    LiftStep.ASSIGN_SLOTS: "value of each slot",
    LiftStep.UNIFY_EXPERTS: "one body for all experts",
}


@dataclasses.dataclass
class CutAttempt:
    """A node that was tried as the routed sum.

    Attributes:
        node: its operation and shape.
        source: the user's `file.py:line`, or "".
        reached: the step that runs, or failed.
        reason: why it is not the routed sum.
        indices: the integer tensors that were tried as its expert index, the closest first.
    """

    node: str
    source: str
    reached: LiftStep = LiftStep.SPLIT_ROWS
    reason: str = ""
    indices: tuple[IndexAttempt, ...] = ()

    def start_step(self, step: LiftStep) -> None:
        self.reached = step

    def add_indices(self, indices: tuple[IndexAttempt, ...]) -> None:
        self.indices += indices

    def fail(self, reason: str) -> None:
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class ProofTrace:
    """What happened in a proof.

    Attributes:
        probes: the probes that ran, in order.
        cuts: if a capture has no canonical form, the nodes that were tried as its routed sum.
        attempts: all attempts to prove the block, in order; the probes and cuts are those of one.
        raised_at: the functions of moefx that raised the refusal and its causes, such as
            "moefx/matching/lift/cut_lifter.py:162 in _split_rows"; the refusal first.
    """

    probes: tuple[ProbeRun, ...] = ()
    cuts: tuple[CutAttempt, ...] = ()
    attempts: tuple[AttemptRun, ...] = ()
    raised_at: tuple[str, ...] = ()

    def format_lines(self) -> list[str]:
        """Format tables of the attempts and probes, then the near miss: the cuts that came furthest."""
        raised = [f"{'because of' if i else 'refused at'} {place}" for i, place in enumerate(self.raised_at)]
        return [*_format_attempts(self.attempts), *_format_probes(self.probes), *raised, *_format_cuts(self.cuts)]


def locate_raises(error: BaseException | None) -> tuple[str, ...]:
    """Return where an error and its causes were raised: see `ProofTrace.raised_at`."""
    places: list[str] = []
    while error is not None:
        if frames := traceback.extract_tb(error.__traceback__):
            path = Path(frames[-1].filename)
            path = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
            places.append(f"{path.as_posix()}:{frames[-1].lineno} in {frames[-1].name}")
        error = error.__cause__
    return tuple(dict.fromkeys(places))


def _format_attempts(attempts: Sequence[AttemptRun]) -> list[str]:
    if not attempts:
        return []
    width = max(len("attempt"), *(len(attempt.name) for attempt in attempts))
    lines = [f"{'attempt':{width}}      ms  result"]
    for attempt in attempts:
        result = " ".join(attempt.failure.split()) or "proven"
        lines.append(f"{attempt.name:{width}} {attempt.ms:7.1f}  {result}")
    return lines


def _format_probes(probes: Sequence[ProbeRun]) -> list[str]:
    if not probes:
        return []
    width = max(len(probe.name) for probe in probes)
    lines = [f"{'probe':{width}}      ms  added forms  guards"]
    for probe in probes:
        note = "   refused" if probe.refused else f"   again: {probe.again}" if probe.again else ""
        lines.append(f"{probe.name:{width}} {probe.ms:7.1f}  {probe.added_forms:11}  {probe.guards:6}{note}")
    return lines


def _format_cuts(cuts: Sequence[CutAttempt]) -> list[str]:
    lines = []
    distinct = {(cut.node, cut.source, cut.reason): cut for cut in cuts}
    ordered_cuts = sorted(distinct.values(), key=lambda cut: -cut.reached)
    for cut in ordered_cuts[:_MAX_CUTS]:
        lines += [
            f"tried as the routed sum: {_format_node(cut)}",
            f"  failed at {_STEP_NAMES[cut.reached]}: {cut.reason}",
        ]
        for index in cut.indices[:_MAX_INDICES]:
            lines.append(f"  tried as the expert index: {_format_node(index)}: {index.reason}")
        if len(cut.indices) > _MAX_INDICES:
            lines.append(f"  and {len(cut.indices) - _MAX_INDICES} more integer tensors")
        if cut.reached is LiftStep.FIND_INDEX and not cut.indices:
            lines.append("  no integer tensor has entries for each token")
    if len(ordered_cuts) > _MAX_CUTS:
        lines.append(f"and {len(ordered_cuts) - _MAX_CUTS} more nodes")
    return lines


def _format_node(attempt: CutAttempt | IndexAttempt) -> str:
    return attempt.node + (f" ({attempt.source})" if attempt.source else "")


__all__ = ["AttemptRun", "CutAttempt", "IndexAttempt", "LiftStep", "ProbeRun", "ProofTrace", "locate_raises"]
