"""Concolic capture: run a block once with abstract floats and concrete routing.

Float tensors are fake (nothing is allocated, so a meta-device model works like any other); integer and boolean
tensors are small real ones, so that data-dependent Python (`nonzero`, `.tolist()`, `if mask.any()`) simply runs.
Where an integer is computed from a float (`topk`, a comparison) the float gets a numeric *shadow*: the recorded
graph is evaluated back to the nearest contractions, whose values the `Routing` invents. So one routing decision
holds consistently through groups, masks and thresholds.

The result is a functional ATen graph (in-place updates and views are resolved here) with `linear`, `matmul` and
`einsum` kept whole, the user's source line on every node, and the module calls recorded.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import dataclasses
import logging
import math
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import CaptureError
from ..ir.fields import opened
from .counts import LENGTH, Count, Share, counted, tells_empty
from .routing import Routing
from .sizes import Size, SizeLog, plain, sized

aten = torch.ops.aten
_grad_enabled = torch.is_grad_enabled  # the query itself is patched during capture

MIXED = "mixed"  # a comparison comes out either way, element by element

# These look at the shape of their argument, never at its values.
SHAPE_ONLY = {
    getattr(aten, name).default
    for name in (
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
    )
}

# Decomposing these loses what the lifter wants to see: one labelled contraction.
_WHOLE: dict[Any, Any] = {
    F.linear: F.linear,
    torch.einsum: torch.einsum,
    torch.matmul: torch.matmul,
    torch.Tensor.matmul: torch.matmul,
    torch.Tensor.__matmul__: torch.matmul,
    torch.Tensor.__rmatmul__: lambda a, b: torch.matmul(b, a),
    F.scaled_dot_product_attention: F.scaled_dot_product_attention,
}
CONTRACTIONS = {F.linear, torch.einsum, torch.matmul, F.scaled_dot_product_attention} | {
    getattr(aten, name).default
    for name in (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "mv",
        "dot",
        "_grouped_mm",
        "addbmm",
        "addmv",
    )
    if hasattr(aten, name)
}


def autocast_dtype() -> torch.dtype | None:
    """What autocast casts to here; None where it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """`tree_map_only(Tensor)` for the plain containers that op arguments are made of; several times faster."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if type(tree) in (tuple, list):
        return type(tree)([map_tensors(x, fn) for x in tree])
    if type(tree) is dict:
        return {k: map_tensors(v, fn) for k, v in tree.items()}
    if isinstance(tree, (tuple, list, dict)):
        return pytree.tree_map_only(torch.Tensor, fn, tree)
    return tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(tree, found.append)
    return found


@dataclasses.dataclass(frozen=True)
class Source:
    """A place in the user's program."""

    file: str
    line: int
    offset: int  # bytecode offset: tells two reads on one line apart

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def text(self) -> str:
        import linecache

        return linecache.getline(self.file, self.line).strip()


_OURS = (__file__.rsplit("/capture/", 1)[0] + "/", torch.__file__.rsplit("/", 1)[0] + "/")


# generated code: not of torch's files, but not the user's either (a notebook cell, also in brackets, is)
_NOBODYS = ("<frozen", "<string>", "<eval_with_key", "<__", threading.__file__)


def is_users(file: str) -> bool:
    """Whether a file of code is the user's: neither torch's, nor this package's, nor generated."""
    return not file.startswith((*_OURS, *_NOBODYS))


def user_source() -> Source:
    """The innermost frame that belongs neither to torch nor to this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return Source(name, frame.f_lineno, frame.f_lasti)
        frame = frame.f_back
    return Source("?", 0, 0)


@dataclasses.dataclass
class Call:
    """One call of a submodule of the block: which nodes went in, came out, and ran inside."""

    fqn: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    start: int
    stop: int
    depth: int
    autocast: torch.dtype | None = None


@dataclasses.dataclass
class Effect:
    """What the block changed besides returning a value."""

    kind: str  # "buffer" | "input" | "attribute" | "state" (a plain attribute) | "record" (a container)
    target: Any
    node: fx.Node


def compares_floats(node: fx.Node) -> bool:
    """Whether a node makes booleans of abstract floats: a threshold, a check for NaN."""
    val = node.meta.get("val")
    return (
        isinstance(val, torch.Tensor)
        and val.dtype is torch.bool
        and node.op == "call_function"
        and any(isinstance(a.meta.get("val"), FakeTensor) and not a.meta.get("known") for a in node.all_input_nodes)
    )


@dataclasses.dataclass(frozen=True)
class HostRead:
    """A boolean or a float that Python read from a tensor: a branch may hang on it, which capture followed one way."""

    source: Source
    value: bool | float | str
    node: fx.Node | None  # None: the length of something
    asked: tuple[str, Any] | None = None  # the comparison, where `node` is a number


class _Alias:
    """One visible tensor object: its current node, and how it views its base."""

    __slots__ = ("base", "node", "tensor", "version", "view")

    def __init__(
        self, tensor: torch.Tensor, node: fx.Node, base: torch.Tensor | None, view: tuple[Any, tuple] | None
    ):
        self.tensor, self.node, self.base, self.view = tensor, node, base, view
        self.version = 0


@dataclasses.dataclass
class Capture:
    """A captured block. `graph` is functional; every node's `meta` has

    `val` (a fake float or a real integer tensor), `known` (depends on routing integers and constants only), `grad`
    (grad mode), `autocast` (its dtype, None where off), `source`, `index` (position in program order).
    """

    graph: fx.Graph
    out: Any
    calls: list[Call]
    effects: list[Effect]
    reads: list[HostRead]
    sizes: SizeLog
    nodes: list[fx.Node]
    constants: dict[str, torch.Tensor]
    tracer: Tracer
    modes_read: set[str]

    def shadow(self, node: fx.Node) -> torch.Tensor:
        return self.tracer.shadow(node)


class Tracer(TorchDispatchMode):
    def __init__(self, routing: Routing, flips: Mapping[Source, bool | float | str] | None = None):
        super().__init__()
        self.routing, self.flips = routing, flips or {}
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        self.aliases: dict[int, _Alias] = {}
        self.versions: dict[int, int] = {}  # of base tensors, by id
        self.keep: list[Any] = []  # ids stay unique only while the objects live
        self.constants: dict[str, torch.Tensor] = {}
        self.named: dict[int, str] = {}
        self.reads: list[HostRead] = []
        self.calls: list[Call] = []
        self.sizes = SizeLog()
        self.modes_read: set[str] = set()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.most_nodes = 0  # more than so many is an endless loop; 0: no limit
        self.quiet = 0  # inside an operation that is recorded whole
        self.autocast = autocast_dtype()  # at the last call of the program's; below an op it reads as off
        self.lengths: set[int] = set()  # how many rows the routing left somewhere
        self.touched = False  # whether the op at work was called with a number of the routing

    # ------------------------------------------------------------------ nodes
    def emit(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        return self._register(self.graph.call_function(target, plain(args), plain(kwargs)))

    def _register(self, node: fx.Node) -> fx.Node:
        if 0 < self.most_nodes < len(self.nodes):
            raise CaptureError(f"more than {self.most_nodes} operations, at {user_source()}: {user_source().text}")
        node.meta["index"] = len(self.nodes)
        node.meta["source"] = user_source()
        node.meta["grad"] = _grad_enabled()
        node.meta["autocast"] = self.autocast
        # whether how many rows it has may follow from the routing
        node.meta["ragged"] = node.target in _RAGGED or any(a.meta.get("ragged") for a in node.all_input_nodes)
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

    def track(
        self, t: torch.Tensor, node: fx.Node, base: torch.Tensor | None = None, view: Any = None
    ) -> None:
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
            raise CaptureError(f"a tensor of unknown origin reached {user_source()}: {user_source().text}")
        name = self.named.get(id(t)) or f"_moefx_constant_{len(self.constants)}"
        node = self._register(self.graph.create_node("get_attr", name.replace(".", "_"), name=None))
        node.meta["fqn"] = name
        node.meta["kind"] = "attribute" if id(t) in self.named else "constant"
        if id(t) not in self.named:
            self.constants[name] = t
        value = t.detach()
        self.describe(node, value, True)
        node.meta["shadow"] = value.clone()
        if is_float(value):
            node.meta["val"] = self.to_fake(value)
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
                f"in-place update through a view made by {packet}, at {user_source()}: {user_source().text}"
            )
        self.describe(new, base, bool(node.meta.get("known")) and bool(old.meta.get("known")))
        return new

    # ------------------------------------------------------------------ values
    def to_fake(self, t: torch.Tensor) -> FakeTensor:
        if isinstance(t, FakeTensor):
            return t
        with self.fake_mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)  # type: ignore[return-value]

    def shadow(self, node: fx.Node) -> torch.Tensor:
        """The concrete value of a node under this routing, invented at the nearest contraction."""
        stack = [node]
        while stack:
            top = stack[-1]
            if "shadow" in top.meta:
                stack.pop()
                continue
            value = top.meta.get("val")
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                top.meta["shadow"] = value
                stack.pop()
                continue
            if self._invented(top):
                top.meta["shadow"] = self.routing.invent(top)
                stack.pop()
                continue
            if top.target in SHAPE_ONLY:
                like = top.args[0].meta["val"]  # type: ignore[union-attr]
                top.meta["shadow"] = top.target(
                    torch.zeros(like.shape, dtype=like.dtype), *top.args[1:], **{**top.kwargs, "device": None}
                )  # type: ignore[operator]
                stack.pop()
                continue
            pending = [a for a in top.all_input_nodes if "shadow" not in a.meta]
            if pending:
                stack.extend(pending)
                continue
            args, kwargs = map_arg((top.args, top.kwargs), lambda n: n.meta["shadow"])
            kwargs = {
                k: torch.device("cpu") if k == "device" and v is not None else v for k, v in kwargs.items()
            }
            with torch.no_grad():
                top.meta["shadow"] = top.target(*args, **kwargs)  # type: ignore[operator]
            stack.pop()
        return node.meta["shadow"]

    def _invented(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr") or node.meta.get("opaque"):
            return True
        if node.target not in CONTRACTIONS:
            return False
        # a product with a weight makes new scores; a product of two activations follows from theirs
        kinds = {self._is_weight(a) for a in node.all_input_nodes if not a.meta.get("known")}
        return kinds == {True, False}

    def _is_weight(self, node: fx.Node) -> bool:
        """Computed from parameters and constants only."""
        if "weight" not in node.meta:
            inputs = node.all_input_nodes
            if node.op == "placeholder" or node.meta.get("opaque"):
                node.meta["weight"] = False
            else:
                node.meta["weight"] = node.op == "get_attr" or (
                    bool(inputs) and all(self._is_weight(a) for a in inputs)
                )
        return node.meta["weight"]

    # ------------------------------------------------------------------ numbers of the routing (a `CountLog`)
    def compared(self, count: Any, op: str, other: Any, value: bool) -> bool:
        if isinstance(other, (Count, Share)) and op in ("eq", "ne"):
            return value  # keys of a dict: whether two ids are one is no branch
        if tells_empty(count, op, other):
            return value  # without rows nothing is computed; other captures had experts without
        source = user_source()
        value = bool(self.flips.get(source, value))
        self.reads.append(HostRead(source, value, count.expr if isinstance(count.expr, fx.Node) else None, (op, other)))
        return value

    def leak(self, expr: Any) -> None:
        self.sizes.routed = True

    def use(self, size: Any) -> None:
        self.touched = True

    def rows_of_routing(self, before: int) -> None:
        """The ops since `before` made rows as many as the routing says."""
        for node in self.nodes[before:]:
            node.meta["ragged"] = True
            if isinstance(val := node.meta.get("val"), torch.Tensor) and val.dim():
                self.lengths.add(val.shape[0])

    def _is_state(self, node: fx.Node) -> bool:
        """Computed from buffers and attributes only: a step counter, say."""
        leaves = _leaves(node)
        return leaves == {True} or (True in leaves and node.meta["val"].dim() == 0 and not _from_floats(node))

    def concrete(self, t: torch.Tensor) -> torch.Tensor:
        return self.shadow(self.node_of(t)) if isinstance(t, FakeTensor) else t

    # ------------------------------------------------------------------ execution
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.lift_fresh.default, aten.lift.default):
            return self._lift_literal(args[0])
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if func is aten._local_scalar_dense.default:
                return self._host_read(args[0])
            if func is aten.is_same_size.default:
                return func(*args)
            if self.quiet:
                return self.compute(func, args, kwargs)[0]
            return self.record(func, args, kwargs)

    def _lift_literal(self, t: torch.Tensor) -> torch.Tensor:
        if is_float(t) and not isinstance(t, FakeTensor):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                node = self._constant(t)
                fake = node.meta["val"]
                self.track(fake, node)
                return fake
        return t

    def _host_read(self, t: torch.Tensor) -> Any:
        value = self.concrete(t).item()
        if t.dtype is torch.bool or is_float(t) or self._is_state(self.node_of(t)):
            source = user_source()
            value = self.flips.get(source, value)
            self.reads.append(HostRead(source, value, self.node_of(t)))
        return value

    def record(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in (
            "index",
            "index_put",
            "index_put_",
            "_index_put_impl_",
            "_unsafe_index",
            "_unsafe_index_put",
        ):
            args = (args[0], self._integer_indices(args[1]), *args[2:])
        elif name == "masked_select":
            return self.record(
                aten.index.Tensor, (args[0], self._integer_indices([args[1].expand(args[0].shape)])), {}
            )
        if func is aten.clone.default:
            return self._same_value(func, args, kwargs)
        schema = func._schema
        written = [
            i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ]
        node_args, node_kwargs = map_tensors((args, kwargs), self.node_of)
        known = func in SHAPE_ONLY or all(
            self.node_of(t).meta.get("known") for t in tensors_in((args, kwargs))
        )
        known = known and torch.Tag.nondeterministic_seeded not in func.tags
        if written:
            return self._record_in_place(func, args, kwargs, node_args, node_kwargs, written, known)
        out, concrete = self.compute(func, args, kwargs)
        if self.flips and isinstance(out, torch.Tensor) and self.flips.get(user_source()) == MIXED:
            coin = torch.rand(out.shape, generator=self.routing.generator) < 0.5
            out = concrete = coin if out.dtype is torch.bool else out
        is_view = any(a.alias_info is not None for a in schema.arguments)
        return self.record_out(func, node_args, node_kwargs, args, out, concrete, is_view, known)

    def _same_value(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """A copy: other storage, the same value. Whether `contiguous` and `reshape` copy depends on the sizes."""
        out, _ = self.compute(func, args, kwargs)
        self.track(out, self.node_of(args[0]))
        return out

    def _integer_indices(self, indices: Any) -> list[torch.Tensor | None]:
        out: list[torch.Tensor | None] = []
        for i in indices:
            if i is not None and i.dtype in (torch.bool, torch.uint8):
                hits = self.record(aten.nonzero.default, (i,), {})
                out += [self.record(aten.select.int, (hits, 1, d), {}) for d in range(i.dim())]
            else:
                out.append(i)
        return out

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(what the user sees, the concrete result where one was needed)."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        flat = tensors_in((args, kwargs))
        if flat and not any(isinstance(t, FakeTensor) for t in flat):
            concrete = func(*args, **kwargs)
            return map_tensors(concrete, lambda t: self.to_fake(t) if is_float(t) else t), concrete
        try:
            with self.fake_mode:
                out = _grouped_result(*args) if func.overloadpacket is _GROUPED_MM else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = None
        leaves = tensors_in(out)
        if out is not None and leaves and all(is_float(t) for t in leaves):
            return out, None
        if self.quiet and flat:
            raise CaptureError(
                f"{func} inside an operation that is kept whole, at {user_source()}: {user_source().text}"
            )
        cargs, ckwargs = map_tensors((args, kwargs), self.concrete)
        concrete = func(*cargs, **ckwargs)
        if not tensors_in(concrete):
            return concrete, concrete
        fakes = iter(leaves) if out is not None else None

        def visible(t: torch.Tensor) -> torch.Tensor:
            fake = next(fakes) if fakes else None
            if not is_float(t):
                return t
            return fake if fake is not None else self.to_fake(t)

        return map_tensors(concrete, visible), concrete

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
        if isinstance(out, torch.Tensor):
            if func in (aten._unsafe_view.default, aten.view.default):
                func = aten.reshape.default  # of the value; copies are not recorded
            node = self.emit(func, tuple(node_args), node_kwargs)
            self.describe(node, out, known)
            if concrete is not None and is_float(out):
                node.meta["shadow"] = concrete
            if is_view and id(out) not in self.aliases:
                self.track(out, node, args[0], (func, tuple(node_args[1:])))
            elif id(out) in self.aliases:  # returned its own argument
                self.aliases[id(out)].node = node
            else:
                self.track(out, node)
        elif isinstance(out, (tuple, list)) and tensors_in(out):
            if is_view:
                self._record_parts(func, node_args, args, out)
            else:
                bundle = self.emit(func, tuple(node_args), node_kwargs)
                bundle.meta["val"] = None
                if concrete is not None:
                    bundle.meta["shadow"] = concrete
                for i, t in enumerate(out):
                    if isinstance(t, torch.Tensor):
                        node = self.emit(operator.getitem, (bundle, i), {})
                        self.describe(node, t, known)
                        self.track(t, node)
        return out

    def _record_parts(self, func: Any, node_args: Any, args: tuple, out: Any) -> None:
        """`split`, `chunk`, `unbind` as the selects and slices that they are."""
        packet, base, start = func.overloadpacket, args[0], 0
        unbind = packet is aten.unbind
        dim = (args[1] if len(args) > 1 else 0) if unbind else (args[2] if len(args) > 2 else 0)
        for i, t in enumerate(out):
            if unbind:
                view: tuple[Any, tuple] = (aten.select.int, (dim, i))
            else:
                view = (aten.slice.Tensor, (dim, start, start + t.shape[dim]))
                start += t.shape[dim]
            node = self.emit(view[0], (node_args[0], *view[1]), {})
            self.describe(node, t, bool(node_args[0].meta.get("known")))
            self.track(t, node, base, view)

    def _record_in_place(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        node_args: Any,
        node_kwargs: Any,
        written: list[int],
        known: bool,
    ) -> Any:
        names = [func._schema.arguments[i].name for i in written]
        targets = [args[i] if i < len(args) else kwargs[n] for i, n in zip(written, names, strict=True)]
        targets = [t for t in targets if isinstance(t, torch.Tensor)]
        if torch.Tag.inplace_view in func.tags:  # `t.transpose_(0, 1)`: the node of before keeps its shape
            for t in targets:
                self.node_of(t).meta["val"] = self.to_fake(torch.empty_like(t, device="meta"))
        if any(not isinstance(t, FakeTensor) for t in targets):
            cargs, ckwargs = map_tensors((args, kwargs), self.concrete)
            func(*cargs, **ckwargs)  # the real integer tensor changes under the user's eyes
        else:
            self.compute(func, args, kwargs)
        functional, node_args, node_kwargs = _functional(func, node_args, node_kwargs, names)
        node = self.emit(functional, tuple(node_args), node_kwargs)
        if len(targets) == 1:
            parts = [node]
        else:
            node.meta["val"] = None
            parts = [self.emit(operator.getitem, (node, i), {}) for i in range(len(targets))]
        for t, part in zip(targets, parts, strict=True):
            self.describe(part, t, known)
            self.mutate(t, part)
        return targets[0] if len(targets) == 1 else tuple(targets)

    def record_whole(
        self, target: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any], opaque: bool = False
    ) -> Any:
        """Record one call as one node; the ops inside it run but are not recorded."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            node_args, node_kwargs = map_tensors((args, kwargs), self.node_of)
            known = all(self.node_of(t).meta.get("known") for t in tensors_in((args, kwargs)))
        self.quiet += 1
        try:
            out = run()
        finally:
            self.quiet -= 1
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            before = len(self.nodes)
            self.record_out(target, node_args, node_kwargs, args, out, None, False, known and not opaque)
            if opaque:
                for node in self.nodes[before:]:
                    node.meta["opaque"] = True
        return out


def _leaves(node: fx.Node) -> frozenset[bool]:
    """Of the values without inputs that a node follows from: whether they are buffers or attributes."""
    stack = [node]
    while stack:
        n = stack[-1]
        inputs = n.all_input_nodes
        if waiting := [a for a in inputs if "leaves" not in a.meta]:
            stack += waiting
            continue
        state = n.op == "get_attr" and n.meta.get("kind") in ("buffer", "attribute")
        n.meta["leaves"] = frozenset().union(*[a.meta["leaves"] for a in inputs]) if inputs else frozenset([state])
        stack.pop()
    return node.meta["leaves"]


def _from_floats(node: fx.Node) -> bool:
    """Whether an integer follows from arguments or abstract floats: it is part of the routing."""
    stack, seen = [node], set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op == "placeholder" or isinstance(n.meta.get("val"), FakeTensor):
            return True
        stack += n.all_input_nodes
    return False


_GROUPED_MM = getattr(aten, "_grouped_mm", None)


def _grouped_result(x: torch.Tensor, w: torch.Tensor, *_: Any) -> torch.Tensor:
    """The shape of a grouped product; torch's own rule accepts bfloat16 only."""
    return x.new_empty((*x.shape[:-1], w.shape[-1]))


def _functional(
    func: Any, args: Any, kwargs: dict[str, Any], names: list[str]
) -> tuple[Any, Any, dict[str, Any]]:
    """The functional form of an in-place or `out=` op, with its arguments."""
    name, overload = func.overloadpacket.__name__, func._overloadname
    namespace = getattr(torch.ops, func.namespace)
    if name.endswith("_") and not name.endswith("__"):
        packet = getattr(namespace, name[:-1], None)
        if packet is not None and overload in packet.overloads():
            return getattr(packet, overload), args, kwargs
        wanted = [a.name for a in func._schema.arguments]
        for candidate in packet.overloads() if packet is not None else ():
            if [a.name for a in getattr(packet, candidate)._schema.arguments] == wanted:
                return getattr(packet, candidate), args, kwargs
    else:
        wanted = [a.name for a in func._schema.arguments if not a.is_out]
        for candidate in getattr(namespace, name).overloads():
            op = getattr(getattr(namespace, name), candidate)
            if [a.name for a in op._schema.arguments] == wanted:
                return op, args, {k: v for k, v in kwargs.items() if k not in names}
    raise CaptureError(f"no functional form of {func} is known, at {user_source()}: {user_source().text}")


class _Functions(TorchFunctionMode):
    """Keeps contractions whole and hands out sizes that remember where they came from."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, options = plain(args), plain(kwargs or {})
        tracer, before = self.tracer, len(self.tracer.nodes)
        touched, tracer.touched = tracer.touched, False
        if tracer.quiet:
            return func(*args, **options)
        tracer.autocast = autocast_dtype()
        if func in _COUNTS:  # of elements: the product of the sizes
            return math.prod(self._shape(args[0]))
        if func in _SIZES:
            if func is torch.Tensor.__len__ or args[1:] or options:
                dim = 0 if func is torch.Tensor.__len__ else (*args[1:], *options.values())[0]
                return self._shape(args[0])[dim] if dim is not None else self._shape(args[0])
            return self._shape(args[0])
        if func in _NUMBERS:
            return self._numbers(args[0], func(*args, **options))
        if func is torch.Tensor.__int__:
            return int(self._numbers(args[0], func(*args, **options)))
        whole = _WHOLE.get(func)
        tensors = tensors_in(args) if whole is not None else []
        if whole is None or not any(is_float(t) for t in tensors) or any(map(_is_batched, tensors)):
            out = func(*args, **options)
            if touched:
                tracer.rows_of_routing(before)
            return out
        if func is torch.Tensor.__rmatmul__:
            args, func = (args[1], args[0]), torch.matmul
        return tracer.record_whole(_WHOLE[func], args, options, lambda: func(*args, **options))


    def _shape(self, t: torch.Tensor) -> torch.Size:
        tracer = self.tracer
        with torch._C.DisableTorchFunction():
            shape = t.shape
            first = shape[0] if shape else None
            ragged = first in tracer.lengths and not _is_batched(t) and tracer.node_of(t).meta.get("ragged")
        out = sized(shape, tracer.sizes)
        if ragged and type(out[0]) is int:
            out = torch.Size([counted(first, LENGTH, tracer), *out[1:]])
        return out

    def _numbers(self, t: torch.Tensor, value: Any) -> Any:
        """Integers that Python read from the routing."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if is_float(t) or t.dtype is torch.bool or _is_batched(t):
                return value
            node = self.tracer.node_of(t)
            return counted(value, node, self.tracer) if _from_floats(node) else value


def _is_batched(t: torch.Tensor) -> bool:
    """Inside `vmap`: the tensors that ops see are others than the ones that Python sees."""
    return is_functorch_wrapped_tensor(t)


_SIZES = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.__len__,
}  # type: ignore[attr-defined]


_NUMBERS = {torch.Tensor.item, torch.Tensor.tolist}
_RAGGED = {
    getattr(getattr(aten, name), overload)
    for name in ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
    for overload in getattr(aten, name).overloads()
}
_COUNTS = {torch.Tensor.numel, torch.Tensor.nelement, torch.numel}


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    had = name in vars(owner)
    old = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def _recording(tracer: Tracer, names: dict[int, str]) -> Iterator[None]:
    """Everything that capture must see and that is not an op: module calls, custom autograd functions, mode queries."""
    original_apply = torch.autograd.Function.__dict__["apply"]
    original_call = nn.Module.__call__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = original_apply.__get__(None, cls)
        if tracer.quiet:
            return run(*args, **kwargs)
        return tracer.record_whole(cls.apply, args, kwargs, lambda: run(*args, **kwargs), opaque=True)

    depth = 0

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        fqn = names.get(id(module))
        if fqn is None or tracer.quiet:
            return original_call(module, *args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, tracer.node_of, (args, kwargs))
        record = Call(fqn, node_args, node_kwargs, None, len(tracer.nodes), 0, depth, autocast_dtype())
        depth += 1
        try:
            out = original_call(module, *args, **kwargs)
        finally:
            depth -= 1
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            record.out = pytree.tree_map_only(torch.Tensor, tracer.node_of, _opened(out))
        record.stop = len(tracer.nodes)
        tracer.calls.append(record)
        return out

    def noted(name: str, fn: Callable) -> Callable:
        def query(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(_OURS):
                tracer.modes_read.add(name)
            return fn(*args, **kwargs)

        return query

    def length(of: Any) -> Any:  # the builtin would turn what `__len__` returns into a plain number
        return of.__len__() if isinstance(of, torch.Tensor) else plain_len(of)

    plain_len = len
    with contextlib.ExitStack() as stack:
        stack.enter_context(_patched(builtins, "len", length))
        stack.enter_context(_patched(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(_patched(nn.Module, "__call__", call))
        # `self.lin.to(dtype)` inside a forward must not try to swap fake parameters
        stack.enter_context(_patched(nn.Module, "_apply", lambda self, fn, recurse=True: self))
        for name in ("is_grad_enabled", "is_inference_mode_enabled"):
            stack.enter_context(_patched(torch, name, noted(name, getattr(torch, name))))
        yield


def _opened(out: Any) -> Any:
    """A dataclass as a dict of its fields, under keys that say so (`.logits`)."""
    if dataclasses.is_dataclass(out) and not isinstance(out, (type, dict)):
        return {f".{f.name}": _opened(getattr(out, f.name)) for f in dataclasses.fields(out)}
    return out


def _plain_tensors(block: nn.Module) -> dict[int, str]:
    """Tensors that hang on modules as ordinary attributes, by identity."""
    named = {}
    for prefix, module in block.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                named[id(value)] = f"{prefix}.{key}" if prefix else key
    return named


def capture(
    block: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    routing: Routing,
    *,
    flips: Mapping[Source, bool | float | str] | None = None,
    dims: dict[str, int] | None = None,
    most_nodes: int = 0,
) -> Capture:
    """Run `block(*args, **kwargs)` on abstract floats under `routing`.

    `args` and `kwargs` hold meta tensors for floats and real tensors for integers. The block, its parameters and its
    buffers are left as they were. Raises `CaptureError` with the user's source line.
    """
    tracer = Tracer(routing, flips)
    tracer.sizes, tracer.most_nodes = SizeLog(dims or {}), most_nodes
    tracer.named = _plain_tensors(block)
    state: dict[str, torch.Tensor] = {}
    buffers = {name for name, _ in block.named_buffers(remove_duplicate=False)}
    seen: dict[int, torch.Tensor] = {}
    places: set[tuple[int, str]] = set()
    for name, t in [
        *block.named_parameters(remove_duplicate=False),
        *block.named_buffers(remove_duplicate=False),
    ]:
        owner, _, key = name.rpartition(".")
        place = (id(block.get_submodule(owner)), key)
        if place in places:
            continue  # a module under two names: to swap its tensors twice would leave the first swap behind
        places.add(place)
        if id(t) in seen:
            state[name] = seen[id(t)]
            continue
        value = tracer.to_fake(t) if is_float(t) else routing.integers(t)
        node = tracer._register(tracer.graph.create_node("get_attr", name.replace(".", "_")))
        node.meta.update(fqn=name, kind="buffer" if name in buffers else "param", original=t)
        tracer.describe(node, value, False)
        tracer.track(value, node)
        state[name] = seen[id(t)] = value

    leaves, spec = pytree.tree_flatten((args, kwargs))
    inputs: list[tuple[int, torch.Tensor, fx.Node]] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            value = tracer.to_fake(leaf) if is_float(leaf) else leaf.clone()
            node = tracer._register(tracer.graph.placeholder(f"arg{len(inputs)}"))
            node.meta.update(leaf=i, position=len(inputs))
            tracer.describe(node, value, False)
            tracer.track(value, node)
            inputs.append((i, value, node))
            leaves[i] = value
    args, kwargs = pytree.tree_unflatten(leaves, spec)

    names = {id(m): n for n, m in block.named_modules() if n}
    before = {n: dict(vars(m)) for n, m in block.named_modules()}
    hooks = [(held, copy.copy(held)) for own in before.values() for k, held in own.items() if k in HOOKS]
    records = [(f"{n}.{k}".lstrip("."), v) for n, m in before.items() for k, v in m.items() if _is_record(k, v)]
    contents = [(path, value, copy.copy(value)) for path, value in records]
    # fake kernels log the errors that they raise; ours go to the user as messages
    noisy = logging.getLogger("torch._subclasses.fake_tensor")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL)
    try:
        with python_random(), torch.random.fork_rng(devices=[]), _recording(tracer, names), tracer, _Functions(tracer):
            torch.manual_seed(routing.seed)
            out = torch.func.functional_call(block, state, args, kwargs, strict=False, tie_weights=False)
        with torch._C.DisableTorchFunction():
            effects = _effects(tracer, block, before, state, inputs)
            effects += [Effect("record", path, None) for path, now, old in contents if not _same_items(now, old)]  # type: ignore[arg-type]
            out = opened(out, lambda t: _returned(tracer, t))
    finally:
        noisy.setLevel(level)
        for n, m in block.named_modules():
            _restore(m, before[n])
        for now, old in [*hooks, *[(now, old) for _, now, old in contents]]:  # models install hooks when first called
            _refill(now, old)
    tracer.graph.output(None)
    return Capture(
        tracer.graph,
        out,
        tracer.calls,
        effects,
        tracer.reads,
        tracer.sizes,
        tracer.nodes,
        tracer.constants,
        tracer,
        tracer.modes_read,
    )


HOOKS = {k for k in vars(nn.Module()) if k.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))}


def _is_record(key: str, value: Any) -> bool:
    """A container of the user's on a module."""
    return type(value) in (list, dict, set, collections.deque) and not key.startswith("_")


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    return a == b if isinstance(a, set) else len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _refill(container: Any, items: Any) -> None:
    if not _same_items(container, items):
        container.clear()
        container.extend(items) if hasattr(container, "extend") else container.update(items)


@contextlib.contextmanager
def python_random() -> Iterator[None]:
    """Python's own random numbers come out after a capture as if there had been none; numpy's, if it is in use."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


def _returned(tracer: Tracer, t: torch.Tensor) -> fx.Node:
    """The node of a result; a copy of an input is not the input itself."""
    node = tracer.node_of(t)
    if node.op == "placeholder" and node.meta["val"] is not t and is_float(t):
        node = tracer.emit(aten.clone.default, (node,), {})
        tracer.describe(node, t, False)
    return node


def _effects(
    tracer: Tracer,
    block: nn.Module,
    before: dict[str, dict[str, Any]],
    state: dict[str, torch.Tensor],
    inputs: list[tuple[int, torch.Tensor, fx.Node]],
) -> list[Effect]:
    found = []
    for name, t in state.items():
        if tracer.versions.get(id(t)):
            found.append(Effect("buffer", name, tracer.node_of(t)))
    for _, t, node in inputs:
        if tracer.versions.get(id(t)):
            found.append(Effect("input", node, tracer.node_of(t)))
    for n, m in block.named_modules():
        for key, value in vars(m).items():
            old = before[n].get(key, None)
            if (
                value is old
                or key in ("_parameters", "_buffers", "_modules")
                or key.startswith("_forward")
                or key.startswith("_backward")
            ):
                continue
            path = f"{n}.{key}" if n else key
            if isinstance(value, torch.Tensor) and id(value) in tracer.aliases:
                found.append(Effect("attribute", path, tracer.node_of(value)))
            elif not _unchanged(value, old):
                found.append(Effect("state", path, value))  # type: ignore[arg-type]
    return found


def _unchanged(value: Any, old: Any) -> bool:
    if tensors_in(value) or tensors_in(old):
        return False
    try:
        return bool(value == old)
    except Exception:
        return False


def _restore(module: nn.Module, before: dict[str, Any]) -> None:
    now = vars(module)
    for key in [k for k in now if k not in before]:
        del now[key]
    for key, value in before.items():
        if now.get(key) is not value:
            now[key] = value


__all__ = [
    "CONTRACTIONS",
    "Call",
    "Capture",
    "Effect",
    "HostRead",
    "Size",
    "Source",
    "Tracer",
    "capture",
    "is_float",
    "map_tensors",
    "tensors_in",
]
