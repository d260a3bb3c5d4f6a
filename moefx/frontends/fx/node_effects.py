"""Find the side effects of a node. Functions of the user may do anything."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...ir.node_values import get_op_name
from ...runtime.change_detection import find_hook_kind
from .abstract_values import get_traced_value
from .memory_aliases import StorageAliases

_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
}  # fmt: skip
_LIBRARIES = {"torch", "_operator", "math", "builtins", "einops"}
_FUNCTIONAL = {"aten", "prims", "prim", "moefx"}  # ops of other namespaces may draw random numbers without a tag
# Python functions without an op of the same name
_RANDOM_FUNCTIONS = {"gumbel_softmax", "multi_head_attention_forward"}
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class NodeEffects(NamedTuple):
    """The side effects of a node.

    Attributes:
        writes: the arguments that are written to, in place.
        draws: it draws random numbers.
        unknown: it may write to anything, or do anything else.
    """

    writes: tuple[fx.Node, ...] = ()
    draws: bool = False
    unknown: bool = False


def find_effects(gm: nn.Module, n: fx.Node) -> NodeEffects:
    """Find the side effects of a node."""
    if n.op == "call_module":
        return _find_module_effects(gm.get_submodule(str(n.target)))
    if n.op not in ("call_function", "call_method"):
        return NodeEffects()
    if isinstance(n.target, torch._ops.HigherOrderOperator):
        return _find_body_effects(gm, n)
    if not is_library_call(n):
        return NodeEffects(unknown=True)
    arguments = _bind_arguments(n)
    return NodeEffects(tuple(dict.fromkeys(_find_written_arguments(n, arguments))), _draws_random_numbers(n, arguments))


def is_library_call(n: fx.Node) -> bool:
    """Return whether a call is of a function of torch or Python, whose name determines its effects."""
    if isinstance(n.target, (str, *_OPS)):
        return True
    module = getattr(n.target, "__module__", None) or getattr(getattr(n.target, "__objclass__", None), "__module__", "")
    return hasattr(n.target, "__name__") and str(module).partition(".")[0] in _LIBRARIES


def is_plain_module(module: nn.Module) -> bool:
    """Return whether a module is torch's own, without hooks or another forward."""
    global_hooks = [
        getattr(nn.modules.module, name, None) for name in dir(nn.modules.module) if name.startswith("_global_")
    ]
    is_hooked = bool(find_hook_kind(module)) or any(isinstance(h, dict) and h for h in global_hooks)
    return type(module).__module__.startswith("torch.nn.modules.") and not is_hooked and "forward" not in vars(module)


def changes_state(n: fx.Node, value: Any) -> bool:
    """Return whether a function has neither tensors nor numbers as arguments and result, so it is called for global
    state."""
    plain_types = (torch.Tensor, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool, tuple, list)
    return n.op == "call_function" and not isinstance(value, plain_types) and not n.all_input_nodes


def reads_autograd_graph(n: fx.Node) -> bool:
    """Return whether a node reads the autograd graph of its arguments, which equal values need not share."""
    return get_op_name(n) in ("backward", "register_hook") or n.target is torch.autograd.grad


# ---------------------------------------------------------------------- modules and graphs
def _find_module_effects(module: nn.Module) -> NodeEffects:
    """Return the effects of a module call."""
    if isinstance(module, fx.GraphModule):
        effect = _find_graph_effects(module)
        return NodeEffects((), effect.draws, effect.unknown or bool(effect.writes))
    if not all(is_plain_module(m) for m in module.modules()):
        return NodeEffects(unknown=True)
    has_state = any((m.training and m._buffers) or getattr(m, "max_norm", None) for m in module.modules())
    drops = any(isinstance(m, (nn.modules.dropout._DropoutNd, nn.RReLU)) or getattr(m, "dropout", 0)
                for m in module.modules() if m.training)  # fmt: skip
    return NodeEffects(draws=bool(drops), unknown=bool(has_state))


def _find_body_effects(gm: nn.Module, n: fx.Node) -> NodeEffects:
    """Return the effects of a node that calls graphs with its last arguments, such as a checkpoint."""
    attributes = [(i, getattr(gm, str(a.target), None)) for i, a in enumerate(n.args)
            if isinstance(a, fx.Node) and a.op == "get_attr"]  # fmt: skip
    bodies = [(i, body) for i, body in attributes if isinstance(body, fx.GraphModule)]
    if not bodies:
        return NodeEffects(unknown=True)
    writes: list[fx.Node] = []
    effects = [_find_graph_effects(body) for _, body in bodies]
    for (i, body), effect in zip(bodies, effects, strict=True):
        if effect.writes:
            inputs, arguments = [m for m in body.graph.nodes if m.op == "placeholder"], n.args[i + 1 :]
            if len(inputs) != len(arguments) or not all(isinstance(a, fx.Node) for a in arguments) or len(bodies) > 1:
                return NodeEffects(unknown=True)
            writes += [arguments[inputs.index(w)] for w in effect.writes]  # type: ignore[misc]
    runs_again = bool(writes) and "checkpoint" in get_op_name(n)  # in the backward pass
    return NodeEffects(tuple(writes), any(e.draws for e in effects), runs_again or any(e.unknown for e in effects))


def _find_graph_effects(gm: fx.GraphModule) -> NodeEffects:
    """Return the effects of a graph on its inputs; unknown if it writes to tensors that are neither inputs nor its
    own."""
    effects = {n: find_effects(gm, n) for n in gm.graph.nodes}
    value = {n: get_traced_value(n) for n in gm.graph.nodes}
    aliases = StorageAliases()
    aliases.join_views(gm.graph.nodes, value)
    memory = {n: set(aliases.find_joined_storages(v)) for n, v in value.items()}
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    writes, is_unknown = [], any(e.unknown for e in effects.values())
    for target in (t for e in effects.values() for t in e.writes):
        storages = memory[target]
        writes += [n for n in inputs if storages & memory[n]]
        is_unknown |= not storages or any(storages & memory[n] for n in gm.graph.nodes if n.op == "get_attr")
    return NodeEffects(tuple(dict.fromkeys(writes)), any(e.draws for e in effects.values()), is_unknown)


# ---------------------------------------------------------------------- functions
def _bind_arguments(n: fx.Node) -> dict[str, Any]:
    """Return the arguments by name, with defaults if the function declares them."""
    if schemas := _find_schemas(n):
        arguments = schemas[0].arguments
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        return defaults | dict(zip([a.name for a in arguments], n.args, strict=False)) | dict(n.kwargs)
    try:
        bound = inspect.signature(n.target).bind(*n.args, **n.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return dict(n.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _find_schemas(n: fx.Node) -> list[Any]:
    """Return the schemas of a target; for a builtin function or method, those of the ops with its name."""
    target: Any = n.target
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    if not isinstance(target, torch._ops.OpOverloadPacket):
        if inspect.isfunction(target):
            return []
        target = _find_packet(get_op_name(n))
    return [] if target is None else [getattr(target, name)._schema for name in target.overloads()]


@functools.cache
def _find_packet(name: str) -> Any:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    # not its Python attributes, such as __eq__
    return packet if isinstance(packet, torch._ops.OpOverloadPacket) else None


def _find_written_arguments(n: fx.Node, arguments: dict[str, Any]) -> Iterator[fx.Node]:
    """Return the arguments that a call writes to."""
    yield from _list_nodes(n.kwargs.get("out"))
    name = get_op_name(n)
    in_place = name.endswith("_") and not name.endswith("__")
    if n.args and (
        in_place or n.target in _IN_PLACE or arguments.get("inplace") or name in ("__setitem__", "__iadd__")
    ):
        yield from _list_nodes(n.args[0])
    if isinstance(n.target, _OPS):
        for schema in _find_schemas(n):
            for i, a in enumerate(schema.arguments):
                if a.alias_info is not None and a.alias_info.is_write:
                    positional = n.args[i] if i < len(n.args) and not a.kwarg_only else None
                    yield from _list_nodes(n.kwargs.get(a.name, positional))
    flags = [arguments[flag] for flag in ("training", "train", "use_input_stats") if flag in arguments]
    if "functional" not in name and flags[:1] != [False]:
        yield from (*_list_nodes(arguments.get("running_mean")), *_list_nodes(arguments.get("running_var")))
    if arguments.get("max_norm") is not None:
        yield from _list_nodes(arguments.get("weight"))


def _list_nodes(argument: Any) -> list[fx.Node]:
    """Return the nodes in an argument, also in nested lists."""
    if isinstance(argument, (tuple, list)):
        return [n for part in argument for n in _list_nodes(part)]
    return [argument] if isinstance(argument, fx.Node) else []


def _draws_random_numbers(n: fx.Node, arguments: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers."""
    is_op = isinstance(n.target, _OPS)
    if is_op and str(n.target).partition(".")[0] not in _FUNCTIONAL:
        return True
    name = get_op_name(n)
    if not (name in _RANDOM_FUNCTIONS or "dropout" in name or _is_seeded(name)):
        return False
    is_off = [arguments[flag] is False for flag in ("training", "train") if flag in arguments]
    rates = ("p", "dropout_p") if "dropout" in name else ("dropout_p",)
    is_off += [arguments[p] == 0 for p in rates if isinstance(arguments.get(p), (int, float))]
    return not any(is_off)


@functools.cache
def _is_seeded(name: str) -> bool:
    """Return whether torch tags the op with this name as random."""
    packet = _find_packet(name)
    if packet is None:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads())
