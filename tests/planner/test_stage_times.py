"""Layers are cut into stages of equal predicted time."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from moefx.errors import InvalidPlan
from moefx.planner.catalogue import find_model
from moefx.planner.layout import Layout
from moefx.planner.platforms import PLATFORMS
from moefx.planner.stage_times import cut_by_time, find_max_layers, predict_layer_times
from moefx.planner.step_formulas import collect_values, evaluate_memory, find_step_sheet

MODEL, PLATFORM = find_model("deepseek-v3"), PLATFORMS["h200"]
LAYOUT = Layout(pp=4, dp=8, ep=8, sequences=1, microbatches=8)


def seconds_of_stages(layers, head, counts):
    ends = list(itertools.accumulate(counts))
    return [
        sum(layers[end - count : end]) + head * (end == len(layers)) for end, count in zip(ends, counts, strict=True)
    ]


def test_layer_times_add_up_to_the_step_of_the_formulas():
    found = predict_layer_times(MODEL, LAYOUT, PLATFORM)
    whole = dataclasses.replace(LAYOUT, pp=1)
    step = find_step_sheet(whole, PLATFORM)(**collect_values(MODEL, whole, PLATFORM))
    dense = MODEL.num_layers - MODEL.num_moe_layers
    total = dense * found.dense + MODEL.num_moe_layers * found.moe + found.head
    assert total == pytest.approx(step["T_micro"])
    assert 0 < found.dense < found.moe and found.head > 0


def test_the_longest_stage_is_as_short_as_possible():
    draw = random.Random(0)
    for _ in range(40):
        layers = [draw.choice((1.0, 3.0, 0.25)) for _ in range(draw.randint(4, 9))]
        head, stages = draw.choice((0.0, 2.5)), draw.randint(1, 4)
        counts = cut_by_time(layers, head, stages)
        assert sum(counts) == len(layers) and len(counts) == stages and min(counts) > 0
        cuts = itertools.combinations(range(1, len(layers)), stages - 1)
        others = [[b - a for a, b in itertools.pairwise((0, *cut, len(layers)))] for cut in cuts]

        def rank(counts, layers=layers, head=head):
            found = seconds_of_stages(layers, head, counts)
            return max(found), sum(each**2 for each in found)

        assert rank(counts) == pytest.approx(min(map(rank, others)))


def test_a_large_head_and_dense_layers_move_the_cuts():
    assert cut_by_time([1.0] * 8, 0.0, 2) == (4, 4)
    assert cut_by_time([1.0] * 8, 2.0, 2) == (5, 3)
    assert cut_by_time([0.25] * 4 + [1.0] * 3, 0.0, 2) == (5, 2)
    assert cut_by_time([1.0] * 8, 2.0, 2, max_layers=4) == (4, 4)
    for layers, stages, most in (([1.0], 2, None), ([1.0] * 8, 2, 3)):
        with pytest.raises(InvalidPlan, match=f"{len(layers)} layers cannot be cut into 2 stages"):
            cut_by_time(layers, 0.0, stages, most)


def test_stages_have_as_many_layers_as_the_memory_holds():
    even = -(-MODEL.num_layers // LAYOUT.pp)
    needed = evaluate_memory(MODEL, LAYOUT, PLATFORM)["M_gpu"]
    for memory_bytes, least, most in ((needed, even, even), (1.3 * needed, even + 1, 20), (100 * needed, 61, 61)):
        found = find_max_layers(MODEL, LAYOUT, dataclasses.replace(PLATFORM, memory_bytes=memory_bytes))
        assert least <= found <= most
