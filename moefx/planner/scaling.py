"""How a step scales with GPUs, and why more of them can take less than their part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..util.unit_text import amount
from .breakdown import LABELS, memory_parts, time_parts
from .entries import Entry
from .search import search_layouts

if TYPE_CHECKING:
    from .ranking import Ranking

_MOST_NAMED = 4
_ENOUGH = 0.9  # of what is saved: the parts that make up so much of it are named


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    """The best layout on some number of GPUs, or how many bytes the one that lacks least is short of.

    Attributes:
        batch: sequences of a step.
        lacking: 0 also where no layout divides the ranks and the batch.
    """

    num_ranks: int
    batch: int
    best: Entry | None
    lacking: float = 0.0

    def of_ideal(self, first: ScalingPoint) -> float:
        """GPU-seconds of a sequence on the smallest number of GPUs, over those on this one."""
        assert self.best and first.best
        ideal = first.best.seconds * first.num_ranks / first.batch
        return ideal / (self.best.seconds * self.num_ranks / self.batch)


def search_scaling(ranking: Ranking, is_weak: bool, tell: Callable[[str], object] | None = None) -> list[ScalingPoint]:
    """The same model on a quarter to four times the GPUs: with the same batch (strong), or as many sequences a GPU."""
    found = []
    for times, over in ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1)):
        ranks, batch = ranking.num_ranks * times, ranking.asked.batch * (times if is_weak else over)
        if ranks % over or batch % over:
            continue
        ranks, batch = ranks // over, batch // over
        if tell is not None:
            tell(f"{'weak' if is_weak else 'strong'} scaling: {batch} sequences on {ranks} GPUs")
        asked = dataclasses.replace(ranking.asked, batch=batch)
        is_same = (ranks, asked) == (ranking.num_ranks, ranking.asked)
        other = ranking.found if is_same else search_layouts(ranking.model, ranking.platform, ranks, **vars(asked))
        best = other.entries[0] if other.entries else None
        nearest = other.nearest
        found.append(ScalingPoint(ranks, batch, best, 0.0 if best or not nearest else nearest.lacking))
    return found


def explain_above_ideal(ranking: Ranking, points: Sequence[ScalingPoint]) -> str:
    """Why the best of these points takes less than the ideal, the first one's GPU-seconds of a sequence; "" if none
    does: its layout does not fit the first number of GPUs, or does not divide it, and what that costs there."""
    fitting = [point for point in points if point.best]
    if not fitting:
        return ""
    first, top = fitting[0], max(fitting, key=lambda point: point.of_ideal(fitting[0]))
    if top.of_ideal(first) < 1.005:  # "100 %"
        return ""
    assert first.best and top.best
    there = f"{first.num_ranks} GPUs"
    return (
        f"Above 100 %, {top.of_ideal(first):.0%} on {top.num_ranks} GPUs: what is fastest there, {top.best.short}, "
        f"{_why_not(ranking, top, first)}. On {there} {first.best.short} is left, and of a sequence it takes more "
        f"GPU-seconds for {_dearer(ranking, top, first)}."
    )


def _why_not(ranking: Ranking, top: ScalingPoint, first: ScalingPoint) -> str:
    """Why the layout of a point is none on fewer GPUs."""
    assert top.best
    x, model, platform = top.best.layout, ranking.model, ranking.platform
    there = f"{first.num_ranks} GPUs"
    dp, rest = divmod(first.num_ranks, x.pp * x.tp)
    if rest or not dp or first.batch % (dp * x.sequences):
        return f"does not divide {there} and their batch"
    if (shared := dp * (x.tp if x.ssmb else 1)) % x.ep:
        return f"would leave {shared} of {there} to share experts among, which EP = {x.ep} does not divide"
    fewer = dataclasses.replace(x, dp=dp, microbatches=first.batch // (dp * x.sequences))
    here, wanted = memory_parts(model, platform, x), memory_parts(model, platform, fewer)
    most = max(here, key=lambda part: wanted[part] - here[part])
    grown = f"{LABELS[most]} {amount(wanted[most], 'B')} instead of {amount(here[most], 'B')}"
    needs = f"would need {amount(sum(wanted.values()), 'B')} of a GPU's {amount(platform.capacity, 'B')}"
    return f"{needs} on {there} ({grown}: spread over DP = {dp} ranks, not {x.dp})"


def _dearer(ranking: Ranking, top: ScalingPoint, first: ScalingPoint) -> str:
    """The parts of a step that take less on more GPUs, those that make up most of it."""

    def parts(point: ScalingPoint) -> dict[str, float]:
        assert point.best
        found = time_parts(ranking.model, ranking.platform, point.best.layout, point.best.experts_first)
        return {name: seconds * point.num_ranks / point.batch for name, seconds in found.items()}

    before, behind = parts(first), parts(top)
    saved = {name: before[name] - behind.get(name, 0.0) for name in before}
    less = sorted((name for name in saved if saved[name] > 0), key=lambda name: -saved[name])
    named, so_far = [], 0.0
    for name in less[:_MOST_NAMED]:
        named.append(f"{LABELS[name]} ({before[name]:.3g} instead of {behind.get(name, 0.0):.3g})")
        so_far += saved[name]
        if so_far > _ENOUGH * sum(saved[name] for name in less):
            break
    return ", ".join(named)
