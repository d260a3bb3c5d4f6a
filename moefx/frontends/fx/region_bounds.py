"""Find the bounds of regions: from a node that selects down to where all results have come together, and up to the rows
that they are computed from.

Dominance determines both. The *exit* is the first tensor of rows that every path from the selection passes, if the path
contains a product; statistics of the selection (counts, an auxiliary loss) may leave on other paths. The *entry* is the
nearest tensor of rows that every path to the exit passes. The region between them may be too large or too small, so the
matcher decides, and further exits and entries are tried.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ...capture.tracing.op_sets import SELECTION_OPS
from ...ir.node_values import get_op_name
from .graph_analysis import GraphAnalysis
from .node_queries import get_size_hint, is_hinted

# minimum number of float operands: equality with a number selects nothing
_COMPARING_OPS = {"gt": 1, "ge": 1, "lt": 1, "le": 1, "eq": 2, "ne": 2}
_PRODUCT_OPS = {
    "linear", "mm", "bmm", "matmul", "einsum", "addmm", "baddbmm", "addbmm", "_grouped_mm", "grouped_mm", "__matmul__",
    "mv", "tensordot",
}  # fmt: skip
# Nodes after a selection to look at first, four times as many if its region does not end there. Nodes before it: a
# router takes fewer.
_FIRST_WINDOW, _BACK = 512, 400
_MAX_EXITS = 3


@dataclasses.dataclass(frozen=True)
class RegionBounds:
    """The bounds of a region.

    Attributes:
        selection: the node that selects.
        entry: the rows.
        exit: the node after which the results have come together.
        inside: the nodes between, in program order, without the entry, weights and side inputs.
        side_inputs: other values that the region reads, such as masks.
    """

    selection: fx.Node
    entry: fx.Node
    exit: fx.Node
    inside: tuple[fx.Node, ...]
    side_inputs: tuple[fx.Node, ...]


class RegionSearch:
    """Finds regions that may be an MoE block: for a selection, pairs of an entry above and an exit below."""

    def __init__(self, analysis: GraphAnalysis):
        self.analysis = analysis
        self.dominator = _find_dominators(analysis)

    def find_selections(self) -> list[fx.Node]:
        """Return the nodes that select: selection ops first, then comparisons of floats."""
        selections, compared = find_selections(self.analysis.nodes, self.analysis)
        return selections + compared

    def iterate_bounds(self, selection: fx.Node) -> Iterator[RegionBounds]:
        """Yield the bounds of a selection's region, the most likely first."""
        seen: set[tuple[fx.Node, fx.Node]] = set()
        for exit_ in self._iterate_exits(selection):
            below = {n for n in self._after_selection}
            entry = self.dominator.get(exit_)
            while entry is not None and (entry in below or not self._is_rows(entry)):
                entry = self.dominator.get(entry)
            if entry is None or (entry, exit_) in seen or self._find_num_tokens(entry) != self._find_num_tokens(exit_):
                continue
            seen.add((entry, exit_))
            bounds = self._find_bounds_between(selection, entry, exit_)
            if bounds is not None:
                yield bounds
            if len(seen) == _MAX_EXITS:
                return

    def returns_selection(self, selection: fx.Node) -> bool:
        """Return whether the graph returns the selected indices, as it does if Dynamo ends the graph there."""
        analysis = self.analysis
        if get_op_name(selection) not in SELECTION_OPS:
            return False
        return any(
            analysis.tensor(n) is not None
            and not analysis.is_float(n)
            and any(u.op == "output" for u in analysis.users[n])
            for n in _find_nodes_after(selection, analysis, _FIRST_WINDOW)[0]
        )

    def widen(self, bounds: RegionBounds) -> RegionBounds | None:
        """Return the bounds with the next rows above as the entry, or None."""
        entry = self.dominator.get(bounds.entry)
        while entry is not None and not self._is_rows(entry):
            entry = self.dominator.get(entry)
        return None if entry is None else self._find_bounds_between(bounds.selection, entry, bounds.exit)

    def _is_rows(self, n: fx.Node) -> bool:
        """Return whether a node's value is a float tensor of two or more axes."""
        t = self.analysis.tensor(n)
        return t is not None and t.is_floating_point() and t.dim() >= 2

    def _find_num_tokens(self, n: fx.Node) -> Any:
        """Return the number of tokens of a tensor of rows; its symbols if it depends on data."""
        sizes = self.analysis.value[n].shape[:-1]
        return math.prod(map(get_size_hint, sizes)) if all(map(is_hinted, sizes)) else "*".join(map(str, sizes))

    # ------------------------------------------------------------------ exits
    def _iterate_exits(self, selection: fx.Node) -> Iterator[fx.Node]:
        """Yield possible exits. The window grows until one is found or nothing is left."""
        window = _FIRST_WINDOW
        while True:
            exits = list(self._iterate_exits_within(selection, window))
            if exits or not self._is_cut_off:
                yield from exits
                return
            window *= 4

    def _iterate_exits_within(self, selection: fx.Node, window: int) -> Iterator[fx.Node]:
        """Yield possible exits among the first nodes after a selection."""
        analysis = self.analysis
        later_nodes, self._is_cut_off = _find_nodes_after(selection, analysis, window)
        self._after_selection = set(later_nodes)
        multiplied = self._find_products_after(selection, later_nodes)
        users_left = {n: sum(u in self._after_selection for u in analysis.users[n]) for n in later_nodes}
        idle: set[fx.Node] = set()
        unfinished: set[fx.Node] = set()
        exits = 0
        for n in later_nodes:
            for d in analysis.deps[n]:
                if d in users_left:
                    users_left[d] -= 1
                    if not users_left[d]:
                        unfinished.discard(d)
            if users_left[n]:
                unfinished.add(n)
            is_result = n in multiplied and self._is_rows(n) and n.op.startswith("call")
            if is_result and not any(self._reaches_results(u, n, multiplied, idle) for u in unfinished if u is not n):
                yield n
                exits += 1
                if exits == 4 * _MAX_EXITS:
                    return

    def _find_products_after(self, selection: fx.Node, later_nodes: list[fx.Node]) -> set[fx.Node]:
        """Return the nodes after a selection that contain a product: of a weight and selected rows, or of a weight and
        all rows, computed beside the selection.
        """
        analysis, products, other_products = self.analysis, set(), set()
        before = _find_nodes_before(selection, analysis)
        first, last = max(0, analysis.position[selection] - _BACK), analysis.position[later_nodes[-1]]
        for n in analysis.nodes[first:last]:
            are_rows = self._is_rows(n) or isinstance(analysis.value.get(n), (tuple, list))
            if n not in analysis.active or n in before or n in self._after_selection or not are_rows:
                continue
            if _is_product(n) or any(d in other_products for d in analysis.deps[n]):
                other_products.add(n)
        weighted: set[fx.Node] = set()  # excludes products of a selection and its own scores
        for n in later_nodes:
            if any(d in analysis.weight_only or d in weighted for d in analysis.deps[n]):
                weighted.add(n)
            is_product = n in weighted and _is_product(n) and self._is_rows(n)
            if is_product or any(d in products or d in other_products for d in analysis.deps[n]):
                products.add(n)
        return products

    def _reaches_results(self, n: fx.Node, start: fx.Node, multiplied: set[fx.Node], idle: set[fx.Node]) -> bool:
        """Return whether a value still reaches the experts' results, other than as a number.

        Args:
            idle: collects nodes that do not reach them.
        """
        analysis, stack, seen = self.analysis, [n], set()
        while stack:
            m = stack.pop()
            if m in seen or m in idle:
                continue
            seen.add(m)
            if m in multiplied and (m is not n or self._is_rows(m)):
                return True
            t = analysis.tensor(m)
            if m is n or t is None or t.dim():
                stack += [
                    u
                    for u in analysis.users[m]
                    if u in self._after_selection and analysis.position[u] > analysis.position[start]
                ]
        idle |= seen
        return False

    # ------------------------------------------------------------------ between entry and exit
    def _find_bounds_between(self, selection: fx.Node, entry: fx.Node, exit_: fx.Node) -> RegionBounds | None:
        """Return the bounds for an entry and an exit. Writes to tensors from before the region stay in front of
        the region if nothing inside reads them earlier.
        """
        bounds = self._collect_bounds(selection, entry, exit_, set())
        writes = self._find_external_writes(bounds) if bounds is not None else set()
        smaller = self._collect_bounds(selection, entry, exit_, writes) if writes else None
        return bounds if smaller is None or self._reads_before(smaller, writes) else smaller

    def _find_external_writes(self, bounds: RegionBounds) -> set[fx.Node]:
        """Return the nodes inside that write to tensors from before the region."""
        analysis = self.analysis
        earlier_storages = {
            s for n in (*analysis.weights, bounds.entry, *bounds.side_inputs) for s in analysis.find_storages(n)
        }
        return {n for n in bounds.inside if earlier_storages & analysis.find_written_memory(n)}

    def _reads_before(self, bounds: RegionBounds, writes: set[fx.Node]) -> bool:
        """Return whether a node inside reads a tensor that `writes` write to, before the last of these writes. If none
        does, the writes stay in front of the region.
        """
        analysis, last = self.analysis, max(self.analysis.position[n] for n in writes)
        storages = set().union(*map(analysis.find_written_memory, writes))
        early_inputs = (a for n in bounds.inside if analysis.position[n] < last for a in n.all_input_nodes)
        return bool(self._find_external_writes(bounds)) or any(
            storages & {*analysis.find_storages(a)} for a in early_inputs
        )

    def _collect_bounds(
        self, selection: fx.Node, entry: fx.Node, exit_: fx.Node, excluded: set[fx.Node]
    ) -> RegionBounds | None:
        """Collect the nodes between an entry and an exit. None if the selection is not among them.

        Args:
            excluded: nodes that must stay outside.
        """
        analysis = self.analysis
        inside: set[fx.Node] = set()
        inputs: set[fx.Node] = set()
        stack = [exit_]
        while stack:
            n = stack.pop()
            if (
                n in inside
                or n in inputs
                or n is entry
                or n in analysis.weights
                or analysis.is_number(n)
                or n in excluded
            ):
                continue
            is_outside = n in analysis.active and (n in analysis.side_inputs or not self._is_below(n, entry))
            if is_outside or n.op == "placeholder":
                inputs.add(n)
                continue
            inside.add(n)
            stack += analysis.deps[n]
            stack += [d for d in analysis.order_deps[n] if d in analysis.active and self._is_below(d, entry)]
        if selection not in inside:
            return None
        inputs |= {n for n in excluded if not inside.isdisjoint(n.users)}
        parts = [u for n in inside if isinstance(analysis.value.get(n), (tuple, list)) for u in n.users]
        inside |= {u for u in parts if u.target is operator.getitem and u in analysis.position}
        order = analysis.position.__getitem__
        return RegionBounds(selection, entry, exit_, tuple(sorted(inside, key=order)), tuple(sorted(inputs, key=order)))

    def _is_below(self, n: fx.Node, entry: fx.Node) -> bool:
        """Return whether the entry dominates a node."""
        at = self.analysis.position
        current: fx.Node | None = n
        while current is not None and at[current] > at[entry]:
            current = self.dominator.get(current)
        return current is entry


def find_selections(nodes: Sequence[fx.Node], analysis: GraphAnalysis) -> tuple[list[fx.Node], list[fx.Node]]:
    """Find the nodes that select among floats, and those that compare floats."""
    calls = [n for n in nodes if n in analysis.active and n not in analysis.side_inputs and n.op.startswith("call")]
    selections = [n for n in calls if get_op_name(n) in SELECTION_OPS and _uses_indices(n, analysis)]
    compared = [
        n for n in calls
        if (min_floats := _COMPARING_OPS.get(get_op_name(n)))
        and sum(analysis.is_float(a) and a in analysis.active for a in n.all_input_nodes) >= min_floats
    ]  # fmt: skip
    return selections, compared


def _find_dominators(analysis: GraphAnalysis) -> dict[fx.Node, fx.Node | None]:
    """Find the immediate dominators among active nodes. Side inputs do not count as paths into a region."""
    dominators: dict[fx.Node, fx.Node | None] = {}
    depth: dict[fx.Node | None, int] = {None: 0}
    for n in analysis.nodes:
        if n not in analysis.active:
            continue
        paths = [
            d
            for d in analysis.deps[n]
            if d in dominators and (d not in analysis.side_inputs or n in analysis.side_inputs)
        ]
        common: fx.Node | None = paths[0] if paths else None
        for d in paths[1:]:
            other: fx.Node | None = d
            while common is not other:
                if depth[common] >= depth[other]:
                    common = dominators[common] if common is not None else None
                else:
                    other = dominators[other] if other is not None else None
        dominators[n] = common
        depth[n] = depth[common] + 1
    return dominators


def _is_product(n: fx.Node) -> bool:
    """Return whether a node is a matrix product."""
    name = get_op_name(n)
    return name in _PRODUCT_OPS or name.startswith("grouped_mm")


def _uses_indices(n: fx.Node, analysis: GraphAnalysis) -> bool:
    """Return whether the integers of a selection are used. The values of `topk` alone may be a threshold."""
    if not any(analysis.is_float(a) and a in analysis.active for a in n.all_input_nodes):
        return False
    if isinstance(analysis.value.get(n), torch.Tensor):
        return not analysis.is_float(n)
    parts = [u for u in n.users if u.target is operator.getitem]
    index_results = (0, 1) if get_op_name(n) in ("topk", "kthvalue", "sort") else (1,)
    return any(u.args[1] in index_results and u.users for u in parts)


def _find_nodes_after(selection: fx.Node, analysis: GraphAnalysis, most: int) -> tuple[list[fx.Node], bool]:
    """Return the nodes that depend on a node, itself included, in program order; and whether there are more than
    `most`."""
    later_nodes, seen, heap = [], {selection}, [(analysis.position[selection], selection)]
    while heap:
        _, n = heapq.heappop(heap)
        if n.op == "output":
            continue
        if len(later_nodes) == most:
            return later_nodes, True
        later_nodes.append(n)
        for u in analysis.users[n]:
            if u not in seen:
                seen.add(u)
                heapq.heappush(heap, (analysis.position[u], u))
    return later_nodes, False


def _find_nodes_before(selection: fx.Node, analysis: GraphAnalysis) -> set[fx.Node]:
    """Return the nodes that a node depends on, at most `_BACK` positions back."""
    seen: set[fx.Node] = set()
    stack: list[Any] = [selection]
    while stack:
        n = stack.pop()
        if n not in seen and analysis.position[n] >= analysis.position[selection] - _BACK:
            seen.add(n)
            stack += analysis.deps[n]
    return seen
