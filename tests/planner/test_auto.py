"""The planner's decision for `compile`: the fastest layout of a mesh that fits."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moefx
from moefx import Plan, cli
from moefx.errors import InvalidPlan, UnknownPlatform
from moefx.planner.auto import decide
from moefx.planner.catalogue import find_model
from moefx.planner.decision import Facts
from moefx.planner.local_platform import LocalPlatform
from moefx.planner.mesh_axes import list_axis_uses
from moefx.planner.platforms import find_platform

from ..blocks import D, E, Gated, Loop
from .decoders import Decoder

AUTO = Plan(expert_axis="auto", checkpoint="auto", validation="symbolic")
IDS = (torch.zeros(4, 32, dtype=torch.int64),)


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    monkeypatch.delenv("MOEFX_PLATFORM", raising=False)


def mesh_of(**sizes: int) -> types.SimpleNamespace:
    shape = tuple(sizes.values())
    return types.SimpleNamespace(mesh_dim_names=tuple(sizes), mesh=torch.arange(torch.Size(shape).numel()).view(shape))


# ---------------------------------------------------------------------- the axes of a mesh
@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (dict(ep=8), ["ep (8)"]),
        (dict(dp=2, ep=4), ["ep (4)"]),
        (dict(dp=4), ["dp (4)"]),
        (dict(replicate=2, shard=4), ["replicate (2)", "shard (4)", "replicate x shard (8)"]),
        (dict(ep=4, tp=2), ["ep x tp (8), SSMB over tp", "ep (4)"]),
        (dict(dp=2, tp=4), ["dp x tp (8), SSMB over tp", "dp (2)"]),
        (dict(tp=8), ["tp (8), SSMB over tp"]),
        (dict(ep=8, tp=1), ["ep (8)"]),
        (dict(ep=1, tp=8), ["ep x tp (8), SSMB over tp", "ep (1)"]),
        (dict(pp=2, dp=2, ep=2), ["ep (2)"]),
        (dict(pp=2, ep=2, tp=2), ["ep x tp (4), SSMB over tp", "ep (2)"]),
    ],
)
def test_the_uses_of_mesh_axes_are_listed(sizes, found):
    made = list_axis_uses(mesh_of(**sizes), AUTO)
    assert [str(use) for use in made] == [f"experts over {text}" for text in found]
    stage = torch.Size(sizes.values()).numel() // sizes.get("pp", 1)
    assert all(use.tp * use.dp == stage and use.layout().num_ranks == stage for use in made)


def test_a_plan_leaves_less_open():
    mesh = mesh_of(dp=2, ep=2, tp=2)
    assert [str(u) for u in list_axis_uses(mesh, Plan(checkpoint="auto"))] == ["experts over ep (2)"]
    asked = Plan(checkpoint="auto", expert_axis=("dp", "tp"), sequence_axis="tp")
    assert [str(u) for u in list_axis_uses(mesh, asked)] == ["experts over dp x tp (4), SSMB over tp"]
    named = mesh_of(ep=2, model=4)
    assert [str(u) for u in list_axis_uses(named, AUTO)] == ["experts over ep (2)"]
    (ssmb,) = list_axis_uses(named, AUTO.replace(sequence_axis="model"))
    assert str(ssmb) == "experts over ep x model (8), SSMB over model" and ssmb.tp == 4
    # axes are flattened by all ranks
    assert [str(u) for u in list_axis_uses(mesh, AUTO, is_whole=False)] == ["experts over ep (2)"]


def test_groups_and_how_near_they_are():
    h200 = find_platform("h200")  # nodes of eight
    for sizes, group, near in (
        (dict(dp=2, ep=8), range(8), True),
        (dict(ep=2, dp=8), (0, 8), False),
        (dict(dp=2, ep=4, tp=2), (0, 2, 4, 6), True),
        (dict(ep=4, dp=2, tp=2), (0, 4, 8, 12), False),
    ):
        use = list_axis_uses(mesh_of(**sizes), AUTO)[-1]
        assert use.group == tuple(group) and use.experts_first(h200) is near


def test_meshes_without_an_axis_for_experts():
    with pytest.raises(InvalidPlan, match="a mesh of pp=4 has no axis that experts can be spread over"):
        list_axis_uses(mesh_of(pp=4), AUTO)
    with pytest.raises(InvalidPlan, match="the axes of the mesh have no names"):
        list_axis_uses(types.SimpleNamespace(mesh_dim_names=None, mesh=torch.arange(4)), AUTO)


# ---------------------------------------------------------------------- the choice
MODEL = find_model("olmoe-1b-7b")


def told(asked: Plan = AUTO, model=MODEL, memory: float = 139e9, tokens: int = 4096, **more) -> Facts:
    platform = dataclasses.replace(find_platform("dgx-h100"), memory_bytes=memory)
    return Facts(asked, model, 1, tokens, "said", LocalPlatform(platform, "said"), **more)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([dict(ep=8), dict(dp=2, ep=4), dict(ep=4, tp=2), dict(dp=4, tp=2)]),
    st.floats(2e9, 100e9), st.sampled_from([512, 4096, 16384]), st.sampled_from([None, 0, 3]),
)  # fmt: skip
def test_the_fastest_layout_that_fits_is_chosen(sizes, memory, tokens, zero):
    mesh = mesh_of(**sizes)
    found = decide({0: told(AUTO.replace(zero=zero), memory=memory, tokens=tokens)}, 0, mesh)
    first, *others = found.candidates
    fits = [t for t in found.candidates if t.entry.memory["M_gpu"] <= memory]
    assert bool(found.warning) == (not fits)
    assert first.entry.seconds == min(t.entry.seconds for t in fits or [first])
    assert first.lacking == min(t.lacking for t in found.candidates) if not fits else first in fits
    assert len(others) == 2 * len(list_axis_uses(mesh, AUTO)) - 1
    more = decide({0: told(AUTO.replace(zero=zero), memory=2 * memory, tokens=tokens)}, 0, mesh)
    if fits and more.candidates[0].entry.layout.zero == first.entry.layout.zero:
        assert more.candidates[0].entry.seconds <= first.entry.seconds
    assert not found.plan.is_undecided and found.plan.tokens == tokens


def test_experts_are_distributed_no_further_than_needed():
    """ZeRO's stage is the user's: the lowest with which something fits is counted on."""
    mesh, zeros = mesh_of(dp=4, ep=2), []
    for memory in (100e9, 60e9, 30e9, 20e9):
        found = decide({0: told(memory=memory)}, 0, mesh)
        zeros.append(found.candidates[0].entry.layout.zero)
        assert f"mixed precision, ZeRO-{zeros[-1]}" in str(found) and ("yours to do" in str(found)) == (zeros[-1] > 0)
    assert zeros == sorted(zeros) and zeros[0] == 0 and len(set(zeros)) > 2
    assert decide({0: told(AUTO.replace(zero=3), memory=100e9)}, 0, mesh).candidates[0].entry.layout.zero == 3


def test_ranks_decide_by_the_most_tokens_and_the_least_memory():
    """The most tokens, the least memory: whichever rank is asked."""
    mesh = mesh_of(dp=2, ep=2)
    facts = {0: told(), 1: told(tokens=8192), 2: told(memory=50e9), 3: told()}
    found = [decide(facts, rank, mesh) for rank in facts]
    assert len({str(each) for each in found}) == 1 and found[0].plan.tokens == 8192
    assert found[0].facts.local.platform.memory_bytes == 50e9
    with pytest.raises(InvalidPlan, match=r"do not agree on Plan\(zero=\.\.\.\): rank 0 None, rank 2 3"):
        decide(facts | {2: told(AUTO.replace(zero=3))}, 0, mesh)
    with pytest.raises(InvalidPlan, match="rank 3 of the mesh failed before the decision: CaptureError: no"):
        decide(facts | {3: "CaptureError: no"}, 0, mesh)


def test_stages_share_axes_and_choose_their_own_policy():
    """1F1B: the first of two stages has two micro-batches in flight."""
    mesh = mesh_of(pp=2, ep=4, tp=2)
    asked = AUTO.replace(zero=0)
    facts = {rank: told(asked, stage=rank // 8, stages=2) for rank in range(16)}
    first, last = (decide(facts, rank, mesh) for rank in (0, 15))
    needed = first.candidates[0].entry.memory["M_gpu"]
    assert first.candidates[0].entry.layout.kept == "h" and needed > last.candidates[0].entry.memory["M_gpu"]
    assert first.candidates[0].seconds == pytest.approx(last.candidates[0].seconds)  # of one micro-batch each
    facts = {rank: told(asked, stage=rank // 8, stages=2, memory=needed - 1) for rank in range(16)}
    first, last = (decide(facts, rank, mesh).plan for rank in (0, 15))
    assert (first.checkpoint, last.checkpoint) == ("x", "h") and first.expert_axis == last.expert_axis == ("ep", "tp")
    # a stage without experts goes along
    facts |= {rank: told(asked, model=None, stage=1, stages=2) for rank in range(8, 16)}
    assert decide(facts, 8, mesh).plan.expert_axis == decide(facts, 0, mesh).plan.expert_axis == ("ep", "tp")


def test_rows_travel_as_planned():
    asked = AUTO.replace(dispatch="flat")
    flat = decide({0: told(asked)}, 0, mesh_of(ep=8))
    assert {t.entry.layout.dispatch for t in flat.candidates} == {"flat"} and flat.plan.dispatch == "flat"
    assert flat.candidates[0].entry.seconds > decide({0: told()}, 0, mesh_of(ep=8)).candidates[0].entry.seconds


def test_gather_is_left_open_if_it_fits():
    """`compile` may choose "gather", whose buffers have room for the tokens of all ranks."""
    asked, mesh = Plan(checkpoint="auto", zero=0, dispatch="gather"), mesh_of(ep=4)
    (gather, _) = decide({0: told(asked)}, 0, mesh).candidates
    assert gather.entry.layout.dispatch == "gather" and gather.entry.layout.kept == "h"
    needed = gather.entry.memory["M_gpu"]
    for memory, dispatch in ((needed, "auto"), (needed - 1, "dedup")):
        found = decide({0: told(asked.replace(dispatch="auto"), memory=memory)}, 0, mesh)
        assert found.candidates[0].entry.layout.kept == "h" and found.plan.dispatch == dispatch
        assert ("dispatch='dedup'" in str(found)) == (dispatch == "dedup")


def test_experts_that_do_not_divide():
    with pytest.raises(InvalidPlan, match=r"64 experts do not divide: experts over dp \(3\)"):
        decide({0: told()}, 0, mesh_of(dp=3))
    found = decide({0: told()}, 0, mesh_of(odd=3, even=2))  # one axis of several
    assert found.plan.expert_axis == "even"


# ---------------------------------------------------------------------- compile and explain
def keeps(compiled: nn.Module) -> set[str]:
    graphs = [block.graph for block in moefx.blocks(compiled)]
    return {str(n.kwargs["keep"]) for g in graphs for n in g.find(torch.ops.moefx.expert_mlp.default)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_on_one_device_the_checkpoint_policy_is_decided(device):
    with torch.device(device):
        model = Decoder()
    example = (torch.zeros(4, 32, dtype=torch.int64, device=device),)
    asked = Plan(checkpoint="auto", validation="symbolic")
    found = moefx.explain(model, plan=asked, example_inputs=example).planned
    (h, x) = [t.entry.memory["M_gpu"] for t in found.candidates]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for memory, kept in ((1e12, "h"), (h, "h"), (h - 1, "x"), (x, "x")):
            compiled = moefx.compile(model, plan=asked.replace(memory=memory), example_inputs=example)
            assert keeps(compiled) == {kept} and moefx.explain(compiled).planned.plan.checkpoint == kept
            assert moefx.history(compiled, "layers.1.ffn").passes == ("rewrite_block", "fuse", "checkpoint")
    with pytest.warns(UserWarning, match=r"nothing fits .* 128 tokens a rank in 4 sequences.*keep 'x': .*It fits if"):
        compiled = moefx.compile(model, plan=asked.replace(memory=x - 1), example_inputs=example)
    assert keeps(compiled) == {"x"} and "warning   nothing fits" in str(moefx.explain(compiled))
    with pytest.warns(UserWarning, match="M_optimizer is .*Take fewer tokens, more ranks or more memory"):
        moefx.compile(model, plan=asked.replace(memory=1.0, tokens=1), example_inputs=example)


def test_later_specializations_keep_the_decision():
    model, x = Loop(Gated), torch.randn(64, D)
    h, _ = moefx.explain(model, plan=AUTO, example_inputs=(x,)).planned.candidates
    plan = AUTO.replace(memory=h.entry.memory["M_gpu"] - 1)
    compiled = moefx.compile(copy.deepcopy(model), plan=plan, example_inputs=(x,)).double()
    torch.testing.assert_close(compiled(x.double()), model.double()(x.double()))
    programs = moefx.blocks(compiled)[0].forward.programs
    assert len(programs) == 2 and all('keep="x"' in str(p.history.graph) for p in programs)


def test_tokens_come_from_the_plan_or_the_example():
    model = Decoder()
    for plan, example, tokens, sequences in (
        (AUTO, IDS, 128, 4),
        (AUTO.replace(tokens=64), IDS, 64, 2),
        (AUTO.replace(tokens=33), IDS, 33, 1),
        (AUTO, None, 4096, 1),
        (AUTO.replace(tokens=8192), None, 8192, 2),
    ):
        found = moefx.explain(model, plan=plan, example_inputs=example).planned
        assert (found.plan.tokens, found.facts.sequences) == (tokens, sequences)
        assert found.candidates[0].entry.memory["A_router"] == 4 * tokens * E


class Embedding(Loop):
    """A block that gets token ids, which do not have the width of the model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, D)

    def forward(self, ids):
        return super().forward(self.embed(ids).flatten(0, 1))


def test_the_origin_of_the_tokens_is_named():
    for model, example, tokens, source in (
        (Decoder(), IDS, 128, "as in the example inputs"),
        (Decoder(), None, 4096, "by default, without example inputs"),
        (Embedding(), IDS, 4096, f"by default: no input of '' (the model itself) has an axis of {D}"),
    ):
        facts = moefx.explain(model, plan=AUTO, example_inputs=example).planned.facts
        assert (facts.sequences * facts.tokens, facts.source) == (tokens, source)


def test_the_platform_of_the_environment(monkeypatch, tmp_path):
    model = Decoder()
    monkeypatch.setenv("MOEFX_PLATFORM", "frontier")
    text = str(moefx.explain(model, plan=AUTO, example_inputs=IDS))
    assert "memory    64 GiB a rank" in text and "platform  frontier, named by MOEFX_PLATFORM" in text
    assert " us" in text.splitlines()[-1] and "times as long" not in text
    monkeypatch.setenv("MOEFX_PLATFORM", "frontiere")
    with pytest.raises(UnknownPlatform, match=r"MOEFX_PLATFORM=frontiere: .*did you mean frontier"):
        moefx.compile(model, plan="auto", example_inputs=IDS)
    moefx.compile(model, plan=Plan(validation="symbolic"), example_inputs=IDS)  # nobody asks


def test_models_that_the_planner_does_not_know():
    """A model that compiles without the planner compiles with it."""
    wide = Loop(Gated)
    wide.experts.append(Gated())
    wide.gate = nn.Linear(D, E + 1, bias=False)
    model = nn.Sequential(Loop(Gated), wide)
    with pytest.warns(UserWarning, match="the planner cannot read this model.*blocks are alike, these are not"):
        compiled = moefx.compile(model, plan=AUTO, example_inputs=(torch.zeros(9, D),))
    assert keeps(compiled) == {"h"} and not moefx.explain(compiled).planned.plan.is_undecided


def test_a_model_without_blocks_is_returned_unchanged():
    model = Gated()
    assert moefx.compile(model, plan="auto", example_inputs=(torch.zeros(9, D),), strict=False) is model


def test_the_decision_is_explained_and_written_as_json(monkeypatch):
    monkeypatch.setenv("MOEFX_PLATFORM", "h200")  # a machine with a GPU may be known
    model = Decoder()
    compiled = moefx.compile(model, plan=AUTO, example_inputs=IDS)
    explained = moefx.explain(compiled)
    assert str(explained.planned) == str(moefx.explain(model, plan=AUTO, example_inputs=IDS).planned)
    said = json.loads(explained.to_json())["planned"]
    assert Plan.from_json(json.dumps(said["plan"])) == explained.planned.plan and said["platform"] == "h200"
    assert [t["layout"] for t in said["candidates"]] == ["one device, keep 'h'", "one device, keep 'x'"]
    assert moefx.explain(copy.deepcopy(compiled)).planned == explained.planned
    assert moefx.explain(moefx.compile(model, plan=Plan(validation="symbolic"), example_inputs=IDS)).planned is None


def test_the_page_shows_the_printed_decision():
    """OLMoE on eight H100s, four of 4096 tokens each."""
    here = LocalPlatform(find_platform("dgx-h100"), "named by MOEFX_PLATFORM")
    asked = Plan(expert_axis="auto", checkpoint="auto")
    found = decide({0: Facts(asked, MODEL, 4, 4096, "as in the example inputs", here)}, 0, mesh_of(ep=4, tp=2))
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "automatic_plans.md").read_text(encoding="utf-8")
    assert f"```text\n{found}\n```" in page


def decoder() -> tuple[nn.Module, tuple]:
    return Decoder(), IDS


def test_the_command_takes_an_undecided_plan(capsys, monkeypatch):
    monkeypatch.setenv("MOEFX_PLATFORM", "h200")
    for plan in ("auto", '{"checkpoint": "auto"}'):
        assert cli.main(["explain", "tests.planner.test_auto:decoder", "--meta", "--plan", plan]) == 0
        assert "platform  h200, named by MOEFX_PLATFORM" in capsys.readouterr().out
    assert cli.main(["explain", "tests.planner.test_auto:decoder", "--plan", "fast"]) == 2
    assert "--plan fast: " in capsys.readouterr().err
