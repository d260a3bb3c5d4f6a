"""Recompute floats that Python reads from buffers and parameters, as in `scores / float(self.temperature)`.

A capture holds such a float as a constant. The proof varies the value between captures, so a constant that varies in
the same way comes from this read. The rewritten graph keeps it as a tensor without axes, and the host reads nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture.tracing.capture_result import Capture, HostRead
from ...matching.facts.graph_nodes import follows_from_state
from .aligned_nodes import AlignedNodes

aten = torch.ops.aten
# Ops that compute the same for a Python number and for a tensor without axes.
ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@dataclasses.dataclass(frozen=True)
class RuntimeScalar:
    """A float that is read at each call.

    Attributes:
        aligned: the tensor that holds it. transform: an op on the value (negative or reciprocal), or None.
    """

    aligned: AlignedNodes
    transform: Any = None


_TRANSFORMS: dict[Any, Callable[[float], float]] = {
    None: lambda v: v,
    aten.neg.default: lambda v: -v,
    aten.reciprocal.default: lambda v: 1 / v if v else math.inf,
}


class ScalarReads:
    """The floats that Python read at the same lines of all captures."""

    def __init__(self, captures: Sequence[Capture]):
        self._columns = [
            column
            for column in map(list, zip(*map(_list_float_reads, captures), strict=False))
            if _has_one_source(column)
        ]

    def find(self, values: Sequence[Any]) -> RuntimeScalar | None:
        """Find the read that gives these constants, one for each capture, or None."""
        if not all(type(v) is float for v in values) or len(set(values)) < 3:
            return None
        for column in self._columns:
            for op, function in _TRANSFORMS.items():
                if [function(read.value) for read in column] == list(values):
                    return RuntimeScalar(AlignedNodes(read.node for read in column), op)
        return None


def _list_float_reads(capture: Capture) -> list[HostRead]:
    """Return the float reads from parameters and buffers, the first of each line."""
    read_by_source = {read.source: read for read in reversed(capture.reads) if type(read.value) is float}
    return sorted(
        (r for r in read_by_source.values() if r.node is not None and follows_from_state(r.node)),
        key=lambda r: str(r.source),
    )


def _has_one_source(column: Sequence[HostRead]) -> bool:
    return len({read.source for read in column}) == 1
