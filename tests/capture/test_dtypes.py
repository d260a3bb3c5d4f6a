"""Ops on mixed dtypes that the original cannot run are refused, even if fake tensors accept them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.errors import CaptureError

D, E = 8, 4


class Mixture(nn.Module):
    def __init__(self, result=torch.float32):
        super().__init__()
        self.router, self.result = nn.Linear(D, E), result
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, D)) for _ in range(E))

    def put(self, out, token, rows):
        return out.index_add_(0, token, rows)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros(x.shape, dtype=self.result, device=x.device)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out = self.put(out, token, expert(x[token]) * weights[token, slot, None])
        return out.to(x.dtype)


class Assigned(Mixture):
    def put(self, out, token, rows):
        out[token] += rows
        return out


class Products(Mixture):
    def __init__(self, product):
        super().__init__()
        self.experts = nn.ModuleList(Product(product) for _ in range(E))


class Product(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(D, D)) for _ in range(2))
        self.product = product

    def forward(self, x):
        return self.product(self.product(x, self.up).relu(), self.down)


def convert_to_double(model, *names):
    for name in names:
        module = model.get_submodule(name)
        module.double()
    return model


def add_bias(model, dtype):
    model.experts[2][2].bias = nn.Parameter(model.experts[2][2].bias.detach().to(dtype))
    return model


PRODUCTS = {
    "@": lambda x, w: x @ w,
    "mm": lambda x, w: torch.mm(x, w),
    "addmm": lambda x, w: torch.addmm(torch.zeros(D), x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "einsum": lambda x, w: torch.einsum("td,df->tf", x, w),
    "linear": F.linear,
}
MIXTURES = {
    "the first expert": lambda: convert_to_double(Mixture(), "experts.0"),
    "the last expert": lambda: convert_to_double(Mixture(), "experts.3"),
    "a layer of one": lambda: convert_to_double(Mixture(), "experts.1.2"),
    "all experts": lambda: convert_to_double(Mixture(), "experts"),
    "a bias": lambda: add_bias(Mixture(), torch.bfloat16),
    "the result of index_add_": lambda: Mixture(torch.bfloat16),
    "the result of an assignment": lambda: convert_to_double(Assigned(), "experts.1.2"),
    **{name: lambda p=p: convert_to_double(Products(p), "experts.2") for name, p in PRODUCTS.items()},
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_mixture_of_dtypes_is_not_compiled(mixture):
    model, x = MIXTURES[mixture](), torch.randn(32, D)
    with pytest.raises(RuntimeError):
        model(x)
    with pytest.raises(CaptureError, match=r"dtype|scalar type"):
        moefx.compile(model, example_inputs=(x,))


@pytest.mark.parametrize("where", ["an expert", "all"])
def test_a_later_mixture_of_dtypes_raises_as_in_the_original(where):
    model, x = Mixture(), torch.randn(32, D)
    compiled = moefx.compile(model, example_inputs=(x,))
    compiled(x)
    convert_to_double(compiled, "experts.1" if where == "an expert" else "experts")
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        compiled(x)
    assert torch.equal(compiled.float()(x), compiled(x)) and compiled.forward.counts.rewritten > 1
