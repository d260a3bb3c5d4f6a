"""Benchmarks on a GPU: `python -m moefx bench`."""

CEILING = "BMM ceiling"  # the peer that is an upper bound, not a solution
