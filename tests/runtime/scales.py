"""Helpers with a setting, which forwards of other modules call."""

SCALE = 1.0


def scale(y):
    return y * SCALE
