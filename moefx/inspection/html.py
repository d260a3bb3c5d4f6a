"""The history of a block as HTML: self-contained, no scripts, nothing loaded, readable in light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ..ir.block import BlockGraph
from ..ir.codegen import is_getitem
from ..ir.printer import format_lines, print_lines
from . import draw
from .history import History, Snapshot, diff_lines

STYLE = """
.moefx { --mx-text: #1f2328; --mx-muted: #656d76; --mx-line: #d0d7de;
  --mx-surface: #f6f8fa; --mx-card: #ffffff;
  --mx-added: #dafbe1; --mx-removed: #ffebe9; --mx-dialect: #ddf4ff; --mx-dialect-line: #54aeff;
  --mx-kept: #e6f6ea; --mx-kept-line: #4ac26b; --mx-many: #fff8c5; --mx-many-line: #d4a72c;
  color: var(--mx-text); font: 15px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  .moefx { --mx-text: #e6edf3; --mx-muted: #8d96a0; --mx-line: #3d444d;
    --mx-surface: #151b23; --mx-card: #0d1117;
    --mx-added: #12361f; --mx-removed: #4b1a1d; --mx-dialect: #0c2d4a; --mx-dialect-line: #2f81f7;
    --mx-kept: #12301c; --mx-kept-line: #3fb950; --mx-many: #3a2d09; --mx-many-line: #bb8009; } }
.moefx h2, .moefx h3 { line-height: 1.25; margin: 1.4em 0 .5em; }
.moefx .muted { color: var(--mx-muted); }
.moefx code, .moefx pre, .moefx .passes td { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, monospace; }
.moefx .passes { border-collapse: collapse; }
.moefx .passes th { text-align: left; font-weight: 600; }
.moefx .passes th, .moefx .passes td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--mx-line); }
.moefx .passes .number { text-align: right; }
.moefx .pictures { display: flex; flex-wrap: wrap; gap: 20px; align-items: flex-start; }
.moefx figure { margin: 0; padding: 12px 16px; background: var(--mx-surface);
  border: 1px solid var(--mx-line); border-radius: 10px; overflow: auto;
  max-width: 100%; box-sizing: border-box; }
.moefx figcaption { font-weight: 600; margin-bottom: 8px; }
.moefx .legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 8px 0; color: var(--mx-muted); }
.moefx .legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  border: 1px solid; vertical-align: -1px; }
.moefx pre { margin: 0; padding: 10px 0; background: var(--mx-surface); border: 1px solid var(--mx-line);
  border-radius: 8px; overflow-x: auto; }
.moefx pre span { display: block; padding: 0 14px; width: max-content; min-width: 100%;
  box-sizing: border-box; }
.moefx pre .added { background: var(--mx-added); } .moefx pre .removed { background: var(--mx-removed); }
.moefx pre em { font-style: normal; color: var(--mx-muted); }
.moefx details { margin: 8px 0; } .moefx summary { cursor: pointer; padding: 4px 0; }
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

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0; background: Canvas; }}
main {{ max-width: 1500px; margin: 0 auto; padding: 12px 28px 48px; }}
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def page(title: str, body: str) -> str:
    """A whole page around fragments of this module."""
    return _PAGE.format(title=escape(title), style=STYLE, body=body)


def fragment(
    history: History,
    *,
    before: BlockGraph | None = None,
    bytes_per_policy: Mapping[str, float] | None = None,
) -> str:
    """A block's history as a piece of a page that has `STYLE` in its head; see `History.html`."""
    first = before or history.snapshots[0].graph
    parts = [
        '<section class="moefx">',
        f"<h2>{escape(history.name or 'model')}</h2>",
        _passes(history),
        "<h3>Before and after</h3>",
        _LEGEND,
        '<div class="pictures">',
        _picture("captured" if before else f"after {history.passes[0]}", first),
        _picture(f"after {history.passes[-1]}", history.graph),
        "</div>",
        _bars(bytes_per_policy) if bytes_per_policy else "",
        "<h3>Pass by pass</h3>",
        *(_change(history, i) for i in range(len(history))),
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


def _passes(history: History) -> str:
    rows = "".join(
        f"<tr><td>{s.index}/{s.total}</td><td>{escape(s.pass_name)}</td><td class=number>{s.ms:.1f} ms</td>"
        f"<td class=number>+{s.added}</td><td class=number>-{s.removed}</td>"
        f"<td class=muted>{escape(s.rule)}</td></tr>"
        for s in history
    )
    header = "<tr><th></th><th>pass</th><th>time</th><th colspan=2>nodes</th><th>where</th></tr>"
    return f'<table class="passes">{header}{rows}</table>'


def _picture(caption: str, graph: BlockGraph) -> str:
    count = sum(n.op.startswith("call") and not is_getitem(n) for n in graph.graph.nodes)
    return (
        f"<figure><figcaption>{escape(caption)} <span class=muted>{count} ops</span></figcaption>"
        f"{draw.svg(graph, f'{graph.name}, {caption}')}</figure>"
    )


def _change(history: History, index: int) -> str:
    """What one pass did: the diff, and behind it the whole graph."""
    snapshot: Snapshot = history.snapshots[index]
    before = print_lines(history.snapshots[index - 1].graph) if index else []
    marked = diff_lines(before, print_lines(snapshot.graph))
    changed = any(mark != " " for mark, _ in marked)
    css = {"+": "added", "-": "removed", " ": "same"} if index else {"+": "same"}
    texts = format_lines([line for _, line in marked])
    code = "".join(
        f'<span class="{css[mark]}">{mark if index else " "} {_code(text)}</span>'
        for (mark, _), text in zip(marked, texts, strict=True)
    )
    summary = f"<strong>{escape(snapshot.pass_name)}</strong> <span class=muted>{escape(snapshot.header)}</span>"
    opened = " open" if changed else ""
    note = "" if changed else "<p class=muted>Nothing to change in this block.</p>"
    return f"<details{opened}><summary>{summary}</summary>{note}<pre>{code}</pre></details>"


def _code(text: str) -> str:
    """A printed line with its comment set off."""
    code, mark, comment = text.partition("  # ")
    return escape(code) + (f"<em>{escape(mark + comment)}</em>" if mark else "")


def _bars(values: Mapping[str, float]) -> str:
    """Bytes that the backward keeps, one bar a save policy."""
    left, scale, height = 150, 520 / (max(values.values()) or 1), 26
    rows = []
    for i, (name, value) in enumerate(values.items()):
        y, length = i * height, max(value * scale, 1)
        rows.append(
            f'<text x="0" y="{y + 17}">{escape(name)}</text><rect x="{left}" y="{y + 4}" '
            f'width="{length:.1f}" height="{height - 8}" rx="3"/>'
            f'<text x="{left + length + 8:.1f}" y="{y + 17}">{size(value)}</text>'
        )
    label = "bytes kept for the backward by save policy"
    return (
        f'<h3>Bytes kept for the backward</h3><svg class="bars" role="img" aria-label="{label}" '
        f'width="{left + 640}" height="{height * len(values)}">{"".join(rows)}</svg>'
    )


def size(value: float) -> str:
    """`123456` -> `"120.6 KiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
