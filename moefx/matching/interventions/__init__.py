"""Forced outcomes, for the probes that force them.

open_reads.py       reads of Python whose other outcomes no capture has shown
forced_outcome.py   force an outcome, and judge the capture: evidence, a guard, or a refusal
idle_branches.py    branches that skip an expert without tokens, shown by a capture of few tokens instead
"""
