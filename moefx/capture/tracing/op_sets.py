"""Sets of ops and functions that captures treat alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten

# The result depends on the shape of the argument, never on its values.
SHAPE_ONLY = {
    getattr(aten, name).default
    for name in (
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
        "new_empty_strided",
    )
}  # fmt: skip

CONTRACTIONS = {F.linear, torch.einsum, torch.matmul, F.scaled_dot_product_attention} | {
    getattr(aten, name).default
    for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "mv", "dot", "_grouped_mm", "addbmm", "addmv")
    if hasattr(aten, name)
}

# Names without overloads from here on.
NAN_CHECKS = {"isnan", "isinf", "isfinite", "isneginf", "isposinf"}
FLOAT_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "signbit", *NAN_CHECKS}
# They read a float as a boolean: it is true unless it is 0.
TRUTHS = {"logical_not", "logical_and", "logical_or", "logical_xor", "any", "all", "nonzero", "count_nonzero"}
# They select along an axis, and return indices or can return them.
SELECTION_OPS = {"topk", "max", "min", "argmax", "argmin", "sort", "argsort", "kthvalue", "multinomial"}
# They return some of the elements of a tensor, or positions of these.
ELEMENT_SELECTIONS = {
    "topk", "max", "min", "argmax", "argmin", "sort", "argsort", "kthvalue", "multinomial", "nonzero", "scatter",
    "_unique2", "unique_dim", "unique_consecutive", "median", "nanmedian", "mode", "cummax", "cummin", "aminmax",
}  # fmt: skip


def bare_name(target: Any) -> str:
    """Return the name of an op without its overload, or of a function; "" if it has none."""
    return getattr(target, "__name__", "").partition(".")[0]
