"""Provider "triton" of `expert_mlp` and its backward: the sequence of kernels.

The forward gathers in the up-projection, applies the pointwise part to its tiles, and scales in the sum over each
token's rows. The backward is SonicMoE's (see `lowering.torch.expert_mlp_algebra`): with rows = y * c(w)

    dA' = dO @ W2^T, and from it and H in one kernel: A, dH, c*A, <dA', A>
    dW2 = (c*A)^T @ dO        d c = <dA', A> + <dO, bias>
    dW1 = dH^T @ X            dX = sum over each token's rows of dH @ W1

No atomics touch results, only the stash's cursor and counters, and every sum has a fixed order: results repeat bit by
bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.activation_stash import Stash, find_stash, make_missed_ticket
from ...ir.expressions.expert_body import ExpertBody
from ...ir.ops.expert_mlp import split_gradient
from ...ir.running_block import running
from .expert_mlp_backward_call import BackwardCall
from .expert_mlp_call import KernelCall, choose_matmul_precision, make_rows_contiguous
from .launch_replay import apply, replay_or_record
from .stash_kernels import put_rows, take_rows

_X, _INVERSE = 0, 3  # arguments whose first size is the number of tokens, which row kernels do not depend on


def expert_mlp(
    *args: Any,
    body: str,
    keep: str = "h",
    reduce: bool = False,
    dtype: torch.dtype | None = None,
    stash_rows: float | None = None,
) -> list[Tensor]:
    args = args[:9]
    inputs, constants = args[:5], [p for group in args[5:] for p in group]
    key = ("forward", body, keep, reduce, dtype, choose_matmul_precision(args[0]), *map(len, args[5:]))
    stash = _find_stash(args, body, keep, dtype, stash_rows)
    if stash is not None:
        key, constants = (*key, running.counter), [*constants, *stash.tensors]

    def host_code() -> list[Tensor]:
        return _forward(KernelCall(args, body, keep, dtype), keep, reduce, stash)

    return replay_or_record(key, inputs, constants, host_code, (_X, _INVERSE))


def expert_mlp_backward(
    grad: Tensor,
    *args: Any,
    body: str,
    keep: str,
    reduce: bool = False,
    dtype: torch.dtype | None = None,
    stash_rows: float | None = None,
    needs: Sequence[bool],
    overwrite: bool = False,
    part: str = "all",
) -> list[Tensor]:
    *forward, kept = args
    inputs, constants = [grad, *forward[:5], *kept], [p for group in forward[5:] for p in group]
    key = ("backward", body, keep, reduce, dtype, choose_matmul_precision(forward[0]), *needs, overwrite, part)
    key = (*key, *map(len, forward[5:]))
    stash = None if part == "weights" else _find_stash(forward, body, keep, dtype, stash_rows)
    constants += [] if stash is None else stash.tensors

    def host_code() -> list[Tensor]:
        kernel_call = BackwardCall(forward, body, keep, dtype, overlaps_exchange=part == "weights")
        if part == "weights":
            return _weight_backward(kernel_call, grad, kept, reduce, needs)
        if stash is not None:
            kept_rows = _take_kept_rows(kernel_call, keep, stash, kept[0])
            return _backward(kernel_call, grad, kept_rows, reduce, needs, overwrite=True, defer=part == "rows")
        return _backward(kernel_call, grad, kept, reduce, needs, overwrite, defer=part == "rows")

    by_token = [1 + _X, 1 + _INVERSE, *[0] * reduce]  # with `reduce` the gradient is by token
    return replay_or_record(key, inputs, constants, host_code, by_token)


def _find_stash(
    args: Sequence[Any], body: str, keep: str, dtype: torch.dtype | None, stash_rows: float | None
) -> Stash | None:
    """Find the stash of a call; None if each call keeps its own rows."""
    if stash_rows is None:
        return None
    x, parsed = args[0], ExpertBody.from_json(body)
    widths = parsed.kept_widths(keep, parsed.up_widths(args[5]))
    return find_stash(math.ceil(stash_rows * x.shape[0]), widths, dtype or x.dtype, x.device)


def _forward(kernel_call: KernelCall, keep: str, reduce: bool, stash: Stash | None) -> list[Tensor]:
    call = kernel_call.call
    num_tokens, num_rows = call.x.shape[0], call.num_rows
    if num_rows == 0:
        out = torch.zeros(
            (num_tokens if reduce else 0, kernel_call.out_width), dtype=call.out_dtype, device=kernel_call.device
        )
        if stash is not None:
            return [out, make_missed_ticket(kernel_call.device)]
        return [out, *(kernel_call.empty(0, width) for width in call.body.kept_widths(keep, kernel_call.up_widths))]
    hidden = [kernel_call.empty(num_rows, width) for width in kernel_call.up_widths] if keep in ("h", "all") else None
    act = kernel_call.empty(num_rows, kernel_call.act_width)
    kernel_call.project_up(hidden, act)
    saved = {"h": hidden, "all": [*(hidden or []), act]}.get(keep, [])
    if stash is not None:
        saved = [put_rows(saved or [], call.expert_offsets, stash)]
        del hidden
    out = kernel_call.empty(num_rows, kernel_call.out_width, kernel_call.dtype if reduce else call.out_dtype)
    kernel_call.project_down(act, out, scaled=not reduce)
    if reduce:
        del act
        out = kernel_call.combine(out, call.out_dtype, kernel_call.pointwise.scale)
    return [out, *(saved or [])]


def _take_kept_rows(kernel_call: BackwardCall, keep: str, stash: Stash, ticket: Tensor) -> list[Tensor]:
    """Take the kept rows out of the stash, or compute them again."""
    call = kernel_call.call
    kept_rows = [
        kernel_call.empty(call.num_rows, width) for width in call.body.kept_widths(keep, kernel_call.up_widths)
    ]
    if call.num_rows:
        missing_offsets = take_rows(kept_rows, call.expert_offsets, stash, ticket)
        num_up = len(call.up)
        kernel_call.with_offsets(missing_offsets).project_up(kept_rows[:num_up], next(iter(kept_rows[num_up:]), None))
    return kept_rows


def _backward(
    kernel_call: BackwardCall,
    grad: Tensor,
    kept: Sequence[Tensor],
    reduce: bool,
    needs: Sequence[bool],
    overwrite: bool,
    defer: bool,
) -> list[Tensor]:
    need_x, need_w, need_up, need_up_bias, need_down, need_down_bias = needs
    call, pointwise = kernel_call.call, kernel_call.pointwise
    num_rows = call.num_rows
    if num_rows == 0:
        sides = (
            [kernel_call.empty(0, width) for width in (*kernel_call.up_widths, kernel_call.act_width)] if defer else []
        )
        return [*_zero_gradients(kernel_call, needs), *sides]
    grad = _prepare_gradient(kernel_call, grad)
    hidden = list(kept[: len(call.up)])
    if not hidden:
        hidden = [kernel_call.empty(num_rows, width) for width in kernel_call.up_widths]
        kernel_call.project_up(hidden, None)
    # dH overwrites H if H was recomputed here or is not read again.
    grad_hidden = (
        hidden if overwrite or not kept else [kernel_call.empty(num_rows, width) for width in kernel_call.up_widths]
    )
    # scale * A is the right side of dW2. Without a scale it is the activation, which may have been kept.
    kept_act = None if defer or pointwise.scale is not None else next(iter(kept[len(call.up) :]), None)
    scaled_act = (
        kernel_call.empty(num_rows, kernel_call.act_width) if defer or (need_down and kept_act is None) else None
    )
    dots, num_partials, grad, by_token = kernel_call.act_backward(grad, reduce, hidden, grad_hidden, scaled_act, need_w)
    del hidden

    results: list[Tensor] = []
    grad_w = [kernel_call.weight_gradient(grad, by_token, dots, num_partials)] if need_w else []
    del dots
    grad_down = []
    if need_down:
        right = kept_act if scaled_act is None else scaled_act
        assert right is not None
        grad_down = _down_gradients(kernel_call, grad, by_token, right)
        del right
    sides = [*grad_hidden, scaled_act] if defer else []
    del scaled_act
    grad_down_bias = []
    if need_down_bias and call.down_bias:
        stacked = kernel_call.sum_rows(grad, by_token, pointwise.scale, call.down_bias[0].dtype)
        grad_down_bias = split_gradient(stacked, call.down_bias, 1)
    del grad
    if need_x:  # before dW1, so that the rows of dX are freed by then
        grad_rows = kernel_call.empty(num_rows, call.x.shape[1])
        kernel_call.multiply_rows(grad_hidden, kernel_call.up, grad_rows, backward=True)
        results.append(kernel_call.combine(grad_rows, call.x.dtype, None))
        del grad_rows
    grad_up = _up_gradients(kernel_call, grad_hidden) if need_up else []
    grad_up_bias = []
    for hidden_grad, bias in zip(grad_hidden, call.up_bias, strict=True):
        if need_up_bias and bias:
            grad_up_bias += split_gradient(kernel_call.sum_rows(hidden_grad, False, None, bias[0].dtype), bias, 1)
    return [*results, *grad_w, *grad_up, *grad_up_bias, *grad_down, *grad_down_bias, *sides]


def _weight_backward(
    kernel_call: BackwardCall, grad: Tensor, sides: Sequence[Tensor], reduce: bool, needs: Sequence[bool]
) -> list[Tensor]:
    if kernel_call.call.num_rows == 0:
        return _zero_gradients(kernel_call, needs)
    *grad_hidden, scaled_act = sides
    grad_up = _up_gradients(kernel_call, grad_hidden) if needs[2] else []
    return [
        *grad_up,
        *(_down_gradients(kernel_call, _prepare_gradient(kernel_call, grad), reduce, scaled_act) if needs[4] else []),
    ]


def _prepare_gradient(kernel_call: BackwardCall, grad: Tensor) -> Tensor:
    if grad.dtype is not kernel_call.dtype:
        grad = apply(lambda tensor, dtype=kernel_call.dtype: tensor.to(dtype), grad)
    return make_rows_contiguous(grad)


def _down_gradients(kernel_call: BackwardCall, grad: Tensor, by_token: bool, act: Tensor) -> list[Tensor]:
    sides = ((grad, by_token), (act, False))
    left, right = sides if kernel_call.down.out_dim == 0 else sides[::-1]
    parameters = kernel_call.call.down
    return split_gradient(kernel_call.outer("grad_down", left, right, parameters[0].dtype), parameters, 2)


def _up_gradients(kernel_call: BackwardCall, grad_hidden: Sequence[Tensor]) -> list[Tensor]:
    gradients = []
    for grad, w, parameters in zip(grad_hidden, kernel_call.up, kernel_call.call.up, strict=True):
        sides = ((grad, False), (kernel_call.x, True))
        left, right = sides if w.out_dim == 0 else sides[::-1]
        gradients += split_gradient(kernel_call.outer("grad_up", left, right, parameters[0].dtype), parameters, 2)
    return gradients


def _zero_gradients(kernel_call: BackwardCall, needs: Sequence[bool]) -> list[Tensor]:
    call = kernel_call.call
    results = [torch.zeros_like(call.x)] if needs[0] else []
    results += [torch.zeros(0, dtype=kernel_call.w.dtype, device=kernel_call.device)] if needs[1] else []
    groups = (call.up, [b for b in call.up_bias if b], [call.down], [call.down_bias] if call.down_bias else [])
    for need, group, dim in zip(needs[2:], groups, (2, 1, 2, 1), strict=True):
        if need:
            for p in group:
                results += split_gradient(p[0].new_zeros((kernel_call.num_experts, *p[0].shape[-dim:])), p, dim)
    return results
