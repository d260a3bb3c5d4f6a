"""Format the history of a block as HTML: self-contained, without scripts, for light and dark mode."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from ..ir.graphs.block_graph import BlockGraph
from ..ir.graphs.graph_codegen import is_getitem
from ..ir.graphs.graph_printer import format_lines, print_lines
from ..util import html_page
from ..util.unit_text import format_bytes
from . import draw
from .line_diff import diff_lines

if TYPE_CHECKING:
    from .history import History, Snapshot

STYLE = (
    html_page.STYLE
    + """.moefx pre span { display: block; padding: 0 14px; width: max-content; min-width: 100%;
  box-sizing: border-box; }
.moefx pre .added { background: var(--mx-added); } .moefx pre .removed { background: var(--mx-removed); }
.moefx pre em { font-style: normal; color: var(--mx-muted); }
.moefx .bars rect { fill: var(--mx-dialect-line); }
.moefx .bars text { fill: var(--mx-text); font-size: 13px; }
.moefx-graph { display: block; max-width: none; }
.moefx-graph text { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; text-anchor: middle;
  fill: var(--mx-text); }
.moefx-graph .title { font-size: 12.5px; font-weight: 600; }
.moefx-graph .detail { font-size: 10.5px; fill: var(--mx-muted); }
.moefx-graph .count { fill: var(--mx-many-line); }
.moefx-graph .box rect { fill: var(--mx-card); stroke: var(--mx-line); }
.moefx-graph .dialect rect { fill: var(--mx-dialect); stroke: var(--mx-dialect-line); }
.moefx-graph .kept rect { fill: var(--mx-kept); stroke: var(--mx-kept-line); }
.moefx-graph .many rect { fill: var(--mx-many); stroke: var(--mx-many-line); }
.moefx-graph .input rect, .moefx-graph .output rect { fill: none; stroke: var(--mx-muted);
  stroke-dasharray: 4 3; }
.moefx-graph .arrow { fill: none; stroke: var(--mx-muted); stroke-opacity: .75; }
.moefx-graph .head { fill: var(--mx-muted); }
"""
)


def build_page(title: str, body: str) -> str:
    """Return a whole page around fragments of `build_fragment`."""
    return html_page.build_page(title, body, STYLE)


def build_fragment(history: History, *, bytes_per_policy: Mapping[str, float] | None = None) -> str:
    """Return a block's history as a section of a page with `STYLE`; see `History.html`."""
    first = history.captured or history.snapshots[0].graph
    parts = [
        '<section class="moefx">',
        f"<h2>{escape(history.name or 'model')}</h2>",
        _build_pass_table(history),
        "<h3>Before and after</h3>",
        _LEGEND,
        '<div class="pictures">',
        _build_figure("captured" if history.captured else f"after {history.passes[0]}", first),
        _build_figure(f"after {history.passes[-1]}", history.graph),
        "</div>",
        _build_bars(bytes_per_policy) if bytes_per_policy else "",
        "<h3>Pass by pass</h3>",
        *(_build_diff(history, i) for i in range(len(history))),
        "</section>",
    ]
    return "\n".join(filter(None, parts))


_LEGEND = (
    '<div class="legend">'
    + "".join(
        f'<span><i style="background: var(--mx-{kind}); border-color: var(--mx-{kind}-line)"></i>{text}</span>'
        for kind, text in (
            ("kept", "the user's own module, called as it is"),
            ("dialect", "padding-free op"),
            ("many", "repeated for every expert"),
        )
    )
    + "</div>"
)


def _build_pass_table(history: History) -> str:
    rows = "".join(
        f"<tr><td>{s.index}/{s.total}</td><td>{escape(s.pass_name)}</td><td class=number>{s.ms:.1f} ms</td>"
        f"<td class=number>+{s.added}</td><td class=number>-{s.removed}</td>"
        f"<td class=muted>{escape(s.rule)}</td></tr>"
        for s in history
    )
    header = "<tr><th></th><th>pass</th><th>time</th><th colspan=2>nodes</th><th>where</th></tr>"
    return f"<table>{header}{rows}</table>"


def _build_figure(caption: str, graph: BlockGraph) -> str:
    count = sum(n.op.startswith("call") and not is_getitem(n) for n in graph.graph.nodes)
    return (
        f"<figure><figcaption>{escape(caption)} <span class=muted>{count} ops</span></figcaption>"
        f"{draw.draw_svg(graph, f'{graph.name}, {caption}')}</figure>"
    )


def _build_diff(history: History, index: int) -> str:
    """Return the diff of one pass, with unchanged lines."""
    snapshot: Snapshot = history.snapshots[index]
    before = print_lines(history.snapshots[index - 1].graph) if index else []
    marked_lines = diff_lines(before, print_lines(snapshot.graph))
    has_changes = any(mark != " " for mark, _ in marked_lines)
    css = {"+": "added", "-": "removed", " ": "same"} if index else {"+": "same"}
    texts = format_lines([line for _, line in marked_lines])
    code = "".join(
        f'<span class="{css[mark]}">{mark if index else " "} {_highlight_comment(text)}</span>'
        for (mark, _), text in zip(marked_lines, texts, strict=True)
    )
    summary = f"<strong>{escape(snapshot.pass_name)}</strong> <span class=muted>{escape(snapshot.header)}</span>"
    open_attribute = " open" if has_changes else ""
    note = "" if has_changes else "<p class=muted>Nothing to change in this block.</p>"
    return f"<details{open_attribute}><summary>{summary}</summary>{note}<pre>{code}</pre></details>"


def _highlight_comment(text: str) -> str:
    """Return a printed line with its comment in another colour."""
    code, mark, comment = text.partition("  # ")
    return escape(code) + (f"<em>{escape(mark + comment)}</em>" if mark else "")


def _build_bars(values: Mapping[str, float]) -> str:
    """Draw the bytes kept for the backward, one bar per checkpoint policy."""
    left, scale, height = 150, 520 / (max(values.values()) or 1), 26
    rows = []
    for i, (name, value) in enumerate(values.items()):
        y, length = i * height, max(value * scale, 1)
        rows.append(
            f'<text x="0" y="{y + 17}">{escape(name)}</text><rect x="{left}" y="{y + 4}" '
            f'width="{length:.1f}" height="{height - 8}" rx="3"/>'
            f'<text x="{left + length + 8:.1f}" y="{y + 17}">{format_bytes(value)}</text>'
        )
    label = "bytes kept for the backward by save policy"
    return (
        f'<h3>Bytes kept for the backward</h3><svg class="bars" role="img" aria-label="{label}" '
        f'width="{left + 640}" height="{height * len(values)}">{"".join(rows)}</svg>'
    )
