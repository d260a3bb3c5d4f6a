"""Style and building blocks of HTML pages: one file each, without scripts, for light and dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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
.moefx code, .moefx pre, .moefx td { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, monospace; }
.moefx table { border-collapse: collapse; margin: 8px 0; }
.moefx th { text-align: left; font-weight: 600; }
.moefx th, .moefx td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--mx-line); }
.moefx .number { text-align: right; }
.moefx .pictures { display: flex; flex-wrap: wrap; gap: 20px; align-items: flex-start; }
.moefx figure { margin: 0; padding: 12px 16px; background: var(--mx-surface);
  border: 1px solid var(--mx-line); border-radius: 10px; overflow: auto;
  max-width: 100%; box-sizing: border-box; }
.moefx .plot { display: inline-block; background: #ffffff; } .moefx .plot img { display: block; max-width: 100%; }
.moefx figcaption { font-weight: 600; margin-bottom: 8px; }
.moefx .legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 8px 0; color: var(--mx-muted); }
.moefx .legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  border: 1px solid; vertical-align: -1px; }
.moefx pre { margin: 0; padding: 10px 0; background: var(--mx-surface); border: 1px solid var(--mx-line);
  border-radius: 8px; overflow-x: auto; }
.moefx pre > code { display: block; padding: 0 14px; }
.moefx details { margin: 8px 0; overflow-x: auto; } .moefx summary { cursor: pointer; padding: 4px 0; }
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


def build_page(title: str, body: str, style: str = STYLE) -> str:
    """Return a whole page around sections of class `moefx`."""
    return _PAGE.format(title=escape(title), style=style, body=body)


def build_table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table of escaped texts. Columns after the first `texts` hold numbers, aligned to the right."""
    kinds = [""] * texts + [" class=number"] * (len(head) - texts)

    def row(tag: str, cells: Sequence[str]) -> str:
        inside = "".join(f"<{tag}{kind}>{escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))
        return f"<tr>{inside}</tr>"

    return f"<table>{row('th', head)}{''.join(row('td', cells) for cells in rows)}</table>"


def build_details(summary: str, body: str, is_open: bool = False) -> str:
    """Return a section that opens on a click."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"
