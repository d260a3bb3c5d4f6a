"""Functional forms of in-place and `out=` ops, and checks that kernels make and fake tensors leave out."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from ...errors import CaptureError
from ..environment.code_locations import find_user_source

aten = torch.ops.aten
GROUPED_MM = aten._grouped_mm


def make_grouped_result(x: torch.Tensor, w: torch.Tensor, *_: Any) -> torch.Tensor:
    """Make an empty result of a grouped product in any dtype; torch's own rule accepts bfloat16 only."""
    return x.new_empty((*x.shape[:-1], w.shape[-1]))


def restore_row_axis(value: fx.Node) -> fx.Node:
    """Return the rows of `y[mask] = rows` with their axis, which torch removes from a single row."""
    if value.target is aten.reshape.default:
        source: Any = value.args[0]
        shape = tuple(source.meta["val"].shape)
        if shape[:1] == (1,) and shape[shape.count(1) :] == tuple(value.meta["val"].shape):
            return source
    return value


def find_functional_form(
    func: Any, args: Any, kwargs: dict[str, Any], names: list[str]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the functional form of an in-place or `out=` op, with its arguments.

    Args:
        names: of the arguments that the op writes to.

    Raises:
        CaptureError: the op has no functional form.
    """
    form, is_same = _find_functional_op(func)
    if form is None:
        raise CaptureError(f"no functional form of {func} is known, at {find_user_source()}: {find_user_source().text}")
    if not is_same:
        return form, args, kwargs
    return (
        form,
        args,
        {**_required_defaults(func, form, len(args)), **{k: v for k, v in kwargs.items() if k not in names}},
    )


@functools.cache
def _find_functional_op(func: Any) -> tuple[Any, bool]:
    """Return the functional form of an op, or None, and whether it takes the same arguments."""
    name, overload = func.overloadpacket.__name__, func._overloadname
    packet = getattr(getattr(torch.ops, func.namespace), name[:-1] if _is_in_place(name) else name, None)
    overloads = packet.overloads() if packet is not None else []
    parameters = _list_parameters(func)
    for candidate in overloads:  # names may differ: `pow_.Scalar` is `pow.Tensor_Scalar`, not `pow.Scalar`
        functional = getattr(packet, candidate)
        if _list_parameters(functional) == parameters:
            return functional, True
    return (getattr(packet, overload), False) if _is_in_place(name) and overload in overloads else (None, False)


def _required_defaults(func: Any, form: Any, num_args: int) -> dict[str, Any]:
    """Return the defaults of an op for arguments that its functional form requires, such as the p of `bernoulli_`."""
    inputs = [a for a in func._schema.arguments if not a.is_out]
    required = [a for a in form._schema.arguments if not a.is_out]
    pairs = list(zip(inputs, required, strict=True))[num_args:]
    return {a.name: a.default_value for a, b in pairs if a.has_default_value() and not b.has_default_value()}


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _list_parameters(op: Any) -> list[tuple[str, str]]:
    """Return the names and types of an op's arguments."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


# Ops whose kernels require floats of one dtype, with the positions of these. Fake tensors do not check them.
_OF_ONE_DTYPE = {
    **dict.fromkeys((aten.mm, aten.mv, aten.dot), (0, 1)),
    **dict.fromkeys((aten.linear, aten.addmm, aten.addmv), (0, 1, 2)),
    **dict.fromkeys((aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_), (0, 3)),
    **dict.fromkeys((aten.index_put, aten.index_put_, aten._index_put_impl_), (0, 2)),
}


def require_one_dtype(func: Any, args: tuple) -> None:
    """Raise RuntimeError for a mixture of dtypes, as the kernel of an op does and its fake does not."""
    positions = _OF_ONE_DTYPE.get(func.overloadpacket, ())
    _require_one(str(func.overloadpacket), [args[i] for i in positions if i < len(args)])


def require_one_dtype_under(dtype: torch.dtype | None, name: str, tensors: list[torch.Tensor]) -> None:
    """Raise RuntimeError for a contraction of mixed dtypes under autocast to `dtype`, or (None) without autocast.

    Autocast leaves float64 as it is.
    """
    _require_one(name, tensors, {torch.float16: dtype, torch.bfloat16: dtype, torch.float32: dtype} if dtype else {})


def _require_one(name: str, tensors: list[Any], casts: dict[Any, Any] | None = None) -> None:
    floats = [t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]
    dtypes = dict.fromkeys((casts or {}).get(dtype, dtype) for dtype in floats)
    if len(dtypes) > 1:
        raise RuntimeError(f"{name} takes one dtype, and gets {' and '.join(map(str, dtypes))} ({find_user_source()})")
