"""Memory of a GPU: measured values, monotony, and sums."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import moefx
from moefx.bench.shapes import parse_shape
from moefx.errors import InvalidPlan
from moefx.planner import step_formulas
from moefx.planner.catalogue import MODELS, find_model
from moefx.planner.layout import Layout
from moefx.planner.memory_formulas import MEMORY
from moefx.planner.platforms import PLATFORMS
from moefx.planner.step_formulas import evaluate_memory_by_zero

from ..blocks import D, E, Gated, H, K, Loop, Mlp


def memory(model, layout: Layout, stage: int = 0) -> dict[str, float]:
    return MEMORY(**layout.values(model, stage), M_fw=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["h", "x", "all"])
@pytest.mark.parametrize(("kind", "matrices"), [(Gated, 3), (Mlp, 2)])
def test_saved_bytes_equal_those_of_compile(kind, matrices, policy):
    """Bytes a token, exactly."""
    block = Loop(kind).to(torch.bfloat16)
    example = (torch.randn(9, D, dtype=torch.bfloat16),)
    compiled = moefx.compile(block, plan=moefx.Plan(checkpoint=policy), example_inputs=example)
    (matched,) = moefx.explain(compiled).matched
    model = find_model("mixtral-8x7b").replace(hidden_size=D, num_experts=E, top_k=K, expert_size=H, matrices=matrices)
    found = memory(model, Layout(kept=policy, tokens=1))
    assert found["A_dispatch"] + found["A_interm"] == matched.saved_after


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "moe_h200.jsonl"
ROWS = [json.loads(line) for line in RESULTS.read_text().splitlines()]


@pytest.mark.parametrize("is_dense", [True, False])
def test_the_larger_layer_runs_again(is_dense):
    """Inputs of all layers are kept, and all of one layer at a time, with experts or without."""
    model = find_model("deepseek-v3").replace(dense_size=10**6 if is_dense else 1)
    found = memory(model, Layout(recompute=True, ep=8, dp=8))
    larger = found["A_dense_layer" if is_dense else "A_moe_layer"]
    assert found["M_activations"] - found["A_logits"] == model.num_layers * 2 * 4096 * model.hidden_size + larger


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.get("peer") == "moefx"], ids=lambda r: f"{r['shape']}-{r['routing']}"
)
def test_saved_bytes_equal_the_measured_ones(row):
    """On the GPU, ten shapes, to the byte: tokens, hidden rows, ERI arrays."""
    shape = parse_shape(row["shape"])
    model = find_model("mixtral-8x7b").replace(
        hidden_size=shape.d, num_experts=shape.E, top_k=shape.K, expert_size=shape.h, matrices=shape.matrices
    )
    found = memory(model, Layout(tokens=shape.T))
    assert found["A_dispatch"] + found["A_interm"] + found["A_meta"] == round(row["saved_bytes_per_token"] * shape.T)


def test_gather_has_room_for_the_tokens_of_all_ranks():
    """Hold the tokens of all ranks on every rank. Keep hidden rows in a stash, over two ranks in tensors for the worst
    case. Buffers of one layer are for the worst case."""
    model = find_model("olmoe-1b-7b")
    for ranks, room in ((2, 2), (4, 1.1)):
        dedup, gather = (memory(model, Layout(dp=ranks, ep=ranks, dispatch=way)) for way in ("dedup", "gather"))
        tokens = ranks * 4096
        assert gather["n_dup"] == ranks and gather["A_dispatch"] == 2 * tokens * model.hidden_size
        assert gather["A_interm"] == pytest.approx(room * dedup["A_interm"])
        assert gather["M_states"] == dedup["M_states"] and dedup["A_buffers"] == 0
        width = 3 * model.expert_size + model.hidden_size  # both up-projections, the activation, the result
        assert gather["A_buffers"] == 2 * tokens * model.top_k * width
        offsets = 4 * (model.num_experts / ranks + 1)
        assert gather["A_meta"] - offsets == ranks * (dedup["A_meta"] - offsets)


LAYOUTS = st.builds(
    lambda pp, tp, dp, ep, **more: Layout(pp=2**pp, tp=2**tp, dp=2**dp, ep=2 ** min(ep, tp + dp), **more),
    pp=st.integers(0, 3), tp=st.integers(0, 3), dp=st.integers(0, 5), ep=st.integers(0, 7), ssmb=st.booleans(),
    zero=st.integers(0, 3), dispatch=st.sampled_from(["flat", "dedup", "gather"]),
    kept=st.sampled_from(["h", "x", "all", "x-moe"]),
    recompute=st.booleans(), sequences=st.integers(1, 4), tokens=st.sampled_from([512, 4096]),
    microbatches=st.integers(1, 16), schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]),
)  # fmt: skip
NAMES = st.sampled_from(sorted(MODELS))


@settings(deadline=None)  # the first one prints and compiles formulas
@given(LAYOUTS, NAMES)
def test_more_tokens_need_no_less_memory(layout, name):
    model = find_model(name)
    assume(model.num_experts % layout.ep == 0)
    found = memory(model, layout)
    assert all(value >= 0 for value in found.values())
    for field in ("sequences", "tokens", "microbatches"):
        more = dataclasses.replace(layout, **{field: 2 * getattr(layout, field)})
        assert memory(model, more)["M_gpu"] >= found["M_gpu"]
    if layout.zero < 3:
        less = memory(model, dataclasses.replace(layout, zero=layout.zero + 1))
        assert less["M_gpu"] <= found["M_gpu"]
    assert memory(model, dataclasses.replace(layout, ssmb=False))["M_gpu"] >= found["M_gpu"]


@settings(deadline=None)  # the first one prints and compiles formulas
@given(LAYOUTS, NAMES)
def test_states_of_all_ranks_are_those_of_the_model(layout, name):
    """Spread over all ranks (ZeRO-3) there is one copy of everything, but for stages of unequal length."""
    model = find_model(name)
    assume(model.num_experts % layout.ep == 0)
    found = memory(model, dataclasses.replace(layout, zero=3))
    assert found["M_states"] * layout.num_ranks >= 16 * (model.parameters() - model.hidden_size) * (1 - 1e-12)
    alone = memory(model, Layout(zero=0))
    last_norm = model.hidden_size if model.norms else 0
    assert alone["M_states"] == 16 * (model.parameters() - last_norm)


@pytest.mark.parametrize(
    ("schedule", "chunks", "stages"),
    [
        ("gpipe", 1, [16, 16, 16, 16]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved", 2, [5.5, 4.5, 3.5, 2.5]),
        ("zb-h1", 1, [4, 4, 4, 4]),
        ("zb-h2", 1, [7, 7, 7, 7]),
    ],
)
def test_micro_batches_in_flight(schedule, chunks, stages):
    layout = Layout(pp=4, microbatches=16, schedule=schedule, chunks=chunks)
    assert [layout.in_flight(stage) for stage in range(4)] == stages
    few = Layout(pp=4, microbatches=1, schedule=schedule, chunks=chunks)
    assert max(few.in_flight(stage) for stage in range(4)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(dp=4, ep=3), r"ep=3 does not divide tp \* dp = 1 \* 4 = 4"),
        (dict(pp=0), "pp is 0, expected a whole number above 0"),
        (dict(dispatch="fast"), "dispatch is 'fast', expected one of flat, dedup, rbd, halo"),
        (dict(zero=4), "zero is 4, expected 0, 1, 2 or 3"),
    ],
)
def test_impossible_layouts_raise(fields, message):
    with pytest.raises(InvalidPlan, match=message):
        Layout(**fields)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=64, ep=64), "ep=64 does not divide the 160 experts of deepseek-v2"),
        (Layout(pp=61), "pp=61 stages, but deepseek-v2 has 60 layers"),
    ],
)
def test_layouts_that_a_model_cannot_have(layout, message):
    with pytest.raises(InvalidPlan, match=message):
        layout.values(find_model("deepseek-v2"))


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_parts_that_searches_share_add_up(pp, recompute):
    """Equal the complete formulas with parts that layouts share: states per ZeRO stage, and saved tensors."""
    model, platform = find_model("deepseek-v3"), PLATFORMS["h200"]
    layout = Layout(pp=pp, tp=4, dp=16, ep=16, ssmb=True, sequences=2, recompute=recompute, microbatches=8)
    for zero, found in evaluate_memory_by_zero(model, layout, platform, (3, 0, 1, 2)):
        own = dataclasses.replace(layout, zero=zero)
        stages = [MEMORY(**own.values(model, stage), M_fw=platform.overhead) for stage in range(pp)]
        assert (
            found
            == max(stages, key=lambda results: results["M_gpu"])
            == step_formulas.evaluate_memory(model, own, platform)
        )
