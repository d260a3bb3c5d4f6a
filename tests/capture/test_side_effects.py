"""Captures undo side effects and report them."""

from __future__ import annotations

import copy
import functools
import random
import types

import numpy
import pytest
import torch
from torch import nn

import moefx

from ..blocks import D, Loop

LOSSES: list[torch.Tensor] = []
COUNT = 0
TENSOR = torch.zeros(2)
BACKENDS: dict[str, object] = {}


class Manager:
    def __init__(self):
        self.losses = []
        self.last = None


MANAGER = Manager()


class Parent(nn.Module):
    aux = None


class Recorder:
    last = None


def to_list(block, loss):
    LOSSES.append(loss)


def to_manager(block, loss):
    MANAGER.losses.append(loss)


def to_attribute(block, loss):
    MANAGER.last = loss


def to_class(block, loss):
    Recorder.last = loss


def to_number(block, loss):
    global COUNT
    COUNT += 1


def to_private_list(block, loss):
    block._own.append(loss)


def to_object(block, loss):
    block.stats.last = loss


def to_tensor_in_dict(block, loss):
    block.held["load"] += loss.detach()


def to_integers_in_dict(block, loss):
    block.held["calls"].add_(1)


def to_plain_tensor(block, loss):
    block.plain.mul_(0.9).add_(loss.detach())


def to_global_tensor(block, loss):
    TENSOR[0] += 1


def to_array(block, loss):
    block.array[0] += 1.0


def to_parent(block, loss):
    block.parents[0].aux = loss


class Writes(Loop):
    def __init__(self, write):
        super().__init__()
        self.held = {"load": torch.zeros(()), "calls": torch.zeros((), dtype=torch.int64)}
        self.parents = [Parent()]
        self.plain, self.array = torch.zeros(()), numpy.zeros(2)
        self.write, self._own, self.stats = write, [], types.SimpleNamespace(last=None)

    def forward(self, x):
        self.write(self, self.gate(x).logsumexp(-1).mean())
        return super().forward(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "write", [to_list, to_manager, to_attribute, to_class, to_number, to_private_list, to_object,
              to_tensor_in_dict, to_integers_in_dict, to_plain_tensor, to_global_tensor, to_array, to_parent],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_block_with_outside_writes_is_refused_without_trace(write):
    model = Writes(write)
    with pytest.raises(moefx.NoMoEBlockFound, match="writes to"):
        moefx.compile(model, example_inputs=(torch.randn(5, D),))
    assert not LOSSES and not MANAGER.losses and not model._own and COUNT == 0
    assert model.parents[0].aux is None
    assert all(t == 0 for t in [*model.held.values(), model.plain, TENSOR[0], model.array[0]])
    assert MANAGER.last is None and Recorder.last is None and model.stats.last is None


DICE = random.Random(3)


class Draws(Loop):
    """Multiply router scores by random numbers from Python or NumPy."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.dice, self.generator = draw, [random.Random(1)], numpy.random.default_rng(0)

    def route(self, x):
        return (self.gate(x) * self.draw(self)).softmax(-1).topk(2, -1)


DRAWS = {
    "random": lambda block: random.uniform(0.5, 1.5),
    "numpy.random": lambda block: numpy.random.uniform(0.5, 1.5),
    "dice": lambda block: block.dice[0].random(),
    "generator": lambda block: block.generator.uniform(0.5, 1.5),
    "DICE": lambda block: DICE.random(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_that_torch_does_not_draw(draw):
    """Refuse draws that all calls would share. Models on meta have no values for a numeric check."""
    with torch.device("meta"):
        model = Draws(draw)
    states = random.getstate(), model.dice[0].getstate(), model.generator.bit_generator.state, DICE.getstate()
    name = next(name for name, one in DRAWS.items() if one is draw)
    with pytest.raises(
        moefx.NoMoEBlockFound, match=rf"the block draws from \S*{name}: every call would get the numbers of one"
    ):
        moefx.compile(model, example_inputs=(torch.randn(5, D, device="meta"),))
    assert states == (
        random.getstate(), model.dice[0].getstate(), model.generator.bit_generator.state, DICE.getstate()
    )  # fmt: skip


class Borrows(Loop):
    """Use the router of another module, in a list, so that it is not registered twice."""

    def __init__(self, router):
        super().__init__()
        self.routers = [router]

    def route(self, x):
        return self.routers[0](x).softmax(-1).topk(2, -1)


def test_a_parameter_of_another_module_is_refused():
    with pytest.raises(moefx.NoMoEBlockFound, match=r"a parameter of \[4, 6\] that is not its own"):
        moefx.compile(Borrows(nn.Linear(D, 4)), example_inputs=(torch.randn(5, D),))


def test_the_module_that_owns_both_is_rewritten():
    model, x = nn.ModuleDict({"router": nn.Linear(D, 4)}), torch.randn(9, D)
    model["moe"] = Borrows(model["router"])
    model.forward = lambda x: model["moe"](x)
    compiled = moefx.compile(model, example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        model["router"].weight.neg_()
    torch.testing.assert_close(compiled(x), model(x))
    assert [(block.name, block.fallbacks) for block in moefx.blocks(compiled)] == [("", 0)]


def test_code_outside_of_the_block_may_write():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = Loop()

        def forward(self, x):
            LOSSES.append(x.mean())
            return self.moe(x)

    model = Model()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(torch.randn(5, D),))
    assert not LOSSES
    compiled(torch.randn(5, D))
    assert len(LOSSES) == 1
    LOSSES.clear()


def test_a_list_among_the_arguments():
    class Appends(Loop):
        def forward(self, x, aux):
            aux.append(self.gate(x).mean())
            return super().forward(x)

    with pytest.raises(moefx.NoMoEBlockFound, match="writes to an argument"):
        moefx.compile(Appends(), example_inputs=(torch.randn(5, D), []))


class Cache:
    def __init__(self):
        self.keys = []

    def update(self, k):
        self.keys.append(k)
        return torch.cat(self.keys, -2)


class Decoder(Loop):
    """Attention with a cache of keys, and a mixture of experts without its own module."""

    def forward(self, x, cache=None):
        keys = x if cache is None else cache.update(x)
        h = x + torch.nn.functional.scaled_dot_product_attention(x, keys, keys)
        return h + super().forward(h.flatten(0, 1)).view_as(h)


class Decoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, x, use_cache=True):
        caches = [Cache() if use_cache else None for _ in self.layers]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return x


def test_a_cache_of_keys():
    model, x = Decoders(), torch.randn(3, 5, D)
    with pytest.raises(moefx.NoMoEBlockFound, match="use_cache=False"):
        moefx.compile(copy.deepcopy(model), example_inputs=(x,))
    compiled = moefx.compile(model, example_inputs=(x, False))
    assert [block.name for block in moefx.blocks(compiled)] == ["layers.0", "layers.1"]
    torch.testing.assert_close(compiled(x, False), model(x, False))
    assert all(block.fallbacks == 0 for block in moefx.blocks(compiled))
    caches = Cache(), Cache()
    for _ in range(2):
        found, wanted = (m.layers[0](x, c) for m, c in zip((compiled, model), caches, strict=True))
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(caches[0].keys, caches[1].keys)


def test_a_registry_that_is_filled_once_is_allowed():
    class Asks(Loop):
        def forward(self, x):
            BACKENDS.setdefault("torch", object())
            return super().forward(x)

    assert len(moefx.blocks(moefx.compile(Asks(), example_inputs=(torch.randn(5, D),)))) == 1
    BACKENDS.clear()  # the numeric check fills the registry


class Tagged:
    def __call__(self, module):
        return "tagged"


@pytest.mark.parametrize("function", [functools.partial(lambda module, tag: tag, tag=["a"]), Tagged()])
def test_a_method_of_any_callable(function):
    """Accept callables without a signature: quantization libraries set `extra_repr` to a partial."""
    model = nn.Sequential(Loop())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.extra_repr = types.MethodType(function, module)
    assert len(moefx.blocks(moefx.compile(model, example_inputs=(torch.randn(7, D),)))) == 1


CALLS = []


def count_calls(module, x, log):
    log.append(len(x))
    return x


def test_state_in_a_partial_is_restored():
    class Logs(Loop):
        def __init__(self):
            super().__init__()
            self.log = types.MethodType(functools.partial(count_calls, log=CALLS), self)

        def forward(self, x):
            return super().forward(self.log(x))

    with pytest.raises(moefx.NoMoEBlockFound, match="log"):
        moefx.compile(nn.Sequential(Logs()), example_inputs=(torch.randn(7, D),))
    assert CALLS == []


def register_buffer(block, x):
    if not hasattr(block, "scale"):
        block.register_buffer("scale", torch.ones(D))


def register_parameter(block, x):
    if not hasattr(block, "scale"):
        block.scale = nn.Parameter(torch.ones(D))


def replace_expert(block, x):
    block.experts[0] = nn.Identity()


def add_expert(block, x):
    block.experts.append(nn.Identity())


def delete_module(block, x):
    if hasattr(block, "extra"):
        del block.extra


class Registers(Loop):
    """Register, replace or remove a submodule after the experts ran."""

    def __init__(self, change, tokens=0):
        super().__init__()
        self.extra, self.change, self.tokens = nn.Linear(2, 2), change, tokens

    def forward(self, x):
        out = super().forward(x)
        if len(x) > self.tokens:
            self.change(self, x)
        return out


def list_registered(model: nn.Module) -> list[tuple[str, int]]:
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    return [(name, id(value)) for name, value in named]


CHANGES = [register_buffer, register_parameter, replace_expert, add_expert, delete_module]


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_registers_modules_or_tensors_is_refused_without_trace(change):
    model, x = Registers(change), torch.randn(9, D)
    before = list_registered(model)
    (refused,) = moefx.explain(model, (x,)).refused
    assert "sets its attribute" in refused.reason
    assert list_registered(model) == before


@pytest.mark.parametrize("change", CHANGES)
def test_compile_undoes_registrations_for_many_tokens(change):
    torch.manual_seed(0)
    model, x = Registers(change, tokens=40), torch.randn(9, D)
    names = [name for name, _ in list_registered(model)]
    compiled = moefx.compile(model, (x,))
    assert [name for name, _ in list_registered(compiled)] == names
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Contiguous(Loop):
    """Negate tokens before routing if their memory is not contiguous."""

    def forward(self, x):
        return super().forward(x if x.is_contiguous() else -x)


class Strided(Loop):
    def forward(self, x):
        return super().forward(x if x.stride(-1) == 1 else -x)


@pytest.mark.parametrize("block", [Contiguous, Strided])
def test_a_layout_that_the_block_reads_is_a_guard(block):
    torch.manual_seed(0)
    model, x = block(), torch.randn(9, D)
    compiled = moefx.compile(model, (x,))
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
    turned = x.t().contiguous().t()
    torch.testing.assert_close(compiled(turned), model(turned))
    assert moefx.blocks(compiled)[0].fallbacks == 1
