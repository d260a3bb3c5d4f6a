"""Find ops that turn floating-point values into decisions, and read their results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class OpTraits:
    """What an op may do, whatever its arguments.

    Attributes:
        is_random: it draws random numbers.
        may_select: it selects indices along a dimension, if its input has floating-point values.
        may_decide: it may turn floating-point values into integers or booleans.
        may_name_dtypes: its arguments may include dtypes, or strings that name dtypes.
        makes_low_precision: it makes a tensor of Python numbers or of no tensor, maybe in a dtype below float64.
    """

    is_random: bool
    may_select: bool
    may_decide: bool
    may_name_dtypes: bool
    makes_low_precision: bool


@functools.cache
def find_traits(func: Any) -> OpTraits:
    """Return the traits of an op."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order op
        return OpTraits(is_random, False, False, True, False)
    is_functional = func.namespace == "aten" and not schema.is_mutable
    returns_pair = [r.name for r in schema.returns] == ["values", "indices"]
    has_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    return OpTraits(
        is_random,
        may_select=is_functional and (returns_pair or schema.name in ("aten::argmax", "aten::argmin")),
        may_decide=is_functional and func is not torch.ops.aten.view.dtype,
        may_name_dtypes=func not in _NO_CASTS and any("Tensor" not in str(a.type) for a in schema.arguments),
        makes_low_precision=func in _LITERALS
        or (not has_tensors and [str(r.type) for r in schema.returns] == ["Tensor"]),
    )


# Ops that turn Python numbers into tensors, as in `torch.tensor([...])` and `torch.where(mask, 1.1, 0.3)`.
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.scalar_tensor.default)
_NO_CASTS = (torch.ops.aten.view.dtype, torch.ops.aten.scalar_tensor.default)


def is_selection(traits: OpTraits, args: Any) -> bool:
    """Return whether this op selects indices along a dimension by floating-point scores."""
    return traits.may_select and bool(args) and is_float_tensor(args[0]) and args[0].ndim > 0 and args[0].numel() > 0


def is_decision(traits: OpTraits, args: Any, out: Any) -> bool:
    """Return whether this op turns floating-point values into integers or booleans."""
    if not traits.may_decide or is_float_tensor(out):
        return False
    outs = out if isinstance(out, (tuple, list)) else (out,)
    discrete = bool(outs) and all(isinstance(o, Tensor) and not is_float_tensor(o) and not o.is_complex() for o in outs)
    return discrete and any(is_float_tensor(a) for a in args)


def is_float_tensor(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| per element: 0 for equal infinities (scores of masked experts), infinite if only one is
    infinite."""
    return torch.where(a == b, 0.0, (a.double() - b.double()).abs()).nan_to_num(nan=float("inf"))


def largest_magnitude(t: Tensor) -> float:
    """Return the largest finite magnitude."""
    t = t[t.isfinite()]
    return float(t.abs().max()) if t.numel() else 0.0


class Selection:
    """A call of an op that selects indices along a dimension (topk, sort, max, argmax, ...).

    Moves that dimension last for scores and ids, and converts ids back to the op's own layout.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any):
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        self.op = func._schema.name.removeprefix("aten::")
        self.input: Tensor = args[0]
        self.dim: int | None = named.get("dim", None if self.op.startswith("arg") else -1)
        self.has_kept_dim = self.op in ("topk", "sort", "cummax", "cummin") or bool(named.get("keepdim", False))
        self.largest = bool(named.get("largest", True)) and not self.op.endswith("min")
        self.returns_pair = len(func._schema.returns) == 2
        self.scores = self.input.flatten() if self.dim is None else self.input.movedim(self.dim, -1)

    def read_ids(self, out: Any) -> Tensor:
        """Return the selected ids in the result of the op, [..., k]."""
        ids = out[1] if self.returns_pair else out
        if self.dim is None:
            return ids.reshape(1)
        return (ids if self.has_kept_dim else ids.unsqueeze(self.dim)).movedim(self.dim, -1)

    def build_outputs(self, ids: Tensor) -> Any:
        """Return the result of the op for other ids [..., k]."""
        if self.dim is None:
            return ids.reshape([1] * self.input.ndim if self.has_kept_dim else [])
        ids = ids.movedim(-1, self.dim).contiguous()
        values = self.input.gather(self.dim, ids)
        if not self.has_kept_dim:
            ids, values = ids.squeeze(self.dim), values.squeeze(self.dim)
        return (values, ids) if self.returns_pair else ids

    def ignore_order(self, t: Tensor) -> Tensor:
        """Sort the values of topk, whose order is not part of the decision."""
        return t.sort(-1).values if self.op == "topk" else t

    def margin(self, k: int) -> float:
        """Return the smallest gap between the k-th and the next score, relative to the largest; NaN if undefined."""
        if k >= self.scores.shape[-1] or self.op not in ("topk", "max", "min", "argmax", "argmin"):
            return float("nan")
        best = self.scores.double().topk(k + 1, dim=-1, largest=self.largest).values
        return float(distance(best[..., k - 1], best[..., k]).min()) / max(largest_magnitude(best), 1e-300)
