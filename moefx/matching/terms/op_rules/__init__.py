"""Rules that translate ATen ops to terms: a short function per op, found by its name in `RULES`."""

from . import axis_reductions, contractions, indexing, moves, pointwise_ops
from .rule_registry import RULES

__all__ = ["RULES", "axis_reductions", "contractions", "indexing", "moves", "pointwise_ops"]
