"""Operands and results of the GEMMs of `expert_mlp_algebra`, split by groups of experts.

`Gemms` multiply one group at a time, from `Parameters` and `RowOperands` to `Buffer` and `Gradient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.expressions import pointwise_expression
from ...ir.ops.expert_mlp import make_unit_variables
from ...ir.ops.mlp_arguments import ExpertMlpCall

Gemms = Any  # SegmentGemms | GroupedGemms: they have the same interface
Group = Any


class Buffer:
    """A result that groups fill part by part. Without a tensor, the only group provides it."""

    def __init__(self, gemms: Gemms, tensor: Tensor | None):
        self.tensor = tensor
        self.slices: Sequence[Tensor] = [] if tensor is None else gemms.result_slices(tensor)

    def find_slice(self, group: Group) -> Tensor | None:
        """Return the slice of the result for the group's rows, or None without a tensor."""
        return self.slices[group.index] if self.slices else None

    def store(self, group: Group, rows: Tensor) -> Tensor:
        """Store the group's rows, with a copy unless they are in their slice already. Returns the rows."""
        if self.tensor is None:
            self.tensor = rows
        elif rows is not (part := self.slices[group.index]):
            part.copy_(group.drop_padding(rows))
        return rows


class Gradient:
    """The gradient of one GEMM's parameters, filled group by group.

    Attributes:
        value: a stack [E,...], or a list of E tensors.
    """

    def __init__(self, parameters: Sequence[Tensor], value: Any):
        self.parameters, self.dtype, self.value = parameters, parameters[0].dtype, value

    def multiply(self, gemms: Gemms, group: Group, grad: Tensor, rows: Tensor, transposed: bool) -> None:
        """Compute the group's part of a matrix's gradient."""
        left, right = (grad, rows) if transposed else (rows, grad)
        self.value = gemms.outer(group, left, right, self.value, self.dtype)


class Parameters:
    """A call's expert parameters as operands of its GEMMs.

    Attributes:
        bias_dtypes, down_bias_dtype: dtypes of biases that are added in another dtype than the GEMM's, otherwise None.
    """

    def __init__(self, call: ExpertMlpCall, gemms: Gemms):
        self.gemms = gemms
        self.bias_dtypes = [call.separate_bias_dtype(gemm) for gemm in call.body.up]
        self.down_bias_dtype = call.separate_bias_dtype(call.body.down)
        self.up = [gemms.prepare_weights(w, g.transposed) for w, g in zip(call.up, call.body.up, strict=True)]
        self.up_bias = [gemms.prepare_biases(b) for b in call.up_bias]
        self.down = gemms.prepare_weights(call.down, call.body.down.transposed)
        self.down_bias = gemms.prepare_biases(call.down_bias)

    def project_up(self, g: int, group: Group, x: Tensor, out: Tensor | None = None) -> Tensor:
        bias = None if self.bias_dtypes[g] else self.up_bias[g]
        return self.gemms.multiply(group, x, self.up[g], out, bias=bias)

    def add_separate_biases(self, group: Group, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Add the biases that have another dtype than the GEMMs."""
        numbered = enumerate(zip(hidden, self.bias_dtypes, strict=True))
        return [self.gemms.add_bias(group, h.to(dtype), self.up_bias[g]) if dtype else h for g, (h, dtype) in numbered]

    def project_down(self, group: Group, act: Tensor, out: Tensor | None = None) -> Tensor:
        if dtype := self.down_bias_dtype:
            return self.gemms.add_bias(group, self.gemms.multiply(group, act, self.down).to(dtype), self.down_bias)
        return self.gemms.multiply(group, act, self.down, out, bias=self.down_bias)


class Scale:
    """The factors of rows, [n,1], as mantissa times power of two.

    Multiplication by the mantissa rounds as by the factor, multiplication by the power of two is exact. So the product
    with the mantissa serves for all gradients, also if a factor is zero.

    Args:
        dtype: dtype of the tensors that are multiplied.
    """

    def __init__(self, factors: Tensor, dtype: torch.dtype):
        self.factors = factors
        wide = factors.to(torch.promote_types(factors.dtype, torch.float32))
        mantissa = torch.frexp(wide).mantissa * 2
        self.mantissa = torch.where((wide != 0) & wide.isfinite(), mantissa, 1)
        power = wide / self.mantissa
        self.power = power if dtype is torch.float16 else cast_tensor(dtype, power)  # float16 has too few exponents


class RowOperands:
    """A call's index and row weights, split by group.

    Attributes:
        factor: the expression c(w) of rows = y * c(w); `out` itself if it is not linear in y.
        scale: c(w), [B,1]; None if `out` is y, or not linear in y.
    """

    def __init__(self, call: ExpertMlpCall, gemms: Gemms):
        self.token_ids = gemms.input_slices(call.token_ids)
        self.w = None if call.w is None else gemms.input_slices(call.w)
        self.scale, self.factor = None, call.body.out
        if call.body.out != "y" and pointwise_expression.is_linear(call.body.out, "y"):
            self.factor = pointwise_expression.drop_casts(call.body.out, "y")
            self.scale = gemms.input_slices(pointwise_expression.evaluate(self.factor, make_unit_variables(call)))

    def add_weight_variable(self, group: Group, env: dict[str, Tensor]) -> dict[str, Tensor]:
        return env if self.w is None else {**env, "w": self.w[group.index]}


def cast_tensor(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return `tensor.to(dtype)`. Saves the microsecond of that call if the dtype is equal."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)
