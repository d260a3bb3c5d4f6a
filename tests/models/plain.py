"""Plain cases. Importing the three modules fills the registry."""

from . import plain_loops, plain_side, plain_together  # noqa: F401
from .plain_suite import PLAIN

__all__ = ["PLAIN"]
