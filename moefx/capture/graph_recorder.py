"""The graph of a capture as it grows: nodes for tensors, through views and in-place updates."""

from __future__ import annotations

import functools
import operator
import re
import threading
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

from ..errors import CaptureError
from . import device_autocast
from .code_locations import NOWHERE, find_user_source, find_user_stack
from .layout_cache import empty, key_of, known_result, remember
from .node_origins import has_gradients
from .symbolic_sizes import SizeLog, unwrap_numbers
from .tensor_trees import collect_tensors, is_float, map_tensors, suspend_modes
from .worker_thread import check_interrupt

aten = torch.ops.aten


grad_enabled = torch.is_grad_enabled  # the query itself is patched during capture

_RAGGED = {
    getattr(getattr(aten, name), overload)
    for name in ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
    for overload in getattr(aten, name).overloads()
}


class _Alias:
    """One visible tensor object: its current node, and how it views its base."""

    __slots__ = ("base", "node", "tensor", "version", "view")

    def __init__(self, tensor: torch.Tensor, node: fx.Node, base: torch.Tensor | None, view: tuple[Any, tuple] | None):
        self.tensor, self.node, self.base, self.view = tensor, node, base, view
        self.version = 0


class Recorder(TorchDispatchMode):
    """Which node stands for which tensor now; an update of a tensor reaches its base and all views of that."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        self.aliases: dict[int, _Alias] = {}
        self.versions: dict[int, int] = {}  # of base tensors, by id
        self.keep: list[Any] = []  # ids stay unique only while the objects live
        self.constants: dict[str, torch.Tensor] = {}
        self.named: dict[int, str] = {}  # plain attributes of modules, by id
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.most_nodes = 0  # more than so many is an endless loop; 0: no limit
        self.autocast = (
            device_autocast.get_autocast_dtype()
        )  # at the last call of the program's; below an op it reads as off
        self.sizes = SizeLog()
        self.detached: set[int] = set()  # tensors that share memory with one that has gradients, by id
        self.lengths: set[int] = set()  # how many rows the routing left somewhere
        self.given: frozenset[int | float] = frozenset()  # of what an op is called with, what sizes or the routing say
        self.literals: dict[int, frozenset[int | float]] = {}  # `given` of tensors made of Python's numbers, by id

    def is_here(self) -> bool:
        """Whether this thread captures; others meet the same patched functions, and must not notice."""
        return threading.get_ident() == self.thread

    # ------------------------------------------------------------------ nodes
    def emit(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        is_op = type(target) is torch._ops.OpOverload
        name = _node_name(target) if is_op else None
        node = self.graph.create_node("call_function", target, name=name)
        node.args = unwrap_numbers(args)  # `create_node` searches arguments for symbolic sizes, of which there are none
        if kwargs:
            node.kwargs = unwrap_numbers(kwargs)
        return self._register(node)

    def _register(self, node: fx.Node) -> fx.Node:
        check_interrupt()
        if 0 < self.most_nodes < len(self.nodes):
            raise CaptureError(
                f"more than {self.most_nodes} operations, at {find_user_source()}: {find_user_source().text}"
            )
        # whether how many rows it has may follow from the routing
        is_ragged = node.target in _RAGGED or any([a.meta.get("ragged") for a in node.all_input_nodes])
        source = find_user_source()
        if source is NOWHERE:  # after the call, for a result that is a view: where its inputs were made
            source = next((a.meta["source"] for a in reversed(node.all_input_nodes)), source)
        node.meta.update(
            index=len(self.nodes),
            source=source,
            grad=grad_enabled(),
            autocast=self.autocast,
            of_sizes=self.given,
            ragged=is_ragged,
        )
        self.nodes.append(node)
        return node

    def describe(self, node: fx.Node, value: Any, known: bool) -> None:
        if isinstance(value, torch.Tensor):
            node.meta["val"] = value if isinstance(value, FakeTensor) else value.clone()
            node.meta["known"] = known or not is_float(value)
            maker = node.args[0] if node.target is operator.getitem else node
            if value.dim() and getattr(maker, "target", None) in _RAGGED:
                self.lengths.add(value.shape[0])
        else:
            node.meta["val"] = value

    def track(self, t: torch.Tensor, node: fx.Node, base: torch.Tensor | None = None, view: Any = None) -> None:
        alias = _Alias(t, node, base, view)
        alias.version = self.version(t, alias)
        self.aliases[id(t)] = alias
        self.keep.append(t)

    def root(self, t: torch.Tensor, alias: _Alias | None = None) -> torch.Tensor:
        alias = alias or self.aliases[id(t)]
        while alias.base is not None:
            t = alias.base
            alias = self.aliases[id(t)]
        return t

    def version(self, t: torch.Tensor, alias: _Alias) -> int:
        return self.versions.get(id(self.root(t, alias)), 0)

    def node_of(self, t: torch.Tensor) -> fx.Node:
        alias = self.aliases.get(id(t))
        if alias is None:
            return self._constant(t)
        if alias.base is not None and alias.version != self.version(t, alias):
            op, args = alias.view  # type: ignore[misc]
            alias.node = self.emit(op, (self.node_of(alias.base), *args), {})
            self.describe(alias.node, t, bool(alias.node.args[0].meta.get("known")))  # type: ignore[union-attr]
            alias.version = self.version(t, alias)
        return alias.node

    def _constant(self, t: torch.Tensor) -> fx.Node:
        """A tensor that nobody recorded: a plain attribute, a closure variable, a literal."""
        if isinstance(t, FakeTensor):
            raise CaptureError(f"a tensor of unknown origin reached {find_user_source()}: {find_user_source().text}")
        name = self.named.get(id(t)) or f"_moefx_constant_{len(self.constants)}"
        node = self._register(self.graph.create_node("get_attr", name.replace(".", "_"), name=None))
        node.meta["fqn"] = name
        node.meta["kind"] = "attribute" if id(t) in self.named else "constant"
        node.meta["literal"] = id(t) in self.literals
        node.meta["of_sizes"] = self.literals.get(id(t), frozenset())
        if id(t) not in self.named:
            self.constants[name] = t
        value = t.detach()
        self.describe(node, value, True)
        if is_float(value):
            node.meta["val"] = self.to_fake(value)
        if is_float(value) and node.meta["kind"] == "attribute":  # a bias, say, that may be another at the next call
            node.meta["original"] = t
        else:
            node.meta["concrete"] = value.clone()
        self.track(t, node)
        return node

    def mutate(self, t: torch.Tensor, node: fx.Node) -> None:
        """`t` now holds `node`; so do the parts of it that its base and the base's other views see."""
        alias = self.aliases.get(id(t))
        if alias is None:
            self._constant(t)
            alias = self.aliases[id(t)]
        if alias.base is None:
            self.versions[id(t)] = self.versions.get(id(t), 0) + 1
        else:
            self.mutate(alias.base, self._write_back(alias, node))
        alias.node = node
        alias.version = self.version(t, alias)

    def _write_back(self, alias: _Alias, node: fx.Node) -> fx.Node:
        """The base's new value after its view was given the value `node`."""
        op, args = alias.view  # type: ignore[misc]
        base = alias.base
        assert base is not None
        packet, old = op.overloadpacket, self.node_of(base)
        if packet is aten.select:
            new = self.emit(aten.select_scatter.default, (old, node, *args), {})
        elif packet is aten.slice:
            new = self.emit(aten.slice_scatter.default, (old, node, *args), {})
        elif packet is aten.diagonal:
            new = self.emit(aten.diagonal_scatter.default, (old, node, *args), {})
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
        self.describe(new, base, bool(node.meta.get("known")) and bool(old.meta.get("known")))
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
        known: bool,
    ) -> Any:
        """A call that gave `out`, and `concrete` under this routing where that was asked for; `args` are its own
        arguments, of which `out` may be a view."""
        if isinstance(out, torch.Tensor):
            if func in (aten._unsafe_view.default, aten.view.default):
                func = aten.reshape.default  # of the value; copies are not recorded
            node = self._emit_op(func, node_args, node_kwargs, out)
            self.describe(node, out, known)
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
                self._record_parts(func, node_args, args, out)
            else:
                bundle = self._emit_op(func, node_args, node_kwargs, out)
                bundle.meta["val"] = None
                if concrete is not None:
                    bundle.meta["concrete"] = concrete
                for i, t in enumerate(out):
                    if isinstance(t, torch.Tensor):
                        node = self.emit(operator.getitem, (bundle, i), {})
                        self.describe(node, t, known)
                        self.track(t, node)
        return out

    def _emit_op(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> fx.Node:
        node = self.emit(func, tuple(args), kwargs)
        if not all(map(is_float, collect_tensors(out))):  # see `doubts`
            node.meta["calls"] = find_user_stack()
        if self.autocast is not None and isinstance(func, torch._ops.OpOverload):
            values = map_arg((tuple(args), kwargs), lambda n: n.meta["val"])
            if device_autocast.changes_call(func, values[0], values[1], self.autocast, out):
                node.meta["autocast"] = None  # as it ran in the original, in place or inside of another function, say
        return node

    def _record_parts(self, func: Any, node_args: Any, args: tuple, out: Any) -> None:
        """`split`, `chunk`, `unbind` as the selects and slices that they are."""
        packet, base, start = func.overloadpacket, args[0], 0
        unbind = packet is aten.unbind
        dim = (args[1] if len(args) > 1 else 0) if unbind else (args[2] if len(args) > 2 else 0)
        width: Any = list(args)[1] if packet is aten.split else None
        if type(width) is int and (size := self.sizes.expressions.get(base.shape[dim])):
            self.sizes.note(f"-(-{size}//{width})", "eq", str(len(out)), True)  # how many parts: a question of the size
        for i, t in enumerate(out):
            if unbind:
                view: tuple[Any, tuple] = (aten.select.int, (dim, i))
            else:
                view = (aten.slice.Tensor, (dim, start, start + t.shape[dim]))
                start += t.shape[dim]
            node = self.emit(view[0], (node_args[0], *view[1]), {})
            self.describe(node, t, bool(node_args[0].meta.get("known")))
            self.track(t, node, base, view)

    def to_fake(self, t: torch.Tensor) -> FakeTensor:
        if isinstance(t, FakeTensor):
            return t
        # made by hand: under the mode it takes several times as long
        with suspend_modes(), torch.DisableTorchFunction():
            return self._fake(_on_meta(t))

    def abstract(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a function of fake tensors gives, without autocast: on meta tensors, which is much faster."""
        with suspend_modes(), torch.DisableTorchFunction():
            key = key_of(func, args, kwargs)
            if (known := known_result(key)) is None:
                out = func(*map_tensors(args, _on_meta), **map_tensors(kwargs, _on_meta))
                out = map_tensors(out, self._fake)
                remember(key, out)
                return out
            return self._fake(empty(known))

    def _fake(self, t: torch.Tensor) -> FakeTensor:
        return FakeTensor(self.fake_mode, t, torch.device("cpu"))


@functools.cache
def _node_name(op: torch._ops.OpOverload) -> str:
    """What torch calls a node of an op, before it is numbered."""
    return re.sub("(?<=[a-z])([A-Z])", r"_\1", op.__name__).lower().replace(".", "_")


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided:
        where = find_user_source()
        raise CaptureError(f"a {t.layout} tensor is made at {where}, and capture follows strided ones: {where.text}")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
