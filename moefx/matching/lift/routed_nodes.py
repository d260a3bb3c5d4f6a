"""The routed region of a capture: from the experts' parameters to the cut.

A row *uses* a parameter if the parameter's elements are in the row's term. Expert parameters are those that only some
tokens use. A cut is a node through which all their results flow::

    for e, expert in enumerate(experts):
        token, slot = torch.where(ids == e)
        y = expert(x[token]) * w[token, slot, None]  # of one expert: no cut
        out = out.index_add(0, token, y)             # in the last iteration: a cut
    return norm(out) + x                             # `norm(out)` is a later cut, whose rows are no sums of experts
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from fractions import Fraction
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.capture_result import Capture
from ...capture.tracing.node_origins import find_float_decisions
from ...errors import Refused
from ...ir.ancestors import collect_ancestors, fold_ancestors
from ...ir.expressions.expression_check import is_pointwise
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import Line, depends_on_routing, follows_from_integers, line
from ..terms.node_semantics import Semantics
from ..terms.parameter_slices import (
    find_siblings,
    is_parameter_slice,
    number_nested_modules,
    strip_moves,
)
from ..terms.term import Term, TooLarge, is_const
from .canonical_form import CanonicalForm
from .lift_options import LiftOptions

MAX_ROWS = 1 << 14


class ParameterUses:
    """The parameters that each row of each node uses of one capture.

    Args:
        hint: the form of another capture of the block.

    Attributes:
        semantics: the terms of the nodes.
        terms: the table of terms.
        children: the numbered parts of every module of the block.
        nested: numbers of the modules in lists of lists.
        outputs: nodes that the call returns, or stores in state.
        split_axes: the axes along which rows use parts of a parameter, by FQN. `expand_sums` extends it.
    """

    def __init__(
        self,
        block: nn.Module,
        capture: Capture,
        *,
        hint: CanonicalForm | None = None,
        options: LiftOptions = LiftOptions(),  # noqa: B008
    ):
        self.block, self.capture = block, capture
        tables = [table for group in hint.groups for table in group.tables] if hint is not None else []
        self.split_axes = {part.fqn: part.axes for table in tables for part in table.values()}
        self.semantics = Semantics(capture.nodes, capture.concrete_value, options.symbolic, options.opaque_lines)
        self.terms = self.semantics.terms
        self.children, self.nested = find_siblings(block), number_nested_modules(block)
        results = [capture.out, *[e.node for e in capture.effects if e.kind != "state"]]
        self.outputs = [n for n in pytree.tree_leaves(results) if isinstance(n, fx.Node)]
        self._leaves: dict[Term, frozenset[Term]] = {}

    def rows(self, node: fx.Node, lead: int | None = None) -> list[Term]:
        """Return the resolved rows of a node. Axes from `lead` on belong to the row; by default the last one does."""
        term = self.semantics.term(node)
        lead_sizes = term.shape[: len(term.shape) - 1 if lead is None else lead]
        if math.prod(lead_sizes) > MAX_ROWS:
            raise Refused(
                f"a tensor with {math.prod(lead_sizes)} rows exceeds the limit of {MAX_ROWS}",
                source=str(node.meta["source"]),
            )
        return [
            self.terms.resolve(self.terms.pick_axes(term, dict(enumerate(indices))))
            for indices in itertools.product(*map(range, lead_sizes))
        ]

    def leaves(self, term: Term) -> frozenset[Term]:
        """Return the parameter slices that a term uses as vectors.

        A scalar is a routing weight: parameters that the term uses only through it do not count.
        """
        slices = self._leaves.get(term)
        if slices is None:
            slices = self._leaves[term] = self._find_leaves(term)
        return slices

    def _find_leaves(self, term: Term) -> frozenset[Term]:
        if is_parameter_slice(term):
            return frozenset([term])
        is_scalar = math.prod(term.shape) == 1
        operands = [t for t in term.terms if is_scalar or math.prod(t.shape) > 1 or is_parameter_slice(t)]
        slices = frozenset[Term]().union(*map(self.leaves, operands))
        if not is_scalar:
            return slices
        return frozenset(part for part in slices if strip_moves(part).args[0] not in self.choice_parameters)

    @functools.cached_property
    def choice_parameters(self) -> set[str]:
        """FQNs of the parameters from which integers are computed, such as a router's."""
        choices = [n for n in self.capture.nodes if find_float_decisions(n)]
        return {n.meta["fqn"] for n in collect_ancestors(*choices) if n.op == "get_attr"}

    def parameters_by_row(self, node: fx.Node) -> list[frozenset[Term]]:
        """Return the parameter slices that each row of a node uses."""
        return [self.leaves(row) for row in self.rows(node)]

    def expand_sums(self, node: fx.Node, experts: Collection[str] | None = None) -> None:
        """Write out each sum over experts in the rows of a node, here and in all terms from now on.

        If a mask keeps all experts of a row, the sum over the experts is one product of a stacked parameter. Other rows
        show that it is a sum: they use parts of the parameter.

        Args:
            experts: FQNs of the experts' parameters, if they are known. Other products stay whole: channels of an
                image use parts of a norm's weight, pixels the whole weight.
        """
        axes_by_row = [{part: _find_split_axes(part) for part in parts} for parts in self.parameters_by_row(node)]
        for axes_by_part in axes_by_row:
            for part, axes in axes_by_part.items():
                fqn = strip_moves(part).args[0]
                self.split_axes[fqn] = self.split_axes.get(fqn, frozenset()) | axes
        whole = [param for param in _find_stacked(axes_by_row) if experts is None or param.args[0] in experts]
        if stacked := {param: axes for param in whole if (axes := self.split_axes[param.args[0]])}:
            self.terms.mark_routed(stacked)
            self._leaves.clear()

    def live_nodes(self) -> set[fx.Node]:
        """Return the nodes that outputs and effects depend on."""
        return collect_ancestors(*self.outputs)


def find_padding_lines(block: nn.Module, capture: Capture, width: int) -> frozenset[Line]:
    """Find the lines that set some rows of hidden states to a constant, by a mask argument, or append such rows.

    Constant rows do not show how the program computes with the others.

    Args:
        width: last dim of the hidden states.
    """
    uses, padding_lines = ParameterUses(block, capture), set[Line]()
    padded: set[fx.Node] = set()  # nodes with constant rows, and those that depend on them
    for n in capture.nodes:
        val = n.meta.get("val")
        if not isinstance(val, FakeTensor) or val.dim() < 2 or not val.is_floating_point() or follows_from_integers(n):
            continue
        if not padded.isdisjoint(n.all_input_nodes):
            padded.add(n)
        elif val.shape[-1] == width and 0 < math.prod(val.shape[:-1]) <= MAX_ROWS:
            with contextlib.suppress(Refused, TooLarge):
                if {is_const(row) for row in uses.rows(n)} == {True, False}:
                    padded.add(n)
                    padding_lines.add(line(n))
    return frozenset(padding_lines)


def has_rows_of_padding(capture: Capture, width: int) -> bool:
    """Return whether some hidden states have more rows than tokens, and no multiple (padded to a multiple of 8).

    Args:
        width: last dim of the hidden states.
    """
    tokens = max(1, capture.sizes.tokens)
    for n in capture.nodes:
        val = n.meta.get("val")
        if isinstance(val, FakeTensor) and val.dim() >= 2 and val.shape[-1] == width and not n.meta.get("ragged"):
            rows = math.prod(val.shape[:-1])
            if rows > tokens and rows % tokens:
                return True
    return False


def _find_stacked(axes_by_row: list[dict[Term, frozenset[int]]]) -> set[Term]:
    """Find the parameters that some row uses as a whole, and no row both as a whole and in parts.

    Args:
        axes_by_row: by row, the parameter slices that it uses, with their split axes.
    """
    whole: set[Term] = set()
    both: set[Term] = set()  # used in both ways by one row: an expert's part, and a statistic of all experts
    for axes_by_part in axes_by_row:
        split_in_row = {strip_moves(part) for part, axes in axes_by_part.items() if axes}
        whole_in_row = {strip_moves(part) for part, axes in axes_by_part.items() if not axes}
        both |= split_in_row & whole_in_row
        whole |= whole_in_row
    return whole - both


def _find_split_axes(part: Term) -> frozenset[int]:
    """Return the axes of its parameter at which a slice has one index.

    If the program reshapes the parameter first, return those of the reshaped one that the parameter has, too.
    """
    axes, term = frozenset[int](), part
    while term.op != "param":
        axes = frozenset(axis for axis, _ in term.args[1]) if term.op == "select" else axes
        term = term.terms[0]
    return frozenset(axis for axis in axes if axis < len(term.shape))


def has_integer_choices(uses: ParameterUses) -> bool:
    """Return whether the capture computes integers with several entries per token from floats."""
    shapes = (n.meta["val"].shape for n in uses.outputs if isinstance(n.meta.get("val"), FakeTensor))
    tokens = math.prod(next(shapes, ())[:-1])
    return any(
        isinstance(val := n.meta.get("val"), torch.Tensor)
        and not isinstance(val, FakeTensor)
        and val.dtype != torch.bool
        and val.numel() > tokens > 1
        and depends_on_routing(n)
        for n in uses.capture.nodes
    )


def has_sequence_choices(capture: Capture) -> bool:
    """Return whether some integers have one entry or a few per sequence.

    A few sequences may all select the same experts.
    """
    dims = list(capture.sizes.dims.values())
    has_axis = len(dims) > 1 or (bool(dims) and capture.sizes.tokens > dims[0])
    return has_axis and any(
        isinstance(val := n.meta.get("val"), torch.Tensor)
        and not isinstance(val, FakeTensor)
        and val.dtype != torch.bool
        and val.shape[:1] == (dims[0],)
        and val.dim() <= 2
        and tuple(val.shape) != tuple(dims)
        for n in capture.nodes
    )


def find_cuts(uses: ParameterUses, experts: set[str]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Find the expert nodes and the cuts.

    Returns:
        The nodes that are computed from expert parameters, and those among them that every routed path runs through.
    """
    live = uses.live_nodes()
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
    inside: set[fx.Node] = set()
    for call in capture.calls:
        first = bisect.bisect_left(expert_indices, call.start)
        if first < len(expert_indices) and expert_indices[first] < call.stop:
            continue
        results = {n for n in pytree.tree_leaves(call.out) if isinstance(n, fx.Node)}
        inside |= {n for n in capture.nodes[call.start : call.stop] if n not in results}
    return inside


def find_cut_inputs(
    uses: ParameterUses, cut: fx.Node, expert_nodes: set[fx.Node], hint: CanonicalForm | None
) -> list[fx.Node]:
    """Find the float nodes that the cut depends on and that do not depend on expert parameters.

    Leaves out two kinds. Rows that a loop over experts gathers: with all tokens they equal the hidden states, and with
    one token they look like a scalar. Partial sums: nodes on the line of a cut that writes rows. A line counts as a
    loop if such rows have several runs or varying numbers per token, in this capture or between it and the hint.
    """
    ancestors = collect_ancestors(cut)
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
        for n in uses.capture.nodes
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
