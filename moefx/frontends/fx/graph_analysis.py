"""Analyse the nodes of a flat graph: values, dependencies, modes and weights.

Dependencies include memory: Dynamo's graphs have in-place ops, and readers of a written tensor do not name the write.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from ...ir.node_values import get_op_name
from .abstract_values import get_traced_value, guess_weights, has_traced_values, propagate_values
from .memory_aliases import StorageAliases, list_storage_ids
from .node_effects import NodeEffects, changes_state, find_effects, reads_autograd_graph
from .node_queries import (
    ENTER_AUTOCAST,
    LAYOUT_OPS,
    MODE_SWITCHES,
    SET_GRAD,
    find_attribute,
    find_functorch_nesting,
    find_user_sources,
    get_size_hint,
    is_float_tensor,
    is_module_tensor,
    simplify_size,
)
from .region_code import Autocast, Modes, call_target

_INTEGER_OPS = LAYOUT_OPS | {
    "getitem", "select", "slice", "narrow", "flatten", "unflatten", "movedim", "long", "int", "short", "type",
    "mod", "remainder", "floordiv", "floor_divide", "add", "sub", "mul", "clamp",
}  # fmt: skip


class GraphAnalysis:
    """The facts about each node of a graph.

    Args:
        example_inputs: one value for each placeholder; real, fake or on the meta device.
        origins: for a graph inside another, the outer node of each placeholder.

    Attributes:
        nodes: in program order, without those that switch modes.
        position: the index of each node in `nodes`.
        value: the abstract value of a node; for an item assignment, the tensor that it writes to.
        effects: the side effects of a node.
        unknown_effects: nodes that may do anything.
        autograd_readers: nodes that read the autograd graph.
        written_tensors: the nodes whose tensors a node writes to.
        deps: the nodes that a node's value depends on.
        order_deps: nodes that must stay before a node although its value does not depend on them.
        weights: the nodes of parameters and buffers, with the tensor if it is known.
        weight_only: nodes that depend on weights alone.
        active: nodes that depend on activations.
        side_inputs: active nodes that depend only on integers, masks or token counts, so they hold no rows.
        number_inputs: inputs that are numbers but no sizes, also in containers, and numbers computed from them.
        float_inputs: reads of the caller's floats whose value is known in this call.
        modes: the modes that are on at a node.
        transforms: the torch.func transforms around a node, outermost first, if any.
    """

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], origins: Mapping[fx.Node, fx.Node] | None = None
    ):
        self.gm = gm
        self.origins = origins or {}
        self.nodes: list[fx.Node] = []
        self.modes: dict[fx.Node, Modes] = {}
        self.transforms: dict[fx.Node, tuple[str, ...]] = {}
        self._read_modes()
        self.position = {n: i for i, n in enumerate(self.nodes)}
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        self.examples = dict(zip(placeholders, example_inputs, strict=False))
        self.value = self._collect_values(list(example_inputs))
        self.number_inputs = self._find_number_inputs()
        self.float_inputs = self._find_float_inputs()
        self._memory = self._find_aliases()
        self.effects = {n: find_effects(gm, n) for n in self.nodes}
        self.unknown_effects = [n for n in self.nodes if self.effects[n].unknown]
        self.autograd_readers = [n for n in self.nodes if reads_autograd_graph(n) and n not in self.transforms]
        self._drop_dead()
        self.deps: dict[fx.Node, list[fx.Node]] = {}
        self.order_deps: dict[fx.Node, list[fx.Node]] = {}
        self.written_tensors: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.writers: dict[int, list[fx.Node]] = defaultdict(list)  # by storage
        self._follow_memory()
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for n in self.nodes:
            for d in self.deps[n]:
                self.users[d].append(n)
        self.weights = self._find_weights()
        self.weight_only: set[fx.Node] = set()
        self.active: set[fx.Node] = set()
        self.side_inputs: set[fx.Node] = set()
        self._classify()

    # ------------------------------------------------------------------ modes
    def _read_modes(self) -> None:
        switches = any(n.target is SET_GRAD for n in self.gm.graph.nodes)
        grad = torch.is_grad_enabled() if switches else None
        open_: list[tuple[fx.Node, Autocast]] = []
        inside: tuple[str, ...] = ()
        for n in self.gm.graph.nodes:
            if n.op == "call_function" and n.target in MODE_SWITCHES:
                if n.target is SET_GRAD:
                    grad = bool(n.args[0])
                elif n.target is ENTER_AUTOCAST:
                    device, dtype, enabled = (list(n.args) + [None, True])[:3]
                    open_.append((n, Autocast(str(device), cast(Any, dtype), bool(enabled))))
                else:
                    open_ = [o for o in open_ if o[0] is not n.args[0]]
                continue
            self.nodes.append(n)
            self.modes[n] = Modes(grad, tuple(a for _, a in open_))
            if (nesting := find_functorch_nesting(n)) is not None:
                inside = (*inside, nesting[0]) if nesting[1] > 0 else inside[:-1]
            if inside:
                self.transforms[n] = inside

    # ------------------------------------------------------------------ values
    def _collect_values(self, example_inputs: list[Any]) -> dict[fx.Node, Any]:
        if not has_traced_values(self.gm.graph):
            return propagate_values(self.gm, example_inputs)
        value: dict[fx.Node, Any] = {}
        for n in self.nodes:
            traced_value = get_traced_value(n)
            if n.op == "output":
                continue
            if traced_value is None and n.op == "placeholder":
                traced_value = self.examples.get(n)
            elif traced_value is None and n.op == "get_attr":
                traced_value = find_attribute(self.gm, str(n.target))
            value[n] = traced_value
        for n in self.nodes:
            if n.op == "call_function" and n.target is operator.setitem:
                value[n] = value[n.args[0]]  # type: ignore[index]
        return value

    def _drop_dead(self) -> None:
        """Drop nodes without effects whose tensors nobody reads, such as autograd's leftovers in traces."""
        dead: set[fx.Node] = set()
        for n in reversed(self.nodes):
            if n.target is torch.ops.aten._assert_tensor_metadata.default:  # holds for the inputs of the trace
                dead.add(n)
                continue
            # torch drops these, too
            is_op = n.target is operator.getitem or isinstance(n.target, torch._ops.OpOverload)
            is_pure = is_op and self.effects[n] == NodeEffects()
            if is_pure and isinstance(self.value[n], (torch.Tensor, tuple, list)) and dead.issuperset(n.users):
                dead.add(n)
        self.nodes = [n for n in self.nodes if n not in dead]
        self.position = {n: i for i, n in enumerate(self.nodes)}

    def tensor(self, n: fx.Node) -> torch.Tensor | None:
        value = self.value.get(n)
        return value if isinstance(value, torch.Tensor) else None

    def find_source_line(self, n: fx.Node) -> str:
        """Return the user's line that made a node, or its position if the graph has no stack traces."""
        return str(find_user_sources(n, self.position[n])[0])

    def find_source_name(self, n: fx.Node) -> str:
        """Return Dynamo's source of an input, such as `L['self']._modules['gate']._parameters['weight']`, or ""."""
        n = self.origins.get(n, n)
        source = getattr(n.meta.get("grapharg"), "source", None) or getattr(n, "_dynamo_source", None)
        name = getattr(source, "name", "")
        return str(name() if callable(name) else name)

    def is_float(self, n: fx.Node) -> bool:
        t = self.tensor(n)
        return t is not None and t.is_floating_point()

    def find_example_integers(self, n: fx.Node) -> torch.Tensor | None:
        """Return the integers of the first call in an input, or in a value moved, cast or computed from one input and
        numbers.
        None if they are unknown.
        """
        integers = self.examples.get(n)
        if n.op != "placeholder":
            tensors = [d for d in n.all_input_nodes if not self.is_number(d)]
            is_known = get_op_name(n) in _INTEGER_OPS and len(tensors) == 1
            # a value that was written to has other numbers
            is_known &= [d for d in self.deps[n] if not self.is_number(d)] == tensors and n not in self.written_tensors
            integers = self.find_example_integers(tensors[0]) if is_known else None
            if integers is not None:
                integer_by_node = {
                    d: integers if d is tensors[0] else get_size_hint(self.value[d]) for d in n.all_input_nodes
                }
                args, kwargs = map_arg((n.args, n.kwargs), integer_by_node.__getitem__)
                integers = call_target(n.target, n.op == "call_method", args, kwargs)
        if type(integers) is not torch.Tensor or integers.is_meta or integers.is_floating_point():
            return None
        return integers.detach()

    def evaluate_from_weights(self, n: fx.Node) -> torch.Tensor | None:
        """Compute a node that depends on weights alone, from their values. Returns the abstract value if some weights
        are abstract or a node on the way has effects; None if the node is a weight or depends on other inputs.
        """
        if n in self.weights or n not in self.weight_only or not self.is_float(n):
            return None
        values: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            if node in self.weights:
                return self.weights[node]
            if self.effects[node] != NodeEffects():
                raise ValueError(node)
            if node not in values:
                args, kwargs = map_arg((node.args, node.kwargs), value)
                values[node] = call_target(node.target, node.op == "call_method", args, kwargs)
            return values[node]

        try:
            with torch.no_grad():
                return value(n)
        except Exception:  # also if only some weights are abstract
            return self.value[n]

    def _find_number_inputs(self) -> set[fx.Node]:
        """Find inputs that are numbers but no sizes, and numbers computed from them."""
        sizes = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, type(None))
        number_nodes = {n for n in self.nodes if n.op == "placeholder" and not isinstance(self.value.get(n), sizes)}
        for n in self.nodes:
            if number_nodes & {*n.all_input_nodes} and not isinstance(self.value.get(n), torch.Tensor):
                number_nodes.add(n)
        return number_nodes

    def _find_float_inputs(self) -> set[fx.Node]:
        """Find nodes that read a float of the caller whose value is known in this call."""
        items = [n for n in self.nodes if get_op_name(n) == "item" and self._is_float_input(n.all_input_nodes[0])]
        return {n for n in items if isinstance(v := self.value.get(n), torch.SymFloat) and v.node.hint is not None}

    def is_number(self, n: fx.Node) -> bool:
        """Return whether a node is a size, or computed from sizes."""
        return isinstance(self.value.get(n), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))

    # ------------------------------------------------------------------ memory
    def _follow_memory(self) -> None:
        """Add dependencies through memory: a read depends on the last write, and a write stays behind earlier reads."""
        last: dict[int, fx.Node] = {}
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        for n in self.nodes:
            inputs = [a for a in n.all_input_nodes if a in self.position]
            deps, earlier_readers = dict.fromkeys(inputs), {}
            storages = {s for a in inputs for s in self.find_storages(a)}
            targets = tuple(t for t in self.effects[n].writes if t in self.position)
            written_storages = {s for t in targets for s in self.find_storages(t)}
            for s in sorted(storages):
                if s in last:
                    deps[last[s]] = None
                if s in written_storages:
                    earlier_readers.update(dict.fromkeys(readers[s]))
            for s in storages:
                readers[s].append(n)
            for s in written_storages:
                last[s], readers[s] = n, []
                self.writers[s].append(n)
            if written_storages:
                self.written_tensors[n] = targets
            self.deps[n], self.order_deps[n] = list(deps), list(earlier_readers)

    def find_storages(self, n: fx.Node | None) -> list[int]:
        """Return the storages of a node's tensors; aliases have one representative."""
        return self._memory.find_joined_storages(self.value.get(n) if n is not None else None)

    def find_written_memory(self, n: fx.Node) -> set[int]:
        """Return the storages that a node writes to."""
        return {s for t in self.written_tensors.get(n, ()) for s in self.find_storages(t)}

    def _find_aliases(self) -> StorageAliases:
        """Join storages that are the same memory, also of attributes and inputs that tracers treat as distinct."""
        first: dict[int, int] = {}  # by real storage
        aliases = StorageAliases()
        for n in self.nodes:
            example = find_attribute(self.gm, str(n.target)) if n.op == "get_attr" else self.examples.get(n)
            if self.tensor(n) is not None and isinstance(example, torch.Tensor):
                (storage,), (real,) = list_storage_ids(self.value[n]), list_storage_ids(example)
                aliases.join(first.setdefault(real, storage), storage)
        aliases.join_views(self.nodes, self.value)
        return aliases

    def keeps_order(self, n: fx.Node) -> bool:
        """Return whether no node may move across this one."""
        return self.effects[n].unknown or changes_state(n, self.value.get(n))

    # ------------------------------------------------------------------ what follows from what
    def _find_weights(self) -> dict[fx.Node, torch.Tensor]:
        """Find the parameters and buffers by node. If the graph marks none, inputs that are likely weights."""
        weights: dict[fx.Node, torch.Tensor] = {}
        for n in self.nodes:
            if n.op == "get_attr" and isinstance(t := self.value[n], torch.Tensor):
                attribute = find_attribute(self.gm, str(n.target))
                weights[n] = attribute if isinstance(attribute, torch.Tensor) else t
            elif n.op == "placeholder":
                t = self.examples.get(n, self.value.get(n))
                is_parameter = isinstance(t, nn.Parameter) or isinstance(self.value.get(n), nn.Parameter)
                if isinstance(t, torch.Tensor) and (is_parameter or is_module_tensor(self.find_source_name(n))):
                    weights[n] = t
        if any(n.op == "placeholder" or is_float_tensor(t) for n, t in weights.items()):
            return weights
        inputs: dict[fx.Node, Any] = {
            n: self.examples.get(n, self.value.get(n)) for n in self.nodes if n.op == "placeholder"
        }
        return weights | {n: inputs[n] for n in guess_weights(self.gm.graph, inputs)}

    def _is_size(self, n: fx.Node) -> bool:
        """Return whether a number depends on sizes only; it then does not depend on the values of the sized tensor."""
        value = self.value.get(n)
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.hint is not None

    def _is_float_input(self, n: fx.Node) -> bool:
        """Return whether a node is a float of the caller. Dynamo passes it as a 0-d tensor if sizes are dynamic."""
        t = self.tensor(n)
        items = t is not None and not t.dim() and bool(n.users) and all(get_op_name(u) == "item" for u in n.users)
        return items and n.op == "placeholder"

    def _classify(self) -> None:
        """Find the nodes that depend on weights alone, on activations, and on side inputs alone."""
        side_inputs: set[fx.Node] = set()  # without rows and weights
        numbers = self._find_token_masks()
        for n in self.nodes:
            deps = self.deps[n]
            if self._is_float_input(n) or self._is_size(n):
                continue
            if n.op == "placeholder" and n not in self.weights and isinstance(self.value.get(n), torch.Tensor):
                self.active.add(n)
                if not self.is_float(n) or n in numbers:
                    side_inputs.add(n)
            elif n in self.weights or (deps and all(d in self.weight_only for d in deps)):
                self.weight_only.add(n)
            elif any(d in self.active for d in deps):
                self.active.add(n)
                if all(d in side_inputs or (d not in self.active and d not in self.weight_only) for d in deps):
                    side_inputs.add(n)
        self.side_inputs = side_inputs

    def _find_token_masks(self) -> set[fx.Node]:
        """Find float inputs with one number per token, such as masks, if another input has a row per token."""
        inputs = {n: t.shape for n in self.nodes if n.op == "placeholder" and n not in self.weights
                  if (t := self.tensor(n)) is not None and t.is_floating_point()}  # fmt: skip
        tokens = [
            tuple(map(simplify_size, shape[:-1]))
            for shape in inputs.values()
            if len(shape) > 1 and simplify_size(shape[-1]) != 1
        ]
        sizes = {n: tuple(map(simplify_size, shape)) for n, shape in inputs.items()}
        return {n for n, size in sizes.items() if size and (size in tokens or (size[-1] == 1 and size[:-1] in tokens))}
