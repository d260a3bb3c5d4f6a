"""`BlockGraph`: the rewritten computation of one block, as an immutable value.

A block's graph is a `torch.fx.Graph`. Its placeholders are the tensor arguments of the block, its `get_attr` and
`call_module` targets are names relative to the block, and its calls are torch ops, dialect ops and `operator`
functions. Effects are nodes too, such as `aten.copy_` into a buffer. `node.meta` is a `BlockMeta`.

A graph refers to no module and holds no weights, so blocks of the same structure may share one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from ..argument_binding import Binding, Guard, Path
from ..node_values import (
    BUILD_PFT,
    PLACE_CHOICES,
    PULL_TOKENS,
    WAIT_GATHERED,
    TensorSpec,
    format_target,
    get_argument,
    read_item,
)
from . import graph_codegen
from .graph_printer import print_block
from .op_joining import join_ops

_EXPERT_OFFSETS = 2  # position among the results of build_pft


@dataclasses.dataclass(frozen=True, eq=False)
class BlockGraph:
    """The graph of one block; frozen: passes work on a `copy()`.

    Attributes:
        name: the block's name in the model, "" for the model itself.
        graph: the FX graph.
        binding: which arguments of the block feed the placeholders.
        output_spec: the pytree to rebuild from the output node's flat list; None if the block returns only tuples,
            lists and dicts.
        header: provenance, printed after the name: "after 5/8 collectives   1.9 ms   +4 -1   ...".
    """

    name: str
    graph: Graph
    binding: Binding = dataclasses.field(default_factory=Binding)
    output_spec: pytree.TreeSpec | None = None
    header: str = ""

    @property
    def nodes(self) -> list[Node]:
        return list(self.graph.nodes)

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> Node:
        return next(iter(reversed(self.graph.nodes)))

    @property
    def returned(self) -> Any:
        """The value that the graph returns: nodes in the user's containers, or in a flat list if one of these is not a
        plain Python container."""
        value: Any = self.output.args[0]
        if self.output_spec is None:
            return value
        rebuilt = pytree.tree_unflatten(list(value), self.output_spec)
        return rebuilt if _is_literal(rebuilt) else value

    def find(self, target: Any) -> list[Node]:
        """Return all nodes with this target: an overload, a function, an attribute path or an op name
        (`"moefx::combine"`)."""
        return [n for n in self.graph.nodes if n.target == target or format_target(n) == target]

    def copy(self) -> BlockGraph:
        """Copy the graph with its node names and `meta` dicts."""
        graph = Graph()
        nodes: dict[Node, Node] = {}
        for node in self.graph.nodes:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
            nodes[node].name = node.name
        return dataclasses.replace(self, graph=graph)

    def replace(self, **changes: Any) -> BlockGraph:
        return dataclasses.replace(self, **changes)

    def with_inputs(self, paths: Mapping[str, Path]) -> BlockGraph:
        """Replace attributes of the block by placeholders that are bound to these paths."""
        block, nodes_by_name = self.copy(), {}
        for node in [n for n in block.graph.nodes if n.op == "get_attr"]:
            nodes_by_name.setdefault(str(node.target), []).append(node)
        last = block.placeholders[-1]
        for name in paths:
            with block.graph.inserting_after(last):
                last = block.graph.placeholder(f"weight_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}")
            for node in nodes_by_name.get(name, ()):
                last.meta.update(node.meta)
                node.replace_all_uses_with(last)
                block.graph.erase_node(node)
        binding = dataclasses.replace(block.binding, paths=(*block.binding.paths, *paths.values()))
        return block.replace(binding=binding)

    def compile(self, *, record_load: bool = False, join: bool = False) -> Callable[..., Any]:
        """Compile the graph to a Python function `(block, *placeholder values) -> output`.

        Args:
            record_load: return `(output, (expert_offsets, ...))`, a tensor for each PFT of the block's own tokens.
            join: run consecutive dialect ops as one (see `joined_ops`). For calls that no compiler traces.
        """
        graph, record = self._with_recorded_offsets() if record_load else (self, ())
        if join:
            graph = graph.replace(graph=join_ops(graph.graph, self.name))
        source = graph.source(record)
        return graph_codegen.compile_source(source.text, source.scope, "forward", self.name)

    def compile_guards(self, guards: Sequence[Guard]) -> Callable[..., int]:
        """Compile a function `(block, *placeholder values) -> index of the first guard that fails, or -1`."""
        source = graph_codegen.guard_source([n.name for n in self.placeholders], guards)
        return graph_codegen.compile_source(source, dict(graph_codegen.FUNCTIONS), "guard", f"{self.name} guards")

    @property
    def code(self) -> str:
        """The Python source that `compile` runs."""
        return self.source().text

    def source(self, record: Sequence[Node] = ()) -> graph_codegen.GeneratedSource:
        """Generate the source and the global names that it needs."""
        value = self.returned
        rebuild = self.output_spec is not None and value is self.output.args[0]
        return graph_codegen.GeneratedSource(self.graph, value, record, self.output_spec if rebuild else None)

    def _with_recorded_offsets(self) -> tuple[BlockGraph, Sequence[Node]]:
        """Return a graph and the nodes of its `expert_offsets`, for the block's own tokens.

        Over a mesh, PFTs of exchanged rows count other ranks' tokens. So the returned graph has one more PFT for this
        rank's tokens before each `place_choices`; these come first.
        """
        if not self.find(PLACE_CHOICES):
            return self, self._find_offsets()
        block, offsets = self.copy(), []
        local = block._find_offsets()
        for node in block.find(PLACE_CHOICES):
            choices = get_argument(node, "topk_ids"), None, get_argument(node, "keep")
            kwargs: dict[str, Any] = {"num_experts": len(get_argument(node, "places"))}
            with block.graph.inserting_before(node):
                pft = block.graph.call_function(torch.ops.moefx.build_pft.default, choices, kwargs)
                offsets.append(block.graph.call_function(operator.getitem, (pft, _EXPERT_OFFSETS)))
        return block, offsets + local

    def _find_offsets(self) -> list[Node]:
        """Return the used `expert_offsets` of the PFTs that are built from this rank's tokens."""
        build_nodes = [node for node in self.find(BUILD_PFT) if not _includes_other_ranks(node)]
        candidates = [results[_EXPERT_OFFSETS] for node in build_nodes if (results := graph_codegen.list_results(node))]
        return [offsets for offsets in candidates if offsets is not None]

    def __str__(self) -> str:
        return print_block(self)

    def __repr__(self) -> str:
        return f"<BlockGraph {self.name or 'model'}: {len(self.graph.nodes)} nodes>"

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockGraph:
        return self  # immutable: deep copies of a model share it

    def __reduce__(self) -> tuple[Any, ...]:
        spec: Any = self.output_spec
        # JSON if the user's classes allow it, because loading a pickled spec warns.
        with contextlib.suppress(NotImplementedError):
            spec = spec and pytree.treespec_dumps(spec)
        return _unpack_block, (_pack_graph(self.graph), self.name, self.binding, spec, self.header)


def _includes_other_ranks(pft: Node) -> bool:
    """Return whether a `build_pft` routes tokens that came from other ranks, too."""
    if get_argument(pft, "num_rows") is not None:
        return True
    routed_ids = get_argument(pft, "topk_ids")
    is_part = isinstance(routed_ids, Node) and routed_ids.target is operator.getitem
    return is_part and format_target(read_item(routed_ids)[0]) in (WAIT_GATHERED, PULL_TOKENS)


def _is_literal(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_literal, value))
    if type(value) is dict:
        return all(map(_is_literal, value.values()))
    return value is None or isinstance(value, (Node, bool, int, float, str))


# -- saving and loading ----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _PackedGraph:
    """A graph as plain data: nodes by position, ops by name. Blocks that share a graph share this in a pickle."""

    nodes: list[tuple[Any, ...]]

    @functools.cached_property
    def graph(self) -> Graph:
        graph = Graph()
        nodes: list[Node] = []
        for op, name, target, args, kwargs, meta in self.nodes:
            unpack = functools.partial(_unpack_value, nodes=nodes)
            node = graph.create_node(
                op, unpack(target), map_aggregate(args, unpack), map_aggregate(kwargs, unpack), name
            )
            node.name = name
            node.meta.update(meta)
            nodes.append(node)
        graph.__dict__[_PACK] = self
        return graph

    def __getstate__(self) -> dict[str, Any]:
        return {"nodes": self.nodes}


_PACK = "_moefx_pack"


@dataclasses.dataclass(frozen=True)
class _NodeRef:
    index: int


@dataclasses.dataclass(frozen=True)
class _OpRef:
    name: str


def _pack_graph(graph: Graph) -> _PackedGraph:
    pack = graph.__dict__.get(_PACK)
    if pack is None:
        position = {node: _NodeRef(i) for i, node in enumerate(graph.nodes)}

        def plain(value: Any) -> Any:
            if isinstance(value, Node):
                return position[value]
            return _OpRef(str(value)) if isinstance(value, torch._ops.OpOverload) else value

        nodes = [
            (
                *(n.op, n.name, plain(n.target)),
                *(_plain_containers(n.args, plain), _plain_containers(n.kwargs, plain)),
                _saved_meta(n),
            )
            for n in graph.nodes
        ]
        # Cached on the graph, for as long as the graph lives.
        pack = graph.__dict__[_PACK] = _PackedGraph(nodes)
    return pack


def _unpack_block(
    pack: _PackedGraph, name: str, binding: Binding, output_spec: str | pytree.TreeSpec | None, header: str
) -> BlockGraph:
    spec = pytree.treespec_loads(output_spec) if isinstance(output_spec, str) else output_spec
    return BlockGraph(name, pack.graph, binding, spec, header)


def _unpack_value(value: Any, nodes: list[Node]) -> Any:
    if isinstance(value, _NodeRef):
        return nodes[value.index]
    if isinstance(value, _OpRef):
        namespace, op, overload = value.name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    return value


def _plain_containers(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Map `leaf` over a tree, like `map_aggregate`, into plain lists and dicts instead of FX's immutable ones."""
    if isinstance(value, dict):
        return {key: _plain_containers(item, leaf) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = [_plain_containers(item, leaf) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, slice):
        return slice(*(_plain_containers(v, leaf) for v in (value.start, value.stop, value.step)))
    return leaf(value)


def _saved_meta(node: Node) -> dict[str, Any]:
    meta = {key: _plain_meta(value) for key, value in node.meta.items() if _is_plain(value)}
    return {**meta, "source": str(node.meta["source"])} if node.meta.get("source") else meta


def _is_plain(value: Any) -> bool:
    """Return whether a meta value can be saved: shapes and plain data can, modes, tracebacks and closures cannot."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(
        value, (torch.Tensor, torch.SymInt, bool, int, float, str, torch.dtype, torch.device)
    )


def _plain_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(_plain_meta(size) for size in value.shape), value.dtype, value.device)
    if isinstance(value, torch.SymInt):
        return str(value)
    if isinstance(value, (TensorSpec, dict)):
        return value
    return type(value)(map(_plain_meta, value)) if isinstance(value, (list, tuple)) else value
