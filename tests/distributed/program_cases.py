"""Distributed blocks as programs: counts of collectives and copies, one graph under `torch.compile`, recomputation."""

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
from moefx.ir.ops import uneven_all_to_all as exchange
from moefx.ir.ops.op_definition import registry
from moefx.ir.ops.uneven_all_to_all import start_all_to_all

from ..blocks import D, K
from .launch import sampled
from .models import Model, compile_over_mesh

PLANS = {
    name: moefx.Plan(dispatch=name, node_size=2, validation="symbolic") for name in ("flat", "dedup", "rbd", "halo")
}
HOPS = {"flat": 1, "dedup": 1, "rbd": 2, "halo": 3}


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


@contextlib.contextmanager
def count_collectives():
    """Count collectives and copies to the host, and record the group of each exchange of rows."""
    found: Counter = Counter()
    rows: list[tuple[str, list[int]]] = []

    def start_and_count(t, sent, received, group):
        found["rows"] += 1
        rows.append((group, list(sent)))
        return start_all_to_all(t, sent, received, group)

    def count_exchange(*args, **kwargs):
        found["counts"] += 1
        return all_to_all_single(*args, **kwargs)

    def copy_and_count(t, *args, **kwargs):
        found["copies"] += 1
        return cpu(t, *args, **kwargs)

    all_to_all_single, cpu = dist.all_to_all_single, torch.Tensor.cpu
    with (
        mock.patch.object(moefx.ir.ops.row_exchange, "start_all_to_all", start_and_count),
        mock.patch.object(dist, "all_to_all_single", count_exchange),
        mock.patch.object(torch.Tensor, "cpu", copy_and_count),
    ):
        yield found, rows


@contextlib.contextmanager
def collect_received():
    """Collect the storages of received rows."""
    found: list[torch.UntypedStorage] = []

    def start_and_collect(*args):
        rows = of_exchange(*args)
        found.append(rows.untyped_storage())
        return rows

    of_exchange = moefx.ir.ops.row_exchange.start_all_to_all
    with mock.patch.object(moefx.ir.ops.row_exchange, "start_all_to_all", start_and_collect):
        yield found


def case_collectives_and_copies() -> None:
    """Exchange counts and copy to the host once per layer; exchange rows once per hop in each direction."""
    for name, plan in PLANS.items():
        compiled = compile_over_mesh(Model("gated", layers=2), make_mesh(), plan)
        x = torch.randn(9, D)
        with count_collectives() as (found, _):
            out = compiled(x)
            assert found == {"rows": 2 * 2 * HOPS[name], "counts": 2, "copies": 2}, (name, found)
        with count_collectives() as (found, _):
            out.sum().backward()
            assert found == {"rows": 2 * 2 * HOPS[name]}, (name, found)


def case_weights_while_gradients_travel() -> None:
    """Compute gradients of weights while gradients of rows travel, between nodes if there are several."""
    events: list[str] = []

    def record_calls(name, function):
        def run(*args, **kwargs):
            events.append(kwargs.get("part", name))
            return function(*args, **kwargs)

        return run

    backward = registry["expert_mlp_backward"]
    providers = {n: dataclasses.replace(p, run=record_calls("experts", p.run)) for n, p in backward.providers.items()}
    for way, plan in PLANS.items():
        compiled = compile_over_mesh(Model("stacked", layers=1).double(), make_mesh(), plan)
        x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
        out = compiled(x)
        events.clear()
        with (
            mock.patch.object(backward, "providers", providers),
            mock.patch.object(moefx.ir.ops.row_exchange, "start_all_to_all", record_calls("start", start_all_to_all)),
            mock.patch.object(exchange, "_wait_for_rows", record_calls("wait", exchange._wait_for_rows)),
        ):
            out.sum().backward()
        rows, weights = events.index("rows"), events.index("weights")
        on_their_way = events[:weights].count("start") - events[:weights].count("wait")
        assert rows < weights, events
        assert events.count("experts") == 0, events
        assert on_their_way == {"flat": 1, "dedup": 1, "rbd": 1, "halo": 2}[way], events
        assert events[weights + 1 :] == ["wait"] * on_their_way, events


def case_rows_by_link() -> None:
    """Send a token once per node to other nodes, and within a node once per rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Model("gated", layers=1, num_experts=2 * world)
    for name, plan in PLANS.items():
        compiled = compile_over_mesh(model, make_mesh(), plan)
        torch.manual_seed(rank)
        x = torch.randn(50, D)
        with count_collectives() as (_, rows):
            compiled(x)
        ids = model.blocks[0].route(model.first(x))[1]
        to = ids // 2  # rank
        routes = moefx.blocks(compiled)[0].forward.expert_layout.routes
        if name in ("flat", "dedup"):
            (group, sent), _ = rows
            assert dist.get_world_size(dist.distributed_c10d._resolve_process_group(group)) == world
            for r in range(world):
                expected = (to == r).sum() if name == "flat" else (to == r).any(1).sum()
                assert sent[r] == expected
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


def case_load_of_own_tokens() -> None:
    """Return the load of each rank's own tokens for all experts, without communication."""
    world = dist.get_world_size()
    backwards = DeviceMesh("cpu", torch.arange(world).flip(0), mesh_dim_names=("ep",))
    model = Model("gated", layers=1, num_experts=2 * world)
    for name in sampled(("halo", "dedup"), 2):
        compiled = compile_over_mesh(model, backwards, PLANS[name])
        (block,) = moefx.blocks(compiled)
        block.record_load()
        x = torch.randn(9 + dist.get_rank(), D)
        with count_collectives() as (found, _):
            out = compiled(x)
            load = block.load()
            assert found == {"rows": 2 * HOPS[name], "counts": 1, "copies": 1}, (name, found)
        torch.testing.assert_close(out, model(x))
        ids = model.blocks[0].route(model.first(x))[1]
        assert torch.equal(load, ids.flatten().bincount(minlength=2 * world).int())
    kinds = Model("kinds", layers=1)
    loads = []
    alone = moefx.compile(kinds, plan=moefx.Plan(validation="symbolic"), example_inputs=(torch.zeros(9, D),))
    for other in (compile_over_mesh(kinds, make_mesh(), PLANS["dedup"]), alone):
        moefx.blocks(other)[0].record_load()
        other(x)
        loads.append(moefx.blocks(other)[0].load())
    assert torch.equal(*loads), loads
    assert len(loads[0]) == 5, loads


def case_one_graph() -> None:
    for name, layers in sampled((("halo", 1), ("dedup", 2)), 2):
        check_one_graph(name, "aot_eager", layers)


def through_inductor() -> None:
    check_one_graph("halo", "inductor", layers=2)


def check_one_graph(name: str, backend: str, layers: int) -> None:
    """Compile one graph, and run it with other token counts and routings and with the load of the last block."""
    model = Model("stacked", layers=layers)
    compiled = compile_over_mesh(model, make_mesh(), PLANS[name])
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
    """Keep all gradients if Dynamo breaks the graph between `weights_later` and the experts."""
    model = Model("stacked", layers=1, num_experts=4)
    compiled = compile_over_mesh(model, make_mesh(), PLANS["dedup"])
    torch._dynamo.reset()
    x = torch.randn(9 + dist.get_rank(), D)
    torch.compile(compiled, backend="aot_eager")(x).pow(2).sum().backward()
    found = {name: p.grad for name, p in compiled.named_parameters()}
    compiled.zero_grad()
    compiled(x).pow(2).sum().backward()
    for name, p in compiled.named_parameters():
        local = [t.to_local() if hasattr(t, "to_local") else t for t in (found[name], p.grad)]
        torch.testing.assert_close(*local, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def case_nested_checkpoints() -> None:
    """Nest checkpoints with our policy, which both consult, and with a policy that saves only counts."""
    model = Model("gated", layers=2)
    compiled = compile_over_mesh(model, make_mesh(), PLANS["dedup"])
    x = torch.randn(9, D)

    def make_contexts():
        return create_selective_checkpoint_contexts(moefx.save_routing)

    def counts_alone():
        def policy(ctx, op, *args, **kwargs):
            keeps = op.name() == "moefx::exchange_counts"
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def nested(x):
        x = compiled.first(x)
        for block in compiled.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=make_contexts)
        return x

    def alone(x):
        x = compiled.first(x)
        for block in compiled.blocks:
            x = x + block(x)
        return x

    wanted = alone(x)
    (want,) = torch.autograd.grad(wanted.pow(2).sum(), compiled.first.weight)
    for context_fn, run in ((make_contexts, nested), (counts_alone, alone)):
        out = checkpoint(run, x, use_reentrant=False, context_fn=context_fn)
        (got,) = torch.autograd.grad(out.pow(2).sum(), compiled.first.weight)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(got, want)


def case_recomputation() -> None:
    """Recompute a layer: without a policy completely, with ours without routing and exchanges."""
    for name, plan in PLANS.items():
        model = Model("gated", layers=1)
        block = compile_over_mesh(model, make_mesh(), plan).blocks[0]
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
            with count_collectives() as (found, _), collect_received() as storages:
                out = checkpoint(block, inputs, use_reentrant=False, **kwargs)
                assert found["rows"] == 2 * HOPS[name]
            if context_fn:  # received rows are not kept
                assert len(storages) == 2 * HOPS[name]
                assert not any(s.nbytes() for s in storages[:-1])
            with count_collectives() as (found, _):
                out.pow(2).sum().backward()
                assert found["rows"] == 2 * HOPS[name] * (1 + again) or again, (name, found)
                assert found["counts"] == again, (name, found)
            torch.testing.assert_close(inputs.grad, wanted.grad)
            torch.testing.assert_close(block.gate.weight.grad, of_gate)
