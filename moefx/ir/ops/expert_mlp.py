"""`expert_mlp`: gather, up-projection, pointwise, down-projection, pointwise, as one op. Letters as in `dialect`.

The checkpoint policy (MoEBlaze section 5) decides what its backward keeps. A library op can save only inputs and
outputs, so activations to keep are extra outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..activation_stash import TICKET_SIZE, make_missed_ticket
from ..expressions import pointwise_derivative
from ..expressions.expert_body import ExpertBody, Gemm
from ..expressions.pointwise_expression import evaluate, is_linear
from . import expert_gemms, token_routing
from .mlp_arguments import ExpertMlpCall
from .op_definition import is_last_use, op, unpack_saved
from .partial_backward import DelayedGradients

_SIGNATURE = (
    "Tensor x, Tensor token_ids, Tensor expert_offsets, Tensor inverse, Tensor? row_weights, "
    "Tensor[] up, Tensor[] up_bias, Tensor[] down, Tensor[] down_bias"
)
_CONTRACT = (
    "x[S,D], token_ids[B], expert_offsets[E+1], inverse[S,K], row_weights[B]?, up[*], up_bias[*], down[*], down_bias[*]"
)


@op(
    f'expert_mlp({_SIGNATURE}, Tensor? later=None, *, str body, str keep="h", bool reduce=False, '
    "ScalarType? dtype=None, float? stash_rows=None) -> Tensor[]",
    contract=f"{_CONTRACT} -> rows[_,_]",  # [B,D], or their sums [S,D]
    keeps_activations=True,
    without_backward={"keep": "none", "stash_rows": None},
)
def expert_mlp(
    *args: Any,
    body: str,
    keep: str = "h",
    reduce: bool = False,
    dtype: torch.dtype | None = None,
    stash_rows: float | None = None,
) -> list[Tensor]:
    """Run the expert MLP on the routed rows of x. `body` is the JSON of an `ExpertBody`, which documents the formulas.

    Args:
        x: [S,D]. token_ids, expert_offsets, inverse: from `build_pft`. row_weights: [B], the variable w.
        up, up_bias, down, down_bias: expert parameters, flat lists in the order of the body's GEMMs.
        later: result of `weights_later(up, down)`, whose backward then computes the gradients of these matrices.
        keep: "h" keeps the up-projections and recomputes the activation, "x" keeps only the inputs, "all" keeps the
            activation too. "none" is for inference; a backward recomputes as with "x".
        reduce: return the sum of each token's rows instead of the rows, like `combine` without weights.
        dtype: the dtype of x, to compute in whatever that of the parameters; set by autocast.
        stash_rows: rows of the stash for each row of x, see `ir.activation_stash`. None keeps the values of all rows.

    Returns:
        The rows [B,D'] (or their sums [S,D']). Then the kept values: each up-projection [B,F] and the activation
        [B,F']. The backward may overwrite kept values unless the graph is retained. With `stash_rows` they are in the
        stash, and a ticket int64 [3] is returned instead; this implementation returns a missed ticket.
    """
    call = ExpertMlpCall.of(args, body, keep, dtype)
    rows = call.x.index_select(0, call.token_ids)
    hidden = [_multiply_rows(call, rows, *group) for group in zip(call.up, call.up_bias, call.body.up, strict=True)]
    act = _compute_activation(call, hidden)
    out = _compute_output(call, act)
    if reduce:
        out = token_routing.combine.reference(out, None, call.token_ids, call.expert_offsets, call.inverse)
    if stash_rows is not None:
        return [out, make_missed_ticket(out.device)]
    saved = {"h": hidden, "all": [*hidden, act]}.get(keep, [])
    return [out, *saved]


def _compute_activation(call: ExpertMlpCall, hidden: Sequence[Tensor]) -> Tensor:
    act = evaluate(call.act, _add_weight_variable(call, call.slice_hidden(_add_separate_biases(call, hidden))))
    return act.clone() if isinstance(call.act, str) else act  # outputs of an op must not share storage


def _compute_output(call: ExpertMlpCall, act: Tensor) -> Tensor:
    return evaluate(call.body.out, _add_weight_variable(call, {"y": _project_down(call, act)}))


def _project_down(call: ExpertMlpCall, act: Tensor) -> Tensor:
    y = _multiply_rows(call, act, call.down, call.down_bias, call.body.down)
    return _add_separate_bias(call, y, call.down_bias, call.body.down)


def _add_separate_biases(call: ExpertMlpCall, hidden: Sequence[Tensor]) -> list[Tensor]:
    """Add the biases that are added in another dtype than the products'."""
    return [_add_separate_bias(call, *operands) for operands in zip(hidden, call.up_bias, call.body.up, strict=True)]


def _add_weight_variable(call: ExpertMlpCall, env: dict[str, Tensor]) -> dict[str, Tensor]:
    return env if call.w is None else {**env, "w": call.w}


def _multiply_rows(call: ExpertMlpCall, rows: Tensor, w: list[Tensor], bias: list[Tensor] | None, gemm: Gemm) -> Tensor:
    summand = None
    if bias is not None and call.separate_bias_dtype(gemm) is None:
        summand = expert_gemms.expert_rows.reference(bias, call.expert_offsets, call.num_rows).to(call.dtype)
    return expert_gemms.grouped_mm.reference(
        rows, w, call.expert_offsets, summand, transposed=gemm.transposed, dtype=call.dtype
    )


def _add_separate_bias(call: ExpertMlpCall, product: Tensor, bias: list[Tensor] | None, gemm: Gemm) -> Tensor:
    dtype = call.separate_bias_dtype(gemm)
    if bias is None or dtype is None:
        return product
    return product.to(dtype) + expert_gemms.expert_rows.reference(bias, call.expert_offsets, call.num_rows).to(dtype)


@op(
    f"expert_mlp_backward(Tensor grad, {_SIGNATURE}, Tensor[] kept, "
    "*, str body, str keep, bool reduce=False, ScalarType? dtype=None, float? stash_rows=None, bool[] needs, "
    'bool overwrite=False, str part="all") -> Tensor[]',
    contract=f"grad[_,N], {_CONTRACT}, kept[*] -> gradients[*]",
)
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
    """Compute gradients of `expert_mlp` from `grad`, the gradient of its first output.

    Args:
        kept: the extra outputs of the forward.
        needs: whether to compute each gradient: x, row_weights, up, up_bias, down, down_bias.
        overwrite: whether `kept` may be overwritten and returned, which lowers peak memory. The schema does not declare
            this mutation: only the eager backward of a graph that is freed afterwards uses it.
        part: "rows" leaves out the gradients of up and down, which no other node waits for. "weights" computes these;
            its `kept` are the extra results of "rows".

    Returns:
        The needed gradients in that order, for up and up_bias GEMM by GEMM: one stacked [E,...] each, or E separate
        ones (see `expert_gemms.has_separate_gradients`). Part "rows" adds the factors of the gradients of up and down:
        the gradient of each up-projection [B,F], the activation [B,F'], and the gradient of y [B,D']. If the result is
        linear in y, the gradient of y is left out: the returned activation is scaled, and its factor is `grad`.
    """
    call, kept = ExpertMlpCall.of(args[:-1], body, keep, dtype), args[-1]
    need_x, need_w, need_up, need_up_bias, need_down, need_down_bias = needs
    if part == "weights":
        return _matrix_gradients(call, *_matrix_factors(call, grad, kept, reduce), need_up, need_down)
    offsets, kept = call.expert_offsets, [] if stash_rows is not None else kept
    rows = call.x.index_select(0, call.token_ids)
    groups = list(zip(call.up, call.up_bias, call.body.up, strict=True))
    hidden = list(kept[: len(groups)]) or [_multiply_rows(call, rows, *group) for group in groups]
    act = _compute_activation(call, hidden)
    y = _project_down(call, act)
    wrt = ["w"] if need_w else []
    if reduce:
        grad = grad.index_select(0, call.token_ids)

    _, out_gradients = pointwise_derivative.vjp(
        call.body.out, _add_weight_variable(call, {"y": y}), grad, ["y", *wrt], value=False
    )
    grad_y = out_gradients["y"]
    grad_product = grad_y.to(call.dtype)
    grad_act = expert_gemms.grouped_mm.reference(
        grad_product, call.down, offsets, transposed=not call.body.down.transposed, dtype=call.dtype
    )
    hidden = _add_separate_biases(call, hidden)
    env = _add_weight_variable(call, call.slice_hidden(hidden))
    _, act_gradients = pointwise_derivative.vjp(
        call.act, env, grad_act, [*env][: len(call.body.parts)] + wrt, value=False
    )
    grad_hidden = [torch.zeros_like(h) for h in hidden]
    for name, columns in call.slice_hidden(grad_hidden).items():
        if name in act_gradients:
            columns += act_gradients[name]
    grad_up = [g.to(call.dtype) for g in grad_hidden]

    gradients = []
    if need_x:
        grad_rows = torch.zeros_like(rows)
        for g, (w, _, gemm) in zip(grad_up, groups, strict=True):
            grad_rows += expert_gemms.grouped_mm.reference(
                g, w, offsets, transposed=not gemm.transposed, dtype=call.dtype
            )
        gradients.append(token_routing.combine.reference(grad_rows, None, call.token_ids, offsets, call.inverse))
    if need_w:
        gradients.append(sum_weight_gradient(call, out_gradients.get("w"), act_gradients.get("w")))
    gradients += _matrix_gradients(call, grad_up, act, grad_product, need_up, False)
    sum_by_expert = expert_gemms.expert_rows_backward.reference
    if need_up_bias:
        for g, (_, b, _) in zip(grad_hidden, groups, strict=True):
            gradients += split_gradient(sum_by_expert(g, offsets, dtype=b[0].dtype), b, 1) if b else []
    gradients += _matrix_gradients(call, grad_up, act, grad_product, False, need_down)
    if need_down_bias and call.down_bias:
        grad_bias = sum_by_expert(grad_y, offsets, dtype=call.down_bias[0].dtype)
        gradients += split_gradient(grad_bias, call.down_bias, 1)
    if part == "rows":
        linear = is_linear(call.body.out, "y")
        gradients += grad_up
        gradients += (
            [(act * evaluate(call.body.out, make_unit_variables(call))).to(call.dtype)]
            if linear
            else [act, grad_product.clone()]
        )
    return gradients


def make_unit_variables(call: ExpertMlpCall) -> dict[str, Tensor]:
    """Return variables for which `out` evaluates to its factor c(w) [B,1], if it is linear in y: rows = y * c(w)."""
    ones = torch.ones((call.num_rows, 1), dtype=call.dtype, device=call.x.device)
    return _add_weight_variable(call, {"y": ones})


def _matrix_factors(
    call: ExpertMlpCall, grad: Tensor, kept_rows: Sequence[Tensor], reduce: bool
) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    """Return the gradients of the up-projections, the activation, and the gradient of y, from the extra results of part
    "rows"."""
    *grad_up, act = kept_rows[: len(call.up) + 1]
    if len(kept_rows) > len(call.up) + 1:
        return grad_up, act, kept_rows[-1]
    return grad_up, act, (grad.index_select(0, call.token_ids) if reduce else grad).to(call.dtype)


def _matrix_gradients(
    call: ExpertMlpCall, grad_up: Sequence[Tensor], act: Tensor, grad_y: Tensor, need_up: bool, need_down: bool
) -> list[Tensor]:
    grouped_outer, gradients = expert_gemms.grouped_mm_backward.reference, []
    if need_up:
        rows = call.x.index_select(0, call.token_ids).to(call.dtype)
        for g, w, gemm in zip(grad_up, call.up, call.body.up, strict=True):
            stacked = grouped_outer(g, rows, call.expert_offsets, transposed=gemm.transposed, dtype=w[0].dtype)
            gradients += split_gradient(stacked, w, 2)
    if need_down:
        transposed, dtype = call.body.down.transposed, call.down[0].dtype
        stacked = grouped_outer(grad_y, act, call.expert_offsets, transposed=transposed, dtype=dtype)
        gradients += split_gradient(stacked, call.down, 2)
    return gradients


def split_gradient(stacked: Tensor, parameters: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Convert a stacked gradient [E,...] to the form that `expert_mlp_backward` returns."""
    # Outputs of an op must not share storage.
    return [g.clone() for g in stacked] if expert_gemms.has_separate_gradients(parameters, dim) else [stacked]


def sum_weight_gradient(call: ExpertMlpCall, *columns: Tensor | None) -> Tensor:
    """Sum columns [B,1] to the gradient of the row weights [B], zero in the tail."""
    assert call.w is not None
    total = torch.zeros_like(call.w, dtype=torch.promote_types(call.w.dtype, torch.float32))
    for column in columns:
        if column is not None:
            total += column
    return token_routing.clear_tail(total[:, 0], call.expert_offsets).to(call.w.dtype)


# -- registration


@expert_mlp.fake
def _(*args, body, keep="h", reduce=False, dtype=None, stash_rows=None):
    call = ExpertMlpCall.of(args, body, keep, dtype)
    up, _, out = call.widths
    rows = call.x.new_empty((call.x.shape[0] if reduce else call.num_rows, out), dtype=call.out_dtype)
    if stash_rows is not None:
        return [rows, call.x.new_empty(TICKET_SIZE, dtype=torch.int64)]
    return [rows, *(call.x.new_empty((call.num_rows, width)) for width in call.body.kept_widths(keep, up))]


@expert_mlp_backward.fake
def _(grad, *args, body, keep, reduce=False, dtype=None, stash_rows=None, needs, overwrite=False, part="all"):
    call = ExpertMlpCall.of(args[:-1], body, keep, dtype)
    x, w = call.x, args[4]
    dims = {
        2: call.up,
        3: [b for b in call.up_bias if b],
        4: [call.down],
        5: [call.down_bias] if call.down_bias else [],
    }
    num_experts = call.expert_offsets.shape[0] - 1
    gradients = [x.new_empty(x.shape)] if needs[0] else []
    gradients += [w.new_empty(w.shape)] if needs[1] else []
    for index, groups in dims.items():
        if needs[index]:
            dim = 1 if index in (3, 5) else 2
            for group in groups:
                if expert_gemms.has_separate_gradients(group, dim):
                    gradients += [p.new_empty(p.shape) for p in group]
                else:
                    gradients.append(group[0].new_empty((num_experts, *group[0].shape[-dim:])))
    if part == "rows":
        up, act, out = call.widths
        widths = [*up, act] if is_linear(call.body.out, "y") else [*up, act, out]
        gradients += [x.new_empty((call.num_rows, width), dtype=call.dtype) for width in widths]
    return gradients


@expert_mlp.autocast
def _(autocast, x, *args, dtype=None, **kwargs):
    dtype = dtype or expert_gemms.choose_autocast_dtype(autocast, x)
    return (x.to(dtype), *args), {**kwargs, "dtype": dtype}


def _save_for_expert_mlp(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
    ctx.kwargs = {"keep": "h", **kwargs}
    kept_rows = list(outputs[1:])
    ctx.mark_non_differentiable(*kept_rows)
    ctx.sizes = [len(tensors) for tensors in (*args[5:9], kept_rows)]
    # Save the parameters themselves, so that autograd notices an in-place update before the backward.
    ctx.save_for_backward(*args[:5], *(t for tensors in (*args[5:9], kept_rows) for t in tensors))


def _expert_mlp_gradients(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    saved = iter(unpack_saved(ctx))
    inputs = [next(saved) for _ in range(5)]
    lists = [[next(saved) for _ in range(size)] for size in ctx.sizes]
    up, up_bias, down, down_bias, kept_rows = lists
    needs, kwargs = [ctx.needs[0], *ctx.needs[4:9]], ctx.kwargs
    later_node: Any = ctx.next_functions[-1][0] if any(ctx.needs[9:]) else None
    if later_node is not None and later_node.name() != "weights_laterBackward":
        later_node = None  # Dynamo cut the graph between the two: another node stands there
    is_delayed = later_node is None and not (needs[2] or needs[4]) and (ctx.needs_later[5] or ctx.needs_later[7])
    if is_delayed:  # another backward needs the matrices; sums for biases are cheap now
        needs[3], needs[5] = (ctx.needs[i] or ctx.needs_later[i] for i in (6, 8))
    if later_node is not None or is_delayed:
        needs[2] = needs[4] = False
        kwargs = {**kwargs, "part": "rows"}
    if kept_rows and kwargs.get("stash_rows") is None and is_last_use(kept_rows):
        kwargs = {**kwargs, "overwrite": True}
        torch.autograd.graph.increment_version(kept_rows)  # other nodes that saved them will raise
    results = iter(expert_mlp_backward(grads[0], *inputs, *lists, **kwargs, needs=needs))
    body = ExpertBody.from_json(ctx.kwargs["body"])
    biased = [g for g in body.up if g.bias]
    grad_x = next(results) if needs[0] else None
    grad_w = next(results) if needs[1] else None
    grad_up = _take_group(results, up, body.up, 2, needs[2])
    grad_up_bias = _take_group(results, up_bias, biased, 1, needs[3])
    grad_down = _take_group(results, down, (body.down,), 2, needs[4])
    grad_down_bias = _take_group(results, down_bias, (body.down,) if body.down.bias else (), 1, needs[5])
    no_gradients = [None] * (len(ctx.needs) - 9)
    gradients = [grad_x, None, None, None, grad_w, grad_up, grad_up_bias, grad_down, grad_down_bias, *no_gradients]
    if later_node is None and not is_delayed:
        return gradients
    factors, all_parts = list(results), ctx.kwargs

    # Does not refer to `ctx`, which refers to this function. If the other node does not run, as in `autograd.grad` by x
    # alone, the graph holds the factors until it is freed.
    def compute_matrices(need_up: bool, need_down: bool) -> Sequence[Any]:
        needs = [False, False, need_up, False, need_down, False]
        arguments = (grads[0], *inputs, *lists[:4], factors)
        weight_gradients = iter(expert_mlp_backward(*arguments, **all_parts, needs=needs, part="weights"))
        return _take_group(weight_gradients, up, body.up, 2, need_up), _take_group(
            weight_gradients, down, (body.down,), 2, need_down
        )

    if is_delayed:

        def compute_delayed(needs: Sequence[bool]) -> Sequence[Any]:
            grad_up_matrices, grad_down_matrices = compute_matrices(needs[5], needs[7])
            bias_gradients = [g and [b.clone() for b in g] for g in (grad_up_bias, grad_down_bias)]  # it may run again
            return [None] * 5 + [
                grad_up_matrices,
                bias_gradients[0],
                grad_down_matrices,
                bias_gradients[1],
                *no_gradients,
            ]

        ctx.delayed = DelayedGradients(range(5, len(ctx.needs)), compute_delayed)
        return gradients
    later_node.compute_matrices = compute_matrices  # pyright: ignore[reportOptionalMemberAccess]
    return [*gradients[:9], up[0].new_empty(0)]


def _take_group(
    results: Iterator[Tensor], tensors: Sequence[Tensor], gemms: Sequence[Gemm], dim: int, needed: bool
) -> list[Any] | None:
    """Take the gradients of a flat list of parameters from the op's results, GEMM by GEMM."""
    if not needed:
        return None
    gradients: list[Any] = []
    for gemm in gemms:
        group = tensors[len(gradients) : len(gradients) + gemm.num]
        if expert_gemms.has_separate_gradients(group, dim):
            gradients += [next(results) for _ in group]
        else:
            gradients += expert_gemms.unstack_gradient(next(results), group, dim) or []
    return gradients


expert_mlp.autograd(save=_save_for_expert_mlp, backward=_expert_mlp_gradients)
expert_mlp_backward.once_differentiable("expert_mlp")
