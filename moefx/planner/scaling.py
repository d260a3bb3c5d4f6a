"""Scaling of a step with the number of GPUs, and reasons for superlinear scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..util.unit_text import amount
from .breakdown import LABELS, compute_memory_parts, compute_time_parts
from .entries import Entry
from .search import search_layouts

if TYPE_CHECKING:
    from ..ranking import Ranking

_MAX_NAMED = 4
_ENOUGH = 0.9  # share of the savings that the named parts must explain


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    """The best layout on a number of GPUs.

    Attributes:
        batch: sequences of a step.
        best: the fastest layout that fits, or None.
        lacking: bytes that the nearest layout lacks if none fits; 0 if no layout divides the ranks and the batch.
    """

    num_ranks: int
    batch: int
    best: Entry | None
    lacking: float = 0.0

    def of_ideal(self, first: ScalingPoint) -> float:
        """Return the GPU-seconds for each sequence at the first point, over those at this point."""
        assert self.best and first.best
        ideal = first.best.seconds * first.num_ranks / first.batch
        return ideal / (self.best.seconds * self.num_ranks / self.batch)


def search_scaling(ranking: Ranking, is_weak: bool, tell: Callable[[str], object] | None = None) -> list[ScalingPoint]:
    """Search the same model on a quarter to four times the GPUs.

    Args:
        is_weak: keep the number of sequences on each GPU (weak scaling), not the batch (strong scaling).
        tell: called with a line of progress before each search.
    """
    points = []
    for times, divisor in ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1)):
        ranks, batch = ranking.num_ranks * times, ranking.request.batch * (times if is_weak else divisor)
        if ranks % divisor or batch % divisor:
            continue
        ranks, batch = ranks // divisor, batch // divisor
        if tell is not None:
            tell(f"{'weak' if is_weak else 'strong'} scaling: {batch} sequences on {ranks} GPUs")
        request = dataclasses.replace(ranking.request, batch=batch)
        is_same = (ranks, request) == (ranking.num_ranks, ranking.request)
        other = ranking.result if is_same else search_layouts(ranking.model, ranking.platform, ranks, **vars(request))
        best = other.entries[0] if other.entries else None
        nearest = other.nearest
        points.append(ScalingPoint(ranks, batch, best, 0.0 if best or not nearest else nearest.lacking))
    return points


def explain_above_ideal(ranking: Ranking, points: Sequence[ScalingPoint]) -> str:
    """Explain why a point scales better than ideally; "" if none does.

    The ideal is the first point's GPU-seconds for each sequence. The better layout does not fit or divide the first
    number of GPUs; the text says why, and names the parts of a step that cost more there.
    """
    fits = [point for point in points if point.best]
    if not fits:
        return ""
    first, top = fits[0], max(fits, key=lambda point: point.of_ideal(fits[0]))
    if top.of_ideal(first) < 1.005:  # "100 %"
        return ""
    assert first.best and top.best
    return (
        f"Above 100 %, {top.of_ideal(first):.0%} on {top.num_ranks} GPUs: the fastest layout there, "
        f"{top.best.short_label}, {_explain_impossible(ranking, top, first)}. On {first.num_ranks} GPUs "
        f"{first.best.short_label} is left, and of a sequence it takes more GPU-seconds for "
        f"{_list_savings(ranking, top, first)}."
    )


def _explain_impossible(ranking: Ranking, top: ScalingPoint, first: ScalingPoint) -> str:
    """Say why the layout of a point is impossible on the GPUs of the first point."""
    assert top.best
    x, model, platform = top.best.layout, ranking.model, ranking.platform
    gpus = f"{first.num_ranks} GPUs"
    dp, remainder = divmod(first.num_ranks, x.pp * x.tp)
    if remainder or not dp or first.batch % (dp * x.sequences):
        return f"does not divide {gpus} and their batch"
    if (num_shared := dp * (x.tp if x.ssmb else 1)) % x.ep:
        return f"would leave {num_shared} of {gpus} to share experts among, which EP = {x.ep} does not divide"
    wider = dataclasses.replace(x, dp=dp, microbatches=first.batch // (dp * x.sequences))
    parts, needed_parts = compute_memory_parts(model, platform, x), compute_memory_parts(model, platform, wider)
    most = max(parts, key=lambda part: needed_parts[part] - parts[part])
    growth = f"{LABELS[most]} {amount(needed_parts[most], 'B')} instead of {amount(parts[most], 'B')}"
    needs = f"would need {amount(sum(needed_parts.values()), 'B')} of a GPU's {amount(platform.memory_bytes, 'B')}"
    return f"{needs} on {gpus} ({growth}: spread over DP = {dp} ranks, not {x.dp})"


def _list_savings(ranking: Ranking, top: ScalingPoint, first: ScalingPoint) -> str:
    """List the parts of a step that take fewer GPU-seconds at the better point, the largest savings first."""

    def parts(point: ScalingPoint) -> dict[str, float]:
        assert point.best
        seconds_by_part = compute_time_parts(
            ranking.model, ranking.platform, point.best.layout, point.best.experts_first
        )
        return {name: seconds * point.num_ranks / point.batch for name, seconds in seconds_by_part.items()}

    before, behind = parts(first), parts(top)
    saved = {name: before[name] - behind.get(name, 0.0) for name in before}
    names = sorted((name for name in saved if saved[name] > 0), key=lambda name: -saved[name])
    named, so_far = [], 0.0
    for name in names[:_MAX_NAMED]:
        named.append(f"{LABELS[name]} ({before[name]:.3g} instead of {behind.get(name, 0.0):.3g})")
        so_far += saved[name]
        if so_far > _ENOUGH * sum(saved[name] for name in names):
            break
    return ", ".join(named)
