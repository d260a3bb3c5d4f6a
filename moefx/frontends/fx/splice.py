"""A graph with calls in the place of its regions; all else as it was, in the same order as far as that can be."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ...errors import Refused
from ...ir.memory_order import inverse, memory_order
from .graph_analysis import GraphAnalysis
from .node_queries import size_hint
from .normalize import replace_graph
from .region_code import Modes
from .region_isolation import find_removable
from .region_module import ExtractedRegion, RegionCall

_Unit = fx.Node | ExtractedRegion
HOLDER = "moefx"  # the submodule of the graph that has the calls


def splice(analysis: GraphAnalysis, regions: list[tuple[ExtractedRegion, RegionCall]]) -> fx.GraphModule:
    """Raises:
    Refused: something outside of a region stands between two parts of it.
    """
    gm = analysis.gm
    root = torch.nn.Module()
    root.__dict__.update({k: v for k, v in gm.__dict__.items() if k not in ("_graph", "_code")})
    root._modules = dict(gm._modules)
    held = HOLDER
    while hasattr(gm, held):  # the user's
        held += "_"
    holder = root._modules[held] = torch.nn.Module()
    unit_of = {n: r for r, _ in regions for n in find_removable(r.bounds, analysis)}
    calls: dict[int, tuple[str, RegionCall]] = {}
    for region, call in regions:
        name = base = region.name.replace(".", "_") or "model"
        number = 1
        while name in holder._modules:
            number += 1
            name = f"{base}_{number}"
        holder.add_module(name, call)
        calls[id(region)] = f"{held}.{name}", call
    new = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    current: list[Any] = [analysis.modes[analysis.nodes[0]], []]
    for unit in order_units(analysis, unit_of):
        if isinstance(unit, ExtractedRegion):
            _switch_modes(new, current, analysis.modes[unit.bounds.exit])
            _emit_call(new, made, analysis, unit, calls[id(unit)][0])
            continue
        if unit.op not in ("placeholder", "get_attr"):
            _switch_modes(new, current, analysis.modes[unit])
        made[unit] = new.node_copy(unit, made.__getitem__)
    _drop_unused(new, analysis, made, regions)
    out = replace_graph(gm, root, new)
    holder.train(gm.training)
    out.graph.lint()
    return out


def order_units(analysis: GraphAnalysis, unit_of: dict[fx.Node, ExtractedRegion]) -> list[fx.Node | ExtractedRegion]:
    """Program order, with each region as one."""
    units: dict[int, fx.Node | ExtractedRegion] = {}
    first: dict[int, int] = {}

    def of(n: fx.Node) -> fx.Node | ExtractedRegion:
        return unit_of.get(n, n)

    needs: dict[int, set[int]] = defaultdict(set)
    feeds: dict[int, set[int]] = defaultdict(set)

    def put(earlier: int, later: int) -> None:
        if earlier != later:
            needs[later].add(earlier)
            feeds[earlier].add(later)

    for n in analysis.nodes:
        unit = of(n)
        me = id(unit)
        units.setdefault(me, unit)
        first.setdefault(me, analysis.position[n])
        for d in (*analysis.deps[n], *analysis.order_deps[n]):
            put(id(of(d)), me)
    for region in {id(r): r for r in unit_of.values()}.values():  # copies of what is computed from weights
        me, inside = id(region), {n for n, r in unit_of.items() if r is region}
        first[me] = max(analysis.position[d] for d in region.inputs)
        for d in (*region.inputs, *region.weights):
            if d not in inside:
                put(id(of(d)), me)
        for before, after in _outside_writes(analysis, region, inside):
            for w in before:
                put(id(of(w)), me)
            for w in after:
                put(me, id(of(w)))
    for earlier, later in itertools.chain(_around_switches(analysis, unit_of), _random_pairs(analysis, unit_of)):
        put(id(earlier), id(later))
    last = {id(of(n)): analysis.position[n] for n in analysis.nodes}
    ready = [(first[u], last[u], u) for u in units if not needs[u]]
    heapq.heapify(ready)
    out: list[fx.Node | ExtractedRegion] = []
    while ready:
        *_, u = heapq.heappop(ready)
        out.append(units[u])
        for v in feeds[u]:
            needs[v].discard(u)
            if not needs[v]:
                heapq.heappush(ready, (first[v], last[v], v))
    if len(out) < len(units):
        raise Refused("something outside of the region is computed between two parts of it")
    return out


def _around_switches(analysis: GraphAnalysis, unit_of: dict[fx.Node, ExtractedRegion]) -> Iterator[tuple[_Unit, _Unit]]:
    """What is called for its effect on the program, as the beginning of a transform, stays where it is among all else;
    a region is where its last node is."""
    last = {id(r): n for n, r in unit_of.items()}  # in program order
    switch: fx.Node | None = None
    since: list[_Unit] = []
    for n in analysis.nodes:
        me = unit_of.get(n, n)
        if n in unit_of and last[id(me)] is not n:
            continue
        if switch is not None:
            yield switch, me
        if n not in unit_of and analysis.keeps_order(n):
            yield from ((earlier, me) for earlier in since)
            switch, since = n, []
        else:
            since.append(me)


def _random_pairs(analysis: GraphAnalysis, unit_of: dict[fx.Node, ExtractedRegion]) -> Iterator[tuple[_Unit, _Unit]]:
    """Random numbers are drawn in the order of the program."""
    return itertools.pairwise(unit_of.get(n, n) for n in analysis.nodes if analysis.effects[n].draws)


def _outside_writes(
    analysis: GraphAnalysis, region: ExtractedRegion, inside: set[fx.Node]
) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Of each tensor that the region reads: what writes to it outside of the region, before the last time that the
    region reads it, and after the first. The call reads all at once, so what does both is a cycle."""
    found = []
    for d in (*region.inputs, *region.weights):
        for s in analysis.storages(d):
            writers = [w for w in analysis.writers[s] if w not in inside]
            reads = [
                analysis.position[n]
                for n in region.bounds.inside
                for a in n.all_input_nodes
                if s in analysis.storages(a)
            ]
            if writers and reads:
                before = [w for w in writers if analysis.position[w] < max(reads)]
                found.append((before, [w for w in writers if analysis.position[w] > min(reads)]))
    return found


def _emit_call(
    new: fx.Graph, made: dict[fx.Node, fx.Node], analysis: GraphAnalysis, region: ExtractedRegion, target: str
) -> None:  # fmt: skip
    args = [made[n] for n in (*region.inputs, *region.weights)]
    meta = {k: v for k, v in region.bounds.exit.meta.items() if k in ("nn_module_stack", "stack_trace")}
    if region.units:
        args[0] = new.call_function(torch.ops.aten.squeeze.dims, (args[0], list(region.units)))
        args[0].meta.update(meta)
    node = new.call_module(target, tuple(args))
    node.meta.update(meta)
    for i, n in enumerate(region.outputs):
        made[n] = _restore_strides(new.call_function(operator.getitem, (node, i)), n, analysis, region)
        made[n].meta.update(n.meta)


def _restore_strides(made: fx.Node, n: fx.Node, analysis: GraphAnalysis, region: ExtractedRegion) -> fx.Node:
    """A result of a region with its axes in memory as those of the original, which the graph behind it may rely on.
    They can be otherwise where what the region is given is not contiguous, as it was when it was proven."""
    given = [t for a in region.inputs if (t := analysis.tensor(a)) is not None]
    t, new = analysis.tensor(n), made.graph
    if t is None or all(_axis_order(g) == tuple(range(g.dim())) for g in given):
        return made
    order = _axis_order(t)
    if order is None:
        return made
    if list(order) == sorted(order):
        return new.call_function(torch.ops.aten.contiguous.default, (made,))
    turned = new.call_function(torch.ops.aten.permute.default, (made, list(order)))
    turned = new.call_function(torch.ops.aten.contiguous.default, (turned,))
    return new.call_function(torch.ops.aten.permute.default, (turned, inverse(order)))


def _axis_order(t: torch.Tensor) -> tuple[int, ...] | None:
    return memory_order([size_hint(n) for n in t.shape], [size_hint(n) for n in t.stride()])


def _switch_modes(new: fx.Graph, current: list[Any], wanted: Modes) -> None:
    """Nodes that make the modes what they are to be."""
    was, contexts = current
    common = 0
    while common < min(len(was.autocast), len(wanted.autocast)) and was.autocast[common] == wanted.autocast[common]:
        common += 1
    while len(contexts) > common:
        new.call_function(torch.amp.autocast_mode._exit_autocast, (contexts.pop(),))
    for one in wanted.autocast[common:]:
        args = (one.device, one.dtype, one.enabled, None)
        contexts.append(new.call_function(torch.amp.autocast_mode._enter_autocast, args))
    if wanted.grad is not None and wanted.grad != was.grad:
        new.call_function(torch._C._set_grad_enabled, (wanted.grad,))
    current[0] = wanted if wanted.grad is not None else wanted._replace(grad=was.grad)


def _drop_unused(
    new: fx.Graph, analysis: GraphAnalysis, made: dict[fx.Node, fx.Node], regions: list[tuple[ExtractedRegion, RegionCall]]
) -> None:  # fmt: skip
    """What was there for the regions alone."""
    inside = {n for r, _ in regions for n in r.bounds.inside}
    for n in reversed(analysis.nodes):
        if n in inside and n in made and not made[n].users and made[n].op != "placeholder":
            new.erase_node(made[n])


__all__ = ["HOLDER", "order_units", "splice"]
