"""A step as events, against which the formulas are tested: nothing in it is an average.

The files, from below:
    routing.py    experts that tokens choose, drawn from a skew; rows from rank to rank
    network.py    links that exchanges share, and how long these take
    schedule.py   the pipeline: what each stage does, and when
"""
