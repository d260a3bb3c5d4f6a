"""Providers in plain torch: segment GEMMs, and torch's grouped GEMM on GPUs that have a fast one."""

from . import row_ops, segments, grouped_mm, expert_mlp_algebra  # isort: skip  a later registration is asked first

__all__ = ["expert_mlp_algebra", "grouped_mm", "row_ops", "segments"]
