"""The planner's decision for `compile`, and its reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._plan import Plan
from ..util.unit_text import amount
from .architecture import Architecture
from .entries import Entry
from .local_platform import LocalPlatform
from .mesh_axes import AxisUse

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a rank that the planner decides by.

    Attributes:
        user_plan: the plan that leaves fields open.
        model: the model of this stage, None without experts, or the reason why the planner cannot read it.
        sequences: sequences of a micro-batch on this rank.
        tokens: tokens of a sequence.
        source: the origin of these two numbers, for readers.
        local: the platform of the ranks.
        stage, stages: this stage of the pipeline, and the number of stages.
    """

    user_plan: Plan
    model: Architecture | str | None
    sequences: int
    tokens: int
    source: str
    local: LocalPlatform
    stage: int = 0
    stages: int = 1

    @property
    def tokens_text(self) -> str:
        """`8192 tokens a rank in 2 sequences`"""
        sequences = f" in {self.sequences} sequences" if self.sequences > 1 else ""
        return f"{self.sequences * self.tokens} tokens a rank{sequences}"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One use of the mesh axes with one checkpoint policy.

    Attributes:
        entry: its estimate, for as many micro-batches as are in flight.
        lacking: bytes above the capacity; 0 or less if it fits.
    """

    use: AxisUse
    entry: Entry
    lacking: float

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch and of the work once a step."""
        return self.entry.seconds - (self.entry.layout.microbatches - 1) * self.entry.step["T_micro"]

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Candidates that fit by time, then the others by lacking memory."""
        return (1.0, self.lacking) if self.lacking > 0 else (0.0, self.seconds, self.entry.memory["M_gpu"])

    def __str__(self) -> str:
        return f"{self.use}, keep {self.entry.layout.kept!r}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decided plan and its reasons; `print` shows them.

    Attributes:
        plan: the plan without open fields. Only the dispatch may be open, which `compile` measures.
        facts: the facts of this rank's stage.
        candidates: those of this stage: the chosen one, then those that fit (fastest first), then the others.
        warning: "" if all is well.
    """

    plan: Plan
    facts: Facts
    candidates: tuple[Candidate, ...] = ()
    warning: str = ""

    @property
    def decided(self) -> dict[str, Any]:
        """The fields that the planner decided, with their values."""
        user_values, values = dataclasses.asdict(self.facts.user_plan), dataclasses.asdict(self.plan)
        return {
            name: value for name, value in values.items() if value not in (user_values[name], None) and name != "tokens"
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as values that JSON can hold."""
        return {
            "plan": dataclasses.asdict(self.plan), "decided": self.decided, "warning": self.warning,
            "platform": self.facts.local.platform.name, "why": self.facts.local.why,
            "candidates": [
                {"layout": str(t), "bytes": t.entry.memory["M_gpu"], "lacking": max(t.lacking, 0.0),
                 "seconds": t.seconds, "zero": t.entry.layout.zero}
                for t in self.candidates
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        facts, local = self.facts, self.facts.local
        lines = [f"planned     {', '.join(f'{name}={value!r}' for name, value in self.decided.items()) or 'as given'}"]
        if self.candidates:
            zero = self.candidates[0].entry.layout.zero
            spread = f"ZeRO-{zero}" + (", which is yours to do (fully_shard)" if zero else "")
            shared_axis = self.candidates[0].use.shared
            along = f", the same along {shared_axis!r}" if shared_axis else ""
            lines.append(f"  tokens    {facts.tokens_text}, {facts.source}{along}")
            lines.append(f"  states    16 bytes a parameter, Adam in mixed precision, {spread}")
            source = " as planned" if facts.user_plan.memory else ""
            lines.append(f"  memory    {amount(local.platform.memory_bytes, 'B')} a rank{source}")
            lines.append(f"  platform  {local.platform.name}, {local.why}")
        for head, candidate in zip(
            ("chosen", "others", *[""] * len(self.candidates)), self.candidates[:_SHOWN], strict=False
        ):
            times = f"{candidate.seconds / self.candidates[0].seconds:.2f} times as long"
            time = amount(candidate.seconds, "s") if local.is_known else times
            short = f", {amount(candidate.lacking, 'B')} too much" if candidate.lacking > 0 else ""
            lines.append(f"  {head:<10}{candidate}: {amount(candidate.entry.memory['M_gpu'], 'B')}{short}, {time}")
        return "\n".join([*lines, *([f"  warning   {self.warning}"] if self.warning else [])])
