"""Interpret the arguments of a call: which axes are token axes, and which of these the model fixes.

One call is ambiguous. An axis of 8 may be the sequence, or the width of a condition; a table of positions fixes the
length of all sequences. A program fails at other sizes under a wrong interpretation, so callers try them in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .block_arguments import Arguments, Axis
from .size_collisions import ModelNumbers

MAX_INTERPRETATIONS = 12


def interpret_arguments(args: tuple, kwargs: dict[str, Any], numbers: ModelNumbers) -> Iterator[Arguments]:
    """Yield the interpretations, the most likely first.

    The feature axis is the last one, then the second one (images [B, C, H, W]). Later interpretations change one, two
    and more axes that equal a token dim. Then the model fixes some token dims, the last ones first.
    """
    first = Arguments(args, kwargs, numbers=numbers)
    yield first
    yield Arguments(args, kwargs, feature=1, numbers=numbers)
    alternatives = itertools.chain(_rename_axes(first, args, kwargs, ()), _fix_dims(first, args, kwargs))
    yield from itertools.islice(alternatives, MAX_INTERPRETATIONS)


def interpret_batch_of_one(first: Arguments, args: tuple, kwargs: dict[str, Any]) -> Arguments | None:
    """Interpret first axes of size 1 as the batch axis, as in a condition `[1, D]` beside `[1, S, D]`.

    Returns:
        None if there is no such axis. The more likely interpretation treats these axes as fixed, and broadcasts them.
    """
    if not first.unit_batch_axes:
        return None
    return Arguments(
        args, kwargs, numbers=first.numbers, names=dict.fromkeys(first.unit_batch_axes, first.token_dims[0])
    )


def _rename_axes(first: Arguments, args: tuple, kwargs: dict[str, Any], fixed: tuple[str, ...]) -> Iterator[Arguments]:
    changes = [(axis, name) for axis, names in first.axis_interpretations.items() for name in names[1:]]
    for count in range(1, len(first.axis_interpretations) + 1):
        for combination in itertools.combinations(changes, count):
            names: dict[Axis, int | str] = dict(combination)
            if len(names) == count:
                yield Arguments(args, kwargs, numbers=first.numbers, fixed=fixed, names=names)


def _fix_dims(first: Arguments, args: tuple, kwargs: dict[str, Any]) -> Iterator[Arguments]:
    for count in range(1, len(first.token_dims)):
        for fixed_dims in itertools.combinations(reversed(first.token_dims), count):
            yield Arguments(args, kwargs, numbers=first.numbers, fixed=fixed_dims)


__all__ = ["interpret_arguments", "interpret_batch_of_one"]
