"""`expert_mlp` equals plain experts in results, gradients, kept tensors, and deferred gradients of weights."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from moefx.errors import DoubleBackward, InvalidInput
from moefx.ir import op_providers
from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.ir.ops import dialect
from moefx.lowering.torch import segments

from .routings import LAYERS, Layer, Routing, draw_routing, routings, swiglu_list

KEEPS = ["h", "x", "all", "none"]


@contextlib.contextmanager
def force_provider(provider: str) -> Iterator[str]:
    """Force a provider of `expert_mlp` and its backward. "padded": "segments" with padding rows."""
    before = segments.choose_padding
    if provider == "padded":
        provider, segments.choose_padding = "segments", lambda num_rows, *_: num_rows % 4
    try:
        with op_providers.force("expert_mlp", provider), op_providers.force("expert_mlp_backward", provider):
            yield provider
    finally:
        segments.choose_padding = before


def run(layer: Layer, routing: Routing, x: Tensor, weights: Tensor, keep: str = "h") -> tuple[Tensor, ...]:
    token_ids, _, offsets, inverse, row_weights = routing.build(weights)
    parameters = (layer.up, layer.up_bias, layer.down, layer.down_bias)
    arguments = (x, token_ids, offsets, inverse, row_weights, *parameters)
    return tuple(dialect.expert_mlp(*arguments, body=layer.body.to_json(), keep=keep))


def check_against_plain(layer: Layer, routing: Routing, keep: str, d: int, **options: bool) -> None:
    x = torch.randn(routing.topk_ids.shape[0], d, dtype=torch.float64, requires_grad=True)
    weights = routing.topk_weights.clone().requires_grad_()
    leaves = [x, weights, *layer.parameters]
    expected, got = layer.plain(x, routing, weights), layer.fused(x, routing, weights, keep, **options)
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(expected)
    wanted = (
        torch.autograd.grad(expected, leaves, grad, allow_unused=True)
        if expected.requires_grad
        else [None] * len(leaves)
    )
    for leaf, g, e in zip(leaves, torch.autograd.grad(got, leaves, grad), wanted, strict=True):
        torch.testing.assert_close(g, torch.zeros_like(leaf) if e is None else e)  # zero for experts without tokens


@pytest.mark.parametrize("provider", ["segments", "padded", "reference"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@settings(max_examples=25, deadline=None)
@given(
    routing=routings(max_tokens=8, max_experts=5), keep=st.sampled_from(KEEPS), reduce=st.booleans(),
    later=st.booleans(),
)  # fmt: skip
def test_equals_the_plain_experts_forward_and_backward(make, provider, routing, keep, reduce, later):
    op_providers.reset_counters()
    with force_provider(provider) as provider:
        check_against_plain(make(routing.num_experts, 4, 3), routing, keep, 4, reduce=reduce, later=later)
    assert op_providers.counters()["expert_mlp", provider] == 1
    assert op_providers.counters()["expert_mlp_backward", provider] == 1 + later


@pytest.mark.parametrize("provider", ["segments", "padded", "grouped_mm", "reference"])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("out", [("mul.Tensor", "y", "w"), ("mul.Tensor", ("tanh", "y"), "w")], ids=["linear", "tanh"])
def test_biases_that_are_added_in_another_dtype(provider, keep, reduce, out):
    """Add biases in a wider dtype than that of the products, like `x @ w + bias` under autocast."""
    torch.manual_seed(0)
    num_experts, d, h = 3, 8, 16
    gemm = Gemm(1, False, bias=True, bias_dtype="float64")
    act = ("tanh", ("sub.Tensor", "a0", 4096.0))  # rounding the sum to float32 would lose it
    body = ExpertBody((gemm,), ((0, None, None, 1),), act, gemm, out).to_json()
    up, down = (torch.randn(num_experts, *shape, requires_grad=True) for shape in ((d, h), (h, d)))
    biases = [4096 + torch.randn(num_experts, n, dtype=torch.float64) for n in (h, d)]
    up_bias, down_bias = (b.requires_grad_() for b in biases)
    routing = draw_routing(9, 2, num_experts)
    x, weights = torch.randn(9, d, requires_grad=True), routing.topk_weights.requires_grad_()

    def plain() -> Tensor:
        result = torch.zeros(9, d, dtype=torch.float64)
        for e in range(num_experts):
            s, k = torch.where(routing.topk_ids == e)
            hidden = torch.tanh(x[s] @ up[e] + up_bias[e] - 4096)
            y = hidden.float() @ down[e] + down_bias[e]
            w = weights[s, k, None]
            result = result.index_add(0, s, (y if out[1] == "y" else y.tanh()) * w)
        return result

    def fused() -> Tensor:
        token_ids, _, offsets, inverse, w = routing.build(weights)
        groups = [up], [up_bias], [down], [down_bias]
        options = dict(body=body, keep=keep, reduce=reduce, dtype=torch.float32)
        rows, *kept = dialect.expert_mlp(x, token_ids, offsets, inverse, w, *groups, **options)
        assert all(t.dtype is torch.float32 for t in kept)
        return rows if reduce else dialect.combine(rows, None, token_ids, offsets, inverse)

    with force_provider(provider):
        got, expected = fused(), plain()
        assert got.dtype is expected.dtype
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-4)
        grad, leaves = torch.randn_like(expected), [x, weights, up, up_bias, down, down_bias]
        wanted = torch.autograd.grad(expected, leaves, grad)
        for g, e in zip(torch.autograd.grad(got, leaves, grad), wanted, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4, check_dtype=True)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_gradients_are_numerically_right(make):
    layer, routing = (
        make(3, 4, 2),
        Routing(torch.tensor([[0, 2], [2, 0], [0, -1]]), torch.rand(3, 2).double(), 3),
    )
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = routing.topk_weights.clone().requires_grad_()

    def f(x, weights, *_):
        return layer.fused(x, routing, weights)

    assert torch.autograd.gradcheck(f, (x, weights, *layer.parameters))


@pytest.mark.parametrize("provider", ["segments", "padded", "reference"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("reduce", [False, True])
def test_the_tail_is_never_read(make, provider, keep, reduce):
    """Leave rows after expert_offsets[E] unread and unchanged, in inputs and kept tensors."""
    layer = make(3, 4, 2)
    routing = Routing(torch.tensor([[0, 2], [2, -1], [3, 0]]), torch.rand(3, 2).double(), 3)
    x = torch.randn(3, 4, dtype=torch.float64)
    token_ids, _, offsets, inverse, row_weights = routing.build()
    parameters = [[p.detach() for p in group] for group in (layer.up, layer.up_bias, layer.down, layer.down_bias)]
    kwargs = {"body": layer.body.to_json(), "keep": keep, "reduce": reduce}

    def gradients(poison: Callable[[Tensor], Tensor]) -> list[Tensor]:
        row_weights_ = poison(row_weights)
        forward = (x, token_ids, offsets, inverse, row_weights_, *parameters)
        rows, *kept = dialect.expert_mlp(*forward, **kwargs)
        grad = torch.linspace(0, 1, rows.numel(), dtype=torch.float64).view(rows.shape)
        if not reduce:
            rows, grad = dialect.combine(poison(rows), None, token_ids, offsets, inverse), poison(grad)
        back = dialect.expert_mlp_backward(grad, *forward, list(map(poison, kept)), **kwargs, needs=[True] * 6)
        return [rows, *back]

    def with_nan(t: Tensor) -> Tensor:
        t = t.clone()
        t[int(offsets[-1]) :] = float("nan")
        return t

    with force_provider(provider):
        clean, poisoned = gradients(lambda t: t), gradients(with_nan)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)


def record_order(layer: Layer, routing: Routing, x: Tensor, order: list[str]) -> Tensor:
    """Record the order in which autograd reaches the ops before and after the experts."""

    def record(tensor: Tensor, name: str) -> Tensor:
        tensor = tensor.clone()
        tensor.register_hook(lambda _: order.append(name))
        return tensor

    for p in layer.parameters:
        p.register_hook(lambda _: order.append("weights"))
    early = record(x, "ahead")
    later = dialect.weights_later(layer.up, layer.down)
    late = record(early, "behind")
    token_ids, _, offsets, inverse, row_weights = routing.build()
    parameters = (layer.up, layer.up_bias, layer.down, layer.down_bias)
    arguments = (late, token_ids, offsets, inverse, row_weights, *parameters, later)
    return dialect.expert_mlp(*arguments, body=layer.text, reduce=True)[0]


def test_deferred_weight_gradients_are_computed_at_their_point():
    layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    out, order = record_order(layer, routing, x, names := []), names
    out.sum().backward(retain_graph=True)
    assert order == ["behind", *["weights"] * len(layer.parameters), "ahead"]
    first = [p.grad.clone() for p in (x, *layer.parameters)]
    out.sum().backward()
    for p, g in zip((x, *layer.parameters), first, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
    want = torch.autograd.grad(layer.fused(x, routing, routing.topk_weights, reduce=True).sum(), layer.parameters)
    torch.testing.assert_close(first[1:], list(want))


def test_deferred_weight_gradients_that_are_not_needed():
    layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(layer.fused(x, routing, routing.topk_weights).sum(), [x, *layer.parameters])
    (got,) = torch.autograd.grad(layer.fused(x, routing, routing.topk_weights, later=True).sum(), x)
    torch.testing.assert_close(got, want[0])
    for p in layer.up:  # frozen, unlike the others
        p.requires_grad_(False)
    out = layer.fused(x, routing, routing.topk_weights, later=True)
    got = torch.autograd.grad(out.sum(), [x, *layer.down])
    torch.testing.assert_close(list(got), [want[0], *want[1 + len(layer.up) :]])
    for p in layer.down:
        p.requires_grad_(False)
    (got,) = torch.autograd.grad(layer.fused(x, routing, routing.topk_weights, later=True).sum(), x)
    torch.testing.assert_close(got, want[0])


def test_deferred_weight_gradients_survive_recomputation_and_aot():
    layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return layer.fused(x, routing, routing.topk_weights, later=True).sum()

    want = torch.autograd.grad(layer.fused(x, routing, routing.topk_weights).sum(), [x, *layer.parameters])
    for again in (lambda x: checkpoint(loss, x, use_reentrant=False), torch.compile(loss, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(again(x), [x, *layer.parameters]), want)


def test_only_needed_gradients_are_computed():
    layer, routing = LAYERS["interleaved_clamped"](3, 4, 2), draw_routing(5, 2, 3)
    x, weights = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), routing.topk_weights
    reference = torch.autograd.grad(layer.fused(x, routing, weights).sum(), x)
    for p in layer.parameters:
        p.requires_grad_(False)
    out = layer.fused(x, routing, weights)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), reference)
    layer.down[0].requires_grad_()
    out = layer.fused(x.detach(), routing, weights)
    (grad,) = torch.autograd.grad(out.sum(), layer.down)
    assert grad.shape == layer.down[0].shape
    assert layer.up[0].grad is None


def test_frozen_experts_among_separate_ones():
    layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
    layer.up[1].requires_grad_(False)
    layer.fused(torch.randn(5, 4).double(), routing, routing.topk_weights).sum().backward()
    assert layer.up[1].grad is None
    assert layer.up[0].grad is not None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_of_separate_parameters_are_never_copied(device):
    """Return gradients one by one where products run one by one, else as slices of one stack per product."""
    layer, routing = swiglu_list(4, 4, 2), draw_routing(6, 2, 4)
    for name in ("up", "down"):
        setattr(layer, name, [p.detach().to(device).requires_grad_() for p in getattr(layer, name)])
    routing = Routing(routing.topk_ids.to(device), routing.topk_weights.to(device), 4)
    returned = []
    with CatchBackward(returned):
        layer.fused(torch.randn(6, 4).double().to(device), routing, routing.topk_weights).sum().backward()
    gradients = [p.grad for p in layer.parameters]
    if device == "cpu":
        assert [g.data_ptr() for g in gradients] == [pointer for pointer, _ in returned]
    else:
        assert [shape for _, shape in returned] == [(4, 2, 4), (4, 2, 4), (4, 4, 2)]
        assert [g.shape for g in gradients] == [p.shape for p in layer.parameters]


class CatchBackward(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, returned: list[tuple[int, tuple[int, ...]]]):
        super().__init__()
        self.returned = returned

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is dialect.expert_mlp_backward.overload:
            # Keep no tensors: a second reference would make autograd copy them.
            self.returned += [(0 if t.is_meta else t.data_ptr(), tuple(t.shape)) for t in out]
        return out


@pytest.mark.parametrize("which", ["up", "down"])
def test_an_in_place_update_before_the_backward_raises(which):
    layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
    out = layer.fused(torch.randn(5, 4).double(), routing, routing.topk_weights)
    with torch.no_grad():
        getattr(layer, which)[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_raises():
    layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer.fused(x, routing, routing.topk_weights).square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackward, match="moefx::expert_mlp is differentiable once"):
        grad.sum().backward()


# -- the checkpoint policy -----------------------------------------------------------------------------------


def count_saved_bytes(run: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    """Return the bytes of the unique storages that autograd keeps, without parameters."""
    ignored = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            storages[storage.data_ptr()] = (tensor, storage.nbytes())  # kept alive, so that addresses remain unique
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(size for _, size in storages.values())


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
@pytest.mark.parametrize("keep", ["h", "x", "all"])
@pytest.mark.parametrize("reduce", [False, True], ids=["rows", "reduce"])
def test_only_the_tensors_of_the_policy_are_kept(keep, stacked, gated, autocast, reduce):
    num_tokens, k, num_experts, d, h = 256, 4, 8, 64, 32
    dtype = torch.float32 if autocast else torch.bfloat16
    num_up = 2 if gated else 1

    def weights(*shape: int) -> list[Tensor]:
        if stacked:
            return [torch.randn(num_experts, *shape, dtype=dtype, requires_grad=True)]
        return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(num_experts)]

    up, down = [w for _ in range(num_up) for w in weights(h, d)], weights(d, h)
    gemm = Gemm(1 if stacked else num_experts, True)
    act = ("mul.Tensor", ("silu", "a0"), "a1") if gated else ("square", ("relu", "a0"))
    parts = tuple((g, None, None, 1) for g in range(num_up))
    body = ExpertBody((gemm,) * num_up, parts, act, gemm, ("mul.Tensor", "y", "w"))
    routing = draw_routing(num_tokens, k, num_experts)
    x = torch.randn(num_tokens, d, dtype=dtype, requires_grad=True)
    topk_weights = torch.rand(num_tokens, k, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            token_ids, _, offsets, inverse, row_weights = routing.build(topk_weights)
            index = (token_ids, offsets, inverse)
            out, *_ = dialect.expert_mlp(
                x, *index, row_weights, up, [], down, [], body=body.to_json(), keep=keep, reduce=reduce
            )
            return out if reduce else dialect.combine(out, None, *index)

    kept = {"h": 2 * num_up * k * h, "x": 0, "all": 2 * (num_up + 1) * k * h}[keep]
    per_token = count_saved_bytes(run, [*up, *down, topk_weights]) / num_tokens
    assert 2 * d + kept < per_token <= 2 * d + kept + 24 * k
    run().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is dtype


def test_the_policies_agree_bitwise():
    layer, routing = swiglu_list(4, 8, 6), draw_routing(9, 2, 4)
    x, grads = torch.randn(9, 8, dtype=torch.float64, requires_grad=True), []
    for keep in KEEPS:
        out = layer.fused(x, routing, routing.topk_weights, keep)
        grads.append(torch.autograd.grad(out.sum(), [x, *layer.parameters]))
    for other in grads[1:]:
        assert all(map(torch.equal, grads[0], other))


def test_kept_activations_are_freed_with_the_graph():
    layer, routing = swiglu_list(4, 8, 6), draw_routing(9, 2, 4)
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    rows, *kept = run(layer, routing, x, routing.topk_weights, "all")
    assert [tuple(t.shape) for t in kept] == [(18, 6)] * 3
    assert not any(t.requires_grad for t in kept)
    references = [torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in kept]
    del rows, kept
    gc.collect()
    assert all(r.expired() for r in references)


# -- around torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("reduce", [False, True])
def test_low_precision_is_as_good_as_torchs(make, dtype, reduce):
    torch.manual_seed(0)
    layer, routing = make(4, 16, 8), draw_routing(12, 2, 4)
    low = make(4, 16, 8, dtype)
    for low_parameter, exact in zip(low.parameters, layer.parameters, strict=True):
        with torch.no_grad():
            low_parameter.copy_(exact)
            exact.copy_(low_parameter)
    x = torch.randn(12, 16).to(dtype).requires_grad_()
    weights = routing.topk_weights.to(dtype).requires_grad_()
    exact_leaves = [
        x.detach().double().requires_grad_(),
        weights.detach().double().requires_grad_(),
        *layer.parameters,
    ]
    leaves = [x, weights, *low.parameters]
    grad = torch.randn(12, 16).to(dtype)
    exact = layer.plain(exact_leaves[0], routing, exact_leaves[1])
    exact_grads = torch.autograd.grad(exact, exact_leaves, grad.double())
    fused, plain = low.fused(x, routing, weights, reduce=reduce), low.plain(x, routing, weights)
    assert fused.dtype is dtype
    values = zip(
        (fused, *torch.autograd.grad(fused, leaves, grad)),
        (plain, *torch.autograd.grad(plain, leaves, grad)),
        (exact, *exact_grads),
        strict=True,
    )
    for got, original, truth in values:
        assert got.dtype is dtype
        error, reference = ((t.double() - truth).abs().max() for t in (got, original))
        assert error <= 3 * reference + torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_autocast_multiplies_in_its_dtype(make):
    """Run float32 tensors under autocast: GEMMs in bfloat16 like linear, gradients in float32."""
    layer, routing = make(4, 8, 6, torch.float32), draw_routing(10, 2, 4)
    low = make(4, 8, 6, torch.bfloat16)
    for low_parameter, exact in zip(low.parameters, layer.parameters, strict=True):
        with torch.no_grad():
            low_parameter.copy_(exact)
    x = torch.randn(10, 8, requires_grad=True)
    weights = routing.topk_weights.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        rows, hidden, *_ = run(layer, routing, x, weights)
        out = layer.fused(x, routing, weights)
    assert hidden.dtype is torch.bfloat16
    low_x = x.detach().bfloat16().requires_grad_()
    low_rows = run(low, routing, low_x, weights)[0]  # the weights are float32 in both
    torch.testing.assert_close(rows, low_rows)
    leaves = [x, weights, *layer.parameters]
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert all(g.dtype is torch.float32 for g in grads)
    token_ids, _, offsets, inverse, _ = routing.build()
    low_out = dialect.combine(low_rows, None, token_ids, offsets, inverse)
    low_grads = torch.autograd.grad(low_out.float().sum(), [low_x, weights, *low.parameters])
    for got, expected in zip(grads, low_grads, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=0.02, atol=0.02)


def test_mixed_dtypes_are_an_error_outside_autocast():
    layer, routing = swiglu_list(2, 4, 2, torch.float32), draw_routing(4, 2, 2)
    with pytest.raises(InvalidInput, match=r"rows are torch.bfloat16, expert parameters are torch.float32"):
        layer.fused(torch.randn(4, 4).bfloat16(), routing, routing.topk_weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": "everything"}, r"keep='everything', expected one of 'h', 'x', 'all', 'none'"),
        ({"up": 1}, r"up has 1 tensors, the body takes \[2, 2\]"),
        ({"bias": 1}, r"up_bias has 1 tensors, the body takes \[0, 0\]"),
        ({"weights": None}, r"uses the routing weight w, but row_weights is None"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    layer, routing = swiglu_list(2, 4, 2), draw_routing(4, 2, 2)
    token_ids, _, offsets, inverse, row_weights = routing.build()
    up = layer.up[: change.get("up", 4)]
    bias = [torch.zeros(2, 2).double()] * change.get("bias", 0)
    weights = change.get("weights", row_weights)
    with pytest.raises(InvalidInput, match=message):
        dialect.expert_mlp(
            *(torch.randn(4, 4).double(), token_ids, offsets, inverse, weights, up, bias, layer.down, []),
            body=layer.body.to_json(),
            keep=change.get("keep", "h"),
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_as_one_graph_for_any_routing_and_size(backend, autocast):
    torch._dynamo.reset()
    layer = swiglu_list(4, 8, 6, torch.float32)

    def f(x, topk_ids, weights):
        routing = Routing(topk_ids, weights, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layer.fused(x, routing, weights, reduce=autocast)

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    for num_tokens in (7, 11, 17):  # unlike any other size, which torch would equate
        routing = draw_routing(num_tokens, 2, 4, torch.float32)
        x, weights = torch.randn(num_tokens, 8, requires_grad=True), routing.topk_weights.requires_grad_()
        leaves = [x, weights, *layer.parameters]
        expected, got = f(x, routing.topk_ids, weights), compiled(x, routing.topk_ids, weights)
        torch.testing.assert_close(got, expected)
        grads, wanted = (torch.autograd.grad(o.float().square().sum(), leaves) for o in (got, expected))
        torch.testing.assert_close(grads, wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_zero_tokens_and_one(make, num_tokens):
    layer, routing = make(3, 4, 2), draw_routing(num_tokens, 3, 3)  # K = E
    for keep in KEEPS:
        for reduce, later in itertools.product((False, True), repeat=2):
            check_against_plain(layer, routing, keep, 4, reduce=reduce, later=later)


def test_non_contiguous_inputs_and_weights():
    layer, routing = LAYERS["interleaved_clamped"](3, 4, 2), draw_routing(6, 2, 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = layer.fused(x, routing, routing.topk_weights)
    layer.up = [layer.up[0].detach().permute(2, 0, 1).contiguous().permute(1, 2, 0)]
    layer.down = [layer.down[0].detach().repeat(1, 1, 2)[..., ::1][..., :4]]
    torch.testing.assert_close(layer.fused(x.t().contiguous().t(), routing, routing.topk_weights), expected)


def test_checkpoint_and_inference_mode():
    layer, routing = swiglu_list(3, 4, 2), draw_routing(6, 2, 3)
    x, weights = (
        torch.randn(6, 4, dtype=torch.float64, requires_grad=True),
        routing.topk_weights.requires_grad_(),
    )
    leaves = [x, weights, *layer.parameters]
    expected = layer.fused(x, routing, weights)
    again = checkpoint(layer.fused, x, routing, weights, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), leaves), torch.autograd.grad(expected.sum(), leaves))
    with torch.inference_mode():
        assert torch.equal(layer.fused(x, routing, weights, "none"), expected)


def test_fake_outputs_follow_the_policy_and_the_promotion():
    layer, routing = swiglu_list(3, 4, 2, torch.bfloat16), draw_routing(6, 2, 3, torch.float32)
    real = {k: run(layer, routing, torch.randn(6, 4).bfloat16(), routing.topk_weights, k) for k in KEEPS}
    layer.up, layer.down = ([p.to("meta") for p in ps] for ps in (layer.up, layer.down))
    routing = Routing(routing.topk_ids.to("meta"), routing.topk_weights.to("meta"), 3)
    for keep in KEEPS:
        fake = run(layer, routing, torch.empty(6, 4, dtype=torch.bfloat16, device="meta"), routing.topk_weights, keep)
        assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real[keep]]
    assert real["h"][0].dtype is torch.float32  # bfloat16 y times float32 w


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("keep", "reduce"), [("h", False), ("h", True), ("x", True), ("all", False)])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_the_op_passes_opcheck(make, keep, reduce):
    layer, routing = (
        make(3, 4, 2, torch.float32),
        Routing(torch.tensor([[0, 2], [2, 1], [0, 1]]), torch.rand(3, 2), 3),
    )
    token_ids, _, offsets, inverse, weights = routing.build()
    x = torch.randn(3, 4, requires_grad=True)
    parameters = (layer.up, layer.up_bias, layer.down, layer.down_bias)
    arguments = (x, token_ids, offsets, inverse, weights.requires_grad_(), *parameters)
    kwargs = {"body": layer.body.to_json(), "keep": keep, "reduce": reduce}
    opcheck(dialect.expert_mlp.overload, arguments, kwargs)
    rows, *kept = dialect.expert_mlp(*arguments, **kwargs)
    detached = [[p.detach() for p in group] for group in parameters]
    arguments = (
        x.detach(),
        token_ids,
        offsets,
        inverse,
        weights.detach(),
        *detached,
        [k.detach() for k in kept],
    )
    grad, backward = torch.randn_like(rows), dialect.expert_mlp_backward
    opcheck(backward.overload, (grad, *arguments), {**kwargs, "needs": [True] * 6})
    of_rows = {**kwargs, "needs": [True, True, False, False, False, False], "part": "rows"}
    opcheck(backward.overload, (grad, *arguments), of_rows)
    sides = backward(grad, *arguments, **of_rows)[2:]
    of_weights = {**kwargs, "needs": [False, False, True, False, True, False], "part": "weights"}
    opcheck(backward.overload, (grad, *arguments[:-1], sides), of_weights)


class TestWhatIsKeptMayBeOverwritten:
    """Kept tensors are overwritten only by an eager backward that frees its graph."""

    @pytest.fixture
    def calls(self, monkeypatch):
        """Record the argument `overwrite` of each backward."""
        op, calls = dialect.expert_mlp_backward, []
        for name, provider in op.providers.items():

            def run(*args, _run=provider.run, overwrite=False, **kwargs):
                calls.append(overwrite)
                return _run(*args, **kwargs)

            monkeypatch.setitem(op.providers, name, dataclasses.replace(provider, run=run))
        return calls

    @pytest.fixture
    def loss(self):
        layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
        self.leaves = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True), *layer.parameters]
        return lambda keep="h": layer.fused(self.leaves[0], routing, routing.topk_weights, keep).square().sum()

    def test_saved_activations_are_freed_with_the_graph(self, calls, loss):
        loss().backward()
        torch.autograd.grad(loss("all"), self.leaves)
        assert calls == [True, True]

    def test_activations_are_kept_if_the_graph_is_retained(self, calls, loss):
        out = loss()
        first = torch.autograd.grad(out, self.leaves, retain_graph=True)
        second = torch.autograd.grad(out, self.leaves[:1], create_graph=True)
        assert calls == [False, False]
        third = torch.autograd.grad(out, self.leaves)
        assert calls == [False, False, True]
        assert all(map(torch.equal, first, third)) and torch.equal(first[0], second[0])

    def test_nothing_is_freed_if_nothing_is_kept(self, calls, loss):
        loss("x").backward()
        assert calls == [False]

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiled_graphs_free_nothing(self, calls, loss, backend):
        torch.compile(loss, backend=backend, fullgraph=True)().backward()
        assert calls == [backend == "eager"]  # torch itself runs the backward

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_freed_activations_under_checkpointing(self, calls, loss, use_reentrant):
        wanted = torch.autograd.grad(loss(), self.leaves)
        out = checkpoint(lambda x: loss(), self.leaves[0], use_reentrant=use_reentrant)
        out.backward()
        assert calls == [True, True]
        for leaf, want in zip(self.leaves, wanted, strict=True):
            assert leaf.grad is not None and torch.equal(leaf.grad, want)

    def test_freeing_a_tensor_that_another_op_saved_raises(self, loss):
        layer, routing = swiglu_list(3, 4, 2), draw_routing(5, 2, 3)
        x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        rows, hidden, *_ = run(layer, routing, x, routing.topk_weights)
        other = (hidden * x.sum()).sum()
        rows.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
