"""Tensors that the warp-specialized kernels support, checked on the CPU without a launch."""

from __future__ import annotations

import pytest
import torch

from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.lowering.triton import (
    exchange_ops,
    expert_mlp_backward_call,
    expert_mlp_call,
    expert_mlp_steps,
    warp_specialized,
)

from ...ir.routings import Routing
from .wide_layers import CONFIGS, GATHERED, NARROW

D, E = 256, 4
ALL = {"hopper_up_kernel", "hopper_rows_kernel", "hopper_act_backward_kernel", "hopper_outer_kernel"}


def list_launched(
    monkeypatch, h: int, interleaved: bool, transposed: bool, keep: str, configs=CONFIGS, x=None
) -> set[str]:
    names: set[str] = set()
    for module in (exchange_ops, warp_specialized, expert_mlp_call, expert_mlp_backward_call):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: names.add(kernel.__name__))
    monkeypatch.setattr(expert_mlp_steps, "replay_or_record", lambda key, inputs, constants, host_code, *_: host_code())
    monkeypatch.setattr(expert_mlp_call, "choose_config", lambda kernel, *_: configs[kernel])
    parts = ((0, None, None, 2), (0, 1, None, 2)) if interleaved else ((0, None, h, 1), (0, h, None, 1))
    act = ("mul.Tensor", ("silu", "a0"), "a1")
    body = ExpertBody(
        up=(Gemm(1, transposed),), parts=parts, act=act, down=Gemm(1, transposed), out=("mul.Tensor", "y", "w")
    )
    half = dict(dtype=torch.bfloat16)
    up = torch.empty((E, 2 * h, D) if transposed else (E, D, 2 * h), **half)
    down = torch.empty((E, D, h) if transposed else (E, h, D), **half)
    x = torch.empty(64, D, **half) if x is None else x
    token_ids, _, offsets, inverse, w = Routing(torch.randint(0, E, (64, 2)), torch.rand(64, 2).bfloat16(), E).build()
    args = (x, token_ids, offsets, inverse, w, [up], [], [down], [])
    options = dict(body=body.to_json(), keep=keep, reduce=True)
    out, *kept = expert_mlp_steps.expert_mlp(*args, **options)
    expert_mlp_steps.expert_mlp_backward(out, *args, kept, **options, needs=[True] * 6)
    return {name for name in names if name.startswith("hopper")}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("keep", ["h", "x"])
@pytest.mark.parametrize("configs", [CONFIGS, GATHERED], ids=["fused", "gathered"])
def test_widths_that_are_multiples_of_8(monkeypatch, interleaved, transposed, keep, configs):
    assert list_launched(monkeypatch, 136, interleaved, transposed, keep, configs) == ALL


@pytest.mark.parametrize("configs", [CONFIGS, NARROW, GATHERED], ids=["fused", "narrow", "gathered"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("keep", ["h", "x"])
def test_a_width_that_only_fits_doubled(monkeypatch, interleaved, transposed, keep, configs):
    """Reject a width whose parts are aligned only together."""
    names = list_launched(monkeypatch, 132, interleaved, transposed, keep, configs)
    assert not names & {"hopper_up_kernel", "hopper_act_backward_kernel"}


def test_rows_that_are_not_aligned(monkeypatch):
    x = torch.empty(64, D + 1, dtype=torch.bfloat16)[:, :D]
    names = list_launched(monkeypatch, 136, False, True, "h", x=x)
    assert "hopper_up_kernel" not in names and "hopper_act_backward_kernel" in names


def test_only_aligned_tensors_of_16_bits_fit():
    assert not warp_specialized._can_describe(torch.empty(8, 8)) and warp_specialized._can_describe(
        torch.empty(8, 8, dtype=torch.float16)
    )
    assert not warp_specialized._can_describe(torch.empty(8, 12, dtype=torch.float16))
