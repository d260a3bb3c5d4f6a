"""Concolic capture: run a block once with abstract floats and concrete routing.

Floats are fake tensors without memory, so models on the meta device work, too. Integers and booleans are small real
tensors, so data-dependent Python (`nonzero`, `.tolist()`, `if mask.any()`) runs. If an integer is computed from a float
(`topk`, a comparison), the float gets a concrete value: see `concrete_values`.

The result is a functional ATen graph without in-place updates. `linear`, `matmul` and `einsum` stay whole, each node
has the user's source line, and the calls of submodules are recorded. The block is left unchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.dataclass_fields import open_dataclasses
from ..util.fake_tensor_log import without_fake_tensor_errors
from ..util.tensor_trees import collect_tensors, is_float
from .sizes.size_guards import SizeLog
from .state.filled_caches import clear_filled_caches
from .state.outside_state import OutsideState
from .state.side_effects import (
    HOOKS,
    REGISTRIES,
    collect_effects,
    copy_registries,
    find_attribute_tensors,
    find_registry_changes,
    install_copies,
    keep_random_state,
    restore_attributes,
    restore_registries,
)
from .tracing.call_recording import record_calls
from .tracing.capture_observer import CaptureObserver
from .tracing.capture_result import Capture, Effect
from .tracing.concrete_routing import Routing
from .tracing.host_reads import Interventions
from .tracing.torch_functions import TorchFunctions
from .tracing.tracer import Tracer

aten = torch.ops.aten


def capture_block(
    block: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    routing: Routing,
    *,
    interventions: Interventions | None = None,
    dims: dict[str, int] | None = None,
    sizes: SizeLog | None = None,
    max_nodes: int = 0,
    extra_values: Mapping[str, Sequence[int]] | None = None,
    observer: CaptureObserver | None = None,
) -> Capture:
    """Run `block(*args, **kwargs)` on abstract floats under `routing`, and restore the block.

    Args:
        args, kwargs: meta tensors for floats, and real tensors for integers.
        interventions: forced outcomes.
        dims: the symbolic sizes by name.
        sizes: the log to fill, instead of a new one for `dims`.
        max_nodes: limit of the graph's size; 0: none.
        extra_values: numbers to put among the values of integer buffers, by name.
        observer: sees the calls of modules and the ops.

    Raises:
        CaptureError: the block does something that captures do not support. It has the user's source line.
        Refused: the block does something that a block must not do.
    """
    tracer = Tracer(routing, interventions, observer)
    tracer.sizes, tracer.max_nodes = sizes or SizeLog(dims), max_nodes
    tracer.named = find_attribute_tensors(block)

    def make_copy(t: torch.Tensor, name: str) -> torch.Tensor:
        return routing.vary_integers(t, name, (extra_values or {}).get(name, ()))

    state = _register_state(tracer, block, make_copy)
    args, kwargs, inputs = _register_inputs(tracer, args, kwargs)
    initial_tensors = dict(state)
    snapshot = _Snapshot(block, (args, kwargs))
    try:
        tracer.named |= install_copies(block, make_copy)
        attributes = snapshot.list_attributes()
        out, random_draws = _run_block(tracer, block, state, args, kwargs, snapshot)
        with torch.DisableTorchFunction():
            effects = collect_effects(tracer, snapshot.modules, attributes, initial_tensors, state, inputs)
            effects += _collect_records(tracer, snapshot, out, random_draws)
            written_inputs = {
                e.node: t for e in effects if e.kind == "input" for _, t, node in inputs if e.target is node
            }
            out = open_dataclasses(out, lambda t: _find_result_node(tracer, t, written_inputs))
            tracer.refuse_lost_gradients([n for n in pytree.tree_leaves(out) if isinstance(n, fx.Node)])
    finally:
        snapshot.restore()
        with torch.no_grad(), torch.DisableTorchFunction():
            for t, value in tracer.overwritten.values():
                t.copy_(value)
    tracer.graph.output(None)
    return Capture(
        routing=tracer.routing,
        interventions=tracer.interventions,
        graph=tracer.graph,
        nodes=tracer.nodes,
        out=out,
        calls=tracer.calls,
        effects=effects,
        reads=tracer.reads,
        plain_reads=tracer.plain_reads,
        emptiness_tests=tracer.emptiness_tests,
        sizes=tracer.sizes,
        constants=tracer.constants,
        refusals=tracer.refusals,
        modes_read=tracer.modes_read,
        fake_mode=tracer.fake_mode,
        compute_value=tracer.concrete_value,
    )


class _Snapshot:
    """All that a run of a block may change in Python: its modules, and the objects that its code and arguments reach.

    Attributes:
        modules: the block's modules, each once, with its name.
        outside: the objects outside of the modules.
    """

    def __init__(self, block: nn.Module, arguments: Any):
        self.modules = list(block.named_modules())
        self.outside = OutsideState(block, arguments)
        self._attributes = self.list_attributes()
        self._registries = copy_registries(self.modules, REGISTRIES)
        self._hooks = copy_registries(self.modules, HOOKS)

    def list_attributes(self) -> dict[str, dict[str, Any]]:
        """Return the current attributes of each module."""
        return {name: dict(vars(module)) for name, module in self.modules}

    def find_registry_changes(self) -> list[Effect]:
        return find_registry_changes(self._registries)

    def restore(self) -> None:
        restore_registries(self._registries)
        for name, module in self.modules:
            restore_attributes(module, self._attributes[name])
        restore_registries(self._hooks)  # models may install hooks at their first call
        self.outside.restore()


def _collect_records(tracer: Tracer, snapshot: _Snapshot, out: Any, random_draws: list[str]) -> list[Effect]:
    """Return the effects of a run that a graph cannot repeat.

    Args:
        random_draws: the names of the random generators that the run used.
    """
    foreign = [tracer.named.get(i, "a tensor that is no buffer") for i in tracer.overwritten]
    new_attributes = {key for t in collect_tensors(out) for key in vars(t).keys() - _list_fake_attributes()}
    return [
        *snapshot.find_registry_changes(),
        *(_describe_record(tracer, snapshot, path) for path in snapshot.outside.list_changes()),
        *(Effect("record", path, None) for path in foreign),
        *(Effect("draw", name, None) for name in random_draws),
        *(Effect("record", f"the attribute {key} of a tensor", None) for key in new_attributes),
    ]


def _describe_record(tracer: Tracer, snapshot: _Snapshot, path: str) -> Effect:
    """Return the effect of a changed object, with the line that computes a tensor which the object holds now."""
    new_tensors = [t for t in snapshot.outside.find_new_tensors(path) if id(t) in tracer.aliases]
    return Effect("record", path, None, next((str(tracer.node_of(t).meta["source"]) for t in new_tensors), ""))


def _run_block(
    tracer: Tracer,
    block: nn.Module,
    state: dict[str, torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    snapshot: _Snapshot,
) -> tuple[Any, list[str]]:
    """Run a block under the tracer. Returns its result, and the names of the random generators that it used."""
    functions = TorchFunctions(tracer)
    names = {id(module): name for name, module in snapshot.modules if name}
    with (
        without_fake_tensor_errors(), clear_filled_caches(tracer),
        keep_random_state(snapshot.outside.generators) as list_drawn,
        torch.random.fork_rng(devices=[]), record_calls(tracer, names, functions), tracer, functions,
    ):  # fmt: skip
        torch.default_generator.manual_seed(tracer.routing.seed)  # captures use no generator of an accelerator
        try:
            out = torch.func.functional_call(block, state, args, kwargs, strict=False, tie_weights=False)
        except Exception as error:
            if tracer.refusals:  # the cause of the error
                raise tracer.refusals[0] from error
            raise
        return out, list_drawn()


def _register_state(
    tracer: Tracer, block: nn.Module, make_copy: Callable[[torch.Tensor, str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Add nodes for parameters and buffers to the graph, and return their abstract copies by name."""
    state: dict[str, torch.Tensor] = {}
    buffers = {name for name, _ in block.named_buffers(remove_duplicate=False)}
    seen: dict[int, torch.Tensor] = {}
    slots: set[tuple[int, str]] = set()
    modules = dict(block.named_modules(remove_duplicate=False))
    for name, t in [
        *block.named_parameters(remove_duplicate=False),
        *block.named_buffers(remove_duplicate=False),
    ]:
        owner, _, key = name.rpartition(".")
        slot = (id(modules[owner]), key)
        if slot in slots:
            continue  # a module with two names: a second swap of its tensors would not be undone
        slots.add(slot)
        if id(t) in seen:
            state[name] = seen[id(t)]
            continue
        value = tracer.to_fake(t) if is_float(t) else make_copy(t, name)
        node = tracer.register(tracer.graph.create_node("get_attr", name.replace(".", "_")))
        node.meta.update(fqn=name, kind="buffer" if name in buffers else "param", original=weakref.ref(t))
        tracer.describe(node, value, False)
        tracer.track(value, node)
        state[name] = seen[id(t)] = value
        tracer.originals[id(t)] = name
    tracer.state_ids = {id(value) for value in state.values()}
    tracer.state_sizes = {n for value in state.values() for n in value.shape}
    return state


def _register_inputs(
    tracer: Tracer, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any], list[tuple[int, torch.Tensor, fx.Node]]]:
    """Add placeholders for the tensor arguments to the graph.

    Returns:
        args and kwargs with abstract copies of tensors; for each copy its index among the leaves, itself and its node.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    inputs: list[tuple[int, torch.Tensor, fx.Node]] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            value = tracer.to_fake(leaf) if is_float(leaf) else leaf.clone()
            if (force := tracer.interventions.get(len(inputs))) is not None:
                value = force(value)
            node = tracer.register(tracer.graph.placeholder(f"arg{len(inputs)}"))
            node.meta["position"] = len(inputs)
            tracer.describe(node, value, False)
            tracer.track(value, node)
            inputs.append((i, value, node))
            leaves[i] = value
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs, inputs


@functools.cache
def _list_fake_attributes() -> set[str]:
    """Return the names of the attributes that all fake tensors have."""
    with FakeTensorMode():
        return set(vars(torch.empty(1, dtype=torch.float32).view(1)))


def _find_result_node(tracer: Tracer, t: torch.Tensor, written_inputs: dict[fx.Node, torch.Tensor]) -> fx.Node:
    """Return the node of a result. If the result is a copy of an input, clone the input's node.

    Args:
        written_inputs: the tensors of inputs that the block wrote to, by their new nodes.
    """
    node = tracer.node_of(t)
    if (node.op == "placeholder" and node.meta["val"] is not t and is_float(t)) or written_inputs.get(node, t) is not t:
        node = tracer.emit(aten.clone.default, (node,), {})
        tracer.describe(node, t, False)
    return node
