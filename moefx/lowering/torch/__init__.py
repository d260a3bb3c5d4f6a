"""Providers on plain torch: segment GEMMs, and torch's grouped GEMM where it is fast."""

from . import rows, segments, grouped, mlp  # isort: skip  a later registration is asked first

__all__ = ["grouped", "mlp", "rows", "segments"]
