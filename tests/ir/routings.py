"""Routings, naive references in plain Python, and expert layers to test the dialect with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.ir.ops import dialect


@dataclasses.dataclass(frozen=True)
class Routing:
    topk_ids: Tensor
    topk_weights: Tensor
    num_experts: int
    keep: Tensor | None = None
    capacity: int | None = None
    drop: str = "none"
    num_rows: Tensor | None = None

    def build(self, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        weights = self.topk_weights if weights is None else weights
        options = dict(num_experts=self.num_experts, capacity=self.capacity, drop=self.drop, num_rows=self.num_rows)
        return dialect.build_pft(self.topk_ids, weights, self.keep, **options)


def compute_pft(routing: Routing) -> tuple[list[tuple[int, int]], list[int], list[list[int]]]:
    """Return (token, slot) per valid row, the offsets, and the inverse, computed entry by entry."""
    ids, weights, num_experts = routing.topk_ids.tolist(), routing.topk_weights, routing.num_experts
    num_tokens, num_slots = routing.topk_ids.shape
    entries = [
        (s, k)
        for s in range(num_tokens)
        for k in range(num_slots)
        if 0 <= ids[s][k] < num_experts and (routing.keep is None or bool(routing.keep[s, k]))
    ]
    queue = {
        "position_slot": sorted(entries, key=lambda sk: (sk[1], sk[0])),
        "weight": sorted(entries, key=lambda sk: -float(weights[sk])),  # stable: ties are in flat order
    }.get(routing.drop, entries)
    loads, kept = [0] * num_experts, set()
    for s, k in queue:
        expert = ids[s][k]
        if routing.capacity is None or loads[expert] < routing.capacity:
            loads[expert] += 1
            kept.add((s, k))
    rows = [sk for e in range(num_experts) for sk in entries if sk in kept and ids[sk[0]][sk[1]] == e]
    offsets = [0]
    for e in range(num_experts):
        offsets.append(offsets[-1] + loads[e])
    inverse = [[-1] * num_slots for _ in range(num_tokens)]
    for row, (s, k) in enumerate(rows):
        inverse[s][k] = row
    return rows, offsets, inverse


@st.composite
def routings(draw: st.DrawFn, max_tokens: int = 12, max_experts: int = 6, drops: bool = True) -> Routing:
    """Draw routings: balanced, with idle experts, one expert for all, duplicates, invalid ids, ties, and overflow."""
    num_experts = draw(st.integers(1, max_experts))
    num_tokens, num_slots = draw(st.integers(0, max_tokens)), draw(st.integers(1, num_experts))
    kind = draw(st.sampled_from(["free", "one", "distinct", "sentinel"]))
    seed = draw(st.integers(0, 2**31 - 1))
    g = torch.Generator().manual_seed(seed)
    shape = (num_tokens, num_slots)
    if kind == "one":
        ids = torch.full(shape, int(torch.randint(num_experts, (), generator=g)))
    elif kind == "distinct":
        ids = torch.rand((num_tokens, num_experts), generator=g).argsort(1)[:, :num_slots]
    else:
        low, high = (-1, num_experts + 1) if kind == "sentinel" and drops else (0, num_experts)
        ids = torch.randint(low, high, shape, generator=g)
    weights = torch.rand(shape, generator=g, dtype=torch.float64)
    if draw(st.booleans()):
        weights = (weights * 3).round() / 3  # ties
    drop = draw(st.sampled_from(dialect.DROP_RULES)) if drops else "none"
    capacity = draw(st.integers(0, max(num_tokens, 1))) if drop != "none" else None
    keep = torch.rand(shape, generator=g) < 0.8 if drops and draw(st.booleans()) else None
    return Routing(ids, weights, num_experts, keep, capacity, drop)


def draw_routing(
    num_tokens: int, num_slots: int, num_experts: int, dtype: torch.dtype = torch.float64, **options: object
) -> Routing:
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :num_slots]
    return Routing(ids, torch.rand(num_tokens, num_slots, dtype=dtype), num_experts, **options)  # type: ignore[arg-type]


@dataclasses.dataclass
class Layer:
    """Expert layer with its parameters, run by the fused op or token by token."""

    body: ExpertBody
    up: list[Tensor]
    up_bias: list[Tensor]
    down: list[Tensor]
    down_bias: list[Tensor]
    expert: Callable[[Layer, int, Tensor, Tensor], Tensor]  # (layer, e, x [n,D], w [n,1]) -> weighted output

    def __post_init__(self) -> None:
        self.text = self.body.to_json()

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.up, *self.up_bias, *self.down, *self.down_bias]

    def fused(
        self, x: Tensor, routing: Routing, weights: Tensor, keep: str = "h", reduce: bool = False, later: bool = False
    ) -> Tensor:
        token_ids, _, offsets, inverse, row_weights = routing.build(weights)
        put_off = [dialect.weights_later(self.up, self.down)] if later else []
        rows, *_ = dialect.expert_mlp(
            *(x, token_ids, offsets, inverse, row_weights),
            *(self.up, self.up_bias, self.down, self.down_bias),
            *put_off,
            body=self.text,
            keep=keep,
            reduce=reduce,
        )
        if reduce:
            return rows
        return dialect.combine(rows, None, token_ids, offsets, inverse)

    def plain(self, x: Tensor, routing: Routing, weights: Tensor) -> Tensor:
        rows, _, _ = compute_pft(routing)
        out = x.new_zeros((x.shape[0], self.width(x)))
        for s, k in rows:
            e = int(routing.topk_ids[s, k])
            value = self.expert(self, e, x[s : s + 1], weights[s : s + 1, k : k + 1])
            out = out + F.pad(value, (0, 0, s, x.shape[0] - s - 1))
        return out

    def width(self, x: Tensor) -> int:
        return self.down[0].shape[-2 if self.body.down.transposed else -1]


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, dtype=dtype) / shape[-1] ** 0.5).requires_grad_()


def swiglu_list(num_experts: int, d: int, h: int, dtype: torch.dtype = torch.float64) -> Layer:
    """SwiGLU as lists of Linear: 3E separate weights [out, in]; the routing weight multiplies the output."""
    e = num_experts
    gate, up = ([_leaf(h, d, dtype=dtype) for _ in range(e)] for _ in range(2))
    down = [_leaf(d, h, dtype=dtype) for _ in range(e)]

    def expert(layer: Layer, i: int, x: Tensor, w: Tensor) -> Tensor:
        gate, up = layer.up[:e], layer.up[e:]
        return F.linear(F.silu(F.linear(x, gate[i])) * F.linear(x, up[i]), layer.down[i]) * w

    body = ExpertBody(
        up=(Gemm(e, True), Gemm(e, True)),
        parts=((0, None, None, 1), (1, None, None, 1)),
        act=("mul.Tensor", ("silu", "a0"), "a1"),
        down=Gemm(e, True),
        out=("mul.Tensor", "y", "w"),
    )
    return Layer(body, [*gate, *up], [], down, [], expert)


def interleaved_clamped(num_experts: int, d: int, h: int, dtype: torch.dtype = torch.float64) -> Layer:
    """gpt-oss: stacked [E, D, 2F], gate and up interleaved, biases, clamp and (up + 1); weights multiply the output."""
    w1, b1 = _leaf(num_experts, d, 2 * h, dtype=dtype), _leaf(num_experts, 2 * h, dtype=dtype)
    w2, b2 = _leaf(num_experts, h, d, dtype=dtype), _leaf(num_experts, d, dtype=dtype)

    def expert(layer: Layer, i: int, x: Tensor, w: Tensor) -> Tensor:
        hidden = x @ layer.up[0][i] + layer.up_bias[0][i]
        gate, up = hidden[:, ::2].clamp(max=0.5), hidden[:, 1::2].clamp(-0.5, 0.5)
        return ((up + 1) * gate * torch.sigmoid(gate * 1.702) @ layer.down[0][i] + layer.down_bias[0][i]) * w

    gate, up = ("clamp", "a0", None, 0.5), ("clamp", "a1", -0.5, 0.5)
    body = ExpertBody(
        up=(Gemm(1, False, bias=True),),
        parts=((0, None, None, 2), (0, 1, None, 2)),
        act=("mul", ("mul", ("add", up, 1), gate), ("sigmoid", ("mul", gate, 1.702))),
        down=Gemm(1, False, bias=True),
        out=("mul.Tensor", "y", "w"),
    )
    return Layer(body, [w1], [b1], [w2], [b2], expert)


def weight_before(num_experts: int, d: int, h: int, dtype: torch.dtype = torch.float64) -> Layer:
    """No gate: stacked and transposed, tanh-gelu. The weight multiplies the expert's input; up has no bias."""
    w1 = _leaf(num_experts, h, d, dtype=dtype)
    w2 = [_leaf(h, d, dtype=dtype) for _ in range(num_experts)]
    b2 = [_leaf(d, dtype=dtype) for _ in range(num_experts)]

    def expert(layer: Layer, i: int, x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.linear(x * w, layer.up[0][i]), approximate="tanh") @ layer.down[i] + layer.down_bias[i]

    body = ExpertBody(
        up=(Gemm(1, True),),
        parts=((0, None, None, 1),),
        act=("gelu", ("mul.Tensor", "a0", "w"), {"approximate": "tanh"}),
        down=Gemm(num_experts, False, bias=True),
    )
    return Layer(body, [w1], [], w2, b2, expert)


def nonlinear_out(num_experts: int, d: int, h: int, dtype: torch.dtype = torch.float64) -> Layer:
    """relu^2, concatenated halves of one up-projection, and an output that is not linear in y."""
    w1 = [_leaf(2 * h, d, dtype=dtype) for _ in range(num_experts)]
    w2 = _leaf(num_experts, d, h, dtype=dtype)

    def expert(layer: Layer, i: int, x: Tensor, w: Tensor) -> Tensor:
        a, b = F.linear(x, layer.up[i]).chunk(2, -1)
        return torch.tanh(F.linear(F.relu(a).square() * b * w, layer.down[0][i])) * w * 0.5

    body = ExpertBody(
        up=(Gemm(num_experts, True),),
        parts=((0, None, h, 1), (0, h, None, 1)),
        act=("mul", ("mul", ("square", ("relu", "a0")), "a1"), "w"),
        down=Gemm(1, True),
        out=("mul", ("mul", ("tanh", "y"), "w"), 0.5),
    )
    return Layer(body, w1, [], [w2], [], expert)


LAYERS = {f.__name__: f for f in (swiglu_list, interleaved_clamped, weight_before, nonlinear_out)}
