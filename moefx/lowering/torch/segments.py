"""Provider "segments": one GEMM for each expert with rows, on its block of rows. For CPUs, float64, and GPUs without a
grouped GEMM.

Rows are sorted by expert, so each expert works on one contiguous block and writes to its slice of the result. Experts
without rows cost nothing. Needs the offsets on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ir.ops.expert_gemms import (
    check_dtypes,
    check_weight_shape,
    grouped_mm,
    grouped_mm_backward,
    has_separate_gradients,
    list_expert_tensors,
)
from ...ir.ops.token_routing import combine
from .cpu_gemm import choose_padding, linear, linear_into
from .huge_pages import new_buffer
from .thread_pool import for_each
from .weight_lists import unstack_weights

# (fewest, most) rows of a group: enough to hide Python's overhead, few enough for the cache.
_GROUP_ROWS = (512, 2048)
# Multiplications of a call from which threads pay. Smaller calls take less than a millisecond, and waking threads takes
# a part of one.
_PARALLEL = 2**25


class PftIndex(Protocol):
    """The index arrays of a call."""

    token_ids: Tensor
    expert_offsets: Tensor
    inverse: Tensor


@dataclasses.dataclass
class Group:
    """Neighbouring experts with their numbers of rows.

    Attributes:
        index: number of the group in its call.
        start: first row.
        experts, sizes: the experts, and the number of rows of each.
        padding: rows after the last one that take part in GEMMs, so that GEMMs have few different sizes. They belong
            to the next expert and enter no result. Only groups of one expert have padding.
    """

    index: int
    start: int
    experts: list[int]
    sizes: list[int]
    padding: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def stop(self) -> int:
        """The end of the rows that the group reads, padding included."""
        return self.start + self.num_rows + self.padding

    def drop_padding(self, rows: Tensor) -> Tensor:
        """Return the rows without the padding."""
        return rows[: self.num_rows] if self.padding else rows

    def clear_padding(self, rows: Tensor, *, copy: bool = False) -> Tensor:
        """Set the padding to zero, in place unless `copy`."""
        if self.padding:
            rows = rows.clone() if copy else rows
            rows[self.num_rows :].zero_()
        return rows

    def repeat_last(self, rows: Tensor) -> Tensor:
        """Set the padding to the last row, in place: an input that occurs for this expert."""
        if self.padding:
            rows[self.num_rows :] = rows[self.num_rows - 1]
        return rows

    def split(self, rows: Tensor, dim: int = 0) -> Sequence[Tensor]:
        """Return the rows of each expert."""
        # Tensor.split is a slower Python function around split_with_sizes
        return (rows,) if len(self.experts) == 1 else torch.split_with_sizes(rows, self.sizes, dim)


class SegmentGemms:
    """The GEMMs of one call over its segments, in groups of neighbouring experts.

    GEMMs run expert by expert, everything else group by group. Several groups run in parallel, and each fills its
    slices of the results. A group runs Python code around kernels that release the GIL. Slices are taken in advance,
    because after such a short kernel a thread would wait longer for the GIL than the kernel takes.

    Args:
        expert_offsets: [E+1].
        dtype: dtype of the GEMMs. Weights of another dtype are cast, one expert at a time.
        matrix_size: elements of an expert's smallest matrix. An expert whose GEMMs are large enough for oneDNN is a
            group of its own, because oneDNN returns new tensors, and then no step needs them side by side.
    """

    def __init__(self, expert_offsets: Tensor, dtype: torch.dtype, matrix_size: int = 0):
        offsets = expert_offsets.tolist()
        self.dtype, self.num_experts, self.num_valid = dtype, len(offsets) - 1, offsets[-1]
        self.on_cpu = expert_offsets.device.type == "cpu"
        smallest, largest = _GROUP_ROWS  # in between, a few groups for each worker
        max_rows = max(smallest, min(largest, self.num_valid // 8)) if self.on_cpu else self.num_valid
        self.idle_experts = [e for e in range(self.num_experts) if offsets[e] == offsets[e + 1]]
        self.groups: list[Group] = []
        is_open = False  # whether the last group takes another expert
        for expert, (start, stop) in enumerate(pairwise(offsets)):
            if (size := stop - start) == 0:
                continue
            pad = choose_padding(size, matrix_size, dtype) if self.on_cpu else None
            if is_open and pad is None and self.groups[-1].num_rows + size <= max_rows:
                self.groups[-1].experts.append(expert)
                self.groups[-1].sizes.append(size)
            else:
                self.groups.append(Group(len(self.groups), start, [expert], [size], pad or 0))
                is_open = pad is None

    def for_each_group(
        self, work: Callable[[Group], Any], then: Callable[[Group, Any], None] | None = None, *, multiplications: int
    ) -> None:
        """Call `work` for each group, then `then(group, result)` in order (see `for_each`).

        Args:
            multiplications: multiplications for each row, to decide whether threads pay.
        """
        parallel = self.on_cpu and self.num_valid * multiplications > _PARALLEL
        for_each(self.groups, work, then, parallel=parallel)

    # -- parameters --

    def prepare_weights(self, w: Sequence[Tensor], transposed: bool) -> WeightMatrices:
        operands = WeightMatrices(unstack_weights(w, self.dtype), self.dtype)
        return operands if transposed else self.transpose_weights(operands)

    def transpose_weights(self, w: WeightMatrices) -> WeightMatrices:
        return WeightMatrices([matrix.t() for matrix in w.matrices], w.dtype)

    def prepare_biases(self, v: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        return None if v is None else list_expert_tensors(v, 1)

    # -- rows, by group --

    def input_slices(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the rows of an argument that each group reads, padding included."""
        return [self._rows(rows, group.start, group.stop) for group in self.groups]

    def _rows(self, rows: Tensor, start: int, stop: int) -> Tensor:
        if stop <= self.num_valid:
            return rows[start:stop]
        # Results ignore the padding, but it repeats a real row, because expressions may fail on other values.
        last = rows[self.num_valid - 1].expand(stop - self.num_valid, *rows.shape[1:])
        return torch.cat([rows[start : self.num_valid], last])

    def result_slices(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the slice of a result that each group writes."""
        return torch.split_with_sizes(rows[: self.num_valid], [group.num_rows for group in self.groups])

    # -- buffers --

    def new_rows(self, like: Tensor, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        return new_buffer(like, (num_rows, width), dtype)

    def new_sum(self, index: PftIndex, width: int, dtype: torch.dtype) -> TokenSum | BufferedTokenSum:
        # On GPUs index_add_ uses atomics, whose order varies.
        return (TokenSum if self.on_cpu else BufferedTokenSum)(self, index, width, dtype)

    def new_stack(self, parameters: Sequence[Tensor], dim: int) -> Tensor | list[Any]:
        """Return an empty container for the parameters' gradients: a stack, or a list with an item for each expert."""
        if has_separate_gradients(parameters, dim):
            return [None] * self.num_experts
        return new_buffer(parameters[0], (self.num_experts, *parameters[0].shape[-dim:]))

    def finish_rows(self, rows: Tensor) -> Tensor:
        """Set the tail, which no segment wrote, to zero. No result depends on it."""
        if rows.shape[0] > self.num_valid:
            rows[self.num_valid :] = 0
        return rows

    def finish_stack(self, stack: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the finished gradients, with zeros for experts without rows."""
        for e in self.idle_experts:
            stack[e] = 0 if isinstance(stack, Tensor) else torch.zeros_like(parameters[e])
        return [stack] if isinstance(stack, Tensor) else stack

    # -- on the rows of one group; each method fills and returns `out` --

    def multiply(
        self,
        group: Group,
        rows: Tensor,
        w: WeightMatrices,
        out: Tensor | None = None,
        *,
        bias: Sequence[Tensor] | None = None,
        add: bool = False,
    ) -> Tensor:
        """Compute out[r] = rows[r] @ w[e] + bias[e], or out[r] += rows[r] @ w[e] if `add`.

        Returns a new tensor if `out` is None, or if there is padding, for which `out` has no room.
        """
        biases = [None if bias is None else bias[e].to(self.dtype) for e in group.experts]  # as `linear` under autocast
        if len(group.experts) == 1 and not add and (out is None or group.padding):
            return linear(rows, w[group.experts[0]], biases[0])
        if out is None:
            out = rows.new_empty((rows.shape[0], w[group.experts[0]].shape[0]))
        for e, b, left, result in zip(group.experts, biases, group.split(rows), group.split(out), strict=True):
            linear_into(result, left, w[e], b, add=add)
        return out

    def multiply_add(self, group: Group, rows: Tensor, w: WeightMatrices, summand: Tensor, out: Tensor) -> Tensor:
        """Compute out[r] = rows[r] @ w[e] + summand[r], rounded once. Returns a new tensor if there is padding."""
        if group.padding:
            return linear(rows, w[group.experts[0]], summand)
        splits = (group.split(rows), group.split(summand), group.split(out))
        for e, left, added, result in zip(group.experts, *splits, strict=True):
            linear_into(result, left, w[e], added)
        return out

    def outer(self, group: Group, left: Tensor, right: Tensor, out: Any, dtype: torch.dtype) -> Any:
        """Compute out[e] = left^T @ right over the rows of e, in `dtype`. One operand's padding must be zero."""
        separate = isinstance(out, list)
        for e, a, b in zip(group.experts, group.split(left.t(), 1), group.split(right.t(), 1), strict=True):
            if separate:
                product = linear(a, b)
                out[e] = product if product.dtype is dtype else product.to(dtype)
            else:
                linear_into(out[e], a, b)
        return out

    def add_bias(self, group: Group, rows: Tensor, bias: Sequence[Tensor] | None) -> Tensor:
        """Add rows[r] += bias[e], in place."""
        if bias is not None:
            for e, part in zip(group.experts, group.split(rows), strict=True):
                part += bias[e].to(part.dtype)
        return rows

    def dot_bias(self, group: Group, rows: Tensor, bias: Sequence[Tensor]) -> Tensor:
        """Compute <rows[r], bias[e]>, [n,1], in float32 at least."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        parts = zip(group.experts, group.split(rows), strict=True)
        return torch.cat([(part.to(wide) @ bias[e].to(part.dtype).to(wide))[:, None] for e, part in parts])

    def sum_rows(self, group: Group, rows: Tensor, out: Any, dtype: torch.dtype) -> Any:
        """Compute out[e] = sum of the rows of e, in `dtype`."""
        for e, part in zip(group.experts, group.split(group.drop_padding(rows)), strict=True):
            out[e] = part.sum(0).to(dtype)
        return out


class TokenSum:
    """The sum of each token's rows, [S,width], group by group, without a buffer of all rows.

    Adds in the order of the rows (by expert), in float32 at least, and rounds once.
    """

    def __init__(self, gemms: SegmentGemms, index: PftIndex, width: int, dtype: torch.dtype):
        self.token_ids = gemms.result_slices(index.token_ids.long())  # index_add_ is twice as fast with int64
        self.dtype = dtype
        shape, wide = (index.inverse.shape[0], width), torch.promote_types(dtype, torch.float32)
        self.total = torch.zeros(shape, dtype=wide, device=index.token_ids.device)

    def add(self, group: Group, rows: Tensor) -> None:
        rows = group.drop_padding(rows)
        wide = rows if rows.dtype is self.total.dtype else rows.to(self.total.dtype)
        self.total.index_add_(0, self.token_ids[group.index], wide)

    def result(self) -> Tensor:
        return self.total.to(self.dtype)


class BufferedTokenSum:
    """The sum of each token's rows, [S,width], by `combine` from a buffer of all rows."""

    def __init__(self, gemms: SegmentGemms, index: PftIndex, width: int, dtype: torch.dtype):
        shape, device = (index.token_ids.shape[0], width), index.token_ids.device
        self.index, self.rows = index, torch.empty(shape, dtype=dtype, device=device)
        self.slices = gemms.result_slices(self.rows)

    def add(self, group: Group, rows: Tensor) -> None:
        self.slices[group.index].copy_(group.drop_padding(rows))

    def result(self) -> Tensor:
        return combine(self.rows, None, self.index.token_ids, self.index.expert_offsets, self.index.inverse)


class WeightMatrices:
    """Each expert's matrix as [out, in], cast on access."""

    def __init__(self, matrices: Sequence[Tensor], dtype: torch.dtype):
        self.matrices, self.dtype = matrices, dtype

    def __getitem__(self, e: int) -> Tensor:
        matrix = self.matrices[e]
        return matrix if matrix.dtype is self.dtype else matrix.to(self.dtype)


@grouped_mm.provider("segments")
def _grouped_mm(
    rows: Tensor,
    w: list[Tensor],
    expert_offsets: Tensor,
    summand: Tensor | None = None,
    *,
    transposed: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = check_dtypes("grouped_mm", rows, w, dtype)
    num_in, num_out = check_weight_shape("grouped_mm", w, expert_offsets, transposed, rows.shape[1])
    gemms = SegmentGemms(expert_offsets, dtype, num_in * num_out)
    out, operands = new_buffer(rows, (rows.shape[0], num_out)), gemms.prepare_weights(w, transposed)
    operand_rows, slices = gemms.input_slices(rows), gemms.result_slices(out)
    summands = None if summand is None else gemms.input_slices(summand)

    def run(group: Group) -> None:
        part = slices[group.index]
        if summands is None:
            product = gemms.multiply(group, operand_rows[group.index], operands, part)
        else:
            product = gemms.multiply_add(group, operand_rows[group.index], operands, summands[group.index], part)
        if product is not part:
            part.copy_(group.drop_padding(product))

    gemms.for_each_group(run, multiplications=num_in * num_out)
    return gemms.finish_rows(out)


@grouped_mm_backward.provider("segments")
def _grouped_mm_backward(
    grad: Tensor, rows: Tensor, expert_offsets: Tensor, *, transposed: bool, dtype: torch.dtype
) -> Tensor:
    gemms = SegmentGemms(expert_offsets, rows.dtype, size := grad.shape[1] * rows.shape[1])
    shape = (grad.shape[1], rows.shape[1]) if transposed else (rows.shape[1], grad.shape[1])
    out = new_buffer(rows, (gemms.num_experts, *shape), dtype)
    grads, inputs = gemms.input_slices(grad), gemms.input_slices(rows)

    def run(group: Group) -> None:
        left, right = group.clear_padding(grads[group.index], copy=True), inputs[group.index]
        gemms.outer(group, *((left, right) if transposed else (right, left)), out, dtype)

    gemms.for_each_group(run, multiplications=size)
    return gemms.finish_stack(out, [out])[0]
