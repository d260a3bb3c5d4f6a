"""Spread blocks as programs: collectives and copies counted, one graph under `torch.compile`, recomputation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moefx
import moefx.ir.ops.exchange_routes
import moefx.ir.ops.row_exchange
from moefx.ir.ops.op_definition import registry
from moefx.ir.ops.uneven_all_to_all import start, wait

from ..blocks import D, K
from .launch import sampled
from .models import Model, compiled_beside

PLANS = {
    name: moefx.Plan(dispatch=name, node_size=2, validation="symbolic") for name in ("flat", "dedup", "rbd", "halo")
}
HOPS = {"flat": 1, "dedup": 1, "rbd": 2, "halo": 3}


def one_axis() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


@contextlib.contextmanager
def counted():
    """Collectives, by group where rows travel, and copies to the host."""
    found: Counter = Counter()
    rows: list[tuple[str, list[int]]] = []

    def started(t, sent, received, group):
        found["rows"] += 1
        rows.append((group, list(sent)))
        return start(t, sent, received, group)

    def even(*args, **kwargs):
        found["counts"] += 1
        return all_to_all_single(*args, **kwargs)

    def copied(t, *args, **kwargs):
        found["copies"] += 1
        return cpu(t, *args, **kwargs)

    all_to_all_single, cpu = dist.all_to_all_single, torch.Tensor.cpu
    with (
        mock.patch.object(moefx.ir.ops.row_exchange, "start", started),
        mock.patch.object(dist, "all_to_all_single", even),
        mock.patch.object(torch.Tensor, "cpu", copied),
    ):
        yield found, rows


@contextlib.contextmanager
def arriving():
    """The memory of rows that arrive."""
    found: list[torch.UntypedStorage] = []

    def started(*args):
        rows = of_exchange(*args)
        found.append(rows.untyped_storage())
        return rows

    of_exchange = moefx.ir.ops.row_exchange.start
    with mock.patch.object(moefx.ir.ops.row_exchange, "start", started):
        yield found


def case_collectives_and_copies() -> None:
    """One exchange of counts and one copy to the host a layer; rows as often as there are hops, each way."""
    for name, plan in PLANS.items():
        compiled = compiled_beside(Model("gated", layers=2), one_axis(), plan)
        x = torch.randn(9, D)
        with counted() as (found, _):
            out = compiled(x)
            assert found == {"rows": 2 * 2 * HOPS[name], "counts": 2, "copies": 2}, (name, found)
        with counted() as (found, _):
            out.sum().backward()
            assert found == {"rows": 2 * 2 * HOPS[name]}, (name, found)


def case_weights_while_gradients_travel() -> None:
    """The gradients of the matrices are computed between a start and its wait: over the nodes, where there are some."""
    told: list[str] = []

    def tell(what, function):
        def run(*args, **kwargs):
            told.append(kwargs.get("part", what))
            return function(*args, **kwargs)

        return run

    backward = registry["expert_mlp_backward"]
    providers = {n: dataclasses.replace(p, run=tell("experts", p.run)) for n, p in backward.providers.items()}
    for way, plan in PLANS.items():
        compiled = compiled_beside(Model("stacked", layers=1).double(), one_axis(), plan)
        x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
        out = compiled(x)
        told.clear()
        with (
            mock.patch.object(backward, "providers", providers),
            mock.patch.object(moefx.ir.ops.row_exchange, "start", tell("start", start)),
            mock.patch.object(moefx.ir.ops.row_exchange, "wait", tell("wait", wait)),
        ):
            out.sum().backward()
        rows, weights = told.index("rows"), told.index("weights")
        on_their_way = told[:weights].count("start") - told[:weights].count("wait")
        assert rows < weights and told.count("experts") == 0, told
        assert on_their_way == {"flat": 1, "dedup": 1, "rbd": 1, "halo": 2}[way], told
        assert told[weights + 1 :] == ["wait"] * on_their_way, told


def case_rows_by_link() -> None:
    """To other nodes a token travels once for each node; within one, once for each rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Model("gated", layers=1, num_experts=2 * world)
    for name, plan in PLANS.items():
        compiled = compiled_beside(model, one_axis(), plan)
        torch.manual_seed(rank)
        x = torch.randn(50, D)
        with counted() as (_, rows):
            compiled(x)
        ids = model.blocks[0].route(model.first(x))[1]
        to = ids // 2  # rank
        routes = moefx.blocks(compiled)[0].forward.expert_layout.routes
        if name in ("flat", "dedup"):
            (group, sent), _ = rows
            assert dist.get_world_size(dist.distributed_c10d._resolve_process_group(group)) == world
            for r in range(world):
                mine = (to == r).sum() if name == "flat" else (to == r).any(1).sum()
                assert sent[r] == mine
            continue
        inter, intra = (level.group for level in routes.levels)
        assert [level.size for level in routes.levels] == [2, world // 2]
        sent = next(sent for group, sent in rows if group == inter)
        for node in range(2):
            wanted = (to // 2 == node).any(1).sum()
            assert sent[node] == (0 if name == "halo" and node == rank // 2 else wanted)
        if name == "halo":
            near = next(sent for group, sent in rows if group == intra)
            assert near == [int((to == rank // 2 * 2 + r).any(1).sum()) for r in range(2)]


def case_the_load() -> None:
    """Of each rank's own tokens, for all experts, and nobody else is asked for it."""
    world = dist.get_world_size()
    backwards = DeviceMesh("cpu", torch.arange(world).flip(0), mesh_dim_names=("ep",))
    model = Model("gated", layers=1, num_experts=2 * world)
    for name in sampled(("halo", "dedup"), 2):
        compiled = compiled_beside(model, backwards, PLANS[name])
        (block,) = moefx.blocks(compiled)
        block.record_load()
        x = torch.randn(9 + dist.get_rank(), D)
        with counted() as (found, _):
            out = compiled(x)
            load = block.load()
            assert found == {"rows": 2 * HOPS[name], "counts": 1, "copies": 1}, (name, found)
        torch.testing.assert_close(out, model(x))
        ids = model.blocks[0].route(model.first(x))[1]
        assert torch.equal(load, ids.flatten().bincount(minlength=2 * world).int())
    kinds = Model("kinds", layers=1)
    loads = []
    alone = moefx.compile(kinds, plan=moefx.Plan(validation="symbolic"), example_inputs=(torch.zeros(9, D),))
    for other in (compiled_beside(kinds, one_axis(), PLANS["dedup"]), alone):
        moefx.blocks(other)[0].record_load()
        other(x)
        loads.append(moefx.blocks(other)[0].load())
    assert torch.equal(*loads) and len(loads[0]) == 5, loads


def case_one_graph() -> None:
    for name, layers in sampled((("halo", 1), ("dedup", 2)), 2):
        check_one_graph(name, "aot_eager", layers)


def through_inductor() -> None:
    check_one_graph("halo", "inductor", layers=2)


def check_one_graph(name: str, backend: str, layers: int) -> None:
    """Also for other numbers of tokens and other routings, and with the load of the last block."""
    model = Model("stacked", layers=layers)
    compiled = compiled_beside(model, one_axis(), PLANS[name])
    counted_block = moefx.blocks(compiled)[-1]
    counted_block.record_load()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    whole = torch.compile(compiled, fullgraph=True, backend=backend, dynamic=True)
    for number in (9, 5):
        x = torch.randn(number + dist.get_rank(), D)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        out, want = whole(inputs[0]), model(inputs[1])
        torch.testing.assert_close(out, want)
        assert counted_block.load().sum() == K * len(x)
        compiled.zero_grad(), model.zero_grad()
        (out**2).sum().backward()
        (want**2).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        torch.testing.assert_close(compiled.first.weight.grad, model.first.weight.grad)
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 1, stats


def case_graphs_with_breaks() -> None:
    """Dynamo cuts the graph between `weights_later` and the experts: their gradients are all there, once."""
    model = Model("stacked", layers=1, num_experts=4)
    compiled = compiled_beside(model, one_axis(), PLANS["dedup"])
    torch._dynamo.reset()
    x = torch.randn(9 + dist.get_rank(), D)
    torch.compile(compiled, backend="aot_eager")(x).pow(2).sum().backward()
    found = {name: p.grad for name, p in compiled.named_parameters()}
    compiled.zero_grad()
    compiled(x).pow(2).sum().backward()
    for name, p in compiled.named_parameters():
        local = [t.to_local() if hasattr(t, "to_local") else t for t in (found[name], p.grad)]
        torch.testing.assert_close(*local, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def case_checkpoints_in_each_other() -> None:
    """Both with our policy, which each asks; and a policy that keeps the first of two operations on counts alone."""
    model = Model("gated", layers=2)
    compiled = compiled_beside(model, one_axis(), PLANS["dedup"])
    x = torch.randn(9, D)

    def ours():
        return create_selective_checkpoint_contexts(moefx.save_routing)

    def counts_alone():
        def policy(ctx, op, *args, **kwargs):
            keeps = op.name() == "moefx::exchange_counts"
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def nested(x):
        x = compiled.first(x)
        for block in compiled.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=ours)
        return x

    def alone(x):
        x = compiled.first(x)
        for block in compiled.blocks:
            x = x + block(x)
        return x

    wanted = alone(x)
    (want,) = torch.autograd.grad(wanted.pow(2).sum(), compiled.first.weight)
    for context_fn, run in ((ours, nested), (counts_alone, alone)):
        out = checkpoint(run, x, use_reentrant=False, context_fn=context_fn)
        (got,) = torch.autograd.grad(out.pow(2).sum(), compiled.first.weight)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(got, want)


def case_recomputation() -> None:
    """Around a layer: without a policy all is done again, with ours neither routing nor exchanges."""
    for name, plan in PLANS.items():
        model = Model("gated", layers=1)
        block = compiled_beside(model, one_axis(), plan).blocks[0]
        x = torch.randn(9, D)
        wanted = x.clone().requires_grad_()
        block(wanted).pow(2).sum().backward()
        of_gate = block.gate.weight.grad.clone()

        def contexts():
            return create_selective_checkpoint_contexts(moefx.save_routing)

        for context_fn, again in ((None, 1), (contexts, 0)):
            block.zero_grad()
            inputs = x.clone().requires_grad_()
            kwargs = {"context_fn": context_fn} if context_fn else {}
            with counted() as (found, _), arriving() as storages:
                out = checkpoint(block, inputs, use_reentrant=False, **kwargs)
                assert found["rows"] == 2 * HOPS[name]
            if context_fn:  # and are not kept as they arrived
                assert len(storages) == 2 * HOPS[name] and not any(s.nbytes() for s in storages[:-1])
            with counted() as (found, _):
                out.pow(2).sum().backward()
                assert found["rows"] == 2 * HOPS[name] * (1 + again) or again, (name, found)
                assert found["counts"] == again, (name, found)
            torch.testing.assert_close(inputs.grad, wanted.grad)
            torch.testing.assert_close(block.gate.weight.grad, of_gate)
