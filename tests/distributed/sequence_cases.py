"""Sequence-sharded blocks: every rank of an axis holds the same tokens and routes a part of them."""

from __future__ import annotations

import copy
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import moefx
import moefx.ir.ops.sequence_shards
from moefx.errors import InvalidInput, InvalidPlan
from moefx.ir.ops.uneven_all_to_all import wait

from ..blocks import D, Dropping
from .launch import sampled
from .models import BLOCKS, Model, compiled_beside, is_of_experts


def mesh_with_tokens_replicated() -> DeviceMesh:
    """Data-parallel by tensor-parallel; the experts are over both."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))


PLAN = moefx.Plan(expert_axis=("dp", "tp"), sequence_axis="tp", validation="symbolic")


def same_tokens(mesh: DeviceMesh, number: int) -> torch.Tensor:
    """The same on all ranks of "tp"."""
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    return torch.randn(number, D, dtype=torch.float64, generator=generator)


def gradients_are_right(model: nn.Module, compiled: nn.Module, mesh: DeviceMesh) -> None:
    own = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        wanted = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if is_of_experts(name):  # each token counts once
            dist.all_reduce(wanted, group=mesh.get_group("dp"))
        if name not in own:
            continue
        got = own[name].grad
        if hasattr(own[name], "to_local"):
            first = own[name].to_local().shape[0] * dist.get_rank()
            wanted, got = wanted[first : first + own[name].to_local().shape[0]], got.to_local()
        got = torch.zeros_like(wanted) if got is None else got
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def case_sizes_and_ways() -> None:
    mesh = mesh_with_tokens_replicated()
    ways = ((8, "flat"), (7, "dedup"), (1, "rbd"), (0, "dedup"), (6, "halo"))
    for kind, (number, dispatch) in sampled(itertools.product(("gated", "kinds"), ways), 3):
        plan = PLAN.replace(dispatch=dispatch, node_size=2)
        model = Model(kind).double()
        compiled = compiled_beside(model, mesh, plan)
        x = same_tokens(mesh, number)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        out, want = compiled(inputs[0]), model(inputs[1])
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
        grad = torch.full_like(want, 0.3).cumsum(0)
        (out * grad).sum().backward()
        (want * grad).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-10)
        gradients_are_right(model, compiled, mesh)


def halved_in_the_backward(t: torch.Tensor) -> torch.Tensor:
    return wait(t) * (1.0 if torch._C._current_graph_task_id() == -1 else 0.5)


def case_verified() -> None:
    """Each token counts once; what is a summand on each rank is added up; tokens must be the same."""
    mesh = mesh_with_tokens_replicated()
    for kind, plan in (("gated", PLAN), ("stacked", PLAN.replace(sequence_gradients="partial", dispatch="flat"))):
        torch.manual_seed(0)
        block = BLOCKS[kind]()
        compiled = moefx.compile(copy.deepcopy(block), mesh=mesh, plan=plan, example_inputs=(torch.zeros(9, D),))
        moefx.verify(compiled, block, (same_tokens(mesh, 13).float(),), routings=False).raise_if_failed()
        with mock.patch.object(moefx.ir.ops.sequence_shards, "wait", halved_in_the_backward):
            assert not moefx.verify(compiled, block, (same_tokens(mesh, 13).float(),), routings=False).ok
        other = same_tokens(mesh, 13).float() + (dist.get_rank() == 1)
        try:
            moefx.verify(compiled, block, (other,), routings=False)
        except InvalidInput as error:
            assert "have the same tokens" in str(error), error
        else:
            raise AssertionError("tokens differ")


def case_partial_gradients() -> None:
    """Each rank's loss is of a part of the output: the gradient of the whole is the sum."""
    mesh = mesh_with_tokens_replicated()
    block = BLOCKS["gated"]().double()
    for p in block.parameters():
        dist.broadcast(p.detach(), 0)
    compiled = compiled_beside(block, mesh, PLAN.replace(sequence_gradients="partial"))
    x, rank = same_tokens(mesh, 9), mesh["tp"].get_local_rank()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, want = compiled(inputs[0]), block(inputs[1])
    (out[rank::2] ** 2).sum().backward()
    (want**2).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    gradients_are_right(block, compiled, mesh)


def case_capacity_is_one_of_all_tokens() -> None:
    mesh = mesh_with_tokens_replicated()
    torch.manual_seed(0)
    block = Dropping().double()
    compiled = compiled_beside(block, mesh, PLAN)
    assert "capacity=3" in str(moefx.graph(compiled, ""))
    plan = PLAN.replace(expert_axis=None, sequence_axis=None)
    alone = moefx.compile(block, plan=plan, example_inputs=(torch.zeros(9, D, dtype=torch.float64),))
    loads = [moefx.blocks(model)[0] for model in (compiled, alone)]
    for load in loads:
        load.record_load()
    for number in (16, 5):
        x = same_tokens(mesh, number)
        torch.testing.assert_close(compiled(x), block(x))
        alone(x)
        parts, wanted = (load.load() for load in loads)  # what was dropped counts in neither
        dist.all_reduce(parts, group=mesh.get_group("tp"))
        assert torch.equal(parts, wanted), (parts, wanted)


def case_a_capacity_of_the_plan_is_one_of_all_tokens_too() -> None:
    mesh = mesh_with_tokens_replicated()
    torch.manual_seed(0)
    block = BLOCKS["gated"]().double()
    plan = moefx.Plan(capacity_factor=0.6, drop="weight", validation="symbolic")
    alone = moefx.compile(block, plan=plan, example_inputs=(torch.zeros(9, D, dtype=torch.float64),))
    x = same_tokens(mesh, 11)
    assert not torch.allclose(alone(x), block(x))
    for dispatch, sequence_axis in (("flat", "tp"), ("halo", "tp"), ("dedup", None)):
        planned = PLAN.replace(capacity_factor=0.6, dispatch=dispatch, sequence_axis=sequence_axis, node_size=2)
        torch.testing.assert_close(compiled_beside(block, mesh, planned)(x), alone(x))


def kept_bytes(block: nn.Module, x: torch.Tensor) -> int:
    """Of what a block keeps for its backward, its input and parameters aside; on all ranks."""

    def storage(t: torch.Tensor) -> torch.UntypedStorage:
        return (t.to_local() if hasattr(t, "to_local") else t).untyped_storage()

    known = {storage(t.detach()).data_ptr() for t in (x, *block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if (held := storage(t.detach())).data_ptr() not in known:
            kept[held.data_ptr()] = held.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x)  # as long as it is there, what it keeps is
    total = torch.tensor(sum(kept.values()))
    dist.all_reduce(total)
    del out
    return int(total)


class Wide(nn.Module):
    """Experts that keep much more than their router."""

    def __init__(self, dim=64, hidden=512, num_experts=8, top_k=4):
        super().__init__()
        self.gate, self.top_k = nn.Linear(dim, num_experts, bias=False), top_k
        self.up, self.down = (nn.Parameter(torch.randn(num_experts, *s) / 8) for s in ((dim, hidden), (hidden, dim)))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(self.top_k, -1)
        every = torch.einsum("esh,ehd->sed", torch.einsum("sd,edh->esh", x, self.up).relu(), self.down)
        return (every.gather(1, ids[..., None].expand(*ids.shape, x.shape[-1])) * w[..., None]).sum(1)


def case_activations_are_divided() -> None:
    """X-MoE figure 13: what the routed part keeps is divided by the size of the axis. Its router, whose share is small,
    is not. Appendix C.2: what that costs is the sums gathered, and in the backward the gradients of the input."""
    torch.manual_seed(0)
    block, x = Wide(), torch.randn(1024, 64)
    for size in (2, 4):
        mesh = init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("dp", "tp"))
        kept = []
        for plan in (PLAN.replace(sequence_axis=None), PLAN):
            compiled = moefx.compile(copy.deepcopy(block), mesh=mesh, plan=plan, example_inputs=(x[:32],))
            kept.append(kept_bytes(compiled, x.clone().requires_grad_()))
        print(f"TP={size}: {kept[0]} bytes kept, {kept[1]} where tokens are cut: {kept[0] / kept[1]:.3f} times")
        assert abs(kept[0] / kept[1] / size - 1) < 0.03, (size, kept)
        gathered: list[int] = []

        def waited(t: torch.Tensor, gathered=gathered) -> torch.Tensor:
            gathered.append(t.nbytes)
            return wait(t)

        with mock.patch.object(moefx.ir.ops.sequence_shards, "wait", waited):
            out = compiled(x.clone().requires_grad_())
            assert gathered == [x.nbytes], gathered
            out.sum().backward()
            weights = 1024 * block.top_k * 4
            assert sorted(gathered[1:]) == [weights, x.nbytes], gathered


def case_the_graph() -> None:
    mesh = mesh_with_tokens_replicated()
    text = str(moefx.graph(compiled_beside(BLOCKS["stacked"](), mesh, PLAN), ""))
    lines = (
        'own_ids              = shard_tokens(topk_ids, axis="tp")',
        'own_w                = shard_tokens(topk_w, axis="tp")',
        'own_x                = shard_tokens(x, axis="tp")',
        "place                = place_choices(own_ids)",
        'out                  = unshard_tokens(sums, axis="tp", gradients="replicated")',
    )
    for line in lines:
        assert line in text, text


def case_what_cannot_be() -> None:
    mesh = mesh_with_tokens_replicated()
    for plan, wanted in (
        (PLAN.replace(sequence_axis="sp"), "Plan(sequence_axis='sp'): the mesh has no such axis; it has dp=2, tp=2"),
        (PLAN.replace(expert_axis="dp"), "must be among the ranks of the expert axis 'dp'"),
    ):
        try:
            compiled_beside(BLOCKS["gated"](), mesh, plan)
        except InvalidPlan as found:
            assert wanted in str(found), found
        else:
            raise AssertionError(wanted)


class Attention(nn.Module):
    """What a tensor-parallel layer around a block looks like."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 8), nn.Linear(8, D)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.blocks, self.after = Attention(), nn.ModuleList([BLOCKS["gated"]()]), Attention()

    def forward(self, x):
        x = x + self.before(x)
        x = x + self.blocks[0](x)
        return x + self.after(x)


def case_between_tensor_parallel_layers() -> None:
    mesh = mesh_with_tokens_replicated()
    model = Layers().double()
    compiled = compiled_beside(copy.deepcopy(model), mesh, PLAN)
    plan = {f"{name}.up": ColwiseParallel() for name in ("before", "after")}
    plan |= {f"{name}.down": RowwiseParallel() for name in ("before", "after")}
    parallelize_module(compiled, mesh["tp"], plan)
    x = same_tokens(mesh, 7)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, want = compiled(inputs[0]), model(inputs[1])
    torch.testing.assert_close(out, want)
    (out**2).sum().backward()
    (want**2).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    own = dict(compiled.named_parameters())
    for name, p in model.blocks.named_parameters():
        if name.startswith("0.gate"):
            torch.testing.assert_close(own[f"blocks.{name}"].grad, p.grad)
    weight = own["before.up.weight"]
    torch.testing.assert_close(weight.grad.full_tensor(), model.before.up.weight.grad)
