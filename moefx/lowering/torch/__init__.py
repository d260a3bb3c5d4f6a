"""Providers on plain torch: segment GEMMs (CPU, float64, old GPUs) and torch's grouped GEMM (16-bit on new GPUs)."""

from . import grouped, rows, segments

__all__ = ["grouped", "rows", "segments"]
