"""The systems that `bench moe` compares. Each is a function of one shape's tensors and routing.

All peers get the same x, weights, gradient and precomputed routing, in their preferred layout. They return a `Work`:
forward alone, and forward with backward. Peers that are not installed raise ImportError. MegaBlocks is missing because
its newest release, 0.10, needs torch 2.7.0.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import CEILING
from .routing import sort_by_expert
from .shapes import Shape, activation, expert_body


@dataclasses.dataclass
class Inputs:
    """One shape's tensors: x [T,d], w1 [E,2h,d] (gate above up; [E,h,d] without a gate), w2 [E,d,h], grad [T,d], and
    ids and weights [T,K]."""

    shape: Shape
    x: Tensor
    w1: Tensor
    w2: Tensor
    grad: Tensor
    ids: Tensor
    weights: Tensor

    def leaves(self) -> list[Tensor]:
        """Return fresh leaves of x, weights, w1 and w2, on the same storage."""
        return [t.detach().requires_grad_() for t in (self.x, self.weights, self.w1, self.w2)]


@dataclasses.dataclass
class Work:
    """The functions to time.

    Attributes:
        forward: returns the output [T,d] without recording gradients.
        step: returns the output and the gradients of x, weights, w1, w2, in the layouts of `Inputs`.
    """

    forward: Callable[[], Tensor]
    step: Callable[[], tuple[Tensor, ...]]


def time_autograd(inputs: Inputs, function: Callable[..., Tensor]) -> Work:
    """Return the work of a differentiable function of (x, weights, w1, w2)."""
    leaves = inputs.leaves()

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*leaves)

    def step() -> tuple[Tensor, ...]:
        out = function(*leaves)
        return (out, *torch.autograd.grad(out, leaves, inputs.grad.to(out.dtype)))

    return Work(forward, step)


def build_moefx(inputs: Inputs, keep: str = "h", dispatch: Callable[..., Any] | None = None) -> Work:
    """Build moefx's public ops: routing arrays (or those of `dispatch`) and expert MLP."""
    from ..ir.ops import dialect

    expert = expert_body(inputs.shape, inputs.x.dtype).to_json()

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        if dispatch is None:
            pft = dialect.build_pft(inputs.ids, weights, None, num_experts=inputs.shape.E)
        else:
            pft = dispatch(inputs.ids, weights, inputs.shape.E)
        token_ids, _, offsets, inverse, row_weights = pft
        arguments = (x, token_ids, offsets, inverse, row_weights, [w1], [], [w2], [])
        return dialect.expert_mlp(*arguments, body=expert, keep=keep, reduce=True)[0]

    return time_autograd(inputs, function)


def build_torch_loop(inputs: Inputs) -> Work:
    """Build plain torch: tokens sorted by expert, and a loop over the experts."""

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        token, _, offsets, _, row_weights = sort_by_expert(inputs.ids, weights, inputs.shape.E)
        rows = []
        for e, part in enumerate(x[token].tensor_split(offsets[1:-1].tolist())):
            rows.append(F.linear(activation(inputs.shape, F.linear(part, w1[e])), w2[e]))
        out = torch.cat(rows) * row_weights[:, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, out)

    return time_autograd(inputs, function)


def build_torch_grouped_mm(inputs: Inputs, wrap: Callable[..., Any] = lambda function: function) -> Work:
    """Build torch's grouped GEMM with plain torch around it."""
    num_tokens, num_slots = inputs.ids.shape
    order = inputs.ids.reshape(-1).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.bincount(inputs.ids.reshape(-1), minlength=inputs.shape.E)
    ends, token = counts.cumsum(0).to(torch.int32), order // num_slots

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        hidden = F.grouped_mm(x[token], w1.transpose(1, 2), offs=ends)
        rows = F.grouped_mm(activation(inputs.shape, hidden), w2.transpose(1, 2), offs=ends)
        by_slot = rows[inverse].view(num_tokens, num_slots, -1)
        return (by_slot * weights[..., None].to(rows.dtype)).sum(1)

    return time_autograd(inputs, wrap(function))


def build_torch_compiled(inputs: Inputs) -> Work:
    return build_torch_grouped_mm(inputs, torch.compile)


def _require_gate(inputs: Inputs, peer: str) -> None:
    if not inputs.shape.gated:
        raise NotImplementedError(f"{peer} is measured with SwiGLU alone")


def build_transformers(inputs: Inputs, implementation: str) -> Work:
    """Return the experts of transformers' Qwen3-MoE with one of its implementations."""
    _require_gate(inputs, "transformers")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    shape = inputs.shape
    config = Qwen3MoeConfig(num_experts=shape.E, hidden_size=shape.d, moe_intermediate_size=shape.h)
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        arguments = (x, inputs.ids, weights.to(x.dtype))
        return torch.func.functional_call(experts, dict(gate_up_proj=w1, down_proj=w2), arguments)

    return time_autograd(inputs, function)


def build_scattermoe(inputs: Inputs) -> Work:
    """Build ScatterMoE's two grouped products, as its gated layer calls them."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear  # pyright: ignore[reportMissingImports]

    (_, num_slots), num_experts = inputs.ids.shape, inputs.shape.E

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        order = flatten_sort_count(inputs.ids, num_experts=num_experts)
        hidden = parallel_linear(x, w1.transpose(1, 2), num_slots, *order, grouped_out=True)
        act, gates = activation(inputs.shape, hidden), weights.to(x.dtype)
        return parallel_linear(act, w2.transpose(1, 2), 1, *order, gates=gates, grouped_in=True)

    return time_autograd(inputs, function)


def build_liger(inputs: Inputs) -> Work:
    """Build Liger-Kernel's fused MoE, tuned by its own autotuner."""
    _require_gate(inputs, "liger-kernel")
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction  # pyright: ignore[reportMissingImports]

    ids = inputs.ids.to(torch.int32)

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return LigerFusedMoEFunction.apply(x, w1, w2, ids, weights)

    return time_autograd(inputs, function)


def build_sonic_moe(inputs: Inputs) -> Work:
    """Build SonicMoE's two projections with its routing metadata. Its layer would choose the experts itself."""
    _require_gate(inputs, "sonic-moe")
    from sonicmoe import functional  # pyright: ignore[reportMissingImports]
    from sonicmoe.enums import ActivationType  # pyright: ignore[reportMissingImports]

    (num_tokens, num_slots), num_experts = inputs.ids.shape, inputs.shape.E
    ids, num_rows = inputs.ids.to(torch.int32), inputs.ids.numel()

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        counts, offsets, gather, scatter, reverse = (
            torch.empty(size, dtype=torch.int32, device=x.device)
            for size in (num_experts, num_experts + 1, num_rows, num_rows, num_rows)
        )
        functional.TC_topk_router_metadata_triton(ids, num_experts, counts, offsets, gather, scatter, reverse)
        is_inference = not torch.is_grad_enabled()
        act, hidden = functional._UpProjection.apply(
            *(x, w1.permute(1, 2, 0), None, offsets, num_rows, num_slots, gather, scatter, reverse, None, False),
            *(ActivationType.SWIGLU, is_inference, True),
        )
        return functional._DownProjection.apply(
            *(act, hidden, w2.permute(1, 2, 0), None, weights, offsets, num_tokens, num_slots, gather, scatter),
            *(reverse, None, False, ActivationType.SWIGLU),
        )

    return time_autograd(inputs, function)


def build_bmm_ceiling(inputs: Inputs) -> Work:
    """Build cuBLAS batched GEMMs alone with equal counts: no gather, activation or sum. An upper bound, not a
    solution."""
    shape = inputs.shape
    n = shape.T * shape.K // shape.E
    x = torch.randn(shape.E, n, shape.d, device=inputs.x.device).to(inputs.x.dtype)
    hidden = torch.randn(shape.E, n, shape.parts * shape.h, device=inputs.x.device).to(inputs.x.dtype)
    act = hidden[..., : shape.h].contiguous()

    def forward() -> Tensor:
        torch.bmm(x, inputs.w1.transpose(1, 2))
        return torch.bmm(act, inputs.w2.transpose(1, 2))

    def step() -> tuple[Tensor, ...]:
        forward()
        torch.bmm(x, inputs.w2)
        torch.bmm(hidden, inputs.w1)
        torch.bmm(hidden.transpose(1, 2), x)
        return (torch.bmm(x.transpose(1, 2), act),)

    return Work(forward, step)


PEERS: dict[str, Callable[[Inputs], Work]] = {
    "moefx": build_moefx,
    "torch grouped_mm": build_torch_grouped_mm,
    "torch compiled": build_torch_compiled,
    "transformers": functools.partial(build_transformers, implementation="grouped_mm"),
    "transformers eager": functools.partial(build_transformers, implementation="eager"),
    "scattermoe": build_scattermoe,
    "liger-kernel": build_liger,
    "sonic-moe": build_sonic_moe,
    CEILING: build_bmm_ceiling,
}
# One change after the other, as in MoEBlaze's tables 4 and 5.
ABLATION: dict[str, Callable[[Inputs], Work]] = {
    "torch loop": build_torch_loop,
    "+ kernels": functools.partial(build_moefx, keep="all", dispatch=sort_by_expert),
    "+ checkpointing": functools.partial(build_moefx, keep="h", dispatch=sort_by_expert),
    "+ dispatch": build_moefx,
}

# Modules with a peer's autotuned kernels. One process would compile their hundreds of configurations for minutes.
TUNED_IN = {"liger-kernel": "liger_kernel.ops.fused_moe_kernels"}


def compile_share(peer: str, inputs: Inputs, share: int, num_shares: int) -> None:
    """Run one step with every `num_shares`-th configuration of a peer's kernels, to compile them."""
    module = importlib.import_module(TUNED_IN[peer])
    for tuner in vars(module).values():
        if isinstance(configs := getattr(tuner, "configs", None), list):
            tuner.configs = configs[share::num_shares] or configs[:1]
    PEERS[peer](inputs).step()
