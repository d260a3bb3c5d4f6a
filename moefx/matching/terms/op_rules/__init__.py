"""Rules that translate ATen ops to terms: a short function per op, found by its name in `RULES`."""

from . import contractions, elementwise, indexing, moves, reductions
from .rule_registry import RULES

__all__ = ["RULES", "contractions", "elementwise", "indexing", "moves", "reductions"]
