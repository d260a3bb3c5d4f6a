"""Expert parameters as operands of the kernels, read in place if their strides allow it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...ir.op_providers import count_weight_path
from ...ir.ops.expert_gemms import is_stacked
from ..torch.weight_lists import make_strided_view, stack_weights
from .launch_replay import apply, mark_constant


@dataclasses.dataclass(frozen=True)
class Weights:
    """The matrices of one GEMM: a stack [E,out,in] or [E,in,out] (any strides), or a table of addresses.

    Attributes:
        tensor: the stack, or with a table one expert's matrix, for shapes and strides.
        out_dim: the forward's output among the last two dimensions: 0 or 1.
        addresses: addresses of the experts' matrices, None for a stack.
    """

    tensor: Tensor
    out_dim: int
    addresses: tuple[int, ...] | None = None

    @classmethod
    def of(cls, parameters: Sequence[Tensor], transposed: bool, dtype: torch.dtype) -> Weights:
        return cls.of_groups([parameters], transposed, dtype)[0]

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[Tensor]], transposed: bool, dtype: torch.dtype) -> list[Weights]:
        """Return the weights of GEMMs that one kernel runs together: all as stacks with equal strides, or all as
        tables.

        Reads parameters in place if possible, and copies them otherwise.
        """
        out_dim, first = 0 if transposed else 1, groups[0][0]
        if all(p.dtype is dtype for group in groups for p in group):
            stacked = all(is_stacked(group, 2) or make_strided_view(group) is not None for group in groups)
            if stacked:
                weights = [Weights(stack_weights(group, dtype), out_dim) for group in groups]
                if all(w.tensor.stride() == weights[0].tensor.stride() for w in weights):
                    return weights
            separate = not any(is_stacked(group, 2) for group in groups)
            have_equal_strides = all(p.stride() == first.stride() and p.data_ptr() % 16 == 0 for g in groups for p in g)
            if separate and have_equal_strides and not _is_wide(first):
                for _ in groups:
                    count_weight_path("table")
                return [Weights(g[0], out_dim, tuple(p.data_ptr() for p in g)) for g in groups]
        return [Weights(apply(lambda *p: _copy(p, dtype), *group), out_dim) for group in groups]

    def columns(self, start: int | None, stop: int | None, step: int | None) -> Weights:
        """Return a slice of the output columns."""
        if (start, stop, step) == (None, None, 1):
            return self
        part = self.tensor.movedim(-2 + self.out_dim, 0)[start:stop:step].movedim(0, -2 + self.out_dim)
        offset = part.data_ptr() - self.tensor.data_ptr()
        addresses = None if self.addresses is None else tuple(a + offset for a in self.addresses)
        return Weights(part, self.out_dim, addresses)

    def columns_first(self, *, backward: bool) -> bool:
        """Return whether a matrix is stored as [column, inner] for the GEMM (see `operand`)."""
        return (self.out_dim == 0) != backward

    def operand(self, *, backward: bool, block: tuple[int, int] | None) -> Operand:
        """Return the operand of a GEMM that sums over the inputs, or (`backward`) over the outputs.

        Args:
            block: (BN, BK) for a tensor descriptor, which is used if possible; None for pointers.
        """
        columns_first = self.columns_first(backward=backward)
        first, second = self.tensor.stride()[-2:]
        column, inner = (first, second) if columns_first else (second, first)
        if self.addresses is not None:
            access = "table, unaligned" if any(a % 16 for a in self.addresses) else "table"
            table = mark_constant(build_address_table(self.addresses, self.tensor.device))
            return Operand(table, 0, column, inner, access, columns_first)
        expert = self.tensor.stride(0)
        if block is not None and is_describable(self.tensor):
            descriptor = make_descriptor(self.tensor, 1, *(block if columns_first else reversed(block)))
            return Operand(descriptor, expert, column, inner, "descriptor", columns_first)
        access = "strided, wide" if _is_wide(self.tensor) else "strided"
        return Operand(self.tensor, expert, column, inner, access, columns_first)


@dataclasses.dataclass(frozen=True)
class Operand:
    """A weight as arguments of a kernel: source, strides, and access."""

    source: Any
    expert: int
    column: int
    inner: int
    access: str
    columns_first: bool


def is_describable(tensor: Tensor) -> bool:
    """Return whether TMA can read a tensor: contiguous last dimension, other strides multiples of 16 bytes, none
    expanded."""
    *outer, inner = tensor.stride()
    aligned = all(s * tensor.element_size() % 16 == 0 and s > 0 for s in outer)
    return inner == 1 and aligned and tensor.data_ptr() % 16 == 0 and tensor.numel() > 0


_MAX_OFFSET = 2**31 - 1


def _is_wide(tensor: Tensor) -> bool:
    """Return whether offsets within one matrix need more than 32 bits, for example if the experts' axis is an inner
    one."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (rows - 1) * row + (columns - 1) * column > _MAX_OFFSET


def make_descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _copy(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy parameters to a contiguous stack in a dtype."""
    if any(p.dtype is not dtype for p in parameters):
        return stack_weights(parameters, dtype).contiguous()
    count_weight_path("stacked_copy")
    return parameters[0].contiguous() if is_stacked(parameters, 2) else torch.stack(list(parameters))


@functools.lru_cache(maxsize=4096)
def build_address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the addresses as int64 [E].

    Created in another thread: allocations of this thread may belong to a CUDA graph's pool (`torch.compile` warms a
    function up that way before it captures it), which must not outlive the call.
    """

    def make() -> Tensor:
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return table

    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


def stack_biases(biases: Sequence[Tensor] | None) -> Tensor | None:
    """Return the biases as [E,width]; a copy if they are separate and not equally spaced."""
    if biases is None:
        return None
    if is_stacked(biases, 1):
        return biases[0]
    view = make_strided_view(biases)
    return apply(lambda *b: torch.stack(b), *biases) if view is None else view
