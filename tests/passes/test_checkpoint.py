"""Saved bytes of each policy, measured on compiled plain models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefx

from ..covering import sample_product

S, K, E, D, H = 192, 4, 8, 64, 32
POLICIES = ["h", "x", "all"]


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, E, bias=False)

    def forward(self, x):
        return self.linear(x).softmax(-1).topk(K)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False)
        self.down = nn.Linear(H, D, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class Loop(nn.Module):
    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList(expert() for _ in range(E))

    def run(self, number, rows):
        return self.experts[number](rows)

    def forward(self, x):
        weights, chosen = self.router(x)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(chosen == number)
            y = self.run(number, x[token]) * weights[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out


class Stacked(Loop):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.router = Router()
        self.gate_up = nn.Parameter(torch.randn(E, 2 * H, D) / 8)
        self.down = nn.Parameter(torch.randn(E, D, H) / 6)

    def run(self, number, rows):
        gate, up = F.linear(rows, self.gate_up[number]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[number])


# number of up-projections with H columns, and the block
BLOCKS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "gated": (2, lambda: Loop(Gated)),
    "gated stacked": (2, Stacked),
    "plain": (1, lambda: Loop(Plain)),
}


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inp, self.block = nn.Linear(D, D), block

    def forward(self, x):
        return self.block(self.inp(x))


def count_bytes_per_token(model: Model, run: Callable[[], Tensor]) -> float:
    """Count the bytes of storages that autograd keeps for the block, without parameters and the router."""
    ignored = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}
    inside: list[str] = []
    handles = []
    for name in ("block", "block.router"):
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if inside and inside[-1] == "block" and address not in ignored:
            kept.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    for handle in handles:
        handle.remove()
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / S


def build(kind: str, dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model(BLOCKS[kind][1]()).to(dtype)


def predict_bytes(kind: str, keep: str) -> int:
    columns = {"h": BLOCKS[kind][0], "auto": BLOCKS[kind][0], "x": 0, "all": BLOCKS[kind][0] + 1}[keep]
    return 2 * D + 2 * columns * K * H


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "keep, kind, autocast",
    sample_product(
        {keep: keep for keep in POLICIES},
        {kind: kind for kind in BLOCKS},
        {"bfloat16": False, "autocast": True},
        order=2,
    ),
)
def test_the_policy_keeps_the_predicted_bytes_a_token(kind, keep, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    x = torch.randn(S, D, dtype=dtype)
    plan = moefx.Plan(checkpoint=keep, validation="symbolic")  # another test checks the numbers
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        compiled = moefx.compile(build(kind, dtype), example_inputs=(x,), plan=plan)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return compiled(x)

    run()  # the first call builds the program for autocast
    found, wanted = count_bytes_per_token(compiled, run), predict_bytes(kind, keep)
    assert wanted <= found <= wanted + 24 * K, f"{found} bytes a token, {wanted} without metadata"
    (block,) = moefx.blocks(compiled)
    assert block.fallbacks == 0 and block.forward.counts.rewritten == 2
    run().float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is dtype for p in compiled.parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", BLOCKS)
def test_inference_keeps_nothing(kind):
    x = torch.randn(S, D)
    compiled = moefx.compile(build(kind, torch.float32), example_inputs=(x,))
    with torch.no_grad():
        assert count_bytes_per_token(compiled, lambda: compiled(x)) == 0


def test_the_original_keeps_more():
    """Show that the plain loop keeps copies of tokens and all intermediates."""
    model = build("gated", torch.bfloat16)
    x = torch.randn(S, D, dtype=torch.bfloat16)
    assert count_bytes_per_token(model, lambda: model(x)) > 2 * predict_bytes("gated", "h")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", BLOCKS)
def test_policies_give_the_same_numbers(kind):
    model, x = build(kind, torch.float64), torch.randn(S, D, dtype=torch.float64)
    reference = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for keep in POLICIES:
        plan = moefx.Plan(checkpoint=keep, validation="symbolic")
        compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,), plan=plan)
        found = torch.autograd.grad(compiled(x).square().sum(), list(compiled.parameters()))
        for a, b in zip(found, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_the_policy_is_printed_and_reported():
    x = torch.randn(S, D, dtype=torch.bfloat16)
    for keep, printed in (("x", "x"), ("auto", "h")):
        plan = moefx.Plan(checkpoint=keep, validation="symbolic")
        compiled = moefx.compile(build("gated", torch.bfloat16), example_inputs=(x,), plan=plan)
        assert f'keep="{printed}"' in str(moefx.graph(compiled, "block"))
        kept = moefx.explain(compiled).matched[0].saved_after
        assert predict_bytes("gated", keep) <= kept <= predict_bytes("gated", keep) + 24 * K
