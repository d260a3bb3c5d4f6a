"""A module of helpers that other modules' forwards call, with its own setting."""

SCALE = 1.0


def scaled(y):
    return y * SCALE
