"""Replace regions of a graph by calls. All other nodes stay, in the same order if possible."""

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
from ...ir.memory_order import invert_permutation, memory_order
from .graph_analysis import GraphAnalysis
from .node_queries import get_size_hint
from .normalize import replace_graph
from .region_code import Modes
from .region_isolation import find_removable
from .region_module import ExtractedRegion, RegionCall

_Unit = fx.Node | ExtractedRegion
HOLDER = "moefx"  # the submodule that holds the calls


def splice(analysis: GraphAnalysis, regions: list[tuple[ExtractedRegion, RegionCall]]) -> fx.GraphModule:
    """Replace regions of a graph by calls of modules.

    Raises:
        Refused: a node outside a region must run between two of its parts.
    """
    gm = analysis.gm
    root = torch.nn.Module()
    root.__dict__.update({k: v for k, v in gm.__dict__.items() if k not in ("_graph", "_code")})
    root._modules = dict(gm._modules)
    holder_name = HOLDER
    while hasattr(gm, holder_name):  # the user's own attribute
        holder_name += "_"
    holder = root._modules[holder_name] = torch.nn.Module()
    unit_of = {n: r for r, _ in regions for n in find_removable(r.bounds, analysis)}
    calls: dict[int, tuple[str, RegionCall]] = {}
    for region, call in regions:
        name = base = region.name.replace(".", "_") or "model"
        number = 1
        while name in holder._modules:
            number += 1
            name = f"{base}_{number}"
        holder.add_module(name, call)
        calls[id(region)] = f"{holder_name}.{name}", call
    new = fx.Graph()
    new_nodes: dict[fx.Node, fx.Node] = {}
    current: list[Any] = [analysis.modes[analysis.nodes[0]], []]
    for unit in order_units(analysis, unit_of):
        if isinstance(unit, ExtractedRegion):
            _switch_modes(new, current, analysis.modes[unit.bounds.exit])
            _emit_call(new, new_nodes, analysis, unit, calls[id(unit)][0])
            continue
        if unit.op not in ("placeholder", "get_attr"):
            _switch_modes(new, current, analysis.modes[unit])
        new_nodes[unit] = new.node_copy(unit, new_nodes.__getitem__)
    _drop_unused(new, analysis, new_nodes, regions)
    out = replace_graph(gm, root, new)
    holder.train(gm.training)
    out.graph.lint()
    return out


def order_units(analysis: GraphAnalysis, unit_of: dict[fx.Node, ExtractedRegion]) -> list[fx.Node | ExtractedRegion]:
    """Order all nodes as in the program, with each region as one unit.

    Raises:
        Refused: a node outside a region must run between two of its parts.
    """
    units: dict[int, fx.Node | ExtractedRegion] = {}
    first: dict[int, int] = {}

    def find_unit(n: fx.Node) -> fx.Node | ExtractedRegion:
        return unit_of.get(n, n)

    needs: dict[int, set[int]] = defaultdict(set)
    feeds: dict[int, set[int]] = defaultdict(set)

    def put(earlier: int, later: int) -> None:
        if earlier != later:
            needs[later].add(earlier)
            feeds[earlier].add(later)

    for n in analysis.nodes:
        unit = find_unit(n)
        unit_id = id(unit)
        units.setdefault(unit_id, unit)
        first.setdefault(unit_id, analysis.position[n])
        for d in (*analysis.deps[n], *analysis.order_deps[n]):
            put(id(find_unit(d)), unit_id)
    for region in {id(r): r for r in unit_of.values()}.values():  # with copies of nodes computed from weights
        unit_id, inside = id(region), {n for n, r in unit_of.items() if r is region}
        first[unit_id] = max(analysis.position[d] for d in region.inputs)
        for d in (*region.inputs, *region.weights):
            if d not in inside:
                put(id(find_unit(d)), unit_id)
        for before, later_writers in _pair_outside_writes(analysis, region, inside):
            for w in before:
                put(id(find_unit(w)), unit_id)
            for w in later_writers:
                put(unit_id, id(find_unit(w)))
    for earlier, later in itertools.chain(
        _pair_around_switches(analysis, unit_of), _pair_random_ops(analysis, unit_of)
    ):
        put(id(earlier), id(later))
    last = {id(find_unit(n)): analysis.position[n] for n in analysis.nodes}
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
        required = [units[before] for u, unit in units.items() if not isinstance(unit, fx.Node) for before in needs[u]]
        between = [unit for unit in required if isinstance(unit, fx.Node)][:1]
        raise Refused(
            "an operation outside the region must run between two parts of the region",
            culprits=tuple(n.name for n in between),
            source=analysis.find_source_line(between[0]) if between else "",
            remedy="move it before or behind the experts",
        )
    return out


def _pair_around_switches(
    analysis: GraphAnalysis, unit_of: dict[fx.Node, ExtractedRegion]
) -> Iterator[tuple[_Unit, _Unit]]:
    """Yield pairs (earlier, later) that keep the order around nodes that change global state, such as the begin of a
    transform. A region has the position of its last node.
    """
    last = {id(r): n for n, r in unit_of.items()}  # in program order
    switch: fx.Node | None = None
    units_since: list[_Unit] = []
    for n in analysis.nodes:
        unit = unit_of.get(n, n)
        if n in unit_of and last[id(unit)] is not n:
            continue
        if switch is not None:
            yield switch, unit
        if n not in unit_of and analysis.keeps_order(n):
            yield from ((earlier, unit) for earlier in units_since)
            switch, units_since = n, []
        else:
            units_since.append(unit)


def _pair_random_ops(analysis: GraphAnalysis, unit_of: dict[fx.Node, ExtractedRegion]) -> Iterator[tuple[_Unit, _Unit]]:
    """Yield consecutive random nodes: random numbers stay in the order of the program."""
    return itertools.pairwise(unit_of.get(n, n) for n in analysis.nodes if analysis.effects[n].draws)


def _pair_outside_writes(
    analysis: GraphAnalysis, region: ExtractedRegion, inside: set[fx.Node]
) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """List, for each storage that the region reads, the outside writes before its last read, and those after its first
    read. The call reads all inputs at once, so a write in both lists makes a cycle.
    """
    pairs = []
    for d in (*region.inputs, *region.weights):
        for s in analysis.find_storages(d):
            writers = [w for w in analysis.writers[s] if w not in inside]
            read_positions = [
                analysis.position[n]
                for n in region.bounds.inside
                for a in n.all_input_nodes
                if s in analysis.find_storages(a)
            ]
            if writers and read_positions:
                before = [w for w in writers if analysis.position[w] < max(read_positions)]
                pairs.append((before, [w for w in writers if analysis.position[w] > min(read_positions)]))
    return pairs


def _emit_call(
    new: fx.Graph, new_nodes: dict[fx.Node, fx.Node], analysis: GraphAnalysis, region: ExtractedRegion, target: str
) -> None:  # fmt: skip
    """Add the call of a region to the new graph, with one node for each of its outputs."""
    args = [new_nodes[n] for n in (*region.inputs, *region.weights)]
    meta = {k: v for k, v in region.bounds.exit.meta.items() if k in ("nn_module_stack", "stack_trace")}
    if region.units:
        args[0] = new.call_function(torch.ops.aten.squeeze.dims, (args[0], list(region.units)))
        args[0].meta.update(meta)
    node = new.call_module(target, tuple(args))
    node.meta.update(meta)
    for i, n in enumerate(region.outputs):
        new_nodes[n] = _restore_strides(new.call_function(operator.getitem, (node, i)), n, analysis, region)
        new_nodes[n].meta.update(n.meta)


def _restore_strides(result: fx.Node, n: fx.Node, analysis: GraphAnalysis, region: ExtractedRegion) -> fx.Node:
    """Give a result of a region the original's order of axes in memory, which later nodes may rely on. The orders may
    differ if an input is not contiguous, because the proof used contiguous inputs.
    """
    inputs = [t for a in region.inputs if (t := analysis.tensor(a)) is not None]
    t, new = analysis.tensor(n), result.graph
    if t is None or all(_find_axis_order(g) == tuple(range(g.dim())) for g in inputs):
        return result
    order = _find_axis_order(t)
    if order is None:
        return result
    if list(order) == sorted(order):
        return new.call_function(torch.ops.aten.contiguous.default, (result,))
    permuted = new.call_function(torch.ops.aten.permute.default, (result, list(order)))
    permuted = new.call_function(torch.ops.aten.contiguous.default, (permuted,))
    return new.call_function(torch.ops.aten.permute.default, (permuted, invert_permutation(order)))


def _find_axis_order(t: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of a tensor's axes in memory, or None if it is not dense."""
    return memory_order([get_size_hint(n) for n in t.shape], [get_size_hint(n) for n in t.stride()])


def _switch_modes(new: fx.Graph, current: list[Any], modes: Modes) -> None:
    """Add nodes that change the current modes to the wanted ones."""
    previous, contexts = current
    common = 0
    while (
        common < min(len(previous.autocast), len(modes.autocast))
        and previous.autocast[common] == modes.autocast[common]
    ):
        common += 1
    while len(contexts) > common:
        new.call_function(torch.amp.autocast_mode._exit_autocast, (contexts.pop(),))
    for one in modes.autocast[common:]:
        args = (one.device, one.dtype, one.enabled, None)
        contexts.append(new.call_function(torch.amp.autocast_mode._enter_autocast, args))
    if modes.grad is not None and modes.grad != previous.grad:
        new.call_function(torch._C._set_grad_enabled, (modes.grad,))
    current[0] = modes if modes.grad is not None else modes._replace(grad=previous.grad)


def _drop_unused(
    new: fx.Graph,
    analysis: GraphAnalysis,
    new_nodes: dict[fx.Node, fx.Node],
    regions: list[tuple[ExtractedRegion, RegionCall]],
) -> None:
    """Remove nodes that only the regions used."""
    inside = {n for r, _ in regions for n in r.bounds.inside}
    for n in reversed(analysis.nodes):
        if n in inside and n in new_nodes and not new_nodes[n].users and new_nodes[n].op != "placeholder":
            new.erase_node(new_nodes[n])


__all__ = ["HOLDER", "order_units", "splice"]
