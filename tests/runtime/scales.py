"""A module of helpers that other modules' forwards call, with a setting of its own."""

SCALE = 1.0


def scaled(y):
    return y * SCALE
