"""Warp-specialized kernels on GPUs that support them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moefx.lowering.triton import expert_mlp_call as run_module
from moefx.lowering.triton import expert_mlp_steps, warp_specialized

from ...ir.routings import Routing, draw_routing
from .layers import LINEAR, check
from .wide_layers import CONFIGS, GATHERED, NARROW, ROLES, make_halves, stack_parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="kernels for sm90"
    ),
]
SEPARATE = dict.fromkeys(CONFIGS, dataclasses.replace(ROLES, fused=False, gather_first=True))
POINT, PRODUCT = {"hopper_up_kernel", "hopper_act_backward_kernel"}, {"hopper_rows_kernel", "hopper_outer_kernel"}


LAYERS = LINEAR | {"halves": make_halves}


@pytest.fixture
def launched(monkeypatch):
    """Collect the names of launched kernels."""
    names: set[str] = set()
    stock = warp_specialized.launch

    def launch(kernel, *args, **options):
        names.add(kernel.__name__)
        return stock(kernel, *args, **options)

    monkeypatch.setattr(warp_specialized, "launch", launch)
    return names


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize(
    "dtype, keep, reduce", [(torch.bfloat16, "h", True), (torch.float16, "x", False)], ids=["bf16-h", "fp16-x"]
)
@pytest.mark.parametrize(
    "configs", [CONFIGS, NARROW, GATHERED, SEPARATE], ids=["fused", "narrow", "gathered", "separate"]
)
def test_outputs_and_gradients_equal_the_reference(monkeypatch, launched, make, dtype, keep, reduce, configs):
    monkeypatch.setattr(run_module, "choose_config", lambda kernel, *_: configs[kernel])
    routing = draw_routing(700, 3, 6)
    routing.topk_ids[routing.topk_ids == 3] = 1  # an expert without tokens
    check(make, "cuda", dtype, routing, 328, 264, stack_parameters, keep=keep, reduce=reduce)
    assert launched == (PRODUCT if configs is SEPARATE else PRODUCT | POINT)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("configs", [CONFIGS, NARROW, GATHERED], ids=["fused", "narrow", "gathered"])
def test_more_tiles_than_multiprocessors(monkeypatch, launched, make, configs):
    monkeypatch.setattr(run_module, "choose_config", lambda kernel, *_: configs[kernel])
    check(make, "cuda", torch.bfloat16, draw_routing(6000, 2, 12), 512, 768, stack_parameters, keep="h", reduce=True)
    assert launched == PRODUCT | POINT


def test_dropped_choices_launch_the_specialized_kernels(monkeypatch, launched):
    monkeypatch.setattr(run_module, "choose_config", lambda kernel, *_: CONFIGS[kernel])
    routing = draw_routing(300, 2, 4)
    routing = dataclasses.replace(routing, keep=torch.rand(300, 2) < 0.7)
    check(LINEAR["swiglu_list"], "cuda", torch.bfloat16, routing, 128, 256, stack_parameters, keep="h", reduce=True)
    assert launched == PRODUCT | POINT


def test_rows_behind_the_last_one_are_never_read(monkeypatch):
    monkeypatch.setattr(run_module, "choose_config", lambda kernel, *_: CONFIGS[kernel])
    layer = LINEAR["interleaved_clamped"](4, 256, 136, torch.bfloat16)
    for name in ("up", "up_bias", "down", "down_bias"):
        setattr(layer, name, [p.detach().cuda() for p in getattr(layer, name)])
    routing = Routing(torch.randint(-1, 5, (200, 3)).cuda(), torch.rand(200, 3).cuda(), 4)
    token_ids, _, offsets, inverse, w = routing.build()
    x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    tail = torch.arange(600, device="cuda") >= offsets[-1]

    def run(fill):
        def put(t):
            return t.masked_fill(tail.view(-1, *[1] * (t.dim() - 1)), fill)

        args = (x, token_ids, offsets, inverse, put(w), layer.up, layer.up_bias, layer.down, layer.down_bias)
        rows, *kept = expert_mlp_steps.expert_mlp(*args, body=layer.text, keep="h")
        grad = put(torch.linspace(-1, 1, rows.numel(), device="cuda").view(rows.shape).to(rows.dtype))
        back = expert_mlp_steps.expert_mlp_backward(
            grad, *args, [put(k) for k in kept], body=layer.text, keep="h", needs=[True] * 6
        )
        return [rows[~tail], *back]

    for clean, poisoned in zip(run(0.0), run(float("nan")), strict=True):
        assert torch.equal(clean, poisoned)


def test_unsupported_tensors_use_the_other_kernels(monkeypatch, launched):
    monkeypatch.setattr(run_module, "choose_config", lambda kernel, *_: CONFIGS[kernel])
    check(
        LINEAR["swiglu_list"],
        "cuda",
        torch.bfloat16,
        draw_routing(100, 2, 4),
        65,
        33,
        stack_parameters,
        keep="h",
        reduce=True,
    )
    assert not launched


@pytest.mark.parametrize("configs", [CONFIGS, GATHERED], ids=["fused", "gathered"])
def test_results_repeat_bit_by_bit(monkeypatch, configs):
    monkeypatch.setattr(run_module, "choose_config", lambda kernel, *_: configs[kernel])
    layer = LINEAR["swiglu_list"](8, 512, 512, torch.bfloat16)
    for name in ("up", "up_bias", "down", "down_bias"):
        setattr(layer, name, [p.detach().cuda() for p in getattr(layer, name)])
    routing = draw_routing(3000, 2, 8, torch.float32)
    routing = Routing(routing.topk_ids.cuda(), routing.topk_weights.cuda(), 8)
    token_ids, _, offsets, inverse, w = routing.build()
    x = torch.randn(3000, 512, device="cuda", dtype=torch.bfloat16)
    args = (x, token_ids, offsets, inverse, w, layer.up, layer.up_bias, layer.down, layer.down_bias)

    def run():
        out, *kept = expert_mlp_steps.expert_mlp(*args, body=layer.text, keep="h", reduce=True)
        options = dict(body=layer.text, keep="h", reduce=True, needs=[True] * 6)
        return [out, *expert_mlp_steps.expert_mlp_backward(torch.ones_like(out), *args, kept, **options)]

    first = run()
    for _ in range(20):
        assert all(map(torch.equal, first, run()))
