"""Track floats of the caller, such as a scale in a configuration, that a dynamic graph treats as constants.

Dynamo compiles a new graph for each value of a constant. A float may be one if it rarely changes, not if it changes
at each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import CompileContext

_MAX_VALUES = 3
# By Dynamo's frame: the number of its last graph, and the values of each constant.
_values_by_frame: dict[Any, tuple[int, dict[str, set[float]]]] = {}


def can_be_constant(name: str, value: float) -> bool:
    """Return whether a float has had few values as a constant in the graphs of this frame."""
    values = _read_current_values().get(name, set())
    return value in values or len(values) < _MAX_VALUES


def record_constant(name: str, number: torch.SymFloat) -> None:
    """Make a float a constant of the graph that is being compiled. `float()` adds the guard."""
    _read_current_values().setdefault(name, set()).add(float(number))


def _read_current_values() -> dict[str, set[float]]:
    """Return the values of constants by name, for the frame that is being compiled."""
    graph = CompileContext.current_compile_id()
    frame, count = (None, 0) if graph is None else (graph.frame_id, graph.frame_compile_id or 0)
    last, values = _values_by_frame.get(frame, (0, {}))
    if count < last:  # Dynamo was reset
        values = {}
    _values_by_frame[frame] = count, values
    return values
