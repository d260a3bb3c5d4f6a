"""Provider "segments": one GEMM for each hit expert on its block of rows. CPU, float64, and GPUs without
grouped GEMM.

Rows are sorted by expert, so that what an expert does happens on one contiguous block and is written straight
into its slice of the result. Unhit experts cost nothing. Needs the offsets on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ir.experts import (
    check_dtypes,
    grouped_mm,
    grouped_mm_backward,
    per_expert,
    separate_gradients,
    weight_shape,
)
from ...ir.routing import combine
from .gemm import mm, mm_into
from .pool import for_each
from .weights import matrices

_split = torch.split_with_sizes  # Tensor.split is a Python function around it
# Rows of a group: at least so many, that Python does not show; at most so many, for the cache.
_GROUP_ROWS = (512, 2048)
# Multiplications of a call; fewer take less than a millisecond, and waking threads takes a part of one.
_PARALLEL = 2**25


class PftIndex(Protocol):
    """The index arrays of a call."""

    token_ids: Tensor
    expert_offsets: Tensor
    inverse: Tensor


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


class SegmentGemms:
    """The GEMMs of one call over its segments, in groups of neighbouring experts.

    GEMMs run expert by expert, everything else group by group: large enough that Python does not show, small
        enough for the cache. Buffers are made once; each group fills its slices of them, several groups at a
        time.

    Args:
        expert_offsets: [E+1].
        dtype: of the GEMMs; weights of another dtype are cast, one hit expert at a time.
    """

    def __init__(self, expert_offsets: Tensor, dtype: torch.dtype):
        offsets = expert_offsets.tolist()
        self.dtype, self.num_experts, self.num_valid = dtype, len(offsets) - 1, offsets[-1]
        self.on_cpu = expert_offsets.device.type == "cpu"
        smallest, largest = _GROUP_ROWS  # in between, a few for each worker
        max_rows = max(smallest, min(largest, self.num_valid // 8)) if self.on_cpu else self.num_valid
        self.unhit = [e for e in range(self.num_experts) if offsets[e] == offsets[e + 1]]
        self.groups: list[Group] = []
        for expert, (start, stop) in enumerate(pairwise(offsets)):
            if stop > start:
                if not self.groups or self.groups[-1].num_rows + stop - start > max_rows:
                    self.groups.append(Group(start, [], []))
                self.groups[-1].experts.append(expert)
                self.groups[-1].sizes.append(stop - start)

    def for_each_group(
        self,
        work: Callable[[Group], Any],
        then: Callable[[Group, Any], None] | None = None,
        *,
        multiplications: int,
    ) -> None:
        """Call `work` for each group, then `then(group, result)` in order (see `for_each`).

        How many `multiplications` a row takes tells whether threads pay.
        """
        parallel = self.on_cpu and self.num_valid * multiplications > _PARALLEL
        for_each(self.groups, work, then, parallel=parallel)

    # -- parameters --

    def weights(self, w: Sequence[Tensor], transposed: bool) -> Operands:
        return Operands(matrices(w, self.dtype), transposed, self.dtype)

    def flip(self, w: Operands) -> Operands:
        return Operands(w.matrices, not w.transposed, w.dtype)

    def biases(self, v: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        return None if v is None else per_expert(v, 1)

    # -- buffers --

    def new_rows(self, like: Tensor, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        return like.new_empty((num_rows, width), dtype=dtype)

    def new_sum(self, index: PftIndex, width: int, dtype: torch.dtype) -> TokenSum | RowsToSum:
        # Elsewhere index_add_ adds atomically: in any order.
        return TokenSum(index, width, dtype) if self.on_cpu else RowsToSum(index, width, dtype)

    def new_stack(self, parameters: Sequence[Tensor], dim: int) -> Tensor | list[Tensor | None]:
        """What gradients of the parameters go to: a stack, or a list with a place for each."""
        if separate_gradients(parameters, dim):
            return [None] * self.num_experts
        return parameters[0].new_empty((self.num_experts, *parameters[0].shape[-dim:]))

    def finish_rows(self, rows: Tensor) -> Tensor:
        """Zero the tail, which no segment wrote. Hygiene: nobody reads it."""
        if rows.shape[0] > self.num_valid:
            rows[self.num_valid :] = 0
        return rows

    def finish_stack(self, stack: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The gradients to return; zero for experts without rows."""
        for e in self.unhit:
            stack[e] = 0 if isinstance(stack, Tensor) else torch.zeros_like(parameters[e])
        return [stack] if isinstance(stack, Tensor) else stack

    # -- on the rows of one group; `out` is what is filled, and returned --

    def multiply(
        self, group: Group, rows: Tensor, w: Operands, out: Tensor | None = None, *, add: bool = False
    ) -> Tensor:
        """out[r] (+)= rows[r] @ w[e]."""
        if out is None and len(group.experts) == 1:
            return mm(rows, w[group.experts[0]])
        if out is None:
            out = rows.new_empty((rows.shape[0], w[group.experts[0]].shape[1]))
        for e, left, result in zip(
            group.experts, _split(rows, group.sizes), _split(out, group.sizes), strict=True
        ):
            mm_into(result, left, w[e], add=add)
        return out

    def outer(self, group: Group, left: Tensor, right: Tensor, out: Any, dtype: torch.dtype) -> Any:
        """out[e] = left^T @ right over the rows of e, in `dtype`."""
        separate = isinstance(out, list)
        for e, a, b in zip(
            group.experts, _split(left.t(), group.sizes, 1), _split(right, group.sizes), strict=True
        ):
            if separate:
                out[e] = mm(a, b).to(dtype)
            else:
                mm_into(out[e], a, b)
        return out

    def add_bias(self, group: Group, rows: Tensor, bias: Sequence[Tensor] | None) -> Tensor:
        """rows[r] += bias[e], in place."""
        if bias is not None:
            for e, part in zip(group.experts, _split(rows, group.sizes), strict=True):
                part += bias[e].to(part.dtype)  # rounded first, as `linear` does under autocast
        return rows

    def dot_bias(self, group: Group, rows: Tensor, bias: Sequence[Tensor]) -> Tensor:
        """<rows[r], bias[e]>, [n,1]."""
        parts = zip(group.experts, _split(rows, group.sizes), strict=True)
        return torch.cat([(part @ bias[e].to(part.dtype))[:, None] for e, part in parts])

    def sum_rows(self, group: Group, rows: Tensor, out: Any, dtype: torch.dtype) -> Any:
        """out[e] = sum of the rows of e, in `dtype`."""
        for e, part in zip(group.experts, _split(rows, group.sizes), strict=True):
            out[e] = part.sum(0).to(dtype)
        return out


class TokenSum:
    """Sum of the rows of each token [S,width], group by group: no buffer of all rows.

    For each token in the order of the rows, so by expert; in float32 at least, rounded once.
    """

    def __init__(self, index: PftIndex, width: int, dtype: torch.dtype):
        self.token_ids, self.dtype = index.token_ids, dtype
        shape, wide = (index.inverse.shape[0], width), torch.promote_types(dtype, torch.float32)
        self.total = torch.zeros(shape, dtype=wide, device=index.token_ids.device)

    def add(self, group: Group, rows: Tensor) -> None:
        self.total.index_add_(0, self.token_ids[group.rows], rows.to(self.total.dtype))

    def result(self) -> Tensor:
        return self.total.to(self.dtype)


class RowsToSum:
    """The same from a buffer of all rows, by `combine`."""

    def __init__(self, index: PftIndex, width: int, dtype: torch.dtype):
        self.index, self.rows = (
            index,
            torch.empty((index.token_ids.shape[0], width), dtype=dtype, device=index.token_ids.device),
        )

    def add(self, group: Group, rows: Tensor) -> None:
        self.rows[group.rows] = rows

    def result(self) -> Tensor:
        return combine(self.rows, None, self.index.token_ids, self.index.expert_offsets, self.index.inverse)


class Operands:
    """Each expert's matrix as a right operand [in, out], oriented and cast when it is looked up."""

    def __init__(self, matrices: Sequence[Tensor], transposed: bool, dtype: torch.dtype):
        self.matrices, self.transposed, self.dtype = matrices, transposed, dtype

    def __getitem__(self, e: int) -> Tensor:
        matrix = self.matrices[e].t() if self.transposed else self.matrices[e]
        return matrix if matrix.dtype == self.dtype else matrix.to(self.dtype)


@grouped_mm.provider("segments")
def _grouped_mm(
    rows: Tensor,
    w: list[Tensor],
    expert_offsets: Tensor,
    *,
    transposed: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    gemms = SegmentGemms(expert_offsets, check_dtypes("grouped_mm", rows, w, dtype))
    _, num_out = weight_shape("grouped_mm", w, expert_offsets, transposed, rows.shape[1])
    out, operands = rows.new_empty((rows.shape[0], num_out)), gemms.weights(w, transposed)
    gemms.for_each_group(
        lambda group: gemms.multiply(group, rows[group.rows], operands, out[group.rows]),
        multiplications=rows.shape[1] * num_out,
    )
    return gemms.finish_rows(out)


@grouped_mm_backward.provider("segments")
def _grouped_mm_backward(
    grad: Tensor, rows: Tensor, expert_offsets: Tensor, *, transposed: bool, dtype: torch.dtype
) -> Tensor:
    left, right = (grad, rows) if transposed else (rows, grad)
    gemms = SegmentGemms(expert_offsets, rows.dtype)
    out = rows.new_empty((gemms.num_experts, left.shape[1], right.shape[1]), dtype=dtype)
    gemms.for_each_group(
        lambda group: gemms.outer(group, left[group.rows], right[group.rows], out, dtype),
        multiplications=left.shape[1] * right.shape[1],
    )
    return gemms.finish_stack(out, out)[0]
