"""Providers on plain torch: segment GEMMs, and torch's grouped GEMM where it is fast."""

from . import row_ops, segments, grouped_mm, expert_mlp_algebra  # isort: skip  a later registration is asked first

__all__ = ["expert_mlp_algebra", "grouped_mm", "row_ops", "segments"]
