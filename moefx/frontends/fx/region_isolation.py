"""Check that a region can be taken out of its graph: its writes, shared memory, random numbers, and results."""

from __future__ import annotations

import re

import torch
from torch import fx

from ...errors import Refused
from ...ir.node_values import get_op_name
from .graph_analysis import GraphAnalysis
from .region_bounds import RegionBounds


def check_isolation(analysis: GraphAnalysis, bounds: RegionBounds) -> None:
    """Check that a call can replace the region.

    Raises:
        Refused: the region, or a node beside it, has effects that the replacement would reorder or lose.
    """
    inside = set(bounds.inside)
    last = max(analysis.position[n] for n in bounds.inside)
    first = min(analysis.position[n] for n in bounds.inside if n in analysis.active)
    earlier_storages = {
        s for n in (bounds.entry, *bounds.side_inputs, *analysis.weights) for s in analysis.find_storages(n)
    }
    for n in bounds.inside:
        line = analysis.find_source_line(n)
        if n.op not in ("call_function", "call_method"):
            _refuse_call(n, line)
        if earlier_storages & analysis.find_written_memory(n):
            raise Refused("the region writes to a tensor that existed before it", source=line, remedy="write to a copy")
    for n in (*analysis.nodes[first:last], *bounds.inside):
        if n in analysis.transforms:
            raise Refused(
                f"the region, or a part of it, is inside {analysis.transforms[n][-1]}, which is not supported in "
                "graphs",
                source=analysis.find_source_line(n),
                remedy="moefx.compile(model) supports it if one module contains all of it",
            )
    for n in bounds.side_inputs:
        if analysis.tensor(n) is None:
            raise Refused(
                f"the region reads {n.name}, which is not a tensor",
                culprits=(n.name,),
                source=analysis.find_source_line(n),
                remedy="pass it as a tensor",
            )
    begin = min(analysis.position[n] for n in bounds.inside)
    other_nodes = [n for n in analysis.nodes[begin:last] if n not in inside]
    if any(analysis.effects[n].draws for n in bounds.inside):
        for n in other_nodes:
            if analysis.effects[n].draws or analysis.effects[n].unknown:
                raise Refused(
                    "random numbers are drawn inside the region and beside it: their order would change",
                    source=analysis.find_source_line(n),
                    remedy="draw these before the experts run, or behind them",
                )
    for n in other_nodes:
        if analysis.effects[n].unknown and analysis.position[n] > first:
            raise Refused(
                f"{get_op_name(n)}, whose side effects are unknown, is called between two parts of the region",
                culprits=(get_op_name(n),),
                source=analysis.find_source_line(n),
                remedy="call it before the experts run, or behind them",
            )
    _check_saved_tensors(analysis, bounds, inside, first)


def _check_saved_tensors(analysis: GraphAnalysis, bounds: RegionBounds, inside: set[fx.Node], first: int) -> None:
    """Check that tensors that the call saves for its backward do not change, and that nodes computed from weights may
    be computed twice.

    Raises:
        Refused: a saved tensor changes, or a duplicate would split gradients.
    """
    removable = find_removable(bounds, analysis)
    inputs = dict.fromkeys(a for n in bounds.inside for a in n.all_input_nodes)
    for n in bounds.inside:
        leaves = [
            u
            for u in n.users
            if u in analysis.position and u not in inside and (u.op == "output" or u in analysis.autograd_readers)
        ]
        if n not in removable and leaves and _has_gradient(analysis, n):
            raise Refused(
                f"the graph also returns {n.name}, which is computed from weights: the region computes it again, and "
                "gradients would reach one of the two only",
                culprits=(n.name,),
                source=analysis.find_source_line(n),
                remedy="return it detached",
            )
    storages = {s for n in inputs if n in analysis.weights for s in analysis.find_storages(n)}
    for w in analysis.unknown_effects:
        if any(s in storages for a in w.all_input_nodes for s in analysis.find_storages(a)):
            raise Refused(
                f"{get_op_name(w)}, whose side effects are unknown, receives a weight or buffer of the region",
                culprits=(get_op_name(w),),
                source=analysis.find_source_line(w),
                remedy="pass it a copy of the weight or buffer",
            )
    if analysis.modes[bounds.exit].grad is False or not any(_has_gradient(analysis, n) for n in inputs):
        return
    # Eager code saves rows only if a weight requires a gradient.
    rows = [
        n
        for n in inputs
        if n in analysis.active and analysis.position[n] < analysis.position[bounds.selection] and analysis.is_float(n)
    ]
    for n in (bounds.entry, *rows):
        for w in (w for s in analysis.find_storages(n) for w in analysis.writers[s]):
            if w not in inside and analysis.position[w] > first:
                raise Refused(
                    f"{n.name}, which the region reads, is written to in place afterwards: the backward may need it",
                    source=analysis.find_source_line(w), remedy="write to a copy",
                )  # fmt: skip


def _has_gradient(analysis: GraphAnalysis, n: fx.Node) -> bool:
    """Return whether a node's tensor requires a gradient."""
    t = analysis.weights.get(n, analysis.value.get(n))
    return isinstance(t, torch.Tensor) and t.requires_grad


def _refuse_call(n: fx.Node, line: str) -> None:
    """Refuse a region that calls a module or a graph, by the user's name for it."""
    if any(get_op_name(u) == "autograd_function_apply" for u in n.users):
        # Dynamo keeps the bodies of a torch.autograd.Function; its name is in the source line only.
        named = re.findall(r"([\w.]+)\.apply\(", str(n.stack_trace or "").rpartition('File "')[2])
        name = f" {named[0]}" if len(set(named)) == 1 else ""
        raise Refused(
            f"the region calls the torch.autograd.Function{name}, which has a backward of its own", source=line,
            remedy="use ops that torch differentiates",
        )  # fmt: skip
    if n.op == "call_module":
        raise Refused(
            f"the region calls a module, {n.target}, whose code is not in the graph", culprits=(str(n.target),),
            source=line,
            remedy="modules of torch are traced if they have no hooks and the same code in training and evaluation; a "
            "torch.fx.Tracer whose is_leaf_module returns False traces all modules",
        )  # fmt: skip
    caller = next((get_op_name(u) for u in n.users if u.op == "call_function"), "")
    by = f", by {caller}" if caller else ""
    raise Refused(
        f"the region calls a graph of the graph{by}", source=line, remedy="run its operations in the graph itself"
    )


def is_used_outside(n: fx.Node, inside: set[fx.Node], analysis: GraphAnalysis) -> bool:
    """Return whether a value that only the region computes is read by other nodes, too.

    Raises:
        Refused: it is read before the region has finished writing to it, or it is a tuple that the graph returns.
    """
    users = [u for u in n.users if u not in inside and u in analysis.position]
    if not users:
        return False
    if analysis.tensor(n) is None:
        if any(u.target is not n.target and u.op == "output" for u in users):
            raise Refused(
                f"{n.name}, a tuple of tensors, is used outside the region",
                culprits=(n.name,),
                source=analysis.find_source_line(n),
                remedy="return its tensors one by one",
            )
        return True
    first = min(analysis.position[u] for u in users)
    for s in analysis.find_storages(n):
        later_writers = [w for w in analysis.writers[s] if w in inside and analysis.position[w] > first]
        if later_writers:
            raise Refused(
                f"{n.name} is used outside the region before the region has finished writing to it",
                culprits=(n.name,),
                source=analysis.find_source_line(n),
                remedy="use it behind the last write, or write to a copy",
            )
    return True


def check_shared_memory(
    analysis: GraphAnalysis, inputs: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...], inside: set[fx.Node]
) -> None:
    """Check that no write outside the region reaches memory that a result shares, because the call may return copies.

    Raises:
        Refused: such a write exists.
    """
    start = min(analysis.position[n] for n in inside if n in analysis.active)
    values = [set(analysis.find_storages(n)) for n in (*inputs, *outputs)]
    for storage in set().union(*values[len(inputs) :]):
        later_writers = [w for w in analysis.writers[storage] if w not in inside and analysis.position[w] > start]
        if later_writers and sum(storage in storages for storages in values) > 1:
            raise Refused(
                "a tensor that shares memory with a result of the region is written to in place outside of it",
                source=analysis.find_source_line(later_writers[0]),
                remedy="write to a copy",
            )


def find_removable(bounds: RegionBounds, analysis: GraphAnalysis) -> dict[fx.Node, None]:
    """Return the nodes that only the region computes, in order. Nodes that depend on weights or on nothing may be
    computed twice, unless they are random, written to, or depend on random numbers of the region.
    """
    storages = set[int]().union(*map(analysis.find_written_memory, bounds.inside))
    removable: dict[fx.Node, None] = {}
    for n in bounds.inside:
        is_own = n in analysis.active or analysis.effects[n].draws or not storages.isdisjoint(analysis.find_storages(n))
        if is_own or any(d in removable for d in analysis.deps[n]):
            removable[n] = None
    return removable
