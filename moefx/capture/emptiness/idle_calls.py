"""Which calls keep nothing, fill a container or return plain numbers, by their names: see `idle_expressions`."""

from __future__ import annotations

import sys
from typing import Any

CONTAINERS = {
    "list", "tuple", "sorted", "set", "frozenset", "enumerate", "zip", "reversed", "iter", "dict", "deque", "map",
    "filter", "chain", "islice", "Counter", "defaultdict", "OrderedDict", "takewhile", "dropwhile", "accumulate",
    "pairwise", "product",
}  # fmt: skip
FILLS = {"append", "add", "insert", "appendleft", "extend", "update", "setdefault", "extendleft", "__setitem__"}
EMPTIES = {"pop", "popleft", "popitem", "remove", "discard", "clear"}
LOGS = {"debug", "info", "warning", "error", "log", "warn", "critical", "exception"}
OF_ANY_ITEM = {"dtype", "device", "shape", "size", "dim", "ndim", "new_zeros", "new_empty", "new_full", "new_ones"}
OPERATOR_NAMES = {"Eq": "eq", "NotEq": "ne", "Gt": "gt", "LtE": "le", "GtE": "ge", "Lt": "lt"}
READS = {"copy", "count", "get", "index", "items", "keys", "reverse", "sort", "values"}
PURE_MODULES = ("math", "operator", "_operator", "einops", "copy")
PLAIN_CALLS = {
    "len", "int", "float", "bool", "str", "abs", "round", "any", "all", "min", "max", "sum", "repr", "hash", "ord",
    "chr", "isinstance", "hasattr", "divmod", "pow", "next", "range", "format", "bin",
}  # fmt: skip
PURE = PLAIN_CALLS - {"next"} | {"type", "slice", "getattr", "super", "complex", "callable", "id"}
OF_NUMBERS = {"min", "max", "abs", "sum", "round", "divmod", "pow", "int", "len"}  # results may be symbolic


def belongs_to_torch(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("torch", "torchvision")


def is_terminal(held: Any) -> bool:
    return any(held is stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


def is_pure(function: Any) -> bool:
    """Return whether a function keeps nothing. A constructor counts, as its object is dropped unless it is stored."""
    module = (getattr(function, "__module__", None) or "").split(".")[0]
    return isinstance(function, type) or module in PURE_MODULES
