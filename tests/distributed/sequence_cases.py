"""Sequence-sharded blocks: all ranks of an axis hold the same tokens and route a part of them."""

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
from moefx.ir.ops.uneven_all_to_all import wait_for_collective

from ..blocks import D, Dropping
from .launch import sampled
from .models import BLOCKS, Model, compile_over_mesh, is_expert_parameter


def make_tensor_parallel_mesh() -> DeviceMesh:
    """Build a mesh of data-parallel and tensor-parallel axes; experts use both."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))


PLAN = moefx.Plan(expert_axis=("dp", "tp"), sequence_axis="tp", validation="symbolic")


def draw_same_tokens(mesh: DeviceMesh, number: int) -> torch.Tensor:
    """Draw tokens that are equal on all ranks of "tp"."""
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    return torch.randn(number, D, dtype=torch.float64, generator=generator)


def check_gradients(model: nn.Module, compiled: nn.Module, mesh: DeviceMesh) -> None:
    parameters = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        wanted = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if is_expert_parameter(name):  # each token counts once
            dist.all_reduce(wanted, group=mesh.get_group("dp"))
        if name not in parameters:
            continue
        got = parameters[name].grad
        if hasattr(parameters[name], "to_local"):
            first = parameters[name].to_local().shape[0] * dist.get_rank()
            wanted, got = wanted[first : first + parameters[name].to_local().shape[0]], got.to_local()
        got = torch.zeros_like(wanted) if got is None else got
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def case_sizes_and_dispatches() -> None:
    mesh = make_tensor_parallel_mesh()
    ways = ((8, "flat"), (7, "dedup"), (1, "rbd"), (0, "dedup"), (6, "halo"))
    for kind, (number, dispatch) in sampled(itertools.product(("gated", "kinds"), ways), 3):
        plan = PLAN.replace(dispatch=dispatch, node_size=2)
        model = Model(kind).double()
        compiled = compile_over_mesh(model, mesh, plan)
        x = draw_same_tokens(mesh, number)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        out, want = compiled(inputs[0]), model(inputs[1])
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
        grad = torch.full_like(want, 0.3).cumsum(0)
        (out * grad).sum().backward()
        (want * grad).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-10)
        check_gradients(model, compiled, mesh)


def case_verify_detects_wrong_gradients() -> None:
    """Count each token once, add the summands of all ranks, and require equal tokens."""
    mesh = make_tensor_parallel_mesh()
    for kind, plan in (("gated", PLAN), ("stacked", PLAN.replace(sequence_gradients="partial", dispatch="flat"))):
        torch.manual_seed(0)
        block = BLOCKS[kind]()
        compiled = moefx.compile(copy.deepcopy(block), mesh=mesh, plan=plan, example_inputs=(torch.zeros(9, D),))
        moefx.verify(compiled, block, (draw_same_tokens(mesh, 13).float(),), routings=False).raise_if_failed()
        halved = list[torch.Size]()

        def halve_gradient(t: torch.Tensor, halved=halved, **_) -> torch.Tensor:
            gathered = wait_for_collective(t)
            if torch._C._current_graph_task_id() == -1:
                return gathered  # in the forward
            halved.append(gathered.shape)
            return gathered * 0.5

        with mock.patch.object(moefx.ir.ops.sequence_shards, "wait_for_collective", halve_gradient):
            assert not moefx.verify(compiled, block, (draw_same_tokens(mesh, 13).float(),), routings=False).ok
        assert halved, "no backward waited for a collective"
        other = draw_same_tokens(mesh, 13).float() + (dist.get_rank() == 1)
        try:
            moefx.verify(compiled, block, (other,), routings=False)
        except InvalidInput as error:
            assert "have the same tokens" in str(error), error
        else:
            raise AssertionError("tokens differ")


def case_partial_gradients() -> None:
    """Sum gradients over ranks whose losses cover parts of the output."""
    mesh = make_tensor_parallel_mesh()
    block = BLOCKS["gated"]().double()
    for p in block.parameters():
        dist.broadcast(p.detach(), 0)
    compiled = compile_over_mesh(block, mesh, PLAN.replace(sequence_gradients="partial"))
    x, rank = draw_same_tokens(mesh, 9), mesh["tp"].get_local_rank()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, want = compiled(inputs[0]), block(inputs[1])
    (out[rank::2] ** 2).sum().backward()
    (want**2).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    check_gradients(block, compiled, mesh)


def case_capacity_counts_all_tokens() -> None:
    mesh = make_tensor_parallel_mesh()
    torch.manual_seed(0)
    block = Dropping().double()
    compiled = compile_over_mesh(block, mesh, PLAN)
    assert "capacity=3" in str(moefx.graph(compiled, ""))
    plan = PLAN.replace(expert_axis=None, sequence_axis=None)
    alone = moefx.compile(block, plan=plan, example_inputs=(torch.zeros(9, D, dtype=torch.float64),))
    loads = [moefx.blocks(model)[0] for model in (compiled, alone)]
    for load in loads:
        load.record_load()
    for number in (16, 5):
        x = draw_same_tokens(mesh, number)
        torch.testing.assert_close(compiled(x), block(x))
        alone(x)
        parts, wanted = (load.load() for load in loads)  # dropped slots count in neither
        dist.all_reduce(parts, group=mesh.get_group("tp"))
        assert torch.equal(parts, wanted), (parts, wanted)


def case_plan_capacity_counts_all_tokens() -> None:
    mesh = make_tensor_parallel_mesh()
    torch.manual_seed(0)
    block = BLOCKS["gated"]().double()
    plan = moefx.Plan(capacity_factor=0.6, drop="weight", validation="symbolic")
    alone = moefx.compile(block, plan=plan, example_inputs=(torch.zeros(9, D, dtype=torch.float64),))
    x = draw_same_tokens(mesh, 11)
    assert not torch.allclose(alone(x), block(x))
    for dispatch, sequence_axis in (("flat", "tp"), ("halo", "tp"), ("dedup", None)):
        planned = PLAN.replace(capacity_factor=0.6, dispatch=dispatch, sequence_axis=sequence_axis, node_size=2)
        torch.testing.assert_close(compile_over_mesh(block, mesh, planned)(x), alone(x))


def count_saved_bytes(block: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that a block saves for its backward on all ranks, without input and parameters."""

    def storage(t: torch.Tensor) -> torch.UntypedStorage:
        return (t.to_local() if hasattr(t, "to_local") else t).untyped_storage()

    known = {storage(t.detach()).data_ptr() for t in (x, *block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if (held := storage(t.detach())).data_ptr() not in known:
            kept[held.data_ptr()] = held.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x)  # the output keeps the saved tensors alive
    total = torch.tensor(sum(kept.values()))
    dist.all_reduce(total)
    del out
    return int(total)


class Wide(nn.Module):
    """Experts that save more than their router."""

    def __init__(self, dim=64, hidden=512, num_experts=8, top_k=4):
        super().__init__()
        self.gate, self.top_k = nn.Linear(dim, num_experts, bias=False), top_k
        self.up, self.down = (nn.Parameter(torch.randn(num_experts, *s) / 8) for s in ((dim, hidden), (hidden, dim)))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(self.top_k, -1)
        outputs = torch.einsum("esh,ehd->sed", torch.einsum("sd,edh->esh", x, self.up).relu(), self.down)
        return (outputs.gather(1, ids[..., None].expand(*ids.shape, x.shape[-1])) * w[..., None]).sum(1)


def case_activations_are_divided() -> None:
    """Divide the saved tensors by the size of the axis (X-MoE figure 13), except those of the small router.

    The cost (appendix C.2) is a gather of the outputs, and in the backward one of the input gradients.
    """
    torch.manual_seed(0)
    block, x = Wide(), torch.randn(1024, 64)
    for size in (2, 4):
        mesh = init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("dp", "tp"))
        kept = []
        for plan in (PLAN.replace(sequence_axis=None), PLAN):
            compiled = moefx.compile(copy.deepcopy(block), mesh=mesh, plan=plan, example_inputs=(x[:32],))
            kept.append(count_saved_bytes(compiled, x.clone().requires_grad_()))
        print(f"TP={size}: {kept[0]} bytes kept, {kept[1]} where tokens are cut: {kept[0] / kept[1]:.3f} times")
        assert abs(kept[0] / kept[1] / size - 1) < 0.03, (size, kept)
        gathered: list[int] = []

        def wait_and_record(t: torch.Tensor, gathered=gathered, **_) -> torch.Tensor:
            gathered.append(t.nbytes)
            return wait_for_collective(t)

        with mock.patch.object(moefx.ir.ops.sequence_shards, "wait_for_collective", wait_and_record):
            out = compiled(x.clone().requires_grad_())
            assert gathered == [x.nbytes], gathered
            out.sum().backward()
            weights = 1024 * block.top_k * 4
            assert sorted(gathered[1:]) == [weights, x.nbytes], gathered


def case_graph_is_printed() -> None:
    mesh = make_tensor_parallel_mesh()
    text = str(moefx.graph(compile_over_mesh(BLOCKS["stacked"](), mesh, PLAN), ""))
    lines = (
        'own_ids          = shard_tokens(topk_ids, axis="tp")',
        'own_w            = shard_tokens(topk_w, axis="tp")',
        'own_x            = shard_tokens(x, axis="tp")',
        "destinations     = place_choices(own_ids)",
        'out              = unshard_tokens(sums, axis="tp", gradients="replicated")',
    )
    for line in lines:
        assert line in text, text


def case_invalid_sequence_axes_raise() -> None:
    mesh = make_tensor_parallel_mesh()
    for plan, wanted in (
        (PLAN.replace(sequence_axis="sp"), "Plan(sequence_axis='sp'): the mesh has no such axis; it has dp=2, tp=2"),
        (PLAN.replace(expert_axis="dp"), "must be among the ranks of the expert axis 'dp'"),
    ):
        try:
            compile_over_mesh(BLOCKS["gated"](), mesh, plan)
        except InvalidPlan as found:
            assert wanted in str(found), found
        else:
            raise AssertionError(wanted)


class Attention(nn.Module):
    """Tensor-parallel layer around a block."""

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
    mesh = make_tensor_parallel_mesh()
    model = Layers().double()
    compiled = compile_over_mesh(copy.deepcopy(model), mesh, PLAN)
    plan = {f"{name}.up": ColwiseParallel() for name in ("before", "after")}
    plan |= {f"{name}.down": RowwiseParallel() for name in ("before", "after")}
    parallelize_module(compiled, mesh["tp"], plan)
    x = draw_same_tokens(mesh, 7)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, want = compiled(inputs[0]), model(inputs[1])
    torch.testing.assert_close(out, want)
    (out**2).sum().backward()
    (want**2).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    parameters = dict(compiled.named_parameters())
    for name, p in model.blocks.named_parameters():
        if name.startswith("0.gate"):
            torch.testing.assert_close(parameters[f"blocks.{name}"].grad, p.grad)
    weight = parameters["before.up.weight"]
    torch.testing.assert_close(weight.grad.full_tensor(), model.before.up.weight.grad)
