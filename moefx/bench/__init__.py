"""Benchmarks on a GPU: `python -m moefx bench`."""
