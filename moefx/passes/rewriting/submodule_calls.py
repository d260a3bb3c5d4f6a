"""Find submodule calls that stay calls, and unpack their results."""

from __future__ import annotations

import bisect
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from ...capture.tracing.capture_result import SubmoduleCall
from ...ir.passed_objects import is_passed
from ...matching.results.match_result import Match
from .aligned_nodes import AlignedNodes, list_leaf_nodes


def find_module_calls(match: Match, inlined: set[int]) -> list[list[SubmoduleCall]]:
    """Return the outermost submodule calls without absorbed nodes, one list of calls for all captures.

    Args:
        inlined: start indices of calls whose nodes are emitted one by one.
    """
    per_capture: list[dict[tuple[str, int], SubmoduleCall]] = []
    for form in match.forms:
        routed = sorted(n.meta["index"] for n in form.replaced_nodes if n.op != "get_attr")
        counts: dict[str, int] = {}
        calls_by_key: dict[tuple[str, int], SubmoduleCall] = {}
        for call in sorted(form.capture.calls, key=lambda c: (c.start, -c.stop, c.depth)):
            key = (call.fqn, counts.get(call.fqn, 0))
            counts[call.fqn] = key[1] + 1
            has_absorbed_node = bisect.bisect_left(routed, call.start) < bisect.bisect_left(routed, call.stop)
            if not has_absorbed_node and _is_expressible(call):
                calls_by_key[key] = call
        per_capture.append(calls_by_key)
    out: list[list[SubmoduleCall]] = []
    last_stop = -1
    for key, call in sorted(per_capture[0].items(), key=lambda item: (item[1].start, -item[1].stop, item[1].depth)):
        if call.start < last_stop or call.stop <= call.start or call.start in inlined:
            continue
        aligned = [calls_by_key.get(key) for calls_by_key in per_capture]
        if all(t is not None for t in aligned):
            out.append(aligned)  # type: ignore[arg-type]
            last_stop = call.stop
    return out


def _is_expressible(call: SubmoduleCall) -> bool:
    """Return whether a graph can hold the call: arguments and results are tensors and plain values in plain containers,
    and no argument is returned."""
    plain_types = (fx.Node, int, float, bool, str, type(None), torch.dtype)
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    results = list_leaf_nodes(call.out)
    return (
        all(is_passed(a) or isinstance(a, plain_types) for a in leaves)
        and bool(results)
        and all(type(k) in (int, str) for path, _ in list_leaf_paths(call.out) for k in path)
        and all(n.meta["index"] >= call.start for n in results)
    )


def is_within(item: Any, call: list[SubmoduleCall]) -> bool:
    return (
        isinstance(item, AlignedNodes)
        and item.first.op == "call_function"
        and call[0].start <= item.first.meta["index"] < call[0].stop
    )


def list_leaf_paths(tree: Any) -> list[tuple[tuple[Any, ...], fx.Node]]:
    """Return the path and the node of each leaf of nested containers."""
    if isinstance(tree, fx.Node):
        return [((), tree)]
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        return [((None,), n) for n in list_leaf_nodes(tree)]
    return [((key, *path), leaf) for key, value in items for path, leaf in list_leaf_paths(value)]


def get_at_path(tree: Any, path: tuple[Any, ...]) -> fx.Node:
    for key in path:
        tree = tree[key]
    return tree
