"""Colors of parts on the pages of several plans, and labels that fit."""

from __future__ import annotations

import base64
import re

import pytest

from moefx.planner import plots
from moefx.planner.breakdown import LABELS, compute_memory_parts, compute_time_parts
from moefx.planner.catalogue import MODELS
from moefx.planner.part_colors import OTHER, find_colors
from moefx.planner.ranking_page import _build_unique_labels, render
from moefx.planner.regions import build_layout_grid
from moefx.planner.scaling import search_scaling
from moefx.ranking import plan

PLANS = [
    (("olmoe-1b-7b", "a100-40gb", 4), {"batch": 16, "tokens": 512}),
    pytest.param((("mixtral-8x7b", "a100-40gb", 20), {"batch": 20}), marks=pytest.mark.exhaustive),
    (("deepseek-v3", "frontier", 1024), None),  # the ranking of `large`
]


@pytest.fixture(scope="module", params=PLANS, ids=lambda case: case[0][0])
def ranking(request):
    pytest.importorskip("matplotlib")
    names, options = request.param
    return request.getfixturevalue("large")[0] if options is None else plan(*names, **options)


@pytest.fixture(scope="module")
def page(ranking, large):
    return large[1] if ranking is large[0] else render(ranking)


def read_legends(page: str) -> list[dict[str, str]]:
    """Return the color of each label in the legends of a page's bar plots."""
    found = []
    for data in re.findall(r'src="data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)"', page):
        svg = base64.b64decode(data).decode()
        legend = svg[svg.index('id="legend_1"') :] if 'id="legend_1"' in svg else ""
        colors = re.findall(r'style="fill: (#[0-9a-f]{6}); stroke: #ffffff.*?<!-- (.*?) -->', legend, re.DOTALL)
        if colors:
            found.append({label: color for color, label in colors})
            for color in found[-1].values():
                assert svg.count(f"fill: {color}; stroke: #ffffff") > 1  # the legend and a bar
    return found


def test_a_part_has_one_colour_on_all_pages(page):
    legends = read_legends(page)
    assert len(legends) == 2  # memory and time
    for legend in legends:
        assert len(set(legend.values())) == len(legend)
        for label, color in legend.items():
            expected = OTHER if label == "other" else find_colors([label])[0]
            assert color == expected.lower() and label in {"other", *LABELS.values()}


def test_all_parts_of_a_plot_have_different_colours():
    memory, time = ([LABELS[n] for n in LABELS if n.startswith("T_") is is_time] for is_time in (False, True))
    for labels in (memory, time):
        colors = find_colors(labels)
        assert len(set(colors)) == len(colors) and OTHER not in colors
    assert find_colors(["attention", "M_new"])[1] != find_colors(["attention"])[0]


def list_cut_texts(figure) -> list[str]:
    """Return texts that extend beyond a figure."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    beyond = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }  # not drawn
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in texts if text not in beyond]
    page = figure.bbox.padded(1)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    return [shown for shown, box in boxes if not (page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1))]


def test_no_label_is_cut(ranking):
    best = ranking.entries[:10]
    names = [f"{i}: {name}" for i, name in enumerate(_build_unique_labels(best), 1)]
    model, platform = ranking.model, ranking.platform
    bytes_of = [compute_memory_parts(model, platform, e.layout) for e in best]
    seconds_of = [compute_time_parts(model, platform, e.layout, e.experts_first) for e in best]
    figures = {
        "memory": plots.plot_memory(names, bytes_of, platform.memory_bytes),
        "time": plots.plot_seconds(names, seconds_of),
        "regions": plots.plot_layout_grids([build_layout_grid(ranking), build_layout_grid(ranking, ("TP", "EP"))]),
        "border": plots.plot_ssmb_border(MODELS[model.name], 4096),
        "scaling": plots.plot_scaling(search_scaling(ranking, False), search_scaling(ranking, True)),
    }
    assert {name: cut for name, figure in figures.items() if (cut := list_cut_texts(figure))} == {}


def test_numbers_fit_their_cells(ranking):
    figure = plots.plot_layout_grids([build_layout_grid(ranking), build_layout_grid(ranking, ("TP", "EP"))])
    figure.draw_without_rendering()
    for axes in [axes for axes in figure.axes if axes.texts]:
        (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
        for text in axes.texts:
            box = text.get_window_extent()
            assert box.width < abs(x1 - x0) and box.height < abs(y1 - y0), text.get_text()
