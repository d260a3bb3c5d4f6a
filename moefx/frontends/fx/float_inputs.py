"""Floats of the caller's, such as a scale of a configuration, that a dynamic graph takes for constants.

Dynamo compiles another graph for another value then: what seldom changes may be one, what changes at each step may not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import CompileContext

_MAX_VALUES = 3
_values_by_frame: dict[
    Any, tuple[int, dict[str, set[float]]]
] = {}  # by Dynamo's frame: its last graph, values of floats by name


def may_be_constant(name: str, now: float) -> bool:
    """Whether a float had few values in the graphs of this frame in which it was a constant."""
    met = _current_values().get(name, set())
    return now in met or len(met) < _MAX_VALUES


def record_constant(name: str, number: torch.SymFloat) -> None:
    """A guard of the graph that is being compiled."""
    _current_values().setdefault(name, set()).add(float(number))


def _current_values() -> dict[str, set[float]]:
    """Values by name, of the frame that is being compiled."""
    graph = CompileContext.current_compile_id()
    frame, count = (None, 0) if graph is None else (graph.frame_id, graph.frame_compile_id or 0)
    last, values = _values_by_frame.get(frame, (0, {}))
    if count < last:  # Dynamo was reset
        values = {}
    _values_by_frame[frame] = count, values
    return values
