"""Plots show their data with units, nothing is cut off, and no global state changes."""

from __future__ import annotations

import base64
import sys

import pytest

from moefx.planner import plots
from moefx.planner.breakdown import compute_memory_parts, compute_time_parts
from moefx.planner.catalogue import MODELS
from moefx.planner.regions import build_layout_grid, compute_ssmb_border
from moefx.planner.scaling import search_scaling
from moefx.ranking import plan

pytest.importorskip("matplotlib")
GIB = 2**30


@pytest.fixture(scope="module")
def narrow():
    return plan("mixtral-8x7b", "a100-40gb", 20, batch=20)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_bars_are_as_long_as_memory(narrow):
    entries = narrow.entries[:4]
    parts = [compute_memory_parts(narrow.model, narrow.platform, e.layout) for e in entries]
    figure = plots.plot_memory(["a", "b", "c", "d"], parts, narrow.platform.memory_bytes)
    (axes,) = figure.axes
    ends = [0.0] * 4
    for bars in axes.containers:
        for i, bar in enumerate(bars):
            assert bar.get_x() == pytest.approx(ends[i])
            ends[i] = bar.get_x() + bar.get_width()
    assert ends == pytest.approx([e.memory["M_gpu"] / GIB for e in entries])
    assert [line.get_xdata()[0] for line in axes.lines] == [40]
    assert "capacity 40 GiB" in texts(axes) and axes.get_xlabel() == "memory of a GPU (GiB)"
    assert axes.get_xlim()[1] > 40
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c", "d"]
    assert axes.yaxis_inverted()  # the first at the top
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:3] == ["parameters", "gradients", "optimizer states"] and len(set(legend)) == len(legend)


def test_bars_are_as_long_as_steps(narrow):
    parts = [compute_time_parts(narrow.model, narrow.platform, e.layout, e.experts_first) for e in narrow.entries[:3]]
    (axes,) = plots.plot_seconds(["a", "b", "c"], parts).axes
    ends = [max(bars[i].get_x() + bars[i].get_width() for bars in axes.containers) for i in range(3)]
    assert ends == pytest.approx([e.seconds for e in narrow.entries[:3]])
    assert "(s)" in axes.get_xlabel()


def test_many_parts_are_few_colours():
    parts = [{f"M_{i}": 2.0**i for i in range(15)}]
    figure = plots.plot_memory(["a"], parts, 2.0**14)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-1] == "other" and len(legend) <= 10
    assert "M_14" in legend and "M_0" not in legend


def test_cells_show_their_regions(narrow):
    found = [build_layout_grid(narrow), build_layout_grid(narrow, ("TP", "EP"))]
    figure = plots.plot_layout_grids(found)
    for axes, grid in zip(figure.axes, found, strict=False):
        shown = texts(axes)
        assert len(shown) == len(grid.rows) * len(grid.columns)
        for text, (row, column) in zip(shown, [(r, c) for r in grid.rows for c in grid.columns], strict=True):
            cell = grid.cells.get((row, column))
            if cell is None:
                assert text == "–"
            elif cell.best:
                assert text == f"{cell.best.seconds:.3g}"
            else:
                assert text.startswith("+") and text.endswith("\nGiB")
        assert axes.get_xlabel() == "EP (ranks)"
    assert any("GiB" in text for text in texts(figure.axes[0]))
    assert figure.axes[-1].get_ylabel() == "fastest step (s)"


def test_one_cell_is_a_picture_too():
    ranking = plan("olmoe-1b-7b", "mi300x", 1, batch=1)
    assert plots.render_data_uri(
        plots.plot_layout_grids, [build_layout_grid(ranking), build_layout_grid(ranking, ("TP", "EP"))]
    )


@pytest.mark.parametrize("name", ["deepseek-v3", "x-moe-super"])
def test_models_are_above_or_below_the_border(name):
    (axes,) = plots.plot_ssmb_border(MODELS[name], 4096).axes
    lines = {line.get_label(): line for line in axes.lines if str(line.get_label()).startswith("border")}
    for length in (2048, 4096, 8192):
        x, y = lines[f"border, s = {length}"].get_data()
        assert list(y) == pytest.approx([compute_ssmb_border(length) * at for at in x])
    (star,) = [line for line in axes.lines if line.get_marker() == "*"]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (MODELS[name].expert_size, MODELS[name].top_k)
    assert name in [line for text in texts(axes) for line in text.split("\n")]
    assert axes.get_xscale() == axes.get_yscale() == "log"


def covered(axes):
    """Pairs of texts that cover each other, or points of lines with markers, or stick out."""
    axes.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    marked = [line for line in axes.lines if line.get_marker() in ("o", "*")]
    points = [at for line in marked for at in axes.transData.transform(line.get_xydata())]
    found = [(i, j) for i, a in enumerate(boxes) for j, b in enumerate(boxes[:i]) if a.overlaps(b)]
    found += [(i, "point") for i, box in enumerate(boxes) if box.count_contains(points)]
    return found + [(i, "out") for i, box in enumerate(boxes) if not axes.figure.bbox.containsx(box.x1)]


@pytest.mark.parametrize("name", ["deepseek-v3", "arctic", "x-moe-super"])
def test_names_of_models_do_not_cover_each_other(name):
    (axes,) = plots.plot_ssmb_border(MODELS[name], 4096).axes
    assert covered(axes) == []
    shown = {line for text in texts(axes) for line in text.split("\n")}
    assert shown == {model for model in MODELS if not model.startswith("x-moe")} | {name}


def test_labels_of_steps_do_not_cover_each_other(narrow):
    for axes in plots.plot_scaling(search_scaling(narrow, False), search_scaling(narrow, True)).axes:
        assert covered(axes) == []


def test_points_are_steps(narrow):
    strong, weak = search_scaling(narrow, False), search_scaling(narrow, True)
    figure = plots.plot_scaling(strong, weak)
    for axes, points in zip(figure.axes, (strong, weak), strict=True):
        fitting = [p for p in points if p.best]
        (line,) = [line for line in axes.lines if line.get_label() == "fastest"]
        assert list(line.get_xdata()) == [p.num_ranks for p in fitting]
        assert list(line.get_ydata()) == [p.best.seconds for p in fitting]
        assert sum("does not fit" in text for text in texts(axes)) == len(points) - len(fitting) > 0
        assert axes.get_xlabel() == "GPUs" and axes.get_ylabel() == "time of a step (s)"


def test_plots_without_a_fitting_layout():
    ranking = plan("deepseek-v3", "a100-40gb", 8)
    points = search_scaling(ranking, False)
    assert plots.render_data_uri(plots.plot_scaling, points, points) and plots.render_data_uri(
        plots.plot_layout_grids, [build_layout_grid(ranking)]
    )


def test_nothing_global_is_touched(narrow):
    import matplotlib

    had, rc = "matplotlib.pyplot" in sys.modules, matplotlib.rcParams.copy()
    with matplotlib.rc_context({"font.size": 31, "axes.facecolor": "black"}):
        inside = matplotlib.rcParams.copy()
        first = plots.render_data_uri(plots.plot_ssmb_border, narrow.model, 4096)
        assert matplotlib.rcParams.copy() == inside
    second = plots.render_data_uri(plots.plot_ssmb_border, narrow.model, 4096)
    assert first == second  # whatever the user's settings are, and each time
    assert matplotlib.rcParams.copy() == rc and ("matplotlib.pyplot" in sys.modules) == had
    kind, _, data = first.partition(",")
    assert kind == "data:image/svg+xml;base64" and b"</svg>" in base64.b64decode(data)
