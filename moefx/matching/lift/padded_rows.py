"""Find hidden states that a program pads: rows set to a constant, and appended rows."""

from __future__ import annotations

import contextlib
import math

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.capture_result import Capture
from ...errors import Refused
from ..facts.graph_nodes import Line, follows_from_integers, line
from ..terms.term import TooLarge, is_const
from .parameter_uses import MAX_ROWS, ParameterUses


def find_padding_lines(block: nn.Module, capture: Capture, width: int) -> frozenset[Line]:
    """Find the lines that set some rows of hidden states to a constant, by a mask argument, or append such rows.

    Constant rows do not show how the program computes with the others.

    Args:
        width: last dim of the hidden states.
    """
    uses, padding_lines = ParameterUses(block, capture), set[Line]()
    padded: set[fx.Node] = set()  # nodes with constant rows, and those that depend on them
    for n in capture.nodes:
        val = n.meta.get("val")
        if not isinstance(val, FakeTensor) or val.dim() < 2 or not val.is_floating_point() or follows_from_integers(n):
            continue
        if not padded.isdisjoint(n.all_input_nodes):
            padded.add(n)
        elif val.shape[-1] == width and 0 < math.prod(val.shape[:-1]) <= MAX_ROWS:
            with contextlib.suppress(Refused, TooLarge):
                if {is_const(row) for row in uses.list_rows(n)} == {True, False}:
                    padded.add(n)
                    padding_lines.add(line(n))
    return frozenset(padding_lines)


def has_rows_of_padding(capture: Capture, width: int) -> bool:
    """Return whether some hidden states have more rows than tokens, and no multiple (padded to a multiple of 8).

    Args:
        width: last dim of the hidden states.
    """
    tokens = max(1, capture.sizes.tokens)
    for n in capture.nodes:
        val = n.meta.get("val")
        if isinstance(val, FakeTensor) and val.dim() >= 2 and val.shape[-1] == width and not n.meta.get("ragged"):
            rows = math.prod(val.shape[:-1])
            if rows > tokens and rows % tokens:
                return True
    return False
