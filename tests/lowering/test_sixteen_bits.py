"""Errors in 16 bits on the CPU, relative to float64, do not exceed those of the original."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.ir.op_providers import force

D, H, E = 32, 48, 4
# Sums in another order have random errors: gradients of routing weights are other sums of products.
NOISE = {"weights": 1.12}


class Plain(nn.Module):
    def __init__(self, act, bias=True):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, H, bias), nn.Linear(H, D, bias), act

    def forward(self, x, w=1):
        return self.down((self.act(self.up(x)) * w).to(x.dtype))


class Gated(Plain):
    def __init__(self, act, bias=False):
        super().__init__(act, bias)
        self.gate = nn.Linear(D, H, bias)

    def forward(self, x, w=1):
        return self.down((self.act(self.gate(x)) * self.up(x) * w).to(x.dtype))


class OfScaled(Plain):
    def forward(self, x, w=1):
        return super().forward((x * w).to(x.dtype))


class Loop(nn.Module):
    """Get selected experts and weights as inputs, so that all models route equally."""

    weights_first = False

    def __init__(self, expert, *, cast=True, wide=False):
        super().__init__()
        self.experts, self.cast, self.wide = nn.ModuleList(expert() for _ in range(E)), cast, wide

    def forward(self, x, chosen, weights):
        weights = weights.to(x.dtype) if self.cast else weights
        out = torch.zeros_like(x, dtype=weights.dtype if self.wide else x.dtype)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            w = weights[token, slot, None]
            rows = expert(x[token], w) if self.weights_first else expert(x[token]) * w
            out.index_add_(0, token, rows.to(out.dtype))
        return out.to(x.dtype)


class WeightsFirst(Loop):
    weights_first = True


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(E, D, 2 * H)), nn.Parameter(torch.empty(E, H, D))
        self.up_bias, self.down_bias = nn.Parameter(torch.empty(E, 2 * H)), nn.Parameter(torch.empty(E, D))

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(chosen == e)
            gate, up = (x[token] @ self.up[e] + self.up_bias[e]).chunk(2, -1)
            rows = (F.silu(gate) * up) @ self.down[e] + self.down_bias[e]
            out.index_add_(0, token, rows * weights[token, slot, None].to(x.dtype))
        return out


CASES = {
    "relu": (lambda: Loop(lambda: Plain(F.relu)), 2),
    "gelu, one choice": (lambda: Loop(lambda: Plain(F.gelu)), 1),
    "swiglu, four choices": (lambda: Loop(lambda: Gated(F.silu)), 4),
    "gated with biases, weights first": (lambda: WeightsFirst(lambda: Gated(F.gelu, True)), 2),
    "wide weights": (lambda: Loop(lambda: Plain(F.relu), cast=False), 2),
    "wide weights and sums": (lambda: Loop(lambda: Plain(F.silu, False), cast=False, wide=True), 3),
    "stacked": (Stacked, 2),
    "weights on the input of biased experts, not fused": (lambda: WeightsFirst(lambda: OfScaled(F.relu)), 2),
    "a norm between, not fused": (lambda: Loop(lambda: Plain(lambda h: F.layer_norm(h, (H,)))), 2),
}


def run_and_differentiate(model, x, chosen, weights):
    model.zero_grad()
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = model(x, chosen, weights)
    out.pow(2).sum().backward()
    of_parameters = {name.split(".", 2)[-1]: [] for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        of_parameters[name.split(".", 2)[-1]].append(torch.zeros_like(p) if p.grad is None else p.grad)
    stacked = {name: torch.stack(grads) for name, grads in of_parameters.items()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **stacked}


def measure_errors(model, exact, num_choices, dtype):
    """Return errors relative to the size of each result, summed over several inputs."""
    total = {}
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(64, D, generator=g).to(dtype)
        chosen = torch.rand(64, E, generator=g).topk(num_choices).indices
        weights = torch.rand(64, num_choices, generator=g)
        truth = run_and_differentiate(exact, x.double(), chosen, weights.double())
        for name, value in run_and_differentiate(model, x, chosen, weights).items():
            error = (value.double() - truth[name]).norm() / truth[name].norm()
            total[name] = total.get(name, 0.0) + error.item()
    return total


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES)
def test_errors_are_those_of_the_original_or_less(case):
    torch.manual_seed(0)
    make, num_choices = CASES[case]
    model = make()
    example = torch.randn(16, D), torch.rand(16, E).topk(num_choices).indices, torch.rand(16, num_choices)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_((torch.randn_like(p) * 0.3).to(dtype))
        exact, original = copy.deepcopy(model).double(), copy.deepcopy(model).to(dtype)
        compiled = moefx.compile(copy.deepcopy(model), example_inputs=example).to(dtype)
        wanted = measure_errors(original, exact, num_choices, dtype)
        for provider in ("segments", "reference"):
            with force("expert_mlp", provider), force("expert_mlp_backward", provider), force("grouped_mm", provider):
                found = measure_errors(compiled, exact, num_choices, dtype)
            assert compiled.forward.counts.original == 0
            ratios = {name: found[name] / wanted[name] for name in wanted}
            assert all(ratio < NOISE.get(name, 1.03) for name, ratio in ratios.items()), (provider, dtype, ratios)
