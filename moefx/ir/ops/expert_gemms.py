"""Ops with expert parameters: `grouped_mm` and `expert_rows`, and functions that read parameter lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInput
from .op_definition import op, unpack_saved


@op(
    "grouped_mm(Tensor rows, Tensor[] w, Tensor expert_offsets, Tensor? summand=None, *, bool transposed, "
    "ScalarType? dtype=None) -> Tensor",
    contract="rows[B,D], w[*], expert_offsets[E+1], summand[B,F]? -> out[B,F]",
    keeps_activations=True,
)
def grouped_mm(
    rows: Tensor,
    w: list[Tensor],
    expert_offsets: Tensor,
    summand: Tensor | None = None,
    *,
    transposed: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute out[r] = rows[r] @ w[e] + summand[r] for the rows of each expert e.

    Args:
        summand: for example the bias of each row. If it has the dtype of the product, the sum is rounded once.
        transposed: w[e] is [F,D] as in `nn.Linear`, otherwise [D,F].
        dtype: the dtype to compute in, whatever that of the weights; set by autocast. None: all dtypes are equal.
    """
    dtype = check_dtypes("grouped_mm", rows, w, dtype)
    _, num_out = check_weight_shape("grouped_mm", w, expert_offsets, transposed, rows.shape[1])
    out = rows.new_zeros((rows.shape[0], num_out))
    offsets = expert_offsets.tolist()
    for matrix, (start, stop) in zip(list_expert_tensors(w, 2), pairwise(offsets), strict=True):
        if stop > start:
            factors = rows[start:stop], (matrix.t() if transposed else matrix).to(dtype)
            if summand is None or summand.dtype != dtype:  # added below, in another dtype
                out[start:stop] = torch.mm(*factors)
            else:
                out[start:stop] = torch.addmm(summand[start:stop], *factors)
    return out + summand if summand is not None and summand.dtype != dtype else out


@op(
    "grouped_mm_backward(Tensor grad, Tensor rows, Tensor expert_offsets, *, bool transposed, "
    "ScalarType dtype) -> Tensor",
    contract="grad[B,F], rows[B,D], expert_offsets[E+1] -> w[E,_,_]",
)
def grouped_mm_backward(
    grad: Tensor, rows: Tensor, expert_offsets: Tensor, *, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """Compute the stacked gradient of the weights of `grouped_mm`: [E,F,D] if transposed, otherwise [E,D,F]. It is zero
    for experts without rows.

    The gradient of the rows is `grouped_mm` itself with `transposed` flipped.
    """
    left, right = (grad, rows) if transposed else (rows, grad)
    offsets = expert_offsets.tolist()
    out = rows.new_zeros((len(offsets) - 1, left.shape[1], right.shape[1]), dtype=dtype)
    for e, (start, stop) in enumerate(pairwise(offsets)):
        if stop > start:
            out[e] = left[start:stop].t() @ right[start:stop]
    return out


@op(
    "expert_rows(Tensor[] v, Tensor expert_offsets, SymInt num_rows) -> Tensor",
    contract="v[*], expert_offsets[E+1] -> out[B,F]",
)
def expert_rows(v: list[Tensor], expert_offsets: Tensor, num_rows: int) -> Tensor:
    """Repeat each expert's vector (bias, norm weight, scalar as [E,1]) for each row of the expert."""
    table = v[0] if len(v) == 1 and v[0].dim() == 2 else torch.stack(list(v))
    _check_num_experts("expert_rows", table.shape[0], expert_offsets)
    return table.index_select(0, find_row_experts(expert_offsets, num_rows))


@op(
    "expert_rows_backward(Tensor grad, Tensor expert_offsets, *, ScalarType dtype) -> Tensor",
    contract="grad[B,F], expert_offsets[E+1] -> v[E,F]",
)
def expert_rows_backward(grad: Tensor, expert_offsets: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Sum the rows of each expert, [E,F]; zero for experts without rows."""
    offsets = expert_offsets.tolist()
    out = grad.new_zeros((len(offsets) - 1, grad.shape[1]), dtype=dtype)
    for e, (start, stop) in enumerate(pairwise(offsets)):
        out[e] = grad[start:stop].sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
    return out


def find_row_experts(expert_offsets: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each row, [B]; the last expert for rows of the tail."""
    row = torch.arange(num_rows, dtype=expert_offsets.dtype, device=expert_offsets.device)
    num_experts = expert_offsets.shape[0] - 1
    return torch.searchsorted(expert_offsets[1:], row, right=True, out_int32=True).clamp_(max=num_experts - 1)


def is_stacked(tensors: Sequence[Tensor], dim: int) -> bool:
    """Return whether a list of expert parameters of `dim` dimensions each is one stacked tensor."""
    return len(tensors) == 1 and tensors[0].dim() == dim + 1


def list_expert_tensors(tensors: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    return tensors[0].unbind(0) if is_stacked(tensors, dim) else tensors


def check_weight_shape(
    name: str, w: Sequence[Tensor], expert_offsets: Tensor, transposed: bool, num_in: int | None = None
) -> tuple[int, int]:
    """Check the weights against the number of experts and the width of the rows. Return (in, out) of each matrix."""
    stacked = is_stacked(w, 2)
    _check_num_experts(name, w[0].shape[0] if stacked else len(w), expert_offsets)
    shape = tuple(w[0].shape[1:] if stacked else w[0].shape)
    if not stacked and any(tuple(m.shape) != shape for m in w):
        shapes = ", ".join(sorted({str(tuple(m.shape)) for m in w}))
        raise InvalidInput(f"moefx::{name}: the experts' weights have different shapes: {shapes}")
    if len(shape) != 2:
        raise InvalidInput(f"moefx::{name}: an expert's weight has shape {shape}, expected two dimensions")
    inner, outer = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    if num_in is not None:
        torch._check(
            inner == num_in,
            lambda: f"moefx::{name}: rows are {num_in} wide, the experts' weights take {inner}",
        )
    return inner, outer


def check_dtypes(name: str, rows: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to compute in. Raise `InvalidInput` if dtypes differ without autocast."""
    if dtype is None:
        other = next((t.dtype for t in tensors if t.dtype != rows.dtype), None)
        if other is not None:
            raise InvalidInput(
                f"moefx::{name}: rows are {rows.dtype}, expert parameters are {other}. Cast one of them, or "
                "run under torch.autocast, which casts both"
            )
    elif dtype != rows.dtype:
        raise InvalidInput(f"moefx::{name}: rows are {rows.dtype}, dtype={dtype} was requested")
    return rows.dtype


def choose_autocast_dtype(dtype: torch.dtype, rows: Tensor) -> torch.dtype:
    """Return the dtype of rows under autocast, which leaves float64 unchanged, as in `linear`."""
    return rows.dtype if rows.dtype is torch.float64 else dtype


def has_separate_gradients(parameters: Sequence[Tensor], dim: int) -> bool:
    """Return whether `expert_mlp_backward` returns E gradients for these parameters, rather than one stacked [E,...].

    On the CPU, GEMMs run expert by expert, and a stack of separate gradients would be a copy. Elsewhere one kernel
    writes the stack; its slices are the gradients.
    """
    return not is_stacked(parameters, dim) and parameters[0].device.type == "cpu"


def unstack_gradient(grad: Tensor | None, parameters: Sequence[Tensor], dim: int) -> list[Tensor] | None:
    """Return views of a stacked gradient as the gradients of a list of parameters."""
    if grad is None:
        return None
    return [grad] if is_stacked(parameters, dim) else list(grad.unbind(0))


def _check_num_experts(name: str, num: Any, expert_offsets: Tensor) -> None:
    expected = expert_offsets.shape[0] - 1
    torch._check(num == expected, lambda: f"moefx::{name}: parameters of {num} experts, routing over {expected}")


@grouped_mm.fake
def _(rows, w, expert_offsets, summand=None, *, transposed, dtype=None):
    check_dtypes("grouped_mm", rows, w, dtype)
    return rows.new_empty(
        (rows.shape[0], check_weight_shape("grouped_mm", w, expert_offsets, transposed, rows.shape[1])[1])
    )


@grouped_mm_backward.fake
def _(grad, rows, expert_offsets, *, transposed, dtype):
    num_experts = expert_offsets.shape[0] - 1
    inner, outer = rows.shape[1], grad.shape[1]
    return rows.new_empty((num_experts, *((outer, inner) if transposed else (inner, outer))), dtype=dtype)


@expert_rows.fake
def _(v, expert_offsets, num_rows):
    return v[0].new_empty((num_rows, v[0].shape[-1]))


@expert_rows_backward.fake
def _(grad, expert_offsets, *, dtype):
    return grad.new_empty((expert_offsets.shape[0] - 1, grad.shape[1]), dtype=dtype)


@grouped_mm.autocast
def _(autocast, rows, w, expert_offsets, summand=None, *, transposed, dtype=None):
    dtype = dtype or choose_autocast_dtype(autocast, rows)
    summand = None if summand is None else summand.to(dtype)
    return (rows.to(dtype), w, expert_offsets, summand), {"transposed": transposed, "dtype": dtype}


def _save_for_grouped_mm(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
    rows, w, expert_offsets, *_ = args
    ctx.transposed, ctx.dtype = kwargs["transposed"], kwargs.get("dtype")
    ctx.save_for_backward(rows, expert_offsets, *w)


def _grouped_mm_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    rows, expert_offsets, *w = unpack_saved(ctx)
    grad_rows = grad_w = None
    if ctx.needs[0]:
        grad_rows = grouped_mm(grads[0], w, expert_offsets, transposed=not ctx.transposed, dtype=ctx.dtype)
    if ctx.needs[1]:
        grad_w = grouped_mm_backward(grads[0], rows, expert_offsets, transposed=ctx.transposed, dtype=w[0].dtype)
    return grad_rows, unstack_gradient(grad_w, w, 2), None, *[grads[0]] * (len(ctx.needs) - 3)


def _save_for_expert_rows(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
    ctx.stacked, ctx.dtype = is_stacked(args[0], 1), args[0][0].dtype
    ctx.save_for_backward(args[1])


def _expert_rows_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    grad = expert_rows_backward(grads[0], *unpack_saved(ctx), dtype=ctx.dtype)
    return [grad] if ctx.stacked else list(grad.unbind(0)), None, None


grouped_mm.autograd(save=_save_for_grouped_mm, backward=_grouped_mm_gradients)
grouped_mm_backward.once_differentiable("grouped_mm")
expert_rows.autograd(save=_save_for_expert_rows, backward=_expert_rows_gradients)
expert_rows_backward.once_differentiable("expert_rows")
