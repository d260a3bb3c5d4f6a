"""Decoder layers with router and experts in their own forward, which pass a key-value cache to their attention."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Sized

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import moefx
from moefx.runtime.block_forward import find_rewritten_blocks

DIM = 16
pytestmark = pytest.mark.filterwarnings("error:moefx rewrote these blocks without a numeric check")


class Cache:
    """Keys and values by layer."""

    def __init__(self):
        self.keys, self.values, self.updates = {}, {}, 0

    def update(self, k, v, layer):
        self.updates += 1
        if layer in self.keys:
            k, v = torch.cat([self.keys[layer], k], 2), torch.cat([self.values[layer], v], 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


class LibraryCache(Cache):
    """Cache of a library, as in transformers."""


LibraryCache.__module__ = "transformers.cache_utils"


@dataclasses.dataclass
class DataCache:
    keys: dict = dataclasses.field(default_factory=dict)
    values: dict = dataclasses.field(default_factory=dict)
    updates: int = 0
    update = Cache.update


class DictCache(dict):
    """Dict with an `update` method."""

    def update(self, k, v, layer):
        if layer in self:
            k, v = torch.cat([self[layer][0], k], 2), torch.cat([self[layer][1], v], 2)
        self[layer] = k, v
        return k, v


class StaticCache:
    """Write to preallocated tensors."""

    def __init__(self):
        self.keys, self.values, self.updates = torch.zeros(2, 2, 2, 16, 8), torch.zeros(2, 2, 2, 16, 8), [0, 0]

    def update(self, k, v, layer):
        start, end = self.updates[layer], self.updates[layer] + k.shape[2]
        self.updates[layer] = end
        for held, new in ((self.keys, k), (self.values, v)):
            held[layer, :, :, start:end] = new.detach()
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    def __init__(self, layer=0):
        super().__init__()
        self.layer = layer
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def update(self, k, v, cache):
        if type(cache) in (dict, list):
            return DictCache.update(cache, k, v, self.layer)
        return (k, v) if cache is None else cache.update(k, v, self.layer)

    def forward(self, x, cache=None, mask=None):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = self.update(k, v, cache)
        mask = (
            torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1]) if mask is None else mask
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, attention=None):
        super().__init__()
        self.attn = attention or Attention()
        self.norm1, self.norm2, self.router = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 24), nn.SiLU(), nn.Linear(24, DIM)) for _ in range(5))

    def forward(self, x, cache=None, mask=None):
        return self.mix(x + self.attn(self.norm1(x), cache, mask))

    def mix(self, x):
        rows = self.norm2(x).reshape(-1, DIM)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out[token] += expert(rows[token]) * weights[token, slot, None]
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(Attention(i)) for i in range(layers))

    def forward(self, x, cache=None, mask=None):
        for layer in self.layers:
            x = layer(x, cache, mask)
        return x


def draw_hidden(tokens=7):
    return torch.randn(2, tokens, DIM)


@pytest.fixture(scope="module")
def pair():
    """Return a model of one layer, and its compiled copy with a cache in the example."""
    torch.manual_seed(0)
    model = Model(1)
    return model, moefx.compile(model, example_inputs=(draw_hidden(), Cache()))


def count_calls(compiled):
    counts = [f.counts for f in find_rewritten_blocks(compiled).values()]
    return sum(c.rewritten for c in counts), sum(c.original for c in counts)


def check_decoding(model, compiled, make, steps=3):
    """Decode a prefill and then one token at a time with separate caches. Returns the caches."""
    caches = make(), make()
    x, (before, _) = draw_hidden(), count_calls(compiled)
    for _ in range(steps):
        expected, out = model(x, caches[0]), compiled(x, caches[1])
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        x = draw_hidden(1)
    assert count_calls(compiled) == (before + steps * len(find_rewritten_blocks(compiled)), 0)
    return caches


def check_gradients(model, compiled, x, *caches):
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [m(x, *(make() for make in caches)) for m, x in zip((model, compiled), inputs, strict=True)]
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    gradients = []
    for m, x, out in zip((model, compiled), inputs, outs, strict=True):
        m.zero_grad()
        out.square().sum().backward()
        gradients.append([x.grad, *[torch.zeros(()) if p.grad is None else p.grad.clone() for p in m.parameters()]])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected.expand_as(actual), atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("make", [StaticCache, LibraryCache, dict, DataCache, DictCache, lambda: [None] * 2])
def test_decodes_with_a_cache(make):
    torch.manual_seed(0)
    model, example = Model(), make()
    before = copy.deepcopy(example)
    if isinstance(example, list):
        for layer in model.layers:
            layer.attn.update = lambda k, v, cache, layer=layer: _update_list(k, v, cache, layer.attn.layer)
    compiled = moefx.compile(model, example_inputs=(draw_hidden(), example))
    if isinstance(example, StaticCache):
        assert not example.keys.any() and not example.values.any() and example.updates == [0, 0]
    else:
        assert vars(example) == vars(before) if hasattr(example, "__dict__") else example == before
    expected, actual = check_decoding(model, compiled, make)
    assert getattr(expected, "updates", 0) == getattr(actual, "updates", 0)


def _update_list(k, v, cache, layer):
    if cache[layer] is not None:
        k, v = torch.cat([cache[layer][0], k], 2), torch.cat([cache[layer][1], v], 2)
    cache[layer] = k, v
    return k, v


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [LibraryCache, DataCache, dict])
def test_cache_after_an_example_without(make):
    """Leave no abstract tensors in the caller's cache when a later call is compiled."""
    torch.manual_seed(0)
    model = Model(1)
    compiled = moefx.compile(model, example_inputs=(draw_hidden(),))
    caches = check_decoding(model, compiled, make)
    if make is not dict:
        assert [c.updates for c in caches] == [3, 3]
        torch.testing.assert_close(caches[1].keys[0], caches[0].keys[0])


def test_trains_with_and_without_a_cache(pair):
    before, _ = count_calls(pair[1])
    check_gradients(*pair, draw_hidden(), Cache)
    check_gradients(*pair, draw_hidden(5))
    assert count_calls(pair[1]) == (before + 2, 0)


@pytest.mark.exhaustive
def test_checkpointed_layer_updates_the_cache_as_often(pair):
    updates = []

    class Overwritten(Cache):
        def update(self, k, v, layer):
            self.updates += 1
            return k, v

    for m in pair:
        x, cache = draw_hidden().requires_grad_(), Overwritten()
        checkpoint(m, x, cache, use_reentrant=False).sum().backward()
        updates.append(cache.updates)
    assert updates == [2, 2]


def test_verify_leaves_the_cache(pair):
    (model, compiled), cache = pair, Cache()
    moefx.verify(compiled, model, (draw_hidden(), cache), token_counts=()).raise_if_failed()
    assert cache.updates == 0 and not cache.keys


@pytest.mark.exhaustive
def test_a_cache_is_filled_under_autocast(pair):
    (model, compiled), caches, x = pair, (Cache(), Cache()), draw_hidden()
    before, _ = count_calls(compiled)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x, caches[1]), model(x, caches[0]), atol=5e-2, rtol=5e-2)
    assert count_calls(compiled) == (before + 1, 0) and caches[1].keys[0].dtype == torch.bfloat16


@pytest.mark.exhaustive
def test_one_program_for_masks_of_all_lengths():
    """Grow a mask in each step that the layer only passes on."""
    torch.manual_seed(0)
    model = Layer()
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    compiled = moefx.compile(model, example_inputs=(draw_hidden(), Cache(), mask))
    caches, x = (Cache(), Cache()), draw_hidden()
    for step in range(4):
        mask = torch.ones(x.shape[1], 7 + step, dtype=torch.bool).tril(7 + step - x.shape[1])
        torch.testing.assert_close(compiled(x, caches[1], mask), model(x, caches[0], mask), atol=1e-5, rtol=1e-5)
        x = draw_hidden(1)
    (forward,) = find_rewritten_blocks(compiled).values()
    assert count_calls(compiled) == (4, 0) and len(forward.programs) == 1


def test_copies_and_pickles_decode_as_the_original(pair):
    model, compiled = pair
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        check_decoding(model, other, Cache, steps=2)


@pytest.mark.exhaustive
def test_dynamo_traces_a_block_with_a_cache(pair):
    model, compiled = pair[0], torch.compile(pair[1], backend="eager", fullgraph=True)
    caches, x = (Cache(), Cache()), draw_hidden()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x, caches[1]), model(x, caches[0]), atol=1e-5, rtol=1e-5)
            x = draw_hidden(1)
    assert caches[1].updates == 3


class Stores(nn.Module):
    """Write to a dict in some layers only; equal modules may differ in this."""

    def __init__(self, stores):
        super().__init__()
        self.lin, self.stores = nn.Linear(DIM, DIM), stores

    def forward(self, x, shared, mask):
        x = self.lin(x)
        if self.stores:
            shared["last"] = x
        return x


@pytest.mark.exhaustive
def test_container_that_one_of_equal_layers_writes_to():
    torch.manual_seed(0)
    model = Model(0)
    model.layers.extend(Layer(Stores(stores)) for stores in (False, True))
    shared = {}
    compiled = moefx.compile(model, example_inputs=(draw_hidden(), {}))
    x = draw_hidden()
    torch.testing.assert_close(compiled(x, shared), model(x, {}), atol=1e-5, rtol=1e-5)
    assert count_calls(compiled) == (2, 0) and shared.keys() == {"last"}


class WithWeights(Attention):
    """Return the cache, and weights of a shape that no input has."""

    def forward(self, x, cache=None, mask=None):
        y = super().forward(x, cache)
        return y, x.new_ones(2, x.shape[1], cache.keys[0].shape[2]), cache, None, x.shape[1]


class ReturnsAll(Layer):
    def forward(self, x, cache):
        y, weights, cache, absent, tokens = self.attn(self.norm1(x), cache)
        return self.mix(x + y), {"weights": weights, "cache": cache}, absent, tokens


def test_returns_the_results_of_the_attention():
    torch.manual_seed(0)
    model = ReturnsAll(WithWeights())
    compiled, caches, x = (
        moefx.compile(model, example_inputs=(draw_hidden(), Cache())),
        (Cache(), Cache()),
        draw_hidden(),
    )
    for _ in range(2):
        expected, out = model(x, caches[0]), compiled(x, caches[1])
        torch.testing.assert_close(out[0], expected[0], atol=1e-5, rtol=1e-5)
        assert out[1]["weights"].shape == expected[1]["weights"].shape and out[1]["cache"] is caches[1]
        assert out[2:] == expected[2:] == (None, x.shape[1])
        x = draw_hidden(1)
    assert count_calls(compiled) == (2, 0)


class Writer(nn.Module):
    def forward(self, x, cache, mask=None):
        cache.updates = cache.updates * 10 + len(cache.keys)
        cache.keys[len(cache.keys)] = x
        return x * 2


class WritesTwice(Layer):
    def forward(self, x, cache):
        if cache is not None:
            self.attn(x, cache)
        x = x + self.norm1(x)
        self.attn(x, cache)
        return self.mix(x)


def test_keeps_calls_with_unused_results():
    torch.manual_seed(0)
    model = WritesTwice(Writer())
    compiled, caches, x = (
        moefx.compile(model, example_inputs=(draw_hidden(), Cache())),
        (Cache(), Cache()),
        draw_hidden(),
    )
    torch.testing.assert_close(compiled(x, caches[1]), model(x, caches[0]), atol=1e-5, rtol=1e-5)
    assert count_calls(compiled) == (1, 0) and caches[1].updates == caches[0].updates == 1
    torch.testing.assert_close(list(caches[1].keys.values()), list(caches[0].keys.values()))


class Changing(Attention):
    dtype, weights = None, None

    def forward(self, x, cache=None, mask=None):
        y = super().forward(x, cache)
        return y if self.dtype is None else y.to(self.dtype), self.weights


class UsesFirst(Layer):
    def forward(self, x, cache):
        return self.mix((x + self.attn(self.norm1(x), cache)[0]).float())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, value", [("dtype", torch.float64), ("weights", torch.ones(1))])
def test_raises_if_the_attention_returns_another_type(name, value):
    torch.manual_seed(0)
    model = UsesFirst(Changing())
    compiled, cache = moefx.compile(model, example_inputs=(draw_hidden(), Cache())), Cache()
    setattr(compiled.attn, name, value)
    with pytest.raises(moefx.MoefxError, match=r"attn returned .* It returned .* when its block was compiled"):
        compiled(draw_hidden(), cache)
    assert cache.updates == 1
    again = moefx.compile(compiled, example_inputs=(draw_hidden(), Cache()))  # the remedy
    again(draw_hidden(), Cache())
    assert count_calls(again) == (1, 0)


class ReturnsList(Attention):
    """Return a list with the cache, and a number."""

    number = 0.5

    def forward(self, x, cache=None, mask=None):
        return [super().forward(x, cache), cache, self.number]


class UsesList(Layer):
    def forward(self, x, cache):
        results = self.attn(self.norm1(x), cache)
        return self.mix(x + results[0]), results[2] if isinstance(results, list) else None


def test_hands_results_on_with_hooks():
    torch.manual_seed(0)
    model = UsesList(ReturnsList())
    model.attn.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))
    model.attn.register_forward_hook(lambda module, args, out: [out[0] * 2, *out[1:]])
    compiled = moefx.compile(model, example_inputs=(draw_hidden(), Cache()))
    caches, x = (Cache(), Cache()), draw_hidden()
    for m, cache in zip((model, compiled), caches, strict=True):
        m.attn.number = 2.5
        (expected, _), (out, number) = model(x, Cache()), m(x, cache)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert number == 2.5
    compiled.attn.number = None
    with pytest.raises(moefx.MoefxError, match=r"attn returned None as result 2\. It returned an object when"):
        compiled(draw_hidden(), Cache())


class TwoCaches(Layer):
    def forward(self, x, cache, other):
        return self.mix(x + self.attn(self.norm1(x), cache) + self.attn(x, other))


@pytest.mark.exhaustive
def test_takes_two_caches():
    torch.manual_seed(0)
    model, cache, expected, actual = TwoCaches(), Cache(), Cache(), Cache()
    compiled = moefx.compile(model, example_inputs=(draw_hidden(), Cache(), Cache()))
    x = draw_hidden()
    torch.testing.assert_close(compiled(x, actual, actual), model(x, expected, expected), atol=1e-5, rtol=1e-5)
    with pytest.raises(moefx.NoMoEBlockFound, match="cache and other are the same object"):
        moefx.compile(model, example_inputs=(draw_hidden(), cache, cache))


class ReadsCache(Layer):
    def forward(self, x, cache):
        return super().forward(x + len(cache.keys), cache)


class HidesRead(Layer):
    def forward(self, x, cache):
        try:
            count = len(cache.keys)
        except Exception:
            count = 0
        return super().forward(x + count, cache)


class ReadsAttribute(Layer):
    def forward(self, x, cache):
        return super().forward(x, cache) * self.attn.calls


class Counts(Attention):
    calls = 0

    def forward(self, x, cache=None, mask=None):
        self.calls = self.calls + 1
        return super().forward(x, cache)


class InPlace(Attention):
    def forward(self, x, cache=None, mask=None):
        return x.mul_(0.5) + super().forward(x, cache)


class GivesBack(Attention):
    def forward(self, x, cache=None, mask=None):
        super().forward(x, cache)
        return x[:, :]


class UsesWeights(Layer):
    def forward(self, x, cache):
        y, weights, *_ = self.attn(self.norm1(x), cache)
        return self.mix(x + y * weights.sum())


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x, cache):
        cache.updates += 1
        return self.down(self.up(x).relu())


class GivesExperts(Layer):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(5))

    def forward(self, x, cache):
        rows = self.norm2(x).reshape(-1, DIM)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out[token] += expert(rows[token], cache) * weights[token, slot, None]
        return x + out.view_as(x)


class ReadsType(Layer):
    def forward(self, x, cache):
        return super().forward(x, cache) * (2 if type(cache) is Cache else 1)


class Asks(Layer):
    """Read a property of the cache, of its items, or of a result of the attention."""

    def __init__(self, question, attention=None):
        super().__init__(attention or WithWeights())
        self.question, self.cache = question, Cache()

    def forward(self, x, cache):
        y, weights, *_ = self.attn(self.norm1(x), cache)
        return self.mix(x + y) * (2 if self.question(self, y, weights, cache) else 1)


def is_same(one, other):
    return one is other


def reads_hidden(y):
    try:
        return y.aux
    except Exception:
        return None


class Helper:
    def has(self, cache, other):
        return cache is other


HELPER = Helper()


class ReturnsTuple(Attention):
    """Return the result after `change`."""

    change = None

    def forward(self, x, cache=None, mask=None):
        y = super().forward(x, cache)
        return y if self.change is None else self.change(y), None


def return_aux(y):
    y.aux = y.sum()
    return y


def transpose(y):
    return y.mT.contiguous().mT


class AsksStrides(Layer):
    def forward(self, x, cache):
        y, _ = self.attn(self.norm1(x), cache)
        return self.mix(x + y) * (1 if y.is_contiguous() else 2)


def test_raises_if_a_result_is_not_contiguous():
    torch.manual_seed(0)
    model = AsksStrides(ReturnsTuple())
    compiled = moefx.compile(model, example_inputs=(draw_hidden(), Cache()))
    check_decoding(model, compiled, Cache, steps=1)
    compiled.attn.change = transpose
    with pytest.raises(moefx.MoefxError, match=r"attn returned a tensor of strides .* let attn return y\.contiguous"):
        compiled(draw_hidden(), Cache())
    with pytest.raises(moefx.NoMoEBlockFound, match=r"(?s)returns no contiguous tensor .* strides .*y\.contiguous\(\)"):
        moefx.compile(compiled, example_inputs=(draw_hidden(), Cache()))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("validation", ["auto", "symbolic"])
@pytest.mark.parametrize(
    "question, reason",
    [
        (lambda m, y, w, c: isinstance(c, Cache), r"the block itself reads cache by isinstance"),
        (lambda m, y, w, c: isinstance(c, Sized), r"the block itself reads cache by isinstance"),
        (lambda m, y, w, c: isinstance(w, torch.Tensor), r"the block reads result 1 of attn, .* by isinstance"),
        (lambda m, y, w, c: bool(c), r"the block itself reads cache by __bool__"),
        (lambda m, y, w, c: c in [m.cache], r"the block itself reads cache by __eq__"),
        (lambda m, y, w, c: hash(c) > 0, r"the block itself reads cache by __hash__"),
        (lambda m, y, w, c: copy.copy(c) is None, r"the block itself reads cache by copying it"),
        (lambda m, y, w, c: callable(c), r"asks for `callable` of a variable.*:\d+"),
        (lambda m, y, w, c: id(c) > 0, r"asks for `id` of a variable"),
        (lambda m, y, w, c: c is m.cache, r"asks whether a variable is another one.*:\d+.*with None alone"),
        (lambda m, y, w, c: is_same(m.cache, c), r"is_same asks whether a variable is another one"),
        (lambda m, y, w, c: HELPER.has(c, m.cache), r"Helper.has asks whether a variable is another one"),
        (lambda m, y, w, c: hasattr(y, "aux"), r"the block reads the attribute aux of a tensor .*return it beside"),
        (lambda m, y, w, c: reads_hidden(y), r"the block reads the attribute aux of a tensor"),
    ],
)
def test_refuses_tests_of_the_cache(question, reason, validation):
    with pytest.raises(moefx.NoMoEBlockFound, match=f"(?s){reason}"):
        plan = moefx.Plan(validation=validation)
        moefx.compile(Asks(question), example_inputs=(draw_hidden(), Cache()), plan=plan)


class HandsOn(Layer):
    def __init__(self):
        attention = ReturnsTuple()
        attention.change = return_aux
        super().__init__(attention)
        self.last = Last()

    def forward(self, x, cache):
        y, _ = self.attn(self.norm1(x), cache)
        return self.mix(x + self.last(y, cache))


class Last(nn.Module):
    def forward(self, y, cache):
        return y * y.aux


def test_hands_attributes_of_results_on():
    torch.manual_seed(0)
    model = HandsOn()
    check_decoding(model, moefx.compile(model, example_inputs=(draw_hidden(), Cache())), Cache, steps=2)


class WithoutGrad(Layer):
    def forward(self, x, cache):
        with torch.no_grad():
            y = self.attn(self.norm1(x), cache)
        return self.mix(x + y)


class PassesDict(Layer):
    def forward(self, x, cache):
        inputs = {"x": self.norm1(x)}
        return self.mix(inputs["x"] + self.attn(inputs, cache))


class ReplacesItem(Attention):
    def forward(self, inputs, cache=None, mask=None):
        inputs["x"] = inputs["x"] * 2
        return super().forward(inputs["x"], cache)


class UsesNumpy(Attention):
    def forward(self, x, cache=None, mask=None):
        return super().forward(x * float(x.detach().numpy().mean() < 9), cache)


class AddsInPlace(Layer):
    def forward(self, x, cache):
        y = self.attn(self.norm1(x), cache)
        y += x
        return self.mix(y)


class Keeps(Attention):
    def forward(self, x, cache=None, mask=None):
        cache.last = super().forward(x, cache)
        return cache.last


class Writes(Attention):
    """Write to an object that the layer reads."""

    def __init__(self, write, **kwargs):
        super().__init__()
        self.write = write
        self.own = []
        vars(self).update(kwargs)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, cache=None, mask=None):
        self.write(self, x.shape[1])
        return super().forward(x, cache)


class Config:
    tokens = 1


class ReadsWhatIsWritten(Layer):
    def __init__(self, read, write, **kwargs):
        super().__init__(Writes(write, **kwargs))
        self.read = read
        vars(self).update(kwargs)

    def forward(self, x, cache):
        y = super().forward(x, cache)
        return y * (1 + self.read(self))


def _make_reader(read, write, **kwargs):
    return lambda: ReadsWhatIsWritten(read, write, **copy.deepcopy(kwargs))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "make, reason",
    [
        (
            _make_reader(lambda m: m.config.tokens, lambda m, n: setattr(m.config, "tokens", n), config=Config()),
            r"attn .* writes to config; keep it in the object",
        ),
        (_make_reader(lambda m: len(m.seen), lambda m, n: m.seen.append(n), seen=[]), r"attn .* writes to seen"),
        (
            _make_reader(lambda m: m.attn.count, lambda m, n: setattr(m, "count", m.count + n)),
            r"replaces its buffer count by another tensor; write to the buffer in place",
        ),
        (
            lambda: PassesDict(ReplacesItem()),
            r"a dict that the block itself did not get, .* tensors and numbers",
        ),
        (lambda: AddsInPlace(Keeps()), r"the block writes in place to a tensor .* y = y \+ x, not y \+= x"),
        (lambda: AddsInPlace(Attention()), r"the block writes in place to a tensor .* y = y \+ x, not y \+= x"),
        (
            lambda: Layer(UsesNumpy()),
            r"attn .* does not run on abstract tensors, so its writes are unknown",
        ),
        (WithoutGrad, r"attn .* is called under no_grad .*put no_grad into the forward of attn"),
        (ReadsType, r"ReadsType\.forward asks for `type` of a variable.*:\d+.*ask the rest in the submodule"),
        (_make_reader(lambda m: m.attn._n, lambda m, n: setattr(m, "_n", n), _n=1), r"reads attn\._n, which attn sets"),
        (_make_reader(lambda m: len(m.attn.own), lambda m, n: m.own.append(n)), r"reads attn\.own, which attn sets"),
        (ReadsCache, r"the block itself reads cache\.keys.*test_passed_objects\.py:\d+.*read it in the submodule"),
        (HidesRead, r"the block itself reads cache\.keys"),
        (lambda: ReadsAttribute(Counts()), r"reads attn\.calls, which attn sets.*return the value from attn"),
        (lambda: Layer(InPlace()), r"attn gets an object .* and writes to one of its inputs in place"),
        (lambda: Layer(GivesBack()), r"attn gets an object .* and returns one of its inputs, or a view"),
        (lambda: UsesWeights(WithWeights()), r"the block reads result 1 of attn, .*compute with it in attn"),
        (GivesExperts, r"writes to an argument"),
    ],
)
def test_refuses_reads_of_the_caches_state(make, reason):
    with pytest.raises(moefx.NoMoEBlockFound, match=f"(?s){reason}"):
        moefx.compile(make(), example_inputs=(draw_hidden(), Cache()))


class CopiesCache(Layer):
    def forward(self, x, cache):
        actual = copy.copy(cache)
        return super().forward(x, actual), actual


def test_refuses_a_copied_cache():
    with pytest.raises(moefx.NoMoEBlockFound, match=r"a tensor of .* comes from another call, or a submodule"):
        moefx.compile(CopiesCache(), example_inputs=(draw_hidden(), DictCache()))


class Halving(Layer):
    """Layer that writes to its only tensor."""

    def forward(self, x, cache=None, mask=None):
        x *= 0.5
        return super().forward(x, cache, mask)


def test_a_traced_call_counts_tensors_without_passed_objects():
    """Dynamo does not show shared memory, which matters only if two arguments are tensors."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    layer, x = Halving(), torch.randn(2, 4, DIM)
    compiled = moefx.compile(layer, (x.clone(), LibraryCache()), plan=moefx.Plan(validation="symbolic"))
    out = torch.compile(compiled, backend=backend)(x.clone(), LibraryCache())
    torch.testing.assert_close(out, layer(x.clone(), LibraryCache()))
    assert any("moefx" in code for code in graphs)
