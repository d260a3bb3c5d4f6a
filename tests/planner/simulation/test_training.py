"""A step as events against its formulas: equal if they leave nothing out, else within stated bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given as example
from hypothesis import settings
from hypothesis import strategies as st

from moefx.errors import InvalidPlan
from moefx.planner.catalogue import find_model
from moefx.planner.layout import Layout
from moefx.planner.platforms import Network, find_platform
from moefx.planner.simulation import simulate
from moefx.planner.simulation.stage_work import build_stages, list_expert_groups
from moefx.planner.step_formulas import collect_values, find_step_sheet
from moefx.ranking import plan

from ...pace import limit_time

FRONTIER, DGX, H200, A100 = map(find_platform, ("frontier", "dgx-h100", "h200", "a100-40gb"))


def alike(name, layers):
    """A model whose stages have the same to do: layers that divide, all with experts, and no logits."""
    return find_model(name).replace(num_layers=layers, num_moe_layers=layers, vocab_size=0)


OLMOE, QWEN, DEEPSEEK = alike("olmoe-1b-7b", 16), alike("qwen3-30b-a3b", 48), alike("deepseek-v3", 64)
CASES = [
    (OLMOE, Layout(dp=8, ep=8, dispatch="flat", microbatches=4), H200, True),
    (OLMOE, Layout(dp=8, ep=8, sequences=2, microbatches=2), A100, True),
    (OLMOE, Layout(dp=4, ep=4, dispatch="gather", microbatches=2), H200, True),
    (OLMOE, Layout(dp=8), A100, True),
    (OLMOE, Layout(dp=16, ep=16, dispatch="rbd", microbatches=2), DGX, True),
    (OLMOE, Layout(dp=16, ep=16, dispatch="halo", zero=3), A100, True),
    (QWEN, Layout(pp=4, dp=16, ep=16, dispatch="flat", microbatches=8, kept="x"), FRONTIER, True),
    (QWEN, Layout(pp=2, tp=4, dp=4, ep=16, ssmb=True, dispatch="rbd", microbatches=8, recompute=True), FRONTIER, True),
    (QWEN, Layout(pp=2, tp=2, dp=8, ep=8, microbatches=4), DGX, True),  # tensor ranks with the same tokens
    (QWEN, Layout(tp=4, dp=16, ep=2, microbatches=2), DGX, True),  # several groups within them
    (QWEN, Layout(pp=2, tp=2, dp=32, ep=8, ssmb=True, microbatches=4), DGX, False),  # replicas first
    (DEEPSEEK, Layout(pp=8, tp=4, dp=32, ep=16, ssmb=True, dispatch="halo", microbatches=32), FRONTIER, True),
    (
        DEEPSEEK,
        Layout(pp=16, tp=8, dp=8, ep=64, ssmb=True, dispatch="halo", microbatches=32, schedule="gpipe"),
        DGX,
        True,
    ),
]


def sampling(model, layout, platform, first):
    """Return bounds of the expected excess of the busiest link and rank of a stage over the mean.

    A link has N rows in the mean. Whether a row goes there are choices of many tokens, and those of one token exclude
    each other, so that the variance is N at most; times the tensor ranks that have the same tokens. The most of n
    such numbers is sqrt(2 ln n) standard deviations above the mean at most.
    """
    found = find_step_sheet(layout, platform, first)(**collect_values(model, layout, platform, first))
    tokens = layout.sequences * layout.tokens / (layout.tp if layout.ssmb else 1)
    rows = [value for name, value in found.items() if name.startswith("rows_dedup_") and value] or [math.inf]
    copies = 1 if layout.ssmb else layout.tp
    number = 2 * len(rows) * layout.tp * layout.dp
    return tuple(math.sqrt(2 * math.log(number) * copies / (tokens * n)) for n in (min(rows), model.top_k))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_formulas_and_events_agree(case):
    """Without skew and stragglers. All else is the sampling of the busiest rank (`sampling`), gradients' rings that use
    several NICs of a node, and transfers between stages, which the formulas add up."""
    model, layout, platform, first = case
    found = simulate(*case, stragglers=False)
    formulas, parts = found.formulas, found.components
    assert sum(parts.values()) == pytest.approx(found.seconds)
    step = find_step_sheet(layout, platform, first)(**collect_values(model, layout, platform, first))
    assert sum(formulas.values()) == pytest.approx(step["T_step"])
    logits = layout.microbatches * step["n_pass"] * step["T_logits"]  # of the last stage alone; not quite nothing
    assert formulas["compute"] - logits <= parts["compute"] * (1 + 1e-9) <= formulas["compute"] * (1 + 2e-9)
    for name in ("tensor ranks", "optimizer"):
        assert parts[name] == pytest.approx(formulas[name]), name
    for name in ("gradients", "parameters"):
        assert formulas[name] / platform.node_size - 1e-12 <= parts[name] <= formulas[name] * (1 + 1e-9), name
    links, loads = sampling(*case)
    assert formulas["exchanges"] * (1 - links / 2) <= parts["exchanges"] <= formulas["exchanges"] * (1 + links)
    assert -1e-9 <= parts["waiting"] <= formulas["compute"] * loads + formulas["exchanges"] * links
    once = parts["gradients"] + parts["optimizer"]
    pace = parts["compute"] + formulas["exchanges"] + formulas["tensor ranks"] + parts["parameters"]
    more = formulas["compute"] * loads + formulas["exchanges"] * links
    rounds = 1 + (layout.pp - 1) / layout.microbatches
    transfers = formulas["stages"] - (rounds - 1) * (pace - parts["parameters"] + formulas["parameters"])
    assert rounds * (pace - formulas["exchanges"] * links / 2) + once <= found.seconds
    assert found.seconds <= rounds * (pace + more) + transfers + once
    assert found.seconds == pytest.approx(rounds * pace + once, rel=0.05)


def test_sums_of_a_stage_are_the_formulas():
    """Compare a rank with the mean number of slots, for all policies of saved and recomputed tensors."""
    whole = find_model("qwen3-30b-a3b")
    kinds: list[dict[str, Any]] = [{}, dict(kept="x"), dict(recompute=True), dict(zero=3), dict(kept="all")]
    for more in kinds:
        layout = Layout(pp=2, tp=2, dp=4, ep=8, ssmb=True, **more)
        found = find_step_sheet(layout, DGX)(**collect_values(whole, layout, DGX))
        first, last = build_stages(whole, layout, DGX, True)
        compute = []
        for stage in (first, last):
            both, mean = (stage.forward, stage.backward), torch.ones(())
            compute += [sum(p.dense + stage.moe_layers * p.experts.seconds(mean).item() for p in both)]
            assert sum(p.tensor for p in both) == pytest.approx(found["T_tp"] + found["T_gather"])
            assert sum(p.parameters for p in both) <= found["T_params"] * (1 + 1e-9)
            assert stage.weights.dense <= stage.backward.dense
            assert stage.weights.experts.seconds(mean) <= stage.backward.experts.seconds(mean)
        logits = found["n_pass"] * found["T_logits"]
        assert compute == pytest.approx([found["T_compute"] - logits, found["T_compute"]])


def test_layers_that_do_not_divide():
    """Give three of 16 stages 3 of the 61 layers, the others 4, and logits only to the last."""
    layout = Layout(pp=16, tp=4, dp=16, ep=16, ssmb=True, dispatch="halo", microbatches=64)
    model = find_model("deepseek-v3")
    every = build_stages(model, layout, FRONTIER, True)
    assert sum(stage.moe_layers for stage in every) == model.num_moe_layers
    assert simulate(model, layout, FRONTIER).ratio == pytest.approx(1, abs=0.02)
    assert simulate(DEEPSEEK, layout, FRONTIER).ratio == pytest.approx(1, abs=0.02)


def test_a_thousand_ranks_in_seconds():
    layout = Layout(pp=8, tp=4, dp=32, ep=16, ssmb=True, dispatch="halo", microbatches=32)
    with limit_time(10):
        found = simulate(find_model("deepseek-v3"), layout, FRONTIER, skew=0.5)
    assert layout.num_ranks == 1024 and found.draws == 32 and 0 <= found.slowest < 1024


def test_one_expert_per_rank_in_seconds():
    """Draw the largest exchange of the catalogue: 256 ranks, 4096 tokens each."""
    layout = Layout(dp=1024, ep=256, dispatch="flat")
    with limit_time(10):
        assert simulate(find_model("deepseek-v3"), layout, FRONTIER).imbalance > 1


SMALL = (OLMOE, Layout(pp=2, dp=8, ep=8, microbatches=4, tokens=256), DGX)


def test_skew_takes_longer():
    found = [simulate(*SMALL, skew=skew) for skew in (0, 0.25, 0.5, 1, 2)]
    for less, more in itertools.pairwise(found):
        assert more.seconds > less.seconds and more.imbalance > less.imbalance
        assert more.components["waiting"] > less.components["waiting"]
        assert more.components["exchanges"] > less.components["exchanges"]
        assert more.formulas == less.formulas
    assert found[-1].imbalance <= 8  # a rank cannot have more than all choices


def test_nearly_all_choices_on_one_expert():
    """Send 1 / (1 + 2^-4 + 3^-4 + ...) of the slots to the first of eight ranks, within five standard deviations."""
    model = OLMOE.replace(num_experts=8, top_k=1)
    found = simulate(model, Layout(dp=8, ep=8, dispatch="flat"), DGX, skew=4.0)
    share = 1 / sum(n**-4 for n in range(1, 9))
    bound = 5 * math.sqrt(share * (1 - share) / (8 * 4096 * found.draws))
    assert found.imbalance == pytest.approx(8 * share, abs=8 * bound)


def test_tensor_ranks_with_equal_tokens_select_equally():
    """Without SSMB four ranks send the same rows: what the busiest has above the mean is twice as much (sqrt(4))."""
    apart, alike_ = (simulate(QWEN, Layout(tp=tp, dp=8 // tp, ep=8, tokens=256), DGX).imbalance - 1 for tp in (1, 4))
    assert 1.5 < alike_ / apart < 2.5


def spread(*values):
    networks = [dataclasses.replace(network, spread=values) for network in DGX.networks]
    return dataclasses.replace(DGX, networks=tuple(networks))


@pytest.mark.parametrize("dispatch", ["dedup", "halo"])
def test_stragglers_take_longer(dispatch):
    """An exchange that takes 1, 1 or 4 times the median: 2 in the mean; two of HALO's hops that go on
    side by side wait for the slower one."""
    model, layout = OLMOE, Layout(dp=16, ep=16, dispatch=dispatch, microbatches=8, tokens=256)
    without, with_ = (simulate(model, layout, spread(1.0, 1.0, 4.0), stragglers=is_on) for is_on in (False, True))
    ratio = with_.components["exchanges"] / without.components["exchanges"]
    assert 1.9 < ratio < 2.1 if dispatch == "dedup" else 1.9 < ratio < 4
    assert with_.seconds > without.seconds and with_.exchanges[-1] > 3 * with_.exchanges[0]
    assert with_.components["compute"] == pytest.approx(without.components["compute"])
    assert simulate(model, layout, DGX).seconds == without.seconds  # nobody measured any


def test_a_seed_determines_the_simulation():
    one, again, other = (simulate(*SMALL, skew=0.5, seed=seed) for seed in (1, 1, 2))
    assert one == again and one.seconds != other.seconds
    assert one.seconds == pytest.approx(other.seconds, rel=0.1)


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    simulate(*SMALL)
    assert torch.get_num_threads() == before


def test_schedules_with_smaller_bubbles_are_faster():
    """Schedules with smaller bubbles are faster; GPipe and 1F1B differ only by transfers."""
    model, layout, platform = OLMOE, Layout(pp=4, dp=8, ep=8, microbatches=8, tokens=256), DGX
    found = {
        name: simulate(model, dataclasses.replace(layout, schedule=name, chunks=chunks), platform).components["stages"]
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1))
    }
    assert found["zb-h2"] < found["zb-h1"] < found["1f1b"] and found["interleaved"] < found["1f1b"]
    assert found["gpipe"] == pytest.approx(found["1f1b"], rel=0.1)


@pytest.mark.parametrize(
    ("layout", "first", "pipelines"),
    [
        (Layout(dp=16, ep=4), True, 4),
        (Layout(tp=2, dp=8, ep=4), True, 4),
        (Layout(tp=4, dp=4, ep=2), True, 4),  # two groups within each set of tensor ranks
        (Layout(tp=2, dp=8, ep=4), False, 2),  # ranks 0, 4, 8, 12 and their neighbours 1, 5, 9, 13
        (Layout(dp=16), True, 16),
        (Layout(tp=4, dp=6, ep=6), True, 2),  # groups of 6 overlap with sets of 4
    ],
)
def test_groups_that_wait_for_each_other(layout, first, pipelines):
    groups, labels = list_expert_groups(layout, first)
    assert groups.shape == (layout.expert_replicas, layout.ep) and labels.max() + 1 == pipelines
    assert groups.flatten().sort().values.tolist() == list(range(layout.tp * layout.dp))
    of_rank = torch.empty(layout.tp * layout.dp, dtype=torch.int64)
    of_rank[groups] = labels[:, None]
    assert (of_rank.view(-1, layout.tp) == of_rank.view(-1, layout.tp)[:, :1]).all()


@example(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]),
         st.sampled_from(["flat", "dedup"]), st.integers(1, 4), st.floats(0, 2))  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_parts_are_the_step(pp, tp, dp, ep, dispatch, microbatches, skew):
    if (tp * dp) % ep:
        return
    layout = Layout(pp=pp, tp=tp, dp=dp, ep=ep, dispatch=dispatch, microbatches=microbatches, tokens=256)
    found = simulate(find_model("olmoe-1b-7b"), layout, A100, skew=skew)
    assert sum(found.components.values()) == pytest.approx(found.seconds)
    assert all(seconds >= -1e-9 for seconds in found.components.values())
    assert bool(found.exchanges) == (ep > 1) and list(found.exchanges) == sorted(found.exchanges)
    assert 1 <= found.imbalance <= ep


def test_packing_takes_time_too():
    """Count half of the handling for sent rows and half for received ones, as the formula does."""
    slow, layout = dataclasses.replace(DGX, handling=1e-9), Layout(dp=8, ep=8, tokens=1024)
    found = simulate(OLMOE, layout, slow)
    assert found.components["exchanges"] == pytest.approx(found.formulas["exchanges"], rel=0.05)
    assert found.components["exchanges"] > 3 * simulate(OLMOE, layout, DGX).components["exchanges"]


def test_a_network_of_three_levels():
    tree = dataclasses.replace(
        DGX, networks=(Network("node", 4, 400e9), Network("switch", 16, 50e9), Network("all", 0, 10e9))
    )
    for dispatch in ("dedup", "rbd", "halo"):
        found = simulate(OLMOE, Layout(dp=64, ep=64, dispatch=dispatch, tokens=1024), tree)
        assert found.components["exchanges"] == pytest.approx(found.formulas["exchanges"], rel=0.1), dispatch


def test_simulation_of_a_ranking():
    ranking = plan("olmoe-1b-7b", "a100-40gb", 16, batch=64)
    found = ranking.simulate(1, skew=0.5, seed=3)
    entry = ranking[1]
    assert sum(found.formulas.values()) == pytest.approx(entry.seconds)
    assert found == simulate(ranking.model, entry.layout, ranking.platform, entry.experts_first, skew=0.5, seed=3)
    for text in ("simulated", "compute", "step", "routing of skew 0.5, seed 3", "computes longest", "drawn ones"):
        assert text in str(found)


@pytest.mark.parametrize(
    ("layout", "more", "message"),
    [
        (Layout(dp=8, ep=8), dict(skew=-1), "skew is -1, expected a number from 0 to 4"),
        (Layout(dp=8, ep=8), dict(skew=float("nan")), "skew is nan, expected"),
        (Layout(dp=8, ep=8), dict(skew="much"), "skew is 'much', expected"),
        (Layout(dp=8, ep=8), dict(seed=0.5), "seed is 0.5, expected a whole number"),
        (Layout(dp=8, ep=8, dispatch="rbd"), dict(), "dispatch='rbd' goes by levels, but EP=8 is within one: 'node'"),
        (Layout(dp=5, ep=5), dict(), "ep=5 does not divide the 64 experts"),
        (Layout(pp=32), dict(), "pp=32 stages, but olmoe-1b-7b has 16 layers"),
        (Layout(pp=4, schedule="interleaved", chunks=2), dict(), "a multiple of 4 micro-batches on 4 stages, not 1"),
    ],
)
def test_impossible_simulations_raise(layout, more, message):
    with pytest.raises(InvalidPlan, match=message):
        simulate(OLMOE, layout, DGX, **more)
