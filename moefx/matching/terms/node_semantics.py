"""Terms of the nodes of a captured graph, by the rules in `op_rules`. A node without a rule is opaque (`node`)."""

# torch.fx types the arguments of a node as a wide union, and this code knows the op and so the type.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportReturnType=false, reportOperatorIssue=false, reportUnhashable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.node_origins import is_abstract
from ...ir.expressions.expression_check import is_pointwise
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import SELECTION_DIMS, Line, follows_from_integers, follows_from_state, line
from .normal_form import Terms
from .op_rules import RULES
from .op_rules.axis_reductions import batch_norm, norm
from .op_rules.indexing import gather
from .term import Operand, Term

_LARGEST_ARRAY = 1 << 22
_MOVED = {
    "_to_copy", "expand", "permute", "reshape", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


def find_conditions(nodes: list[fx.Node]) -> set[fx.Node]:
    """Find comparisons of abstract floats (`h > 0`), and pointwise functions of these alone: `(h > 0).float()`.

    Excluded are comparisons on which anything else depends, such as the selected rows or their number.
    """
    conditions: set[fx.Node] = set()
    for n in nodes:
        val = n.meta.get("val")
        if n.op != "call_function" or not isinstance(val, torch.Tensor):
            continue
        if not is_pointwise(n.target) and get_op_name(n) not in _MOVED:
            continue
        is_comparison = val.dtype is torch.bool and any(is_abstract(a) for a in n.all_input_nodes)
        # terms have no integer arithmetic
        is_function = follows_from_integers(n) and (val.dtype is torch.bool or val.is_floating_point())
        if is_comparison or (is_function and not conditions.isdisjoint(n.all_input_nodes)):
            conditions.add(n)
    for n in reversed(nodes):
        if n in conditions and any(follows_from_integers(user) and user not in conditions for user in n.users):
            conditions.remove(n)
    return conditions


class Semantics:
    """The terms of the nodes of one captured graph, built on demand and in program order.

    Args:
        nodes: the nodes of the capture.
        concrete_value: returns a node's values under the routing of the capture.
        keeps_comparisons: treat comparisons (see `find_conditions`) as part of an activation: they become terms. By
            default they have their values under this routing, as if they selected experts.
        opaque_lines: lines whose nodes are opaque.
    """

    def __init__(
        self, nodes: list[fx.Node], concrete_value: Callable[[fx.Node], torch.Tensor], keeps_comparisons: bool = False,
        opaque_lines: frozenset[Line] = frozenset(),
    ):  # fmt: skip
        self.terms = Terms()
        self.nodes, self.concrete_value, self.opaque_lines = nodes, concrete_value, opaque_lines
        self.conditions = find_conditions(nodes) if keeps_comparisons else set()
        self._term_by_node: dict[fx.Node, Term] = {}

    def get_term(self, node: fx.Node) -> Term:
        """Return the term of a node, not resolved."""
        if node not in self._term_by_node:
            needed, stack = set(), [node]
            while stack:
                n = stack.pop()
                if n not in needed and n not in self._term_by_node:
                    needed.add(n)
                    if not follows_from_integers(n) or n in self.conditions:
                        stack.extend(n.all_input_nodes)
            for n in sorted(needed, key=lambda n: n.meta["index"]):
                self._term_by_node[n] = self._build(n)
        return self._term_by_node[node]

    def opaque(self, node: fx.Node) -> Term:
        """Return a term that stands for the node itself."""
        val = node.meta.get("val")
        return self.terms.make("node", (node,), tuple(val.shape) if isinstance(val, torch.Tensor) else ())

    def _build(self, node: fx.Node) -> Term:
        """Build the term of a node whose inputs have theirs.

        Parameters and buffers are leaves, known integers are arrays, ops follow their rule in `RULES` or, if they are
        pointwise, their schema. All else is opaque.
        """
        val = node.meta.get("val")
        if node.op == "get_attr" and node.meta["kind"] in ("param", "buffer") and isinstance(val, FakeTensor):
            return self.terms.make(node.meta["kind"], (node.meta["fqn"],), tuple(val.shape))
        if isinstance(val, torch.Tensor) and not isinstance(val, FakeTensor) and node not in self.conditions:
            return self.terms.array(val) if val.numel() <= _LARGEST_ARRAY else self.opaque(node)
        # `torch.tensor(0.5)` acts like a number; literals of 16 bits would round
        if node.meta.get("literal") and val.dim() == 0 and val.dtype.itemsize > 2:
            return self._build_array(node)
        if not isinstance(val, torch.Tensor) or node.op != "call_function":
            return self.opaque(node)
        if node.meta.get("opaque") or line(node) in self.opaque_lines:
            return self._build_unexplained(node)
        name = get_op_name(node)
        if name.startswith(("empty", "new_empty")):
            return self.terms.const(math.nan, val.shape)
        is_input = name not in RULES or not node.all_input_nodes or node.meta.get("forced")
        if follows_from_integers(node) and node not in self.conditions and is_input:
            return self._build_array(node)
        if name == "getitem":
            return self._build_result(node)
        if not val.numel():  # the rows of an idle expert: no term has an element of them
            return self.opaque(node)
        rule = RULES.get(name)
        if any(isinstance(a, complex) for a in node.args):
            out = self._build_unexplained(node)
        elif rule is not None:
            args = [self.value(a) for a in node.args]
            kwargs = {k: self.value(v) for k, v in node.kwargs.items()}
            out = rule(self, node, *args, **kwargs)
        elif is_pointwise(node.target):
            out = self._build_pointwise(node)
        else:
            out = self._build_unexplained(node)
        if out is not None and out.op != "node" and not node.meta["grad"] and not node.meta.get("from_integers"):
            out = self.terms.pointwise("detach", out)
        assert out is None or out.shape == tuple(val.shape), (node, node.target, out.shape, val.shape)
        return out if out is not None else self._build_unexplained(node)

    def value(self, a: Any) -> Any:
        """Convert an argument of a node: nodes become terms."""
        if isinstance(a, fx.Node):
            return self._term_by_node.get(a) or (self.get_term(a) if isinstance(a.meta.get("val"), torch.Tensor) else a)
        if isinstance(a, (list, tuple)):
            return [self.value(x) for x in a]
        return a

    def _build_array(self, node: fx.Node) -> Term:
        val = node.meta["val"]
        if val.numel() > _LARGEST_ARRAY:
            return self.opaque(node)
        return self.terms.array(self.concrete_value(node))

    def numbers(self, node: Any) -> torch.Tensor:
        """Return an integer argument under the routing of the capture."""
        return torch.as_tensor(node.meta["val"] if isinstance(node, fx.Node) else node, dtype=torch.int64)

    def _build_pointwise(self, node: fx.Node) -> Term:
        packet, overload = get_op_name(node), node.target._overloadname
        items = tuple(self.value(a) for a in node.args)
        return self.terms.pointwise(f"{packet}.{overload}", *items, **dict(node.kwargs))

    def _build_result(self, node: fx.Node) -> Term:
        """Build one result of an op with several. Selected values are a gather by the concrete indices."""
        bundle, i = node.args
        name = get_op_name(bundle)
        if i == 0 and name in ("max", "min") and all(u.args[1] == 0 or not u.users for u in bundle.users):
            dim, keep = SELECTION_DIMS[name](bundle)
            largest = self.terms.axis_op(name, [dim], False, (), self.value(bundle.args[0]))
            return self.terms.reshape(largest, node.meta["val"].shape)
        if i == 0 and name in SELECTION_DIMS:
            dim, keep = SELECTION_DIMS[name](bundle)
            source = self.value(bundle.args[0])
            picked = self.concrete_value(bundle)[1]
            dim %= max(1, len(source.shape))
            if not keep:
                picked = picked.unsqueeze(dim)
            out = gather(self.terms, source, dim, picked)
            out = out if keep else self.terms.reshape(out, node.meta["val"].shape)
            return out if bundle.meta["grad"] else self.terms.pointwise("detach", out)
        if i == 0 and name == "log_sigmoid_forward":
            return self.terms.pointwise("log_sigmoid.default", self.value(bundle.args[0]))
        if i == 0 and name in ("native_layer_norm", "_fused_rms_norm"):
            return norm(self, bundle)
        if i == 0 and name == "native_batch_norm" and not bundle.args[5]:
            return batch_norm(self, bundle) or self._build_unexplained(node)
        if i == 0 and name == "native_dropout" and (not bundle.args[2] or bundle.args[1] == 0):
            return self.value(bundle.args[0])
        return self._build_unexplained(node)

    def _build_unexplained(self, node: fx.Node) -> Term:
        """Build a node without a rule: a `call` if it depends on parameters and buffers only, else an opaque term.

        A call of an op on normalised or quantised weights gives each expert a value of its own.
        """
        if not follows_from_state(node):
            return self.opaque(node)
        call, part = (node.args[0], node.args[1]) if get_op_name(node) == "getitem" else (node, None)
        operands: list[Term] = []

        def static(a: Any) -> Any:
            if isinstance(a, fx.Node):
                operands.append(self.value(a))
                return Operand(len(operands) - 1)
            return tuple(map(static, a)) if isinstance(a, (list, tuple)) else a

        args = static(call.args)
        kwargs = tuple((k, static(v)) for k, v in sorted(call.kwargs.items()))
        if not all(isinstance(o, Term) and o.op not in ("const", "array") for o in operands):
            return self.opaque(node)
        return self.terms.make("call", (call.target, args, kwargs, part, *operands), node.meta["val"].shape)
