"""Options of a lift: each set of them is one interpretation of a program."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..facts.graph_nodes import Line

CutPreference = Literal["first", "last_write", "last_node"]


@dataclasses.dataclass(frozen=True)
class LiftOptions:
    """One interpretation of a program.

    Attributes:
        keeps_comparisons: comparisons of floats stay part of activations, see `Semantics`.
        opaque_lines: lines whose nodes stay opaque, see `Semantics`.
        cut_preference: which complete sum is the routed sum. "last_write" prefers the last write, "last_node" the last
            node, on any line: rows of tokens without an expert may be written after the experts.
        weights_per_slot: read no weight from a node with one value per token and expert.
        align_to_last: read each value from the last node that fits, regardless of the hint; by default from the first.
    """

    keeps_comparisons: bool = False
    opaque_lines: frozenset[Line] = frozenset()
    cut_preference: CutPreference = "first"
    weights_per_slot: bool = False
    align_to_last: bool = False


__all__ = ["CutPreference", "LiftOptions"]
