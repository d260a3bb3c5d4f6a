"""Sizes at which views fit: `x.view(-1, 8, D)` needs a multiple of 8 tokens.

`ViewSizes` notes these conditions as guards of a capture, and refuses the sizes that do not meet them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import Refused
from ..environment.code_locations import find_user_source
from .size_guards import SizeLog, evaluate_size
from .symbolic_sizes import Number, Size, peek_value

MAX_ROWS_PER_TOKEN = 16  # a multiple of all tokens up to this may be a size
_PRIMES = ((31, 37, 41, 43, 47), (53, 29, 59, 61, 67), (71, 73, 23, 79, 83))


class ViewSizes:
    """The views of one capture."""

    def __init__(self, sizes: SizeLog):
        self.sizes = sizes
        self._fits: dict[tuple[str, bool], bool] = {}  # cache of `_fits_all_sizes`

    def check(self, axes: Sequence[Any], shape: Sequence[Any]) -> None:
        """Note the sizes at which a tensor with the axes `axes` can be viewed as `shape`.

        Raises:
            Refused: the view does not fit the sizes of this capture. The log has the comparison, so that the next
                capture chooses others.
        """
        given_sizes = [n for n in shape if isinstance(n, Size) or n != -1]
        symbolic = [n for n in (*axes, *given_sizes) if isinstance(n, Number)]
        if not any(isinstance(n, Size) for n in axes) or any(not isinstance(n.expr, str) for n in symbolic):
            return
        tokens: Any = functools.reduce(lambda a, b: a * b, [n for n in axes if isinstance(n, Size)])
        step: Any = math.prod(given_sizes)
        width = math.prod(n for n in axes if type(n) is int)
        is_whole = len(given_sizes) == len(shape)
        if not is_whole and peek_value(step) == 0:
            return  # torch raises its own error: it cannot infer an axis beside one of 0
        if is_whole:
            right = step.expr if isinstance(step, Number) else str(step)
            left, is_met = f"{tokens.expr}*{width}", tokens.value * width == peek_value(step)
        elif type(step) is int:
            step //= math.gcd(step, width)
            left, right, is_met = f"{tokens.expr}%{step}", "0", step < 2 or tokens.value % step == 0
        else:
            left, right, is_met = f"({tokens.expr}*{width})%({step.expr})", "0", tokens.value * width % step.value == 0
        if self._fits_all_sizes(axes, given_sizes, is_whole):
            return
        self.sizes.log_comparison(left, "eq", right, is_met)
        if not is_met:
            source = find_user_source()
            expected = f"a multiple of {step}" if type(step) is int and not is_whole else "one that fits"
            raise Refused(
                f"the number of tokens has to be {expected} here: {source.text}",
                source=str(source),
                remedy="pass example_inputs of several such sizes, or pad the tokens outside of the block",
            )

    def _fits_all_sizes(self, axes: Iterable[Any], shape: Iterable[Any], is_whole: bool) -> bool:
        """Return whether a view fits at all sizes under some interpretation of its numbers.

        In a small capture a size may equal a number of the program, such as the slots of a token. Captures in which
        each number has one interpretation find views that fit some sizes only.

        Args:
            axes: the axes of the tensor.
            shape: the axes of the view.
            is_whole: whether the view leaves no axis to torch (-1).
        """
        sizes = self.sizes
        names = [_list_names(n, sizes.tokens, sizes.tokens_text) for n in (*axes, "/", *shape)]
        key = str(names), is_whole
        if key not in self._fits:
            conditions = (_make_condition(combination, is_whole) for combination in itertools.product(*names))
            self._fits[key] = any(_is_identity(left, right, sizes.dims) for left, right in conditions)
        return self._fits[key]


def _list_names(n: Any, tokens: int, tokens_text: str) -> list[str]:
    """Return the expressions that a number in a shape may stand for."""
    if isinstance(n, Number):
        return [n.expr, str(n.value)] if n.value <= MAX_ROWS_PER_TOKEN else [n.expr]
    if isinstance(n, int) and n and tokens and n % tokens == 0 and n // tokens <= MAX_ROWS_PER_TOKEN:
        return [str(n), f"{n // tokens}*{tokens_text}"]
    return [str(n)]


def _make_condition(names: tuple[str, ...], is_whole: bool) -> tuple[str, str]:
    """Return two expressions that are equal if a view fits.

    Args:
        names: expressions of the tensor's axes, "/", and expressions of the view's axes.
    """
    at = names.index("/")
    from_axes, to_axes = "*".join(names[:at]) or "1", "*".join(names[at + 1 :]) or "1"
    return (from_axes, to_axes) if is_whole else (f"({from_axes})%({to_axes})", "0")


def _is_identity(left: str, right: str, dims: Iterable[str]) -> bool:
    """Return whether two expressions are equal at all sizes, tested at sizes without common factors."""
    samples = [dict(zip(dims, primes, strict=False)) for primes in _PRIMES]
    try:
        return all(evaluate_size(left, one) == evaluate_size(right, one) for one in samples)
    except (ArithmeticError, NameError):
        return False
