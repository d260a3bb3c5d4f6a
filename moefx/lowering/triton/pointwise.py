"""What stands between the GEMMs of an `ExpertBody`, as functions for the kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import sympy

from ...ir import expression
from ...ir.body import ExpertBody
from .. import epilogue
from ..epilogue import Underivable
from .elementary import derived


@dataclasses.dataclass(frozen=True)
class Pointwise:
    """The functions of a body, float32 to float32 (see `gemm`).

    Attributes:
        act: (a_0, a_1, w) -> activation. vjp: (a_0, a_1, w, g) -> (activation, and g times its derivatives by
            these).
        scale: w -> c of rows = y * c(w), None where rows = y. scale_grad: its derivative.
        uses_weight: `act` uses w.
        joined: the two parts are interleaved columns of one up-projection.
        num_parts: 1 or 2; with one `act` and `vjp` ignore a_1.
    """

    act: Any
    vjp: Any
    scale: Any
    scale_grad: Any
    uses_weight: bool
    joined: bool
    num_parts: int


@functools.lru_cache(maxsize=1024)
def pointwise(text: str) -> Pointwise:
    """From the JSON text of a body.

    Raises:
        Underivable: the kernels do not take it; the message is the reason.
    """
    body = ExpertBody.from_json(text)
    if not expression.is_linear(body.out, "y"):
        raise Underivable(f"{expression.pretty(body.out)} after the down-projection is not linear in y")
    order = _order(body)
    names = (*order, "w")
    value = epilogue.formula_of(body.act, names)
    missing = [name for name in order if sympy.Symbol(name, real=True) not in value.free_symbols]
    if missing:
        raise Underivable(f"{expression.pretty(body.act)} does not depend on {missing[0]}")
    parameters = (*order, *(["_"] if len(order) == 1 else []), "w")
    gradients = epilogue.with_gradients(value, "g", parameters)
    w = sympy.Symbol("w", real=True)
    factor = epilogue.factor_of(body.out, "y", ("w",))
    scaled = body.out != "y"
    return Pointwise(
        act=derived("act", parameters, [value]),
        vjp=derived("vjp", (*parameters, "g"), gradients),
        scale=derived("scale", ("w",), [factor]) if scaled else None,
        scale_grad=derived("scale_grad", ("w",), [sympy.diff(factor, w)]) if scaled else None,
        uses_weight="w" in expression.variables(body.act),
        joined=len(order) == 2 and body.parts[0][3] == 2,
        num_parts=len(order),
    )


def _order(body: ExpertBody) -> list[str]:
    """The variables in the order in which the kernels load them; the parts must fill the up-projections."""
    parts = body.parts
    if len(parts) > 2:
        raise Underivable(f"{len(parts)} parts of the up-projection; the kernels take two")
    groups = sorted(group for group, *_ in parts)
    whole = (None, None, 1)
    slices = [tuple(columns) for _, *columns in parts]
    if groups == list(range(len(parts))) and all(_is_whole(columns) for columns in slices):
        return [f"a{i}" for i in range(len(parts))]
    if groups == [0, 0] and len(body.up) == 1:
        if {(a or 0, step) for a, _, step in slices} == {(0, 2), (1, 2)} and all(b is None for _, b, _ in slices):
            return ["a0", "a1"] if not slices[0][0] else ["a1", "a0"]
        (first, second) = sorted(range(2), key=lambda i: slices[i][0] or 0)
        left, right = slices[first], slices[second]
        if left[2] == right[2] == 1 and not left[0] and right[1] is None and left[1] == right[0]:
            return ["a0", "a1"]
    raise Underivable(f"parts {slices} of {len(body.up)} up-projections, other than halves, alternating or whole: {whole}")


def _is_whole(columns: tuple[Any, ...]) -> bool:
    return columns == (None, None, 1)
