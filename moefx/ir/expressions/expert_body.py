"""`ExpertBody`: the computation of one expert, as a frozen value with a JSON text that an op takes as argument."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx

from ...errors import InvalidInput, summarize_error
from ..node_values import get_argument
from .expression_check import check_dtype, check_expression
from .pointwise_expression import Expr, format_expression, infer_dtype, list_variables, to_dtype

_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "clamp", "clamp_min", "clamp_max", "_to_copy"}


def find_up_widths(mlp: fx.Node) -> tuple[int, ...]:
    """Return the width of each up-projection of an `expert_mlp` node."""
    weights = [weight.meta["val"] for weight in get_argument(mlp, "up")]
    return ExpertBody.from_json(get_argument(mlp, "body")).up_widths(weights)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One grouped GEMM over the expert weights.

    Attributes:
        num: number of its tensors in the op's flat weight list: 1 stacked [E,...], or E separate ones.
        transposed: the weight of an expert is [out, in] (as `nn.Linear.weight`), otherwise [in, out].
        bias: whether each expert adds a bias vector. If so, the flat bias list has `num` tensors for this GEMM.
        bias_dtype: dtype of the sum with the bias if promotion makes it differ from the product's, otherwise "". Under
            autocast, `x @ w + bias` is bfloat16 + float32.
    """

    num: int
    transposed: bool
    bias: bool = False
    bias_dtype: str = ""

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the sum with the bias, for a product in `dtype`."""
        return getattr(torch, self.bias_dtype) if self.bias_dtype else dtype


@dataclasses.dataclass(frozen=True)
class ExpertBody:
    """GEMM(s) -> pointwise -> GEMM -> pointwise.

        h_g  = rows @ up[g] (+ bias)              a bias with `bias_dtype` is added in `a_i`
        a_i  = h_g[:, start:stop:step]            with (g, start, stop, step) = parts[i]
        act  = act(a_0, a_1, ..., w)              w: the row's routing weight, a column [B,1]
        rows = out(act @ down (+ bias), w)        variables y and w

    Attributes:
        up: the up-projections, one or several.
        parts: for each variable of `act` its up-projection and slice. Gate and up may be separate, concatenated or
            interleaved.
        act: expression over `a0`, `a1`, ... and `w`.
        down: the down-projection.
        out: expression over `y` and `w`; `("mul.Tensor", "y", "w")` applies the routing weight after the expert.
    """

    up: tuple[Gemm, ...]
    parts: tuple[tuple[int, int | None, int | None, int], ...]
    act: Expr
    down: Gemm
    out: Expr = "y"

    def __post_init__(self) -> None:
        # Make tuples of JSON's lists, so that equal bodies compare equal.
        object.__setattr__(self, "up", tuple(self.up))
        object.__setattr__(self, "parts", tuple(tuple(p) for p in self.parts))
        object.__setattr__(self, "act", _to_tuples(self.act))
        object.__setattr__(self, "out", _to_tuples(self.out))

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> ExpertBody:
        """Parse the text of `to_json`. It may come from a file, as an argument in a saved program.

        Raises:
            InvalidInput: the text is no expert body, or an expression in it is not allowed.
        """
        try:
            fields = json.loads(text)
            up, down = tuple(Gemm(**gemm) for gemm in fields.pop("up")), Gemm(**fields.pop("down"))
            body = ExpertBody(up=up, down=down, **fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidInput(
                f"the body of expert_mlp is no expert body ({summarize_error(error)}): {text[:200]}"
            ) from None
        body.check()
        return body

    def check(self) -> None:
        """Raise InvalidInput unless every field has a valid value."""
        for gemm in (*self.up, self.down):
            if type(gemm.num) is not int or gemm.num < 1 or not isinstance(gemm.bias_dtype, str):
                raise InvalidInput(f"the body of expert_mlp has {gemm!r:.200}; num is a whole number above 0")
            if gemm.bias_dtype:
                check_dtype(gemm.bias_dtype)
        for part in self.parts:
            is_slice = len(part) == 4 and all(type(n) is int or n is None for n in part)
            if not is_slice or part[0] not in range(len(self.up)) or not (part[3] or 0) >= 1:
                raise InvalidInput(f"the body of expert_mlp has the part {part!r:.200}; it is (up, start, stop, step)")
        check_expression(self.act, {*(f"a{i}" for i in range(len(self.parts))), "w"})
        check_expression(self.out, {"y", "w"})

    def with_experts(self, num: int) -> ExpertBody:
        """Return the body for `num` experts; only separate weights change their number of tensors."""

        def resize(gemm: Gemm) -> Gemm:
            return dataclasses.replace(gemm, num=num) if gemm.num > 1 else gemm

        return dataclasses.replace(self, up=tuple(map(resize, self.up)), down=resize(self.down))

    def up_widths(self, up: Sequence[Any]) -> tuple[int, ...]:
        """Return the width of each up-projection, from the flat list of weights or of objects with their shapes."""
        starts = itertools.accumulate((gemm.num for gemm in self.up[:-1]), initial=0)
        shapes = [(up[start].shape, gemm.transposed) for start, gemm in zip(starts, self.up, strict=True)]
        return tuple(int(shape[-2 if transposed else -1]) for shape, transposed in shapes)

    def act_width(self, up_widths: Sequence[Any]) -> Any:
        """Return the width of the activation, from the widths of the up-projections."""
        group, *columns = self.parts[0]
        if isinstance(up_widths[group], int):
            return len(range(*slice(*columns).indices(up_widths[group])))
        # a meta tensor can slice a symbolic width
        return torch.empty((1, up_widths[group]), device="meta", dtype=torch.float32)[:, slice(*columns)].shape[1]

    def kept_widths(self, keep: str, up_widths: Sequence[Any]) -> list[Any]:
        """Return the widths of the values that the policy `keep` of `expert_mlp` keeps."""
        if keep == "all":
            return [*up_widths, self.act_width(up_widths)]
        return [*up_widths] if keep == "h" else []

    def act_in(self, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Expr:
        """Return `act`, with a cast if promotion (by float32 routing weights) would leave the GEMMs' dtype."""
        return self.act if self._infer("act", dtype, weight_dtype) == dtype else to_dtype(self.act, dtype)

    def out_dtype(self, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the result rows for GEMMs in `dtype`."""
        return self._infer("out", dtype, weight_dtype)

    @functools.cached_property
    def _inferred(self) -> dict[Any, torch.dtype]:
        """Results of `_infer`, which each call of the op needs."""
        return {}

    def _infer(self, part: Literal["act", "out"], dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """Infer the dtype of a pointwise part for GEMMs in `dtype`."""
        if (known := self._inferred.get((part, dtype, weight_dtype))) is not None:
            return known
        expr = self.act if part == "act" else self.out
        dtypes = {v: dtype for v in list_variables(expr)}
        dtypes |= {f"a{i}": self.up[group].sum_dtype(dtype) for i, (group, *_) in enumerate(self.parts)}
        dtypes["y"] = self.down.sum_dtype(dtype)
        if weight_dtype is not None:
            dtypes["w"] = weight_dtype
        inferred = self._inferred[part, dtype, weight_dtype] = infer_dtype(expr, dtypes)
        return inferred

    @functools.cached_property
    def uses_row_weight(self) -> bool:
        return "w" in list_variables(self.act) or "w" in list_variables(self.out)

    def pretty(self) -> str:
        """Format the pointwise parts: `silu(g)*u` or `relu(h)`, followed by ` | y*w` if `out` is not `y` alone.

        A single part is named h; of two parts the gate is g and the other u; more parts are a0, a1, ...
        """
        names = {}
        if len(self.parts) == 1:
            names = {"a0": "h"}
        elif len(self.parts) == 2:
            gate = _find_gate(self.act)
            names = {gate: "g", ("a1" if gate == "a0" else "a0"): "u"}
        text = format_expression(_rename_variables(self.act, names))
        return text if self.out == "y" else f"{text} | {format_expression(self.out)}"


def _to_tuples(expr: Expr) -> Any:
    return tuple(map(_to_tuples, expr)) if isinstance(expr, (tuple, list)) else expr


def _find_gate(act: Any) -> str:
    """Return which of two variables is the gate: the one inside a function, rather than only in arithmetic."""
    inside = _variables_in_functions(act, False)
    return "a1" if "a1" in inside and "a0" not in inside else "a0"


def _variables_in_functions(expr: Any, inside: bool) -> set[str]:
    if isinstance(expr, str):
        return {expr} if inside else set()
    if not isinstance(expr, (tuple, list)) or not expr:
        return set()
    inside = inside or str(expr[0]).partition(".")[0] not in _ARITHMETIC
    return set().union(*(_variables_in_functions(e, inside) for e in expr[1:]))


def _rename_variables(expr: Any, names: dict[str, str]) -> Any:
    if isinstance(expr, str):
        return names.get(expr, expr)
    if isinstance(expr, (tuple, list)) and expr:
        head = expr[0] if isinstance(expr[0], str) and expr[0] not in names else _rename_variables(expr[0], names)
        return (head, *(e if isinstance(e, dict) else _rename_variables(e, names) for e in expr[1:]))
    return expr
