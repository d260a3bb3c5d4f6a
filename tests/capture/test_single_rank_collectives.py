"""Blocks that communicate over a group of one rank."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import moefx

from ..blocks import D, E, Loop, Mlp
from ..models.case import run_and_differentiate


@pytest.fixture
def alone(tmp_path):
    if not dist.is_available():
        pytest.skip("no torch.distributed")
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


class Exchanged(Loop):
    """Send rows to the ranks of their experts and back."""

    def __init__(self):
        super().__init__(Mlp)

    def forward(self, x):
        w, ids = self.route(x)
        order = ids.flatten().argsort(stable=True)
        here = torch.bincount(ids.flatten(), minlength=E)
        counts = torch.empty_like(here)
        dist.all_to_all_single(counts, here)
        rows = Exchange.apply(x[order // 2]).split(counts.tolist())
        y = Exchange.apply(torch.cat([expert(r) for expert, r in zip(self.experts, rows, strict=True)]))
        return torch.zeros_like(x).index_add(0, order // 2, y * w.flatten()[order, None])


class Reduced(Loop):
    def __init__(self):
        super().__init__(Mlp)
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x):
        _, ids = self.route(x)
        counts = torch.bincount(ids.flatten(), minlength=E).to(self.load.dtype)
        dist.all_reduce(counts)
        self.load += counts
        out = super().forward(x)
        dist.all_reduce(out)
        return out


@pytest.mark.parametrize("kind", [Exchanged, Reduced])
def test_collectives_of_one_rank_are_rewritten(alone, kind):
    torch.manual_seed(0)
    model = kind().double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(16, D, dtype=torch.float64),))
    for tokens in (1, 7, 40):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Gather(torch.autograd.Function):
    """Gather all tokens of the group; the backward scatters gradients."""

    @staticmethod
    def forward(ctx, x):
        whole = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return Scatter.apply(gradient)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        part = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous())
        return part

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient)


class Gathered(Loop):
    """Run on the tokens of all ranks, and sum the results over ranks."""

    def __init__(self, gather, scatter):
        super().__init__(Mlp)
        self.gather, self.scatter = gather, scatter

    def forward(self, x):
        return self.scatter(super().forward(self.gather(x)))


def gather_functionally(x):
    return functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def scatter_functionally(x):
    return functional.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD)


# torch 2.11 hides the derivative of functional collectives from captures: the numeric check refuses them
_FUNCTIONAL = pytest.mark.xfail(
    torch.__version__ < "2.13", reason="refused with torch 2.11", raises=moefx.NoMoEBlockFound
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param((Gather.apply, Scatter.apply), id="written"),
        pytest.param((gather_functionally, scatter_functionally), id="functional", marks=_FUNCTIONAL),
    ],
)
def test_pairs_of_gather_and_scatter_are_rewritten(alone, pair):
    torch.manual_seed(0)
    model = Gathered(*pair).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(16, D, dtype=torch.float64),))
    for tokens in (1, 40):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_a_collective_cuts_off(alone):
    """Refuse bare collectives. The tests above run the remedy, `Gather` and `Scatter`."""
    bare = [lambda x, f=f: f.forward(None, x) for f in (Gather, Scatter)]
    why = r"no gradient flows through a collective.*\(test_single_rank_collectives.py:\d+\).*torch.autograd.Function"
    with pytest.raises(moefx.NoMoEBlockFound, match=why):
        moefx.compile(Gathered(*bare), example_inputs=(torch.randn(16, D),))


class Warns(Loop):
    """Show a warning: Python records it in the module's globals."""

    def forward(self, x):
        warnings.warn("this forward is old", FutureWarning, stacklevel=1)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore")
def test_a_warning_is_no_global_of_the_user():
    globals().pop("__warningregistry__", None)
    assert moefx.blocks(moefx.compile(Warns(Mlp), example_inputs=(torch.randn(9, D),)))
