"""`ExpertBody`: what one expert computes, as a frozen value with a JSON text (an op can carry a string)."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import torch

from .expression import Expr, pretty, result_dtype, to_dtype, variables


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One grouped GEMM over the expert weights.

    Attributes:
        num: how many tensors of the op's flat weight list it takes: 1 stacked [E,...], or E separate ones.
        transposed: the weight of an expert is [out, in] (as `nn.Linear.weight`), else [in, out].
        bias: one bias vector for each expert is added; the flat bias list has `num` tensors for it as well.
    """

    num: int
    transposed: bool
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class ExpertBody:
    """GEMM(s) -> pointwise -> GEMM -> pointwise.

        h_g  = rows @ up[g] (+ bias)
        a_i  = h_g[:, start:stop:step]            with (g, start, stop, step) = parts[i]
        act  = act(a_0, a_1, ..., w)              w: the row's routing weight, a column [B,1]
        rows = out(act @ down (+ bias), w)        variables y and w

    Attributes:
        up: the up-projections, one or several.
        parts: which slice of which up-projection each variable of `act` is: gate and up separate,
            concatenated or interleaved.
        act: expression over `a0`, `a1`, ... and `w`.
        down: the down-projection.
        out: expression over `y` and `w`; `("mul.Tensor", "y", "w")` applies the routing weight after the
            expert.
    """

    up: tuple[Gemm, ...]
    parts: tuple[tuple[int, int | None, int | None, int], ...]
    act: Expr
    down: Gemm
    out: Expr = "y"

    def __post_init__(self) -> None:
        # One form for both spellings (lists from JSON, tuples from Python), so that equal bodies are equal
        # and hashable.
        object.__setattr__(self, "up", tuple(self.up))
        object.__setattr__(self, "parts", tuple(tuple(p) for p in self.parts))
        object.__setattr__(self, "act", _frozen(self.act))
        object.__setattr__(self, "out", _frozen(self.out))

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> ExpertBody:
        fields = json.loads(text)
        fields["up"] = tuple(Gemm(**gemm) for gemm in fields["up"])
        fields["down"] = Gemm(**fields["down"])
        return ExpertBody(**fields)

    def act_in(self, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Expr:
        """`act`, cast where promotion (say by float32 routing weights) would leave the GEMMs' dtype."""
        return self.act if self._dtype(self.act, dtype, weight_dtype) == dtype else to_dtype(self.act, dtype)

    def out_dtype(self, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of the result rows for GEMMs in `dtype`."""
        return self._dtype(self.out, dtype, weight_dtype)

    def _dtype(self, expr: Expr, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        dtypes = {v: dtype for v in variables(expr)}
        if weight_dtype is not None:
            dtypes["w"] = weight_dtype
        return result_dtype(expr, dtypes)

    @property
    def uses_row_weight(self) -> bool:
        return "w" in variables(self.act) or "w" in variables(self.out)

    def pretty(self) -> str:
        """`silu(a0)*a1`, followed by ` | y*w` when something is done to the output."""
        return pretty(self.act) + ("" if self.out == "y" else f" | {pretty(self.out)}")


def _frozen(expr: Expr) -> Any:
    return tuple(map(_frozen, expr)) if isinstance(expr, (tuple, list)) else expr
