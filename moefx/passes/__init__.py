"""Passes: pure functions from the graph of a block to the next one. They build graphs of the dialect's ops."""

from ..ir.ops import dialect  # noqa: F401  registers the ops
