"""Place names beside the points of a plot, without overlaps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

# Positions of a name, the best first: (right of the point, above it, horizontal and vertical alignment).
_SIDES = (
    (1, 0, "left", "center"), (-1, 0, "right", "center"), (0, 1, "center", "bottom"), (0, -1, "center", "top"),
    (1, 1, "left", "bottom"), (1, -1, "left", "top"), (-1, 1, "right", "bottom"), (-1, -1, "right", "top"),
)  # fmt: skip
_DISTANCES = (8, 14, 22)  # points


def place_labels(
    axes: Axes, named: Sequence[tuple[tuple[float, float], str, str]], lines: Sequence[Any] = (), **style: Any
) -> list[Annotation]:
    """Write a name beside each point. Cover no point, no earlier name, and as little of `lines` as possible.

    Args:
        named: (position, name, font weight) of each point, the most important ones first.
        lines: lines that names should not cross.
        style: options of `Axes.annotate`.
    """
    figure: Any = axes.figure
    figure.draw_without_rendering()  # computes the layout, so that the axes have their final size
    on_screen = axes.transData.transform
    points = on_screen([point for point, _, _ in named])
    on_lines = [at for line in lines for at in _sample_points(on_screen(line.get_xydata()))]
    boxes: list[Any] = []
    labels = []
    for point, name, weight in named:
        text = axes.annotate(name, point, (0, 0), textcoords="offset points", fontweight=weight, **style)
        costs = []
        for distance in _DISTANCES:
            for right, up, ha, va in _SIDES:
                text.set(position=(right * distance, up * distance), ha=ha, va=va)
                box = text.get_window_extent()
                inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1) and axes.bbox.containsy(box.y1)
                hidden = box.count_overlaps(boxes) + box.padded(4).count_contains(points)
                costs.append((not inside, hidden, box.count_contains(on_lines) if on_lines else 0, len(costs)))
        _, _, _, best = min(costs)
        right, up, ha, va = _SIDES[best % len(_SIDES)]
        distance = _DISTANCES[best // len(_SIDES)]
        text.set(position=(right * distance, up * distance), ha=ha, va=va)
        boxes.append(text.get_window_extent())
        labels.append(text)
    return labels


def _sample_points(corners: Any) -> list[tuple[float, float]]:
    """Sample points of a line on the screen, a few pixels apart."""
    points = []
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        steps = max(int(max(abs(x1 - x0), abs(y1 - y0)) / 4), 1)
        points += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return points
