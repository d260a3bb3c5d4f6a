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

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.dataclass_fields import open_dataclasses
from ..util.fake_tensor_log import without_fake_tensor_errors
from .call_recording import record_calls
from .capture_result import Capture, Effect
from .concrete_routing import Routing
from .filled_caches import clear_filled_caches
from .host_reads import Interventions
from .outside_state import OutsideState
from .raw_containers import copy_items, restore_items
from .side_effects import (
    HOOKS,
    collect_effects,
    find_attribute_tensors,
    install_stand_ins,
    keep_random_state,
    restore_attributes,
)
from .symbolic_sizes import SizeLog
from .tensor_trees import collect_tensors, is_float
from .torch_functions import TorchFunctions
from .tracer import Tracer

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
    held: Mapping[str, Sequence[int]] | None = None,
) -> Capture:
    """Run `block(*args, **kwargs)` on abstract floats under `routing`.

    `args` and `kwargs` hold meta tensors for floats and real tensors for integers; `held` has numbers that are among
    the values of integer buffers, by name; `sizes` is the log to fill, instead of one of `dims`. The block, its
    parameters and its buffers are left as they were. Raises `CaptureError` with the user's source line.
    """
    tracer = Tracer(routing, interventions)
    tracer.sizes, tracer.max_nodes = sizes or SizeLog(dims), max_nodes
    tracer.named = find_attribute_tensors(block)

    def stand_in(t: torch.Tensor, name: str) -> torch.Tensor:
        return routing.vary_integers(t, name, (held or {}).get(name, ()))

    state: dict[str, torch.Tensor] = {}
    buffers = {name for name, _ in block.named_buffers(remove_duplicate=False)}
    seen: dict[int, torch.Tensor] = {}
    places: set[tuple[int, str]] = set()
    modules = dict(block.named_modules(remove_duplicate=False))
    for name, t in [
        *block.named_parameters(remove_duplicate=False),
        *block.named_buffers(remove_duplicate=False),
    ]:
        owner, _, key = name.rpartition(".")
        place = (id(modules[owner]), key)
        if place in places:
            continue  # a module under two names: to swap its tensors twice would leave the first swap behind
        places.add(place)
        if id(t) in seen:
            state[name] = seen[id(t)]
            continue
        value = tracer.to_fake(t) if is_float(t) else stand_in(t, name)
        node = tracer._register(tracer.graph.create_node("get_attr", name.replace(".", "_")))
        node.meta.update(fqn=name, kind="buffer" if name in buffers else "param", original=t)
        tracer.describe(node, value, False)
        tracer.track(value, node)
        state[name] = seen[id(t)] = value
        tracer.originals[id(t)] = name
    tracer.state_ids = {id(value) for value in state.values()}
    tracer.state_sizes = {n for value in state.values() for n in value.shape}

    leaves, spec = pytree.tree_flatten((args, kwargs))
    inputs: list[tuple[int, torch.Tensor, fx.Node]] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            value = tracer.to_fake(leaf) if is_float(leaf) else leaf.clone()
            if (otherwise := tracer.interventions.get(len(inputs))) is not None:
                value = otherwise(value)
            node = tracer._register(tracer.graph.placeholder(f"arg{len(inputs)}"))
            node.meta.update(leaf=i, position=len(inputs))
            tracer.describe(node, value, False)
            tracer.track(value, node)
            inputs.append((i, value, node))
            leaves[i] = value
    args, kwargs = pytree.tree_unflatten(leaves, spec)

    given = dict(state)
    unique = list(block.named_modules())
    names = {id(m): n for n, m in unique if n}
    originals = {n: dict(vars(m)) for n, m in unique}
    tracer.named |= install_stand_ins(block, stand_in)
    before = {n: dict(vars(m)) for n, m in unique}
    hooks = [(own[k], copy_items(own[k])) for own in before.values() for k in HOOKS & own.keys()]
    surroundings, functions = OutsideState(block, (args, kwargs)), TorchFunctions(tracer)
    try:
        with (
            without_fake_tensor_errors(), clear_filled_caches(tracer),
            keep_random_state(surroundings.generators) as drawn, torch.random.fork_rng(devices=[]),
            record_calls(tracer, names, functions), tracer, functions,
        ):  # fmt: skip
            torch.default_generator.manual_seed(routing.seed)  # no accelerator's: none is used here, nor kept
            try:
                out = torch.func.functional_call(block, state, args, kwargs, strict=False, tie_weights=False)
            except Exception as error:
                if tracer.refusals:  # the error follows from that
                    raise tracer.refusals[0] from error
                raise
            draws = drawn()
        with torch.DisableTorchFunction():
            effects = collect_effects(tracer, block, before, given, state, inputs)
            foreign = [tracer.named.get(i, "a tensor that is no buffer") for i in tracer.overwritten]
            effects += [Effect("record", path, None) for path in [*surroundings.list_changes(), *foreign]]
            effects += [Effect("draw", name, None) for name in draws]
            changed = {e.node: t for e in effects if e.kind == "input" for _, t, node in inputs if e.target is node}
            own = {key for t in collect_tensors(out) for key in vars(t).keys() - _names_of_fakes()}
            effects += [Effect("record", f"the attribute {key} of a tensor", None) for key in own]
            out = open_dataclasses(out, lambda t: _returned(tracer, t, changed))
            tracer.refuse_lost_gradients([n for n in pytree.tree_leaves(out) if isinstance(n, fx.Node)])
    finally:
        for n, m in block.named_modules():
            restore_attributes(m, originals[n])
        for now, old in hooks:  # models install hooks when first called
            if now or old:
                restore_items(now, old)
        surroundings.restore()
        with torch.no_grad(), torch.DisableTorchFunction():
            for t, value in tracer.overwritten.values():
                t.copy_(value)
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


@functools.cache
def _names_of_fakes() -> set[str]:
    """What every abstract tensor has among its attributes."""
    with FakeTensorMode():
        return set(vars(torch.empty(1, dtype=torch.float32).view(1)))


def _returned(tracer: Tracer, t: torch.Tensor, changed: dict[fx.Node, torch.Tensor]) -> fx.Node:
    """The node of a result; a copy of an input is not the input itself. `changed`: inputs that were written to."""
    node = tracer.node_of(t)
    if (node.op == "placeholder" and node.meta["val"] is not t and is_float(t)) or changed.get(node, t) is not t:
        node = tracer.emit(aten.clone.default, (node,), {})
        tracer.describe(node, t, False)
    return node
