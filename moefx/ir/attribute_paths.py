"""Attribute paths as Python expressions that Dynamo can trace, and as ranges: `experts[0..255].up.weight`."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class AttributeRange:
    """Attribute paths that differ in one number, which counts up by one.

    Attributes:
        before: the path before the number, such as `"experts."` or `"expert_"`.
        after: the path after it, such as `".up.weight"`.
        start, stop: the numbers, half open.
    """

    before: str
    after: str
    start: int
    stop: int

    def __str__(self) -> str:
        numbers = f"[{self.start}..{self.stop - 1}]"
        return f"{self.before.removesuffix('.')}{numbers}{self.after}"

    def expression(self, root: str, reader: str) -> str:
        """Return the text of a call of `read_range` (under the name `reader`) that lists the attributes in order."""
        owner, _, stem = self.before.rpartition(".")
        owner_expression = attribute_expression(root, owner)
        return f"{reader}({owner_expression}, {quote(stem)}, {self.start}, {self.stop}, {quote(self.after)})"


def read_range(owner: nn.Module, stem: str, start: int, stop: int, after: str) -> list[Any]:
    """Read the attributes `owner.<stem><i><after>` for i in [start, stop): `(experts, "", 0, 64, ".weight")`.

    `nn.Module.__getattr__` takes 0.3 us, so with 256 experts it would take longer than a small GEMM. Modules and
    parameters are read from torch's dictionaries instead. If one is missing there (a wrapper made the parameter a plain
    attribute), and while Dynamo traces, all are read with `getattr`.
    """
    if not torch.compiler.is_compiling():
        tail, *path = after.split(".")
        try:
            return _read_registries(owner, _format_numbered_names(stem, start, stop, tail), path)
        except KeyError:
            pass
    return [_read(owner, f"{stem}{i}{after}") for i in range(start, stop)]


def attribute_expression(root: str, path: str) -> str:
    """Build an expression: `("self", "experts.0.w")` -> `getattr(self.experts, "0").w`.

    `getattr` works for every container (ModuleList, ModuleDict, ParameterList), and it returns the current attribute
    after FSDP or `load_state_dict(assign=True)` replaced it.
    """
    text = root
    for part in path.split(".") if path else ():
        text = f"{text}.{part}" if is_plain_name(part) else f"getattr({text}, {quote(part)})"
    return text


def is_plain_name(name: str) -> bool:
    """Return whether a name is an identifier and no keyword."""
    return name.isidentifier() and not keyword.iskeyword(name)


def quote(name: str) -> str:
    """Return a string literal, in double quotes unless the name needs escapes."""
    literal = repr(name)
    return f'"{name}"' if literal == f"'{name}'" and '"' not in name else literal


def find_range(paths: Sequence[str]) -> AttributeRange | None:
    """Return the range that two or more paths form, in this order, or None."""
    runs = split_into_ranges(paths)
    return runs[0] if len(runs) == 1 and isinstance(runs[0], AttributeRange) else None


def split_into_ranges(paths: Sequence[str]) -> list[AttributeRange | str]:
    """Split a list of paths into ranges and single paths, in order: `a.0, a.1, b` -> `a[0..1], b`."""
    result: list[AttributeRange | str] = []
    at = 0
    while at < len(paths):
        run = _find_counter(paths[at], paths[at + 1]) if at + 1 < len(paths) else None
        if run is None:
            result.append(paths[at])
            at += 1
            continue
        before, after, start = run
        stop = at + 2
        while stop < len(paths) and paths[stop] == f"{before}{start + stop - at}{after}":
            stop += 1
        result.append(AttributeRange(before, after, start, start + stop - at))
        at = stop
    return result


def _find_counter(path: str, next_path: str) -> tuple[str, str, int] | None:
    """Find the only number that grows by one from `path` to `next_path`. Return the text before and after it, and its
    value in `path`."""
    parts, next_parts = re.split(r"(\d+)", path), re.split(r"(\d+)", next_path)
    if len(parts) != len(next_parts):
        return None
    differ = [i for i, (a, b) in enumerate(zip(parts, next_parts, strict=True)) if a != b]
    # Numbers are at odd positions; "007" is none.
    if len(differ) != 1 or differ[0] % 2 == 0:
        return None
    at = differ[0]
    start = int(parts[at])
    if parts[at] != str(start) or next_parts[at] != str(start + 1):
        return None
    return "".join(parts[:at]), "".join(parts[at + 1 :]), start


def _read_registries(owner: nn.Module, names: tuple[str, ...], path: list[str]) -> list[Any]:
    if not path:
        return [owner._parameters[name] for name in names]
    modules = [owner._modules[name] for name in names]
    for part in path[:-1]:
        modules = [module._modules[part] for module in modules]  # type: ignore[union-attr]
    return [module._parameters[path[-1]] for module in modules]  # type: ignore[union-attr]


@functools.lru_cache(maxsize=1024)
def _format_numbered_names(stem: str, start: int, stop: int, tail: str) -> tuple[str, ...]:
    return tuple(f"{stem}{i}{tail}" for i in range(start, stop))


def _read(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner
