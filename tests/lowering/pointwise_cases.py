"""Pointwise expressions between the matrix products of experts."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from moefx.ir.expressions.pointwise_expression import evaluate

SILU, TANH_GELU = ("silu", "a0"), ("gelu", "a0", {"approximate": "tanh"})
GATE, UP = ("clamp", "a0", None, 7.0), ("clamp", "a1", -7.0, 7.0)
POSITIVE = ("add.Tensor", ("abs", "a0"), 0.25)
# Activations of experts and torch's other activations. Heads as in `passes.fuse`, some without overload.
EXPRESSIONS = {
    "swiglu": ("mul.Tensor", SILU, "a1"),
    "geglu_tanh": ("mul.Tensor", TANH_GELU, "a1"),
    "geglu_erf": ("mul.Tensor", ("gelu", "a0"), "a1"),
    "clamped_swiglu": (
        "mul.Tensor",
        ("add.Tensor", UP, 1),
        ("mul.Tensor", GATE, ("sigmoid", ("mul.Tensor", GATE, 1.702))),
    ),
    "relu_squared": ("pow.Tensor_Scalar", ("relu", "a0"), 2),
    "soft_cap": ("mul.Tensor", ("tanh", ("div.Tensor", ("mul.Tensor", SILU, "a1"), 30.0)), 30.0),
    "clamped_product": ("clamp", ("mul.Tensor", SILU, "a1"), -10.0, 10.0),
    "silu": SILU,
    "relu": ("relu", "a0"),
    "identity": "a0",
    "product": ("mul.Tensor", "a0", "a1"),
    "weighted": ("mul.Tensor", ("mul.Tensor", SILU, "a1"), "w"),
    "weighted_inside": ("mul.Tensor", ("silu", ("mul.Tensor", "a0", "w")), ("mul.Tensor", "a1", "w")),
    "in_float32": (
        "_to_copy",
        ("mul.Tensor", ("silu", ("_to_copy", "a0", {"dtype": "float32"})), "a1"),
        {"dtype": "bfloat16"},
    ),
    "softplus": ("softplus", "a0"),
    "softplus_beta": ("softplus", "a0", 2.0, 4.0),
    "mish": ("mish", "a0"),
    "elu": ("elu", "a0", 0.7),
    "elu_scaled": ("elu", "a0", 0.7, 1.1, 0.9),
    "selu": ("selu", "a0"),
    "celu": ("celu", "a0", 0.8),
    "hardswish": ("hardswish", "a0"),
    "hardsigmoid": ("hardsigmoid", "a0"),
    "hardtanh": ("hardtanh", "a0"),
    "hardtanh_bounds": ("hardtanh", "a0", -0.5, 3.0),
    "relu6": ("relu6", "a0"),
    "leaky_relu": ("leaky_relu", "a0", 0.1),
    "leaky_relu_default": ("leaky_relu", "a0"),
    "prelu": ("where.self", ("gt.Scalar", "a0", 0), "a0", ("mul.Tensor", "w", "a0")),
    "softshrink": ("softshrink", "a0", 0.5),
    "hardshrink": ("hardshrink", "a0", 0.5),
    "softsign": ("div.Tensor", "a0", ("add.Tensor", ("abs", "a0"), 1)),
    "log_sigmoid": ("log_sigmoid", "a0"),
    "tanhshrink": ("sub.Tensor", "a0", ("tanh", "a0")),
    "threshold": ("threshold", "a0", 0.125, -0.5),
    "quick_gelu": ("mul.Tensor", "a0", ("sigmoid", ("mul.Tensor", "a0", 1.702))),
    "serf": ("mul.Tensor", "a0", ("erf", ("softplus", "a0"))),
    "squareplus": ("mul.Scalar", ("add.Tensor", "a0", ("sqrt", ("add.Scalar", ("square", "a0"), 4.0))), 0.5),
    "erfc": ("erfc", "a0"),
    "atan": ("atan", "a0"),
    "sinh": ("sinh", "a0"),
    "cosh": ("cosh", "a0"),
    "asinh": ("asinh", "a0"),
    "tan": ("tan", ("mul.Tensor", "a0", 0.1)),
    "sin_cos": ("mul.Tensor", ("sin", "a0"), ("cos", "a1")),
    "sinc": ("sinc", "a0"),
    "snake": ("add.Tensor", "a0", ("pow.Tensor_Scalar", ("sin", "a0"), 2)),
    "logs": ("add.Tensor", ("log2", POSITIVE), ("add.Tensor", ("log10", POSITIVE), ("log1p", POSITIVE))),
    "expm1": ("expm1", "a0"),
    "exp2": ("exp2", "a0"),
    "base_2": ("pow.Scalar", 2, "a0"),
    "base_3": ("pow.Scalar", 3.0, "a0"),
    **{f"power_{p}": ("pow.Tensor_Scalar", "a0", p) for p in (0, 1, 3, 4, 7, -1, -2.0)},
    **{f"root_{p}": ("pow.Tensor_Scalar", POSITIVE, p) for p in (0.5, 1.5, 2.7, -0.5, -1.3, 1 / 3)},
    "roots": ("sub.Tensor", ("sqrt", POSITIVE), ("mul.Tensor", ("rsqrt", POSITIVE), ("reciprocal", POSITIVE))),
    "logaddexp": ("logaddexp", "a0", "a1"),
    "hypot": ("hypot", "a0", "a1"),
    "logit": ("logit", ("add.Tensor", ("mul.Tensor", ("sigmoid", "a0"), 0.5), 0.25)),
    "xlogy": ("xlogy.Tensor", "a0", POSITIVE),
    "addcmul": ("addcmul", "w", "a0", "a1", {"value": 0.5}),
    "addcdiv": ("addcdiv", "a1", "a0", POSITIVE, {"value": -2.0}),
    "lerp": ("lerp.Scalar", "a0", "a1", 0.3),
    "lerp_weight": ("lerp.Tensor", "a0", "a1", "w"),
    "maximum": ("maximum", "a0", "a1"),
    "minimum": ("minimum", "a0", ("mul.Tensor", "a1", 0.5)),
    "fmax": ("fmax", "a0", "a1"),
    "fmin": ("fmin", "a0", "a1"),
    "clamp_min": ("clamp_min", "a0", 0.5),
    "clamp_max": ("clamp_max", "a0", 3),
    "clamp_keyword": ("clamp", "a0", {"max": 1.0}),
    "clamp_by_tensors": ("clamp.Tensor", "a0", ("neg", ("abs", "a1")), ("abs", "a1")),
    "clamp_crossed": ("clamp", "a0", 3.0, 1.0),
    "nan_to_num": ("nan_to_num", "a0", 0.5, 2.0, -2.0),
    "scalar_first": ("mul.Tensor", 3.0, ("sub.Tensor", 1, "a0")),
    "scalar_over": ("div.Tensor", 2.0, POSITIVE),
    "rsub": ("rsub.Scalar", "a0", 2.5),
    "alpha": ("sub.Tensor", ("add.Tensor", "a0", "a1", {"alpha": 2}), "w", {"alpha": 0.5}),
    "scalars": ("sub.Scalar", ("div.Scalar", ("add.Scalar", ("mul.Scalar", "a0", -3), 2), 7), 0.1),
    "arithmetic_with_conditions": ("mul.Tensor", ("gt.Scalar", "a0", 0.5), "a0"),
    "conditions": (
        "where.self",
        ("logical_or", ("logical_and", ("ge.Scalar", "a0", -1), ("lt.Tensor", "a0", "a1")), ("eq.Scalar", "a0", 3)),
        ("where.self", ("logical_not", ("le.Tensor", "a0", "w")), "a1", ("neg", "a0")),
        ("where.self", ("bitwise_not", ("ne.Scalar", "a1", 0)), "w", ("mul.Tensor", "a0", "a1")),
    ),
    "of_a_condition": (
        "mul.Tensor",
        ("_to_copy", ("bitwise_xor.Tensor", ("gt.Scalar", "a0", 0), ("isnan", "a1")), {"dtype": "float32"}),
        "a1",
    ),
    "signs": ("mul.Tensor", ("sign", "a0"), ("abs", "a1")),
    "step": ("mul.Tensor", ("sign", "a0"), 2.0),  # no derivative
    "difference": ("mul.Tensor", ("sub.Tensor", "a0", "a1"), 0.1),
    "reordered": ("add.Tensor", ("sub.Tensor", ("mul.Tensor", "a0", 1e8), ("mul.Tensor", "a0", 1e8)), "a1"),
    "quotient": ("div.Tensor", "a0", "a1"),
}
# Kinks: 0, the bounds in the expressions above, equal operands of maximum.
KINKS = (0.0, -0.0, 0.125, 0.25, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, 7.0, -7.0, 10.0, 20.0)


class Random:
    """Generate random well-conditioned expressions.

    Each part is smooth or has a kink, and is at most as large as its operands' product. Divisors are not near 0 and
    exponents are bounded.
    """

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def expression(self) -> object:
        body = ("mul.Tensor", self.tree(3, "a0"), self.tree(2, "a1"))
        return self.rng.choice([body, ("mul.Tensor", body, "w"), ("add.Tensor", body, self.tree(1, "w"))])

    def tree(self, depth: int, must: str) -> object:
        """Return an expression that contains the variable `must`."""
        if depth == 0:
            return must
        kind = self.rng.random()
        inner = self.tree(depth - 1, must)
        if kind < 0.5:
            return self.unary(inner)
        other = self.tree(depth - 1, self.rng.choice(["a0", "a1", "w"]))
        return self.binary(inner, other)

    def unary(self, x: object) -> object:
        c = round(self.rng.uniform(0.3, 2.5), 2)
        return self.rng.choice(
            [
                *((name, x) for name in ("tanh", "sigmoid", "silu", "softplus", "relu", "erf", "sin", "cos", "abs")),
                *((name, x) for name in ("atan", "mish", "gelu", "neg", "hardswish", "elu", "log_sigmoid")),
                ("gelu", x, {"approximate": "tanh"}),
                ("leaky_relu", x, c / 10),
                ("exp", ("tanh", x)),
                ("pow.Tensor_Scalar", ("tanh", x), self.rng.choice([2, 3])),
                ("sqrt", ("add.Tensor", ("softplus", x), c)),
                ("log", ("add.Tensor", ("square", x), c)),
                ("pow.Tensor_Scalar", ("add.Scalar", ("abs", x), c), self.rng.choice([-1.5, -0.7, 0.3, 0.5])),
                ("clamp", x, self.rng.choice([None, -c]), 2 * c),
                ("add.Tensor", x, c),
                ("mul.Tensor", x, -c),
                ("mul.Scalar", x, c),
                ("rsub.Scalar", x, c),
                ("div.Tensor", x, c),
            ]
        )

    def binary(self, x: object, y: object) -> object:
        c = round(self.rng.uniform(0.3, 2.5), 2)
        return self.rng.choice(
            [
                ("mul.Tensor", x, y),
                ("mul.Tensor", ("sigmoid", x), y),
                ("add.Tensor", x, y),
                ("add.Tensor", x, y, {"alpha": c}),
                ("sub.Tensor", x, ("tanh", y)),
                ("div.Tensor", x, ("add.Scalar", ("abs", y), c)),
                ("maximum", x, y),
                ("minimum", x, y),
                ("logaddexp", x, y),
                ("addcmul", x, ("tanh", x), y, {"value": c}),
                ("where.self", ("gt.Tensor", x, y), x, ("mul.Tensor", y, c)),
                ("where.self", ("le.Scalar", x, c), ("tanh", y), x),
            ]
        )


RANDOM = {f"random_{seed}": Random(seed).expression() for seed in range(50)}
ALL = EXPRESSIONS | RANDOM


def make_points(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return values for the variables and the gradient: random ones, and all pairs of kinks of a0 and a1."""
    g = torch.Generator().manual_seed(0)
    a0, a1 = torch.cartesian_prod(*[torch.tensor(KINKS, dtype=torch.float64)] * 2).T
    kinks = {"a0": a0, "a1": a1, "g": torch.ones_like(a0)}
    env = {n: torch.cat([torch.randn(1000, generator=g, dtype=torch.float64) * 2, t]) for n, t in kinks.items()}
    env["w"] = torch.rand(len(env["g"]), generator=g, dtype=torch.float64)
    return {name: t.to(dtype) for name, t in env.items()}


def differentiate(expr: object, env: dict[str, Tensor], wrt: tuple[str, ...] = ("a0", "a1", "w")) -> list[Tensor]:
    """Return the value and the gradients by autograd, with 0 for missing ones."""
    leaves = {name: t.clone().requires_grad_() for name, t in env.items()}
    value = evaluate(expr, leaves).to(env["a0"].dtype)
    if not value.requires_grad:
        return [value, *(torch.zeros_like(env["a0"]) for _ in wrt)]
    grads = torch.autograd.grad(value, [leaves[n] for n in wrt], env["g"], allow_unused=True, materialize_grads=True)
    return [value.detach(), *grads]


def remove_casts(expr: object) -> object:
    """Remove casts, for a truth in float64."""
    if not isinstance(expr, (tuple, list)):
        return expr
    return remove_casts(expr[1]) if expr[0] == "_to_copy" else (expr[0], *map(remove_casts, expr[1:]))


ATEN = [
    f"{name}.{overload}"
    for name in sorted(dir(torch.ops.aten))
    if not name.endswith("_") and hasattr(getattr(torch.ops.aten, name), "overloads")
    for overload in getattr(torch.ops.aten, name).overloads()
    if torch.Tag.pointwise in getattr(getattr(torch.ops.aten, name), overload).tags and "out" not in overload
]


def build_call(head: str) -> object | None:
    """Build a call of an op with variables in (0.25, 1), for which most ops are defined, and numbers."""
    name, _, overload = head.partition(".")
    tensors = iter([("add.Tensor", ("mul.Tensor", ("sigmoid", v), 0.5), 0.25) for v in ("a0", "a1", "w")])
    arguments = []
    for argument in getattr(getattr(torch.ops.aten, name), overload)._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            arguments.append(next(tensors, None))
        elif argument.kwarg_only or argument.has_default_value():
            break
        else:
            arguments.append({"int": 2, "bool": False, "number": 0.75, "float": 0.75}.get(kind))
    return (head, *arguments)


INTEGERS = ("_to_copy", "a0", {"dtype": "int32"})
REFUSED = [
    (("floor", "a0"), "floor"),
    (("round", "a0"), "round"),
    (("remainder.Scalar", "a0", 2.0), "remainder"),
    (("fmod.Scalar", "a0", 2.0), "fmod"),
    (("div.Tensor_mode", "a0", 2.0, {"rounding_mode": "floor"}), "rounds.*floor|floor"),
    (("bitwise_and.Scalar", INTEGERS, 1), "cast to torch.int32"),
    (("bitwise_and.Scalar", "a0", 1), "bitwise_and"),
    (("bitwise_left_shift.Tensor_Scalar", "a0", 1), "shift"),
    (INTEGERS, "cast to torch.int32"),
    (("_to_copy", ("_to_copy", "a0", {"dtype": "float8_e4m3fn"}), {"dtype": "float32"}), "cast to torch.float8_e4m3fn"),
    (("_to_copy", "a0", {"dtype": "complex64"}), "cast to torch.complex64"),
    (("gt.Scalar", "a0", 0), "torch.bool"),
    (("rand_like", "a0"), "rand"),
    (("bernoulli", "a0"), "bernoulli"),
    (("dropout", "a0", 0.5, True), "dropout"),
    (("rrelu", "a0", 0.1, 0.3, True), "rrelu"),
    (("acos", "a0"), "acos"),
    (("lgamma", "a0"), "lgamma"),
    (("pow.Tensor_Tensor", "a0", "a1"), "exponent is not a number"),
    (("pow.Scalar", -2.0, "a0"), "power of -2"),
    (("pow.Tensor_Scalar", "a0", float("inf")), "exponent"),
    (("softmax.int", "a0", -1), "amax|softmax"),
    (("sum", "a0"), "sum"),
    (("cumsum", "a0", 0), "cumsum"),
    (("mm", "a0", "a1"), "mm|mat"),
    (("t", "a0"), "'t'"),
    (("flip", "a0", [1]), "flip|rev"),
    (("no_such_op", "a0"), "no_such_op"),
    (("mul.NoSuchOverload", "a0", "a1"), "NoSuchOverload"),
    (("mul.Tensor", "a0"), "mul"),
    (("mul.Tensor", "a0", None), "None"),
    (("mul.Tensor", "a0", "a1", "w"), "mul"),
    (("silu", 1.0), "silu"),
    (("item", "a0"), "'item'"),
    (2.0, "2.0"),
    (None, "None"),
    ((), "instead of an expression"),
    (("relu_", "a0"), "leaf|relu_"),
    (("heaviside", "a0", "a1"), "heaviside"),
]
