"""Plots of a ranking. Needs matplotlib (the extra `plot`), which is imported on the first call.

Colours of parts are those of `part_colors`. Others are Paul Tol's (personal.sron.nl/~pault) and the map cividis, safe
for colour-blind readers.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..util.unit_text import amount
from .architecture import Architecture
from .breakdown import LABELS
from .catalogue import MODELS
from .part_colors import OTHER, find_colors
from .plot_labels import place_labels
from .regions import LayoutGrid, compute_ssmb_border
from .scaling import ScalingPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INDIGO, _CYAN, _SAND, _ROSE, _WINE = "#332288", "#88CCEE", "#DDCC77", "#CC6677", "#882255"
_MAX_PARTS = 9  # parts with a colour of their own in a plot
_GREY, _DARK, _FONT = "#BBBBBB", "#222222", 9
_PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # background of texts over lines
_SIDE_BY_SIDE = 18  # columns of maps side by side; wider maps are stacked
_GIB = 2**30


def has_plots() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def render_data_uri(draw: Callable[..., Figure], *arguments: Any) -> str:
    """Draw a figure as a data URI, with matplotlib's default settings.

    Args:
        draw: one of the functions below, called with `arguments`.
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": _FONT, "svg.hashsalt": "moefx"})
        buffer = io.BytesIO()
        draw(*arguments).savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def plot_memory(names: Sequence[str], parts: Sequence[dict[str, float]], memory_bytes: float) -> Figure:
    """Plot the memory of a GPU by part, a bar for each layout, and the GPU's memory."""
    figure, axes = _draw_bars(names, parts, _GIB)
    axes.axvline(memory_bytes / _GIB, color=_DARK, linestyle="--", linewidth=1.4)
    axes.annotate(
        f"capacity {amount(memory_bytes, 'B')}", (memory_bytes / _GIB, 1), (-4, 3), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right", va="bottom",
    )  # fmt: skip
    axes.set(xlabel="memory of a GPU (GiB)", xlim=(0, 1.02 * max(memory_bytes / _GIB, axes.get_xlim()[1] / 1.05)))
    return figure


def plot_seconds(names: Sequence[str], parts: Sequence[dict[str, float]]) -> Figure:
    """Plot the seconds of a step by part, a bar for each layout."""
    figure, axes = _draw_bars(names, parts, 1)
    axes.set_xlabel("time of a step (s), nothing overlaps")
    return figure


def plot_layout_grids(grids: Sequence[LayoutGrid]) -> Figure:
    """Plot maps of the step time, or of the lacking memory for sizes at which no layout fits."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Rectangle

    times = [cell.best.seconds for grid in grids for cell in grid.cells.values() if cell.best]
    low, high = (min(times), max(times)) if times else (1.0, 1.0)
    norm = LogNorm(low, high if high > low else 2 * low)
    widths, heights = [len(grid.columns) + 1 for grid in grids], [len(grid.rows) + 1 for grid in grids]
    engine = ConstrainedLayoutEngine(w_pad=0.1)
    if sum(widths) <= _SIDE_BY_SIDE:
        figure = Figure((sum(widths) * 0.72 + 1.2, max(heights) * 0.5 + 0.6), layout=engine)
        all_axes = list(figure.subplots(1, len(grids), squeeze=False, width_ratios=widths).flat)
    else:
        figure = Figure((max(widths) * 0.72 + 1.2, sum(heights) * 0.5 + 0.6), layout=engine)
        all_axes = list(figure.subplots(len(grids), 1, squeeze=False, height_ratios=heights).flat)
    for axes, grid in zip(all_axes, grids, strict=True):
        image = _draw_cells(axes, grid, norm)
        for (row, column), cell in grid.cells.items():
            if cell.best and cell.best.seconds == low:
                at = (grid.columns.index(column) - 0.5, grid.rows.index(row) - 0.5)
                axes.add_patch(Rectangle(at, 1, 1, fill=False, edgecolor=_ROSE, linewidth=2.5))
    if times:
        bar = figure.colorbar(image, ax=all_axes, label="fastest step (s)", fraction=0.03)
        ticks = sorted({low, (low * high) ** 0.5, high})
        bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
        bar.minorticks_off()
    return figure


def plot_ssmb_border(model: Architecture, tokens: int) -> Figure:
    """Plot models by top-k and expert width, and the borders above which SSMB saves more than TED (X-MoE figure 17)."""
    from matplotlib.figure import Figure

    figure = Figure((9.6, 5.6), layout="constrained")
    axes = figure.subplots()
    points: dict[tuple[int, int], list[str]] = {}
    for other in (model, *(m for name, m in MODELS.items() if not name.startswith("x-moe"))):
        names = points.setdefault((other.expert_size, other.top_k), [])
        names += [other.name] if other.name not in names else []
    widths = [width for width, _ in points]
    ends = (0.7 * min(widths), 1.6 * max(widths))
    top = 2.5 * max(choices for _, choices in points)  # room for names
    lines = [
        axes.plot(
            ends,
            [compute_ssmb_border(length) * w for w in ends],
            style,
            color=_DARK,
            lw=1.2,
            label=f"border, s = {length}",
        )[0]
        for length, style in zip((2048, 4096, 8192), ("--", "-", ":"), strict=True)
    ]
    border = [compute_ssmb_border(tokens) * w for w in ends]
    axes.fill_between(ends, border, [top] * 2, color=_CYAN, alpha=0.25, lw=0, label=f"SSMB saves more, s = {tokens}")
    axes.fill_between(ends, [0.3] * 2, border, color=_SAND, alpha=0.3, lw=0, label=f"TED saves more, s = {tokens}")
    for (width, choices), names in points.items():
        is_own = model.name in names
        axes.plot(
            [width], [choices], "*" if is_own else "o", color=_WINE if is_own else _INDIGO, ms=13 if is_own else 6
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(0.5, top), xlabel="hidden width of an expert (elements)")
    axes.set_ylabel("experts of a token (top-k)")
    _set_plain_ticks(axes.xaxis, [512 * 2**i for i in range(7) if ends[0] < 512 * 2**i < ends[1]])
    _set_plain_ticks(axes.yaxis, [2**i for i in range(8) if 0.5 < 2**i < top])
    figure.legend(loc="outside right upper", fontsize=8)
    named = [(point, "\n".join(names), "bold" if model.name in names else "normal") for point, names in points.items()]
    place_labels(axes, named, lines, fontsize=8, parse_math=False)
    return figure


def plot_scaling(strong: Sequence[ScalingPoint], weak: Sequence[ScalingPoint]) -> Figure:
    """Plot the step time over the number of GPUs, beside the ideal one."""
    from matplotlib.figure import Figure

    figure = Figure((9.6, 3.7), layout="constrained")
    labels: list[Any] = []
    for axes, points, is_weak in zip(figure.subplots(1, 2), (strong, weak), (False, True), strict=True):
        ranks = [point.num_ranks for point in points]
        fits = [(point.num_ranks, point.best) for point in points if point.best]
        if fits:
            first, base = fits[0][0], fits[0][1].seconds
            ideal = [base if is_weak else base * first / count for count, _ in fits]
            counts, seconds = [n for n, _ in fits], [e.seconds for _, e in fits]
            lines = axes.plot(counts, ideal, "--", color=_GREY, label="ideal, from the first that fits")
            lines += axes.plot(counts, seconds, "o-", color=_INDIGO, label="fastest")
            slowest = max(seconds)
            named = [
                ((count, entry.seconds), f"{amount(entry.seconds, 's')}\nMFU {entry.mfu:.0%}", "normal")
                for count, entry in fits
            ]
            labels.append((axes, named, lines))
            if is_weak:
                axes.set_ylim(0, 1.25 * slowest)
            else:
                axes.set_yscale("log", base=2)
                axes.set_ylim(min(*ideal, slowest) / 1.5, 1.9 * slowest)
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
            axes.legend(loc="lower left", fontsize=8)
        else:
            axes.set_yticks([])
        for point in points:
            if not point.best:
                reason = f"does not fit\n+{amount(point.lacking, 'B')}" if point.lacking else "no layout divides"
                axes.axvline(point.num_ranks, color=_ROSE, linestyle=":", linewidth=1)
                axes.annotate(
                    reason, (point.num_ranks, 0.5), xycoords=("data", "axes fraction"), ha="center", va="center",
                    fontsize=8, color=_WINE, bbox=_PAPER,
                )  # fmt: skip
        sequences = "as many sequences a GPU" if is_weak else f"{points[0].batch} sequences a step"
        axes.set(xscale="log", xlabel="GPUs", ylabel="time of a step (s)")
        axes.set_title(f"{'weak' if is_weak else 'strong'} scaling: {sequences}", fontsize=_FONT)
        axes.set_xlim(min(ranks) / 1.4, max(ranks) * 1.9)
        _set_plain_ticks(axes.xaxis, ranks)
    for axes, named, lines in labels:  # last, when the layout is final
        place_labels(axes, named, lines, fontsize=8)
    return figure


def _draw_bars(names: Sequence[str], parts: Sequence[dict[str, float]], unit: float) -> tuple[Figure, Axes]:
    """Draw a bar for each name, the first at the top. Small parts (below 1 % of every bar, or beyond the
    largest) are merged into "other"."""
    from matplotlib.figure import Figure

    most = {name: max(sizes[name] / sum(sizes.values()) for sizes in parts) for name in parts[0]}
    largest = sorted((name for name in most if most[name] > 0.01), key=lambda name: -most[name])[:_MAX_PARTS]
    shown_parts = [name for name in most if name in largest]
    figure = Figure((9.6, 0.36 * len(names) + 1.5), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(names)
    other_sums = [sum(v for name, v in sizes.items() if name not in largest) for sizes in parts]
    labels = [LABELS.get(name, name) for name in shown_parts]
    layers: list[tuple[str, list[float], str]] = [
        (label, [sizes[name] for sizes in parts], color)
        for name, label, color in zip(shown_parts, labels, find_colors(labels), strict=True)
    ]
    if any(other_sums):
        layers.append(("other", other_sums, OTHER))
    for label, values, color in layers:
        widths = [value / unit for value in values]
        axes.barh(range(len(names)), widths, 0.72, left, color=color, label=label, edgecolor="white", linewidth=0.5)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure, axes


def _draw_cells(axes: Axes, grid: LayoutGrid, norm: Any) -> Any:
    """Draw a grid of layouts as a map with numbers in its cells."""
    from matplotlib.patches import Rectangle

    def value(row: int, column: int) -> float:
        cell = grid.cells.get((row, column))
        return cell.best.seconds if cell and cell.best else float("nan")

    values = [[value(row, column) for column in grid.columns] for row in grid.rows]
    image = axes.imshow(values, cmap="cividis_r", norm=norm, origin="lower", aspect="auto")
    for y, row in enumerate(grid.rows):
        for x, column in enumerate(grid.columns):
            cell = grid.cells.get((row, column))
            if cell is None:
                text, color = "–", _GREY
            elif cell.best:
                text, color = f"{cell.best.seconds:.3g}", "white" if norm(cell.best.seconds) > 0.5 else "black"
            else:
                text, color = "+" + amount(cell.lacking, "B").replace(" ", "\n"), _WINE
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor="#E5C5CB", lw=0))
            axes.text(x, y, text, ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(grid.columns)), [str(size) for size in grid.columns])
    axes.set_yticks(range(len(grid.rows)), [str(size) for size in grid.rows])
    axes.set(xlabel=f"{grid.axes[1]} (ranks)", ylabel=f"{grid.axes[0]} ({_OF_AXIS[grid.axes[0]]})")
    return image


_OF_AXIS = {"PP": "stages", "TP": "ranks", "EP": "ranks"}


def _set_plain_ticks(axis: Any, values: Iterable[int]) -> None:
    """Label a logarithmic axis by whole numbers instead of powers of ten."""
    ticks = list(values)
    axis.set_ticks(ticks, labels=[str(tick) for tick in ticks])
    axis.set_ticks([], minor=True)
