"""Find the comparison whose result Python reads: of Python's own, `len(rows) > 8`, or of an op, `counts.max() > 8`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import fx

from ...capture.tracing.capture_result import HostRead
from ...ir.node_values import get_op_name
from .graph_nodes import depends_on_routing, skip_moves
from .op_classes import TWO_SIDED


class HostComparison(NamedTuple):
    """A comparison whose result Python reads.

    Attributes:
        op: its name, such as "gt".
        other: the right operand: a number, or the node of a tensor.
        node: the op that compares; None if Python compares a number that it has read.
    """

    op: str
    other: Any
    node: fx.Node | None

    @property
    def depends_on_routing(self) -> bool:
        """Whether another routing may change the result. Python compares only such numbers."""
        return self.node is None or depends_on_routing(self.node)


def find_comparison(read: HostRead, reductions: Collection[str] = ()) -> HostComparison | None:
    """Return the comparison whose result Python reads, or None if it reads anything else.

    Args:
        reductions: ops that the boolean may go through after the comparison, such as "any".
    """
    if read.comparison is not None:
        return HostComparison(*read.comparison, None)
    node = None if read.node is None else skip_moves(read.node, reductions)
    if node is None or get_op_name(node) not in TWO_SIDED:
        return None
    return HostComparison(get_op_name(node), node.args[1], node)
