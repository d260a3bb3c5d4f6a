"""The search: complete, within the constraints, ranked, and each rejection with its reason."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import moefx
from moefx import cli
from moefx.errors import InvalidPlan, UnknownArchitecture, UnknownPlatform
from moefx.planner.catalogue import find_model
from moefx.planner.entries import SearchRequest
from moefx.planner.layout import Layout
from moefx.planner.platforms import Network, find_platform
from moefx.planner.search import choose_layout_dispatch, estimate_entry
from moefx.planner.step_formulas import build_step_sheet, collect_values, compute_flop_per_token, evaluate_memory
from moefx.ranking import plan, search
from moefx.util.unit_text import amount

from ..pace import limit_time


@pytest.fixture(scope="module")
def small():
    """OLMoE on two nodes of eight A100."""
    return plan("olmoe-1b-7b", "a100-40gb", 16, batch=64)


def test_a_trillion_parameters_on_1024_gpus_in_seconds():
    with limit_time(5):
        ranking = plan("kimi-k2", "dgx-h100", 1024)
    assert len(ranking) > 100 and 0.1 < ranking[0].mfu < 0.6


def test_fitting_layouts_satisfy_the_constraints(small):
    model, platform = small.model, small.platform
    assert len(small)
    for entry in small:
        x = entry.layout
        assert x.num_ranks == 16 and model.num_experts % x.ep == 0 and x.pp <= model.num_layers  # Piper eq. 7 to 9
        assert evaluate_memory(model, x, platform)["M_gpu"] == entry.memory["M_gpu"] <= platform.memory_bytes  # eq. 11
        assert x.sequences * x.microbatches * x.dp == 64
    seconds = [entry.seconds for entry in small]
    assert seconds == sorted(seconds)


def test_every_layout_is_tried_or_rejected(small):
    """Every division of the ranks is in the ranking, or rejected by name."""
    fits = {(e.layout.pp, e.layout.tp, e.layout.ep) for e in small}
    rejected = {what for r in small.rejected for what in r.label.split(", ")}
    powers = (1, 2, 4, 8, 16)
    for pp in powers:
        for tp in powers:
            for ep in powers:
                if 16 % (pp * tp) or (16 // pp) % ep:
                    continue
                named = bool({f"PP={pp} TP={tp} EP={ep}", f"TP={tp}"} & rejected)
                assert ((pp, tp, ep) in fits) != named, (pp, tp, ep)


def test_the_fast_domain_is_kept():
    """Piper eq. 10; without it the same layouts are there."""
    kept = plan("deepseek-v3", "frontier", 512)
    assert all(e.layout.ep <= 32 for e in kept)
    assert any(r.label.startswith("EP=64") and "fast domain of 32 ranks" in r.why for r in kept.rejected)
    assert any(e.layout.ep > 32 for e in plan("deepseek-v3", "frontier", 512, fast_domain=0))


def test_memory_is_that_of_the_dispatch():
    """Store one row per slot for flat dispatch, which is as fast as any if each of 256 ranks has one expert."""
    ranking = plan("deepseek-v3", "frontier", 512, fast_domain=0)
    flat = [e for e in ranking if e.layout.ep == 256 and e.layout.dispatch == "flat"]
    assert flat
    for entry in flat:
        assert evaluate_memory(ranking.model, entry.layout, ranking.platform)["M_gpu"] == entry.memory["M_gpu"]
        assert entry.memory["n_dup"] == ranking.model.top_k


def test_rejected_layouts_show_the_missing_memory():
    ranking = plan("deepseek-v3", "a100-40gb", 8)
    assert not len(ranking)
    (line,) = [r for r in ranking.rejected if r.label == "PP=1 TP=1 EP=8"]
    assert line.why.startswith("does not fit: ") and line.why.endswith(
        "too much at least, most of it optimizer states (M_optimizer)"
    )
    assert line.sizes == ({"PP": 1, "TP": 1, "EP": 8},) and line.term == "M_optimizer"
    least = min(
        evaluate_memory(ranking.model, layout, ranking.platform)["M_gpu"] for layout in every_policy(dp=8, ep=8)
    )
    assert line.lacking == least - ranking.platform.memory_bytes
    assert "0 layouts fit 40 GiB" in str(ranking)


def every_policy(**ranks):
    """Yield all policies with one sequence per micro-batch."""
    for zero, (kept, recompute) in itertools.product((1, 2, 3), (("h", False), ("x", False), ("h", True))):
        yield Layout(**ranks, zero=zero, kept=kept, recompute=recompute, microbatches=1024 // ranks["dp"])


def test_a_ranking_holds_its_request(small):
    assert (small.num_ranks, small.request) == (16, SearchRequest(64, 4096, 8, 0, ("1f1b",)))
    assert plan("olmoe-1b-7b", "frontier", 8, batch=8, tokens=128).request.fast_domain == 32


def test_ranks_with_the_same_tokens_share_experts_by_ssmb(small):
    """Exclude ranks with equal tokens without SSMB:

    each would send all tokens, and an expert would get them TP times.
    """
    assert all(e.layout.dp % e.layout.ep == 0 or e.layout.ssmb for e in small)
    (why,) = (r.why for r in small.rejected if "PP=1 TP=8 EP=4" in r.label.split(", "))
    assert why.startswith("EP is neither a multiple of TP nor divides DP")


def test_entries_are_plans_and_meshes(small):
    for entry in small:
        x, made, mesh = entry.layout, entry.plan(), entry.mesh
        sizes = dict(zip(mesh["mesh_dim_names"], mesh["mesh_shape"], strict=True))
        assert math.prod(sizes.values()) == 16 and sizes.get("pp", 1) == x.pp and sizes.get("tp", 1) == x.tp
        axes = made.expert_axis if isinstance(made.expert_axis, tuple) else (made.expert_axis,)
        assert math.prod(sizes[axis] for axis in axes if axis) == x.ep
        assert (made.expert_axis is None) == (x.ep == 1) and (made.sequence_axis == "tp") == (x.ssmb and x.ep > 1)
        assert made.tokens == x.sequences * 4096 and made.checkpoint == x.kept
        if made.placement:  # which `compile` looks for
            ranks = torch.arange(16).view(mesh["mesh_shape"])
            first = tuple(slice(None) if name in axes else 0 for name in sizes)
            group = ranks[first].flatten().tolist()
            assert (group == list(range(x.ep))) == (made.placement == "ep_first" or x.ep == 16)
    assert small[0].plan(timeout=60).timeout == 60
    (alone,) = {(*e.mesh["mesh_shape"], *e.mesh["mesh_dim_names"]) for e in plan("olmoe-1b-7b", "h200", 1, batch=1)}
    assert alone == (1, "dp")


def test_an_explanation_shows_formulas_and_sources(small):
    text = small.explain()
    for line in (
        "M_gpu = ",
        "M_optimizer = ",
        "A_interm = ",
        "MFU = ",
        "T_step = ",
        "; Piper eq. 12",
        "; X-MoE table 2",
    ):
        assert line in text


def test_a_notebook_shows_a_line(small):
    """Not thousands of fields."""
    entry, x = small[3], small[3].layout
    assert repr(entry) == (
        f"<Entry {entry.short_label}, {x.microbatches} micro-batches of {x.sequences}: "
        f"{amount(entry.memory['M_gpu'], 'B')}, {amount(entry.seconds, 's')} a step, MFU {entry.mfu:.1%}>"
    )
    assert repr(small) == (
        f"<Ranking of olmoe-1b-7b on 16 x NVIDIA A100 40GB SXM4: {len(small)} layouts fit, the fastest {small[0]!r}; "
        "print it for all>"
    )
    assert "0 layouts fit; print it" in repr(plan("deepseek-v3", "a100-40gb", 8))
    label = dataclasses.replace(entry, layout=LAYOUT).long_label
    assert label == (
        "2 pipeline stages, data parallelism over 8 GPUs, tensor parallelism over 2 GPUs, experts over 16 GPUs, SSMB, "
        "ZeRO-1, kept for the backward: policy 'h'"
    )


MODEL, PLATFORM = find_model("qwen3-30b-a3b"), find_platform("dgx-h100")
LAYOUT = Layout(pp=2, tp=2, dp=8, ep=16, ssmb=True, microbatches=8)


def seconds(platform=PLATFORM, **changes):
    layout = dataclasses.replace(LAYOUT, **changes)
    values = collect_values(MODEL, layout, platform)
    return build_step_sheet("dedup", 2)(**values)


@pytest.mark.parametrize("figure", ["peak", "memory_bandwidth", "matmul_efficiency", "attention_efficiency"])
def test_slower_machines_are_slower(figure):
    slower = dataclasses.replace(PLATFORM, **{figure: getattr(PLATFORM, figure) / 2})
    assert seconds(slower)["T_step"] > seconds()["T_step"]


@pytest.mark.parametrize("which", [0, 1])
def test_slower_links_are_slower(which):
    networks = list(PLATFORM.networks)
    networks[which] = dataclasses.replace(networks[which], bandwidth=networks[which].bandwidth / 4)
    assert seconds(dataclasses.replace(PLATFORM, networks=tuple(networks)))["T_step"] > seconds()["T_step"]


def test_recomputation_takes_longer():
    found = [seconds(**change)["T_step"] for change in ({}, dict(kept="x"), dict(recompute=True))]
    assert found == sorted(found) and len(set(found)) == 3


def test_no_policy_exchanges_more():
    """Exchange the same for all saved tensors; recomputed layers exchange more (below)."""
    assert len({seconds(kept=kept)["T_alltoall"] for kept in ("h", "x", "all")}) == 1


def test_bubbles_match_the_formula_of_each_schedule():
    """1F1B waits (PP - 1) / M of a step (Megatron-LM section 2.2) if stages are equal except for the logits."""
    found = seconds()
    logits = found["n_pass"] * found["T_logits"]
    assert found["T_bubble"] == pytest.approx(found["T_micro"] - logits) and logits > 0
    interleaved = seconds(schedule="interleaved", chunks=2)
    assert interleaved["T_bubble"] == pytest.approx(found["T_bubble"] / 2)
    h1, h2 = (seconds(schedule=schedule)["T_bubble"] for schedule in ("zb-h1", "zb-h2"))
    assert 0 < h2 <= h1 < found["T_bubble"]  # a step ends with the last stage's, PP - 1 forwards later
    few = seconds(schedule="zb-h2", microbatches=1)
    assert h2 < few["T_bubble"] < found["T_bubble"]


def test_mfu_counts_the_flop_of_the_model():
    found = seconds()
    flop = compute_flop_per_token(MODEL, 4096) * 8 * 8 * 4096
    assert found["MFU"] == pytest.approx(flop / (found["T_step"] * 32 * PLATFORM.peak))
    assert 6 * 3.0e9 < compute_flop_per_token(MODEL, 1) < 6 * 3.35e9


def test_the_command_prints_a_ranking(capsys, tmp_path, monkeypatch):
    """`test_ranking_page` tests the pages."""
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "olmoe-1b-7b", "--platform", "a100-40gb", "--gpus", "16", "--batch", "64", "--no-page"]
    assert cli.main([*asked, "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "layouts fit 40 GiB" in lines[0] and lines[2].split()[:4] == ["PP", "TP", "DP", "EP"]
    assert lines[3].startswith("1 ") and lines[5].startswith("3 ")
    assert (
        lines[6] == ""
        and lines[7].startswith("PP: pipeline stages")
        and lines[13].startswith("a100-40gb has data-sheet figures only")
    )
    assert lines[14] == "" and lines[15] == "rejected"
    assert cli.main(["plan", "olmoe-1b-7b", "--platform", "a100-40gb", "--gpus", "16", "--explain", "2"]) == 0
    explained = capsys.readouterr().out
    assert explained.splitlines()[1].startswith("2 ") and "M_gpu = " in explained
    small = ["plan", "olmoe-1b-7b", "--platform", "a100-40gb", "--gpus", "16", "--simulate"]
    assert cli.main([*small, "2", "--skew", "0.5"]) == 0
    assert "routing of skew 0.5, seed 0" in capsys.readouterr().out
    assert cli.main([*small, "99999"]) == 2
    assert "--simulate 99999: " in capsys.readouterr().err
    assert cli.main([*small, "1", "--skew", "-1"]) == 1
    assert "skew is -1.0, expected a number from 0 to 4" in capsys.readouterr().err
    assert cli.main(["plan", "deepseek-v3", "--platform", "a100-40gb", "--gpus", "8", "--no-page"]) == 1
    capsys.readouterr()
    assert cli.main(["plan", "olmoe", "--gpus", "8"]) == 1
    assert "did you mean olmoe-1b-7b?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("olmo", "h200", 8), UnknownArchitecture, "no model 'olmo'"),
        (("olmoe-1b-7b", "h300", 8), UnknownPlatform, "no platform 'h300'; did you mean h200"),
        (("olmoe-1b-7b", "h200", 0), InvalidPlan, "world_size is 0"),
        (
            (7, "h200", 8),
            UnknownArchitecture,
            "takes the name of a model, a module, a transformers config or an Architecture, not int",
        ),
    ],
)
def test_invalid_arguments_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        moefx.plan(*arguments)


def test_search_takes_descriptions():
    assert search(find_model("olmoe-1b-7b"), find_platform("h200"), 1, batch=8)[0].layout.num_ranks == 1


def test_more_gpus_than_a_platform_knows():
    """A file that `bench platform` wrote of one node says nothing of more."""
    one_node = dataclasses.replace(find_platform("h200"), networks=(Network("node", 8, 300e9),))
    assert moefx.plan("olmoe-1b-7b", one_node, 8, batch=8)
    with pytest.raises(InvalidPlan, match=r"too few ranks for 16 GPUs.*'node', has 8 ranks"):
        moefx.plan("olmoe-1b-7b", one_node, 16, batch=16)


def test_nothing_is_sent_to_no_stage():
    platform = find_platform("dgx-h100")
    alone, two = (seconds(platform, pp=pp, tp=1, ep=16, ssmb=False, dp=16)["T_p2p"] for pp in (1, 2))
    network = platform.find_network(2, 16)
    once = 2 * 4096 * MODEL.hidden_size / network.bandwidth + network.latency
    assert alone == 0 and two == pytest.approx(8 * once)  # a round trip of every two of eight micro-batches


@pytest.mark.parametrize(("zero", "expected"), [(1, 1.0), (2, (4 + 1) / 2), (3, 4 / 2)])
def test_gradients_that_are_spread_travel_in_each_micro_batch(zero, expected):
    """An all-reduce is a reduce-scatter and an all-gather; ZeRO-3 gathers parameters when it needs them."""
    found, once = (seconds(zero=stage, ssmb=False, microbatches=4, dp=16)["T_grads"] for stage in (zero, 1))
    assert once > 0 and found == pytest.approx(expected * once)


def test_schedules_of_pipelines():
    """A pipeline of each kind that was asked for; none where there is one stage."""
    asked = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
    ranking = plan("qwen3-30b-a3b", "dgx-h100", 64, batch=256, schedules=asked)
    found = {(e.layout.schedule, e.layout.chunks) for e in ranking if e.layout.pp > 1}
    assert found == {("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-h2", 1)}
    assert {e.layout.schedule for e in ranking if e.layout.pp == 1} == {"1f1b"}
    for e in ranking:
        x = e.layout
        assert x.schedule != "interleaved" or (x.microbatches % x.pp == 0 and x.pp * x.chunks <= 48)
    alike = [e for e in ranking if (e.layout.pp, e.layout.tp, e.layout.ep, e.layout.microbatches) == (4, 1, 8, 16)]
    bubbles = {(e.layout.schedule, e.layout.chunks): e.step["T_bubble"] / e.step["T_micro"] for e in alike}
    assert 2 < bubbles["1f1b", 1] < 3  # three stages, all but the last without logits
    assert 0 < bubbles["zb-h2", 1] <= bubbles["zb-h1", 1] < bubbles["1f1b", 1]
    assert bubbles["1f1b", 1] == pytest.approx(4 * bubbles["interleaved", 4])
    assert "4 zb-h2" in ranking.table(len(ranking)) and "4 x2" in ranking.table(len(ranking))
    with pytest.raises(InvalidPlan, match="no schedule '2f2b': there are gpipe, 1f1b"):
        plan("olmoe-1b-7b", "h200", 8, schedules=("2f2b",))
    with pytest.raises(InvalidPlan, match="no schedules to choose from"):
        plan("olmoe-1b-7b", "h200", 8, schedules=())


def test_hops_over_three_levels_are_planned():
    """Nodes of 2, switches of 4, and all: `compile` must be told of the switches."""
    networks = Network("node", 2, 100e9), Network("switch", 4, 20e9), Network("all", 0, 1e9)
    tree = dataclasses.replace(find_platform("a100-40gb"), networks=networks)
    by_level = [
        e for e in plan("olmoe-1b-7b", tree, 16, batch=64) if e.layout.dispatch in ("rbd", "halo") and e.layout.ep > 1
    ]
    three = [e for e in by_level if e.experts_first and e.layout.ep == 16]
    assert three and all(e.plan().topology_levels == (4,) for e in three)
    assert all(e.plan().topology_levels == () for e in plan("olmoe-1b-7b", "h200", 16, batch=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_sequences=0), "max_sequences is 0, expected a whole number above 0"),
        (dict(fast_domain=-1), "fast_domain is -1, expected a number of ranks"),
        (dict(schedules="1f1b"), r"schedules is '1f1b', expected several names"),
        (dict(batch=10**9), "batch is 1000000000, expected at most 10000000"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(InvalidPlan, match=message):
        plan("olmoe-1b-7b", "h200", 8, **options)
    with pytest.raises(InvalidPlan, match="at most"):
        plan("olmoe-1b-7b", "h200", 10**12)
    with pytest.raises(UnknownPlatform, match="takes a platform, its name or a file, not int"):
        plan("olmoe-1b-7b", 5, 8)


def test_missing_entries_raise(small):
    for asked in (small.explain, small.simulate, small.__getitem__):
        with pytest.raises(IndexError, match=r"no entry 100000: \d+ layouts fit"):
            asked(100000)


def test_layers_that_run_again_exchange_again():
    """Save only the input of each layer, so that exchanges and all-reduces of the forward run twice."""
    once, again = (seconds(recompute=again) for again in (False, True))
    assert again["T_tp"] == pytest.approx(1.5 * once["T_tp"]) and again["T_gather"] == pytest.approx(
        1.5 * once["T_gather"]
    )
    moved = 2 * once["T_exchange"] + once["T_counts"]
    assert again["T_alltoall"] - once["T_alltoall"] == pytest.approx(24 * moved)  # of 48 layers a stage has 24


def test_divisors_are_complete_and_ascending():
    from moefx.planner.search import _list_divisors

    for number in (1, 2, 12, 36, 97, 1024):
        assert _list_divisors(number) == tuple(i for i in range(1, number + 1) if number % i == 0)


def test_gather_is_estimated_if_it_is_named():
    """Its rows reach every rank, nobody waits for counts, and the plan names the number of tokens."""
    model, here = find_model("qwen3-30b-a3b"), find_platform("h200")
    layout = Layout(tp=2, dp=4, ep=8, ssmb=True, tokens=4096)
    assert choose_layout_dispatch(model, layout, here, True, "gather") == "gather"
    assert choose_layout_dispatch(model, layout, here, True, "pull") == "gather"  # the same buffers
    assert choose_layout_dispatch(model, layout, here, True) == "dedup"
    dedup, gather = (
        estimate_entry(model, dataclasses.replace(layout, dispatch=dispatch), here) for dispatch in ("dedup", "gather")
    )
    assert gather.step["T_counts"] == 0 and gather.step["T_exchange"] > dedup.step["T_exchange"]
    assert gather.step["rows_all_gather_1"] == 7
    plan = gather.plan()
    assert (plan.dispatch, plan.max_tokens) == ("gather", 2048) and dedup.plan().max_tokens is None
