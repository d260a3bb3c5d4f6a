"""Pointwise expressions as data: the pointwise parts between the GEMMs of an expert.

An expression is nested tuples (or JSON lists): `("mul.Tensor", ("silu", "a0"), "a1")`. The head names an ATen op, with
or without its overload (then `default`, else `Tensor`). The arguments are expressions, variable names, numbers, None
and bools. The last one may be a dict of keyword arguments, with dtypes as strings:
`("_to_copy", "y", {"dtype": "float32"})`. Any pointwise ATen op is allowed, so there is no list of activations; torch
itself gives the derivative (`pointwise_derivative.vjp`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .expression_check import check_expression, resolve_op

Expr = Any  # tuple | list | str | int | float | bool | None

_INFIX = {"add": " + ", "sub": " - ", "mul": "*", "div": "/"}


def to_canonical_text(expr: Expr) -> str:
    """Return the JSON text of an expression, as a key: equal expressions have equal texts."""
    return json.dumps(expr, sort_keys=True, separators=(",", ":"))


def list_variables(expr: Expr) -> tuple[str, ...]:
    """Return the names of the variables in the order of their first use."""
    return tuple(dict.fromkeys(e for e in _walk(expr) if isinstance(e, str)))


def format_expression(expr: Expr) -> str:
    """Format an expression for people: `silu(a0)*a1`, `clamp(a0, None, 7.0)`, `y.to(float32)*w`."""
    return _format_with_precedence(expr)[0]


def evaluate(expr: Expr, env: Mapping[str, Tensor]) -> Tensor:
    """Compute `expr` with the variables of `env`. A repeated subexpression is computed once.

    Raises:
        KeyError: `env` lacks a variable.
    """
    return compile_expression(to_canonical_text(expr))(env)


def to_dtype(expr: Expr, dtype: torch.dtype) -> Expr:
    """Return `expr` with a cast to `dtype` around it."""
    return ("_to_copy", expr, {"dtype": str(dtype).removeprefix("torch.")})


def is_linear(expr: Expr, name: str) -> bool:
    """Return whether `expr == name * c` where c does not depend on `name`, up to rounding by casts to 16 bits and
    more."""
    if isinstance(expr, str):
        return expr == name
    if not _is_call(expr):
        return False
    head, args = expr[0].partition(".")[0], [a for a in expr[1:] if not isinstance(a, dict)]
    options = {k: v for a in expr[1:] if isinstance(a, dict) for k, v in a.items()}
    depends = [name in list_variables(a) for a in args]
    if head == "neg" or (
        head == "_to_copy" and is_precision_cast(getattr(torch, options.get("dtype", "float32"), None))
    ):
        return is_linear(args[0], name)
    if head == "mul":
        return sum(depends) == 1 and is_linear(args[depends.index(True)], name)
    if head == "div" and not options.get("rounding_mode"):
        return depends == [True, False] and is_linear(args[0], name)
    return head in ("add", "sub") and len(args) == 2 and all(is_linear(a, name) for a in args)


def drop_casts(expr: Expr, name: str) -> Expr:
    """Drop casts of subexpressions that depend on `name` from an expression that `is_linear` in `name`.

    Evaluated with ones for `name`, the result is the factor of `name` without the rounding of these casts.
    """
    if not _is_call(expr) or name not in list_variables(expr):
        return expr
    if expr[0].partition(".")[0] == "_to_copy":
        return drop_casts(expr[1], name)
    return (expr[0], *(drop_casts(a, name) if not isinstance(a, dict) else a for a in expr[1:]))


def is_precision_cast(dtype: Any) -> bool:
    """Return whether a cast to `dtype` only changes precision. Casts to 8 bits or to integers are meant to round."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2


def infer_dtype(expr: Expr, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """Infer the dtype of `expr` for variables of these dtypes, by torch's own promotion."""
    return _infer_dtype(to_canonical_text(expr), tuple(sorted(dtypes.items(), key=lambda item: item[0])))


# -- evaluation


@functools.lru_cache(maxsize=4096)
def compile_expression(text: str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Build a function of the environment from a canonical text, with a line for each distinct subexpression.

    Raises:
        InvalidInput: an operation, a name or a value in the text is not allowed.
    """
    expression = json.loads(text)
    check_expression(expression)
    names: dict[str, str] = {}
    ops: dict[str, Any] = {}
    lines: list[str] = []

    def emit(expr: Expr) -> str:
        if isinstance(expr, str):
            return f"env[{expr!r}]"
        if not _is_call(expr):
            return repr(expr) if not isinstance(expr, list) else f"[{', '.join(map(emit, expr))}]"
        key = to_canonical_text(expr)
        if key not in names:
            positional = [emit(a) for a in expr[1:] if not isinstance(a, dict)]
            keywords = [f"{k}={_keyword(v)}" for a in expr[1:] if isinstance(a, dict) for k, v in a.items()]
            symbol = f"op_{len(ops)}"
            ops[symbol] = resolve_op(expr[0])
            names[key] = f"t{len(names)}"
            lines.append(f"{names[key]} = {symbol}({', '.join(positional + keywords)})")
        return names[key]

    result = emit(expression)
    return assemble("env", lines, result, ops)


def assemble(parameters: str, lines: Sequence[str], result: str, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """Build a function from lines `tN = ...`. Each `tN` is freed after its last use, since it has the size of an
    activation."""
    last_use = {name: i for i, line in enumerate(lines) for name in re.findall(r"\bt\d+\b", line)}
    for name in re.findall(r"\bt\d+\b", result):
        last_use.pop(name, None)
    body = [
        f"    {line}" + "".join(f"; del {name}" for name, last in last_use.items() if last == i)
        for i, line in enumerate(lines)
    ]
    text = "\n".join([f"def program({parameters}):", *body, f"    return {result}"])
    namespace: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan"), **scope}
    exec(text, namespace)
    return namespace["program"]


def _keyword(value: Any) -> str:
    if isinstance(value, str) and isinstance(getattr(torch, value, None), (torch.dtype, torch.memory_format)):
        return f"torch.{value}"
    return repr(value)


def _is_call(expr: Expr) -> bool:
    return isinstance(expr, (tuple, list)) and bool(expr) and isinstance(expr[0], str)


def _walk(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, (tuple, list)):
        for part in expr[1:] if _is_call(expr) else expr:
            yield from _walk(part)
    elif not isinstance(expr, dict):
        yield expr


@functools.lru_cache(maxsize=4096)
def _infer_dtype(text: str, dtypes: tuple[tuple[str, torch.dtype], ...]) -> torch.dtype:
    # Promotion depends on dtypes and on the rank being above 0, not on sizes.
    return compile_expression(text)(
        {name: torch.empty((2, 2), dtype=dtype, device="meta") for name, dtype in dtypes}
    ).dtype


# -- printing


def _format_with_precedence(expr: Expr) -> tuple[str, int]:
    """Return text and precedence (0 sum, 1 product, 2 atom)."""
    if not _is_call(expr):
        return (f"[{', '.join(map(format_expression, expr))}]" if isinstance(expr, (tuple, list)) else str(expr)), 2
    head, positional = expr[0].partition(".")[0], [a for a in expr[1:] if not isinstance(a, dict)]
    keywords = {k: v for a in expr[1:] if isinstance(a, dict) for k, v in a.items()}
    if head in _INFIX and len(positional) == 2 and not keywords:
        level = 0 if head in ("add", "sub") else 1
        (left, left_level), (right, right_level) = map(_format_with_precedence, positional)
        # At the same precedence, the right operand of - and / needs parentheses; that of + and * does not.
        strict = level + (head in ("sub", "div"))
        left = f"({left})" if left_level < level else left
        right = f"({right})" if right_level < strict else right
        return f"{left}{_INFIX[head]}{right}", level
    if head == "neg":
        text, level = _format_with_precedence(positional[0])
        return (f"-{text}" if level == 2 else f"-({text})"), 1
    if head == "_to_copy" and "dtype" in keywords:
        text, level = _format_with_precedence(positional[0])
        return f"{text if level == 2 else f'({text})'}.to({keywords['dtype']})", 2
    arguments = [format_expression(a) for a in positional] + [f"{k}={v}" for k, v in keywords.items()]
    return f"{head}({', '.join(arguments)})", 2
