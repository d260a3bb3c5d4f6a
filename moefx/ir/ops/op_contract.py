"""`Contract`: the shapes of an op's tensors, in one line with named letters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class Contract:
    """The shapes of an op's tensors in named letters. A letter has the same size everywhere; `_` is any size.

    `name[*]` is a list of tensors. An argument with `?` may be None, and a result with `?` may be empty. A result may
    end with `...`, any further axes. `Op` checks arguments at each call, and `tests/op_contracts.py` checks results.

    Attributes:
        inputs: argument name -> letters, without arguments that are lists of tensors.
        outputs: result name -> letters.
    """

    text: str
    inputs: dict[str, tuple[str, ...]]
    outputs: dict[str, tuple[str, ...]]

    @classmethod
    def parse(cls, text: str) -> Contract:
        def side(part: str) -> dict[str, tuple[str, ...]]:
            tensors = re.findall(r"(\w+)\[([^\]*]+)\]", part)  # lists of tensors are written name[*]
            return {name: tuple(dims.split(",")) for name, dims in tensors}

        before, _, after = text.partition("->")
        return cls(text, side(before), side(after))


def format_shape(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def check_equal(other: Any, size: Any, op: str, name: str, shape: Any, dims: Sequence[str], letter: str) -> None:
    """Check that a letter has one size.

    Raises:
        InvalidInput: it has two. Symbolic sizes raise torch's error when they are known.
    """

    def message() -> str:
        return f"{op}: {name} has shape {format_shape(shape)} for [{','.join(dims)}], but {letter} is {other} elsewhere"

    if isinstance(other, int) and isinstance(size, int):
        if other != size:
            raise InvalidInput(message())
    else:
        torch._check(other == size, message)
