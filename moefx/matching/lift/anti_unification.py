"""Anti-unification: find one function F that has the summands of all tokens and slots as instances.

`Skeletons` sorts summands by skeleton. `Unifier` walks the summands of one skeleton in parallel: equal parts go into
the body as they are, parts that differ become leaves (a value per token and slot, or a parameter slice per expert)::

    relu(x[0] @ experts.0.weight) * weights[0, 0]  # token 0, slot 0, expert 0
    relu(x[1] @ experts.2.weight) * weights[1, 0]  # token 1, slot 0, expert 2
    relu(value 0 @ expert 0) * value 1             # their body

Value 0 is read off `x`, value 1 off `weights`, and the table of leaf `expert 0` has a weight for each expert.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from ...errors import Cause, Refused
from ..facts.graph_nodes import is_matrix_of_integers, is_random
from ..terms.parameter_slices import ParameterSlice, get_fqn, is_parameter_slice, is_state_slice
from ..terms.term import Term, constant_value, format_term
from .canonical_form import Body, CapturedGroup, NodeRef, SlotPosition
from .expert_owners import ExpertOwners
from .value_lookup import ValueLookup

Positions = list[SlotPosition]  # of each summand


class Skeletons:
    """Numbers the skeletons of terms: the ops, without the rows, weights and parameters they apply to.

    Args:
        list_rows: gives the rows of a shape of nodes outside the routed region.
    """

    def __init__(self, list_rows: Callable[[tuple[int, ...]], Collection[Term]]):
        self.list_rows = list_rows
        self._numbers: dict[Term, int] = {}
        self._by_skeleton: dict[Any, int] = {}

    def number_skeleton(self, t: Term) -> int:
        """Return a number that terms with equal skeletons share."""
        number = self._numbers.get(t)
        if number is None:
            if t in self.list_rows(t.shape):
                skeleton: Any = ("row", t.shape)
            elif is_state_slice(t) and (is_parameter_slice(t) or math.prod(t.shape) > 1):
                skeleton = ("parameter", t.shape)
            elif math.prod(t.shape) == 1 and t.op != "const":
                skeleton = ("scalar",)
            elif t.op in ("node", "select"):
                skeleton = (t.op, t.shape)
            else:
                skeleton = (t.op, t.shape, *[self.number_skeleton(a) if isinstance(a, Term) else a for a in t.args])
            number = self._numbers[t] = self._by_skeleton.setdefault(skeleton, len(self._by_skeleton))
        return number


def _describe(t: Term) -> str:
    """Return a short name of a term, with its shape."""
    match t.op:
        case "pointwise" | "axis_op":
            name = f"{t.args[0].removesuffix('.default')}(...)"
        case "param" | "buffer" | "const":
            name = format_term(t)
        case "einsum":
            name = "a matrix product"
        case _:
            name = f"{t.op}(...)"
    return f"{name} of shape {list(t.shape)}" if t.shape else name


def _find_origin(t: Term) -> Term:
    """Return the first tensor of the program or of the state that a term is computed from; numbers if there is none."""
    stack, numbers = [t], t
    while stack:
        term = stack.pop()
        if not term.operands and term.op not in ("array", "const"):
            return term
        numbers = numbers if term.operands else term
        stack += reversed(term.operands)
    return numbers


class Unifier:
    """Builds the body, tables and values of one group of experts.

    Args:
        owners: the experts' parameters; parameters that differ by expert are added to them.
        lookup: finds the nodes that supply values.
        expert_nodes: nodes that are computed from the experts' parameters.
    """

    def __init__(self, owners: ExpertOwners, lookup: ValueLookup, expert_nodes: set[fx.Node]):
        self.owners, self.lookup, self.expert_nodes = owners, lookup, expert_nodes
        self.experts = owners.experts
        self.tables: list[dict[int, ParameterSlice]] = []
        self.values: list[NodeRef] = []
        self.bodies: dict[tuple[Term, ...], Body] = {}

    def unify_group(self, members: list[tuple[int, int, Term]], ids: list[list[int]]) -> CapturedGroup:
        """Anti-unify summands.

        Args:
            members: (token, slot, summand) of each.
            ids: the selected experts, by token and slot.

        Raises:
            Refused: the summands differ in more than values and expert parameters.
        """
        positions = [(t, k, ids[t][k]) for t, k, _ in members]
        body = self._unify(positions, [m for _, _, m in members])
        return CapturedGroup(sorted({e for _, _, e in positions}), body, self.tables, self.values)

    def _unify(self, positions: Positions, terms: list[Term]) -> Body:
        """Return the body of some terms: a leaf if a parameter or a node supplies them, else their common op.

        Args:
            positions: (token, slot, expert) of each term.
        """
        first = terms[0]
        key = tuple(terms)
        if key in self.bodies:
            return self.bodies[key]
        same = all(t is first for t in terms)
        if first.op == "const" and same:
            return Body("const", (constant_value(first),), first.shape)
        of_experts = any(get_fqn(t) in self.experts for t in terms)
        if all(is_parameter_slice(t) for t in terms) and (
            of_experts or (same and not self._is_looked_up(positions, terms))
        ):
            body = self._add_table(positions, terms, same)
        elif (ref := self.lookup.find(positions, terms)) is not None:
            body = self._add_value(ref, first)
        elif all(is_state_slice(t) for t in terms):
            body = self._add_table(positions, terms, same)
        else:
            try:
                body = self._decompose(positions, terms)
            except Refused:
                # the last resort: a vector per slot, which the program computes for all slots at once
                if first.op == "const" or (ref := self.lookup.find(positions, terms, may_differ_by_slot=True)) is None:
                    raise
                body = self._add_value(ref, first)
        self.bodies[key] = body
        return body

    def _add_value(self, ref: NodeRef, term: Term) -> Body:
        if ref not in self.values:
            self.values.append(ref)
        return Body("value", (self.values.index(ref),), term.shape)

    def _is_looked_up(self, positions: Positions, terms: list[Term]) -> bool:
        """Return whether a parameter slice is a row that tokens look up, as from an embedding, also in the hint.

        One token, or several equal tokens, always look up the same slice, so that it seems to be a constant.
        """
        ref = self.lookup.find(positions, terms)
        return ref is not None and ref.position in self.lookup.hint_positions

    def _decompose(self, positions: Positions, terms: list[Term]) -> Body:
        """Unify the arguments of terms with one op.

        Raises:
            Refused: ops, shapes or static arguments differ, or an element belongs to another row.
        """
        first = terms[0]
        for t in terms:
            if t.op != first.op or t.shape != first.shape or len(t.args) != len(first.args):
                raise Refused(
                    f"experts do not compute the same function: {_describe(first)} in one, {_describe(t)} in another",
                    culprits=tuple(str(p) for p in {*self.owners.find_key(first), *self.owners.find_key(t)})[:4],
                    remedy="give all experts the same forward",
                )
        if first.op in ("node", "index_put", "index", "array"):
            raise self._explain_foreign(first)
        if first.op == "select" and (first.args[0].op == "node" or any(t.args[1] != first.args[1] for t in terms)):
            raise self._explain_foreign(first)
        args: list[Any] = []
        for position, a in enumerate(first.args):
            column = [t.args[position] for t in terms]
            if isinstance(a, Term):
                args.append(self._unify(positions, column))
            elif all(c == a for c in column):
                args.append(a)
            else:
                other = next(c for c in column if c != a)
                raise Refused(
                    f"a constant inside the experts depends on the routing: {a!r} and {other!r}",
                    remedy="compute it for all slots as a tensor, and multiply the routing weights by it, as in "
                    "weights * counts[ids]",
                )
        return Body(first.op, tuple(args), first.shape)

    def _add_table(self, positions: Positions, terms: list[Term], same: bool) -> Body:
        """Return a `shared` leaf for a parameter of all experts, else an `expert` leaf with a table of slices.

        Raises:
            Refused: an expert uses two slices, or the slices differ in shape.
        """
        shape = terms[0].shape
        if same and get_fqn(terms[0]) not in self.experts:
            return Body("shared", (ParameterSlice.from_term(terms[0]),), shape)
        self.experts.update(get_fqn(t) for t in terms)
        table: dict[int, ParameterSlice] = {}
        for (_, _, e), t in zip(positions, terms, strict=True):
            part = ParameterSlice.from_term(t)
            if table.setdefault(e, part) != part:
                raise Refused(
                    f"expert {e} uses {part} for one token and {table[e]} for another",
                    culprits=(part.fqn,),
                    remedy="select the parameters of an expert by its number only",
                )
            if t.shape != shape:
                raise Refused(
                    "experts have parameters of different shapes",
                    culprits=(str(part), str(next(iter(table.values())))),
                    remedy="give all experts parameters of one shape",
                )
        if table not in self.tables:
            self.tables.append(table)
        return Body("expert", (self.tables.index(table),), shape)

    def _explain_foreign(self, t: Term) -> Refused:
        """Explain a part of a summand that does not follow from the token's own row."""
        expert_nodes = sorted(self.expert_nodes, key=lambda n: n.meta["index"])
        if quantised := [a for n in expert_nodes for a in n.all_input_nodes if is_matrix_of_integers(a)]:
            names = dict.fromkeys(str(root.meta["fqn"]) for a in quantised for root in a.all_input_nodes)
            return Refused(
                "the experts' weights are computed from integers (quantised?), which a capture treats as lookup tables",
                culprits=tuple(names)[:3],
                source=str(quantised[0].meta["source"]),
                remedy="keep the weights of experts as floats",
            )
        base, source = _find_origin(t), ""
        origin = "numbers that the routing decides"
        if base.op == "node":
            node = base.args[0]
            maker = node.args[0] if node.target is operator.getitem else node
            name = getattr(maker.target, "__name__", str(maker.target))
            source = "" if node.op == "placeholder" else str(node.meta["source"])
            if maker.meta.get("opaque"):
                function = getattr(maker.target, "__self__", None)
                return Refused(
                    f"the autograd function {getattr(function, '__name__', name)} computes a part of an expert, and a "
                    "capture does not look into it",
                    source=source,
                    remedy="compute it by torch ops, such as F.silu, without torch.autograd.Function",
                    cause=Cause.FOREIGN_ROW,
                )
            if node in self.expert_nodes or is_random(node):
                return Refused(
                    f"the experts' computation goes through {name}, which is not row by row",
                    culprits=(name,),
                    source=str(node.meta["source"]),
                    remedy="compute each output row of an expert from one input row",
                )
            if node.op == "get_attr" and node.meta["kind"] == "attribute":
                fqn = str(node.meta["fqn"])
                return Refused(
                    f"an expert computes with the tensor in the attribute {fqn}, which is neither a parameter nor a "
                    "buffer",
                    culprits=(fqn,),
                    remedy=f'register it: self.register_buffer("{fqn.rpartition(".")[2]}", tensor)',
                )
            if node.op == "placeholder":
                origin = f"the argument {name}"
            elif node.op == "get_attr" and node.meta["kind"] == "constant":
                origin = "a tensor that is neither a parameter nor a buffer of the block"
            else:
                origin = f"the result of {name}"
        elif is_state_slice(base):
            origin = f"a part of {base.args[0]}"
        if t.op == "select":
            index_text = ", ".join(str(i) for _, i in t.args[1])
            origin = f"element [{index_text}] of {origin}"
        return Refused(
            f"an output row depends on more than its own input row: {origin}",
            source=source,
            remedy="compute each output row of an expert from one input row",
            cause=Cause.FOREIGN_ROW,
        )
