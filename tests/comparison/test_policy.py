"""The float64 rule passes all results of correct programs, and no others."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.comparison.policy import Pair, Row, judge, judge_all, tolerance

ROW = Row("layers.0.mlp", "weight", "grad_param", ok=False)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def compute_product(dtype: torch.dtype, *, order: slice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a product in `dtype`, with its terms summed in the order of `order`, and the float64 truth."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in ((96, 64), (64, 32)))
    truth = x.double() @ w.double()
    parts = [x[:, i : i + 16] @ w[i : i + 16] for i in range(0, 64, 16)]
    return (x @ w if order is None else sum(parts[order][1:], parts[order][0])), truth


def judge_value(value, original, truth, dtype, **kw) -> Row:
    return judge(ROW, value, original, truth, tolerance(dtype, 64), **kw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_the_same_sum_passes(dtype):
    original, truth = compute_product(dtype)
    # Partial sums in half precision would also be rounded. Round once, like an accumulator.
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    other = compute_product(wide, order=slice(None, None, -1))[0] if wide is dtype else truth.to(wide)
    row = judge_value(other.to(dtype), original, truth, dtype)
    assert row.ok and row.error <= row.bound
    assert (row.block, row.name, row.kind) == ("layers.0.mlp", "weight", "grad_param")


BAD = {
    "a scale": lambda t: t * 1.03,
    "one row zero": lambda t: t.index_fill(0, torch.tensor(17), 0),
    "one small row zero": lambda t: t.index_fill(0, t.double().abs().amax(-1).argmin(), 0),
    "one element": lambda t: t.index_put((torch.tensor(3), torch.tensor(5)), t.abs().max()),
    "two rows swapped": lambda t: t[[1, 0, *range(2, len(t))]],
    "zeros": torch.zeros_like,
    "a sign": torch.neg,
    "NaN": lambda t: t.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(math.nan, dtype=t.dtype)),
    "Inf": lambda t: t.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(math.inf, dtype=t.dtype)),
    "shape": lambda t: t[:-1],
    "dtype": lambda t: t.to(torch.float32 if t.dtype != torch.float32 else torch.float64),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_tensor_fails(dtype, fault):
    original, truth = compute_product(dtype)
    row = judge_value(BAD[fault](original), original, truth, dtype)
    assert not row.ok, row


def test_the_bound_is_the_stated_formula():
    original, truth = compute_product(torch.float32)
    row = judge_value(original * (1 + 1e-4), original, truth, torch.float32)
    u = torch.finfo(torch.float32).eps / 2
    rel2 = float((original.double() - truth).norm() / torch.maximum(truth.abs(), original.double().abs()).norm())
    assert row.norm == "rel2" and row.error == pytest.approx(1e-4, rel=1e-2)
    assert row.bound == pytest.approx(2 * rel2 + u + u * 8)
    half = tolerance(torch.bfloat16, 64)
    assert half.factor == 3 and half.floor == pytest.approx(2**-8 + 2**-24 * 8)


def test_a_scale_of_one_part_in_ten_million_is_seen_in_float64_and_not_in_float32():
    for dtype, seen in ((torch.float64, True), (torch.float32, False)):
        original, truth = compute_product(dtype)
        assert judge_value(original * (1 + 1e-7), original, truth, dtype).ok is not seen


def test_non_finite_values_pass_only_at_the_same_places():
    original, truth = compute_product(torch.float16)
    original[0, 0], original[0, 1], original[0, 2] = math.nan, math.inf, -math.inf
    row = judge_value(original.clone(), original, truth, torch.float16)
    assert row.ok and "3 values are NaN or Inf" in row.note
    for place, value in (
        ((0, 0), math.inf),
        ((0, 0), 1.0),
        ((0, 1), -math.inf),
        ((0, 1), math.nan),
        ((5, 5), math.nan),
    ):
        bad = original.clone()
        bad[place] = value
        assert not judge_value(bad, original, truth, torch.float16).ok


def test_nothing_finite_is_not_a_pass():
    t = torch.full((3, 4), math.nan)
    assert not judge_value(t, t, t.double(), torch.float32).ok


def test_a_gradient_that_is_zero_in_exact_arithmetic_is_measured_against_the_originals_noise():
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 8, 64, generator=g) * 1e-9
    truth = torch.zeros(8, 64, dtype=torch.float64)
    assert judge_value(noise[0], noise[1], truth, torch.float32).ok
    assert not judge_value(noise[0] * 10, noise[1], truth, torch.float32).ok
    assert not judge_value(noise[0], torch.zeros(8, 64), truth, torch.float32).ok
    assert judge_value(noise[0], torch.zeros(8, 64), truth, torch.float32, noise=[noise[1]]).ok
    assert judge_value(torch.zeros(8, 64), torch.zeros(8, 64), truth, torch.float32).ok


def test_noise_of_neighbouring_data_widens_the_bound_and_no_more():
    original, truth = compute_product(torch.float64)
    moved = original * (1 + 1e-12)
    assert not judge_value(original * (1 - 1e-12), original, truth, torch.float64).ok
    assert judge_value(original * (1 - 1e-12), original, truth, torch.float64, noise=[moved]).ok
    assert not judge_value(original * (1 - 3e-12), original, truth, torch.float64, noise=[moved]).ok
    assert not judge_value(original * 2, original, truth, torch.float64, noise=[original * math.nan]).ok


def test_integers_and_booleans_must_be_equal():
    t = torch.arange(6)
    assert judge_value(t.clone(), t, t, torch.float32).ok
    row = judge_value(t + (t == 3), t, t, torch.float32)
    assert not row.ok and row.error == 1
    assert not judge_value(t == 3, t == 2, t == 2, torch.float32).ok


def test_scalars_and_empty_and_complex_tensors():
    one = torch.tensor(1.0)
    assert judge_value(one, one, one.double(), torch.float32).ok
    assert not judge_value(one + 1e-4, one, one.double(), torch.float32).ok
    assert judge_value(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4), torch.float32).ok
    z = torch.randn(3, 4, dtype=torch.complex64)
    assert judge_value(z, z, z.to(torch.complex128), torch.float32).ok
    assert not judge_value(z.conj().resolve_conj(), z, z.to(torch.complex128), torch.float32).ok


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 33),
    row=st.integers(0, 8),
    scale=st.sampled_from([1e-3, 1.0, 1e6]),
)
def test_losing_any_row_of_any_shape_is_seen(rows, cols, row, scale):
    g = torch.Generator().manual_seed(rows * 100 + cols)
    truth = (torch.rand(rows, cols, generator=g, dtype=torch.float64) + 0.1) * scale
    original = truth.float()
    lost = original.clone()
    lost[row % rows] = 0
    assert judge_value(original, original, truth, torch.float32).ok
    assert not judge_value(lost, original, truth, torch.float32).ok


def test_verdicts_of_several_tensors_equal_single_verdicts():
    g = torch.Generator().manual_seed(0)
    truths = [torch.randn(4, 6, generator=g, dtype=torch.float64) for _ in range(7)] + [torch.zeros(4, 6).double()]
    truths += [torch.randn(6, generator=g, dtype=torch.float64) for _ in range(3)] + [torch.ones(()).double()] * 2
    originals = [t.float() for t in truths]
    compiled = [t * (1 + 1e-7) for t in originals]
    compiled[2] = compiled[2] * 1.01
    compiled[5][3] = 0
    compiled[9] = compiled[9] + 1
    compiled[6], originals[6] = compiled[6].clone(), originals[6].clone()
    compiled[6][0, 0] = originals[6][0, 0] = math.inf
    rows = [Row("", f"experts.{i}.weight", "grad_param", ok=False) for i in range(len(truths))]
    tol, pairs = tolerance(torch.float32, 64), [
        Pair(*four, largest=3.0) for four in zip(rows, compiled, originals, truths, strict=True)
    ]  # fmt: skip
    alone = [judge(p.row, p.compiled, p.original, p.truth, tol, (), p.largest) for p in pairs]
    together = judge_all(pairs, tol)
    assert [row.name for row in together if not row.ok] == ["experts.2.weight", "experts.5.weight", "experts.9.weight"]
    for one, other in zip(alone, together, strict=True):
        assert (one.name, one.ok, one.norm, one.note) == (other.name, other.ok, other.norm, other.note)
        assert other.error == pytest.approx(one.error, rel=1e-12) and other.bound == pytest.approx(one.bound, rel=1e-12)
