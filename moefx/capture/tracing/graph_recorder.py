"""Build the functional graph of a capture while the program runs, through its views and in-place updates.

`Recorder` maps each tensor object of the program to the node of its current value. It turns a write to a view into an
update of the base and of all other views.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import CaptureError
from ...util.tensor_trees import collect_tensors, is_float, map_tensors, suspend_modes
from ..environment import device_autocast
from ..environment.code_locations import NOWHERE, Source, find_user_source, find_user_stack
from ..environment.worker_thread import check_interrupt
from ..sizes.size_guards import SizeLog
from ..sizes.symbolic_sizes import unwrap_numbers
from .layout_cache import find_layout, make_key, make_meta_tensor, store_layout
from .node_origins import has_gradients

aten = torch.ops.aten


grad_enabled = torch.is_grad_enabled  # the query itself is patched during capture

_CPU = torch.device("cpu")
_RAGGED = {
    getattr(getattr(aten, name), overload)
    for name in ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
    for overload in getattr(aten, name).overloads()
}


# `node.args = ...` also updates the table of `find_nodes`, although that does not depend on arguments.
_set_args, _set_kwargs = fx.Node.args.__set__, fx.Node.kwargs.__set__  # type: ignore[attr-defined]


DecisionSite = tuple[Source, str, bool]  # location, op, and whether it follows from routing alone


class _Alias:
    """A tensor object of the program: its current node, and the op that made it a view of its base."""

    __slots__ = ("base", "node", "tensor", "version", "view")

    def __init__(self, tensor: torch.Tensor, node: fx.Node, base: torch.Tensor | None, view: tuple[Any, tuple] | None):
        self.tensor, self.node, self.base, self.view = tensor, node, base, view
        self.version = 0


class Recorder(TorchDispatchMode):
    """The graph, and the node of each tensor.

    Attributes:
        aliases: tensors of the program, by id.
        versions: number of writes to each base tensor, by id.
        keep: objects whose ids must stay unique.
        constants: tensors that belong to no module, by name.
        named: paths of plain attributes of modules, by id.
        max_nodes: limit that ends endless loops; 0: no limit.
        autocast: dtype at the program's last call; inside an op, autocast reads as off.
        detached: ids of tensors that share memory with one that has gradients.
        row_counts: numbers of rows that follow from the routing.
        op_numbers: sizes and routed numbers among the arguments of the current op.
        literal_numbers: `op_numbers` of tensors made from Python numbers, by id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        self.aliases: dict[int, _Alias] = {}
        self.versions: dict[int, int] = {}
        self.keep: list[Any] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.named: dict[int, str] = {}
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.max_nodes = 0
        self.autocast = device_autocast.get_autocast_dtype()
        self.sizes = SizeLog()
        self.detached: set[int] = set()
        self.row_counts: set[int] = set()
        self.op_numbers: frozenset[int | float] = frozenset()
        self.literal_numbers: dict[int, frozenset[int | float]] = {}

    def is_own_thread(self) -> bool:
        """Return whether this thread captures. Other threads call the same patched functions, which must not record."""
        return threading.get_ident() == self.thread

    # ------------------------------------------------------------------ nodes
    def emit(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        name = _node_name(target) if type(target) in _NAMED else None
        node = self.graph.create_node("call_function", target, name=name)
        _set_args(node, unwrap_numbers(args))  # not in `create_node`, which searches arguments for symbolic sizes
        if kwargs:
            _set_kwargs(node, unwrap_numbers(kwargs))
        return self.register(node)

    def register(self, node: fx.Node) -> fx.Node:
        """Append a node of the graph to `nodes`, with its source and the modes of the moment."""
        check_interrupt()
        if 0 < self.max_nodes < len(self.nodes):
            source = find_user_source()
            raise CaptureError(f"more than {self.max_nodes} operations, at {source}: {source.text}")
        # the number of rows may follow from the routing
        is_ragged = node.target in _RAGGED or any([a.meta.get("ragged") for a in node.all_input_nodes])
        source = find_user_source()
        if source is NOWHERE:  # a view that is computed again after the call has the source of its inputs
            source = next((a.meta["source"] for a in reversed(node.all_input_nodes)), source)
        node.meta.update(
            index=len(self.nodes),
            source=source,
            grad=grad_enabled(),
            autocast=self.autocast,
            of_sizes=self.op_numbers,
            ragged=is_ragged,
        )
        self.nodes.append(node)
        return node

    def describe(self, node: fx.Node, value: Any, from_integers: bool) -> None:
        if isinstance(value, torch.Tensor):
            node.meta["val"] = value if isinstance(value, FakeTensor) else value.clone()
            node.meta["from_integers"] = from_integers or not is_float(value)
            maker = node.args[0] if node.target is operator.getitem else node
            if value.dim() and getattr(maker, "target", None) in _RAGGED:
                self.row_counts.add(value.shape[0])
        else:
            node.meta["val"] = value

    def track(self, t: torch.Tensor, node: fx.Node, base: torch.Tensor | None = None, view: Any = None) -> None:
        alias = _Alias(t, node, base, view)
        alias.version = self.count_writes(t, alias)
        self.aliases[id(t)] = alias
        self.keep.append(t)

    def find_base(self, t: torch.Tensor, alias: _Alias | None = None) -> torch.Tensor:
        alias = alias or self.aliases[id(t)]
        while alias.base is not None:
            t = alias.base
            alias = self.aliases[id(t)]
        return t

    def count_writes(self, t: torch.Tensor, alias: _Alias) -> int:
        return self.versions.get(id(self.find_base(t, alias)), 0)

    def node_of(self, t: torch.Tensor) -> fx.Node:
        alias = self.aliases.get(id(t))
        if alias is None:
            return self._constant(t)
        if alias.base is not None and alias.version != self.count_writes(t, alias):
            op, args = alias.view  # type: ignore[misc]
            alias.node = self.emit(op, (self.node_of(alias.base), *args), {})
            self.describe(alias.node, t, bool(alias.node.args[0].meta.get("from_integers")))  # type: ignore[union-attr]
            alias.version = self.count_writes(t, alias)
        return alias.node

    def _constant(self, t: torch.Tensor) -> fx.Node:
        """Make a node for an unrecorded tensor: a plain attribute, a closure variable, a literal."""
        if isinstance(t, FakeTensor):
            raise CaptureError(f"a tensor of unknown origin reached {find_user_source()}: {find_user_source().text}")
        name = self.named.get(id(t)) or f"_moefx_constant_{len(self.constants)}"
        node = self.register(self.graph.create_node("get_attr", name.replace(".", "_"), name=None))
        node.meta["fqn"] = name
        node.meta["kind"] = "attribute" if id(t) in self.named else "constant"
        node.meta["literal"] = id(t) in self.literal_numbers
        node.meta["of_sizes"] = self.literal_numbers.get(id(t), frozenset())
        if id(t) not in self.named:
            self.constants[name] = t
        value = t.detach()
        self.describe(node, value, True)
        if is_float(value):
            node.meta["val"] = self.to_fake(value)
        if is_float(value) and node.meta["kind"] == "attribute":  # such as a bias, which may change between calls
            node.meta["original"] = weakref.ref(t)
        else:
            node.meta["concrete"] = value.clone()
        self.track(t, node)
        return node

    def mutate(self, t: torch.Tensor, node: fx.Node) -> None:
        """Set the current value of `t`, and with it that of its base and the base's other views."""
        alias = self.aliases.get(id(t))
        if alias is None:
            self._constant(t)
            alias = self.aliases[id(t)]
        if alias.base is None:
            self.versions[id(t)] = self.versions.get(id(t), 0) + 1
        else:
            self.mutate(alias.base, self._write_back(alias, node))
        alias.node = node
        alias.version = self.count_writes(t, alias)

    def _write_back(self, alias: _Alias, node: fx.Node) -> fx.Node:
        """Emit the base's new value after its view got the value `node`."""
        op, args = alias.view  # type: ignore[misc]
        base = alias.base
        assert base is not None
        packet, base_node = op.overloadpacket, self.node_of(base)
        if packet is aten.select:
            new = self.emit(aten.select_scatter.default, (base_node, node, *args), {})
        elif packet is aten.slice:
            new = self.emit(aten.slice_scatter.default, (base_node, node, *args), {})
        elif packet is aten.diagonal:
            new = self.emit(aten.diagonal_scatter.default, (base_node, node, *args), {})
        elif packet in (
            aten.view,
            aten._unsafe_view,
            aten.reshape,
            aten.squeeze,
            aten.unsqueeze,
            aten.detach,
            aten.alias,
        ):
            new = self.emit(aten.reshape.default, (node, list(base.shape)), {})
        elif packet in (aten.transpose, aten.t):
            new = self.emit(op, (node, *args), {})
        elif packet is aten.permute:
            inverse = [0] * len(args[0])
            for i, d in enumerate(args[0]):
                inverse[d % base.dim()] = i
            new = self.emit(aten.permute.default, (node, inverse), {})
        else:
            raise CaptureError(
                f"in-place update through a view made by {packet}, at {find_user_source()}: {find_user_source().text}"
            )
        self.describe(new, base, bool(node.meta.get("from_integers")) and bool(base_node.meta.get("from_integers")))
        return new

    # ------------------------------------------------------------------ results
    def record_out(
        self,
        func: Any,
        node_args: Any,
        node_kwargs: Any,
        args: tuple,
        out: Any,
        concrete: Any,
        is_view: bool,
        from_integers: bool,
    ) -> Any:
        """Record a call.

        Args:
            args: arguments of the program, which `out` may view.
            out: the result that the program sees.
            concrete: the result under the routing; None if it was not needed.
            from_integers: whether the result follows from routing integers alone.
        """
        if isinstance(out, torch.Tensor):
            if func in (aten._unsafe_view.default, aten.view.default):
                func = aten.reshape.default  # of the value: copies are not recorded
            node = self._emit_op(func, node_args, node_kwargs, out)
            self.describe(node, out, from_integers)
            if concrete is not None and is_float(out):
                node.meta["concrete"] = concrete
            if is_view and id(out) not in self.aliases:
                self.track(out, node, args[0], (func, tuple(node_args[1:])))
                if func is aten.detach.default and has_gradients(node_args[0]):
                    self.detached.add(id(out))
            elif id(out) in self.aliases:  # returned its own argument
                self.aliases[id(out)].node = node
            else:
                self.track(out, node)
        elif isinstance(out, (tuple, list)) and collect_tensors(out):
            if is_view:
                out = self._record_parts(func, node_args, args, out)
            else:
                bundle = self._emit_op(func, node_args, node_kwargs, out)
                bundle.meta["val"] = None
                if concrete is not None:
                    bundle.meta["concrete"] = concrete
                for i, t in enumerate(out):
                    if isinstance(t, torch.Tensor):
                        node = self.emit(operator.getitem, (bundle, i), {})
                        self.describe(node, t, from_integers)
                        self.track(t, node)
        return out

    def _emit_op(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> fx.Node:
        node = self.emit(func, tuple(args), kwargs)
        if not all(map(is_float, (out,) if isinstance(out, torch.Tensor) else collect_tensors(out))):
            # a proof may force its outcome
            node.meta["calls"] = find_user_stack()
        if self.autocast is not None and isinstance(func, torch._ops.OpOverload):
            values = map_arg((tuple(args), kwargs), lambda n: n.meta["val"])
            if device_autocast.changes_call(func, values[0], values[1], self.autocast, out):
                node.meta["autocast"] = None  # the original ran it in place or inside another function
        return node

    def choose_part(self, view: tuple[Any, tuple], base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return a part of a tensor, or another one if an intervention forces it. Args: view: the op, its numbers."""
        return part

    def _record_parts(self, func: Any, node_args: Any, args: tuple, out: Any) -> Any:
        """Record `split`, `chunk` and `unbind` as selects and slices, and return the parts.

        The last slice of an expert's rows ends at a multiple of the width: more rows would make more parts.
        """
        packet, base, start = func.overloadpacket, args[0], 0
        unbind = packet is aten.unbind
        dim = (args[1] if len(args) > 1 else 0) if unbind else (args[2] if len(args) > 2 else 0)
        width: Any = list(args)[1] if packet is aten.split else None
        is_routed = type(width) is int and dim == 0 and bool(node_args[0].meta.get("ragged"))
        from_integers = bool(node_args[0].meta.get("from_integers"))
        if type(width) is int and (size := self.sizes.expressions.get(base.shape[dim])):
            self.sizes.log_comparison(f"-(-{size}//{width})", "eq", str(len(out)), True)  # the number of parts
        parts: list[torch.Tensor] = []
        for i, t in enumerate(out):
            if unbind:
                view: tuple[Any, tuple] = (aten.select.int, (dim, i))
            else:
                rows = width if is_routed else t.shape[dim]
                view = (aten.slice.Tensor, (dim, start, start + rows))
                start += rows
            part = self.choose_part(view, base, t)
            node = self.emit(view[0], (node_args[0], *view[1]), {})
            if part is not t:
                node.meta["forced"] = make_site(view[0], from_integers)
            self.describe(node, part, from_integers)
            self.track(part, node, base if part is t else None, view if part is t else None)
            parts.append(part)
        return type(out)(parts)

    def to_fake(self, t: torch.Tensor) -> FakeTensor:
        if isinstance(t, FakeTensor):
            return t
        # several times faster than a conversion by the mode
        with suspend_modes(), torch.DisableTorchFunction():
            return self._fake(_on_meta(t))

    def run_on_meta(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function of fake tensors on meta tensors, which is much faster. Needs autocast to be off."""
        with suspend_modes(), torch.DisableTorchFunction():
            key = make_key(func, args, kwargs)
            if (layout := find_layout(key)) is None:
                out = func(*map_tensors(args, _on_meta), **map_tensors(kwargs, _on_meta))
                out = map_tensors(out, self._fake)
                store_layout(key, out)
                return out
            return self._fake(make_meta_tensor(layout))

    def _fake(self, t: torch.Tensor) -> FakeTensor:
        return FakeTensor(self.fake_mode, t, _CPU)


def make_site(target: Any, from_integers: bool) -> DecisionSite:
    """Return the key under which `Interventions` forces the result of the op that the program runs now."""
    return find_user_source(), str(target), from_integers


_NAMED = {torch._ops.OpOverload, types.BuiltinFunctionType}


@functools.cache
def _node_name(target: Any) -> str:
    """Return torch's name for a node of an op or a built-in function, without a number."""
    return re.sub("(?<=[a-z])([A-Z])", r"_\1", target.__name__).lower().replace(".", "_")


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided:
        source = find_user_source()
        raise CaptureError(f"captures support strided tensors, and {source} makes a {t.layout} tensor: {source.text}")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
