"""Plans that ask for what will not be done raise, or warn of what is the user's to do."""

from __future__ import annotations

import dataclasses
import types
import warnings

import pytest
import torch
from torch import nn

import moefx
from moefx import Plan, backend
from moefx._plan_effects import check_effects, check_layout
from moefx.errors import InvalidPlan
from moefx.planner.auto import decide
from moefx.planner.axes import uses
from moefx.planner.catalogue import model_of
from moefx.planner.decision import Facts
from moefx.planner.here import Here
from moefx.planner.platforms import platform_of
from moefx.runtime.sharding import expert_axis

from .passes.blocks import D, Gated, Loop

EXAMPLE = (torch.zeros(9, D),)
OF_A_MESH = (
    dict(expert_axis="ep"), dict(expert_axis=("dp", "ep")), dict(placement="ep_first"), dict(sequence_axis="tp"),
    dict(sequence_gradients="partial"), dict(gradients="manual"), dict(dispatch="rbd"), dict(dispatch="flat"),
    dict(pilots=False), dict(chunks=2), dict(node_size=8), dict(topology_levels=(32,)), dict(timeout=5.0),
)  # fmt: skip
NEVER = (
    dict(expert_storage="contiguous"), dict(expert_storage="stacked"), dict(drop="position_token"), dict(memory=1e9),
    dict(zero=3),
)  # fmt: skip


def mesh_of(**sizes: int) -> types.SimpleNamespace:
    shape = tuple(sizes.values())
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return types.SimpleNamespace(mesh_dim_names=tuple(sizes), mesh=ranks, shape=shape)


@pytest.mark.parametrize("fields", [*OF_A_MESH, *NEVER], ids=str)
def test_fields_without_effect(fields):
    (field,) = fields
    for call in (moefx.compile, moefx.explain):
        with pytest.raises(InvalidPlan, match=rf"Plan\({field}=.*has no effect"):
            call(Loop(Gated), plan=Plan(**fields), example_inputs=EXAMPLE)


@pytest.mark.parametrize(
    "fields",
    [
        *OF_A_MESH, *NEVER, dict(expert_axis="auto"), dict(checkpoint="auto"), dict(tokens=64),
        dict(checkpoint="auto", memory=1e9), dict(layout={"pp": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_options_without_effect_for_graphs(fields):
    call = torch.compile(nn.Linear(3, 3), backend=backend.backend, options=fields)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=rf"Plan\({next(iter(fields))}=") as error:
        call(torch.randn(2, 3))
    assert isinstance(error.value.inner_exception, InvalidPlan)
    with pytest.raises(InvalidPlan):
        moefx.rewrite_graph(torch.fx.symbolic_trace(nn.Linear(3, 3)), (torch.randn(2, 3),), Plan(**fields))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        *((fields, True) for fields in OF_A_MESH if not {"sequence_gradients", "pilots"} & set(fields)),
        (dict(sequence_gradients="partial"), False),
        (dict(sequence_gradients="partial", sequence_axis="tp"), True),
        (dict(sequence_gradients="partial", expert_axis="auto"), True),
        (dict(pilots=False), True),
        (dict(pilots=False, dispatch="halo"), True),
        (dict(pilots=False, dispatch="rbd"), False),
        (dict(drop="position_slot", capacity_factor=1.0), True),
        (dict(checkpoint="auto", memory=1e9, zero=2), True),
        (dict(expert_axis="auto", memory=1e9), True),
        *((fields, False) for fields in NEVER),
    ],
    ids=str,
)
def test_fields_over_a_mesh(fields, fits):
    if fits:
        check_effects(Plan(**fields), mesh_of(dp=2, ep=2, tp=2))
        return
    with pytest.raises(InvalidPlan, match="has no effect"):
        check_effects(Plan(**fields), mesh_of(dp=2, ep=2, tp=2))


def test_what_is_asked_of_the_planner_without_a_mesh():
    check_effects(Plan(expert_axis="auto", checkpoint="auto", node_size=4, memory=1e9, zero=1, tokens=64), None)
    check_effects(Plan(tokens=64), None)


# ---------------------------------------------------------------------- layouts of the planner
LAYOUT = {"pp": 2, "tp": 2, "ep": 4, "zero": 1, "microbatches": 16, "recompute": 1}


def test_a_layout_is_a_field():
    plan = Plan(layout=LAYOUT)
    assert plan.layout == tuple(LAYOUT.items()) and Plan.from_json(plan.to_json()) == plan
    for wrong in ("pp", 3, {"pp": "2"}, [("pp",)], {1: 2}):
        with pytest.raises(InvalidPlan, match="expected sizes by name"):
            Plan(layout=wrong)


@pytest.mark.parametrize(
    ("changes", "mesh", "text"),
    [
        (dict(ep=1), mesh_of(dp=4), "experts on every rank"),
        (dict(ep=1), None, "2 pipeline stages, and compile cuts no model"),
        (dict(), mesh_of(ep=4, tp=2), r"pp=2 \(1 in the mesh\)"),
        (dict(), mesh_of(pp=2, ep=4), r"tp=2 \(1 in the mesh\)"),
        (dict(), mesh_of(pp=4, ep=4, tp=2), r"pp=2 \(4 in the mesh\)"),
        (dict(), mesh_of(pp=2, ep=2, tp=2), r"ep=4 \(2 in the mesh\)"),
        (dict(pp=1, tp=1), mesh_of(pp=2, ep=4), r"pp=1 \(2 in the mesh\)"),
    ],
)
def test_a_mesh_that_is_not_of_the_layout(changes, mesh, text):
    layout = LAYOUT | changes
    plan = Plan(layout=layout, expert_axis="ep" if layout["ep"] > 1 else None)
    with pytest.raises(InvalidPlan, match=text) as error:
        check_layout(plan, mesh)
    assert "Plan(layout=None)" in str(error.value)
    check_layout(plan.replace(layout=None), mesh)


def test_what_compile_does_not_do_is_told():
    plan = Plan(layout=LAYOUT, expert_axis="ep")
    with pytest.warns(
        UserWarning, match="counts on tensor parallelism .* 2 ranks, ZeRO-1 .*, 16 micro-batches, layers"
    ):
        check_layout(plan, mesh_of(pp=2, ep=4, tp=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_layout(plan.replace(layout={"ep": 4}), mesh_of(ep=4))


def test_entries_say_what_they_count_on():
    for entry in moefx.plan("olmoe-1b-7b", "frontier", 16, batch=64):
        x, mesh = entry.layout, mesh_of(**dict(zip(*reversed(entry.mesh.values()), strict=True)))
        plan = entry.plan()
        found = dict(plan.layout or ())
        assert (found["pp"], found["tp"], found["ep"]) == (x.pp, x.tp, x.ep) and found["zero"] == x.zero
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if x.ep > 1:
                check_effects(plan, mesh)
                check_layout(plan, mesh)
            else:
                with pytest.raises(InvalidPlan, match="on every rank"):
                    check_layout(plan, mesh)
        assert entry.plan(layout=None).layout is None


# ---------------------------------------------------------------------- axes
@pytest.mark.parametrize("axis", ["pp", "replicate", "dp_replicate"])
def test_an_axis_that_is_not_for_experts(axis):
    with pytest.raises(InvalidPlan, match=f"no axis for experts: its only one is '{axis}'"):
        expert_axis(mesh_of(**{axis: 4}), None)
    assert expert_axis(mesh_of(**{axis: 4}), axis) == (axis,)


def decided(**sizes: int) -> Plan:
    asked = Plan(expert_axis="auto", checkpoint="auto", memory=139e9, zero=1)
    here = Here(platform_of("dgx-h100"), "said")
    facts = {rank: Facts(asked, model_of("olmoe-1b-7b"), 1, 4096, "said", here) for rank in range(8)}
    return decide(facts, 0, mesh_of(**sizes)).plan


@pytest.mark.parametrize("name", ["replicate", "dp_replicate", "replicas"])
def test_auto_leaves_replicas_alone(name):
    for sizes in ({name: 2, "shard": 4}, {"shard": 4, name: 2}):
        assert len(uses(mesh_of(**sizes), Plan(expert_axis="auto"))) == 3
        assert decided(**sizes).expert_axis == "shard"
    assert decided(**{name: 2, "ep": 4}).expert_axis == "ep"
    with pytest.raises(InvalidPlan, match=f"experts over {name} .8. to choose from"):
        decided(**{name: 8})


def test_a_decided_plan_can_be_given():
    plan = decided(dp=2, ep=4)
    check_effects(plan, mesh_of(dp=2, ep=4))
    changed = {f.name for f in dataclasses.fields(Plan) if getattr(plan, f.name) != f.default}
    assert changed == {"expert_axis", "tokens"}
