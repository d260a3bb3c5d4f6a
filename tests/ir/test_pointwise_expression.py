"""Pointwise expressions: evaluation, text, result dtypes, and derivatives equal to autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefx.ir.expressions import pointwise_derivative
from moefx.ir.expressions.pointwise_derivative import vjp
from moefx.ir.expressions.pointwise_expression import (
    compile_expression,
    evaluate,
    format_expression,
    infer_dtype,
    is_linear,
    list_variables,
    to_canonical_text,
)

SWIGLU = ("mul.Tensor", ("silu", "a0"), "a1")
CLAMPED = ("mul", ("clamp", "a0", None, 7.0), ("sigmoid", ("mul", ("clamp", "a0", None, 7.0), 1.702)))
HALF_OUT = ("_to_copy", ("mul", ("_to_copy", "y", {"dtype": "float32"}), "w"), {"dtype": "bfloat16"})


def test_evaluates_heads_with_and_without_overload():
    a0, a1 = torch.randn(2, 5, 3).unbind()
    env = {"a0": a0, "a1": a1}
    assert torch.equal(evaluate(SWIGLU, env), F.silu(a0) * a1)
    assert torch.equal(evaluate(("mul", ("silu", "a0"), "a1"), env), F.silu(a0) * a1)
    assert torch.equal(evaluate(["gelu", "a0", {"approximate": "tanh"}], env), F.gelu(a0, approximate="tanh"))
    assert torch.equal(evaluate(("pow.Tensor_Scalar", "a0", 2), env), a0**2)
    assert evaluate("a0", env) is a0


def test_casts_name_dtypes():
    env = {"y": torch.randn(4, 3, dtype=torch.bfloat16), "w": torch.rand(4, 1)}
    out = evaluate(HALF_OUT, env)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, (env["y"].float() * env["w"]).bfloat16())


def test_infinite_and_missing_bounds_survive_the_json_text():
    a0 = torch.tensor([[-1.0, 2.0]])
    assert torch.equal(evaluate(("clamp", "a0", float("-inf"), 1.0), {"a0": a0}), a0.clamp(max=1.0))


def test_shared_subexpressions_are_computed_once():
    calls = []

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    a0 = torch.randn(2, 2)
    with Count():
        evaluate(CLAMPED, {"a0": a0})
    assert calls.count(torch.ops.aten.clamp.default) == 1
    assert len(calls) == 4


def test_unbound_variable_is_a_key_error():
    with pytest.raises(KeyError, match="a1"):
        evaluate(SWIGLU, {"a0": torch.ones(1, 1)})


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (SWIGLU, "silu(a0)*a1"),
        (("clamp", "a0", None, 7.0), "clamp(a0, None, 7.0)"),
        (("mul", ("add", "a1", 1), "a0"), "(a1 + 1)*a0"),
        (("sub", "a0", ("sub", "a1", "w")), "a0 - (a1 - w)"),
        (("add", "a0", ("add", "a1", "w")), "a0 + a1 + w"),
        (("div", "a0", ("mul", "a1", 2)), "a0/(a1*2)"),
        (("neg", ("add", "a0", 1)), "-(a0 + 1)"),
        (("gelu", "a0", {"approximate": "tanh"}), "gelu(a0, approximate=tanh)"),
        (HALF_OUT, "(y.to(float32)*w).to(bfloat16)"),
        ("y", "y"),
    ],
)
def test_expressions_print_as_formulas(expr, text):
    assert format_expression(expr) == text


def test_variables_in_order_of_use_and_not_heads_or_keywords():
    assert list_variables(("mul", ("gelu", "a1", {"approximate": "tanh"}), "a0")) == ("a1", "a0")
    assert list_variables(2.0) == ()


def test_canonical_is_the_same_for_lists_and_tuples():
    assert to_canonical_text(["mul", ["silu", "a0"], 2.0]) == to_canonical_text(("mul", ("silu", "a0"), 2.0))


@pytest.mark.parametrize(
    ("expr", "linear"),
    [
        ("y", True),
        (("mul", "y", "w"), True),
        (("mul", ("mul", 2.0, "y"), ("sigmoid", "w")), True),
        (("div", ("neg", "y"), "w"), True),
        (("add", ("mul", "y", "w"), "y"), True),
        (HALF_OUT, True),
        (("mul", "y", "y"), False),
        (("div", "w", "y"), False),
        (("add", "y", 1.0), False),
        (("add", "y", "w"), False),
        (("tanh", "y"), False),
        ("w", False),
        (("div.Tensor_mode", "y", "w", {"rounding_mode": None}), True),
        (("div.Tensor_mode", "y", "w", {"rounding_mode": "floor"}), False),
        (("_to_copy", "y", {"dtype": "bfloat16"}), True),
        (("_to_copy", "y", {"dtype": "float8_e4m3fn"}), False),
        (("_to_copy", "y", {"dtype": "int8"}), False),
    ],
)
def test_linear_expressions_are_recognised(expr, linear):
    assert is_linear(expr, "y") is linear


def test_result_dtype_is_torchs_promotion():
    dtypes = {"y": torch.bfloat16, "w": torch.float32}
    assert infer_dtype(("mul", "y", "w"), dtypes) is torch.float32
    assert infer_dtype(("mul", "y", 2.5), dtypes) is torch.bfloat16
    assert infer_dtype(HALF_OUT, dtypes) is torch.bfloat16


# Pointwise ops that torch can differentiate; log_sigmoid has two outputs, where and prelu several tensors.
EXPRESSIONS = [
    SWIGLU,
    CLAMPED,
    ("mul", "a0", "w"),
    ("mul", ("silu", ("mul", "a0", "w")), ("add", "a1", "w")),
    ("log_sigmoid", "a0"),
    ("softplus", "a0"),
    ("gelu", "a0", {"approximate": "tanh"}),
    ("where.self", ("gt.Scalar", "a0", 0.0), "a1", ("mul", "a0", 0.25)),
    ("square", ("relu", "a0")),
    ("add", ("mul", "a0", "a0"), ("exp", "a0")),
    ("hardtanh", "a0", -0.5, 0.5),
    ("pow.Tensor_Scalar", ("sigmoid", "a1"), 3),
    ("maximum", "a0", "a1"),
    ("div", "a0", ("add", ("abs", "w"), 1.0)),
    ("add", "a0", "a1", {"alpha": 2}),
]


def _differentiate(expr, env: dict[str, Tensor], grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {n: t.clone().requires_grad_() for n, t in env.items()}
    out = evaluate(expr, leaves)
    names = list_variables(expr)
    return out.detach(), dict(zip(names, torch.autograd.grad(out, [leaves[n] for n in names], grad), strict=True))


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=format_expression)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_vjp_is_autograds(expr, rows):
    torch.manual_seed(0)
    env = {n: torch.randn(rows, 1 if n == "w" else 4, dtype=torch.float64) for n in list_variables(expr)}
    grad = torch.randn(rows, 4, dtype=torch.float64)
    expected, expected_grads = _differentiate(expr, env, grad)
    value, grads = vjp(expr, env, grad, list(env))
    assert value is not None
    torch.testing.assert_close(value, expected)
    assert grads.keys() == expected_grads.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], expected_grads[name])
    nothing, only_first = vjp(expr, env, grad, list(env)[:1], value=False)
    assert nothing is None
    assert list(only_first) == list(env)[:1]


def test_vjp_of_mixed_dtypes_gives_each_variable_its_own():
    env = {"y": torch.randn(5, 4).bfloat16(), "w": torch.rand(5, 1)}
    grad = torch.randn(5, 4).bfloat16()
    expected, expected_grads = _differentiate(HALF_OUT, env, grad)
    value, grads = vjp(HALF_OUT, env, grad, ["y", "w"])
    assert value is not None
    assert torch.equal(value, expected)
    assert {n: g.dtype for n, g in grads.items()} == {"y": torch.bfloat16, "w": torch.float32}
    for name in grads:
        torch.testing.assert_close(grads[name], expected_grads[name])


def test_vjp_runs_with_autograd_off():
    env = {"a0": torch.randn(3, 2), "a1": torch.randn(3, 2)}
    expected = _differentiate(("mul", ("tanh", "a0"), "a1"), env, torch.ones(3, 2))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch._C._AutoDispatchBelowAutograd():
        value, grads = vjp(("mul", ("tanh", "a0"), "a1"), env, torch.ones(3, 2), ["a0", "a1"])
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(grads, expected[1])


def test_sizes_inside_a_derivative_are_those_of_the_call():
    # No current pointwise op has a derivative with sizes. A sum replaces it: its derivative expands to the traced size.
    def function(a0, a1):
        return a0 * a1.sum(1, keepdim=True)

    def joint(*args):
        leaves = [a.detach().requires_grad_() for a in args[:2]]
        return torch.autograd.grad(function(*leaves), leaves, args[2])

    size = (pointwise_derivative._ROWS, pointwise_derivative._COLUMNS)
    traced = pointwise_derivative.run_in_fresh_thread(
        lambda: pointwise_derivative._trace(
            joint, [torch.ones(size, dtype=torch.float64) for _ in range(3)], ["a0", "a1"]
        )
    )
    for rows, columns in ((2, 3), (6, 5)):
        a0, a1, grad = (torch.randn(rows, columns, dtype=torch.float64) for _ in range(3))
        torch.testing.assert_close(traced({"a0": a0, "a1": a1}, grad), joint(a0, a1, grad))


def test_the_error_of_an_op_without_derivative_arrives():
    with pytest.raises(RuntimeError, match="derivative for aten::heaviside is not implemented"):
        vjp(("heaviside", "a0", "a0"), {"a0": torch.ones(2, 2)}, torch.ones(2, 2), ["a0"])


def test_compared_variables_have_zero_gradients():
    expr = ("bitwise_not", ("gt.Scalar", "a0", 0.0))
    _, grads = vjp(expr, {"a0": torch.ones(2, 2)}, torch.ones(2, 2), ["a0"])
    assert torch.equal(grads["a0"], torch.zeros(2, 2))


def test_programs_are_compiled_once():
    assert compile_expression(to_canonical_text(SWIGLU)) is compile_expression(to_canonical_text(list(SWIGLU)))
