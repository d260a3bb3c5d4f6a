"""Evaluate terms as numbers, with an independent definition of each term."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from moefx.matching.terms.normal_form import Terms
from moefx.matching.terms.term import OVERWRITTEN, Array, Term, constant_value

aten = torch.ops.aten


def evaluate(t: Term, values: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """Return the value of a term in float64. `values`: parameters by FQN, nodes by node."""
    memo: dict[Term, torch.Tensor] = {}

    def value(t: Term) -> torch.Tensor:
        if t not in memo:
            memo[t] = _evaluate_op(t, value, values)
            assert tuple(memo[t].shape) == t.shape, (t.op, tuple(memo[t].shape), t.shape)
        return memo[t]

    return value(t)


def get_dtype(t: Term) -> torch.dtype | None:
    """Return the dtype that a term of floats has when its ops run on their operands; None for numbers."""
    if t.op in ("const", "array"):
        return None
    if t.op == "node":
        return t.args[0].meta["val"].dtype
    if t.op == "param":
        return torch.float32
    if t.op == "pointwise" and t.args[0] == "cast":
        return getattr(torch, dict(t.args[1])["dtype"])
    dtypes = [dtype for dtype in map(get_dtype, t.operands) if dtype is not None]
    return functools.reduce(torch.promote_types, dtypes)


def _evaluate_op(t: Term, value: Any, values: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    args = t.args
    match t.op:
        case "node" | "param":
            return values[args[0]].double()
        case "const":
            return torch.full(t.shape, constant_value(t), dtype=torch.float64)
        case "array":
            return args[0].value.double()
        case "pointwise":
            return torch.broadcast_to(
                _evaluate_elementwise(
                    args[0], dict(args[1]), [value(a) if isinstance(a, Term) else a for a in args[2:]]
                ),
                t.shape,
            )
        case "einsum":
            return torch.einsum(f"{','.join(args[0])}->{args[1]}", *map(value, args[2:]))
        case "axis_op":
            name, dims, _, static, inner = args
            return _evaluate_axis_op(name, list(dims), static, value(inner))
        case "sum":
            return value(args[1]).sum(tuple(args[0]))
        case "reshape":
            return value(args[0]).reshape(t.shape)
        case "permute":
            return value(args[0]).permute(args[1])
        case "expand":
            return value(args[0]).expand(t.shape)
        case "slice":
            inner, dim, start, stop, step = args
            return value(inner)[(slice(None),) * dim + (slice(start, stop, step),)]
        case "cat":
            return torch.cat([value(a) for a in args[1:]], args[0])
        case "index":
            inner, dims, indices, position = args
            moved = value(inner).movedim(dims, tuple(range(len(dims))))
            out = moved[tuple(indices.value)]
            width = indices.value.dim() - 1
            return out.movedim(tuple(range(width)), tuple(range(position, position + width)))
        case "index_put":
            base, dims, indices, source, accumulate = args
            moved = value(base).clone().movedim(dims, tuple(range(len(dims))))
            source = value(source)
            for j in range(indices.value.shape[1]):
                where = tuple(int(i) for i in indices.value[:, j])
                moved[where] = moved[where] + source[j] if accumulate else source[j]
            return moved.movedim(tuple(range(len(dims))), dims)
        case "select":
            out = value(args[0])
            for axis, i in sorted(args[1], reverse=True):
                out = out.select(axis, i)
            return out
    raise AssertionError(t.op)


def _evaluate_elementwise(name: str, kwargs: dict[str, Any], items: list[Any]) -> torch.Tensor:
    if name in ("cast", "detach"):
        return items[0]
    if name == OVERWRITTEN:
        return items[-1]
    if name == "where":
        return torch.where(items[0] != 0, items[1], items[2])
    packet, _, overload = name.partition(".")
    op = getattr(aten, packet)
    return (getattr(op, overload) if overload else op)(*items, **kwargs)


def _evaluate_axis_op(name: str, dims: list[int], static: tuple, x: torch.Tensor) -> torch.Tensor:
    if name in ("softmax", "log_softmax", "cumsum"):
        return getattr(torch, name)(x, dims[0])
    if name == "layer_norm":
        return torch.nn.functional.layer_norm(x, x.shape[dims[0] :], eps=static[0])
    if name == "rms_norm":
        return torch.nn.functional.rms_norm(x, x.shape[dims[0] :], eps=static[0])
    if name == "prod" and len(dims) > 1:
        return x.flatten(-len(dims)).prod(-1)
    if name == "var":
        return torch.var(x, dims, correction=static[0])
    if name == "linalg_vector_norm":
        return torch.linalg.vector_norm(x, static[0], dims)
    return getattr(torch, name)(x, dims[0] if len(dims) == 1 else dims)


def pick_all(T: Terms, t: Term, lead: int) -> list[Term]:
    """Return the resolved rows of a term under its first `lead` axes, as the lifter does."""
    return [T.resolve(T.pick_axes(t, dict(enumerate(ix)))) for ix in itertools.product(*map(range, t.shape[:lead]))]


def check(T: Terms, t: Term, expected: torch.Tensor, values: Mapping[Any, torch.Tensor]) -> None:
    """Check that a term, its resolved form, and all of its rows and elements equal `expected`."""
    expected = expected.double()
    assert t.shape == tuple(expected.shape)

    def assert_close(actual: torch.Tensor, reference: torch.Tensor, label: str) -> None:
        assert torch.allclose(actual, reference, rtol=1e-9, atol=1e-9, equal_nan=True), (label, actual, reference, t)

    assert_close(evaluate(t, values), expected, "as it is")
    assert_close(evaluate(T.resolve(t), values), expected, "resolved")
    for lead in {1, len(t.shape)} - {0}:
        if lead <= len(t.shape):
            rows = [evaluate(r, values) for r in pick_all(T, t, lead)]
            reference = expected.reshape(-1, *expected.shape[lead:])
            for i, row in enumerate(rows):
                assert_close(row, reference[i], f"row {i} of {lead} axes")
    for axis in range(1, len(t.shape)):  # inner axes first
        for i in range(t.shape[axis]):
            assert_close(
                evaluate(T.resolve(T.pick(t, axis, i)), values),
                expected.select(axis, i),
                f"axis {axis} at {i}",
            )


__all__ = ["Array", "check", "evaluate", "pick_all"]
