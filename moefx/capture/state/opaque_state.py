"""Refuse blocks that use objects with hidden state, such as iterators and byte buffers, which guards cannot compare."""

from __future__ import annotations

import array
import io
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...errors import Refused
from ...ir.guards.attribute_reads import find_attributes
from ...ir.guards.code_closure import collect_code, trace_closure
from ...ir.guards.stored_values import is_configuration

_OPAQUE = (Iterator, array.array, bytearray, io.IOBase, memoryview)


def refuse_opaque_state(block: nn.Module) -> None:
    """Check that the code of a block names no attribute or global with hidden state.

    A guard cannot compare this state between calls, and a capture would change it.

    Raises:
        Refused: the code names one, such as `self.clock = itertools.count()`.
    """
    code = trace_closure(collect_code(block))
    named = {
        str(location): value for location, value in find_attributes(block).items() if location.attribute in code.names
    }
    for path, value in {**named, **{entry.name: entry.value for entry in code.globals}}.items():
        if _is_opaque(value):
            raise Refused(
                f"the block uses {path}, a {type(value).__qualname__}, whose state cannot be compared between calls",
                culprits=(path,),
                remedy="keep its state in a buffer, a number or a list",
            )


def _is_opaque(value: Any) -> bool:
    return isinstance(value, _OPAQUE) and not is_configuration(value)
