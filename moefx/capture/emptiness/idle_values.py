"""Abstract values of `idle_flow`: whether a name depends on which experts have no tokens, and how."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ..sizes.symbolic_sizes import Number

Env: TypeAlias = "dict[str, Value]"
# Whether a statement runs depends on no outcome, on the load of the current iteration's expert, or on outcomes.
FREE, BY_LOAD, BY_OUTCOME = 0, 1, 2

# Kinds of values; "" depends on no outcome.
TEST = "test"  # whether one expert has tokens
PLAIN = "plain"  # a number, string or flag computed from outcomes
BOX = "box"  # a container whose length or keys depend on outcomes
LOAD = "load"  # a test or a number computed from a load that Python compares, in the iteration of its expert only
TESTS, BOXES = "tests", "boxes"  # a container of fixed length with these
OPTION = "option"  # None or a tensor
KEYS = "keys"  # an access to a container at a routed key
TRUTH = "truth"  # an expression whose truth depends on outcomes, and whose value does not

# Types, as far as the syntax and the variables of a running function determine them.
CONSTANT, LIST, NONE, TENSOR, UNKNOWN = "constant", "list", "none", "tensor", "unknown"


class Value(NamedTuple):
    """An abstract value.

    Attributes:
        type: its type; for a container that depends on outcomes, the type of its items.
        stamp: ids of the statements that may have stored it.
        parts: the values of a tuple.
    """

    kind: str = ""
    type: str = UNKNOWN
    stamp: frozenset[int] = frozenset()
    parts: tuple[Any, ...] = ()

    def join(self, other: Value, tested: int, seen: str) -> Value:
        """Return the value after two branches.

        Args:
            tested: whether an outcome chooses the branch: `FREE`, `BY_LOAD` or `BY_OUTCOME`.
            seen: the type that the name had while the code ran.
        """
        if self == other:
            return self
        types_ = {self.type, other.type}
        type_ = next((t for t in (CONSTANT, LIST, TENSOR, UNKNOWN, NONE) if t in types_), UNKNOWN)
        kinds = {self.kind, other.kind} - {""}
        kind = min(kinds, key=(PLAIN, TEST, BOX, BOXES, TESTS, LOAD, OPTION).index) if kinds else ""
        if tested and not kind and self.stamp != other.stamp:
            if LIST in types_:
                kind = BOX
            elif types_ == {TENSOR, NONE} or (NONE in types_ and seen == TENSOR):
                kind = OPTION
            elif types_ != {TENSOR} and seen != TENSOR:
                kind = PLAIN if tested == BY_OUTCOME else LOAD
        parts = (
            tuple(a.join(b, tested, "") for a, b in zip(self.parts, other.parts, strict=True))
            if len(self.parts) == len(other.parts)
            else ()
        )
        return Value(kind, type_, self.stamp | other.stamp, parts)


def find_type(held: Any) -> str:
    if held is None:
        return NONE
    if isinstance(held, (Number, torch.Tensor, nn.Module)) or _holds_tensors(held):
        return TENSOR
    if isinstance(held, (bool, int, float, str)):
        return CONSTANT
    return LIST if isinstance(held, (list, dict, set)) else UNKNOWN


def _holds_tensors(held: Any) -> bool:
    """Return whether a value is a tuple of tensors, which `where` and `topk` return."""
    return isinstance(held, tuple) and bool(held) and all(find_type(v) == TENSOR for v in held)
