"""Name regions and their weights: after the user's modules, else after the line and the role."""

from __future__ import annotations

import itertools
import re
import string
from typing import Any

from torch import fx, nn

from ...ir.node_values import get_op_name
from .graph_analysis import GraphAnalysis
from .node_queries import LAYOUT_OPS, is_module_tensor
from .region_bounds import RegionBounds


def name_weights(analysis: GraphAnalysis, bounds: RegionBounds, weights: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """Name the weights as their modules do, without the prefix of the region's own module, so that equal regions have
    equal names. If the graph does not name all weights, number them by role.
    """
    full = [_find_full_name(analysis, n) for n in weights]
    parts = [name.split(".") for name in full]
    if all(full) and len(set(full)) == len(full) and all(_has_own_name(analysis, n) for n in weights):
        module = _find_innermost_module(analysis, bounds)
        inside = [p for p in parts if p[: len(module)] == module] or parts
        common = _find_common_prefix([p[:-1] for p in inside])
        short = [".".join(p[len(common) :] if p in inside else p) for p in parts]
        prefixes = {s for name in short for s in _list_prefixes(name)}
        if (
            len(set(short)) == len(short)
            and not prefixes & set(short)
            and not any(hasattr(nn.Module, p) for s in short for p in s.split("."))
        ):
            return tuple(short)
    return _name_by_role(analysis, weights)


def _has_own_name(analysis: GraphAnalysis, n: fx.Node) -> bool:
    """Return whether a module has named the weight, not a tracer's counter."""
    return not str(n.target).startswith("_") if n.op == "get_attr" else is_module_tensor(analysis.find_source_name(n))


def _name_by_role(analysis: GraphAnalysis, weights: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """Name weights by role: weights with the same uses form one list, in order, like unnamed experts."""
    families: dict[Any, list[fx.Node]] = {}
    for n in sorted(weights, key=lambda n: min(analysis.position[u] for u in analysis.users[n])):
        families.setdefault((tuple(analysis.weights[n].shape), tuple(_describe_role(n, 2))), []).append(n)
    names = {}
    for i, family in enumerate(families.values()):
        name = f"weight_{_format_letters(i)}"  # numbers would make one list of them
        names.update({n: f"{name}.{j}" if len(family) > 1 else name for j, n in enumerate(family)})
    return tuple(names[n] for n in weights)


def _format_letters(i: int) -> str:
    """Return the i-th name of a, b, ..., z, aa, ab, ..."""
    return (_format_letters(i // 26 - 1) if i >= 26 else "") + string.ascii_lowercase[i % 26]


def _describe_role(n: fx.Node, depth: int) -> list[Any]:
    """Return the next ops, apart from changes of layout, that use a value, with the argument position of the value."""
    uses = []
    for u in n.users:
        if get_op_name(u) in LAYOUT_OPS:
            uses += _describe_role(u, depth)
        elif depth:
            at = next((i for i, a in enumerate(u.args) if a is n), -1)
            uses.append((get_op_name(u), at, tuple(_describe_role(u, depth - 1))))
    return sorted(set(uses), key=repr)


def _find_full_name(analysis: GraphAnalysis, n: fx.Node) -> str:
    """Return the full name of a weight in the graph's modules."""
    if n.op == "get_attr":
        return str(n.target)
    name = analysis.find_source_name(n)
    if not is_module_tensor(name):
        return re.sub(r"\W", "_", str(n.target))
    return ".".join(re.findall(r"\['?([^'\]]+)'?\]", name)[1:])


def _list_prefixes(name: str) -> list[str]:
    """Return the names of all modules that contain a weight."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def name_region(analysis: GraphAnalysis, bounds: RegionBounds) -> str:
    """Return the path of the innermost module that contains the whole region; the line that selects, if the graph has
    no modules or that module is the model.
    """
    return ".".join(_find_innermost_module(analysis, bounds)) or re.sub(
        r"\W", "_", analysis.find_source_line(bounds.selection)
    )


def _find_innermost_module(analysis: GraphAnalysis, bounds: RegionBounds) -> list[str]:
    """Return the path of the innermost module that contains the whole region; empty for the model."""
    paths = []
    has_lines = any(n.stack_trace for n in bounds.inside)
    for n in bounds.inside:
        stack = n.meta.get("nn_module_stack")
        # A line of the model itself has no modules above it.
        if n in analysis.active and (stack or n.stack_trace or not has_lines):
            path = str(next(reversed(stack.values()))[0]) if stack else ""
            paths.append(re.sub(r"\['?([^'\]]+)'?\]", r".\1", re.sub(r"^L\['\w+'\]", "", path)).strip(".").split("."))
    return [part for part in _find_common_prefix(paths) if part not in ("_modules", "")]


def _find_common_prefix(paths: list[list[str]]) -> list[str]:
    """Return the parts that all paths begin with."""
    columns = list(zip(*paths, strict=False))
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
