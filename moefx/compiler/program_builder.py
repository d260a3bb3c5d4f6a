"""Build the program of a rewritten block, with its specialization and its guards."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..capture.tracing.capture_result import LAYOUT
from ..ir.argument_binding import (
    Guard,
    Specialization,
    find_device,
    flatten_arguments,
    make_signature_binder,
    placeholder_name,
    specialize_call,
)
from ..ir.guards.attribute_reads import BLOCK_MODE, AttributeLocation, find_globals, read_value
from ..ir.guards.stored_values import StoredFieldNames, StoredForward, can_snapshot, is_configuration, snapshot
from ..matching.facts.graph_nodes import is_random
from ..runtime.change_detection import find_absorbed_names
from ..runtime.program import Program
from .block_compiler import BlockRewrite


def build_program(
    block: nn.Module,
    result: BlockRewrite,
    args: tuple,
    kwargs: dict[str, Any],
    autocast: torch.dtype | None = None,
    attributes_read: Iterable[AttributeLocation] = (),
    tied: Mapping[AttributeLocation, AttributeLocation] | None = None,
) -> Program:
    """Build the program of a rewritten block, with its specialization and its guards. The program holds in training
    and evaluation if no capture read the block's own mode.

    Args:
        args, kwargs: the arguments of the call that was captured.
        autocast: the dtype of autocast around the call, None if it is off.
        attributes_read: the attributes of the block that captures read.
        tied: the `ties` of the block.
    """
    objects = result.graph.binding.objects
    leaves = flatten_arguments(make_signature_binder(block)(*args, **kwargs), objects)
    call = specialize_call(block, leaves, objects)
    device = find_device(block).type
    arguments = tuple((path, move_kind(kind, device)) for path, kind in call.arguments)
    reads_grad = bool(result.match.modes_read & {"is_grad_enabled", "is_inference_mode_enabled"})
    attributes_read = set(attributes_read)
    training = block.training if BLOCK_MODE in attributes_read else None
    key = Specialization(training, True if reads_grad else None, autocast, arguments)
    absorbed_names = find_absorbed_names(block, result.graph, result.dialect_graph.recomputed_modules)
    values = {
        w: read_value(block, w)
        for w in sorted(attributes_read - {BLOCK_MODE})
        if not _is_absorbed_parameter(block, w, absorbed_names)
    }
    stored_values = {
        w: v for w, v in values.items() if can_snapshot(v) and (w.inner or not isinstance(v, torch.Tensor))
    }
    snapshots = {
        w: StoredFieldNames(v) if is_configuration(v) else snapshot(v)
        for w, v in {**stored_values, **find_globals(block)}.items()
    }
    snapshots |= _guard_called_modules(block, result)
    # Autocast rules depend on the device.
    is_device_independent = autocast is None and "autocast" not in result.match.modes_read
    attributes = {**snapshots, **(tied or {})}
    is_repeatable = _is_repeatable(result)
    return Program(
        key,
        result.history,
        absorbed_names,
        _build_guards(result),
        attributes,
        is_device_independent,
        is_repeatable=is_repeatable,
    )


def _is_repeatable(result: BlockRewrite) -> bool:
    """Return whether the block draws no random numbers and changes no state, by its captures."""
    captures = [form.capture for form in result.match.forms]
    return not result.skipped and not any(c.effects or any(map(is_random, c.nodes)) for c in captures)


def _guard_called_modules(block: nn.Module, result: BlockRewrite) -> dict[AttributeLocation, StoredForward]:
    """Guard the code of the modules that the program still calls, such as the router, and of their submodules."""
    stored_forwards: dict[AttributeLocation, StoredForward] = {}
    for n in result.graph.graph.nodes:
        for path, module in block.get_submodule(str(n.target)).named_modules() if n.op == "call_module" else ():
            owner, _, name = f"{n.target}.{path}".strip(".").rpartition(".")
            stored_forwards[AttributeLocation(owner, name)] = StoredForward(module)
    return stored_forwards


def _is_absorbed_parameter(block: nn.Module, location: AttributeLocation, absorbed_names: Collection[str]) -> bool:
    """Return whether an attribute is a parameter of an absorbed module, which `AbsorbedModules` watches."""
    return location.module in absorbed_names and location.name in block.get_submodule(location.module)._parameters


def move_kind(kind: tuple, device: str) -> tuple:
    """Return the kind of an argument on another device."""
    return ("tensor", kind[1], device, kind[3]) if kind[0] == "tensor" else kind


def _build_guards(result: BlockRewrite) -> list[Guard]:
    """Turn the size comparisons of captures, and the axes that captures took as fixed, into guards on placeholders."""
    arguments = result.match.arguments
    placeholders = result.graph.placeholders
    tensors = list(zip(placeholders, arguments.tensors, strict=False))  # objects follow them
    names = {n.name: leaf for n, leaf in tensors}
    read_leaves = {n.name: leaf for n, leaf in tensors if not _is_only_passed_on(n, result)}
    size_sources = {}
    for dim in arguments.dims:
        for name, leaf in (*read_leaves.items(), *names.items()):
            if dim in leaf.shape:
                size_sources[dim] = f"{name}.shape[{leaf.shape.index(dim)}]"
                break

    def format_size(expression: str) -> str:
        return re.sub(r"\b[A-Z]\b", lambda m: size_sources[m[0]], expression)

    guards = []
    for g in result.match.guards:
        sides = [format_size(side) for side in (g.left, g.right, g.unless)]
        condition, reason = f"{sides[0]} {g.symbol} {sides[1]}", f"the block compares sizes: {g}"
        condition = f"{sides[2]} == 0 or {condition}" if g.unless else condition
        guards.append(Guard(condition, reason, one_way=g not in result.match.extra_guards))
    for name, leaf in read_leaves.items():
        for axis, n in enumerate(leaf.shape):
            actual_size, expected_size = f"{name}.shape[{axis}]", format_size(str(n))
            if expected_size != actual_size:
                fixed_axis = "features, or fixed"
                reason = f"the proof takes this axis as {fixed_axis if isinstance(n, int) else 'tokens'}"
                guards.append(Guard(f"{actual_size} == {expected_size}", reason, one_way=True))
    if LAYOUT in result.match.modes_read:
        reason = "the block reads the layout of a tensor, which is contiguous in the proof"
        guards += [Guard(f"{name}.is_contiguous()", reason) for name in names]
    objects = [placeholder_name(path) for path in result.graph.binding.objects]
    for a, b in itertools.combinations(objects, 2):  # the block may have compared identities
        guards.append(Guard(f"{a} is None or {a} is not {b}", "they were different objects"))
    return guards


def _is_only_passed_on(placeholder: fx.Node, result: BlockRewrite) -> bool:
    """Return whether a tensor, such as a mask, is only passed to submodules that were not captured. Its shape is then
    free."""
    objects = {placeholder_name(path) for path in result.graph.binding.objects}
    return bool(placeholder.users) and all(
        user.op == "call_module" and any(n.name in objects for n in user.all_input_nodes) for user in placeholder.users
    )
