"""Sizes and numbers in graphs: token counts, and inputs of a region."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.frontends.dynamo.backend import backend

D, E, H = 8, 4, 12


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.double()

    def routed(self, x, *inputs):
        return self.router(x).softmax(-1).topk(2, -1)

    def forward(self, x, *inputs):
        w, i = self.routed(x, *inputs)
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, i, w)
        h = torch.einsum("...d,edh->...eh", x, self.up).relu()
        return torch.einsum("...eh,ehd,...e->...d", h, self.down, gates)


class Constant(Dense):
    def routed(self, x):
        w, i = super().routed(x)
        return w * x.new_full((30,), 0.1).sum(), i


class Capacity(Dense):
    """Drop tokens over a capacity of 20."""

    def forward(self, x):
        t = x.reshape(-1, D)
        w, i = self.router(t).softmax(-1).max(-1)
        chosen = F.one_hot(i, E)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        here = (place[:, None] == torch.arange(20)).to(t.dtype)
        dispatch = chosen.to(t.dtype)[..., None] * here[:, None]
        y = torch.bmm(torch.bmm(torch.einsum("tec,td->ecd", dispatch, t), self.up).relu(), self.down)
        return (torch.einsum("tec,ecd->td", dispatch, y) * w[:, None]).view_as(x)


class Limited(Dense):
    """Limit the tokens per expert. All tokens prefer the first expert."""

    def __init__(self, places=None):
        super().__init__()
        self.places = places
        with torch.no_grad():
            self.router.weight[0] = 1

    def forward(self, x, places=None):
        batch, length, _ = x.shape
        places = places or self.places(batch, length)
        w, i = self.router(x).softmax(-1).topk(2, -1)
        chosen = F.one_hot(i, E).reshape(batch * length, 2, E)
        place = (chosen.view(-1, E).cumsum(0) - 1).view(batch * length, 2, E)
        here = (place < places) & (chosen > 0)
        gates = (w.reshape(-1, 2, 1) * here).sum(1)
        h = torch.einsum("td,edh->teh", x.reshape(-1, D), self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, gates).view_as(x)


class Moved(Dense):
    def routed(self, x, other):
        w, i = super().routed(x)
        return w, torch.where(other >= 0, 3 - i, i)


class Enabled(Dense):
    """Enable only the experts in a mask that the call passes."""

    def routed(self, x, experts):
        return self.router(x).masked_fill(~experts, -1e9).softmax(-1).topk(2, -1)


class Masked(Dense):
    """Mask tokens."""

    def routed(self, x, here):
        w, i = super().routed(x)
        return w * here[..., None], i


class Forced(Dense):
    """Select by the ids in the call, or by the router for tokens without one."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, ids):
        return super().forward(x.view(-1, D), self.how(ids)).view_as(x)

    def routed(self, x, ids):
        w, i = self.router(x).softmax(-1).topk(1, -1)
        return w, torch.where((ids >= 0)[:, None], (ids % E)[:, None], i)


def draw_tokens(*shape):
    return torch.randn(*shape, D, dtype=torch.float64)


def check(module, calls, **kwargs):
    call = torch.compile(module, backend=backend, options={"backend": "eager"}, **kwargs)
    for args in calls:
        torch.testing.assert_close(call(*args), module(*args))
    return call


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "first"), [(Constant, (3, 10)), (Constant, (30, 2)), (Capacity, (2, 10))])
def test_a_number_of_a_dynamic_graph_is_no_size(make, first):
    """Treat the number as a constant although it equals a size of the first call."""
    check(make(), [(draw_tokens(*first),), (draw_tokens(4, 60),)], dynamic=True)


@pytest.mark.exhaustive  # `test_all_tokens_but_the_last` and the next test cover these
@pytest.mark.parametrize(
    "places",
    [
        lambda batch, length: int(batch * length * 1.25 / E),
        lambda batch, length: int(math.sqrt(batch * length)),
        lambda batch, length: max(4, math.ceil((batch * length) ** 0.5)),
        lambda batch, length: batch * round(math.log2(length)),
        lambda batch, length: int(batch * length * 0.7 * 3 / 8),  # rounds differently than 0.7 * 3 times the size
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_capacities_of_floats(places, dynamic):
    """Compute capacities as the graph does, for all sizes."""
    module, shapes = Limited(places), [(2, 10), (2, 40), (3, 41), (3, 97)]
    calls = [(draw_tokens(*shape).abs(),) for shape in shapes]
    (block,) = {b.name: b for b in moefx.blocks(check(module, calls, dynamic=dynamic))}.values()
    assert not block.fallbacks and block.graph.find("moefx::build_pft")[0].kwargs["capacity"] is not None


def test_roots_of_sizes_do_not_compile_again():
    """Compile as many graphs as torch alone, which recompiles only with 2.11."""
    module = Limited(lambda batch, length: int(math.sqrt(batch * length)))

    def compiled(**how):
        torch._dynamo.reset()
        call = torch.compile(module, dynamic=True, **how)
        for length in (10, 17, 23):
            torch.testing.assert_close(call(x := draw_tokens(2, length).abs()), module(x))
        return call

    graphs, plain_graphs = [], []
    compiled(backend=lambda gm, x: plain_graphs.append(gm) or gm)
    call = compiled(
        backend=backend,
        options={"backend": lambda gm, x: graphs.append(gm) or torch._dynamo.lookup_backend("aot_eager")(gm, x)},
    )
    assert len(graphs) == len(plain_graphs) and moefx.blocks(call)


def test_a_number_among_the_inputs(caplog):
    """Refuse a number whose value at other sizes is unknown."""
    check(Limited(), [(draw_tokens(2, n).abs(), n // 3) for n in (10, 17)], dynamic=True)
    assert "it depends on L[" in caplog.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [None, True])
def test_all_tokens_but_the_last(dynamic):
    """Rewrite a graph whose sizes are one larger than the number of rows."""

    class ButTheLast(Limited):
        def forward(self, x):
            return super().forward(x[:, :-1].cos())

    module = ButTheLast(lambda batch, length: max(2, int(1.25 * batch * length / E), batch * length // 3))
    calls = [(draw_tokens(*shape),) for shape in [(2, 10), (2, 40), (3, 41)]]
    assert moefx.blocks(check(module, calls, dynamic=dynamic))


def test_chunks_of_a_length_that_changes():
    """Rewrite chunks whose size is no polynomial of the sizes: `(S + 1) // 2`."""

    class Chunks(Dense):
        def forward(self, x):
            return torch.cat([super(Chunks, self).forward(c.flatten(0, 1)).view_as(c) for c in x.chunk(2, 1)], 1)

    blocks = moefx.blocks(check(Chunks(), [(draw_tokens(*shape),) for shape in [(2, 9), (3, 7), (2, 40)]]))
    assert len(blocks) == 2 and not any(block.fallbacks for block in blocks)


class Tempered(Dense):
    """Hold two floats, a scale and a factor of a capacity. Dynamo passes them as tensors."""

    def __init__(self):
        super().__init__()
        self.temperature, self.times = 1.7, 1.25
        self.limited = Limited()

    def routed(self, x):
        return (self.router(x) / self.temperature).softmax(-1).topk(2, -1)

    def forward(self, x):
        return self.limited(super().forward(x).cos(), math.ceil(self.times * x.shape[0] * x.shape[1] / E))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [None, True])
def test_floats_that_seldom_change_are_constants(dynamic, caplog):
    module = Tempered().double()
    call = torch.compile(module, backend=backend, options={"backend": "eager"}, dynamic=dynamic)

    def blocks_at(temperature, times):
        module.temperature, module.times = temperature, times
        torch.testing.assert_close(call(x := draw_tokens(3, 17).double()), module(x))
        return len(moefx.blocks(call))

    for temperature, times in ((1.7, 1.25), (0.5, 1.25), (0.5, 2.0)):
        assert blocks_at(temperature, times) == 2
    assert "left a region" not in caplog.text
    for temperature in (2.5, 3.5, 4.5, 5.5):
        blocks_at(temperature, 1.25)
    assert "it changes, and Dynamo compiles a graph for each value: make it a buffer" in caplog.text
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for temperature in (6.5, 7.5):
        blocks_at(temperature, 1.25)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "nothing is compiled for each value"


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_a_call_without_tokens_runs(shape):
    call = check(Dense(), [(draw_tokens(*shape),), (draw_tokens(3, 7),)])
    assert moefx.blocks(call)


def test_first_call_with_one_integer_value_generalizes():
    none = torch.full((3, 9, 2), -1)
    check(Moved(), [(draw_tokens(3, 9), none), (draw_tokens(3, 9), torch.randint(-1, E, (3, 9, 2)))])


def test_graphs_and_compiled_models_have_separate_blocks():
    """Keep the block of `moefx.compile` separate from blocks of graphs with the same weights."""
    module = Dense()
    check(module, [(draw_tokens(9),)])
    compiled = moefx.compile(module, plan=moefx.Plan(checkpoint="x"), example_inputs=(draw_tokens(9),))
    (block,) = moefx.blocks(compiled)
    assert block.forward is compiled.forward and block.graph.find("moefx::expert_mlp")[0].kwargs["keep"] == "x"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("shape", [(E, 9), (3, E)])
def test_as_many_rows_as_experts(shape, dynamic):
    """Do not treat a mask over experts as one over rows if the first call has as many rows as experts."""
    experts = torch.tensor([True, False, True, True])
    calls = [(draw_tokens(*s), experts) for s in (shape, (5, 7))]
    assert moefx.blocks(check(Enabled(), calls, dynamic=dynamic))


def test_log_suggests_sizes_that_differ(caplog):
    """Suggest other sizes if Dynamo has one symbol for two axes of equal length.

    Without opt_einsum, which torch uses if it is installed and which converts the sizes to numbers.
    """
    with torch.backends.opt_einsum.flags(enabled=False):
        check(Masked(), [(draw_tokens(3, 3), torch.rand(3, 3) > 0.3)], dynamic=True)
    assert "S = 3 is also the length of another axis: make the first call with other sizes" in caplog.text


@pytest.mark.parametrize("dynamic", [None, True])
def test_integers_that_follow_from_an_input(dynamic):
    """Vary integers as the input that they are computed from, with dynamic sizes too."""
    torch.manual_seed(0)
    calls = [(draw_tokens(*s), torch.randint(-least, 50, s)) for s, least in [((3, 9), 1), ((4, 11), 40), ((4, 11), 0)]]
    calls += [(draw_tokens(4, 11), torch.full((4, 11), -1))]
    assert moefx.blocks(check(Forced(lambda ids: ids.view(-1).long()), calls, dynamic=dynamic))


def test_integers_without_known_bounds_are_refused(caplog):
    call = check(Forced(lambda ids: ids.view(-1).cumsum(0)), [(draw_tokens(3, 9), torch.randint(-1, 50, (3, 9)))])
    assert not moefx.blocks(call) and "it receives integers that the graph computes" in caplog.text
