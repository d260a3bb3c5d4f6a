"""What a region and its weights are called: as the user's modules call them, else by the line and by role."""

from __future__ import annotations

import itertools
import re
import string
from typing import Any

from torch import fx, nn

from .graph_analysis import GraphAnalysis
from .node_queries import LAYOUT_OPS, is_module_tensor, target_name
from .region_bounds import RegionBounds


def weight_names(analysis: GraphAnalysis, bounds: RegionBounds, weights: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """Of the weights: as their modules have them, without what all have in common that are the region's own module's,
    so that equal regions have equal names where the model has weights for all of them; else by number."""
    full = [_full_name(analysis, n) for n in weights]
    parts = [name.split(".") for name in full]
    if all(full) and len(set(full)) == len(full) and all(_has_own_name(analysis, n) for n in weights):
        module = _innermost_module(analysis, bounds)
        own = [p for p in parts if p[: len(module)] == module] or parts
        common = _common_prefix([p[:-1] for p in own])
        short = [".".join(p[len(common) :] if p in own else p) for p in parts]
        prefixes = {s for name in short for s in _prefixes(name)}
        if (
            len(set(short)) == len(short)
            and not prefixes & set(short)
            and not any(hasattr(nn.Module, p) for s in short for p in s.split("."))
        ):
            return tuple(short)
    return _names_by_role(analysis, weights)


def _has_own_name(analysis: GraphAnalysis, n: fx.Node) -> bool:
    """Whether a weight has the name that its module gave it, rather than one that a tracer has counted."""
    return not str(n.target).startswith("_") if n.op == "get_attr" else is_module_tensor(analysis.source_name(n))


def _names_by_role(analysis: GraphAnalysis, weights: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """Weights that the same is done with are one list, in order: the experts of one that has no names."""
    families: dict[Any, list[fx.Node]] = {}
    for n in sorted(weights, key=lambda n: min(analysis.position[u] for u in analysis.users[n])):
        families.setdefault((tuple(analysis.weights[n].shape), tuple(_role(n, 2))), []).append(n)
    names = {}
    for i, family in enumerate(families.values()):
        name = f"weight_{_letters(i)}"  # numbers would make one list of them
        names.update({n: f"{name}.{j}" if len(family) > 1 else name for j, n in enumerate(family)})
    return tuple(names[n] for n in weights)


def _letters(i: int) -> str:
    return (_letters(i // 26 - 1) if i >= 26 else "") + string.ascii_lowercase[i % 26]


def _role(n: fx.Node, depth: int) -> list[Any]:
    """What is computed with a value: the next ops that do more than move it, and as which argument they have it."""
    found = []
    for u in n.users:
        if target_name(u) in LAYOUT_OPS:
            found += _role(u, depth)
        elif depth:
            at = next((i for i, a in enumerate(u.args) if a is n), -1)
            found.append((target_name(u), at, tuple(_role(u, depth - 1))))
    return sorted(set(found), key=repr)


def _full_name(analysis: GraphAnalysis, n: fx.Node) -> str:
    if n.op == "get_attr":
        return str(n.target)
    name = analysis.source_name(n)
    if not is_module_tensor(name):
        return re.sub(r"\W", "_", str(n.target))
    return ".".join(re.findall(r"\['?([^'\]]+)'?\]", name)[1:])


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def region_name(analysis: GraphAnalysis, bounds: RegionBounds) -> str:
    """The innermost module that all of the region was computed in; the line that selects, where the graph does not say
    or it is the whole model."""
    return ".".join(_innermost_module(analysis, bounds)) or re.sub(r"\W", "_", analysis.source_line(bounds.seed))


def _innermost_module(analysis: GraphAnalysis, bounds: RegionBounds) -> list[str]:
    """The path of the innermost module that all of the region was computed in; empty of the model."""
    paths = []
    has_lines = any(n.stack_trace for n in bounds.inside)
    for n in bounds.inside:
        stack = n.meta.get("nn_module_stack")
        # A line of the model itself has no modules above it.
        if n in analysis.active and (stack or n.stack_trace or not has_lines):
            path = str(next(reversed(stack.values()))[0]) if stack else ""
            paths.append(re.sub(r"\['?([^'\]]+)'?\]", r".\1", re.sub(r"^L\['\w+'\]", "", path)).strip(".").split("."))
    return [part for part in _common_prefix(paths) if part not in ("_modules", "")]


def _common_prefix(paths: list[list[str]]) -> list[str]:
    """The parts that all paths begin with."""
    every = list(zip(*paths, strict=False))
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, every)]
