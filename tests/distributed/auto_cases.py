"""Decisions of the planner over a mesh: equal on all ranks, and correct."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
from moefx.errors import InvalidPlan, UnknownPlatform

from ..blocks import D, E
from .launch import sampled
from .lost_cases import check_raises
from .models import Model
from .pipeline_cases import Half

EXAMPLE = (torch.zeros(64, D),)
AUTO = moefx.Plan(expert_axis="auto", checkpoint="auto", validation="symbolic")  # faster than "auto"


def make_mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def compile_planned(model: torch.nn.Module, mesh: DeviceMesh, plan: Any = AUTO, inputs: tuple = EXAMPLE) -> Any:
    return moefx.compile(copy.deepcopy(model), mesh=mesh, plan=plan, example_inputs=inputs)


def read_decision(compiled: torch.nn.Module) -> moefx.Plan:
    """Return the decided plan. Checks that all ranks decided the same."""
    plan = moefx.explain(compiled).planned.plan
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, plan.to_json())
    assert set(gathered) == {plan.to_json()}, gathered
    return plan


def draw_tokens(mesh: DeviceMesh, number: int = 11) -> torch.Tensor:
    """Draw tokens that are equal on all ranks of "tp" and differ otherwise."""
    names = mesh.mesh_dim_names or ()
    seed = sum(mesh[name].get_local_rank() * 10**i for i, name in enumerate(names) if name != "tp")
    return torch.randn(number, D, generator=torch.Generator().manual_seed(seed))


def read_graph_lines(compiled: torch.nn.Module) -> list[str]:
    """Return the lines of the graph without its header, which contains the time of a pass."""
    return str(moefx.graph(compiled, "blocks.0")).splitlines()[1:]


def case_meshes() -> None:
    meshes = (
        (dict(ep=2, tp=2), ("ep", "tp"), "tp"),
        (dict(dp=2, tp=2), ("dp", "tp"), "tp"),
        (dict(dp=2, ep=2), "ep", None),
        (dict(ep=4), "ep", None),
    )
    for sizes, axes, sequence_axis in sampled(meshes, 2):
        mesh, model = make_mesh(**sizes), Model("gated", layers=1)
        compiled = compile_planned(model, mesh)
        found = read_decision(compiled)
        assert (found.expert_axis, found.sequence_axis) == (axes, sequence_axis), (sizes, found)
        assert (found.checkpoint, found.tokens, found.dispatch) == ("h", 64, "auto")
    moefx.verify(compiled, model, (draw_tokens(mesh),), routings=False).raise_if_failed()


def case_auto_predicts_for_the_tokens_of_the_example() -> None:
    """Predict with half of the tokens per rank if two ranks share them."""
    for sizes, tokens in ((dict(ep=4), 64), (dict(ep=2, tp=2), 32)):
        compiled = compile_planned(Model("gated", layers=1), make_mesh(**sizes), AUTO.replace(node_size=2))
        (note,) = moefx.explain(compiled).matched[0].notes
        assert f"(auto: predicted for {tokens} tokens a rank flat " in note, note


def case_explain_agrees_with_compile() -> None:
    mesh, model = make_mesh(ep=2, tp=2), Model("gated", layers=1)
    before = moefx.explain(model, mesh=mesh, plan=AUTO, example_inputs=EXAMPLE)
    compiled = compile_planned(model, mesh, "auto")
    found, after = read_decision(compiled), moefx.explain(compiled)
    assert str(before.planned) == str(after.planned)
    # a decided plan is accepted as an argument
    again = compile_planned(model, mesh, found.replace(validation="symbolic"))
    assert read_graph_lines(again) == read_graph_lines(compiled)
    assert moefx.explain(again).planned is None
    for text in (
        "planned     checkpoint='h', expert_axis=('ep', 'tp'), sequence_axis='tp'",
        "tokens    64 tokens a rank, as in the example inputs, the same along 'tp'",
        "platform  unknown, no figures for 'cpu': those of dgx-h100 compare layouts",
        "chosen    experts over ep x tp (4), SSMB over tp, keep 'h': ",
        "experts over ep (2), keep 'h': ",
        "mesh axis 'ep_tp'",
    ):
        assert text in str(after), after
        assert text in str(before), after


def case_memory_limits_decide_the_checkpoint_policy() -> None:
    """Pick the fastest layout that fits. If the axes are fixed, the checkpoint policy is still decided."""
    mesh, model = make_mesh(dp=2, ep=2), Model("gated", layers=1)
    asked = AUTO.replace(zero=0)
    candidates = moefx.explain(compile_planned(model, mesh, asked)).planned.candidates
    needed = {t.entry.layout.kept: t.entry.memory["M_gpu"] for t in candidates}
    assert needed["x"] < needed["h"]
    for memory, kept in ((needed["h"], "h"), (needed["h"] - 1, "x"), (needed["x"], "x")):
        for plan in (asked.replace(memory=memory), asked.replace(memory=memory, expert_axis="ep")):
            compiled = compile_planned(model, mesh, plan)
            assert read_decision(compiled).checkpoint == kept
            assert f'keep="{kept}"' in str(moefx.graph(compiled, "blocks.0"))
    moefx.verify(compiled, model, (draw_tokens(mesh),), routings=False).raise_if_failed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = compile_planned(model, mesh, asked.replace(memory=needed["x"] - 1))
    (text,) = {str(w.message) for w in caught if "nothing fits" in str(w.message)}
    assert "keep 'x'" in text
    assert read_decision(compiled).checkpoint == "x"
    compiled(draw_tokens(mesh)).sum().backward()


def case_the_largest_token_count_decides() -> None:
    """Use the largest number of tokens of any rank."""
    inputs = (torch.zeros(16 * (dist.get_rank() + 1), D),)
    assert read_decision(compile_planned(Model("gated", layers=1), make_mesh(dp=2, ep=2), inputs=inputs)).tokens == 64


def case_stages_decide_their_checkpoint_policies() -> None:
    """Keep less on the first stage of 1F1B, which has two micro-batches in flight."""
    mesh, model = make_mesh(pp=2, ep=2), Model("gated", layers=2)
    stage = mesh["pp"].get_local_rank()
    asked = AUTO.replace(zero=0)
    half = Half(copy.deepcopy(model), stage)
    (h, _) = moefx.explain(compile_planned(half, mesh, asked)).planned.candidates
    needed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(needed, h.entry.memory["M_gpu"])
    assert needed[0] == needed[1] > needed[2] == needed[3]
    compiled = compile_planned(half, mesh, asked.replace(memory=needed[0] - 1))
    found = moefx.explain(compiled).planned.plan
    assert (found.expert_axis, found.checkpoint) == ("ep", "h" if stage else "x")
    mesh = make_mesh(pp=2, tp=2)  # all stages merge the same axes for experts
    found = read_decision(compile_planned(half, mesh))
    assert (found.expert_axis, found.sequence_axis) == ("tp", "tp")


def case_different_requests_raise() -> None:
    mesh, model, odd = make_mesh(dp=2, ep=2), Model("gated", layers=1), dist.get_rank() == 1
    plan = AUTO.replace(memory=2e9 if odd else 1e9)
    check_raises(
        lambda: compile_planned(model, mesh, plan),
        "the ranks of the mesh do not agree on Plan(memory=...): rank 0 1000",
    )
    with mock.patch.dict(os.environ, {"MOEFX_PLATFORM": "h200" if odd else "frontier"}):
        check_raises(
            lambda: compile_planned(model, mesh),
            "platform (set by MOEFX_PLATFORM): rank 0 frontier, rank 1 h200",
        )
    with mock.patch.dict(os.environ, {"MOEFX_PLATFORM": "h300" if odd else "h200"}):
        text = (
            "MOEFX_PLATFORM=h300: no platform"
            if odd
            else "rank 1 of the mesh failed before the decision: UnknownPlatform: MOEFX_"
        )
        check_raises(lambda: compile_planned(model, mesh), text, error=UnknownPlatform if odd else InvalidPlan)
    with mock.patch.dict(os.environ, {"MOEFX_PLATFORM": "frontier"}):
        assert moefx.explain(compile_planned(model, mesh)).planned.to_dict()["platform"] == "frontier"


def case_indivisible_experts_raise() -> None:
    model = Model("gated", layers=1, num_experts=E + 1)
    check_raises(lambda: compile_planned(model, make_mesh(ep=4)), "5 experts do not divide: experts over ep (4)")


def case_entries_compile_over_their_meshes() -> None:
    """Compile each division of four ranks as its entry in the ranking says."""
    model, seen = Model("gated", layers=1), set()
    model.blocks[0].num_heads = 4  # heads of an attention, which TP divides
    ranking = moefx.plan(model, "h200", 4, batch=8, tokens=32, example_inputs=EXAMPLE)
    for entry in ranking:
        request = tuple(entry.mesh.values()), entry.plan().expert_axis, entry.plan().placement
        if request in seen or entry.layout.ep == 1 or entry.layout.pp > 1:
            continue
        seen.add(request)
        mesh = init_device_mesh("cpu", **entry.mesh)
        sizes = {"pp": 1, "ep": entry.layout.ep}  # the user implements micro-batches, ZeRO and TP
        compiled = compile_planned(model, mesh, entry.plan(validation="symbolic", layout=sizes))
        assert moefx.blocks(compiled)
        moefx.verify(compiled, model, (draw_tokens(mesh),), routings=False).raise_if_failed()
    axes = {axes for _, axes, _ in seen}
    assert axes == {"ep", "tp", ("ep", "tp")}, seen
