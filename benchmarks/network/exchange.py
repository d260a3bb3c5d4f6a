"""One rank of `run.py`: times of dispatch and combine of each variant, on the rewritten graphs of one block."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
import moefx.ir.ops.row_exchange as exchange
from moefx.bench import link_times
from moefx.distribution.expert_layouts import find_expert_layouts
from moefx.ir.ops.uneven_all_to_all import get_group, start_all_to_all
from moefx.planner.communication import row_bytes
from moefx.planner.simulation.routing_skew import count_traffic
from moefx.runtime.ranks.link_costs import measure_handling

HIDDEN = 8  # of an expert: what they compute is not measured here


class Block(nn.Module):
    """Router and experts as a plain program: stacked parameters, all experts on all tokens."""

    def __init__(self, dim: int, num_experts: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, dim, HIDDEN) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, dim) * HIDDEN**-0.5)

    def forward(self, x):
        weights, ids = self.router(x).float().softmax(-1).topk(self.top_k, -1)
        every = torch.einsum("ehd,edm->ehm", torch.relu(torch.einsum("sd,edh->esh", x, self.up)), self.down)
        chosen = every.transpose(0, 1).gather(1, ids[..., None].expand(*ids.shape, x.shape[-1]))
        return (chosen * weights[..., None].to(x.dtype)).sum(1)


class Parts(fx.Interpreter):
    """Runs a block's graph in three parts: up to the rows, the experts, and from their sums on."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        calls = [n for n in module.graph.nodes if n.op == "call_function"]
        self.arrived = [n for n in calls if n.target is torch.ops.moefx.wait_rows.default][-1]
        self.back = next(n for n in calls if n.target is torch.ops.moefx.all_to_all_back.default)
        self.placed = next(n for n in calls if n.target is torch.ops.moefx.place_choices.default)
        self.seconds: dict[str, float] = {}

    def run_node(self, node: fx.Node) -> Any:
        if node in (self.placed, self.back):
            dist.barrier()
            self.began = time.perf_counter()
        result = super().run_node(node)
        if node is self.arrived:
            self.seconds["dispatch"] = _slowest(time.perf_counter() - self.began)
        if node.op == "output":
            self.seconds["combine"] = _slowest(time.perf_counter() - self.began)
        return result


def _slowest(seconds: float) -> float:
    t = torch.tensor(seconds)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


class Counter:
    """Counts what is sent: rows that leave the node, their bytes, and bytes for other ranks."""

    def __init__(self, ranks_of_node: int):
        self.size, self.found = ranks_of_node, torch.zeros(3, dtype=torch.int64)

    def __call__(self, rows, sent, received, group):
        ranks, own = dist.get_process_group_ranks(get_group(group)), dist.get_rank()
        width = rows.shape[1:].numel() * rows.element_size()
        away = sum(n for n, rank in zip(sent, ranks, strict=True) if rank // self.size != own // self.size)
        others = sum(n for n, rank in zip(sent, ranks, strict=True) if rank != own)
        self.found += torch.tensor([away, away * width, others * width])
        return start_all_to_all(rows, sent, received, group)


def links_between(node_size: int, above: list[int], longest: float) -> dict[str, Any]:
    """What `bench platform` measures of the network here."""
    cpu, exchanges = torch.device("cpu"), []
    for level, unit in link_times.list_levels(cpu, node_size, above):
        exchanges += link_times.measure_level(level, unit, node_size, cpu, 20, longest)
    handling = measure_handling(dist.group.WORLD.group_name, cpu)
    return {"handling": handling, "exchanges": [dataclasses.asdict(each) for each in exchanges]}


def rows_by_hop(ids: torch.Tensor, args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """What the planner's formulas say of the choices of all ranks: rows from rank to rank in each hop of dispatch, and
    the bytes of dispatch and combine that go to other ranks."""
    world = dist.get_world_size()
    units = [world, *sorted(args.levels, reverse=True), args.node_size, 1]
    sizes = [large // small for large, small in itertools.pairwise(units)] if variant in ("rbd", "halo") else [world]
    sources = torch.arange(world).repeat_interleave(args.tokens)
    found = count_traffic(ids.sort(-1).values.t(), sources, args.experts, sizes, variant)
    there, back, *_ = row_bytes(args.dim, 1 if variant == "flat" else args.top_k, args.experts // world, args.top_k > 1)
    every = [*found.hops, *([] if found.beside is None else [found.beside])]
    sent = sum(int(hop.sum() - hop.trace()) for hop in every) * (there + back)
    beside = None if found.beside is None else found.beside.tolist()
    return {"sizes": sizes, "hops": [hop.tolist() for hop in found.hops], "beside": beside, "there": there,
            "back": back, "bytes": sent}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("tokens", "dim", "experts", "top-k", "node-size", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--levels", type=int, nargs="*", default=[])
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument(
        "--links", type=float, default=0, help="measure the links first, so many seconds a size at most"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    block = Block(args.dim, args.experts, args.top_k).bfloat16()
    links = links_between(args.node_size, args.levels, args.links) if args.links else None
    graphs, blocks = {}, {}
    for variant in args.variants:
        plan = moefx.Plan(
            dispatch=variant.partition(",")[0], pilots="," not in variant, node_size=args.node_size,
            topology_levels=tuple(args.levels), validation="symbolic",
        )  # fmt: skip
        blocks[variant] = moefx.compile(
            block, mesh=mesh, plan=plan, example_inputs=(torch.zeros(8, args.dim).bfloat16(),)
        )
        graphs[variant] = Parts(fx.GraphModule(blocks[variant], moefx.graph(blocks[variant], "").graph))
    auto = moefx.Plan(node_size=args.node_size, topology_levels=tuple(args.levels), validation="symbolic")
    found = moefx.compile(block, mesh=mesh, plan=auto, example_inputs=(torch.zeros(8, args.dim).bfloat16(),))
    picked = str(find_expert_layouts(found)[""])
    torch.manual_seed(1 + rank)
    x = torch.randn(args.tokens, args.dim).bfloat16()
    results, rows_of = {}, {}
    with torch.no_grad():
        if links:
            ids = [torch.empty(args.tokens, args.top_k, dtype=torch.int64) for _ in range(world)]
            dist.all_gather(ids, block.router(x).float().softmax(-1).topk(args.top_k, -1).indices)
            for variant in args.variants:
                rows_of[variant] = rows_by_hop(torch.cat(ids), args, variant) if "," not in variant else None
        want = block(x[:16]).float()
        for variant, graph in graphs.items():
            counter = exchange.start_all_to_all = Counter(args.node_size)
            out = graph.run(x)
            out = (out[0] if isinstance(out, (tuple, list)) else out)[:16].float()
            exchange.start_all_to_all = start_all_to_all
            error = ((out - want).norm() / want.norm()).item()
            dist.all_reduce(counter.found)
            rows, leaves, sent = counter.found.tolist()
            if links and rows_of[variant]:
                assert sent == rows_of[variant]["bytes"], (variant, sent, rows_of[variant]["bytes"])
            counts = {"rows": rows // 2, "leaves_node": leaves, "sends": sent // world}  # bytes: dispatch and combine
            results[variant] = {"error": error, **counts, "dispatch": [], "combine": []}
        for _ in range(args.repeats):  # in turns
            for variant, graph in graphs.items():
                graph.run(x)
                for part, seconds in graph.seconds.items():
                    results[variant][part].append(seconds)
    for result in results.values():
        for part in ("dispatch", "combine"):
            result[part] = round(1e3 * statistics.median(result[part]), 2)
    if rank == 0:
        print(json.dumps({"auto": picked, "ways": results, "links": links, "traffic": rows_of}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
