"""`Entry`: a program as one block has it, and whether the block is still what the program was made for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ir.argument_binding import Leaves
from ..ir.guards.attribute_reads import Where, owner_of, value_at
from ..ir.guards.stored_values import HeldCode, is_of_block, unchanged
from .program import Program
from .watch import AbsorbedModules, ReadAttributes


class Entry:
    """A program of one block, with the block's own absorbed modules."""

    def __init__(self, program: Program, absorbed: AbsorbedModules):
        self.program, self.absorbed = program, absorbed
        block = absorbed.block  # may be a copy of the one that the program was made for, with tensors of its own
        values = {w: unchanged(value_at(block, w)) if is_of_block(v) else v for w, v in program.attributes.items()}
        self.attributes = ReadAttributes(block, values)
        self.code = HeldCode(block)
        self.kinds = {name: _kind_at(block, name) for name in program.reads}
        self.failed = False  # for another kind of one of them, which calls are looked at for since

    def holds(self) -> bool:
        """Whether the block is as it was."""
        return (
            self.code.is_still(self.absorbed.block) and self.attributes.hold() and not (self.failed and self.replaced())
        )

    def replaced(self) -> str:
        """The first of the tensors and modules that it reads that is of another kind now, or gone; "" if none is."""
        return next((name for name, kind in self.kinds.items() if _kind_at(self.absorbed.block, name) != kind), "")

    def failed_guard(self, block: nn.Module, leaves: Leaves) -> int:
        """The index of the guard that keeps a call out; -1 if none does."""
        return self.program.find_failed_guard(block, leaves)

    def why_not(self) -> str:
        if not self.code.is_still(block := self.absorbed.block):
            return f"the {type(block).__name__} has another forward than the {self.code.cls.__name__} that was compiled"
        if self.attributes.hold():
            return f"{self.replaced()} is of another kind now"
        where, now = self.attributes.changed() or (Where("", ""), None)
        if isinstance(other := self.attributes.values.get(where), Where):
            return f"{where} and {other} are two tensors now, and were one"
        what = f"a {type(now).__name__}" if isinstance(now, nn.Module) else repr(now)
        return f"{where} == {self.attributes.values.get(where)!r}: it is {what} now, and the forward reads it"

    def run_after(self, pass_name: str, block: nn.Module, leaves: Leaves) -> Any:
        graph = self.program.runnable(self.program.history[pass_name].graph)
        values = [leaves[i][1] for i in graph.binding.indices(self.program.key)]
        return graph.compile()(block, *values)


def _kind_at(block: nn.Module, name: str) -> Any:
    """The dtype and shape of a tensor, the class of a module; None where there is none."""
    owner, _, key = name.rpartition(".")
    module = owner_of(block, Where(owner, key))
    held = () if module is None else (module._parameters, module._buffers, module._modules)
    value = next((d[key] for d in held if key in d), None)
    return None if value is None else (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)
