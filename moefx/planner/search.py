"""All layouts of a model on a number of ranks, ranked; and why the others are none (Piper section III.C)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from .._plan import Plan
from ..errors import InvalidPlan, UnknownArchitecture
from ..runtime.links import fastest
from .architecture import Architecture, whole_numbers
from .catalogue import model_of
from .layout import Layout
from .memory import MEMORY
from .platforms import Platform, platform_of
from .sheet import amount
from .simulation import Simulated, simulate
from .step import given, memory, seconds_of_ways, sheet_of

# What is kept and whether layers run again, the fastest first.
_POLICIES = (("h", False), ("x", False), ("h", True))
_STATES = ("M_params", "M_grads", "M_optimizer", "M_activations")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A layout that fits.

    Attributes:
        experts_first: ranks of an expert axis are next to each other, else replicas are (X-MoE appendix C.1).
        memory, step: results of the sheets, in bytes and seconds.
    """

    layout: Layout
    experts_first: bool
    memory: dict[str, float]
    step: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.step["T_step"]

    @property
    def mfu(self) -> float:
        return self.step["MFU"]

    def plan(self, **more: Any) -> Plan:
        """What `moefx.compile` takes, over a mesh with the axes "ep" and, where `ssmb` is on, "tp"."""
        spread: dict[str, Any] = {}
        if self.layout.ep > 1:
            placement = "ep_first" if self.experts_first else "dp_first"
            spread = dict(expert_axis="ep", dispatch=self.layout.way, placement=placement)
            if self.layout.ssmb:
                spread |= dict(expert_axis=("ep", "tp"), sequence_axis="tp")
        kept: Any = self.layout.kept
        return Plan(**(dict(checkpoint=kept) | spread | more))


@dataclasses.dataclass(frozen=True)
class Rejected:
    """Layouts that are none, of one kind."""

    what: str
    why: str


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Layouts that fit, the fastest first, and what was rejected."""

    model: Architecture
    platform: Platform
    num_ranks: int
    entries: tuple[Entry, ...]
    rejected: tuple[Rejected, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def table(self, most: int = 10) -> str:
        """The best entries, a line each."""
        head = "PP  TP  DP    EP   placed    SSMB  ZeRO  rows    kept    micro-batches  memory      step        MFU"
        lines = [head]
        for entry in self.entries[:most]:
            x = entry.layout
            kept = "inputs" if x.recompute else x.kept
            placed = "-" if x.ep == 1 else "EP first" if entry.experts_first else "DP first"
            lines.append(
                f"{x.pp:<4}{x.tp:<4}{x.dp:<6}{x.ep:<5}{placed:<10}{'yes' if x.ssmb else '-':<6}{x.zero:<6}"
                f"{x.way if x.ep > 1 else '-':<8}{kept:<8}{f'{x.microbatches} of {x.sequences}':<15}"
                f"{amount(entry.memory['M_gpu'], 'B'):<12}{amount(entry.seconds, 's'):<12}{entry.mfu:.1%}"
            )
        return "\n".join(lines)

    def explain(self, index: int = 0) -> str:
        """Formulas, numbers and results of an entry: its memory, then its time."""
        entry = self.entries[index]
        layout, platform = entry.layout, self.platform
        stage = 0 if not entry.memory["A_logits"] else layout.pp - 1
        bytes_of = MEMORY.shown("M_gpu", **layout.values(self.model, stage), M_fw=platform.overhead)
        values = given(self.model, layout, platform, entry.experts_first)
        return f"{bytes_of}\n\n{sheet_of(layout, platform, entry.experts_first).shown('MFU', **values)}"

    def __str__(self) -> str:
        return self.shown()

    def shown(self, most: int = 10) -> str:
        """What fits, a table of the best, and what was rejected and why."""
        lines = [
            f"{self.model.name} on {self.num_ranks} x {self.platform.device}: {len(self.entries)} layouts fit "
            f"{amount(self.platform.capacity, 'B')}"
        ]
        if self.entries:
            lines += ["", self.table(most)]
        lines += ["", "rejected"] + [f"  {rejected.what}: {rejected.why}" for rejected in self.rejected]
        return "\n".join(lines)

    def simulate(self, index: int = 0, *, skew: float = 0.0, seed: int = 0, stragglers: bool = True) -> Simulated:
        """A step of an entry as events, beside its formulas: see `planner.simulation.simulate`."""
        entry = self.entries[index]
        more: dict[str, Any] = dict(skew=skew, seed=seed, stragglers=stragglers)
        return simulate(self.model, entry.layout, self.platform, entry.experts_first, **more)


def search(
    model: Architecture, platform: Platform, num_ranks: int, *, batch: int = 1024, tokens: int = 4096,
    most_sequences: int = 8, fast_domain: int | None = None,
) -> Ranking:  # fmt: skip
    """Every layout under Piper's constraints 7 to 11, by the seconds of a step.

    Args:
        batch: sequences of a step, over all ranks.
        tokens: of a sequence.
        most_sequences: of a micro-batch.
        fast_domain: ranks that an expert axis may reach over; None: as the platform says, 0: any.

    Raises:
        InvalidPlan: sizes that cannot be meant.
    """
    whole_numbers(InvalidPlan, num_ranks=num_ranks, batch=batch, tokens=tokens)
    reach = platform.fast_domain if fast_domain is None else fast_domain
    rejected: dict[tuple[str, str], None] = {}
    short: dict[str, tuple[float, str]] = {}
    entries = []
    for layout in _layouts(model, platform, num_ranks, batch, tokens, most_sequences, rejected):
        placements = [first for first in (True, False) if first or 1 < layout.ep < layout.tp * layout.dp]
        near = [first for first in placements if not reach or layout.ep == 1 or _reach(layout, first) <= reach]
        if not near:
            rejected[f"EP={layout.ep}", f"crosses the fast domain of {reach} ranks (Piper eq. 10)"] = None
            continue
        ways = {first: _way(model, layout, platform, first) for first in near}
        for kept, recompute in _POLICIES:
            fitting = {}
            for way in dict.fromkeys(ways.values()):
                tried = dataclasses.replace(layout, way=way, kept=kept, recompute=recompute)
                fitting[way] = _fitting(model, tried, platform, short)
            placed: list[Entry] = []
            for first, way in ways.items():
                if (fits := fitting[way]) is not None:
                    values = given(model, fits[0], platform, first)
                    placed.append(Entry(fits[0], first, fits[1], sheet_of(fits[0], platform, first)(**values)))
            # the usual placement where the other one is no faster
            entries += placed if len({entry.seconds for entry in placed}) > 1 else placed[:1]
    there = {_region(entry.layout) for entry in entries}
    reasons = [
        Rejected(", ".join(what for what, same in rejected if same == why), why)
        for why in dict.fromkeys(why for _, why in rejected)
    ]
    reasons += [
        Rejected(region, f"does not fit: {amount(lacking, 'B')} too much at the least, most of it {term}")
        for region, (lacking, term) in short.items() if region not in there
    ]  # fmt: skip
    entries.sort(key=lambda entry: (entry.seconds, entry.memory["M_gpu"]))
    return Ranking(model, platform, num_ranks, tuple(entries), tuple(reasons))


def plan(model: Any, platform: str | Platform, world_size: int, **options: Any) -> Ranking:
    """Which layouts of a model fit a platform, and which is the fastest.

    Args:
        model: a name of the catalogue, an `Architecture`, or an nn.Module, on the meta device too (see `describe`).
        platform: a name ("frontier", "dgx-h100", "h200", "mi300x", "a100-40gb"), a platform file, or a `Platform`.
        world_size: GPUs.
        options: batch, tokens, most_sequences and fast_domain of `search`; example_inputs of a module.

    Raises:
        UnknownArchitecture, UnknownPlatform: no such model or platform; with the names that are near.
        InvalidPlan: sizes that cannot be meant.
    """
    if isinstance(model, nn.Module):
        from .describe import describe  # with capture and all passes

        described = describe(model, options.pop("example_inputs", None))
    else:
        described = model_of(model) if isinstance(model, str) else model
    if not isinstance(described, Architecture):
        kind = type(model).__name__
        raise UnknownArchitecture(f"moefx.plan takes the name of a model, a module or an Architecture, not {kind}")
    machine = platform_of(platform) if isinstance(platform, str) else platform
    return search(described, machine, world_size, **options)


def _layouts(
    model: Architecture, platform: Platform, num_ranks: int, batch: int, tokens: int, most: int,
    rejected: dict[tuple[str, str], None],
) -> Iterator[Layout]:  # fmt: skip
    """Ranks, experts and micro-batches, in every way that divides."""
    for pp in _divisors(num_ranks):
        if pp > model.num_layers:
            rejected[f"PP={pp}", f"more stages than the {model.num_layers} layers (Piper eq. 9)"] = None
            continue
        for tp in _divisors(num_ranks // pp):
            if tp > platform.node_size:
                rejected[f"TP={tp}", f"crosses the node of {platform.node_size} ranks"] = None
                continue
            if model.attention.num_heads % tp:
                rejected[f"TP={tp}", f"does not divide the {model.attention.num_heads} heads"] = None
                continue
            dp = num_ranks // pp // tp
            if batch % dp:
                rejected[f"DP={dp}", f"does not divide the batch of {batch} sequences"] = None
                continue
            sequences = [b for b in _divisors(batch // dp) if b <= most]
            for ep in _divisors(tp * dp):
                if model.num_experts % ep:
                    rejected[f"EP={ep}", f"does not divide the {model.num_experts} experts (Piper eq. 8)"] = None
                    continue
                for b in sequences:
                    for ssmb in (True, False) if tp > 1 and ep % tp == 0 else (False,):
                        yield Layout(
                            pp=pp, tp=tp, dp=dp, ep=ep, ssmb=ssmb, sequences=b, tokens=tokens,
                            microbatches=batch // dp // b,
                        )  # fmt: skip


def _reach(layout: Layout, experts_first: bool) -> int:
    """Ranks from the first to the last of an expert axis."""
    return layout.ep if experts_first else (layout.ep - 1) * layout.expert_replicas + 1


def _way(model: Architecture, layout: Layout, platform: Platform, experts_first: bool) -> Any:
    """Of rows, the fastest, as `Plan(dispatch="auto")` would take it."""
    return fastest(seconds_of_ways(model, layout, platform, experts_first)) if layout.ep > 1 else "flat"


def _fitting(
    model: Architecture, layout: Layout, platform: Platform, short: dict[str, tuple[float, str]]
) -> tuple[Layout, dict[str, float]] | None:
    """With the least ZeRO that fits, and its memory. Where none does, `short` keeps by region how little was lacking,
    and which term is the largest."""
    for zero in (1, 2, 3) if layout.dp > 1 else (0,):
        tried = dataclasses.replace(layout, zero=zero)
        found = memory(model, tried, platform)
        lacking, region = found["M_gpu"] - platform.capacity, _region(layout)
        if lacking <= 0:
            return tried, found
        if region not in short or lacking < short[region][0]:
            short[region] = lacking, max(_STATES, key=found.__getitem__)
    return None


def _region(layout: Layout) -> str:
    return f"PP={layout.pp} TP={layout.tp} EP={layout.ep}"


@functools.lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, number + 1) if number % i == 0)
