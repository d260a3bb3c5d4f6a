"""The values of `outcome_flow`: what a name tells of the experts that have no tokens."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from .symbolic_sizes import Number

Env: TypeAlias = "dict[str, Value]"
# What decides whether a statement runs: no outcome, the load of this turn's expert, or outcomes.
FREE, BY_LOAD, BY_OUTCOME = 0, 1, 2

# Kinds of values, of which "" depends on no outcome.
TEST = "test"  # tells of one expert whether it has tokens, or is one of several such questions
PLAIN = "plain"  # a number, string or flag that was made of outcomes
BOX = "box"  # a container whose length or keys depend on outcomes
LOAD = "load"  # a test or a number made of a load that Python compares, in the turn of this expert alone
TESTS, BOXES = "tests", "boxes"  # a container of a fixed length, of those
OPTION = "option"  # None, or a tensor
KEYS = "keys"  # of an access to a container, at a key that the routing says
TRUTH = "truth"  # of an expression whose truth tells of tokens, and whose value does not

# Types, as far as the syntax and the names of a running function tell.
CONSTANT, LIST, NONE, TENSOR, UNKNOWN = "constant", "list", "none", "tensor", "unknown"


class Value(NamedTuple):
    """`stamp`: the statements that may have stored it. `parts`: the values of a tuple. Of a container `type` is that of
    its items where it depends on outcomes."""

    kind: str = ""
    type: str = UNKNOWN
    stamp: frozenset[int] = frozenset()
    parts: tuple[Any, ...] = ()

    def joined(self, other: Value, tested: int, seen: str) -> Value:
        """The value where two ways meet. Args: `seen`: the type that the name was seen to have while the code ran."""
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
            tuple(a.joined(b, tested, "") for a, b in zip(self.parts, other.parts, strict=True))
            if len(self.parts) == len(other.parts)
            else ()
        )
        return Value(kind, type_, self.stamp | other.stamp, parts)


def type_of(held: Any) -> str:
    if held is None:
        return NONE
    if isinstance(held, (Number, torch.Tensor, nn.Module)) or _holds_tensors(held):
        return TENSOR
    if isinstance(held, (bool, int, float, str)):
        return CONSTANT
    return LIST if isinstance(held, (list, dict, set)) else UNKNOWN


def _holds_tensors(held: Any) -> bool:
    """Whether a value is a tuple of tensors, which `where` and `topk` return."""
    return isinstance(held, tuple) and bool(held) and all(type_of(v) == TENSOR for v in held)
