"""The float64 rule: a compiled result must be about as accurate as the original's.

The truth is the original code in float64 (`truth`). The original in its own precision deviates from it by rounding. The
compiled program adds the same terms in another order, and may deviate by a small multiple:

    err(compiled, truth) <= m * err(original, truth) + tol / 10          m = 2, or 3 in half precision

So the bound follows from the conditioning of each tensor, never from a fixed rtol.

`err` is taken in two norms, and both must satisfy the bound:

* `rel2`, `||a - t||_2 / ||t||_2`. Random rounding errors average out, so it detects small errors in all values: a
  scale, an activation constant, a routing weight.
* `row`, the largest `||a_r - t_r||_inf / ||t_r||_inf` over the rows r of the last dimension. A row is one token of an
  activation, or one neuron of an expert's weight gradient. It detects errors in few places, such as one dropped token
  or the gradient of an expert with few tokens, which a norm of the whole tensor hides. Rows below a thousandth of the
  tensor's largest value (or 8 u, if larger) are divided by that instead.

`tol / 10 = u + u_sum * sqrt(n)` is one rounding of the stored result plus the random walk of n additions. u is the unit
roundoff of the working precision. u_sum is float32's for half types, else u. n is the longest reduction in the model.
This term matters only if the original happens to be exact, or is the truth itself.

A sum of few terms samples the rounding noise poorly: one number may be exact by chance, and a gradient whose terms
cancel consists of noise. So if a row fails, `compare.py` also runs the original with weights and inputs perturbed by up
to `tol / 5`, and err(original) is the largest error of these runs. A result that the original returns on neighbouring
data is not an error (backward stability). Differences between gradients below 2 * u_sum of the run's largest gradient
are ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_MAX_STACKED = 1 << 20  # elements per stack of tensors


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared tensor.

    Attributes:
        block: FQN of the rewritten block, "" for the whole model.
        name: output path, argument, parameter or buffer FQN.
        kind: output | grad_input | grad_param | buffer | state | path.
        error, bound: measured in `norm`: "rel2", "row", or "count" of differing elements without floating point.
        case: the inputs and the seed.
    """

    block: str
    name: str
    kind: str
    ok: bool
    error: float = 0.0
    bound: float = 0.0
    norm: str = "count"
    note: str = ""
    case: str = ""

    @property
    def ratio(self) -> float:
        """The error in units of the bound."""
        return _compute_ratio(self.error, self.bound)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The constants of the rule.

    Attributes:
        factor: m.
        floor: tol / 10.
        negligible: ignored difference, relative to the largest gradient.
        row_floor: smallest divisor of a row's error, relative to the tensor's largest value.
        is_half: the working precision has 16 bits.
    """

    factor: float
    floor: float
    negligible: float
    row_floor: float = 1e-3
    is_half: bool = False


def tolerance(dtype: torch.dtype, length: int, slack: float = 1.0) -> Tolerance:
    """Return the rule's constants for a working precision.

    Args:
        length: number of terms of the longest reduction.
        slack: factor of the constants. A large one checks the algebra but not the rounding.
    """
    half = dtype in HALF
    stored = torch.finfo(dtype).eps / 2
    summed = torch.finfo(torch.float32).eps / 2 if half else stored
    floor = stored + summed * math.sqrt(max(length, 1))
    return Tolerance(3.0 if half else 2.0, slack * floor, slack * 2 * summed, max(1e-3, 8 * stored), half)


class Error(NamedTuple):
    rel2: float
    row: float


class _Scale:
    """The divisors of relative errors for one tensor.

    Each element counts as the larger of truth and original: a gradient that is exactly zero has only the original's
    noise as its size.
    """

    def __init__(self, truth: Tensor, original: Tensor, finite: Tensor, row_floor: float):
        self.finite = finite
        self.truth = _reshape_rows(truth, finite)
        size = torch.maximum(self.truth.abs(), _reshape_rows(original, finite).abs())
        largest = size.max()
        self.is_zero = not bool(largest > 0)
        self.norm2 = 1.0 if self.is_zero else float(torch.linalg.vector_norm(size))
        self.rows = (
            torch.ones((), dtype=torch.float32) if self.is_zero else size.amax(-1).clamp_min(float(largest) * row_floor)
        )

    def error(self, value: Tensor, negligible: float = 0.0) -> Error:
        off = ((_reshape_rows(value, self.finite) - self.truth).abs() - negligible).clamp_min(0)
        return Error(float(torch.linalg.vector_norm(off)) / self.norm2, float((off.amax(-1) / self.rows).max()))


def _reshape_rows(t: Tensor, finite: Tensor) -> Tensor:
    t = torch.where(finite, t.detach().double(), 0.0)
    return t.reshape(-1, t.shape[-1]) if t.ndim > 1 else t.reshape(1, -1)


def judge(
    row: Row,
    compiled: Tensor,
    original: Tensor,
    truth: Tensor,
    tol: Tolerance,
    noise: Sequence[Tensor] = (),
    largest: float = 0.0,
) -> Row:
    """Apply the rule to one tensor.

    Non-finite values pass only if the original has the same at the same positions. Integers and booleans must be equal.

    Args:
        row: the names; returned with the verdict.
        compiled, original: tensors in the working precision.
        truth: usually in float64.
        noise: results of the original on neighbouring data, see the module.
        largest: the magnitude of the largest gradient, if the tensor is a gradient.
    """
    if compiled.shape != original.shape or compiled.dtype != original.dtype:
        return _make_failed_row(row, f"{_describe(compiled)} instead of {_describe(original)}")
    if original.numel() == 0:
        return dataclasses.replace(row, ok=True)
    compiled, truth, *noise = (t.detach().to(original.device) for t in (compiled, truth, *noise))
    if original.is_complex():
        compiled, original, truth, *noise = map(torch.view_as_real, (compiled, original, truth, *noise))
    if not original.is_floating_point():
        differ = int((compiled != original).sum())
        return dataclasses.replace(row, ok=differ == 0, error=float(differ))
    finite = original.isfinite()
    if misplaced := int((~_match_finiteness(compiled, original)).sum()):
        return _make_failed_row(row, f"{misplaced} values are finite in one of original and compiled, not in the other")
    if not finite.any():
        return _make_failed_row(row, "nothing to compare: all values are NaN or Inf")

    truth = torch.where(truth.isfinite(), truth, original)  # the float64 run may take another branch
    scale = _Scale(truth, original, finite, tol.row_floor)
    error = scale.error(compiled, tol.negligible * largest)
    expected = [scale.error(t) for t in (original, *noise) if t.shape == original.shape]
    note = "" if finite.all() else f"{int((~finite).sum())} values are NaN or Inf in both"
    return _make_verdict(row, error, expected, 0.0 if scale.is_zero else tol.floor, tol.factor, note)


def _make_verdict(
    row: Row, error: Error, expected: Sequence[Error], floor: float, factor: float, note: str = ""
) -> Row:
    """Compare an error with those of the original and its noise."""
    bound = Error(*(factor * max(_drop_infinite(e)) + floor for e in zip(*expected, strict=True)))
    ratio, worst = max((_compute_ratio(e, b), i) for i, (e, b) in enumerate(zip(error, bound, strict=True)))
    return dataclasses.replace(
        row, ok=ratio <= 1, error=error[worst], bound=bound[worst], norm=Error._fields[worst], note=note
    )


class Pair(NamedTuple):
    """The arguments of `judge` for one tensor."""

    row: Row
    compiled: Tensor
    original: Tensor
    truth: Tensor
    largest: float


def judge_all(pairs: Sequence[Pair], tol: Tolerance) -> list[Row]:
    """Apply the rule to many tensors, and return their rows in order.

    Stacks small tensors of equal shape and dtype, such as those of hundreds of experts.
    """
    stacks: dict[Any, list[int]] = {}
    for i, (_, compiled, original, truth, _) in enumerate(pairs):
        if original.is_floating_point() and 0 < original.numel() <= _MAX_STACKED and truth.is_floating_point():
            layouts = tuple((t.shape, t.dtype, t.device) for t in (compiled, original, truth))
            stacks.setdefault(layouts, []).append(i)
    judged: dict[int, Row] = {}
    for (compiled, original, truth), several in stacks.items():
        if len(several) > 1 and compiled == original and truth[0] == original[0] and truth[2] == original[2]:
            count = max(1, _MAX_STACKED // original[0].numel())
            for start in range(0, len(several), count):
                part = several[start : start + count]
                rows = _judge_stack([pairs[i] for i in part], tol)
                judged |= zip(part, rows, strict=True) if rows else {}
    for i, p in enumerate(pairs):
        if i not in judged:
            judged[i] = judge(p.row, p.compiled, p.original, p.truth, tol, (), p.largest)
    return [judged[i] for i in range(len(pairs))]


def _judge_stack(pairs: Sequence[Pair], tol: Tolerance) -> list[Row] | None:
    """Apply `judge` to tensors of equal shape and dtype; None unless all values are finite."""
    values = [torch.stack([t.detach() for t in several]).double() for several in list(zip(*pairs, strict=True))[1:4]]
    if not all(bool(t.isfinite().all()) for t in values):
        return None
    count, width = len(pairs), pairs[0].original.shape[-1] if pairs[0].original.ndim > 1 else -1
    compiled, original, truth = (t.reshape(count, -1, width) if width > 0 else t.reshape(count, 1, -1) for t in values)
    size = torch.maximum(truth.abs(), original.abs())
    largest = size.amax((1, 2))
    is_zero = largest <= 0
    norms = torch.linalg.vector_norm(size, dim=(1, 2)).masked_fill(is_zero, 1.0)
    row_sizes = torch.maximum(size.amax(-1), largest[:, None] * tol.row_floor).masked_fill(is_zero[:, None], 1.0)
    negligible = torch.tensor([tol.negligible * p.largest for p in pairs], dtype=torch.float64, device=truth.device)

    def compute_errors(values: Tensor, negligible: Tensor) -> list[Error]:
        off = ((values - truth).abs() - negligible[:, None, None]).clamp_min(0)
        rel2, row = torch.linalg.vector_norm(off, dim=(1, 2)) / norms, (off.amax(-1) / row_sizes).amax(-1)
        return [Error(*both) for both in zip(rel2.tolist(), row.tolist(), strict=True)]

    errors, expected = compute_errors(compiled, negligible), compute_errors(original, torch.zeros_like(negligible))
    return [
        _make_verdict(pair.row, error, [other], 0.0 if is_zero else tol.floor, tol.factor)
        for pair, error, other, is_zero in zip(pairs, errors, expected, is_zero.tolist(), strict=True)
    ]


def _make_failed_row(row: Row, note: str) -> Row:
    return dataclasses.replace(row, ok=False, error=math.inf, note=note)


def _compute_ratio(error: float, bound: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / bound if bound > 0 else (math.inf if error > 0 else 0.0)


def _drop_infinite(errors: Sequence[float]) -> list[float]:
    return [e for e in errors if math.isfinite(e)] or [0.0]


def _match_finiteness(a: Tensor, b: Tensor) -> Tensor:
    """Test elementwise: both finite, both NaN, or the same infinity."""
    return (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan()) | (a.isinf() & (a == b))


def _describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def fill_missing_gradient(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Replace a missing gradient by zeros if the other is there, as for experts without tokens."""
    if a is None and b is not None:
        return torch.zeros_like(b), b
    if b is None and a is not None:
        return a, torch.zeros_like(a)
    return a, b
