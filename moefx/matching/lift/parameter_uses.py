"""The parameters that each row of a capture uses: rows of the routed sum use those of their experts.

A row *uses* a parameter if the parameter's elements are in the row's term. Expert parameters are those that only some
tokens use.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection

import torch.utils._pytree as pytree
from torch import fx, nn

from ...capture.tracing.capture_result import Capture
from ...capture.tracing.node_origins import find_float_decisions
from ...errors import Refused
from ...ir.ancestors import collect_ancestors
from ..terms.node_semantics import Semantics
from ..terms.parameter_slices import (
    find_siblings,
    get_fqn,
    is_parameter_slice,
    number_nested_modules,
    strip_moves,
)
from ..terms.term import Term
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
        self.semantics = Semantics(
            capture.nodes, capture.concrete_value, options.keeps_comparisons, options.opaque_lines
        )
        self.terms = self.semantics.terms
        self.children, self.nested = find_siblings(block), number_nested_modules(block)
        results = [capture.out, *[e.node for e in capture.effects if e.kind != "state"]]
        self.outputs = [n for n in pytree.tree_leaves(results) if isinstance(n, fx.Node)]
        self._slices: dict[Term, frozenset[Term]] = {}

    def list_rows(self, node: fx.Node, lead: int | None = None) -> list[Term]:
        """Return the resolved rows of a node. Axes from `lead` on belong to the row; by default the last one does."""
        term = self.semantics.get_term(node)
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

    def find_slices(self, term: Term) -> frozenset[Term]:
        """Return the parameter slices that a term uses as vectors.

        A scalar is a routing weight: parameters that the term uses only through it do not count.
        """
        slices = self._slices.get(term)
        if slices is None:
            slices = self._slices[term] = self._find_operand_slices(term)
        return slices

    def _find_operand_slices(self, term: Term) -> frozenset[Term]:
        if is_parameter_slice(term):
            return frozenset([term])
        is_scalar = math.prod(term.shape) == 1
        operands = [t for t in term.operands if is_scalar or math.prod(t.shape) > 1 or is_parameter_slice(t)]
        slices = frozenset[Term]().union(*map(self.find_slices, operands))
        if not is_scalar:
            return slices
        return frozenset(part for part in slices if get_fqn(part) not in self.choice_parameters)

    @functools.cached_property
    def choice_parameters(self) -> set[str]:
        """FQNs of the parameters from which integers are computed, such as a router's."""
        choices = [n for n in self.capture.nodes if find_float_decisions(n)]
        return {n.meta["fqn"] for n in collect_ancestors(*choices) if n.op == "get_attr"}

    def find_slices_by_row(self, node: fx.Node) -> list[frozenset[Term]]:
        """Return the parameter slices that each row of a node uses."""
        return [self.find_slices(row) for row in self.list_rows(node)]

    def expand_sums(self, node: fx.Node, experts: Collection[str] | None = None) -> None:
        """Write out each sum over experts in the rows of a node, here and in all terms from now on.

        If a mask keeps all experts of a row, the sum over the experts is one product of a stacked parameter. Other rows
        show that it is a sum: they use parts of the parameter.

        Args:
            experts: FQNs of the experts' parameters, if they are known. Other products stay whole: channels of an
                image use parts of a norm's weight, pixels the whole weight.
        """
        axes_by_row = [{part: _find_split_axes(part) for part in parts} for parts in self.find_slices_by_row(node)]
        for axes_by_part in axes_by_row:
            for part, axes in axes_by_part.items():
                fqn = get_fqn(part)
                self.split_axes[fqn] = self.split_axes.get(fqn, frozenset()) | axes
        whole = [param for param in _find_stacked(axes_by_row) if experts is None or param.args[0] in experts]
        if stacked := {param: axes for param in whole if (axes := self.split_axes[param.args[0]])}:
            self.terms.mark_routed(stacked)
            self._slices.clear()

    def find_live_nodes(self) -> set[fx.Node]:
        """Return the nodes that outputs and effects depend on."""
        return collect_ancestors(*self.outputs)


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
        term = term.operands[0]
    return frozenset(axis for axis in axes if axis < len(term.shape))
