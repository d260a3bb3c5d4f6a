"""Find sizes of captures at which given size guards hold, such as multiples of 14, or one token per sequence.

`Arguments.choose_sizes` avoids round numbers, so it never finds these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from ...capture.arguments.block_arguments import COST_OF_DOUBLE_TOKENS, Arguments
from ...capture.sizes.size_guards import SizeGuard

MAX_TOKENS = 600
_MIN_TOKENS = 8
_MIN_SIZES = 3
_SHORT = (1, 2, 3, 4, 5, 7)
_NEAR = 64  # most tokens beyond the requested number


def find_sizes(arguments: Arguments, guards: Sequence[SizeGuard], tokens: int) -> list[dict[str, int]]:
    """Find sizes at which all guards hold, those of about `tokens` tokens first.

    The first three differ in each axis that a guard such as `S == 1` does not fix. The list is empty without three:
    numbers that depend on the sizes would look like constants. It is also empty if a guard excludes all tokens.
    """
    fixed = _find_fixed_axes(arguments, guards)
    if 0 in fixed.values():
        return []
    free = [dim for dim in arguments.dims if dim not in fixed]
    fitting = {tuple(s.values()): s for s in _list_sizes(arguments, free, fixed) if _all_hold(guards, s)}
    sorted_sizes = sorted(fitting.values(), key=_make_cost(arguments, tokens))
    chosen: list[dict[str, int]] = []
    for sizes in sorted_sizes:
        if len(chosen) < _MIN_SIZES and all(sizes[d] != other[d] for other in chosen for d in free):
            chosen.append(sizes)
    if len(chosen) < _MIN_SIZES or not free:
        return []
    return [*chosen, *(sizes for sizes in sorted_sizes if sizes not in chosen)]


def find_sequence(arguments: Arguments, guards: Sequence[SizeGuard], tokens: int) -> dict[str, int]:
    """Find sizes with `tokens` tokens, or a few more, at which all guards hold, with as few sequences as possible.

    If no sizes fit, return one sequence of `tokens` tokens.
    """
    single_sequence = arguments.choose_sequence(tokens)
    if _all_hold(guards, single_sequence):
        return single_sequence
    fixed = _find_fixed_axes(arguments, guards)
    if 0 in fixed.values():
        return single_sequence
    free = [dim for dim in reversed(arguments.dims) if dim not in fixed]
    fewest = 0, single_sequence
    for long in free:  # the last axis first
        others = [dim for dim in free if dim != long]
        for short in sorted(itertools.product(_SHORT, repeat=len(others)), key=math.prod):
            known = fixed | dict(zip(others, short, strict=True))
            tokens_per_index = arguments.tokens_per_unit * math.prod(known.values())
            least = max(1, -(-tokens // tokens_per_index))
            for n in range(least, least + _NEAR // tokens_per_index + 1):
                sizes = {dim: known.get(dim, n) for dim in arguments.dims}
                if not _all_hold(guards, sizes):
                    continue
                if n * tokens_per_index <= tokens + tokens // 8:
                    return sizes
                fewest = min(fewest, (n * tokens_per_index, sizes), key=lambda candidate: candidate[0] or math.inf)
                break
    return fewest[1]


def _find_fixed_axes(arguments: Arguments, guards: Sequence[SizeGuard]) -> dict[str, int]:
    """Return the axes that a guard such as `S == 1` fixes."""
    return {
        g.left: int(g.right)
        for g in guards
        if g.left in arguments.dims and g.right.isdigit() and (g.op, g.value) in (("eq", True), ("ne", False))
    }


def _list_sizes(arguments: Arguments, free: list[str], fixed: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes with one long free axis and short others."""
    most = MAX_TOKENS // arguments.tokens_per_unit
    for long in free:
        others = [dim for dim in free if dim != long]
        for short in itertools.product(_SHORT, repeat=len(others)):
            known = fixed | dict(zip(others, short, strict=True))
            units_per_index = math.prod(known.values())
            for n in range(-(-_MIN_TOKENS // units_per_index), most // units_per_index + 1):
                yield {dim: known.get(dim, n) for dim in arguments.dims}


def _all_hold(guards: Sequence[SizeGuard], sizes: dict[str, int]) -> bool:
    try:
        return all(g.holds(sizes) for g in guards)
    except ArithmeticError:
        return False


def _make_cost(arguments: Arguments, tokens: int) -> Callable[[dict[str, int]], int]:
    def cost(sizes: dict[str, int]) -> int:
        distance = abs(arguments.tokens_per_unit * math.prod(sizes.values()) - tokens)
        return arguments.numbers.cost(sizes, arguments.tokens_per_unit) + COST_OF_DOUBLE_TOKENS * distance // tokens

    return cost


__all__ = ["find_sequence", "find_sizes"]
