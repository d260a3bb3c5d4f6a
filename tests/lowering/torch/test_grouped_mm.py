"""Provider "grouped_mm". torch has a grouped GEMM for the CPU too: slow, but enough to test the algebra."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.ir import op_providers
from moefx.ir.ops import dialect
from moefx.ir.ops.op_definition import registry
from moefx.lowering.torch import grouped_mm
from tests.ir.routings import LAYERS, draw_routing, routings, swiglu_list

OPS = ["grouped_mm", "grouped_mm_backward", "expert_rows_backward", "expert_mlp", "expert_mlp_backward"]


@contextlib.contextmanager
def use_provider(provider: str = "grouped_mm"):
    with contextlib.ExitStack() as stack:
        for op in OPS:
            if provider in registry[op].providers:
                stack.enter_context(op_providers.force(op, provider))
        yield


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@settings(max_examples=20, deadline=None)
@given(
    routing=routings(max_tokens=8, max_experts=4),
    keep=st.sampled_from(["h", "x", "all"]),
    reduce=st.booleans(),
)
def test_grouped_products_equal_segments(make, routing, keep, reduce):
    if routing.topk_ids.numel() == 0:
        return  # not supported, see below
    torch.manual_seed(0)
    layer = make(routing.num_experts, 8, 8, torch.float32)
    x = torch.randn(routing.topk_ids.shape[0], 8, requires_grad=True)
    weights = routing.topk_weights.float().requires_grad_()
    leaves = [x, weights, *layer.parameters]

    def run():
        out = layer.fused(x, routing, weights, keep, reduce)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = run()
    op_providers.reset_counters()
    with use_provider():
        got = run()
    counted = op_providers.counters()
    assert counted["expert_mlp", "grouped_mm"] == counted["expert_mlp_backward", "grouped_mm"] == 1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_unfused_products_equal_the_reference():
    routing = draw_routing(7, 2, 4, torch.float32)
    _, _, offsets, _, _ = routing.build()
    rows = torch.randn(14, 8, requires_grad=True)
    w = [torch.randn(16, 8, requires_grad=True) for _ in range(4)]
    v = torch.randn(4, 16, requires_grad=True)

    def run():
        out = dialect.grouped_mm(rows, w, offsets, transposed=True) * dialect.expert_rows([v], offsets, 14)
        return [out, *torch.autograd.grad(out.sum(), [rows, *w, v])]

    expected = run()
    with use_provider():
        got = run()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_is_not_chosen_on_the_cpu(dtype):
    layer, routing = swiglu_list(2, 8, 8, dtype), draw_routing(4, 2, 2, dtype)
    op_providers.reset_counters()
    layer.fused(torch.randn(4, 8).to(dtype), routing, routing.topk_weights)
    assert op_providers.counters()["expert_mlp", "segments"] == 1


def test_layouts_that_torch_can_read_are_recognised():
    w = torch.empty(4, 16, 24, dtype=torch.bfloat16)
    assert grouped_mm._is_readable(w)
    assert grouped_mm._is_readable(w.transpose(1, 2))
    assert grouped_mm._is_readable(w[:, :, :8])
    assert not grouped_mm._is_readable(w[:, :, 1:9])  # starts off a 16-byte boundary
    assert not grouped_mm._is_readable(w[:, ::2, ::2])  # no dimension of stride one
    assert not grouped_mm._is_readable(torch.empty(4, 16, 20, dtype=torch.bfloat16))  # rows of 40 bytes
    assert grouped_mm._is_readable(torch.empty(24, 4, 16, dtype=torch.bfloat16).permute(1, 2, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    @pytest.fixture(params=["grouped_mm", "triton"])
    def provider(self, request):
        if request.param == "grouped_mm" and torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("no fused grouped GEMM")
        with use_provider(request.param):
            yield request.param

    @pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
    @pytest.mark.parametrize("ids", [None, [[0, 2]] * 9, [[1, -1]] * 9])
    @pytest.mark.parametrize("reduce", [False, True])
    def test_bfloat16_without_a_host_sync(self, make, ids, reduce, provider):
        if provider == "triton" and make is LAYERS["nonlinear_out"]:
            pytest.skip("not linear in y")
        torch.manual_seed(0)
        routing = draw_routing(9, 2, 4, torch.float32)
        ids = routing.topk_ids if ids is None else torch.tensor(ids)
        routing = type(routing)(ids.cuda(), routing.topk_weights.cuda(), 4)
        with torch.device("cuda"):
            layer = make(4, 16, 8, torch.bfloat16)
            exact = make(4, 16, 8, torch.float64)
            x = torch.randn(9, 16, dtype=torch.bfloat16, requires_grad=True)
        for e, p in zip(exact.parameters, layer.parameters, strict=True):
            e.data.copy_(p)
        weights = routing.topk_weights.requires_grad_()
        layer.fused(x, routing, weights, reduce=reduce).sum().backward()  # traces and compiles, with syncs
        leaves = [x, weights, *layer.parameters]
        op_providers.reset_counters()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = layer.fused(x, routing, weights, reduce=reduce)
            grads = torch.autograd.grad(out.float().square().sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert op_providers.counters()["expert_mlp", provider] == 1
        assert op_providers.counters()["expert_mlp_backward", provider] == 1
        exact_leaves = [x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()]
        with use_provider("segments"):
            reference = exact.fused(exact_leaves[0], routing, exact_leaves[1])
            expected = torch.autograd.grad(reference.square().sum(), [*exact_leaves, *exact.parameters])
        for got, want in zip([out, *grads], [reference, *expected], strict=True):
            assert torch.isfinite(got).all()
            assert (got.double() - want).abs().max() <= 0.04 * want.abs().max()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
    def test_other_dtypes(self, make, dtype):
        """Use Triton, except for float64 and outputs that are not linear in y."""
        provider = "segments" if dtype is torch.float64 or make is LAYERS["nonlinear_out"] else "triton"
        torch.manual_seed(0)
        routing = draw_routing(9, 2, 4, dtype)
        layer = make(4, 16, 8, dtype)
        x = torch.randn(9, 16).to(dtype)
        expected = layer.fused(x, routing, routing.topk_weights)
        grads = torch.autograd.grad(expected.sum(), layer.parameters)
        cuda = type(routing)(routing.topk_ids.cuda(), routing.topk_weights.cuda(), 4)
        on_gpu = make(4, 16, 8, dtype)
        for name in ("up", "up_bias", "down", "down_bias"):
            setattr(on_gpu, name, [p.detach().cuda().requires_grad_() for p in getattr(layer, name)])
        op_providers.reset_counters()
        out = on_gpu.fused(x.cuda(), cuda, cuda.topk_weights)
        assert op_providers.counters()["expert_mlp", provider] == 1
        tolerance = 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
        got = torch.autograd.grad(out.sum(), on_gpu.parameters)
        torch.testing.assert_close([g.cpu() for g in got], list(grads), rtol=tolerance, atol=tolerance * 10)

    def test_the_tail_is_never_read(self, provider):
        torch.manual_seed(0)
        ids = torch.randint(-1, 5, (40, 3)).cuda()
        with torch.device("cuda"):
            layer = LAYERS["interleaved_clamped"](4, 16, 8, torch.bfloat16)
            x, weights = torch.randn(40, 16, dtype=torch.bfloat16), torch.rand(40, 3)
        token_ids, _, offsets, inverse, w = dialect.build_pft(ids, weights, None, num_experts=4)
        parameters = [[p.detach() for p in group] for group in (layer.up, layer.up_bias, layer.down, layer.down_bias)]
        tail = torch.arange(120, device="cuda") >= offsets[-1]

        def run(fill):
            def put(t):
                return t.masked_fill(tail.view(-1, *[1] * (t.dim() - 1)), fill)

            forward = (x, token_ids, offsets, inverse, put(w), *parameters)
            rows, *kept = dialect.expert_mlp(*forward, body=layer.text, keep="all")
            grad = put(torch.linspace(-1, 1, rows.numel(), device="cuda").view(rows.shape).to(rows.dtype))
            back = dialect.expert_mlp_backward(
                grad, *forward, [put(k) for k in kept], body=layer.text, keep="all", needs=[True] * 6
            )
            return [dialect.combine(put(rows), None, token_ids, offsets, inverse), *back]

        op_providers.reset_counters()
        clean, poisoned = run(0.0), run(float("nan"))
        assert op_providers.counters()["expert_mlp_backward", provider] == 2
        for a, b in zip(clean, poisoned, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("reduce", [False, True])
    def test_is_bitwise_repeatable(self, dtype, reduce, provider):
        if provider == "grouped_mm" and dtype is torch.float32:
            pytest.skip("bfloat16 only")
        with torch.device("cuda"):
            layer = swiglu_list(8, 64, 64, dtype)
            x = torch.randn(500, 64, dtype=dtype, requires_grad=True)
        routing = draw_routing(500, 2, 8, torch.float32)
        routing = type(routing)(routing.topk_ids.cuda(), routing.topk_weights.cuda().requires_grad_(), 8)
        leaves = [x, routing.topk_weights, *layer.parameters]

        def run():
            out = layer.fused(x, routing, routing.topk_weights, reduce=reduce)
            return [out, *torch.autograd.grad(out.float().sum(), leaves)]

        first = run()
        assert all(map(torch.equal, first, run()))
