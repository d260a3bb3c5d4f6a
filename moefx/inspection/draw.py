"""Draw a layered graph as SVG, without libraries or scripts. Colours come from the page's style sheet.

Simple form of Sugiyama's method: layers by longest path, fewer crossings by barycentres, and long arrows through empty
vertices in the layers that they cross. Suits outlines of blocks with tens of boxes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from ..ir.graphs.block_graph import BlockGraph
from .outline import Box, Outline, build_outline

_TITLE_WIDTH, _DETAIL_WIDTH = 7.6, 6.4  # of a character
_LINE, _PADDING, _GAP_X, _GAP_Y = 16, 10, 22, 34
_SWEEPS = 8


@dataclasses.dataclass(eq=False)
class _Vertex:
    """A box, or the point at which a long arrow crosses a layer."""

    box: Box | None
    layer: int
    width: float
    height: float
    x: float = 0.0  # of the centre
    y: float = 0.0  # of the upper edge


def draw_svg(graph: BlockGraph | Outline, label: str = "") -> str:
    """Draw a block's graph from top to bottom. A step that repeats for every expert is one box.

    Args:
        label: description of the picture for screen readers.
    """
    outline = graph if isinstance(graph, Outline) else build_outline(graph)
    vertices, links = _arrange(outline)
    left = min(p.x - p.width / 2 for p in vertices) - 12
    right = max(p.x + p.width / 2 for p in vertices) + 12
    bottom = max(p.y + p.height for p in vertices) + 12
    parts = [*map(_draw_arrow, links), *map(_draw_box, vertices)]
    width, height = right - left, bottom + 12
    return (
        f'<svg class="moefx-graph" viewBox="{left:.0f} -12 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


# -- layout ----------------------------------------------------------------------------------------


def _arrange(outline: Outline) -> tuple[list[_Vertex], list[list[_Vertex]]]:
    """Return the vertices of all boxes and crossings, and the vertices of each arrow's route."""
    order = {box: i for i, box in enumerate(outline.boxes)}
    # Merged experts can form cycles, because the sum runs through all experts. These arrows point up.
    forward = _drop_cycles(outline.boxes, sorted(outline.arrows, key=lambda a: (order[a[0]], order[a[1]])))
    layer = _assign_layers(outline.boxes, forward)
    vertices = {box: _make_vertex(box, layer[box]) for box in outline.boxes}
    all_vertices = list(vertices.values())
    routes: list[list[_Vertex]] = []
    for source, target in forward:
        route = [vertices[source]]
        for level in range(layer[source] + 1, layer[target]):
            bend = _Vertex(None, level, 2.0, 0.0)
            all_vertices.append(bend)
            route.append(bend)
        routes.append([*route, vertices[target]])
    rows: dict[int, list[_Vertex]] = defaultdict(list)
    for vertex in all_vertices:
        rows[vertex.layer].append(vertex)
    levels = [rows[i] for i in sorted(rows)]
    above, below = _find_neighbours(routes)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in levels if down else reversed(levels):
            _order_layer(row, above if down else below)
    y = 0.0
    for row in levels:
        height = max(vertex.height for vertex in row)
        for vertex in row:
            # A crossing spans its layer, so that the arrow does not cut the corners of boxes beside it.
            vertex.height = vertex.height or height
            vertex.y = y + (height - vertex.height) / 2
        y += height + _GAP_Y
    return all_vertices, routes


def _drop_cycles(boxes: Sequence[Box], arrows: Iterable[tuple[Box, Box]]) -> list[tuple[Box, Box]]:
    """Return the arrows in depth-first order, without those that close a cycle."""
    targets: dict[Box, list[Box]] = defaultdict(list)
    for source, target in arrows:
        targets[source].append(target)
    visited: set[Box] = set()
    open_: set[Box] = set()
    result = []
    for root in boxes:
        stack = [(root, iter(targets[root]))] if root not in visited else []
        open_.update({root} if stack else ())
        visited.update({root} if stack else ())
        while stack:
            box, remaining = stack[-1]
            target = next(remaining, None)
            if target is None:
                open_.discard(box)
                stack.pop()
            elif target not in open_:
                result.append((box, target))
                if target not in visited:
                    visited.add(target)
                    open_.add(target)
                    stack.append((target, iter(targets[target])))
    return result


def _assign_layers(boxes: Sequence[Box], arrows: Sequence[tuple[Box, Box]]) -> dict[Box, int]:
    """Assign layers by the longest path from the top, then move sources down to just above their first target."""
    sources: dict[Box, list[Box]] = defaultdict(list)
    targets: dict[Box, list[Box]] = defaultdict(list)
    for source, target in arrows:
        sources[target].append(source)
        targets[source].append(target)
    layer: dict[Box, int] = {}

    def depth(box: Box) -> int:
        if box not in layer:
            layer[box] = 1 + max((depth(s) for s in sources[box]), default=-1)
        return layer[box]

    for box in boxes:
        depth(box)
    for box in boxes:
        if not sources[box] and targets[box] and box.kind != "input":
            layer[box] = min(layer[t] for t in targets[box]) - 1
    return layer


def _make_vertex(box: Box, layer: int) -> _Vertex:
    title = box.title + (f"  × {box.count}" if box.count > 1 else "")
    width = max([len(title) * _TITLE_WIDTH, *(len(d) * _DETAIL_WIDTH for d in box.details)]) + 2 * _PADDING
    return _Vertex(box, layer, max(width, 60.0), _LINE * (1 + len(box.details)) + 1.2 * _PADDING)


def _find_neighbours(
    routes: Sequence[Sequence[_Vertex]],
) -> tuple[dict[_Vertex, list[_Vertex]], dict[_Vertex, list[_Vertex]]]:
    above: dict[_Vertex, list[_Vertex]] = defaultdict(list)
    below: dict[_Vertex, list[_Vertex]] = defaultdict(list)
    for route in routes:
        for upper, lower in itertools.pairwise(route):
            above[lower].append(upper)
            below[upper].append(lower)
    return above, below


def _order_layer(row: list[_Vertex], neighbours: dict[_Vertex, list[_Vertex]]) -> None:
    """Order a layer by the mean positions of its vertices' neighbours, and place the vertices there without overlap."""
    target_x = {p: sum(n.x for n in adjacent) / len(adjacent) if (adjacent := neighbours[p]) else p.x for p in row}
    row.sort(key=lambda p: target_x[p])
    edge = float("-inf")
    for vertex in row:
        vertex.x = max(target_x[vertex], edge + vertex.width / 2)
        edge = vertex.x + vertex.width / 2 + _GAP_X
    # Avoiding overlap moved vertices to the right only: undo the mean shift.
    shift = sum(vertex.x - target_x[vertex] for vertex in row) / len(row)
    for vertex in row:
        vertex.x -= shift


# -- drawing ---------------------------------------------------------------------------------------


def _draw_box(vertex: _Vertex) -> str:
    box = vertex.box
    if box is None:
        return ""
    x, y = vertex.x - vertex.width / 2, vertex.y
    count = f'<tspan class="count">  × {box.count}</tspan>' if box.count > 1 else ""
    lines = [f'<text class="title" x="{vertex.x:.1f}" y="{y + 18:.1f}">{escape(box.title)}{count}</text>']
    for i, detail in enumerate(box.details, start=1):
        lines.append(f'<text class="detail" x="{vertex.x:.1f}" y="{y + 18 + _LINE * i:.1f}">{escape(detail)}</text>')
    multiplicity = " many" if box.count > 1 else ""
    return (
        f'<g class="box {box.kind}{multiplicity}"><title>{escape(box.tooltip)}</title>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{vertex.width:.1f}" height="{vertex.height:.1f}" rx="6"/>'
        f"{''.join(lines)}</g>"
    )


def _draw_arrow(route: Sequence[_Vertex]) -> str:
    """Draw a smooth curve through the vertices of a route, with an arrowhead."""
    start, end = route[0], route[-1]
    x, y = start.x, start.y + start.height
    path = [f"M{x:.1f} {y:.1f}"]
    for vertex in route[1:]:
        to = vertex.y - (5 if vertex is end else 0)
        middle = (y + to) / 2
        path.append(f"C{x:.1f} {middle:.1f} {vertex.x:.1f} {middle:.1f} {vertex.x:.1f} {to:.1f}")
        if vertex is not end:
            path.append(f"V{vertex.y + vertex.height:.1f}")
        x, y = vertex.x, to if vertex is end else vertex.y + vertex.height
    head = f"M{x - 3.5:.1f} {y - 2:.1f}L{x:.1f} {y + 5:.1f}L{x + 3.5:.1f} {y - 2:.1f}Z"
    return f'<path class="arrow" d="{"".join(path)}"/><path class="head" d="{head}"/>'
