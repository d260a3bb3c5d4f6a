"""Rows for all results of one call: which results of two runs are compared, and with what.

`policy` judges two tensors. Some results may differ by design, and are left out here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .decisions import largest_magnitude
from .policy import Pair, Row, Tolerance, fill_missing_gradient, judge, judge_all
from .sandbox import SECOND_BACKWARD, Key, Run

_REQUIRES_GRAD = ".requires_grad"  # ends the name of an output's flag


def build_rows(
    named: Row,
    tol: Tolerance,
    original: Run,
    compiled: Run,
    truth: Run,
    noise: Sequence[Run] = (),
    *,
    is_shared: bool = False,
) -> list[Row]:
    """Judge each result of the compiled run, in the order of the original's results.

    Args:
        named: a row with the block and the case.
        truth: the run in float64, or the original.
        noise: runs of the original with perturbed weights; without them all tensors are judged together.
        is_shared: several ranks have parts of the results.
    """
    rows: list[Row] = []
    pairs: dict[int, Pair] = {}  # tensors to judge together, by the index of their row
    largest, largest_first = _find_largest_gradients(original)
    for key in (*original.values, *(k for k in compiled.values if k not in original.values)):
        if _may_differ(key, original, compiled, is_shared):
            continue
        kind, name = key
        row = dataclasses.replace(named, name=name, kind=kind)
        if key not in original.values or key not in compiled.values:
            note = "only in the original" if key in original.values else "only in the compiled model"
            rows.append(dataclasses.replace(row, error=math.inf, note=note))
            continue
        ours, theirs = fill_missing_gradient(compiled.values[key], original.values[key])
        if ours is None or theirs is None:
            continue  # no gradient in either
        exact, *perturbed = (_get_or_zeros(run, key, theirs) for run in (truth, *noise))
        exact = exact if exact.shape == theirs.shape else theirs
        largest_alike = 0.0
        if kind.startswith("grad"):
            largest_alike = largest if name.endswith(SECOND_BACKWARD) else largest_first
        if noise:
            row = judge(row, ours, theirs, exact, tol, perturbed, largest_alike)
        else:
            pairs[len(rows)] = Pair(row, ours, theirs, exact, largest_alike)
        rows.append(row)
    for index, row in zip(pairs, judge_all(list(pairs.values()), tol), strict=True):
        rows[index] = row
    return [row for row in rows if not (row.ok and row.name.endswith(_REQUIRES_GRAD))]


def _may_differ(key: Key, original: Run, compiled: Run, is_shared: bool) -> bool:
    """Return whether a result is left out: it may differ, or the call has not changed it."""
    kind, name = key
    if kind in ("buffer", "state") and key not in original.changed and key not in compiled.changed:
        return True
    if name.endswith(_REQUIRES_GRAD):
        if is_shared and _is_empty(original, name):
            return True  # a rank without tokens takes part in the backward of the others
        if _requires_grad_alone(original, compiled, key):
            return True
    # a graph lacks unused parameters
    return key in original.values and original.values[key] is None and key not in compiled.values


def _is_empty(run: Run, name: str) -> bool:
    """Return whether the output of a flag has no elements."""
    output = run.values.get(("output", name.removesuffix(_REQUIRES_GRAD)))
    return output is not None and not output.numel()


def _requires_grad_alone(original: Run, compiled: Run, key: Key) -> bool:
    """Return whether an output requires grad in the compiled model only, as when the original skips all experts.

    The gradients are compared too, and must be zero.
    """
    ours, theirs = compiled.values.get(key), original.values.get(key)
    return ours is not None and theirs is not None and bool(ours) and not bool(theirs)


def _find_largest_gradients(run: Run) -> tuple[float, float]:
    """Return the largest magnitude of all gradients, and that of the first backward's."""
    sizes = [
        (name, largest_magnitude(gradient))
        for (kind, name), gradient in run.values.items()
        if kind.startswith("grad") and gradient is not None
    ]
    first = (size for name, size in sizes if not name.endswith(SECOND_BACKWARD))
    return max((size for _, size in sizes), default=0.0), max(first, default=0.0)


def _get_or_zeros(run: Run, key: Key, like: Tensor) -> Tensor:
    value = run.values.get(key)
    return torch.zeros_like(like) if value is None else value
