"""`expert_mlp` in Triton equals the reference for each launch configuration."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from moefx.ir import op_providers
from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.lowering.triton import expert_mlp_call as run_module
from moefx.lowering.triton import expert_mlp_steps
from moefx.lowering.triton import weight_operands as weights
from moefx.lowering.triton.weight_operands import Weights

from ...covering import sample_product
from ...ir.routings import Layer, Routing, draw_routing
from .layers import CONFIGS, LINEAR, SMALL, check, move_layer, run_and_differentiate, separate, stack_storage


@pytest.mark.sampled(4)  # each layer, each dtype
@pytest.mark.parametrize("make", LINEAR.values(), ids=LINEAR.keys())
@pytest.mark.parametrize(
    "dtype, keep, reduce",
    [(torch.float32, "x", False), (torch.bfloat16, "h", False), (torch.float16, "all", True)],
    ids=str,
)
def test_outputs_and_gradients_equal_the_reference(device, monkeypatch, make, dtype, keep, reduce):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: SMALL)
    routing = draw_routing(40, 2, 4)
    routing.topk_ids[routing.topk_ids == 3] = 1  # an expert without tokens
    check(make, device, dtype, routing, 48, 40, keep=keep, reduce=reduce)


@pytest.mark.parametrize("tiles, make", sample_product(CONFIGS, LINEAR, order=1))
def test_every_way_to_launch(device, monkeypatch, make, tiles):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: tiles)
    # two tiles, the second one partial, of multiples of 8 that are no multiples of 16
    d, h = tiles.bn + 8, tiles.bn + 24
    check(make, device, torch.bfloat16, draw_routing(37, 2, 3), d, h, keep="h", reduce=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["sliced", "separate"])
@pytest.mark.parametrize("make", [LINEAR["weight_before"], LINEAR["swiglu_list"]], ids=["no scale", "scaled"])
def test_a_kept_activation_is_the_one_that_is_recomputed(device, monkeypatch, make, name):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS[name])
    torch.manual_seed(0)
    layer, routing = move_layer(device, make(3, 32, 24), torch.bfloat16), draw_routing(19, 2, 3)
    x, grad = torch.randn(2, 19, 32, device=device).bfloat16()
    there = dataclasses.replace(routing, topk_ids=routing.topk_ids.to(device))
    results = []
    for keep in ("h", "all"):
        with op_providers.force("expert_mlp", "triton"), op_providers.force("expert_mlp_backward", "triton"):
            weights = routing.topk_weights.to(device, torch.bfloat16)
            results.append(run_and_differentiate(layer, there, x, weights, grad, keep=keep, reduce=True))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "name, keep, make",
    sample_product({"sliced": "sliced", "separate": "separate"}, {k: k for k in ("h", "x", "all")}, LINEAR, order=1),
)
def test_deferred_weight_gradients_are_equal(device, monkeypatch, make, keep, name):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS[name])
    layer, routing = move_layer(device, make(3, 32, 24), torch.bfloat16), draw_routing(19, 2, 3)
    x, grad = torch.randn(2, 19, 32, device=device).bfloat16()
    there = dataclasses.replace(routing, topk_ids=routing.topk_ids.to(device))
    for reduce in (False, True):
        with op_providers.force("expert_mlp", "triton"), op_providers.force("expert_mlp_backward", "triton"):
            arguments = layer, there, x, routing.topk_weights.to(device, torch.bfloat16), grad
            want, got = (
                run_and_differentiate(*arguments, keep=keep, reduce=reduce, later=later) for later in (False, True)
            )
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    "name, keep, make",
    sample_product({"sliced": "sliced", "separate": "separate"}, {"h": "h", "all": "all"}, LINEAR, order=1),
)
def test_dh_takes_the_place_of_h(device, monkeypatch, make, keep, name):
    """Write dh into h if allowed, with bitwise equal gradients."""
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS[name])
    layer, routing = move_layer(device, make(3, 32, 24), torch.bfloat16), draw_routing(19, 2, 3)
    there = dataclasses.replace(routing, topk_ids=routing.topk_ids.to(device))
    token_ids, _, offsets, inverse, w = there.build(routing.topk_weights.to(device, torch.bfloat16))
    x, grad = torch.randn(2, 19, 32, device=device).bfloat16()
    parameters = [[p.detach() for p in group] for group in (layer.up, layer.up_bias, layer.down, layer.down_bias)]
    args, options = (x, token_ids, offsets, inverse, w, *parameters), dict(body=layer.text, keep=keep, reduce=True)
    _, *kept = expert_mlp_steps.expert_mlp(*args, **options)
    before, results = [k.clone() for k in kept], []
    for overwrite in (False, True):
        results.append(
            expert_mlp_steps.expert_mlp_backward(grad, *args, kept, **options, needs=[True] * 6, overwrite=overwrite)
        )
        changed = [not torch.equal(k, b) for k, b in zip(kept, before, strict=True)]
        assert changed == [overwrite and i < len(layer.body.up) for i in range(len(kept))]
    assert all(map(torch.equal, *results))


def transpose_storage(tensors: list[Tensor]) -> list[Tensor]:
    """Copy the tensors with other strides."""
    return [t.detach().mT.contiguous().mT.requires_grad_() for t in tensors]


LAYOUTS = {
    "spaced": (stack_storage, stack_storage, {"view"}),
    "apart": (separate, separate, {"table"}),
    "one apart": (stack_storage, separate, {"table"}),
    "one turned": (stack_storage, transpose_storage, {"stacked_copy"}),
    "turned": (transpose_storage, transpose_storage, {"table"}),
}


@pytest.mark.parametrize("gate, up, paths", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_separate_parameters_at_any_addresses(device, monkeypatch, gate, up, paths):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: SMALL)
    layer = move_layer(device, LINEAR["swiglu_list"](4, 32, 16), torch.float32)
    x, grad, routing = torch.randn(20, 32), torch.randn(20, 32), draw_routing(20, 2, 4, torch.float32)
    routing = Routing(routing.topk_ids.to(device), routing.topk_weights.to(device), 4)
    arguments = (routing, x.to(device), routing.topk_weights, grad.to(device))
    want = run_and_differentiate(layer, *arguments)
    layer = dataclasses.replace(layer, up=[*gate(layer.up[:4]), *up(layer.up[4:])], down=separate(layer.down))
    with op_providers.force("expert_mlp", "triton"), op_providers.force("expert_mlp_backward", "triton"):
        op_providers.reset_counters()
        got = run_and_differentiate(layer, *arguments)
    assert paths <= set(op_providers.weight_paths())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)  # separate and stacked parameters
@pytest.mark.parametrize("make", LINEAR.values(), ids=LINEAR.keys())
def test_offsets_of_more_than_32_bits(device, monkeypatch, make):
    """Use 64-bit offsets, as for matrices with distant rows; here for all matrices."""
    monkeypatch.setattr(run_module, "choose_config", lambda *_: SMALL)
    monkeypatch.setattr(weights, "_MAX_OFFSET", 0)
    seen, stock = set(), Weights.operand

    def operand(self, **options):
        seen.add((found := stock(self, **options)).access)
        return found

    monkeypatch.setattr(Weights, "operand", operand)
    check(make, device, torch.float32, draw_routing(37, 2, 3), 48, 40, move_expert_axis_inside, keep="h", reduce=True)
    assert seen == {"strided, wide"}


def move_expert_axis_inside(layer: Layer) -> Layer:
    """Move the experts' axis inside, as in one tensor [out, E, in]."""
    up, down = (
        [t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in group]
        if group[0].dim() == 3
        else stack_storage(group)
        for group in (layer.up, layer.down)
    )
    return dataclasses.replace(layer, up=up, down=down)


def test_matrices_that_need_64_bits():
    for strides, is_wide in (((16, 2**26, 1), True), ((2**31, 2**25, 1), False), ((2**31, 1, 2**28), True)):
        assert weights._is_wide(torch.empty_strided((2, 40, 16), strides, device="meta")) == is_wide


def test_experts_of_several_dtypes(device, monkeypatch):
    """Accept experts of several dtypes: autocast may have cast some."""
    monkeypatch.setattr(run_module, "choose_config", lambda *_: SMALL)
    layer, routing = move_layer(device, LINEAR["swiglu_list"](4, 32, 16), torch.float32), draw_routing(20, 2, 4)
    there = dataclasses.replace(routing, topk_ids=routing.topk_ids.to(device))
    token_ids, _, offsets, inverse, w = there.build(routing.topk_weights.to(device, torch.bfloat16))
    x = torch.randn(20, 32, device=device).bfloat16()
    results = []
    for mixed in (False, True):
        up = [p.detach().bfloat16() if mixed and i % 2 == 0 else p.detach() for i, p in enumerate(layer.up)]
        down, up_bias, down_bias = ([p.detach() for p in g] for g in (layer.down, layer.up_bias, layer.down_bias))
        args = (x, token_ids, offsets, inverse, w, up, up_bias, down, down_bias)
        results.append(expert_mlp_steps.expert_mlp(*args, body=layer.text, reduce=True, dtype=torch.bfloat16)[0])
    assert torch.equal(*results)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", ["torch.backends.fp32_precision", "torch.backends.cuda.matmul.fp32_precision"])
def test_precision_set_by_the_newer_api_of_torch(setting):
    """Read the precision from torch's new API, after which the old one raises."""
    program = f"""
import torch
from moefx.lowering.triton import expert_mlp_call as call
{setting} = "tf32"
call.get_target = lambda device: "sm90"
print(call.choose_matmul_precision(torch.zeros(1)), call.choose_matmul_precision(torch.zeros(1).bfloat16()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tf32", "ieee"]


def test_parts_of_separate_parameters_need_not_be_aligned():
    matrices = separate([torch.randn(6, 6) for _ in range(3)])
    (weights,) = Weights.of_groups([matrices], True, torch.float32)
    halves = [weights.columns(None, 3, 1), weights.columns(3, None, 1)]  # the second half begins at 72 bytes
    accesses = [half.operand(backward=False, block=None).access for half in halves]
    assert accesses == ["table", "table, unaligned"]


@pytest.mark.parametrize("arrange", [list, transpose_storage])
def test_halves_of_separate_parameters_at_odd_widths(device, monkeypatch, arrange):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: SMALL)

    def make(num_experts: int, d: int, h: int, dtype: torch.dtype = torch.float64) -> Layer:
        layer = LINEAR["swiglu_list"](num_experts, d, h, dtype)
        pairs = zip(layer.up[:num_experts], layer.up[num_experts:], strict=True)
        both = [torch.cat([gate.detach(), up.detach()]) for gate, up in pairs]
        parts = ((0, None, h, 1), (0, h, None, 1))
        body = dataclasses.replace(layer.body, up=layer.body.up[:1], parts=parts)
        return dataclasses.replace(layer, up=both, body=body)

    def arranged(layer: Layer) -> Layer:
        return dataclasses.replace(layer, up=arrange(layer.up))

    check(make, device, torch.float32, draw_routing(20, 2, 4), 13, 7, arranged, keep="h", reduce=True)


def test_arguments_need_not_be_contiguous(device, monkeypatch):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: SMALL)
    layer = move_layer(device, LINEAR["swiglu_list"](4, 32, 16), torch.float32)
    routing = draw_routing(20, 2, 4, torch.float32)
    routing = Routing(routing.topk_ids.to(device), routing.topk_weights.to(device), 4)
    token_ids, _, offsets, inverse, w = routing.build()
    x = torch.randn(20, 32, device=device)

    def every_other(t: Tensor) -> Tensor:
        return torch.stack([t, t + 1], -1)[..., 0]

    results = []
    for change in (lambda t: t, every_other):
        args = (x, *map(change, (token_ids, offsets, inverse, w)), layer.up, [], layer.down, [])
        out, *kept = expert_mlp_steps.expert_mlp(*args, body=layer.text, keep="h", reduce=True)
        options = dict(body=layer.text, keep="h", reduce=True, needs=[True, True, True, False, True, False])
        results.append([out, *expert_mlp_steps.expert_mlp_backward(out, *args, kept, **options)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def make_two_biased_projections(num_experts: int, d: int, h: int, dtype: torch.dtype = torch.float64) -> Layer:
    """Use a half of a stack as one of the biases, so that their strides differ."""
    up = [torch.randn(num_experts, h, d, dtype=dtype) for _ in range(2)]
    down = torch.randn(num_experts, d, h, dtype=dtype)
    biases = [torch.randn(num_experts, 2 * h, dtype=dtype)[:, :h], torch.randn(num_experts, h, dtype=dtype)]

    def expert(layer: Layer, i: int, x: Tensor, w: Tensor) -> Tensor:
        gate, other = (x @ layer.up[g][i].mT + layer.up_bias[g][i] for g in range(2))
        return torch.nn.functional.silu(gate) * other @ layer.down[0][i].mT

    body = ExpertBody(
        up=(Gemm(1, True, bias=True), Gemm(1, True, bias=True)),
        parts=((0, None, None, 1), (1, None, None, 1)),
        act=("mul.Tensor", ("silu", "a0"), "a1"),
        down=Gemm(1, True),
    )
    return Layer(body, up, biases, [down], [], expert)


@pytest.mark.parametrize("fused", [True, False])
def test_biases_of_two_projections_need_not_have_equal_strides(device, monkeypatch, fused):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: dataclasses.replace(SMALL, fused=fused))

    def with_strides(layer: Layer) -> Layer:
        wide, other = (b.detach() for b in layer.up_bias)
        wide = torch.cat([wide, wide + 1], 1)[:, : wide.shape[1]]
        return dataclasses.replace(layer, up_bias=[wide.requires_grad_(), other.requires_grad_()])

    routing = draw_routing(37, 2, 4)
    check(make_two_biased_projections, device, torch.float32, routing, 20, 12, with_strides, keep="h", reduce=True)
