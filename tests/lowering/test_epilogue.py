"""Formulas of pointwise expressions, run without Triton on torch's functions in float64.

Run as a program it prints the formulas of all expressions here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import moefx
from moefx.ir.expressions.pointwise_expression import evaluate, format_expression
from moefx.lowering import epilogue
from moefx.lowering.epilogue import derive_formula, derive_gradients
from moefx.lowering.formula import list_symbols, write_function
from moefx.lowering.rules import Underivable
from tests.pace import limit_time

from .pointwise_cases import ALL, ATEN, EXPRESSIONS, REFUSED, SILU, build_call, differentiate, make_points, remove_casts


def write_text(expr: object) -> str:
    parameters = ("a0", "a1", "w")
    return write_function("vjp", (*parameters, "g"), derive_gradients(expr, "g", parameters))


def make_namespace(dtype: torch.dtype) -> dict[str, object]:
    """Return the names that a formula's text uses, for torch tensors."""

    def of(*values: object) -> list[Tensor]:
        return [v if isinstance(v, Tensor) else torch.tensor(v, dtype=dtype) for v in values]

    tl = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "abs")},
        where=lambda c, a, b: torch.where(c, *of(a, b)),
        maximum=lambda a, b, _: torch.maximum(*of(a, b)),
        minimum=lambda a, b, _: torch.minimum(*of(a, b)),
        cast=lambda value, _: torch.tensor(value, dtype=dtype),
        PropagateNan=SimpleNamespace(ALL=None),
        float32=None,
    )
    functions = ("exp", "sigmoid", "expm1", "log1p", "tanh", "sinh", "cosh", "asinh", "atan", "erfc", "hypot", "sign")
    return {"tl": tl, **{name: getattr(torch, name) for name in functions}}


def run_text(text: str, *arguments: Tensor) -> tuple[Tensor, ...] | Tensor:
    scope = make_namespace(arguments[0].dtype)
    exec(text, scope)
    return scope[text.partition("(")[0].removeprefix("def ")](*arguments)


# -- values and derivatives


# Constants that torch's kernels round to float32 even in float64.
SINGLE = dict.fromkeys(("celu", "hardsigmoid"), 2.0**-23)


@pytest.mark.parametrize("name", ALL)
def test_value_and_derivatives_are_torchs(name):
    expr, env = remove_casts(ALL[name]), make_points(torch.float64)
    results = run_text(write_text(ALL[name]), *(env[n] for n in ("a0", "a1", "w", "g")))
    for got, want in zip(results, differentiate(expr, env), strict=True):
        torch.testing.assert_close(got, want, rtol=SINGLE.get(name, 1e-10), atol=1e-12, equal_nan=True)


def test_every_pointwise_op_of_aten_is_right_or_refused():
    env, refused = make_points(torch.float64), {}
    for head in ATEN:
        expr = build_call(head)
        try:
            text = write_text(expr)
        except Underivable as reason:
            refused[head] = str(reason)
            continue
        results = run_text(text, *(env[n] for n in ("a0", "a1", "w", "g")))
        for got, want in zip(results, differentiate(expr, env), strict=True):
            close = torch.isclose(got, want, rtol=2.0**-23, atol=1e-10, equal_nan=True)
            assert close.all(), (head, got[~close], want[~close])
    assert len(ATEN) - len(refused) > 90, refused


@pytest.mark.parametrize(
    "out",
    [
        "y",
        ("mul.Tensor", "y", "w"),
        ("mul.Tensor", "w", ("_to_copy", "y", {"dtype": "float32"})),
        ("div.Tensor", ("neg", "y"), ("add.Tensor", "w", 1)),
        ("mul.Tensor", ("sigmoid", "w"), ("mul.Tensor", 2.5, "y")),
        ("add.Tensor", ("mul.Tensor", "y", "w"), "y", {"alpha": 3}),
        ("sub.Tensor", "y", "y"),
        ("mul.Tensor", "y", 0.5),
        ("mul.Tensor", "y", ("exp", ("full_like", "y", 2.0))),
    ],
    ids=format_expression,
)
def test_factor_of_a_linear_expression_and_its_derivative(out):
    y, w = torch.randn(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64).requires_grad_()
    factor, factor_grad = derive_gradients(out, "g", ("w",), ones=("y", "g"))
    got, got_grad = (run_text(write_function("scale", ("w",), [f]), w.detach()) for f in (factor, factor_grad))
    want = evaluate(out, {"y": y, "w": w})
    torch.testing.assert_close(y * got, want.detach())
    if want.requires_grad:
        torch.testing.assert_close(y * got_grad, torch.autograd.grad(want.sum(), w)[0])
    else:
        assert not got_grad.any()


# -- texts


def test_value_and_derivatives_share_subexpressions():
    assert write_text(EXPRESSIONS["swiglu"]) == (
        "def vjp(a0, a1, w, g):\n"
        "    t0 = sigmoid(a0)\n"
        "    t1 = (a0 * t0)\n"
        "    return (t1 * a1), (((g * a1) * t0) * ((a0 * (1.0 - t0)) + 1.0)), (g * t1), tl.where(a0 == a0, 0.0, 0.0)\n"
    )


def test_nothing_is_reordered_or_multiplied_out():
    # 3*x - 3*y would cancel, (a*c)*b overflow, (x + z) - y lose z.
    x, y = torch.tensor([1 / 3 + 2**-24]), torch.tensor([1 / 3])
    expr = ("mul.Tensor", ("sub.Tensor", "a0", "a1"), 3.0)
    assert run_text(write_function("f", ("a0", "a1"), [derive_formula(expr)]), x, y) == (x - y) * 3
    expr = ("mul.Tensor", ("mul.Tensor", "a0", "a1"), ("pow.Tensor_Scalar", "a0", 1))
    assert run_text(write_function("f", ("a0", "a1"), [derive_formula(expr)]), *torch.tensor([[1e30], [1e-30]])) == 1e30
    expr = ("add.Tensor", ("sub.Tensor", "a0", "a1"), "w")
    assert (
        run_text(write_function("f", ("a0", "a1", "w"), [derive_formula(expr)]), *torch.tensor([[1e8], [1e8], [1e-3]]))
        == 1e-3
    )


@pytest.mark.exhaustive
def test_the_text_does_not_depend_on_the_process():
    program = f"import runpy; runpy.run_module({__name__!r}, run_name='__main__')"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    root = Path(moefx.__file__).parents[1]
    other = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert other.stdout == "".join(write_text(expr) + "\n" for expr in ALL.values()), other.stderr


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2, "2.0"),
        (-0.1, "-0.1"),
        (float("inf"), 'float("inf")'),
        (-1e60, 'float("-inf")'),  # as float32
        (float("nan"), 'float("nan")'),
        (1e-40, "tl.cast(1e-40, tl.float32)"),
        (-1e-60, "tl.cast(-1e-60, tl.float32)"),
        (2.0**80, repr(2.0**80)),
    ],
)
def test_numbers_are_written_exactly(number, text):
    product = derive_formula(("mul.Tensor", "a0", number))
    assert write_function("f", ("a0",), [product]) == f"def f(a0):\n    return (a0 * {text})\n"


def test_repeated_subexpressions_take_no_more_time_or_text():
    expr = "a0"
    for _ in range(10):  # 2^10 terms as a tree, and 4^10 in the derivative
        expr = ("mul.Tensor", expr, ("sigmoid", expr))
    with limit_time(5):
        assert len(write_text(expr).splitlines()) < 100
        for depth in (200, 300):
            expr = "a0"
            for _ in range(depth):
                expr = ("silu", expr)
            write_text(expr)


def test_deriving_takes_little_time():
    write_text(EXPRESSIONS["clamped_swiglu"])  # torch imports modules for it
    epilogue._derive_formulas.cache_clear()
    with limit_time(0.3):
        write_text(EXPRESSIONS["clamped_swiglu"])


def test_a_name_that_does_not_occur_has_no_derivative():
    value, by_a0, by_other = derive_gradients(SILU, "g", ("a0", "_"))
    assert list_symbols(value) == {"a0"}
    assert list_symbols(by_a0) == {"a0", "g"}
    assert by_other == 0


# -- refused expressions


@pytest.mark.parametrize(
    ("expr", "reason"), REFUSED, ids=[format_expression(expr) if expr else str(expr) for expr, _ in REFUSED]
)
def test_ops_without_derivative_are_named(expr, reason):
    with pytest.raises(Underivable, match=reason) as caught:
        derive_gradients(expr, "g", ("a0", "a1", "w"))
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


if __name__ == "__main__":
    print("\n".join(write_text(expr) for expr in ALL.values()))
