"""Whole models for tests of compiled models with other parts of PyTorch.

Experts are stored in three ways: a ModuleList with a loop, stacked parameters, and a model of transformers. All are
float64, so that tolerances can be small.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefx

VOCABULARY, D, H, E, K = 32, 16, 12, 4, 2
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
NEAR = {"rtol": 1e-5, "atol": 1e-7}  # some part is float32 in the original too


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False)
        self.down = nn.Linear(H, D, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LoopMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x):
        tokens = x.reshape(-1, D)
        weights, chosen = self.router(tokens).softmax(-1).topk(K)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out = out.index_add(0, token, (expert(tokens[token]) * weights[token, slot, None]).to(out.dtype))
        return out.view_as(x)


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, 2 * H, D) / D**0.5)
        self.down = nn.Parameter(torch.randn(E, D, H) / H**0.5)

    def forward(self, tokens, chosen, weights):
        out = torch.zeros_like(tokens)
        for number in range(E):
            token, slot = torch.where(chosen == number)
            gate, up = F.linear(tokens[token], self.gate_up[number]).chunk(2, dim=-1)
            y = F.linear(F.gelu(gate) * up, self.down[number]) * weights[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out


class StackedMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E), StackedExperts()

    def forward(self, x):
        tokens = x.reshape(-1, D)
        weights, chosen = self.router(tokens).sigmoid().topk(K)
        return self.experts(tokens, chosen, weights).view_as(x)


class Model(nn.Module):
    """Embedding, `layers` residual MoE layers, output; returns the loss of the next token."""

    def __init__(self, moe: Callable[[], nn.Module], layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(layers))
        self.moes = nn.ModuleList(moe() for _ in range(layers))
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, input_ids, labels=None):
        h = self.embed(input_ids)
        for norm, moe in zip(self.norms, self.moes, strict=True):
            h = h + moe(norm(h))
        logits = self.head(h)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def qwen3(layers: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=E,
        num_experts_per_tok=K,
        moe_intermediate_size=H,
        max_position_embeddings=64,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager", attn_implementation="eager")


BUILD: dict[str, Callable[[int], nn.Module]] = {
    "loop": lambda layers: Model(LoopMoE, layers),
    "stacked": lambda layers: Model(StackedMoE, layers),
    "qwen3": qwen3,
}
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
PLAIN = ["loop", "stacked"]
ALL = [*PLAIN, pytest.param("qwen3", marks=[needs_transformers, pytest.mark.hf])]


def build(kind: str, dtype: torch.dtype = torch.float64, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = BUILD[kind](layers).to(dtype)
    with torch.no_grad():  # far from ties: rounding changes no selection
        for name, p in model.named_parameters():
            if p.dim() > 1 and ("router" in name or name.endswith("mlp.gate.weight")):
                p.mul_(4)
    return model


def build_pair(
    kind: str, dtype: torch.dtype = torch.float64, layers: int = 2, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return the original, and a compiled model with its own parameters."""
    original = build(kind, dtype, layers)
    return original, compile_model(original, **options)


def compile_model(original: nn.Module, **options: Any) -> nn.Module:
    return moefx.compile(copy.deepcopy(original), **options)


def draw_ids(batch: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def compute_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(input_ids=tokens)
    return out if isinstance(out, Tensor) else out.logits


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(input_ids=tokens, labels=tokens)
    return out if isinstance(out, Tensor) else out.loss


def run_step(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return the loss and the gradients of all parameters, with zeros for missing ones."""
    model.zero_grad(set_to_none=True)
    value = compute_loss(model, tokens)
    value.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"loss": value.detach(), **grads}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(actual[name], value, msg=message, **(tolerance or CLOSE))


def assert_rewritten(model: nn.Module, calls: bool = True) -> None:
    """Check that every MoE layer runs the rewritten graph and that the original code never ran."""
    layers = model.moes if isinstance(model, Model) else model.model.layers
    found = moefx.blocks(model)
    assert len(found) == len(layers)
    assert all(block.fallbacks == 0 for block in found)
    assert not calls or all(block.forward.counts.rewritten > 0 for block in found)


def find_experts(model: nn.Module) -> nn.Module:
    """Return the experts of the second layer."""
    return model.moes[1].experts if isinstance(model, Model) else model.model.layers[1].mlp.experts
