"""Providers on plain torch: segment GEMMs, and torch's grouped GEMM where it is fast."""

from . import grouped, mlp, rows, segments

__all__ = ["grouped", "mlp", "rows", "segments"]
