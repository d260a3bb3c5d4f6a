"""`InstalledProgram`: a program of one block, and checks that the block has not changed since."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ir.argument_binding import Guard, Leaves
from ..ir.guards.attribute_reads import AttributeLocation, find_owner, read_value
from ..ir.guards.stored_values import StoredForward, belongs_to_block, snapshot
from ..ir.shared_memory import find_overlap
from .change_detection import AbsorbedModules, ReadAttributes
from .program import Program


class InstalledProgram:
    """A program of one block, with the checks of that block's modules and attributes."""

    def __init__(self, program: Program, absorbed: AbsorbedModules):
        self.program, self.absorbed = program, absorbed
        block = absorbed.block  # may be a copy of the program's block, with other tensors
        values = {
            location: snapshot(read_value(block, location)) if belongs_to_block(value) else value
            for location, value in program.attributes.items()
        }
        self.attributes = ReadAttributes(block, values)
        self.code = StoredForward(block)
        self.kinds = {name: _read_kind(block, name) for name in program.read_names}
        compared = program.read_names if program.written_inputs else program.written_buffers
        self._buffers = tuple(name for name in compared if _is_buffer(_read_value(block, name)))
        self.failed = False  # a call failed after a tensor or module was replaced: check kinds from then on

    def is_valid(self) -> bool:
        """Return whether the block's code and attributes are those that the program was compiled for."""
        return (
            self.code.holds(self.absorbed.block)
            and self.attributes.are_unchanged()
            and not (self.failed and self.find_replaced())
        )

    def find_shared_memory(self, leaves: Leaves) -> str:
        """Say which tensor shares memory with an argument or buffer that the program writes to; "" if none does."""
        program = self.program
        if not (program.written_inputs or program.written_buffers):
            return ""
        arguments: Leaves = [leaves[i] for i in program.leaf_indices]
        buffers: Leaves = [((name,), _read_value(self.absorbed.block, name)) for name in self._buffers]
        written_buffers = [buffer for buffer in buffers if buffer[0][0] in program.written_buffers]
        found = find_overlap([arguments[i] for i in program.written_inputs], [*arguments, *buffers])
        if found := found or find_overlap(written_buffers, arguments):
            return f"it writes to {found[0]}, which shares memory with {found[1]}"
        return ""

    def find_replaced(self) -> str:
        """Name of the first tensor or module that changed its kind or was removed; "" if none did."""
        return next((name for name, kind in self.kinds.items() if _read_kind(self.absorbed.block, name) != kind), "")

    def can_repeat(self) -> bool:
        """Return whether a failed run has left no trace: a call may run twice without a difference."""
        values = [_read_value(self.absorbed.block, name) for name in self.program.read_names]
        modules = [module for value in values if isinstance(value, nn.Module) for module in value.modules()]
        return self.program.is_repeatable and not any(m._forward_hooks or m._forward_pre_hooks for m in modules)

    def find_failed_guard(self, block: nn.Module, leaves: Leaves) -> Guard | None:
        """Return the first guard that a call fails; None if it fails none."""
        return self.program.find_failed_guard(block, leaves)

    def describe_mismatch(self) -> str:
        """Say which change makes `is_valid()` false."""
        if not self.code.holds(block := self.absorbed.block):
            return f"the forward of {type(block).__name__} is not the one of {self.code.cls.__name__} that was compiled"
        if self.attributes.are_unchanged():
            return f"{self.find_replaced()} has another shape, dtype or class now"
        location, now = self.attributes.find_change() or (AttributeLocation("", ""), None)
        if isinstance(other := self.attributes.values.get(location), AttributeLocation):
            return f"{location} and {other} were one tensor and are two now"
        shown = f"a {type(now).__name__}" if isinstance(now, nn.Module) else repr(now)
        return f"{location} == {self.attributes.values.get(location)!r}: it is {shown} now, and the forward reads it"

    def run_after(self, pass_name: str, block: nn.Module, leaves: Leaves) -> Any:
        """Run the graph after the named pass."""
        graph = self.program.runnable(self.program.history[pass_name].graph)
        values = [leaves[i][1] for i in graph.binding.indices(self.program.key)]
        return graph.compile()(block, *values)


def _read_kind(block: nn.Module, name: str) -> Any:
    """Return the dtype and shape of a tensor, or the class of a module; None if nothing has that name."""
    value = _read_value(block, name)
    return None if value is None else (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


def _is_buffer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _read_value(block: nn.Module, name: str) -> torch.Tensor | nn.Module | None:
    """Return the tensor or module of a name; None if nothing has that name."""
    owner, _, key = name.rpartition(".")
    module = find_owner(block, AttributeLocation(owner, key))
    registries = () if module is None else (module._parameters, module._buffers, module._modules)
    return next((d[key] for d in registries if key in d), None)
