"""The pointwise part between the GEMMs of an `ExpertBody`, as functions for the kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...ir.expressions import pointwise_expression
from ...ir.expressions.expert_body import ExpertBody
from ..epilogue import derive_gradients
from ..formula import list_symbols
from ..rules import Underivable


@dataclasses.dataclass(frozen=True)
class Pointwise:
    """The functions of a body, float32 to float32 (see `gemm_forward`).

    Attributes:
        act: (a_0, a_1, w) -> activation.
        vjp: (a_0, a_1, w, g) -> (activation, g times its derivatives by a_0, a_1 and w).
        scale: w -> c(w) of rows = y * c(w), None if rows = y.
        scale_grad: derivative of `scale`.
        uses_weight: whether `act` uses w.
        joined: whether the two parts are interleaved columns of one up-projection.
        num_parts: 1 or 2; with 1, `act` and `vjp` ignore a_1.
    """

    act: Any
    vjp: Any
    scale: Any
    scale_grad: Any
    uses_weight: bool
    joined: bool
    num_parts: int

    @property
    def act_constants(self) -> dict[str, Any]:
        """Constants of kernels that contain the activation."""
        return dict(ACT=self.act, PARTS=self.num_parts, JOINED=self.joined, USES_WEIGHT=self.uses_weight)

    @property
    def vjp_constants(self) -> dict[str, Any]:
        """Constants of kernels that contain the activation's backward."""
        parts = dict(PARTS=self.num_parts, JOINED=self.joined, USES_WEIGHT=self.uses_weight)
        return dict(VJP=self.vjp, SCALE=self.scale, HAS_SCALE=self.scale is not None, **parts)


@dataclasses.dataclass(frozen=True)
class Formulas:
    """The formulas of a body's pointwise parts (see `Pointwise`) in SymPy.

    Attributes:
        order: the variables in the order in which the kernels load them.
        parameters: parameters of `Pointwise.act`.
        vjp: the activation, and g times its derivatives by `parameters`.
    """

    order: list[str]
    parameters: tuple[str, ...]
    vjp: list[Any]
    scale: Any
    scale_grad: Any


@functools.lru_cache(maxsize=1024)
def derive_formulas(text: str, widths: tuple[int, ...] | None = None) -> Formulas:
    """Derive the formulas of a body. Does not need Triton.

    Args:
        text: JSON text of the body.
        widths: widths of the up-projections; None if no part ends at a number that may be the width.

    Raises:
        Underivable: the kernels do not support the body. The message is the reason.
    """
    try:
        return _formulas(ExpertBody.from_json(text), widths)
    except RecursionError as error:
        raise Underivable("an expression nested too deeply") from error


@functools.lru_cache(maxsize=1024)
def build_pointwise(text: str, widths: tuple[int, ...] | None = None, ptx: bool = False) -> Pointwise:
    """Build the kernels' functions from `derive_formulas`.

    Args:
        ptx: use PTX instructions, for NVIDIA's GPUs only.
    """
    from .math_functions import build_function  # imports Triton, which `explain` does not need

    formulas, body = derive_formulas(text, widths), ExpertBody.from_json(text)
    scaled = body.out != "y"
    return Pointwise(
        act=build_function("act", formulas.parameters, formulas.vjp[:1], ptx),
        vjp=build_function("vjp", (*formulas.parameters, "g"), formulas.vjp, ptx),
        scale=build_function("scale", ("w",), [formulas.scale], ptx) if scaled else None,
        scale_grad=build_function("scale_grad", ("w",), [formulas.scale_grad], ptx) if scaled else None,
        uses_weight="w" in pointwise_expression.list_variables(body.act),
        joined=len(formulas.order) == 2 and body.parts[0][3] == 2,
        num_parts=len(formulas.order),
    )


def _formulas(body: ExpertBody, widths: Sequence[int] | None) -> Formulas:
    if not pointwise_expression.is_linear(body.out, "y"):
        raise Underivable(
            f"{pointwise_expression.format_expression(body.out)} after the down-projection is not linear in y"
        )
    order = _load_order(body, widths)
    for expr, variables in ((body.act, (*order, "w")), (body.out, ("y", "w"))):
        if unknown := [name for name in pointwise_expression.list_variables(expr) if name not in variables]:
            raise Underivable(f"{pointwise_expression.format_expression(expr)} has an unknown variable {unknown[0]}")
    parameters = (*order, *(["_"] if len(order) == 1 else []), "w")
    value, *gradients = derive_gradients(body.act, "g", parameters)
    if missing := [name for name in order if name not in list_symbols(value)]:
        raise Underivable(f"{pointwise_expression.format_expression(body.act)} does not depend on {missing[0]}")
    # With y = 1 and gradient 1 the results are the factor c(w) and its derivative.
    factor, factor_grad = derive_gradients(body.out, "g", ("w",), ones=("y", "g"))
    return Formulas(order, parameters, [value, *gradients], factor, factor_grad)


def _load_order(body: ExpertBody, widths: Sequence[int] | None) -> list[str]:
    """Return the variables in the order in which the kernels load them. The parts must cover the up-projections."""
    slices = [
        _normalize_slice(start, stop, step, widths[group] if widths and group < len(widths) else None)
        for group, start, stop, step in body.parts
    ]
    groups = [group for group, *_ in body.parts]
    names = [f"a{i}" for i in range(len(body.parts))]
    if len({gemm.bias for gemm in body.up}) > 1:
        raise Underivable("only one of two up-projections has a bias")
    if bias_dtype := next((gemm.bias_dtype for gemm in (*body.up, body.down) if gemm.bias_dtype), ""):
        raise Underivable(f"a bias has another dtype, {bias_dtype}, than the matrix products")
    if len({gemm.transposed for gemm in body.up}) > 1:
        raise Underivable("only one of two up-projections is transposed")
    if len(names) > 2:
        raise Underivable(f"{len(names)} parts of the up-projection; the kernels take two")
    if names and sorted(groups) == list(range(len(body.up))) and all(columns == (0, None, 1) for columns in slices):
        if widths and len(set(widths)) > 1:
            raise Underivable(f"up-projections of different widths: {', '.join(map(str, widths))}")
        return names
    if groups == [0, 0] and len(body.up) == 1:
        (start, stop, step), upper = sorted(slices, key=lambda columns: columns[0] != 0)
        if (start, stop, step) == (0, None, 2) and upper == (1, None, 2) and not (widths and widths[0] % 2):
            return names if slices[0][0] == 0 else names[::-1]
        halves = stop not in (None, 0) and (widths is None or 2 * stop == widths[0])
        if (start, step) == (0, 1) and halves and upper == (stop, None, 1):
            return names
    parts = ", ".join(f"{group}[{start}:{stop}:{step}]" for group, start, stop, step in body.parts)
    raise Underivable(f"parts {parts} of {len(body.up)} up-projections: not whole ones, halves or every other column")


def _normalize_slice(start: int | None, stop: int | None, step: int, width: int | None) -> tuple[int, int | None, int]:
    """Normalise a slice of columns: an end at or beyond the width becomes None."""
    first = start or 0
    end = torch.iinfo(torch.int64).max if width is None else width - (width - 1 - first) % step
    return first, None if stop is None or stop >= end else stop, step
