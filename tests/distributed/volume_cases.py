"""Bytes that ranks send equal the planner's formulas for the same routing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.bench.file_memory import memory_of_files
from moefx.bench.sent_bytes import count_sent_bytes, estimate_sent_bytes, predict_sent_bytes


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


def case_bytes_equal_the_formulas() -> None:
    world, tokens, rank = dist.get_world_size(), 50, dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    levels = {(way, world, ()): (world,) for way in ("flat", "dedup", "gather", "pull")}
    levels |= {(way, 2, ()): (world // 2, 2) for way in ("rbd", "halo")}
    levels |= {(way, 2, (4,)): (2, 2, 2) for way in ("rbd", "halo") if world == 8}
    torch.manual_seed(0)
    for width, num_experts, top_k, limit in ((24, 4 * world, 5, 53), (64, 2 * world, 1, 0)):
        block = Block(width, num_experts, top_k).bfloat16()
        generator = torch.Generator().manual_seed(1 + rank)
        x = torch.randn(tokens, width, generator=generator).bfloat16()
        ids = [torch.empty(tokens, top_k, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(ids, block.routed(x)[1])
        for (way, node_size, above), sizes in levels.items():
            plan = moefx.Plan(dispatch=way, node_size=node_size, topology_levels=above, validation="symbolic")
            most = limit if way in ("gather", "pull") else 0
            with memory_of_files(), count_sent_bytes() as counter:
                compiled = moefx.compile(
                    block, mesh=mesh, plan=plan.replace(max_tokens=most or None), example_inputs=(x[:8],)
                )
                compiled(x.clone().requires_grad_()).float().sum().backward()
            expected = predict_sent_bytes(torch.cat(ids), rank, num_experts, sizes, way, width, most)
            label = way, sizes, top_k, counter.num_bytes, expected
            assert counter.num_bytes == expected > 0, label
            estimated = estimate_sent_bytes(tokens, num_experts, top_k, sizes, way, width, most)
            assert abs(estimated / expected - 1) < 0.25, (label, estimated)
