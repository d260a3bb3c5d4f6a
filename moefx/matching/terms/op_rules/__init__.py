"""What each ATen op means as a term: a function of a few lines for an op, found by its name in `RULES`."""

from . import contractions, elementwise, indexing, moves, reductions
from .rule_registry import RULES

__all__ = ["RULES", "contractions", "elementwise", "indexing", "moves", "reductions"]
