"""Provider "segments": one GEMM for each hit expert on its block of rows. CPU, float64, and GPUs without grouped GEMM.

Rows are sorted by expert, so that everything an expert does happens on one contiguous block, which stays in the cache:
gather, GEMM, pointwise, GEMM write straight into their slices of the results. Unhit experts cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir import derivative, expression
from ...ir.expert_mlp import Call, expert_mlp, expert_mlp_backward, weight_gradient
from ...ir.experts import check_dtypes, grouped_mm, grouped_mm_backward, per_expert, weight_shape
from ...ir.routing import combine
from .pool import for_each
from .weights import matrices

import os
_GROUP_ROWS = int(os.environ.get('GR','1024'))


class Segments:
    """The rows of the hit experts, on the host, in groups of neighbouring experts.

    GEMMs run expert by expert, everything else group by group: large enough that Python does not show, small enough for
    the cache.
    """

    def __init__(self, expert_offsets: Tensor):
        offsets = expert_offsets.tolist()
        self.num_experts, self.num_valid = len(offsets) - 1, offsets[-1]
        self.sizes = [stop - start for start, stop in zip(offsets, offsets[1:], strict=False)]
        self.groups: list[Group] = []
        for expert, size in enumerate(self.sizes):
            if size:
                if not self.groups or self.groups[-1].num_rows + size > _GROUP_ROWS:
                    self.groups.append(Group(offsets[expert], [], []))
                self.groups[-1].experts.append(expert)
                self.groups[-1].sizes.append(size)

    def clear_tail(self, rows: Tensor) -> Tensor:
        """Zero the rows that no segment wrote. Hygiene: nobody reads them."""
        if rows.shape[0] > self.num_valid:
            rows[self.num_valid :] = 0
        return rows

    def clear_unhit(self, stacked: Tensor) -> Tensor:
        """Zero the gradients of experts without rows."""
        for expert, size in enumerate(self.sizes):
            if not size:
                stacked[expert] = 0
        return stacked


@dataclasses.dataclass
class Group:
    """Neighbouring experts and how many rows each of them has, from row `start` on."""

    start: int
    experts: list[int]
    sizes: list[int]

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.num_rows)


def _mm_rows(group: Group, rows: Tensor, w: Sequence[Tensor], out: Tensor, *, add: bool = False) -> Tensor:
    """out[r] (+)= rows[r] @ w[e], for each expert of the group."""
    for e, left, result in zip(group.experts, rows.split(group.sizes), out.split(group.sizes), strict=True):
        if add:
            torch.addmm(result, left, w[e], out=result)
        else:
            torch.mm(left, w[e], out=result)
    return out


def _mm_outer(group: Group, left: Tensor, right: Tensor, out: Sequence[Tensor]) -> None:
    """out[e] = left^T @ right over the rows of each expert of the group."""
    cast = out[0].dtype != left.dtype  # gradients of float32 parameters under autocast
    for e, a, b in zip(group.experts, left.t().split(group.sizes, 1), right.split(group.sizes), strict=True):
        if cast:
            out[e].copy_(a @ b)
        else:
            torch.mm(a, b, out=out[e])


def _operands(w: Sequence[Tensor], transposed: bool, dtype: torch.dtype) -> Sequence[Tensor]:
    """Each expert's matrix as the right operand [in, out] of a GEMM; casts happen when it is looked up."""
    matrices_ = [m.t() for m in w] if transposed else w
    return matrices_ if w[0].dtype == dtype else _Cast(matrices_, dtype)


class _Cast:
    """A sequence that casts the item that is asked for: under autocast only hit experts are cast, one at a time."""

    def __init__(self, items: Sequence[Tensor], dtype: torch.dtype):
        self.items, self.dtype = items, dtype

    def __getitem__(self, index: int) -> Tensor:
        return self.items[index].to(self.dtype)


@grouped_mm.provider("segments")
def _grouped_mm(
    rows: Tensor, w: list[Tensor], expert_offsets: Tensor, *, transposed: bool, dtype: torch.dtype | None = None
) -> Tensor:
    dtype = check_dtypes("grouped_mm", rows, w, dtype)
    _, num_out = weight_shape("grouped_mm", w, expert_offsets, transposed, rows.shape[1])
    out = rows.new_empty((rows.shape[0], num_out))
    segments, operands = Segments(expert_offsets), _operands(matrices(w), transposed, dtype)
    for group in segments.groups:
        _mm_rows(group, rows[group.rows], operands, out[group.rows])
    return segments.clear_tail(out)


@grouped_mm_backward.provider("segments")
def _grouped_mm_backward(
    grad: Tensor, rows: Tensor, expert_offsets: Tensor, *, transposed: bool, dtype: torch.dtype
) -> Tensor:
    left, right = (grad, rows) if transposed else (rows, grad)
    segments = Segments(expert_offsets)
    out = rows.new_empty((segments.num_experts, left.shape[1], right.shape[1]), dtype=dtype)
    slices = out.unbind(0)
    for group in segments.groups:
        _mm_outer(group, left[group.rows], right[group.rows], slices)
    return segments.clear_unhit(out)


class _Experts:
    """A call's parameters, expert by expert, and its GEMMs on the rows of a group."""

    def __init__(self, call: Call):
        self.call = call
        gemms = zip(call.up, call.body.up, strict=True)
        # As right operands [in, out] of the forward; transposed they serve the backward.
        self.up = [_operands(matrices(w), gemm.transposed, call.dtype) for w, gemm in gemms]
        self.up_bias = [None if b is None else per_expert(b, 1) for b in call.up_bias]
        self.down = _operands(matrices(call.down), call.body.down.transposed, call.dtype)
        self.down_bias = None if call.down_bias is None else per_expert(call.down_bias, 1)

    def project_up(self, group: Group, x: Tensor, out: Sequence[Tensor]) -> None:
        for w, bias, h in zip(self.up, self.up_bias, out, strict=True):
            _add_bias(group, bias, _mm_rows(group, x, w, h))

    def project_down(self, group: Group, act: Tensor, out: Tensor) -> Tensor:
        return _add_bias(group, self.down_bias, _mm_rows(group, act, self.down, out))


def _add_bias(group: Group, bias: Sequence[Tensor] | None, out: Tensor) -> Tensor:
    if bias is not None:
        for e, rows in zip(group.experts, out.split(group.sizes), strict=True):
            rows += bias[e]
    return out


def _sum_rows(group: Group, rows: Tensor, out: Tensor) -> None:
    for e, part in zip(group.experts, rows.split(group.sizes), strict=True):
        out[e] = part.sum(0)


@expert_mlp.provider("segments")
def _expert_mlp(*args: Any, body: str, keep: str = "h", dtype: torch.dtype | None = None) -> list[Tensor]:
    call = Call.of(args, body, keep, dtype)
    up_widths, act_width, out_width = call.widths()
    x, num_rows, experts, segments = call.x, call.num_rows, _Experts(call), Segments(call.expert_offsets)
    act_of, out_of = (expression.program(expression.canonical(e)) for e in (call.act, call.body.out))
    scale = _row_scale(call)

    keep_h, keep_act = keep in ("h", "all"), keep == "all"
    out = x.new_empty((num_rows, out_width), dtype=call.out_dtype)
    hidden = [x.new_empty((num_rows, width)) for width in up_widths] if keep_h else []
    kept_act = x.new_empty((num_rows, act_width)) if keep_act else None
    in_place = call.out_dtype == call.dtype and (scale is not None or call.body.out == "y")

    def run(group: Group) -> None:
        block = group.rows
        rows = x.index_select(0, call.token_ids[block])
        h = [b[block] if keep_h else rows.new_empty((len(rows), b)) for b in (hidden if keep_h else up_widths)]
        experts.project_up(group, rows, h)
        env = call.parts(h)
        if call.w is not None:
            env["w"] = call.w[block]
        act = act_of(env)
        if kept_act is not None:
            kept_act[block] = act
        if in_place:
            y = experts.project_down(group, act, out[block])
            if scale is not None:
                y *= scale[block]
        else:
            env["y"] = experts.project_down(group, act, rows.new_empty((len(rows), out_width)))
            out[block] = out_of(env)

    for_each(segments.groups, run)
    kept = [*hidden, *(() if kept_act is None else (kept_act,))]
    return [segments.clear_tail(t) for t in (out, *kept)]


@expert_mlp_backward.provider("segments")
def _expert_mlp_backward(
    grad: Tensor, *args: Any, body: str, keep: str, dtype: torch.dtype | None = None, needs: Sequence[bool]
) -> list[Tensor]:
    """For each group, in SonicMoE's order: dA' = dO.W2^T, then A, dH, dS = <dA', A> together, then dW2, dW1, dX.

    The result is linear in y in practice, rows = y * c(w). Then y is not needed: dy = dO * c, and the gradient of c is
    <dO, y> = <dA', A> + <dO, bias>. A body whose `out` is not linear in y recomputes y.
    """
    backward = _Backward(Call.of(args[:-1], body, keep, dtype), args[-1], grad, needs)
    for_each(backward.segments.groups, backward.run)
    return backward.results()


class _Backward:
    """Buffers of one backward call, filled group by group."""

    def __init__(self, call: Call, kept: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]):
        self.call, self.grad, self.experts, self.segments = call, grad, _Experts(call), Segments(call.expert_offsets)
        self.need_x, self.need_w, need_up, need_up_bias, need_down, need_down_bias = needs
        self.up_widths, self.act_width, self.out_width = call.widths()
        num_up = len(self.up_widths)
        self.hidden, self.kept_act = list(kept[:num_up]), (kept[num_up] if len(kept) > num_up else None)
        self.at_least_float32 = torch.promote_types(call.dtype, torch.float32)
        self.grad_rows = call.x.new_empty((call.num_rows, call.x.shape[1])) if self.need_x else None

        def buffers(needed: bool, parameters: Sequence[Sequence[Tensor] | None], dim: int) -> list[Tensor | None]:
            num = self.segments.num_experts
            return [p[0].new_empty((num, *p[0].shape[-dim:])) if needed and p else None for p in parameters]

        self.grad_up = buffers(need_up, call.up, 2)
        self.grad_up_bias = buffers(need_up_bias, call.up_bias, 1)
        (self.grad_down,) = buffers(need_down, [call.down], 2)
        (self.grad_down_bias,) = buffers(need_down_bias, [call.down_bias], 1)
        self.grad_up_slices = [None if b is None else b.unbind(0) for b in self.grad_up]
        self.grad_down_slices = None if self.grad_down is None else self.grad_down.unbind(0)

        self.linear = expression.is_linear(call.body.out, "y")
        self.scale = _row_scale(call)
        self.w_of_out = self.w_of_act = None
        if self.need_w and "w" in expression.variables(call.body.out):
            self.w_of_out = call.x.new_zeros((call.num_rows, 1), dtype=torch.promote_types(grad.dtype, torch.float32))
        if self.need_w and "w" in expression.variables(call.act):
            assert call.w is not None
            self.w_of_act = torch.zeros_like(call.w)

    def run(self, group: Group) -> None:
        call, block = self.call, group.rows
        grad, rows = self.grad[block], call.x.index_select(0, call.token_ids[block])
        hidden = [h[block] for h in self.hidden]
        if not hidden:
            hidden = [rows.new_empty((rows.shape[0], width)) for width in self.up_widths]
            self.experts.project_up(group, rows, hidden)
        env = call.parts(hidden)
        wrt = list(env)
        if call.w is not None:
            env["w"] = call.w[block]
        if self.w_of_act is not None:
            wrt.append("w")
        act = None if self.kept_act is None else self.kept_act[block]
        scale = None if self.scale is None else self.scale[block]

        if self.linear:
            grad_y = grad.to(call.dtype)  # the scale goes to narrower tensors below
        else:
            act = expression.evaluate(call.act, env) if act is None else act
            grad_y = self._through_out(group, act, grad, env)
        unscaled = _mm_rows(group, grad_y, _transposed(self.experts.down), grad_y.new_empty((len(grad), self.act_width)))
        grad_act = unscaled if scale is None else (unscaled * scale).to(call.dtype)
        value, by_act = derivative.vjp(call.act, env, grad_act, wrt, value=act is None)
        act = value if act is None else act
        assert act is not None

        if self.w_of_act is not None:
            self.w_of_act[block] = by_act["w"]
        if self.linear and self.w_of_out is not None:
            self.w_of_out[block] = self._output_dot(group, unscaled, act, grad)
        if self.grad_down_slices is not None:
            scaled = act if scale is None else (act * scale).to(call.dtype)
            left, right = (grad_y, scaled) if call.body.down.transposed else (scaled, grad_y)
            _mm_outer(group, left, right, self.grad_down_slices)
        if self.grad_down_bias is not None:
            _sum_rows(group, grad_y if scale is None else grad_y * scale, self.grad_down_bias)
        self._through_up(group, rows, self._hidden_gradients(hidden, by_act))

    def _through_out(self, group: Group, act: Tensor, grad: Tensor, env: dict[str, Tensor]) -> Tensor:
        """Gradient of y through an `out` that is not linear in it."""
        y = self.experts.project_down(group, act, act.new_empty((act.shape[0], self.out_width)))
        wrt = ["y", "w"] if self.w_of_out is not None else ["y"]
        _, by_out = derivative.vjp(self.call.body.out, {**env, "y": y}, grad, wrt, value=False)
        if self.w_of_out is not None:
            self.w_of_out[group.rows] = by_out["w"]
        return by_out["y"]

    def _output_dot(self, group: Group, unscaled: Tensor, act: Tensor, grad: Tensor) -> Tensor:
        """<dO, y> for each row, [n,1]."""
        dot = (unscaled.to(self.at_least_float32) * act).sum(1, keepdim=True)
        bias = self.experts.down_bias
        if bias is not None:
            for e, total, g in zip(group.experts, dot.split(group.sizes), grad.split(group.sizes), strict=True):
                total += (g @ bias[e].to(g.dtype))[:, None]
        return dot

    def _hidden_gradients(self, hidden: Sequence[Tensor], by_act: dict[str, Tensor]) -> list[Tensor]:
        """Gradients of the up-projections from those of the parts, which are slices of them."""
        result = []
        for g, h in enumerate(hidden):
            parts = [(f"a{i}", slice(a, b, c)) for i, (group, a, b, c) in enumerate(self.call.body.parts) if group == g]
            if len(parts) == 1 and parts[0][0] in by_act and by_act[parts[0][0]].shape == h.shape:
                result.append(by_act[parts[0][0]])
                continue
            grad = torch.zeros_like(h)
            for name, columns in parts:
                if name in by_act:
                    grad[:, columns] += by_act[name]
            result.append(grad)
        return result

    def _through_up(self, group: Group, rows: Tensor, grad_hidden: Sequence[Tensor]) -> None:
        grad_rows = None if self.grad_rows is None else self.grad_rows[group.rows]
        for g, grad in enumerate(grad_hidden):
            slices, grad_bias = self.grad_up_slices[g], self.grad_up_bias[g]
            if slices is not None:
                left, right = (grad, rows) if self.call.body.up[g].transposed else (rows, grad)
                _mm_outer(group, left, right, slices)
            if grad_bias is not None:
                _sum_rows(group, grad, grad_bias)
            if grad_rows is not None:
                _mm_rows(group, grad, _transposed(self.experts.up[g]), grad_rows, add=g > 0)

    def results(self) -> list[Tensor]:
        call = self.call
        results = []
        if self.grad_rows is not None:
            rows = self.segments.clear_tail(self.grad_rows)
            results.append(combine(rows, None, call.token_ids, call.expert_offsets, call.inverse))
        if self.need_w:
            w_of_out = self.w_of_out
            if self.linear and w_of_out is not None:
                env = _with_ones(call)
                w_of_out = derivative.vjp(call.body.out, env, w_of_out.to(call.out_dtype), ["w"], value=False)[1]["w"]
            results.append(weight_gradient(call, w_of_out, self.w_of_act))
        for buffer in (*self.grad_up, *self.grad_up_bias, self.grad_down, self.grad_down_bias):
            if buffer is not None:
                results.append(self.segments.clear_unhit(buffer))
        return results


class _transposed:  # noqa: N801  reads as the function that it is
    """The matrices of a sequence, each transposed when it is looked up."""

    def __init__(self, items: Sequence[Tensor]):
        self.items = items

    def __getitem__(self, index: int) -> Tensor:
        return self.items[index].t()


def _row_scale(call: Call) -> Tensor | None:
    """c(w) of rows = y * c(w), [B,1]: what `out` makes of ones. None where `out` is y itself or not linear in it."""
    if call.body.out == "y" or not expression.is_linear(call.body.out, "y"):
        return None
    return expression.evaluate(call.body.out, _with_ones(call))


def _with_ones(call: Call) -> dict[str, Tensor]:
    ones = torch.ones((call.num_rows, 1), dtype=call.dtype, device=call.x.device)
    return {"y": ones} if call.w is None else {"y": ones, "w": call.w}
