"""A step as events, against which the formulas are tested: nothing in it is an average.

The files, from below:
    routing_skew.py   experts that tokens choose, drawn from a skew; rows from rank to rank
    network.py        links that exchanges share, and how long these take
    schedule.py       the pipeline: what each stage does, and when
    exchanges.py      those of an expert group, drawn
    stage_work.py     what each stage has to do, by the formulas
    training.py       a step
"""

from .training import SimulatedStep, simulate

__all__ = ["SimulatedStep", "simulate"]
