"""A ranking as one HTML file, with plots if matplotlib is installed, and with their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..util.html_page import build_details, build_page, build_table
from ..util.unit_text import amount
from . import plots
from .breakdown import LABELS, compute_memory_parts, compute_time_parts
from .constants import render_assumptions, render_sources
from .entries import COLUMNS, LEGEND, SIZES, Entry
from .regions import (
    TRADE_OFF,
    LayoutGrid,
    build_layout_grid,
    collect_trade_off_values,
    compute_ssmb_border,
    explain_ssmb_saving,
)
from .scaling import ScalingPoint, explain_above_ideal, search_scaling
from .symbols import ExplainedFormulas, explain_formulas

if TYPE_CHECKING:
    from ..ranking import Ranking

MAX_ENTRIES = 10
INSTALL = "pip install matplotlib"
has_plots = plots.has_plots
ReportProgress = Callable[[str], object]
_PUT_IN = "inserted numbers are in bytes, FLOP and seconds, results in larger units"


def file_name(ranking: Ranking) -> str:
    """Return `plan-MODEL-PLATFORM-GPUS.html`, with characters that file names may have."""
    name = f"plan-{ranking.model.name}-{ranking.platform.name}-{ranking.num_ranks}"
    return re.sub(r"[^A-Za-z0-9._]+", "-", name) + ".html"


def render(ranking: Ranking, tell: ReportProgress | None = None) -> str:
    """Render the page, which may take some seconds.

    Args:
        tell: called with a line of progress before each step.
    """
    report: ReportProgress = tell or (lambda _: None)
    with_plots = has_plots()
    missing = (
        "" if with_plots else f"<p><strong>No pictures</strong>: they need matplotlib, <code>{INSTALL}</code>.</p>"
    )
    parts = [
        '<section class="moefx">',
        _render_heading(ranking),
        missing,
        *(_render_best(ranking, with_plots, report) if len(ranking) else ()),
        _render_grids(ranking, with_plots, report),
        _render_ssmb(ranking, with_plots, report),
        _render_scaling(ranking, with_plots, report),
        _render_formulas(ranking) if len(ranking) else "",
        _render_rejected(ranking),
        "<h3>Sources of the platform's figures</h3>",
        render_sources(ranking.platform),
        "<h3>Assumptions</h3>",
        render_assumptions(ranking.model, ranking.platform),
        "</section>",
    ]
    return build_page(
        f"{ranking.model.name} on {ranking.num_ranks} x {ranking.platform.name}", "\n".join(filter(None, parts))
    )


def _render_heading(ranking: Ranking) -> str:
    model, platform = ranking.model, ranking.platform
    request = f"{ranking.request.batch} sequences of {ranking.request.tokens} tokens a step"
    text = f"{len(ranking)} layouts fit {amount(platform.memory_bytes, 'B')}."
    if len(ranking):
        best = ranking[0]
        text += f" The fastest takes {amount(best.seconds, 's')} a step, an MFU of {best.mfu:.1%}: {best.long_label}."
        if not platform.is_measured:
            text += " This platform has data-sheet figures only: real steps take longer, real MFUs are lower."
    else:
        nearest = ranking.nearest
        text += f" The one that comes nearest, {nearest.label}, {nearest.why}." if nearest else ""
        text += f" {min_gpus}" if (min_gpus := ranking.find_min_gpus()) else ""
        text += f" {SIZES}"
    total, active = (model.parameters(experts) / 1e9 for experts in (None, model.top_k))
    size = f"{total:.4g} billion parameters, {active:.4g} of them active"
    return (
        f"<h2>{escape(model.name)} on {ranking.num_ranks} x {escape(platform.device)}</h2>"
        f"<p class=muted>platform {escape(platform.name)}; {request}; {size}; {escape(model.source)}</p>"
        f"<p>{escape(text)}</p>"
    )


def _render_best(ranking: Ranking, with_plots: bool, report: ReportProgress) -> list[str]:
    """Return the table of the best layouts, and their memory and time by part."""
    best = ranking.entries[:MAX_ENTRIES]
    rows = [[str(i), *entry.cells()] for i, entry in enumerate(best, 1)]
    names = [f"{i}: {name}" for i, name in enumerate(_build_unique_labels(best), 1)]
    report("memory and time by part")
    model, platform = ranking.model, ranking.platform
    bytes_of = [compute_memory_parts(model, platform, e.layout) for e in best]
    seconds_of = [compute_time_parts(model, platform, e.layout, e.experts_first) for e in best]
    pictures = ("", "")
    if with_plots:
        pictures = (
            _render_picture(
                plots.render_data_uri(plots.plot_memory, names, bytes_of, platform.memory_bytes),
                "memory of a GPU by part",
            ),
            _render_picture(plots.render_data_uri(plots.plot_seconds, names, seconds_of), "time of a step by part"),
        )
    return [
        f"<h3>The fastest {len(best)}</h3>" if len(best) > 1 else "<h3>The only one</h3>",
        build_table(list(COLUMNS), rows, texts=len(COLUMNS) - 3),
        f"<p class=muted>{escape(' '.join(LEGEND))}</p>",
        "<h3>Memory of a GPU</h3>",
        "<p class=muted>On the stage that needs most.</p>",
        pictures[0],
        build_details("in numbers", _render_parts(names, bytes_of, "B"), not with_plots),
        "<h3>Time of a step</h3>",
        pictures[1],
        build_details("in numbers", _render_parts(names, seconds_of, "s"), not with_plots),
    ]


def _render_parts(names: Sequence[str], parts: Sequence[dict[str, float]], unit: str) -> str:
    """Return a table with a row for each part above 0, and a column for each layout."""
    present = [name for name in parts[0] if any(sizes[name] for sizes in parts)]
    rows = [[LABELS.get(n, n), n, *(amount(sizes[n], unit) for sizes in parts)] for n in present]
    rows.append(["all", "", *(amount(sum(sizes.values()), unit) for sizes in parts)])
    return build_table(["part", "formula", *names], rows, texts=2)


def _render_grids(ranking: Ranking, with_plots: bool, report: ReportProgress) -> str:
    report("what fits")
    grids = [build_layout_grid(ranking, ("PP", "EP")), build_layout_grid(ranking, ("TP", "EP"))]
    if not grids[0].cells:
        return ""
    picture = ""
    if with_plots:
        picture = _render_picture(
            plots.render_data_uri(plots.plot_layout_grids, grids),
            "step time if a layout fits, otherwise the lacking memory",
        )
    return (
        "<h3>Layouts that fit</h3><p class=muted>The step time of the fastest layout with these sizes, or the memory "
        "that the nearest one lacks. A dash: these sizes do not divide the ranks. Framed: the fastest.</p>"
        + picture
        + build_details("in numbers", "".join(map(_render_grid, grids)), not with_plots)
    )


def _render_grid(grid: LayoutGrid) -> str:
    def text(row: int, column: int) -> str:
        cell = grid.cells.get((row, column))
        if cell is None:
            return "–"
        return amount(cell.best.seconds, "s") if cell.best else f"+{amount(cell.lacking, 'B')}"

    head = [f"{grid.axes[0]} \\ {grid.axes[1]}", *map(str, grid.columns)]
    return build_table(head, [[str(row), *(text(row, column) for column in grid.columns)] for row in grid.rows])


def _render_ssmb(ranking: Ranking, with_plots: bool, report: ReportProgress) -> str:
    report("SSMB and TED")
    model, tokens = ranking.model, ranking.request.tokens
    ratio = model.top_k / model.expert_size
    rows = [
        [str(s), f"{compute_ssmb_border(s):.3g}", f"{ratio:.3g}", "SSMB" if ratio > compute_ssmb_border(s) else "TED"]
        for s in sorted({2048, 4096, 8192, tokens})
    ]
    picture = (
        _render_picture(plots.render_data_uri(plots.plot_ssmb_border, model, tokens), "models by top-k and width")
        if with_plots
        else ""
    )
    example = ""
    if len(ranking):
        layout = ranking[0].layout
        values = collect_trade_off_values(model, layout)
        results = TRADE_OFF(**values)
        ranks = f", with G = {values['G']:g} ranks for the dense matrices"
        with_ranks = ranks if layout.tp > 1 else f" has no TP; with G = {values['G']:g} ranks for the dense matrices"
        winner = "SSMB" if results["A_saving"] > results["M_cost"] else "TED"
        example = (
            f"<p>The fastest layout{with_ranks}, {model.matrices} matrices an expert and the activations of "
            f"n_kept = {values['n_kept']:g} layers at once: {winner} saves more.</p>"
            f"{_render_explained(explain_formulas(TRADE_OFF, 'A_saving', 'M_cost', **values))}"
            f"{_render_ssmb_savings(ranking)}"
        )
    return (
        "<h3>SSMB or TED</h3><p class=muted>The ranks that share the dense matrices can split the sequence in MoE "
        "blocks (SSMB) or the experts (TED). X-MoE figure 17 shows which saves more memory, for experts of two "
        "matrices, one on each rank, and X-MoE's kept rows: top-k over the expert width F, with a border at 2 / s "
        "(capacity factor 1).</p>"
        + picture
        + build_details("in numbers", build_table(["tokens s", "border", "k / F", "saves more"], rows), not with_plots)
        + example
    )


def _render_ssmb_savings(ranking: Ranking) -> str:
    """Return the memory that SSMB saves with moefx's own checkpoint policy, if the layout can have SSMB."""
    explained = explain_ssmb_saving(ranking.model, ranking[0].layout, ranking.platform)
    if not explained:
        return ""
    return (
        "<p>X-MoE keeps a row for each slot, before and after the experts. This layout keeps A_block: the received "
        f"rows, once a rank, and the experts' hidden rows. SSMB saves M_saved of it ({_PUT_IN}):</p>"
        f"{_render_explained(explained)}"
    )


def _render_explained(explained: ExplainedFormulas) -> str:
    """Render formulas, and the meaning of their symbols."""
    symbols = build_table(["symbol", "value", "meaning"], explained.symbols, texts=3)
    return f"<pre><code>{escape(explained.formulas)}</code></pre>{build_details('meaning of the symbols', symbols)}"


def _render_scaling(ranking: Ranking, with_plots: bool, report: ReportProgress) -> str:
    strong, weak = search_scaling(ranking, False, report), search_scaling(ranking, True, report)
    picture = (
        _render_picture(plots.render_data_uri(plots.plot_scaling, strong, weak), "step time by GPUs")
        if with_plots
        else ""
    )
    reasons = [
        reason and f"{kind.capitalize()} scaling. {reason}"
        for kind, reason in (
            ("strong", explain_above_ideal(ranking, strong)),
            ("weak", explain_above_ideal(ranking, weak)),
        )
    ]
    rows = [
        _format_scaling_row(kind, point, points)
        for kind, points in (("strong", strong), ("weak", weak))
        for point in points
    ]
    for row, point in zip(rows, [*strong, *weak], strict=True):
        row[-1] = f"{point.batch * ranking.request.tokens / point.best.seconds:,.0f}" if point.best else "-"
    head = ["scaling", "layout", "GPUs", "batch", "step", "MFU", "of ideal", "tokens/s"]
    return (
        "<h3>Scaling</h3><p class=muted>The fastest layout on each number of GPUs, with the same batch (strong) or as "
        "many sequences a GPU (weak). Ideal: the GPU-seconds for each sequence on the smallest number on which one "
        "fits.</p>"
        + picture
        + "".join(f"<p>{escape(reason)}</p>" for reason in reasons if reason)
        + build_details("in numbers", build_table(head, rows, texts=2), not with_plots)
    )


def _format_scaling_row(kind: str, point: ScalingPoint, points: Sequence[ScalingPoint]) -> list[str]:
    sizes = [str(point.num_ranks), str(point.batch)]
    if point.best is None:
        reason = f"does not fit: {amount(point.lacking, 'B')} too much" if point.lacking else "no layout divides"
        return [kind, reason, *sizes, "-", "-", "-", "-"]
    best, of_ideal = point.best, point.of_ideal(next(p for p in points if p.best))
    return [kind, best.short_label, *sizes, amount(best.seconds, "s"), f"{best.mfu:.1%}", f"{of_ideal:.0%}", ""]


def _render_formulas(ranking: Ranking) -> str:
    best, (bytes_of, seconds_of) = ranking[0], map(_render_explained, ranking.formulas(0))
    layout = f"<pre><code>{escape(str(best.layout))}\n{escape(best.plan().to_json())}</code></pre>"
    head = (
        f"<h3>The fastest in formulas</h3><p class=muted>Each with the numbers put in ({_PUT_IN}), and its result.</p>"
    )
    parts = {
        "memory of a GPU": bytes_of, "time of a step": seconds_of, "its layout, and its moefx.Plan as JSON": layout,
    }  # fmt: skip
    return head + "".join(build_details(title, text) for title, text in parts.items())


def _render_rejected(ranking: Ranking) -> str:
    if not ranking.rejected:
        return ""
    kinds, entries = ranking.reasons(), [(r.label, r.why) for r in ranking.rejected]
    kind_rows, all_rows = (build_table(["layouts", "why not"], rows, texts=2) for rows in (kinds, entries))
    return f"<h3>Rejected</h3>{kind_rows}{build_details('all of them', all_rows) if kinds != entries else ''}"


def _build_unique_labels(entries: Sequence[Entry]) -> list[str]:
    """Return `Entry.short_label` of each entry, and other columns that differ between entries of the same label."""
    names = [entry.short_label for entry in entries]
    columns = list(COLUMNS)[1:]
    labels = []
    for entry, name in zip(entries, names, strict=True):
        equal = [dict(zip(columns, e.cells(), strict=True)) for e, n in zip(entries, names, strict=True) if n == name]
        cells = dict(zip(columns, entry.cells(), strict=True))
        differs = [c for c in ("PP", "DP", "placed", "rows", "micro-batches") if len({a[c] for a in equal}) > 1]
        labels.append(" ".join([name, *(cells[c] for c in differs)]))
    return labels


def _render_picture(uri: str, description: str) -> str:
    return f'<figure class="plot"><img src="{uri}" alt="{escape(description)}"></figure>'
