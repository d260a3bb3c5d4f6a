"""What each ATen op means as a term: a function of a few lines for an op, found by its name in `RULES`."""

from . import contracting, elementwise, indexing, moving, reducing
from .registry import RULES

__all__ = ["RULES", "contracting", "elementwise", "indexing", "moving", "reducing"]
