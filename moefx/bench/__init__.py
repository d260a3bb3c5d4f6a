"""Benchmarks on a GPU: `python -m moefx bench`."""

CEILING = "BMM ceiling"  # the peer that is no answer but a bound
