"""Re-emit the residual, the user's own code: router, shared experts, auxiliary losses, buffer updates.

`residual_walk` lists the nodes to emit. If the captures differ in a size, the size becomes an expression over the input
sizes. Any other difference was baked in by one routing, and is refused. A submodule call wholly outside of the experts
is emitted as a call of that module, so its hooks fire.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.environment.device_autocast import get_autocast_dtype
from ...capture.tracing.capture_result import SubmoduleCall
from ...errors import Refused
from ...ir.node_values import get_op_name
from ...ir.passed_objects import check_structure, check_tensor, get_name, is_passed
from ...matching.facts.graph_nodes import is_skipped
from ...matching.results.capacity_formulas import find_formula
from ...matching.results.match_result import Match
from ...matching.results.size_samples import SizeSamples
from ...util.tensor_trees import is_float
from .aligned_nodes import AlignedNodes, list_leaf_nodes
from .residual_walk import LOOP_OVER_STEPS, ResidualWalk
from .scalar_reads import ARITHMETIC, RuntimeScalar, ScalarReads
from .size_expressions import ArgumentPath, SizeExpressions, extend_path
from .submodule_calls import get_at_path, list_leaf_paths

aten = torch.ops.aten


class ResidualGraph:
    """The graph under construction, and the map from captured nodes to its nodes.

    Args:
        make_cut: emits the cut, the node at which all routed rows are summed; called when the walk reaches it.
    """

    def __init__(self, match: Match, samples: SizeSamples, make_cut: Callable[[], fx.Node]):
        self.match = match
        self.captures = [form.capture for form in match.forms]
        self.graph = fx.Graph()
        self.new_nodes: dict[fx.Node, fx.Node] = {}  # node of the first capture -> emitted node
        self.make_cut = make_cut
        self.fake_mode = self.captures[0].fake_mode
        self.inputs: dict[int, fx.Node] = {}
        self.reads = ScalarReads(self.captures)
        self.walk = ResidualWalk(match, self.reads)
        self.cut = self.walk.cut
        self.sizes = SizeExpressions(match, samples, self.graph, self.inputs, self.walk.aligned, self.new_nodes)
        self.device: fx.Node | None = None

    # ------------------------------------------------------------------ inputs
    def add_inputs(self, names: Sequence[str]) -> None:
        """Add placeholders for all tensor arguments of the block, in order."""
        for position, name in enumerate(names):
            node = self.graph.placeholder(name)
            self.inputs[position] = node
            aligned = AlignedNodes(
                next(n for n in c.nodes if n.op == "placeholder" and n.meta["position"] == position)
                for c in self.captures
            )
            node.meta.update(self.build_meta(aligned))
            self.new_nodes[aligned.first] = node

    def add_objects(self, names: Mapping[int, str]) -> None:
        """Add placeholders for objects that are only passed on, by the ids of their stand-ins."""
        self.objects = {stand_in: self.graph.placeholder(name) for stand_in, name in names.items()}

    # ------------------------------------------------------------------ emitting
    def emit(self, plan: list[Any]) -> None:
        for item in plan:
            if isinstance(item, list):
                self._emit_call(item)
            elif item.first is self.cut.first:
                self.new_nodes[item.first] = self.make_cut()
            elif item.first not in self.new_nodes:
                self.new_nodes[item.first] = self._emit_node(item)

    def get_node(self, n: fx.Node) -> fx.Node:
        return self.new_nodes[n]

    def _emit_node(self, aligned: AlignedNodes) -> fx.Node:
        n = aligned.first
        if n.op == "get_attr":
            if len({t.meta["fqn"] for t in aligned}) != 1:
                raise Refused(
                    "different parameters are used under different routings",
                    culprits=tuple(t.meta["fqn"] for t in aligned),
                    source=str(next(iter(n.users)).meta["source"]),
                    remedy="run the same operations in every call, and choose between their results by torch.where",
                )
            if n.meta["kind"] == "constant":
                return self._emit_literal(aligned)
            out = self.graph.get_attr(n.meta["fqn"])
            out.meta.update(self.build_meta(aligned))
            return out
        line = str(n.meta["source"])
        if "sparse" in get_op_name(n):
            raise Refused(
                "sparse tensors are not followed",
                culprits=(get_op_name(n),),
                source=line,
                remedy="compute with dense tensors",
            )
        scalar = self.reads.find([t.args[1] for t in aligned]) if n.target in ARITHMETIC else None
        source: Any = n.args[0] if n.args else None
        if scalar is not None and is_float(source.meta["val"]):
            return self._emit_with_scalar(aligned, scalar)
        args = self.merge_values([t.args for t in aligned], line, (aligned, "args"))
        kwargs = self.merge_values([dict(t.kwargs) for t in aligned], line, (aligned, "kwargs"))
        kwargs.pop("pin_memory", None)
        kwargs.pop("layout", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = self.emit_input_device()
        if "device" in kwargs and kwargs["device"] is None:
            kwargs.pop("device")
        if not n.all_input_nodes and "device" not in kwargs and _makes_tensor(n):
            kwargs["device"] = self.emit_input_device()
        target = n.target if len({str(t.target) for t in aligned}) == 1 else aten.reshape.default
        val = n.meta.get("val")
        out = self.call(target, args, kwargs, self.build_meta(aligned))
        if isinstance(val, FakeTensor) and n.all_input_nodes:
            self._mark_autocast(out, n.meta["autocast"])
        if not n.meta["grad"] and isinstance(val, FakeTensor) and n.all_input_nodes:
            out = self.call(aten.detach.default, (out,), {}, self.build_meta(aligned))
        return out

    def _emit_with_scalar(self, aligned: AlignedNodes, scalar: RuntimeScalar) -> fx.Node:
        """Emit an op such as `x * c` whose number Python read from a tensor: use the tensor, without its gradient.

        In half precision the op runs in float32, as torch's ops with numbers do.
        """
        n = aligned.first
        source: Any = n.args[0]
        x, meta, dtype = self.new_nodes[source], self.build_meta(aligned), n.meta["val"].dtype
        number = self.call(aten.detach.default, (self.new_nodes[scalar.aligned.first],), {}, {})
        number = self.call(aten._to_copy.default, (number,), {"dtype": torch.float64}, {})
        number = self.call(aten.reshape.default, (number, []), {}, {})
        if scalar.transform is not None:
            number = self.call(scalar.transform, (number,), {}, {})
        if dtype.itemsize >= 4:
            out = self.call(n.target, (x, number), dict(n.kwargs), meta)
        else:
            x = self.call(aten._to_copy.default, (x,), {"dtype": torch.float32}, {})
            out = self.call(n.target, (x, number), dict(n.kwargs), {})
            out = self.call(aten._to_copy.default, (out,), {"dtype": dtype}, meta)
        return out if n.meta["grad"] else self.call(aten.detach.default, (out,), {}, meta)

    def _emit_literal(self, aligned: AlignedNodes) -> fx.Node:
        values = [c.constants[t.meta["fqn"]] for c, t in zip(self.captures, aligned, strict=True)]
        value = values[0]
        if (counts := self._emit_load(aligned, values)) is not None:
            return counts
        if value.is_meta or value.numel() > 4096:
            raise Refused(
                "a tensor that is neither a parameter, a buffer nor an attribute of the block is too large",
                source=str(aligned.first.meta["source"]),
                remedy="register it as a buffer",
            )
        if any(v.shape != value.shape or not torch.equal(v, value) for v in values[1:]):
            if (size := self._emit_size(aligned, values)) is not None:
                return size
            source = aligned.first.meta["source"]
            raise Refused(
                f"Python makes a tensor of numbers that differ with the sizes or the routing: {source.text}",
                source=str(source),
                remedy="compute with the numbers themselves, as in weights / x.shape[0], or make the tensor of tensors",
            )
        meta = self.build_meta(aligned)
        return self.call(
            torch.tensor, (value.tolist(),), {"dtype": value.dtype, "device": self.emit_input_device()}, meta
        )

    def _emit_size(self, aligned: AlignedNodes, values: list[torch.Tensor]) -> fx.Node | None:
        """Emit a tensor of a number that follows from sizes: `torch.tensor(x.shape[0])`. None for other numbers."""
        if any(v.dim() or int(v) != v for v in values):
            return None
        points = [(sizes, int(v)) for sizes, v in zip(self.match.sizes, values, strict=True)]
        if (formula := find_formula(points, self.match.expressions, try_linear=False)) is None:
            return None
        kwargs = {"dtype": values[0].dtype, "device": self.emit_input_device()}
        return self.call(aten.full.default, ([], self.sizes.emit_formula(formula)), kwargs, self.build_meta(aligned))

    def _emit_load(self, aligned: AlignedNodes, values: list[torch.Tensor]) -> fx.Node | None:
        """Emit the number of tokens of each expert, which Python counted: `tensor([len(rows) for rows in ...])`. None
        for other numbers."""
        if values[0].dim() != 1:
            return None
        index, E = self.match.forms[0].expert_index, len(values[0])
        token_counts = [torch.bincount(form.ids[form.ids >= 0], minlength=E) for form in self.match.forms]
        is_load = all(
            v.shape == c.shape and torch.equal(v.to(c.dtype), c) for v, c in zip(values, token_counts, strict=True)
        )
        if not is_load or index.columns or {"m", "s"} & set(index.axes) or index.node not in self.new_nodes:
            return None
        with self.fake_mode:
            range_meta = {"val": torch.empty(E, dtype=torch.int64)}
        ids = self.call(aten.reshape.default, (self.new_nodes[index.node], [-1, 1]), {}, {})
        numbers = self.call(aten.arange.default, (E,), {"device": self.emit_input_device()}, range_meta)
        hits = self.call(aten.eq.Tensor, (ids, numbers), {}, {})
        counts = self.call(aten.sum.dim_IntList, (hits, [0]), {}, {})
        return self.call(aten._to_copy.default, (counts,), {"dtype": values[0].dtype}, self.build_meta(aligned))

    def _emit_call(self, call: list[SubmoduleCall]) -> None:
        first = call[0]
        description = f"module {first.fqn}"
        args = self.merge_values([c.args for c in call], description)
        kwargs = self.merge_values([c.kwargs for c in call], description)
        node = self.graph.call_module(first.fqn, tuple(args), kwargs)
        self._mark_autocast(node, first.autocast)
        if any(is_skipped(n) for n in self.captures[0].nodes[first.start : first.stop]):
            self._emit_checked(call, node)
            return
        leaves = [list_leaf_nodes(c.out) for c in call]
        if isinstance(first.out, fx.Node):
            aligned = AlignedNodes(column[0] for column in leaves)
            node.meta.update(self.build_meta(aligned))
            self._bind_call(aligned, node)
            return
        node.meta["source"] = ""
        for path, leaf in list_leaf_paths(first.out):
            aligned = AlignedNodes(get_at_path(c.out, path) for c in call)
            if leaf not in self.walk.call_by_result or self.walk.call_by_result[leaf] is not call:
                continue
            part = node
            for key in path:
                if isinstance(key, str) and key.startswith("."):
                    part = self.call(getattr, (part, key[1:]), {}, {})
                else:
                    part = self.call(operator.getitem, (part, key), {}, {})
            part.meta.update(self.build_meta(aligned))
            self._bind_call(aligned, part)

    def _emit_checked(self, call: list[SubmoduleCall], node: fx.Node) -> None:
        """Emit the results of a submodule that the captures skipped, with checks of their recorded structure."""
        first = call[0]
        stub: Any = next(n for n in self.captures[0].nodes[first.start : first.stop] if is_skipped(n))
        rules, *inputs = stub.args
        if not stub.meta["grad"]:
            raise Refused(
                f"{first.fqn} gets an object that it may write to, and is called under no_grad",
                source=str(stub.meta["source"]),
                remedy=f"put no_grad into the forward of {first.fqn}",
            )
        remaining_rules = iter(rules)
        container = type(first.out).__name__ if isinstance(first.out, (tuple, list)) else ""
        results = list(first.out) if container else [first.out]
        vals = [r.meta["val"] if isinstance(r, fx.Node) else r for r in results]
        node.meta.update(source=str(stub.meta["source"]), val=type(first.out)(vals) if container else vals[0])
        are_none = [r is None for r in results]
        checked = self.call(check_structure, (node, are_none, container, first.fqn), {}, {})
        columns = zip(*[c.out for c in call], strict=True) if container else [[c.out for c in call]]
        for i, column in enumerate(columns):
            if column[0] is None:
                continue
            part = self.call(operator.getitem, (checked, i), {}, {}) if container else checked
            if is_passed(column[0]):
                self.objects |= {id(stand_in): part for stand_in in column}
                continue
            rule, aligned = next(remaining_rules), AlignedNodes(column)
            template = self.new_nodes[inputs[rule.template]]
            part = self.call(check_tensor, (part, template, rule.dtype, first.fqn), {}, self.build_meta(aligned))
            self._bind_call(aligned, part)

    def _find_object(self, values: Sequence[Any], line: str) -> fx.Node:
        """Return the node of an object from the block's arguments or from a submodule's result."""
        nodes = {self.objects.get(id(v)) for v in values}
        if (node := nodes.pop()) is None or nodes:
            reason = f"which object is passed on depends on the routing: {get_name(values[0])}"
            raise Refused(reason, source=line, remedy="pass the same object in every call")
        return node

    def _mark_autocast(self, node: fx.Node, dtype: torch.dtype | None) -> None:
        """Mark a node that runs under another autocast than the block."""
        if dtype != get_autocast_dtype():
            node.meta["autocast"] = dtype

    def _bind_call(self, aligned: AlignedNodes, node: fx.Node) -> None:
        if not aligned.first.meta["grad"] and isinstance(aligned.first.meta.get("val"), FakeTensor):
            node = self.call(aten.detach.default, (node,), {}, dict(node.meta))
        self.new_nodes[aligned.first] = node

    def call(self, target: Any, args: tuple, kwargs: dict[str, Any], meta: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta.update(meta)
        return node

    def emit_input_device(self) -> fx.Node:
        if self.device is None:
            source = next(iter(self.inputs.values()))
            self.device = self.call(getattr, (source, "device"), {}, {})
        return self.device

    # ------------------------------------------------------------------ values that may differ between captures
    def merge_values(self, values: Sequence[Any], line: str, path: ArgumentPath | None = None) -> Any:
        """Turn an argument of all captures into one of the graph. Sizes that differ become nodes.

        Args:
            line: the user's source line, for messages. path: the argument's path in its node.
        """
        first = values[0]
        if is_passed(first):
            return self._find_object(values, line)
        if isinstance(first, fx.Node):
            return self.new_nodes[first]
        if isinstance(first, (list, tuple)):
            if any(len(v) != len(first) for v in values):
                raise Refused(
                    "code outside the experts depends on the routing or on sizes: a list changes its length",
                    source=line,
                    remedy=LOOP_OVER_STEPS,
                )
            items = [
                self.merge_values(column, line, extend_path(path, i))
                for i, column in enumerate(zip(*values, strict=True))
            ]
            return type(first)(items) if type(first) in (list, tuple) else items
        if isinstance(first, dict):
            return {k: self.merge_values([v[k] for v in values], line, extend_path(path, k)) for k in first}
        if isinstance(first, slice):
            return slice(*[self.merge_values([getattr(v, a) for v in values], line) for a in ("start", "stop", "step")])
        if isinstance(first, int) and not isinstance(first, bool):
            return self.sizes.emit_integer([int(v) for v in values], line, path)
        if self.reads.find(values) is not None:
            raise Refused(
                f"a number that Python read from a tensor is used: {first!r}",
                source=line,
                remedy="use the tensor itself, not its .item() or float()",
            )
        if type(first) is float and (node := self.sizes.emit_float(list(values), path)) is not None:
            return node
        if isinstance(first, torch.Tensor):
            raise Refused(
                f"a tensor of {list(first.shape)} comes from another call, or a submodule that the capture skips",
                source=line,
                remedy="return tensors that this call computes, and use a cache only in the submodule that gets it",
            )
        if any(v is not first and v != first for v in values):
            raise Refused(
                f"a constant depends on the routing: {first!r} and {next(v for v in values if v != first)!r}",
                source=line,
                remedy="compute it as a tensor, by torch operations on the routing",
            )
        return float(first) if isinstance(first, float) else first

    # ------------------------------------------------------------------ shapes in letters
    def build_meta(self, aligned: AlignedNodes) -> dict[str, Any]:
        """Return the `meta` of a new node: source, fake value and letters."""
        n = aligned.first
        val = n.meta.get("val")
        meta: dict[str, Any] = {"source": str(n.meta["source"])} if n.op == "call_function" else {}
        if isinstance(val, torch.Tensor):
            meta["val"] = self.make_fake(val)
            shapes = [tuple(t.meta["val"].shape) for t in aligned]
            if len({len(s) for s in shapes}) == 1:
                meta["letters"] = tuple(self.get_letter(list(column)) for column in zip(*shapes, strict=True))
        return meta

    def get_letter(self, sizes: list[int]) -> str:
        """Return the letter of an axis from its sizes in the captures, or its number."""
        match = self.match
        if len(set(sizes)) > 1:
            tokens = [math.prod(form.tokens) for form in match.forms]
            if sizes == tokens:
                return "S"
            if sizes == [t * match.slots for t in tokens]:
                return "S*K"
            for name in match.arguments.dims:
                if sizes == [s[name] for s in match.sizes]:
                    return {"B": "N", "S": "T"}.get(name, name)  # B and S are rows and tokens in the dialect
            return "n"
        named = (
            {match.slots: "K", match.num_experts: "E", match.arguments.width: "D"}
            if match.slots > 1
            else {match.num_experts: "E", match.arguments.width: "D"}
        )
        return named.get(sizes[0], str(sizes[0]))

    def make_fake(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value
        with self.fake_mode:
            return torch.empty(value.shape, dtype=value.dtype)


def _makes_tensor(n: fx.Node) -> bool:
    schema = getattr(n.target, "_schema", None)
    return schema is not None and any(a.name == "device" for a in schema.arguments)


__all__ = ["ResidualGraph"]
