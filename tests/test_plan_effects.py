"""Plans with fields that would have no effect raise an error that names the field."""

from __future__ import annotations

import dataclasses
import re
import types
from typing import Any

import pytest
import torch
from torch import nn

import moefx
from moefx import Plan
from moefx.driver.plan_check import check_effects, check_layout
from moefx.errors import InvalidPlan
from moefx.frontends.dynamo import backend
from moefx.planner.auto import decide
from moefx.planner.catalogue import find_model
from moefx.planner.decision import Facts
from moefx.planner.local_platform import LocalPlatform
from moefx.planner.mesh_axes import list_axis_uses
from moefx.planner.platforms import find_platform
from moefx.runtime.ranks.sharding import resolve_expert_axes

from .blocks import D, Gated, Loop

EXAMPLE = (torch.zeros(9, D),)
OF_A_MESH = (
    dict(expert_axis="ep"), dict(expert_axis=("dp", "ep")), dict(placement="ep_first"), dict(sequence_axis="tp"),
    dict(sequence_gradients="partial"), dict(gradients="manual"), dict(dispatch="rbd"), dict(dispatch="flat"),
    dict(pilots=False), dict(chunks=2), dict(node_size=8), dict(topology_levels=(32,)), dict(timeout=5.0),
    dict(dispatch="gather"), dict(max_tokens=64), dict(stash_factor=2.0),
)  # fmt: skip
NEVER = (dict(drop="position_token"), dict(memory=1e9), dict(zero=3))


def make_mesh(**sizes: int) -> types.SimpleNamespace:
    shape = tuple(sizes.values())
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return types.SimpleNamespace(mesh_dim_names=tuple(sizes), mesh=ranks, shape=shape)


@pytest.mark.parametrize("fields", [*OF_A_MESH, *NEVER], ids=str)
def test_fields_without_effect_are_refused(fields):
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
        (dict(dispatch="gather", max_tokens=64), True),
        (dict(dispatch="dedup", max_tokens=64), False),
        (dict(dispatch="gather", chunks=2), False),
        (dict(drop="position_slot", capacity_factor=1.0), True),
        (dict(checkpoint="auto", memory=1e9, zero=2), True),
        (dict(expert_axis="auto", memory=1e9), True),
        *((fields, False) for fields in NEVER),
    ],
    ids=str,
)
def test_fields_over_a_mesh(fields, fits):
    if fits:
        check_effects(Plan(**fields), make_mesh(dp=2, ep=2, tp=2))
        return
    with pytest.raises(InvalidPlan, match="has no effect"):
        check_effects(Plan(**fields), make_mesh(dp=2, ep=2, tp=2))


def test_planner_fields_without_a_mesh_raise():
    check_effects(Plan(expert_axis="auto", checkpoint="auto", node_size=4, memory=1e9, zero=1, tokens=64), None)
    check_effects(Plan(tokens=64), None)


# ---------------------------------------------------------------------- layouts of the planner
LAYOUT = {"pp": 2, "tp": 2, "ep": 4, "zero": 1, "microbatches": 16, "recompute": 1}


def test_layout_is_a_field():
    plan = Plan(layout=LAYOUT)
    assert plan.layout == tuple(LAYOUT.items()) and Plan.from_json(plan.to_json()) == plan
    for wrong in ("pp", 3, {"pp": "2"}, [("pp",)], {1: 2}):
        with pytest.raises(InvalidPlan, match="expected sizes by name"):
            Plan(layout=wrong)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"epp": 4}, "no size 'epp'; there is pp, tp, ep, zero, microbatches, recompute"),
        ({"ep": 0}, "ep=0, expected 1 or more"),
        ({"pp": -1}, "pp=-1, expected 1 or more"),
        ({"microbatches": 0}, "microbatches=0, expected 1 or more"),
        ({"zero": 4}, "zero=4, expected 0 to 3"),
        ({"recompute": -1}, "recompute=-1, expected 0 to 1"),
        ((("pp", 1), ("pp", 2)), "names a size twice"),
    ],
    ids=str,
)
def test_sizes_that_no_layout_has_raise(layout, text):
    with pytest.raises(InvalidPlan, match=text):
        Plan(layout=layout)


@pytest.mark.parametrize(
    ("changes", "mesh", "text"),
    [
        (dict(ep=1), make_mesh(dp=4), "experts on every rank"),
        (dict(ep=1), None, "2 pipeline stages, and compile does not split a model"),
        (
            dict(pp=1),
            None,
            "compile got no mesh, but the planner's layout spreads the experts over 4 ranks",
        ),
        (dict(), make_mesh(ep=4, tp=2), r"pp=2 \(1 in the mesh\)"),
        (dict(), make_mesh(pp=2, ep=4), r"tp=2 \(1 in the mesh\)"),
        (dict(), make_mesh(pp=4, ep=4, tp=2), r"pp=2 \(4 in the mesh\)"),
        (dict(), make_mesh(pp=2, ep=2, tp=2), r"ep=4 \(2 in the mesh\)"),
        (dict(pp=1, tp=1), make_mesh(pp=2, ep=4), r"pp=1 \(2 in the mesh\)"),
    ],
)
def test_a_mesh_unlike_the_layout_raises(changes, mesh, text):
    layout = LAYOUT | changes
    plan = Plan(layout=layout, expert_axis="ep" if layout["ep"] > 1 else None)
    with pytest.raises(InvalidPlan, match=text):
        check_layout(plan, mesh)
    check_layout(follow_remedies(plan, mesh), mesh)


def follow_remedies(plan: Plan, mesh: Any) -> Plan:
    """Apply the remedies of all errors literally and return the plan."""
    for _ in range(4):
        try:
            check_layout(plan, mesh)
            return plan
        except InvalidPlan as error:
            (advice,) = re.findall(r"plan\.replace\(layout=.*?\)", str(error))
            plan = eval(advice, {"plan": plan})
    raise AssertionError(plan)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (LAYOUT, "tensor parallelism .* 2 ranks, ZeRO-1 .*, 16 micro-batches, layers"),
        ({"pp": 2, "ep": 4, "tp": 2}, "counts on tensor parallelism"),
        ({"ep": 4, "zero": 3}, r"counts on ZeRO-3 \(fully_shard\), which compile does not do"),
        ({"ep": 4, "zero": 0, "microbatches": 2}, "counts on 2 micro-batches"),
        ({"recompute": 1}, "layers that run again"),
    ],
    ids=str,
)
def test_layouts_that_compile_does_not_support_raise(layout, text):
    plan, mesh = Plan(layout=layout, expert_axis="ep"), make_mesh(pp=2, ep=4, tp=2)
    with pytest.raises(InvalidPlan, match=text):
        check_layout(plan, mesh)
    rest = dict(follow_remedies(plan, mesh).layout or ())
    assert rest == {name: layout[name] for name in ("pp", "ep") if name in layout} | (
        {"zero": 0} if layout.get("zero") == 0 else {}
    )
    if "ep" in layout:  # the current value in the message is the size in the mesh
        with pytest.raises(InvalidPlan, match=r"ep=4 \(2 in the mesh\)"):
            check_layout(plan.replace(layout=rest), make_mesh(pp=2, ep=2, tp=2))


def test_entries_list_their_assumptions():
    ranking = moefx.plan("olmoe-1b-7b", "frontier", 16, batch=64)
    for entry in ranking:
        x, mesh = entry.layout, make_mesh(**dict(zip(*reversed(entry.mesh.values()), strict=True)))
        plan = entry.plan()
        found = dict(plan.layout or ())
        assert (found["pp"], found["tp"], found["ep"]) == (x.pp, x.tp, x.ep) and found["zero"] == x.zero
        asked = x.tp > 1 or x.zero or x.microbatches > 1 or x.recompute
        here = mesh if x.ep > 1 else None
        if here is not None:
            check_effects(plan, here)
        if asked or (here is None and x.pp > 1):
            with pytest.raises(InvalidPlan, match=r"does not do|does not split a model"):
                check_layout(plan, here)
        check_layout(follow_remedies(plan, here), here)
        assert entry.plan(layout=None).layout is None
    with pytest.raises(InvalidPlan, match=r"plan is a Entry; .*pass its plan\(\)"):
        moefx.compile(Loop(Gated), plan=ranking[0], example_inputs=EXAMPLE)


def test_compile_refuses_entries_of_the_planner():
    model = Loop(Gated)
    asked = Plan(layout={"pp": 1, "tp": 1, "ep": 1, "zero": 1, "microbatches": 4, "recompute": 0})
    with pytest.raises(InvalidPlan, match=r"counts on ZeRO-1 .*, 4 micro-batches, which compile does not do"):
        moefx.compile(model, plan=asked, example_inputs=EXAMPLE)
    assert moefx.blocks(moefx.compile(model, plan=follow_remedies(asked, None), example_inputs=EXAMPLE))


# ---------------------------------------------------------------------- axes
@pytest.mark.parametrize("axis", ["pp", "replicate", "dp_replicate"])
def test_an_axis_without_experts_raises(axis):
    with pytest.raises(InvalidPlan, match=f"no axis for experts: its only one is '{axis}'"):
        resolve_expert_axes(make_mesh(**{axis: 4}), None)
    assert resolve_expert_axes(make_mesh(**{axis: 4}), axis) == (axis,)


def decide_plan(**sizes: int) -> Plan:
    asked = Plan(expert_axis="auto", checkpoint="auto", memory=139e9, zero=1)
    here = LocalPlatform(find_platform("dgx-h100"), "said")
    facts = {rank: Facts(asked, find_model("olmoe-1b-7b"), 1, 4096, "said", here) for rank in range(8)}
    return decide(facts, 0, make_mesh(**sizes)).plan


@pytest.mark.parametrize("name", ["replicate", "dp_replicate", "replicas"])
def test_auto_keeps_replicas(name):
    for sizes in ({name: 2, "shard": 4}, {"shard": 4, name: 2}):
        assert len(list_axis_uses(make_mesh(**sizes), Plan(expert_axis="auto"))) == 3
        assert decide_plan(**sizes).expert_axis == "shard"
    assert decide_plan(**{name: 2, "ep": 4}).expert_axis == "ep"
    with pytest.raises(InvalidPlan, match=f"experts over {name} .8. to choose from"):
        decide_plan(**{name: 8})


def test_a_decided_plan_is_accepted():
    plan = decide_plan(dp=2, ep=4)
    check_effects(plan, make_mesh(dp=2, ep=4))
    changed = {f.name for f in dataclasses.fields(Plan) if getattr(plan, f.name) != f.default}
    assert changed == {"expert_axis", "tokens"}
