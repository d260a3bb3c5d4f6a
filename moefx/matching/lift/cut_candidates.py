"""Find the cuts of a capture, the nodes that may be its routed sum, and the inputs of one.

All results of the experts flow through a cut::

    for e, expert in enumerate(experts):
        token, slot = torch.where(ids == e)
        y = expert(x[token]) * w[token, slot, None]  # of one expert: no cut
        out = out.index_add(0, token, y)             # in the last iteration: a cut
    return norm(out) + x                             # `norm(out)` is a later cut, whose rows are no sums of experts
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.capture_result import Capture
from ...ir.ancestors import fold_ancestors
from ...ir.expressions.expression_check import is_pointwise
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import Line, depends_on_routing, line
from .canonical_form import CanonicalForm
from .parameter_uses import ParameterUses


def find_cuts(uses: ParameterUses, experts: set[str]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Find the expert nodes and the cuts.

    Returns:
        The nodes that are computed from expert parameters, and those among them that every routed path runs through.
    """
    live = uses.find_live_nodes()
    expert_nodes: set[fx.Node] = set()
    for n in uses.capture.nodes:
        if (n.op == "get_attr" and n.meta["fqn"] in experts) or any(a in expert_nodes for a in n.all_input_nodes):
            expert_nodes.add(n)
    outputs, end = set(uses.outputs), len(uses.capture.nodes)
    cuts: list[fx.Node] = []
    last_use = -1  # the largest index of a node that uses an earlier expert node
    for n in uses.capture.nodes:
        if n not in expert_nodes or n not in live:
            continue
        if last_use <= n.meta["index"] and n.op != "get_attr":
            cuts.append(n)
        users = [user.meta["index"] for user in n.users if user in live and user in expert_nodes]
        last_use = max([last_use, *users, *([end] if n in outputs else [])])
    return expert_nodes, cuts


def find_call_internals(capture: Capture, expert_nodes: set[fx.Node]) -> set[fx.Node]:
    """Find the nodes that a submodule call without experts computes and does not return.

    A rewrite that used one would split the call, and the submodule's hooks would not run.
    """
    expert_indices = sorted(n.meta["index"] for n in expert_nodes if n.op != "get_attr")
    call_internals: set[fx.Node] = set()
    for call in capture.calls:
        first = bisect.bisect_left(expert_indices, call.start)
        if first < len(expert_indices) and expert_indices[first] < call.stop:
            continue
        results = {n for n in pytree.tree_leaves(call.out) if isinstance(n, fx.Node)}
        call_internals |= {n for n in capture.nodes[call.start : call.stop] if n not in results}
    return call_internals


def find_cut_inputs(
    capture: Capture, cut: fx.Node, ancestors: set[fx.Node], expert_nodes: set[fx.Node], hint: CanonicalForm | None
) -> list[fx.Node]:
    """Find the float nodes that the cut depends on and that do not depend on expert parameters.

    Leaves out two kinds. Rows that a loop over experts gathers: with all tokens they equal the hidden states, and with
    one token they look like a scalar. Partial sums: nodes on the line of a cut that writes rows. A line counts as a
    loop if such rows have several runs or varying numbers per token, in this capture or between it and the hint.

    Args:
        ancestors: the nodes that the cut depends on, and the cut.
    """
    counts = [_count_rows_by_line(ancestors, cut)]  # of this capture, and of the hint's
    if hint is not None:
        hint_nodes, hint_cut = hint.capture.nodes, hint.cut
        counts.append(
            hint.capture.compute_once(("rows by line", hint_cut), lambda: _count_rows_by_line(hint_nodes, hint_cut))
        )
    keys = set().union(*counts)
    loops = {key for key in keys if len(set().union(*[by_line.get(key, ()) for by_line in counts])) > 1}
    lines_of_writes = {line(cut)} if not is_pointwise(cut.target) else set()
    return [
        n
        for n in capture.nodes
        if n in ancestors
        and n not in expert_nodes
        and isinstance(n.meta.get("val"), FakeTensor)
        and n.op != "get_attr"
        and not n.meta.get("from_integers")
        and not (_has_rows_of_routing(n) and (line(n), True) in loops)
        and not (_has_gathered_rows(n) and (line(n), False) in loops)
        and line(n) not in lines_of_writes
    ]


def _count_rows_by_line(nodes: Iterable[fx.Node], cut: fx.Node) -> dict[tuple[Line, bool], set[Any]]:
    """Count the rows per token that each line makes.

    The key also tells whether the routing determines the number of rows. If it does, an entry also has the number of
    the run: several runs with equal counts are still a loop, as in a block whose tokens select all experts.
    """
    tokens, runs = math.prod(cut.meta["val"].shape[:-1]), Counter[Line]()
    counts: dict[tuple[Line, bool], set[Any]] = defaultdict(set)
    for n in nodes:
        if _has_rows_of_routing(n):
            runs[line(n)] += 1
            counts[line(n), True].add((_rows_per_token(n, tokens), runs[line(n)]))
        elif _has_gathered_rows(n):
            counts[line(n), False].add(_rows_per_token(n, tokens))
    return counts


def _has_rows_of_routing(n: fx.Node) -> bool:
    return n.meta.get("ragged", False) and isinstance(n.meta.get("val"), FakeTensor) and n.meta["val"].dim() > 0


def _rows_per_token(n: fx.Node, tokens: int) -> Fraction:
    return Fraction(n.meta["val"].shape[0], max(1, tokens))


def _has_gathered_rows(node: fx.Node) -> bool:
    """Return whether an index that depends on the routing gathered the rows of a float tensor.

    The routing may determine their number without a trace in the graph, as in a program that counts with NumPy.
    """

    def is_gathered(n: fx.Node, inputs: list[bool]) -> bool:
        val = n.meta.get("val")
        if not isinstance(val, FakeTensor) or not val.dim():
            return False
        if get_op_name(n) in _GATHERS:
            return any(depends_on_routing(a) for a in pytree.tree_leaves(n.args[1:]))
        return any(inputs)

    return fold_ancestors(node, "gathered", is_gathered)


_GATHERS = {"index", "_unsafe_index", "index_select"}
