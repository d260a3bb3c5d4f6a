"""What the planner decided for `compile`, and why."""

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
    """What a rank knows; all ranks of a mesh decide by those of all.

    Attributes:
        asked: the plan that leaves something to decide.
        model: of this stage. None: it has no experts; a text: why the planner cannot make it out.
        sequences, tokens: of a micro-batch of this rank; of a sequence.
        source: who says so.
        stage, stages: of a pipeline.
    """

    asked: Plan
    model: Architecture | str | None
    sequences: int
    tokens: int
    source: str
    here: LocalPlatform
    stage: int = 0
    stages: int = 1

    @property
    def tokens_text(self) -> str:
        """`8192 tokens a rank in 2 sequences`"""
        sequences = f" in {self.sequences} sequences" if self.sequences > 1 else ""
        return f"{self.sequences * self.tokens} tokens a rank{sequences}"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One use of the axes, and one policy.

    Attributes:
        entry: at as many micro-batches as are in flight.
        lacking: bytes.
    """

    use: AxisUse
    entry: Entry
    lacking: float

    @property
    def seconds(self) -> float:
        """Of one micro-batch, and of what comes once a step."""
        return self.entry.seconds - (self.entry.layout.microbatches - 1) * self.entry.step["T_micro"]

    @property
    def rank(self) -> tuple[float, ...]:
        """What fits by time; behind it the rest, by what is lacking."""
        return (1.0, self.lacking) if self.lacking > 0 else (0.0, self.seconds, self.entry.memory["M_gpu"])

    def __str__(self) -> str:
        return f"{self.use}, keep {self.entry.layout.kept!r}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was taken, and why; `print` it.

    Attributes:
        plan: nothing left to decide but how rows travel, which `compile` measures.
        facts: of this rank's stage, what it was decided by.
        tried: for this stage: first what was taken, then what fits, the fastest first, then what does not.
        warning: "" if all is well.
    """

    plan: Plan
    facts: Facts
    tried: tuple[Candidate, ...] = ()
    warning: str = ""

    @property
    def taken(self) -> dict[str, Any]:
        """The fields of the plan that were decided."""
        asked, made = dataclasses.asdict(self.facts.asked), dataclasses.asdict(self.plan)
        return {name: value for name, value in made.items() if value not in (asked[name], None) and name != "tokens"}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": dataclasses.asdict(self.plan), "taken": self.taken, "warning": self.warning,
            "platform": self.facts.here.platform.name, "why": self.facts.here.why,
            "tried": [
                {"what": str(t), "bytes": t.entry.memory["M_gpu"], "lacking": max(t.lacking, 0.0),
                 "seconds": t.seconds, "zero": t.entry.layout.zero}
                for t in self.tried
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        of, here = self.facts, self.facts.here
        lines = [f"planned     {', '.join(f'{name}={value!r}' for name, value in self.taken.items()) or 'as given'}"]
        if self.tried:
            zero = self.tried[0].entry.layout.zero
            spread = f"ZeRO-{zero}" + (", which is yours to do (fully_shard)" if zero else "")
            shared = self.tried[0].use.shared
            alike = f", the same along {shared!r}" if shared else ""
            lines.append(f"  tokens    {of.tokens_text}, {of.source}{alike}")
            lines.append(f"  states    16 bytes a parameter, Adam in mixed precision, {spread}")
            planned = " as planned" if of.asked.memory else ""
            lines.append(f"  memory    {amount(here.platform.capacity, 'B')} a rank{planned}")
            lines.append(f"  platform  {here.platform.name}, {here.why}")
        for head, each in zip(("taken", "instead", *[""] * len(self.tried)), self.tried[:_SHOWN], strict=False):
            times = f"{each.seconds / self.tried[0].seconds:.2f} times as long"
            shown = amount(each.seconds, "s") if here.is_known else times
            short = f", {amount(each.lacking, 'B')} too much" if each.lacking > 0 else ""
            lines.append(f"  {head:<10}{each}: {amount(each.entry.memory['M_gpu'], 'B')}{short}, {shown}")
        return "\n".join([*lines, *([f"  warning   {self.warning}"] if self.warning else [])])
