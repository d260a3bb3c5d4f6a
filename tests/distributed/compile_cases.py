"""`moefx.compile(mesh=...)`: outputs and gradients are those of the plain model on each rank's tokens."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import moefx
from moefx.errors import InvalidPlan, NotRewritten

from ..passes.blocks import D, E, Gated, Loop, Mlp, Stacked


def dense(self, x):
    return torch.relu(x @ self.up) @ self.down


def half(self, x):
    gate, up = (x @ self.gate_up).chunk(2, -1)
    return (torch.sigmoid(gate) * up) @ self.down.mT


BLOCKS = {
    "gated": lambda: Loop(Gated),
    "biased": lambda: Loop(Mlp),
    "every expert": lambda: Loop(Gated, k=E),
    "stacked": lambda: Stacked(dense, up=(D, 8), down=(8, D)),
    "joined": lambda: Stacked(half, gate_up=(D, 16), down=(D, 8)),
}


GRAPH = """\
send                 = plan_dispatch(topk_ids, num_ranks={world}, num_slots={slots}, dedup=True)
splits               = exchange_counts(send, axis="ep")
rows, slots, weights = all_to_all_rows([x], [topk_w], send, splits, num_slots={slots}, dedup=True, axis="ep")
pft                  = build_pft(slots, weights, num_experts={slots})
y                    = expert_mlp(rows, pft, [up.local], [down.local]; relu(h) | y*w, keep="h", reduce=True)
out                  = all_to_all_back(y, send, splits, axis="ep")"""


class Model(nn.Module):
    def __init__(self, kind: str, layers: int = 2):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def check(kind: str, mesh: DeviceMesh, **plan) -> None:
    torch.manual_seed(0)
    model = Model(kind).double()
    compiled = moefx.compile(
        copy.deepcopy(model), mesh=mesh, plan=moefx.Plan(**plan), example_inputs=(torch.zeros(9, D).double(),)
    )
    assert len(moefx.blocks(compiled)) == 2
    axis = plan.get("expert_axis", "ep")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(7 + dist.get_rank(), D, dtype=torch.float64)
    out, want = compiled(x), model(x)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(want)
    (want * grad).sum().backward()
    (out * grad).sum().backward()
    group = mesh.get_group(axis)
    reference = dict(model.named_parameters())
    seen = 0
    for name, parameter in compiled.named_parameters():
        wanted = reference[name].grad
        if "experts" in name or name.endswith(("up", "down")):
            continue
        torch.testing.assert_close(parameter.grad, wanted)
        seen += 1
    for name, parameter in reference.items():  # all ranks in the same order
        if "experts" not in name and not name.endswith(("up", "down")):
            continue
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(total, group=group)
        mine = dict(compiled.named_parameters()).get(name)
        if isinstance(mine, DTensor):
            slots = E // mesh[axis].size()
            first = mesh[axis].get_local_rank() * slots
            torch.testing.assert_close(mine.grad.to_local(), total[first : first + slots])
            assert mine.shape == parameter.shape
        elif mine is not None:
            torch.testing.assert_close(mine.grad, total)
    assert seen == 4
    assert all(block.fallbacks == 0 for block in moefx.blocks(compiled))


def case_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for kind in BLOCKS:
        for dispatch in ("dedup", "flat"):
            check(kind, mesh, dispatch=dispatch)


def case_the_graph() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    compiled = moefx.compile(BLOCKS["stacked"](), mesh=mesh, example_inputs=(torch.zeros(9, D),))
    lines = [line.partition("  #")[0].rstrip() for line in str(moefx.graph(compiled, "")).splitlines()]
    assert "\n".join(lines[5:-1]) == GRAPH.format(world=world, slots=E // world), moefx.graph(compiled, "")


def refused(error: type[Exception], text: str, *args, **kwargs) -> None:
    try:
        moefx.compile(*args, **kwargs)
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(f"expected {error.__name__}: {text}")


def case_what_cannot_be() -> None:
    world = dist.get_world_size()
    block, inputs = BLOCKS["gated"](), (torch.zeros(9, D),)
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    refused(InvalidPlan, f"the mesh has no such axis; it has ep={world}", block, mesh=flat, example_inputs=inputs,
            plan=moefx.Plan(expert_axis="tp"))  # fmt: skip
    unnamed = init_device_mesh("cpu", (world,))
    refused(InvalidPlan, "axes of the mesh have no names", block, mesh=unnamed, example_inputs=inputs)
    if world == 4:
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        refused(InvalidPlan, "which axis of the mesh (dp=2, tp=2)", block, mesh=two, example_inputs=inputs)

    class WithDropout(Loop):
        def expert(self, e, x, w):
            return torch.dropout(super().expert(e, x, w), 0.5, self.training)

    compiled = moefx.compile(WithDropout().eval(), mesh=flat, example_inputs=inputs)
    compiled(torch.randn(5, D))
    try:
        compiled.train()(torch.randn(5, D))
    except NotRewritten as found:
        assert "draw random numbers" in str(found) and "a part of the experts" in str(found)
    else:
        raise AssertionError("ran the original")


def case_two_axes() -> None:
    if dist.get_world_size() < 4:
        return
    for names, plan in ((("dp", "ep"), {}), (("experts", "dp"), {"expert_axis": "experts"})):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        check("gated", mesh, **plan)
        check("stacked", mesh, **plan)


def case_other_calls_than_the_examples() -> None:
    """Another dtype, autocast: the block is lifted again, from abstract parameters of all experts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for kind in ("biased", "stacked"):
        torch.manual_seed(0)
        model = Model(kind)
        compiled = moefx.compile(copy.deepcopy(model), mesh=mesh, example_inputs=(torch.zeros(9, D),))
        x = torch.randn(11, D)
        torch.testing.assert_close(compiled(x), model(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        compiled.double(), model.double()
        x = x.double()
        torch.testing.assert_close(compiled(x), model(x))
        assert [block.fallbacks for block in moefx.blocks(compiled)] == [0, 0]
