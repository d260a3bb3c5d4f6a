"""Abstract values of `idle_flow`: whether a name depends on which experts have no tokens, and how."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ..sizes.symbolic_sizes import Number

Env: TypeAlias = "dict[str, Value]"


class DecidedBy(enum.IntEnum):
    """What decides whether a statement runs. Among nested tests the largest counts."""

    NOTHING = 0  # no outcome
    LOAD = 1  # the load of the current iteration's expert
    OUTCOMES = 2  # which experts have tokens


class Kind(enum.Enum):
    """How a value depends on outcomes: on which experts have tokens. Only `INDEPENDENT` is false."""

    INDEPENDENT = enum.auto()  # it does not
    OUTCOME = enum.auto()  # whether one expert has tokens
    COMPUTED = enum.auto()  # a number, string or flag computed from outcomes
    LOAD = enum.auto()  # a test or a number computed from a load that Python compares, in its expert's iteration only
    CONTAINER = enum.auto()  # a container whose length or keys depend on outcomes
    OUTCOME_LIST = enum.auto()  # a container of fixed length with items of `OUTCOME`
    CONTAINER_LIST = enum.auto()  # a container of fixed length with items of `CONTAINER`
    OPTIONAL_TENSOR = enum.auto()  # None or a tensor
    ROUTED_KEY = enum.auto()  # an access to a container at a routed key
    TRUTH = enum.auto()  # an expression whose truth depends on outcomes, and whose value does not

    def __bool__(self) -> bool:
        return self is not Kind.INDEPENDENT

    @property
    def is_number(self) -> bool:
        """Whether this is a plain number, string or flag that tells outcomes to later iterations, too."""
        return self in (Kind.OUTCOME, Kind.COMPUTED)

    @property
    def is_container(self) -> bool:
        return self in (Kind.CONTAINER, Kind.OUTCOME_LIST, Kind.CONTAINER_LIST)

    @property
    def item(self) -> Kind:
        """The kind of an item of a container that is known to have it."""
        return {Kind.OUTCOME_LIST: Kind.OUTCOME, Kind.CONTAINER_LIST: Kind.CONTAINER}.get(self, Kind.INDEPENDENT)


class Type(enum.Enum):
    """The type of a value, as far as the syntax and the variables of a running function determine it."""

    CONSTANT = enum.auto()  # a plain number, string or flag
    LIST = enum.auto()  # a list, dictionary or set
    NONE = enum.auto()  # None
    TENSOR = enum.auto()  # a tensor, a module, or a symbolic or routed number
    UNKNOWN = enum.auto()


# Among the kinds of several branches, the first here counts.
_STRONGEST = (
    Kind.COMPUTED,
    Kind.OUTCOME,
    Kind.CONTAINER,
    Kind.CONTAINER_LIST,
    Kind.OUTCOME_LIST,
    Kind.LOAD,
    Kind.OPTIONAL_TENSOR,
)


class Value(NamedTuple):
    """An abstract value.

    Attributes:
        type: its type; for a container that depends on outcomes, the type of its items.
        stamp: ids of the statements that may have stored it.
        parts: the values of a tuple.
    """

    kind: Kind = Kind.INDEPENDENT
    type: Type = Type.UNKNOWN
    stamp: frozenset[int] = frozenset()
    parts: tuple[Any, ...] = ()

    def join(self, other: Value, decided_by: DecidedBy, seen: Type = Type.UNKNOWN) -> Value:
        """Return the value after two branches.

        Args:
            decided_by: what decides which branch runs.
            seen: the type that the name had while the code ran.
        """
        if self == other:
            return self
        types_ = {self.type, other.type}
        type_ = next(t for t in (Type.CONSTANT, Type.LIST, Type.TENSOR, Type.UNKNOWN, Type.NONE) if t in types_)
        kinds = {self.kind, other.kind} - {Kind.INDEPENDENT}
        kind = min(kinds, key=_STRONGEST.index) if kinds else Kind.INDEPENDENT
        if decided_by and not kind and self.stamp != other.stamp:
            if Type.LIST in types_:
                kind = Kind.CONTAINER
            elif types_ == {Type.TENSOR, Type.NONE} or (Type.NONE in types_ and seen is Type.TENSOR):
                kind = Kind.OPTIONAL_TENSOR
            elif types_ != {Type.TENSOR} and seen is not Type.TENSOR:
                kind = Kind.COMPUTED if decided_by is DecidedBy.OUTCOMES else Kind.LOAD
        parts = (
            tuple(a.join(b, decided_by) for a, b in zip(self.parts, other.parts, strict=True))
            if len(self.parts) == len(other.parts)
            else ()
        )
        return Value(kind, type_, self.stamp | other.stamp, parts)


def find_type(value: Any) -> Type:
    if value is None:
        return Type.NONE
    if isinstance(value, (Number, torch.Tensor, nn.Module)) or _holds_tensors(value):
        return Type.TENSOR
    if isinstance(value, (bool, int, float, str)):
        return Type.CONSTANT
    return Type.LIST if isinstance(value, (list, dict, set)) else Type.UNKNOWN


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is a tuple of tensors, which `where` and `topk` return."""
    return isinstance(value, tuple) and bool(value) and all(find_type(v) is Type.TENSOR for v in value)
