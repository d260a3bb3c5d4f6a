"""Hand-made graphs of small MoE blocks, in the dialect and in plain torch."""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.fx import Graph

import moefx.ir.ops.dialect  # noqa: F401  registers the ops
from moefx.ir.argument_binding import Binding
from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.node_values import TensorSpec

aten, ops = torch.ops.aten, torch.ops.moefx
S, K, E, D, F = 10, 2, 4, 8, 6
SILU_GATED = ("mul.Tensor", ("silu", "a0"), "a1")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, F, bias=False)
        self.up = nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Router(nn.Module):
    def __init__(self, num_experts: int = E) -> None:
        super().__init__()
        self.linear = nn.Linear(D, num_experts, bias=False)

    def forward(self, x):
        weights, ids = self.linear(x).softmax(-1).topk(K)
        return weights / weights.sum(-1, keepdim=True), ids


class Block(nn.Module):
    """Loop over experts for tokens [..., D]."""

    def __init__(self, num_experts: int = E) -> None:
        super().__init__()
        self.router = Router(num_experts)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, hidden_states, mask=None, *, scale: float = 1.0):
        x = hidden_states.reshape(-1, D)
        weights, ids = self.router(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out.view_as(hidden_states)


def make_meta(letters: tuple[str, ...], dtype: torch.dtype = torch.float32) -> dict:
    sizes = {"S": S, "K": K, "E": E, "D": D, "F": F, "B": S * K, "E+1": E + 1}
    return {
        "letters": letters,
        "val": TensorSpec(tuple(sizes[n] for n in letters), dtype, torch.device("cpu")),
    }


def build_block_graph(num_experts: int = E, *, fused: bool = True, name: str = "layers.3.mlp") -> BlockGraph:
    """Build the graph of `Block` in the dialect, fused or with one op per step."""
    g = Graph()

    def call(target, *args, letters=None, dtype=torch.float32, source="", **kwargs):
        node = g.call_function(target, args, kwargs)
        node.meta.update(make_meta(letters, dtype) if letters else {})
        if source:
            node.meta["source"] = source
        return node

    def weights(name):
        return [g.get_attr(f"experts.{e}.{name}.weight") for e in range(num_experts)]

    hidden = g.placeholder("hidden_states")
    hidden.meta["val"] = TensorSpec((2, 5, D), torch.float32, torch.device("cpu"))
    x = call(aten.reshape.default, hidden, [-1, D], letters=("S", "D"), source="model.py:40")
    x.name = "x"
    routed = g.call_module("router", (x,))
    routed.meta["source"] = "model.py:41"
    topk_w = call(operator.getitem, routed, 0, letters=("S", "K"))
    topk_ids = call(operator.getitem, routed, 1, letters=("S", "K"), dtype=torch.int64)
    topk_w.name, topk_ids.name = "topk_w", "topk_ids"
    routed.meta["val"] = (topk_w.meta["val"], topk_ids.meta["val"])
    pft = call(ops.build_pft.default, topk_ids, topk_w, None, num_experts=num_experts)
    token_ids, offsets, inverse, row_weights = (call(operator.getitem, pft, i) for i in (0, 2, 3, 4))
    if fused:
        gemm = Gemm(num_experts, True)
        parts = ((0, None, None, 1), (1, None, None, 1))
        body = ExpertBody((gemm, gemm), parts, SILU_GATED, gemm, ("mul.Tensor", "y", "w"))
        y = call(
            ops.expert_mlp.default, x, token_ids, offsets, inverse, row_weights,
            [*weights("gate"), *weights("up")], [], weights("down"), [], body=body.to_json(), keep="h",
            reduce=True,
        )  # fmt: skip
        y.meta["save"] = True
        out = call(operator.getitem, y, 0, letters=("S", "D"))
    else:
        rows = call(ops.dispatch.default, x, token_ids, offsets, inverse, letters=("B", "D"))
        gate = call(ops.grouped_mm.default, rows, weights("gate"), offsets, transposed=True, letters=("B", "F"))
        up = call(ops.grouped_mm.default, rows, weights("up"), offsets, transposed=True, letters=("B", "F"))
        act = call(aten.mul.Tensor, call(aten.silu.default, gate, letters=("B", "F")), up, letters=("B", "F"))
        y = call(ops.grouped_mm.default, act, weights("down"), offsets, transposed=True, letters=("B", "D"))
        out = call(ops.combine.default, y, row_weights, token_ids, offsets, inverse, letters=("S", "D"))
    result = call(aten.view_as.default, out, hidden)
    result.name = "result"
    g.output(result)
    g.lint()
    return BlockGraph(name, g, Binding((("hidden_states",),)))
