"""Whether a region can be taken out of its graph: what it writes to, shares memory with, draws, and hands on."""

from __future__ import annotations

import re

import torch
from torch import fx

from ...errors import Refused
from .graph_analysis import GraphAnalysis
from .node_queries import target_name
from .region_bounds import RegionBounds


def check_isolation(analysis: GraphAnalysis, bounds: RegionBounds) -> None:
    inside = set(bounds.inside)
    last = max(analysis.position[n] for n in bounds.inside)
    first = min(analysis.position[n] for n in bounds.inside if n in analysis.active)
    there = {s for n in (bounds.entry, *bounds.side_inputs, *analysis.weights) for s in analysis.storages(n)}
    for n in bounds.inside:
        where = analysis.source_line(n)
        if n.op not in ("call_function", "call_method"):
            _refuse_call(n, where)
        if there & analysis.memory_written(n):
            raise Refused("the region writes to a tensor that was there before it", source=where)
    for n in (*analysis.nodes[first:last], *bounds.inside):
        if n in analysis.transforms:
            raise Refused(
                f"the region, or a part of it, is inside of {analysis.transforms[n][-1]}, which is not followed in graphs",
                source=analysis.source_line(n),
                remedy="moefx.compile(model) takes it where a module has all of it",
            )
    for n in bounds.side_inputs:
        if analysis.tensor(n) is None:
            raise Refused(f"the region takes {n.name}, which is no tensor", culprits=(n.name,))
    begin = min(analysis.position[n] for n in bounds.inside)
    beside = [n for n in analysis.nodes[begin:last] if n not in inside]
    if any(analysis.effects[n].draws for n in bounds.inside):
        for n in beside:
            if analysis.effects[n].draws or analysis.effects[n].unknown:
                raise Refused(
                    "random numbers are drawn inside of the region and beside it: their order would change",
                    source=analysis.source_line(n),
                )
    for n in beside:
        if analysis.effects[n].unknown and analysis.position[n] > first:
            raise Refused(
                f"{target_name(n)}, of which nothing says what else it does, is called between two parts of the region",
                culprits=(target_name(n),), source=analysis.source_line(n),
            )  # fmt: skip
    _check_saved_tensors(analysis, bounds, inside, first)


def _check_saved_tensors(analysis: GraphAnalysis, bounds: RegionBounds, inside: set[fx.Node], first: int) -> None:
    """What the call saves for its backward must not change, and what is computed from weights is the same again."""
    mine = find_removable(bounds, analysis)
    read = dict.fromkeys(a for n in bounds.inside for a in n.all_input_nodes)
    for n in bounds.inside:
        leaves = [
            u
            for u in n.users
            if u in analysis.position and u not in inside and (u.op == "output" or u in analysis.autograd_readers)
        ]
        if n not in mine and leaves and _has_gradient(analysis, n):
            raise Refused(
                f"{n.name}, which is computed from weights, is what the graph returns, too: for the region it is "
                "computed again, and gradients are of one of the two",
                culprits=(n.name,), source=analysis.source_line(n),
            )  # fmt: skip
    storages = {s for n in read if n in analysis.weights for s in analysis.storages(n)}
    for w in analysis.unknown_effects:
        if any(s in storages for a in w.all_input_nodes for s in analysis.storages(a)):
            raise Refused(
                f"{target_name(w)}, of which nothing says what else it does, is given a weight or buffer of the region",
                culprits=(target_name(w),), source=analysis.source_line(w),
            )  # fmt: skip
    if analysis.modes[bounds.exit].grad is False or not any(_has_gradient(analysis, n) for n in read):
        return
    # Rows, which eager code keeps only where a weight has a gradient.
    rows = [
        n
        for n in read
        if n in analysis.active and analysis.position[n] < analysis.position[bounds.seed] and analysis.is_float(n)
    ]
    for n in (bounds.entry, *rows):
        for w in (w for s in analysis.storages(n) for w in analysis.writers[s]):
            if w not in inside and analysis.position[w] > first:
                raise Refused(
                    f"{n.name}, which the region reads, is written to afterwards, in place: its backward may need it",
                    source=analysis.source_line(w), remedy="write to a copy",
                )  # fmt: skip


def _has_gradient(analysis: GraphAnalysis, n: fx.Node) -> bool:
    t = analysis.weights.get(n, analysis.value.get(n))
    return isinstance(t, torch.Tensor) and t.requires_grad


def _refuse_call(n: fx.Node, where: str) -> None:
    """Of a module or a graph that is called: by the user's name for it."""
    if any(target_name(u) == "autograd_function_apply" for u in n.users):
        # Dynamo keeps the bodies of a torch.autograd.Function and not its name, which the line has.
        named = re.findall(r"([\w.]+)\.apply\(", str(n.stack_trace or "").rpartition('File "')[2])
        name = f" {named[0]}" if len(set(named)) == 1 else ""
        raise Refused(
            f"the region calls the torch.autograd.Function{name}, whose backward is code of its own", source=where,
            remedy="what torch can differentiate itself is followed",
        )  # fmt: skip
    if n.op == "call_module":
        raise Refused(
            f"the region calls a module, {n.target}, whose code is not in the graph", culprits=(str(n.target),),
            source=where,
            remedy="torch's own are looked into if they have no hooks and do the same in training and evaluation; a "
            "torch.fx.Tracer whose is_leaf_module returns False looks into all",
        )  # fmt: skip
    through = next((target_name(u) for u in n.users if u.op == "call_function"), "")
    by = f", by {through}" if through else ""
    raise Refused(f"the region calls a graph of the graph{by}", source=where)


def is_used_outside(n: fx.Node, inside: set[fx.Node], analysis: GraphAnalysis) -> bool:
    """Whether the value of a node that the region alone computes is read outside of it."""
    users = [u for u in n.users if u not in inside and u in analysis.position]
    if not users:
        return False
    if analysis.tensor(n) is None:
        if any(u.target is not n.target and u.op == "output" for u in users):
            raise Refused(f"{n.name}, several tensors at once, is used outside of the region", culprits=(n.name,))
        return True
    first = min(analysis.position[u] for u in users)
    for s in analysis.storages(n):
        later = [w for w in analysis.writers[s] if w in inside and analysis.position[w] > first]
        if later:
            raise Refused(
                f"{n.name} is used outside of the region before the region is done with it", culprits=(n.name,),
                source=analysis.source_line(n),
            )  # fmt: skip
    return True


def check_shared_memory(
    analysis: GraphAnalysis, inputs: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...], inside: set[fx.Node]
) -> None:
    """What comes out may be memory of its own: it must not matter whether two values are one."""
    start = min(analysis.position[n] for n in inside if n in analysis.active)
    values = [set(analysis.storages(n)) for n in (*inputs, *outputs)]
    for storage in set().union(*values[len(inputs) :]):
        later = [w for w in analysis.writers[storage] if w not in inside and analysis.position[w] > start]
        if later and sum(storage in mine for mine in values) > 1:
            raise Refused(
                "a tensor that the region shares memory with is written to, in place, outside of it",
                source=analysis.source_line(later[0]),
            )


def find_removable(bounds: RegionBounds, analysis: GraphAnalysis) -> dict[fx.Node, None]:
    """The nodes that a region alone computes, in order. What follows from weights or from nothing, is not random and is
    not written to, may be computed twice; not what is made of random numbers of the region."""
    written = set[int]().union(*map(analysis.memory_written, bounds.inside))
    found: dict[fx.Node, None] = {}
    for n in bounds.inside:
        is_own = n in analysis.active or analysis.effects[n].draws or not written.isdisjoint(analysis.storages(n))
        if is_own or any(d in found for d in analysis.deps[n]):
            found[n] = None
    return found
