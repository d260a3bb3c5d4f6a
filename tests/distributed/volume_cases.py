"""Bytes that ranks send equal the planner's formulas for the same routing."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.ir.ops import row_exchange
from moefx.ir.ops.uneven_all_to_all import get_group, start_all_to_all
from moefx.planner.communication import row_bytes
from moefx.planner.simulation.routing_skew import count_traffic


class Block(nn.Module):
    """Stacked experts that run on all tokens, with weights of slots in float32."""

    def __init__(self, width: int, num_experts: int, top_k: int):
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 8) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 8, width))

    def routed(self, x):
        return self.router(x).float().softmax(-1).topk(self.top_k, -1)

    def forward(self, x):
        weights, ids = self.routed(x)
        outputs = torch.einsum("ehd,edm->ehm", torch.relu(torch.einsum("sd,edh->esh", x, self.up)), self.down)
        chosen = outputs.transpose(0, 1).gather(1, ids[..., None].expand(*ids.shape, x.shape[-1]))
        return (chosen * weights[..., None]).to(x.dtype).sum(1)


class Counter:
    """Replace `start` and count the bytes that leave this rank."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, rows, sent, received, group):
        rank = dist.get_rank(get_group(group))
        width = rows.shape[1:].numel() * rows.element_size()
        self.num_bytes += width * sum(n for place, n in enumerate(sent) if place != rank)
        return start_all_to_all(rows, sent, received, group)


def predict_bytes(
    ids: torch.Tensor, tokens: int, num_experts: int, sizes: tuple[int, ...], way: str, width: int
) -> int:
    """Predict the bytes that this rank sends in forward and backward. `ids`: [W*T, K], of all ranks."""
    choices, ranks, rank = ids.sort(-1).values.t(), ids.shape[0] // tokens, dist.get_rank()
    found = count_traffic(choices, torch.arange(ranks).repeat_interleave(tokens), num_experts, sizes, way)
    top_k = ids.shape[1]
    there, back, back_grad, grad = row_bytes(width, 1 if way == "flat" else top_k, num_experts // ranks, top_k > 1)
    total = 0
    for hop in (*found.hops, *([] if found.beside is None else [found.beside])):
        others = hop - torch.diag(hop.diag())
        total += int(others[rank].sum()) * (there + back_grad) + int(others[:, rank].sum()) * (back + grad)
    return total


def case_bytes_equal_the_formulas() -> None:
    world, tokens = dist.get_world_size(), 50
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    levels = {("flat", world, ()): (world,), ("dedup", world, ()): (world,)}
    levels |= {(way, 2, ()): (world // 2, 2) for way in ("rbd", "halo")}
    levels |= {(way, 2, (4,)): (2, 2, 2) for way in ("rbd", "halo") if world == 8}
    torch.manual_seed(0)
    for width, num_experts, top_k in ((24, 4 * world, 5), (64, 2 * world, 1)):
        block = Block(width, num_experts, top_k).bfloat16()
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        x = torch.randn(tokens, width, generator=generator).bfloat16()
        ids = [torch.empty(tokens, top_k, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(ids, block.routed(x)[1])
        for (way, node_size, above), sizes in levels.items():
            plan = moefx.Plan(dispatch=way, node_size=node_size, topology_levels=above, validation="symbolic")
            compiled = moefx.compile(block, mesh=mesh, plan=plan, example_inputs=(x[:8],))
            with mock.patch.object(row_exchange, "start_all_to_all", Counter()) as counter:
                compiled(x.clone().requires_grad_()).float().sum().backward()
            expected = predict_bytes(torch.cat(ids), tokens, num_experts, sizes, way, width)
            assert counter.num_bytes == expected > 0, (way, sizes, top_k, counter.num_bytes, expected)
