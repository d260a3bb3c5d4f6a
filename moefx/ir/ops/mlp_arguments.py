"""The arguments of one `expert_mlp` call, checked, with its parameters by GEMM. Letters as in `dialect`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInput
from ..expressions.expert_body import ExpertBody, Gemm
from . import expert_gemms

KEEP = ("h", "x", "all", "none")


@dataclasses.dataclass
class ExpertMlpCall:
    """The checked arguments of one `expert_mlp` call.

    Attributes:
        up, up_bias: for each up-projection its list of weights, and its list of biases or None.
        w: the row weights as a column [B,1], or None.
        dtype: dtype of the GEMMs.
        act: the expression of the pointwise part, cast to `dtype`.
        out_dtype: dtype of the result rows.
    """

    body: ExpertBody
    x: Tensor
    token_ids: Tensor
    expert_offsets: Tensor
    inverse: Tensor
    w: Tensor | None
    up: list[list[Tensor]]
    up_bias: list[list[Tensor] | None]
    down: list[Tensor]
    down_bias: list[Tensor] | None
    dtype: torch.dtype
    act: Any
    out_dtype: torch.dtype

    @classmethod
    def of(cls, args: Sequence[Any], body: str, keep: str, dtype: torch.dtype | None) -> ExpertMlpCall:
        # The next argument, `later`, is for autograd alone.
        x, token_ids, expert_offsets, inverse, row_weights, up, up_bias, down, down_bias = args[:9]
        parsed = ExpertBody.from_json(body)
        if keep not in KEEP:
            raise InvalidInput(f"moefx::expert_mlp: keep={keep!r}, expected one of {', '.join(map(repr, KEEP))}")
        if parsed.uses_row_weight and row_weights is None:
            raise InvalidInput(
                f"moefx::expert_mlp: {parsed.pretty()} uses the routing weight w, but row_weights is None"
            )
        dtype = expert_gemms.check_dtypes("expert_mlp", x, (*up, *up_bias, *down, *down_bias), dtype)
        weight_dtype = None if row_weights is None else row_weights.dtype
        down_biases = _split_by_gemm(down_bias, (parsed.down,), is_bias=True, argument="down_bias")
        return cls(
            body=parsed,
            x=x,
            token_ids=token_ids,
            expert_offsets=expert_offsets,
            inverse=inverse,
            w=None if row_weights is None else row_weights[:, None],
            up=_split_by_gemm(up, parsed.up, is_bias=False, argument="up"),
            up_bias=_split_by_gemm(up_bias, parsed.up, is_bias=True, argument="up_bias"),
            down=_split_by_gemm(down, (parsed.down,), is_bias=False, argument="down")[0],
            down_bias=down_biases[0],
            dtype=dtype,
            act=parsed.act_in(dtype, weight_dtype),
            out_dtype=parsed.out_dtype(dtype, weight_dtype),
        )

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @functools.cached_property
    def widths(self) -> tuple[list[int], int, int]:
        """Check and return (width of each up-projection, width of the activation, width of the result)."""
        name, offsets = "expert_mlp", self.expert_offsets
        up = [
            expert_gemms.check_weight_shape(name, w, offsets, g.transposed, self.x.shape[1])[1]
            for w, g in zip(self.up, self.body.up, strict=True)
        ]
        act = self.body.act_width(up)
        return up, act, expert_gemms.check_weight_shape(name, self.down, offsets, self.body.down.transposed, act)[1]

    def count_multiplications(self) -> int:
        """Return the number of multiplications per row in the forward GEMMs."""
        up, act, out = self.widths
        return self.x.shape[1] * sum(up) + act * out

    def find_min_matrix_size(self) -> int:
        """Return the number of elements of an expert's smallest matrix."""
        up, act, out = self.widths
        return min(self.x.shape[1] * min(up), act * out)

    def separate_bias_dtype(self, gemm: Gemm) -> torch.dtype | None:
        """Return the dtype in which the bias is added if it differs from the product's dtype, otherwise None."""
        dtype = gemm.sum_dtype(self.dtype)
        return dtype if gemm.bias and dtype != self.dtype else None

    def slice_hidden(self, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the variables a0, a1, ... as slices of the up-projections."""
        return {
            f"a{i}": hidden[g] if (a, b, c) == (None, None, 1) else hidden[g][:, a:b:c]
            for i, (g, a, b, c) in enumerate(self.body.parts)
        }


def _split_by_gemm(tensors: Sequence[Tensor], gemms: Sequence[Gemm], *, is_bias: bool, argument: str) -> list[Any]:
    """Split a flat list by GEMM, with None for a GEMM without bias."""
    sizes = [g.num if g.bias or not is_bias else 0 for g in gemms]
    if sum(sizes) != len(tensors):
        raise InvalidInput(f"moefx::expert_mlp: {argument} has {len(tensors)} tensors, the body takes {sizes}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [list(tensors[end - size : end]) if size else None for size, end in zip(sizes, ends, strict=True)]
