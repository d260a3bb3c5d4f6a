"""Derived pointwise parts as Triton functions, in a kernel that does nothing else."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moefx.ir.body import ExpertBody, Gemm
from moefx.ir.expression import evaluate, variables
from moefx.lowering.triton import elementary, why_not
from moefx.lowering.triton.pointwise import Pointwise, Underivable, pointwise

from ..test_epilogue import ALL, ATEN, EXPRESSIONS, REFUSED, SILU, call_of, points, truth, without_casts

EPS = torch.finfo(torch.float32).eps
UP, WHOLE = Gemm(1, True), (None, None, 1)


def body_of(act: object, out: object = "y", parts: int = 2) -> ExpertBody:
    return ExpertBody((UP,) * parts, tuple((i, *WHOLE) for i in range(parts)), act, UP, out)


def pointwise_of(act: object) -> Pointwise:
    return pointwise(body_of(act, parts=2 if "a1" in variables(act) else 1).to_json())


@triton.jit
def kernel(a0, a1, w, g, out, size, ACT: tl.constexpr, VJP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x0, x1 = tl.load(a0 + at, mask=mask), tl.load(a1 + at, mask=mask)
    weight, grad = tl.load(w + at, mask=mask), tl.load(g + at, mask=mask)
    value, d0, d1, dw = VJP(x0, x1, weight, grad)
    tl.store(out + at, ACT(x0, x1, weight), mask=mask)
    tl.store(out + size + at, value, mask=mask)
    tl.store(out + 2 * size + at, d0, mask=mask)
    tl.store(out + 3 * size + at, d1, mask=mask)
    tl.store(out + 4 * size + at, dw, mask=mask)


def run(point: Pointwise, env: dict[str, Tensor], device: str) -> list[Tensor]:
    """Value and gradients by a0, a1 and w, in float32."""
    size = env["g"].numel()
    out = torch.full((5, size), 1e30, device=device)
    arguments = [env[name].to(device) for name in ("a0", "a1", "w", "g")]
    kernel[(triton.cdiv(size, 1024),)](*arguments, out, size, ACT=point.act, VJP=point.vjp, BLOCK=1024)
    act, *results = out.cpu()
    torch.testing.assert_close(act, results[0], rtol=0, atol=0, equal_nan=True)
    return results


# -- value and derivatives
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ALL if "a0" in variables(ALL[n]) and n != "power_0"])
def test_value_and_derivatives(device, name):
    """Against float64, norm and largest error: no further off than a few times what torch is in float32 (its kernels
    round at other places), and a few roundings. With the gradients at kinks, where a wrong choice is an error of 1."""
    expr, single = ALL[name], points(torch.float32)
    exact = truth(without_casts(expr), {n: t.double() for n, t in single.items()})
    torchs = truth(without_casts(expr), single)
    for what, got, want, other in zip(("value", "a0", "a1", "w"), run(pointwise_of(expr), single, device), exact, torchs):
        report(name, what, got, want, other)


def report(name, what, got, want, other):
    same = torch.isfinite(want)
    assert torch.equal(torch.isnan(got), torch.isnan(other)), (name, what)
    error, allowed = (got - want)[same].abs(), (other - want)[same].abs()
    scale = want[same].abs().double()
    print(name, what, *(round(float(x), 2) for x in (
        error.norm() / (scale.norm() + 1e-30) / EPS, allowed.norm() / (scale.norm() + 1e-30) / EPS,
        (error / (scale + scale.mean())).nan_to_num().max() / EPS, (allowed / (scale + scale.mean())).nan_to_num().max() / EPS)))
