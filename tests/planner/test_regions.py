"""Layout grids and scaling: each cell and each point equals the result of a search."""

from __future__ import annotations

import dataclasses

import pytest

from moefx.planner.catalogue import MODELS, find_model
from moefx.planner.layout import Layout
from moefx.planner.paper_formulas import X_MOE
from moefx.planner.platforms import PLATFORMS
from moefx.planner.regions import (
    TRADE_OFF,
    build_layout_grid,
    collect_trade_off_values,
    compute_ssmb_border,
    explain_ssmb_saving,
)
from moefx.planner.scaling import search_scaling
from moefx.planner.step_formulas import evaluate_memory
from moefx.ranking import plan
from moefx.util.unit_text import amount


@pytest.fixture(scope="module")
def narrow():
    """Mixtral 8x7B on twenty A100 of 40 GB: some sizes fit, some do not."""
    return plan("mixtral-8x7b", "a100-40gb", 20, batch=80)


@pytest.mark.parametrize("axes", [("PP", "EP"), ("TP", "EP"), ("PP", "TP")])
def test_cells_are_the_best_of_their_layouts(narrow, axes):
    def sizes(layout):
        both = {"PP": layout.pp, "TP": layout.tp, "EP": layout.ep}
        return both[axes[0]], both[axes[1]]

    grid = build_layout_grid(narrow, axes)
    fitting = {where for where, cell in grid.cells.items() if cell.best}
    assert fitting == {sizes(entry.layout) for entry in narrow}
    for where in fitting:
        assert grid.cells[where].lacking == 0
        assert grid.cells[where].best.seconds == min(e.seconds for e in narrow if sizes(e.layout) == where)
    for where in grid.cells.keys() - fitting:
        tried = [r.lacking for r in narrow.rejected for s in r.sizes if (s.get(axes[0]), s.get(axes[1])) == where]
        assert grid.cells[where].lacking == min(lacking for lacking in tried if lacking) > 0
    assert {where[0] for where in grid.cells} == set(grid.rows)
    assert {where[1] for where in grid.cells} == set(grid.columns)
    assert list(grid.columns) == sorted(grid.columns)


def test_both_kinds_of_cells_are_there(narrow):
    cells = build_layout_grid(narrow).cells.values()
    assert any(cell.best for cell in cells) and any(cell.lacking for cell in cells)


def test_axes_are_within_the_fast_domain():
    ranking = plan("deepseek-v3", "frontier", 512)
    assert max(build_layout_grid(ranking).columns) == 32
    assert max(build_layout_grid(plan("deepseek-v3", "frontier", 512, fast_domain=0)).columns) == 256


@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_both_save_equally_on_the_border(name, tokens):
    """X-MoE eq. 1 and 2; sides of figure 17's own models are in `test_paper_formulas`."""
    model = find_model(name)
    found = X_MOE(k=model.top_k, H_FFN=model.expert_size, H=model.hidden_size, S=tokens, c=1, G=4)
    assert (model.top_k / model.expert_size > compute_ssmb_border(tokens)) == (found["A_saving"] > found["M_mincost"])


def test_the_trade_off_equals_the_papers():
    """Two matrices, an expert a rank, one layer and micro-batch."""
    model = find_model("x-moe-large").replace(num_layers=1, num_moe_layers=1)
    layout = Layout(tp=4, dp=64, ep=256, ssmb=True)
    found = TRADE_OFF(**collect_trade_off_values(model, layout))
    theirs = X_MOE(k=8, H_FFN=2048, H=7168, S=4096, c=1, G=4)
    assert (found["A_saving"], found["M_cost"]) == (theirs["A_saving"], theirs["M_mincost"])


def test_the_trade_off_of_a_stage():
    """Activations of every layer and micro-batch in flight, or of one layer where they run again; states of all."""
    model, layout = find_model("deepseek-v3"), Layout(pp=4, tp=4, dp=4, ep=16, ssmb=True, microbatches=8)
    found = TRADE_OFF(**collect_trade_off_values(model, layout))
    again = TRADE_OFF(**collect_trade_off_values(model, dataclasses.replace(layout, recompute=True)))
    assert found["A_saving"] == again["A_saving"] * 15 * 4
    assert found["M_cost"] == again["M_cost"] == 15 * 16 * 4 * 3 * 2048 * 7168 * 3 / 4


@pytest.mark.parametrize("kept", ["h", "x", "deepspeed-moe"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pp", [1, 4])
def test_savings_of_ssmb_are_shown_with_their_formula(pp, recompute, kept):
    model, platform = find_model("deepseek-v3"), PLATFORMS["frontier"]
    with_it, without = (
        Layout(pp=pp, tp=4, dp=16, ep=16, ssmb=ssmb, kept=kept, recompute=recompute, microbatches=8)
        for ssmb in (True, False)
    )
    saved = evaluate_memory(model, without, platform)["M_gpu"] - evaluate_memory(model, with_it, platform)["M_gpu"]
    shown = str(explain_ssmb_saving(model, with_it, platform))
    assert shown.splitlines()[0].startswith("M_saved = ") and shown.splitlines()[1].endswith(f" = {amount(saved, 'B')}")
    assert shown == str(explain_ssmb_saving(model, without, platform))
    assert explain_ssmb_saving(model, dataclasses.replace(with_it, tp=1, ssmb=False), platform) is None


@pytest.mark.parametrize("is_weak", [False, True])
def test_points_are_rankings_of_their_own(narrow, is_weak):
    told = []
    points = search_scaling(narrow, is_weak, told.append)
    assert [p.num_ranks for p in points] == [5, 10, 20, 40, 80] and len(told) == 5
    assert [p.batch for p in points] == ([20, 40, 80, 160, 320] if is_weak else [80] * 5)
    for point in points:
        own = plan("mixtral-8x7b", "a100-40gb", point.num_ranks, batch=point.batch)
        assert point.best == (own[0] if len(own) else None)
        assert (point.lacking > 0) == (point.best is None)


def test_options_of_a_ranking_hold_for_its_scaling():
    ranking = plan("olmoe-1b-7b", "frontier", 16, batch=32, tokens=512, max_sequences=1, fast_domain=4)
    for point in search_scaling(ranking, is_weak=True):
        assert point.best.layout.tokens == 512 and point.best.layout.sequences == 1 and point.best.layout.ep <= 4


@pytest.mark.parametrize(("gpus", "expected"), [(1, [1, 2, 4]), (6, [3, 6, 12, 24]), (7, [7, 14, 28])])
def test_gpus_are_whole(gpus, expected):
    ranking = plan("olmoe-1b-7b", "mi300x", gpus, batch=84, tokens=512)
    assert [point.num_ranks for point in search_scaling(ranking, is_weak=False)] == expected
