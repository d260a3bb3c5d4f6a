"""Floats that Python read off buffers and parameters, `scores / float(self.temperature)`: read again at every call.

A capture holds such a float as a constant. The proof has made it come out otherwise, so a constant that follows it
through all captures is one. It stays a tensor without axes: no number has to come to the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture.captured import Capture, HostRead
from .aligned_nodes import AlignedNodes
from .match.nodes import from_state

aten = torch.ops.aten
# Where torch takes a tensor without axes for a Python number, and computes the same.
ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@dataclasses.dataclass(frozen=True)
class RuntimeScalar:
    """A float that is read at every call: from the nodes `twins`, and perhaps its reciprocal or negative."""

    twins: AlignedNodes
    transform: Any = None  # the op


_LAWS: dict[Any, Callable[[float], float]] = {
    None: lambda v: v,
    aten.neg.default: lambda v: -v,
    aten.reciprocal.default: lambda v: 1 / v if v else math.inf,
}


class ScalarReads:
    def __init__(self, captures: Sequence[Capture]):
        self._columns = [column for column in map(list, zip(*map(_floats, captures), strict=False)) if _alike(column)]

    def find(self, values: Sequence[Any]) -> RuntimeScalar | None:
        """What was read where a program has these constants, one for each capture."""
        if not all(type(v) is float for v in values) or len(set(values)) < 3:
            return None
        for column in self._columns:
            for op, law in _LAWS.items():
                if [law(read.value) for read in column] == list(values):
                    return RuntimeScalar(AlignedNodes(read.node for read in column), op)
        return None


def _floats(capture: Capture) -> list[HostRead]:
    """The floats that were read, each line's first."""
    found = {read.source: read for read in reversed(capture.reads) if type(read.value) is float}
    return sorted((r for r in found.values() if r.node is not None and from_state(r.node)), key=lambda r: str(r.source))


def _alike(column: Sequence[HostRead]) -> bool:
    return len({read.source for read in column}) == 1
