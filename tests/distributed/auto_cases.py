"""Decisions of the planner over a mesh: equal on all ranks, and right."""

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
from .lost_cases import differs
from .models import Model
from .pipeline_cases import Half

EXAMPLE = (torch.zeros(64, D),)
AUTO = moefx.Plan(expert_axis="auto", checkpoint="auto", validation="symbolic")  # as "auto", in less time


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def planned(model: torch.nn.Module, mesh: DeviceMesh, plan: Any = AUTO, inputs: tuple = EXAMPLE) -> Any:
    return moefx.compile(copy.deepcopy(model), mesh=mesh, plan=plan, example_inputs=inputs)


def decided(compiled: torch.nn.Module) -> moefx.Plan:
    """The same on all ranks."""
    plan = moefx.explain(compiled).planned.plan
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, plan.to_json())
    assert set(told) == {plan.to_json()}, told
    return plan


def own_tokens(mesh: DeviceMesh, number: int = 11) -> torch.Tensor:
    """The same on all ranks of "tp"."""
    names = mesh.mesh_dim_names or ()
    seed = sum(mesh[name].get_local_rank() * 10**i for i, name in enumerate(names) if name != "tp")
    return torch.randn(number, D, generator=torch.Generator().manual_seed(seed))


def lines(compiled: torch.nn.Module) -> list[str]:
    """Of the graph, without its header, which says how long a pass took."""
    return str(moefx.graph(compiled, "blocks.0")).splitlines()[1:]


def case_meshes() -> None:
    meshes = (
        (dict(ep=2, tp=2), ("ep", "tp"), "tp"),
        (dict(dp=2, tp=2), ("dp", "tp"), "tp"),
        (dict(dp=2, ep=2), "ep", None),
        (dict(ep=4), "ep", None),
    )
    for sizes, axes, sequence_axis in sampled(meshes, 2):
        mesh, model = mesh_of(**sizes), Model("gated", layers=1)
        compiled = planned(model, mesh)
        found = decided(compiled)
        assert (found.expert_axis, found.sequence_axis) == (axes, sequence_axis), (sizes, found)
        assert (found.checkpoint, found.tokens, found.dispatch) == ("h", 64, "auto")
    moefx.verify(compiled, model, (own_tokens(mesh),), routings=False).raise_if_failed()


def case_rows_travel_by_what_is_measured_for_these_tokens() -> None:
    """Of tokens that two ranks share each sends a half."""
    for sizes, tokens in ((dict(ep=4), 64), (dict(ep=2, tp=2), 32)):
        compiled = planned(Model("gated", layers=1), mesh_of(**sizes), AUTO.replace(node_size=2))
        (note,) = moefx.explain(compiled).matched[0].notes
        assert f"(auto: predicted for {tokens} tokens a rank flat " in note, note


def case_twice_and_explained() -> None:
    mesh, model = mesh_of(ep=2, tp=2), Model("gated", layers=1)
    before = moefx.explain(model, mesh=mesh, plan=AUTO, example_inputs=EXAMPLE)
    compiled = planned(model, mesh, "auto")
    found, after = decided(compiled), moefx.explain(compiled)
    assert str(before.planned) == str(after.planned)
    again = planned(model, mesh, found.replace(validation="symbolic"))  # a plan that is decided is one to give
    assert lines(again) == lines(compiled) and moefx.explain(again).planned is None
    for text in (
        "planned     checkpoint='h', expert_axis=('ep', 'tp'), sequence_axis='tp'",
        "tokens    64 tokens a rank, as in the example inputs, the same along 'tp'",
        "platform  unknown, no figures for 'cpu': those of dgx-h100 compare layouts",
        "chosen    experts over ep x tp (4), SSMB over tp, keep 'h': ",
        "experts over ep (2), keep 'h': ",
        "mesh axis 'ep_tp'",
    ):
        assert text in str(after) and text in str(before), after


def case_budgets() -> None:
    """The fastest that fits; where the axes are given, what is kept is still decided."""
    mesh, model = mesh_of(dp=2, ep=2), Model("gated", layers=1)
    asked = AUTO.replace(zero=0)
    tried = moefx.explain(planned(model, mesh, asked)).planned.tried
    taken = {t.entry.layout.kept: t.entry.memory["M_gpu"] for t in tried}
    assert taken["x"] < taken["h"]
    for memory, kept in ((taken["h"], "h"), (taken["h"] - 1, "x"), (taken["x"], "x")):
        for plan in (asked.replace(memory=memory), asked.replace(memory=memory, expert_axis="ep")):
            compiled = planned(model, mesh, plan)
            assert decided(compiled).checkpoint == kept
            assert f'keep="{kept}"' in str(moefx.graph(compiled, "blocks.0"))
    moefx.verify(compiled, model, (own_tokens(mesh),), routings=False).raise_if_failed()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled = planned(model, mesh, asked.replace(memory=taken["x"] - 1))
    (text,) = {str(w.message) for w in told if "nothing fits" in str(w.message)}
    assert "keep 'x'" in text and decided(compiled).checkpoint == "x"
    compiled(own_tokens(mesh)).sum().backward()


def case_ranks_with_other_numbers_of_tokens() -> None:
    """The most of any rank count."""
    inputs = (torch.zeros(16 * (dist.get_rank() + 1), D),)
    assert decided(planned(Model("gated", layers=1), mesh_of(dp=2, ep=2), inputs=inputs)).tokens == 64


def case_stages() -> None:
    """The first stage of 1F1B has two micro-batches in flight, and may have to keep less."""
    mesh, model = mesh_of(pp=2, ep=2), Model("gated", layers=2)
    stage = mesh["pp"].get_local_rank()
    asked = AUTO.replace(zero=0)
    half = Half(copy.deepcopy(model), stage)
    (h, _) = moefx.explain(planned(half, mesh, asked)).planned.tried
    needed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(needed, h.entry.memory["M_gpu"])
    assert needed[0] == needed[1] > needed[2] == needed[3]
    compiled = planned(half, mesh, asked.replace(memory=needed[0] - 1))
    found = moefx.explain(compiled).planned.plan
    assert (found.expert_axis, found.checkpoint) == ("ep", "h" if stage else "x")
    mesh = mesh_of(pp=2, tp=2)  # the axes of experts are made one for all stages
    found = decided(planned(half, mesh))
    assert (found.expert_axis, found.sequence_axis) == ("tp", "tp")


def case_ranks_that_do_not_agree() -> None:
    mesh, model, odd = mesh_of(dp=2, ep=2), Model("gated", layers=1), dist.get_rank() == 1
    plan = AUTO.replace(memory=2e9 if odd else 1e9)
    differs(lambda: planned(model, mesh, plan), "the ranks of the mesh do not agree on Plan(memory=...): rank 0 1000")
    with mock.patch.dict(os.environ, {"MOEFX_PLATFORM": "h200" if odd else "frontier"}):
        differs(lambda: planned(model, mesh), "platform, which MOEFX_PLATFORM may name: rank 0 frontier, rank 1 h200")
    with mock.patch.dict(os.environ, {"MOEFX_PLATFORM": "h300" if odd else "h200"}):
        text = "MOEFX_PLATFORM=h300: no platform" if odd else "rank 1 of the mesh cannot go on, UnknownPlatform: MOEFX_"
        differs(lambda: planned(model, mesh), text, error=UnknownPlatform if odd else InvalidPlan)
    with mock.patch.dict(os.environ, {"MOEFX_PLATFORM": "frontier"}):
        assert moefx.explain(planned(model, mesh)).planned.to_dict()["platform"] == "frontier"


def case_experts_that_do_not_divide() -> None:
    model = Model("gated", layers=1, num_experts=E + 1)
    differs(lambda: planned(model, mesh_of(ep=4)), "5 experts do not divide: experts over ep (4)")


def case_entries_compile_over_their_meshes() -> None:
    """Each division of four ranks: what a ranking says, as it says it."""
    model, seen = Model("gated", layers=1), set()
    model.blocks[0].num_heads = 4  # as attention has them: what TP divides
    ranking = moefx.plan(model, "h200", 4, batch=8, tokens=32, example_inputs=EXAMPLE)
    for entry in ranking:
        what = tuple(entry.mesh.values()), entry.plan().expert_axis, entry.plan().placement
        if what in seen or entry.layout.ep == 1 or entry.layout.pp > 1:
            continue
        seen.add(what)
        mesh = init_device_mesh("cpu", **entry.mesh)
        sizes = {"pp": 1, "ep": entry.layout.ep}  # micro-batches, ZeRO and TP are left to the user
        compiled = planned(model, mesh, entry.plan(validation="symbolic", layout=sizes))
        assert moefx.blocks(compiled)
        moefx.verify(compiled, model, (own_tokens(mesh),), routings=False).raise_if_failed()
    axes = {axes for _, axes, _ in seen}
    assert axes == {"ep", "tp", ("ep", "tp")}, seen
