"""Simulate a step as events, to test the formulas, which are averages.

The files, from below:
    routing_skew.py   experts that tokens choose, drawn from a skew; rows from rank to rank
    network.py        links that exchanges share, and how long these take
    schedule.py       the pipeline: what each stage does, and when
    exchanges.py      random exchanges of an expert group
    stage_work.py     work of each stage, by the formulas
    training.py       the simulation of a step
"""

from .training import SimulatedStep, simulate

__all__ = ["SimulatedStep", "simulate"]
