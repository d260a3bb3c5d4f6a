"""Derived pointwise parts as Triton functions, in a kernel that only calls them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moefx.errors import InvalidInput
from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.ir.expressions.pointwise_expression import list_variables
from moefx.lowering.triton import explain_unsupported
from moefx.lowering.triton.pointwise import Pointwise, Underivable, build_pointwise

from ..pointwise_cases import (
    ALL,
    ATEN,
    EXPRESSIONS,
    REFUSED,
    SILU,
    build_call,
    differentiate,
    make_points,
    remove_casts,
)

# The interpreter evaluates unused values, such as the other branch of a where.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

EPS = torch.finfo(torch.float32).eps
WHOLE = (None, None, 1)
SWIGLU = EXPRESSIONS["swiglu"]
DERIVED = {name: expr for name, expr in ALL.items() if name != "power_0"}  # power_0 is a constant


def make_body(act: object, out: object = "y", parts: int = 2) -> ExpertBody:
    return ExpertBody((Gemm(1, True),) * parts, tuple((i, *WHOLE) for i in range(parts)), act, Gemm(1, True), out)


def make_pointwise(act: object) -> Pointwise:
    return build_pointwise(make_body(act, parts=2 if "a1" in list_variables(act) else 1).to_json())


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


@triton.jit
def scale_kernel(w, out, size, SCALE: tl.constexpr, SCALE_GRAD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    weight = tl.load(w + at, mask=at < size)
    tl.store(out + at, SCALE(weight), mask=at < size)
    tl.store(out + size + at, SCALE_GRAD(weight), mask=at < size)


def run_kernel(point: Pointwise, env: dict[str, Tensor], device: str) -> list[Tensor]:
    """Return the value and the gradients by a0, a1 and w, in float32."""
    size = env["g"].numel()
    out = torch.full((5, size), 1e30, device=device)
    arguments = [env[name].to(device) for name in ("a0", "a1", "w", "g")]
    options = {} if device == "cpu" else {"enable_fp_fusion": False}  # as `launch` does
    kernel[(triton.cdiv(size, 1024),)](*arguments, out, size, ACT=point.act, VJP=point.vjp, BLOCK=1024, **options)
    act, *results = out.cpu()
    torch.testing.assert_close(act, results[0], rtol=0, atol=0, equal_nan=True)
    return results


def estimate_rounding(device: str) -> float:
    """Return the rounding error of Triton's exp, which is several roundings per power of e on a GPU."""
    return (4 if device == "cpu" else 32) * EPS


# -- values and derivatives


@pytest.mark.parametrize("name", DERIVED)
def test_value_and_derivatives(device, name):
    """Compare with float64.

    The norm of the error is at most twice that of torch in float32, which rounds differently, plus four roundings. The
    largest error, relative to the element and the mean, is at most three times torch's plus four roundings. The points
    contain all kinks, where a wrong branch has an error of the size of the gradient.
    """
    expr, env = remove_casts(DERIVED[name]), make_points(torch.float32)
    exact = differentiate(expr, {n: t.double() for n, t in env.items()})
    torchs = differentiate(expr, env)
    few = estimate_rounding(device)
    for got, want, other in zip(run_kernel(make_pointwise(DERIVED[name]), env, device), exact, torchs, strict=True):
        torch.testing.assert_close(got.isfinite(), other.isfinite())
        error, usual, size = (t[other.isfinite()].double() for t in (got - want, other - want, want.abs()))
        assert error.norm() <= 2 * usual.norm() + few * size.norm()
        relative, usual = (t.abs() / (size + size.mean()).clamp_min(1e-30) for t in (error, usual))
        assert relative.max() <= 3 * usual.max() + few


GRID = torch.logspace(-37, 1.9, 1000, dtype=torch.float64)  # up to 79


@pytest.mark.parametrize(
    ("expr", "roundings"),
    [
        (("expm1", "a0"), 2),
        (("log1p", ("abs", "a0")), 2),
        (("log1p", ("mul.Tensor", ("sigmoid", "a0"), -0.75)), 4),
        (("tanh", "a0"), 3),
        (("sinh", "a0"), 4),
        (("cosh", "a0"), 4),
        (("asinh", "a0"), 3),
        (("atan", "a0"), 2),
        (("erfc", ("clamp", "a0", -5.0, 5.0)), 8),
        (("erf", "a0"), 2),
        (("sigmoid", "a0"), 3),
        (("softplus", "a0"), 3),
        (("log_sigmoid", "a0"), 3),
        (("silu", "a0"), 4),
        (("hypot", "a0", ("mul.Tensor", "a0", 0.3)), 3),
        (("pow.Tensor_Scalar", ("abs", "a0"), 0.3), 64),  # a factor of the logarithm of 1e-37
        (("pow.Tensor_Scalar", ("abs", "a0"), 1.5), 4),
        (("pow.Tensor_Scalar", "a0", 3), 3),
        (("rsqrt", ("abs", "a0")), 2),
    ],
    ids=str,
)
def test_elementary_functions_are_as_accurate_for_tiny_arguments(device, expr, roundings):
    """Compare each element relative to itself, except elements that are no normal float32."""
    a = torch.cat([GRID, -GRID]).float()
    env = dict(a0=a, a1=a, w=a, g=torch.ones_like(a))
    want = differentiate(expr, {n: t.double() for n, t in env.items()})[0]
    got = run_kernel(make_pointwise(expr), env, device)[0]
    error = (got - want).abs() / want.abs().clamp_min(1e-300)
    if device != "cpu":
        roundings += 2 * 79
    normal = want.abs() > torch.finfo(torch.float32).tiny
    assert error[normal].max() <= roundings * EPS, (error[normal].max() / EPS, a[normal][error[normal].argmax()])
    assert (got - want)[~normal].abs().max() <= 1e-37 if not normal.all() else True


def test_derivatives_of_sigmoids_for_large_arguments(device):
    a = torch.cat([GRID, -GRID]).float()
    env = dict(a0=a, a1=a, w=a, g=torch.ones_like(a))
    for expr in [SILU, ("sigmoid", "a0"), ("tanh", "a0"), ("gelu", "a0"), ("mish", "a0"), ("softplus", "a0")]:
        want = differentiate(expr, {n: t.double() for n, t in env.items()})[1]
        got = run_kernel(make_pointwise(expr), env, device)[1]
        assert (got - want).abs().max() <= 4 * estimate_rounding(device)  # relative to 1


# Zeros, tiny values, values at which exp overflows or nearly does, infinities.
SPECIAL = [0.0, 1e-30, 1e-8, 0.5, 1, 20, 88, 89, 100, 1e4, torch.inf]
SPECIAL += [*(-v for v in SPECIAL), torch.nan]
# Some elements of these differ.
EXCEPTIONS = {
    "random_32": "inf * sigmoid(-89), which is 0 or just not",
    "random_37": "one more sum of opposite infinities",
}


@pytest.mark.parametrize("name", DERIVED)
def test_special_values(device, name):
    """Return finite, infinite or NaN as torch in float32, or as exact computation if torch overflows in between.

    Derivatives at NaN are excluded: vectorized and scalar parts of torch's own kernels (elu, hardtanh, hardswish)
    disagree there.
    """
    expr, special = DERIVED[name], torch.tensor(SPECIAL)
    a0, a1 = torch.cartesian_prod(special, special).T.contiguous()
    env = dict(a0=a0.clone(), a1=a1.clone(), w=torch.full_like(a0, 0.5), g=torch.ones_like(a0))
    torchs = differentiate(remove_casts(expr), env)
    exact = differentiate(remove_casts(expr), {n: t.double() for n, t in env.items()})
    rounded = EPS * (1 + a0.abs().nan_to_num(0, 0)) * (1 + a1.abs().nan_to_num(0, 0))
    for i, got, want, other in zip(range(4), run_kernel(make_pointwise(expr), env, device), exact, torchs, strict=True):
        same = (a0.isnan() | a1.isnan()) & (i > 0)
        for w in (other, want.float()):
            same |= (got == w) | (got.isnan() & w.isnan())
            same |= ((got - w).abs() <= 1e-3 * w.abs() + rounded) & w.isfinite()
        if device != "cpu":  # exp(-88) is 0 on GPUs, no denormal number
            small = (a0.abs() - 94).abs().minimum((a1.abs() - 94).abs()) <= 6
            same |= (a0.isinf() | a1.isinf()) & small
        different = (~same).sum()
        assert different <= (len(same) // 50 if name in EXCEPTIONS else 0), (a0[~same], a1[~same], got[~same])


@pytest.mark.parametrize(
    "out",
    [
        ("mul.Tensor", "y", "w"),
        ("mul.Tensor", ("_to_copy", "y", {"dtype": "float32"}), "w"),
        ("div.Tensor", ("neg", "y"), ("add.Tensor", "w", 1)),
        ("mul.Tensor", ("sigmoid", "w"), ("mul.Tensor", 2.5, "y")),
        ("mul.Tensor", "y", 0.5),
        ("mul.Tensor", "y", ("exp", ("full_like", "w", 2.0))),
    ],
    ids=str,
)
def test_scale_and_its_derivative(device, out):
    point = build_pointwise(make_body(SWIGLU, out).to_json())
    w = torch.rand(100)
    got = torch.empty(2, 100, device=device)
    scale_kernel[(1,)](w.to(device), got, 100, SCALE=point.scale, SCALE_GRAD=point.scale_grad, BLOCK=128)
    leaves = {"y": torch.ones(100, dtype=torch.float64), "w": w.double()}
    env = {**leaves, "a0": leaves["y"], "g": torch.ones(100, dtype=torch.float64)}
    value, by_w = differentiate(remove_casts(out), env, ("w",))
    torch.testing.assert_close(got.cpu(), torch.stack([value, by_w]).float(), rtol=estimate_rounding(device), atol=EPS)


def test_numbers_no_float32_is_a_normal_one_of(device):
    """Write numbers that are no normal float32 explicitly: Triton reads such literals as float64."""
    for number in (1e-40, -1e60, torch.inf):
        expr = ("maximum", ("mul.Tensor", "a0", number), ("clamp", "a0", 1e-42, number if number > 1 else None))
        env = make_points(torch.float32)
        point = make_pointwise(expr)
        got, want = run_kernel(point, env, device), differentiate(expr, env)
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-37, equal_nan=True)


# -- supported bodies


def test_functions_without_w_do_not_load_it():
    assert not make_pointwise(SWIGLU).uses_weight
    assert make_pointwise(("mul.Tensor", SWIGLU, "w")).uses_weight
    assert make_pointwise(SWIGLU).scale is None
    assert make_pointwise(SWIGLU).num_parts == 2
    assert make_pointwise(SILU).num_parts == 1


def test_the_same_body_has_the_same_functions():
    text = make_body(SWIGLU).to_json()
    assert build_pointwise(text) is build_pointwise(text)
    assert build_pointwise(text).vjp is build_pointwise(make_body(SWIGLU, ("mul.Tensor", "y", "w")).to_json()).vjp


END = 2**63 - 1  # the end of slices in torch's graphs
PARTS = {
    "one": ([(0, *WHOLE)], 1, False),
    "two": ([(0, *WHOLE), (1, *WHOLE)], 2, False),
    "two_swapped": ([(1, *WHOLE), (0, *WHOLE)], 2, False),
    "to_the_end": ([(0, 0, END, 1), (1, 0, None, 1)], 2, False),
    "halves": ([(0, None, 8, 1), (0, 8, None, 1)], 1, False),
    "halves_swapped": ([(0, 8, END, 1), (0, 0, 8, 1)], 1, False),
    "halves_from_the_end": ([(0, None, -8, 1), (0, -8, None, 1)], 1, False),
    "interleaved": ([(0, None, None, 2), (0, 1, None, 2)], 1, True),
    "interleaved_swapped": ([(0, 1, END, 2), (0, 0, END, 2)], 1, True),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_up_projections_reach_the_activation(device, name):
    parts, num_up, joined = PARTS[name]
    act = SILU if len(parts) == 1 else SWIGLU
    point = build_pointwise(ExpertBody((Gemm(1, True),) * num_up, tuple(parts), act, Gemm(1, True)).to_json())
    assert (point.num_parts, point.joined) == (len(parts), joined)
    env = make_points(torch.float32)
    # The kernel loads even columns first: exchanged columns reach the functions in the other order.
    a0, a1 = ("a1", "a0") if name == "interleaved_swapped" else ("a0", "a1")
    got = run_kernel(point, {**env, "a0": env[a0], "a1": env[a1]}, device)
    torch.testing.assert_close(got[0], differentiate(act, env)[0])


def test_every_other_column_may_end_before_the_last_one():
    """Accept ends before the last column, as in `h.view(-1, 11, 2)[..., 0]`."""
    body = ExpertBody((Gemm(1, True),), ((0, 0, 21, 2), (0, 1, 22, 2)), SWIGLU, Gemm(1, True)).to_json()
    assert build_pointwise(body, (22,)).joined
    for width in (21, 23, 24):  # these slices miss columns, or differ in length
        with pytest.raises(Underivable, match="not whole ones"):
            build_pointwise(body, (width,))


THREE = ("mul.Tensor", SWIGLU, "a2")
UNTAKEN = {
    "three_parts": (make_body(THREE, parts=3), "3 parts"),
    "no_part": (make_body("w", parts=0), "parts  of 0"),
    "quarter": (ExpertBody((Gemm(1, True),), ((0, None, 8, 1),), SILU, Gemm(1, True)), r"parts 0\[None:8:1\]"),
    "gap": (
        ExpertBody((Gemm(1, True),), ((0, None, 8, 1), (0, 9, None, 1)), SWIGLU, Gemm(1, True)),
        r"parts 0\[None:8:1\], 0\[9:None:1\] of 1 up-projections",
    ),
    "twice": (ExpertBody((Gemm(1, True),), ((0, *WHOLE), (0, *WHOLE)), SWIGLU, Gemm(1, True)), "parts"),
    "every_third": (ExpertBody((Gemm(1, True),), ((0, 0, None, 3), (0, 1, None, 3)), SWIGLU, Gemm(1, True)), "parts"),
    "unused_projection": (ExpertBody((Gemm(1, True),) * 2, ((0, *WHOLE),), SILU, Gemm(1, True)), "2 up-projections"),
    "one_bias": (
        ExpertBody((Gemm(1, True, bias=True), Gemm(1, True)), ((0, *WHOLE), (1, *WHOLE)), SWIGLU, Gemm(1, True)),
        "bias",
    ),
    "separate_bias_dtype": (
        ExpertBody((Gemm(1, True, bias=True, bias_dtype="float32"),), ((0, *WHOLE),), SILU, Gemm(1, True)),
        "a bias has another dtype, float32",
    ),
    "one_transposed": (
        ExpertBody((Gemm(1, True), Gemm(1, False)), ((0, *WHOLE), (1, *WHOLE)), SWIGLU, Gemm(1, True)),
        "transposed",
    ),
    "ignores_a1": (make_body(SILU), r"silu\(a0\) does not depend on a1"),
    "ignores_a0": (make_body(("silu", "w"), parts=1), r"silu\(w\) does not depend on a0"),
    "constant": (make_body(("pow.Tensor_Scalar", "a0", 0), parts=1), "does not depend on a0"),
    "number": (make_body(2.0, parts=1), "2.0 instead of an expression"),
    "nonlinear_out": (make_body(SWIGLU, ("mul.Tensor", ("tanh", "y"), "w")), r"tanh\(y\)\*w .*not linear in y"),
    "biased_out": (make_body(SWIGLU, ("add.Tensor", "y", "w")), "not linear in y"),
    "out_without_y": (make_body(SWIGLU, "w"), "not linear in y"),
    "rounding_out": (make_body(SWIGLU, ("div.Tensor_mode", "y", "w", {"rounding_mode": "floor"})), "not linear in y"),
    "integer_out": (make_body(SWIGLU, ("_to_copy", "y", {"dtype": "int8"})), "not linear in y"),
}


@pytest.mark.parametrize("name", UNTAKEN)
def test_unsupported_bodies_give_a_reason(name):
    body, reason = UNTAKEN[name]
    with pytest.raises(Underivable, match=reason):
        build_pointwise(body.to_json())
    assert explain_unsupported(body.to_json()) is not None


def test_unsupported_widths():
    """Refuse products of different widths, which would broadcast, and odd numbers of columns for pairs."""
    two = ExpertBody((Gemm(1, True),) * 2, ((0, *WHOLE), (1, *WHOLE)), SWIGLU, Gemm(1, True)).to_json()
    assert explain_unsupported(two, (16, 16)) is None
    assert "of different widths: 16, 1" in str(explain_unsupported(two, (16, 1)))
    pairs = ExpertBody((Gemm(1, True),), ((0, 0, None, 2), (0, 1, None, 2)), SWIGLU, Gemm(1, True)).to_json()
    assert explain_unsupported(pairs, (8,)) is None and explain_unsupported(pairs, (3,)) is not None


def test_nothing_but_underivable_is_raised():
    """Try all ops in all positions, and invalid expressions."""
    deep = "a0"
    for _ in range(150):
        deep = ("silu", deep)
    expressions = [
        *(expr for expr, _ in REFUSED),
        *map(build_call, ATEN),
        deep,
        "",
        [],
        [[]],
        {},
        True,
        ("mul.Tensor",),
    ]
    expressions += [("mul.Tensor", ["a0"], "a1"), (("silu",), "a0"), ("", "a0"), ("_to_copy", "a0", {"dtype": "none"})]
    num_supported = 0
    for expr in expressions:
        for body in (
            make_body(expr, parts=1),
            make_body(expr),
            make_body(("mul.Tensor", expr, "a1")),
            make_body(SWIGLU, expr),
        ):
            try:
                build_pointwise(body.to_json())
                num_supported += 1
            except (Underivable, InvalidInput) as reason:
                assert str(reason)
    assert num_supported > 100
