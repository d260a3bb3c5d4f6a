"""Providers "segments" and "grouped_mm" of `expert_mlp`: one algorithm over two kinds of GEMMs.

The backward follows SonicMoE. The result is usually linear in y, rows = y * c(w). Then y is not needed:

    dA' = dO @ W2^T               A and dH from H and c*dA'
    dW2 = (c*A)^T @ dO            d c = <dO, y> = <dA', A> + <dO, bias>
    dW1 = dH^T @ X                dX = sum over each token's rows of dH @ W1

A body whose `out` is not linear in y (for example a norm after the down-projection) recomputes y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.activation_stash import make_missed_ticket
from ...ir.expressions import pointwise_derivative, pointwise_expression
from ...ir.ops.expert_mlp import expert_mlp, expert_mlp_backward, make_unit_variables, sum_weight_gradient
from ...ir.ops.mlp_arguments import ExpertMlpCall
from . import grouped_mm
from .gemm_operands import Buffer, Gemms, Gradient, Group, Parameters, RowOperands, Scale, cast_tensor
from .grouped_mm import GroupedGemms
from .segments import SegmentGemms


def forward(call: ExpertMlpCall, gemms: Gemms, keep: str, reduce: bool) -> list[Tensor]:
    up_widths, act_width, out_width = call.widths
    x, parameters, row_operands = call.x, Parameters(call, gemms), RowOperands(call, gemms)
    compute_act, compute_out = (
        pointwise_expression.compile_expression(pointwise_expression.to_canonical_text(e))
        for e in (call.act, call.body.out)
    )

    def make_buffer(width: int, dtype: torch.dtype) -> Buffer:
        return Buffer(gemms, gemms.new_rows(x, call.num_rows, width, dtype))

    result = None if reduce else make_buffer(out_width, call.out_dtype)
    total: Any = gemms.new_sum(call, out_width, call.out_dtype) if reduce else None
    kept_up = [make_buffer(width, call.dtype) for width in up_widths] if keep in ("h", "all") else []
    kept_act = make_buffer(act_width, call.dtype) if keep == "all" else None
    # In-place multiplication rounds as the expression does if y has the result's dtype and the expression has no casts.
    in_place = (
        parameters.down_bias_dtype is None and call.out_dtype == call.dtype and row_operands.factor == call.body.out
    )
    scale_in_place = row_operands.scale is not None and in_place

    def run(group: Group) -> Tensor:
        rows = x.index_select(0, row_operands.token_ids[group.index])
        hidden = []
        for g in range(len(up_widths)):
            up_slice = kept_up[g].find_slice(group) if kept_up else None
            h = parameters.project_up(g, group, rows, up_slice)
            hidden.append(kept_up[g].store(group, h) if kept_up else h)
        env = row_operands.add_weight_variable(group, call.slice_hidden(parameters.add_separate_biases(group, hidden)))
        act = compute_act(env)
        if kept_act is not None:  # outputs of an op must not share storage
            act = kept_act.store(group, act.clone() if isinstance(call.act, str) else act)
        down_slice = None if result is None else result.find_slice(group)
        if call.body.out == "y":
            out = parameters.project_down(group, act, down_slice)
        elif row_operands.scale is not None and scale_in_place:
            out = parameters.project_down(group, act, down_slice).mul_(row_operands.scale[group.index])
        else:
            out = compute_out({**env, "y": parameters.project_down(group, act)})
        return out if result is None else result.store(group, out)

    gemms.for_each_group(run, total.add if total else None, multiplications=call.count_multiplications())
    kept_rows = [gemms.finish_rows(b.tensor) for b in (*kept_up, kept_act) if b is not None]
    return [gemms.finish_rows(result.tensor) if result else total.result(), *kept_rows]


class Backward:
    """One backward call: `run` for each group, then `results`."""

    def __init__(
        self,
        call: ExpertMlpCall,
        gemms: Gemms,
        kept: Sequence[Tensor],
        grad: Tensor,
        needs: Sequence[bool],
        reduce: bool,
        defer: bool,
    ):
        self.call, self.gemms, self.parameters = call, gemms, Parameters(call, gemms)
        self.down = gemms.transpose_weights(self.parameters.down)
        self.up = [gemms.transpose_weights(w) for w in self.parameters.up]
        self.grad, self.act_vjp = grad, None
        self.grads = None if reduce else gemms.input_slices(grad)  # by row; else by token
        self.need_x, self.need_w, need_up, need_up_bias, need_down, need_down_bias = needs
        num_up = len(call.up)
        self.hidden = [gemms.input_slices(h) for h in kept[:num_up]]
        self.kept_act = gemms.input_slices(kept[num_up]) if len(kept) > num_up else None
        self.linear, self.row_operands = pointwise_expression.is_linear(call.body.out, "y"), RowOperands(call, gemms)

        self.grad_x = gemms.new_sum(call, call.x.shape[1], call.dtype) if self.need_x else None
        self.grad_up = self._make_gradients(need_up, call.up, 2)
        self.grad_up_bias = self._make_gradients(need_up_bias, call.up_bias, 1)
        (self.grad_down,) = self._make_gradients(need_down, [call.down], 2)
        (self.grad_down_bias,) = self._make_gradients(need_down_bias, [call.down_bias], 1)
        out_uses, act_uses = (
            pointwise_expression.list_variables(call.body.out),
            pointwise_expression.list_variables(call.act),
        )
        self.out_weight_gradient = (
            self._make_column(torch.promote_types(grad.dtype, torch.float32)) if "w" in out_uses else None
        )
        self.act_weight_gradient = self._make_column(call.w.dtype) if "w" in act_uses and call.w is not None else None
        up_widths, act_width, out_width = call.widths
        widths = [*up_widths, act_width] if self.linear else [*up_widths, act_width, out_width]
        self.deferred_factors = [Buffer(gemms, self._make_rows(width)) for width in widths] if defer else []

    def _make_rows(self, width: int) -> Tensor | None:
        return self.gemms.new_rows(self.call.x, self.call.num_rows, width, self.call.dtype)

    def _make_gradients(
        self, needed: bool, parameters: Sequence[Sequence[Tensor] | None], dim: int
    ) -> list[Gradient | None]:
        return [Gradient(p, self.gemms.new_stack(p, dim)) if needed and p else None for p in parameters]

    def _make_column(self, dtype: torch.dtype) -> Buffer | None:
        if not self.need_w:
            return None
        return Buffer(self.gemms, self.call.x.new_zeros((self.call.num_rows, 1), dtype=dtype))

    def run(self, group: Group) -> Tensor | None:
        """Fill the group's part of the parameter gradients. Returns the gradient of the gathered rows."""
        call, gemms, parameters, row_operands = self.call, self.gemms, self.parameters, self.row_operands
        tokens, rows = row_operands.token_ids[group.index], None
        # With zeros in the padding all its gradients are zero, so it does not count in sums over rows.
        if self.grads is None:
            grad = group.clear_padding(self.grad.index_select(0, tokens))
        else:
            grad = group.clear_padding(self.grads[group.index], copy=True)
        hidden = [h[group.index] for h in self.hidden]
        if not hidden:
            rows = group.repeat_last(call.x.index_select(0, tokens))
            hidden = [parameters.project_up(g, group, rows) for g in range(len(call.up))]
        hidden = parameters.add_separate_biases(group, hidden)
        env = call.slice_hidden(hidden)
        wrt = [*env, "w"] if self.act_weight_gradient is not None else list(env)
        env = row_operands.add_weight_variable(group, env)
        act = None if self.kept_act is None else self.kept_act[group.index]
        scale = None if row_operands.scale is None else Scale(row_operands.scale[group.index], call.dtype)

        if self.linear:
            grad_sum = grad if scale is None else grad * scale.mantissa
        else:
            act = pointwise_expression.evaluate(call.act, env) if act is None else act
            grad_sum = self._backward_through_out(group, act, grad, env)
        grad_y = cast_tensor(call.dtype, grad_sum)
        if parameters.down_bias_dtype is None:
            grad_sum = grad_y
        product = gemms.multiply(group, grad_y, self.down)
        grad_act = product if scale is None else cast_tensor(call.dtype, product * scale.power)
        if self.act_vjp is None:  # the same function for all groups
            self.act_vjp = pointwise_derivative.build_vjp(call.act, env, grad_act, wrt, value=act is None)
        function, wrt = self.act_vjp
        value, *gradients = function(env, grad_act)
        act_gradients = dict(zip(wrt, gradients, strict=True))
        act = value if act is None else act
        assert act is not None

        if self.act_weight_gradient is not None:
            self.act_weight_gradient.store(group, act_gradients["w"])
        if self.linear and self.out_weight_gradient is not None:
            self.out_weight_gradient.store(group, self._compute_output_dot(group, product, act, grad, scale))
        if self.grad_down is not None or self.deferred_factors:
            factor = None if scale is None else scale.factors if self.deferred_factors else scale.power
            scaled = act if factor is None else cast_tensor(call.dtype, act * factor)
            if self.grad_down is not None:
                self.grad_down.multiply(self.gemms, group, grad_y, scaled, call.body.down.transposed)
            for buffer, values in zip(self.deferred_factors[len(call.up) :], (scaled, grad_y), strict=False):
                buffer.store(group, values.clone() if buffer.tensor is None else values)
        if self.grad_down_bias is not None:
            scaled = grad_sum if scale is None else cast_tensor(grad_sum.dtype, grad_sum * scale.power)
            self._sum_rows(self.grad_down_bias, group, scaled)
        grad_hidden = self._compute_hidden_gradients(hidden, act_gradients)
        del product, grad_act, grad_sum, value, gradients, act_gradients, act, hidden, env
        if rows is None:
            rows = call.x.index_select(0, tokens)
        return self._backward_through_up(group, rows, grad_hidden)

    def _backward_through_out(self, group: Group, act: Tensor, grad: Tensor, env: dict[str, Tensor]) -> Tensor:
        """Return the gradient of y if `out` is not linear in y."""
        y = self.parameters.project_down(group, act)
        wrt = ["y", "w"] if self.out_weight_gradient is not None else ["y"]
        _, out_gradients = pointwise_derivative.vjp(self.call.body.out, {**env, "y": y}, grad, wrt, value=False)
        if self.out_weight_gradient is not None:
            self.out_weight_gradient.store(group, out_gradients["w"])
        return out_gradients["y"]

    def _compute_output_dot(
        self, group: Group, product: Tensor, act: Tensor, grad: Tensor, scale: Scale | None
    ) -> Tensor:
        """Compute <dO, y> for each row, [n,1], in float32 at least. `product` includes the mantissa of the scale."""
        dtype = torch.promote_types(product.dtype, torch.float32)
        dot = (cast_tensor(dtype, product) * act).sum(1, keepdim=True)
        if scale is not None:
            dot /= scale.mantissa
        if self.parameters.down_bias is not None:
            dot += self.gemms.dot_bias(group, grad, self.parameters.down_bias)
        return dot

    def _compute_hidden_gradients(self, hidden: Sequence[Tensor], act_gradients: dict[str, Tensor]) -> list[Tensor]:
        """Compute the gradients of the up-projections from the gradients of their slices, the parts."""
        result = []
        for g, h in enumerate(hidden):
            parts = [(f"a{i}", slice(*part)) for i, (group, *part) in enumerate(self.call.body.parts) if group == g]
            parts = [(name, columns) for name, columns in parts if name in act_gradients]
            if len(parts) == 1 and act_gradients[parts[0][0]].shape == h.shape:
                result.append(act_gradients[parts[0][0]])
                continue
            grad = torch.zeros_like(h)
            for name, columns in parts:
                grad[:, columns] += act_gradients[name]
            result.append(grad)
        return result

    def _backward_through_up(self, group: Group, rows: Tensor, grad_hidden: Sequence[Tensor]) -> Tensor | None:
        grad_rows = None
        for g, grad in enumerate(grad_hidden):
            weight_gradient, bias_gradient = self.grad_up[g], self.grad_up_bias[g]
            if bias_gradient is not None:
                self._sum_rows(bias_gradient, group, grad)
            grad = cast_tensor(self.call.dtype, grad)
            if self.deferred_factors:
                self.deferred_factors[g].store(group, grad)
            if weight_gradient is not None:
                weight_gradient.multiply(self.gemms, group, grad, rows, self.call.body.up[g].transposed)
            if self.need_x:
                grad_rows = self.gemms.multiply(group, grad, self.up[g], grad_rows, add=g > 0)
        return grad_rows

    def _sum_rows(self, buffer: Gradient, group: Group, rows: Tensor) -> None:
        buffer.value = self.gemms.sum_rows(group, rows, buffer.value, buffer.dtype)

    def results(self) -> list[Tensor]:
        call, results = self.call, [] if self.grad_x is None else [self.grad_x.result()]
        if self.need_w:
            out_weight_gradient = self.out_weight_gradient
            columns = [
                None if column is None else column.tensor for column in (out_weight_gradient, self.act_weight_gradient)
            ]
            if self.linear and columns[0] is not None:
                factor, ones = self.row_operands.factor, make_unit_variables(call)
                dot = columns[0].to(
                    pointwise_expression.infer_dtype(factor, {name: t.dtype for name, t in ones.items()})
                )
                columns[0] = pointwise_derivative.vjp(factor, ones, dot, ["w"])[1]["w"]
            results.append(sum_weight_gradient(call, *columns))
        for gradient in (*self.grad_up, *self.grad_up_bias, self.grad_down, self.grad_down_bias):
            if gradient is not None:
                results += self.gemms.finish_stack(gradient.value, gradient.parameters)
        return results + [self.gemms.finish_rows(buffer.tensor) for buffer in self.deferred_factors]


class WeightGradients:
    """The gradients of the up- and down-projections, from the buffers of a `Backward` with `defer`."""

    def __init__(
        self,
        call: ExpertMlpCall,
        gemms: Gemms,
        kept: Sequence[Tensor],
        grad: Tensor,
        needs: Sequence[bool],
        reduce: bool,
    ):
        self.call, self.gemms, self.token_ids = call, gemms, gemms.input_slices(call.token_ids)
        *grad_up, self.act = [gemms.input_slices(rows) for rows in kept[: len(call.up) + 1]]
        self.grad_by_token = grad if reduce and len(kept) == len(call.up) + 1 else None
        self.grad_y = (
            None if self.grad_by_token is not None else gemms.input_slices((grad, *kept[len(call.up) + 1 :])[-1])
        )
        up_gradients = [(rows, Gradient(p, gemms.new_stack(p, 2))) for rows, p in zip(grad_up, call.up, strict=True)]
        self.up = up_gradients if needs[2] else []
        self.down = Gradient(call.down, gemms.new_stack(call.down, 2)) if needs[4] else None

    def run(self, group: Group) -> None:
        call, tokens = self.call, self.token_ids[group.index]
        for (grad, gradient), gemm in zip(self.up, call.body.up, strict=False):
            rows = call.x.index_select(0, tokens)
            gradient.multiply(
                self.gemms, group, group.clear_padding(grad[group.index], copy=True), rows, gemm.transposed
            )
        if self.down is not None:
            grad_rows = None if self.grad_y is None else self.grad_y[group.index]
            grad = self.grad_by_token.index_select(0, tokens) if grad_rows is None else grad_rows  # type: ignore[union-attr]
            grad = cast_tensor(call.dtype, group.clear_padding(grad, copy=grad_rows is not None))
            self.down.multiply(self.gemms, group, grad, self.act[group.index], call.body.down.transposed)

    def results(self) -> list[Tensor]:
        gradients = [gradient for _, gradient in self.up] + ([] if self.down is None else [self.down])
        return [g for m in gradients for g in self.gemms.finish_stack(m.value, m.parameters)]


def _supports_grouped_experts(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    x, token_ids, up, down = args[0], args[1], args[5], args[7]
    first_of_each = up if len(up) <= 2 else [up[0], up[-1]]
    return token_ids.shape[0] > 0 and grouped_mm.supports_grouped_mm(x, dtype, *([w] for w in first_of_each), [down[0]])


def _make_forward(make: Callable[[Tensor, torch.dtype, int], Gemms]) -> Callable[..., list[Tensor]]:
    def run(
        *args: Any,
        body: str,
        keep: str = "h",
        reduce: bool = False,
        dtype: torch.dtype | None = None,
        stash_rows: float | None = None,
    ) -> list[Tensor]:
        call = ExpertMlpCall.of(args, body, keep, dtype)
        gemms = make(call.expert_offsets, call.dtype, call.find_min_matrix_size())
        if stash_rows is not None:  # these providers keep no rows in a stash
            return [*forward(call, gemms, "none", reduce), make_missed_ticket(call.x.device)]
        return forward(call, gemms, keep, reduce)

    return run


def _make_backward(make: Callable[[Tensor, torch.dtype, int], Gemms]) -> Callable[..., list[Tensor]]:
    def run(
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
        call = ExpertMlpCall.of(args[:-1], body, keep, dtype)
        gemms = make(call.expert_offsets, call.dtype, call.find_min_matrix_size())
        if part == "weights":
            backward = WeightGradients(call, gemms, args[-1], grad, needs, reduce)
            gemms.for_each_group(backward.run, None, multiplications=call.count_multiplications())
            return backward.results()
        kept_rows = args[-1] if stash_rows is None else []
        backward = Backward(call, gemms, kept_rows, grad, needs, reduce, defer=part == "rows")
        then = None if backward.grad_x is None else backward.grad_x.add
        gemms.for_each_group(backward.run, then, multiplications=2 * call.count_multiplications())
        return backward.results()

    return run


expert_mlp.provider("segments")(_make_forward(SegmentGemms))
expert_mlp_backward.provider("segments")(_make_backward(SegmentGemms))
expert_mlp.provider("grouped_mm", supports=_supports_grouped_experts)(_make_forward(GroupedGemms))
expert_mlp_backward.provider(
    "grouped_mm", supports=lambda grad, *args, **kwargs: _supports_grouped_experts(*args, **kwargs)
)(_make_backward(GroupedGemms))
