"""`BlockPrograms`: the programs of one block, in the order of trial, and the choice among them for a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import nn

from ..ir.argument_binding import Leaves, Path, Specialization
from .change_detection import AbsorbedModules
from .installed_program import InstalledProgram
from .program import Program


@dataclasses.dataclass
class CallCounts:
    """Eager calls of one block since it was compiled (calls inside a `torch.compile` region are not counted).

    Attributes:
        rewritten: calls that ran a program without an error.
        original: calls that ran the original forward, on request or as a fallback. `moefx.blocks` shows this count as
            `fallbacks`.
        guard_failures: calls whose specialization has a program, but a guard of the program failed.
        last_failed_guard: the failed condition, with the reason and the line at which capture relied on it.
    """

    rewritten: int = 0
    original: int = 0
    guard_failures: int = 0
    last_failed_guard: str = ""


class BlockPrograms:
    """The programs of one block.

    Args:
        name: the block's name in the model, for messages.
        counts: receives the failed guards.

    Attributes:
        installed: the programs in the order of trial, with the checks of this block's modules and attributes. Replaced
            as a whole, except by `add`: other threads may be reading.
        objects: arguments that programs pass on unchanged.
        records_load: the programs can return their `expert_offsets`.
    """

    def __init__(self, block: nn.Module, name: str, counts: CallCounts):
        self.block, self.name, self.counts = block, name, counts
        self.installed: list[InstalledProgram] = []
        self.objects: tuple[Path, ...] = ()
        self.records_load = False

    def add(self, program: Program) -> None:
        """Add a program, to be tried after the existing ones."""
        if self.records_load:
            program.prepare_load()
        self.objects = tuple(dict.fromkeys((*self.objects, *program.objects)))
        self.installed.append(InstalledProgram(program, AbsorbedModules(self.block, program.absorbed)))

    def record_load(self, on: bool) -> None:
        """Make all programs return their `expert_offsets`, the later ones too."""
        self.records_load = on
        for installed in self.installed if on else ():
            installed.program.prepare_load()

    def find(self, call: Specialization, leaves: Leaves) -> InstalledProgram | str:
        """Find a program for an eager call. Record the last failed guard in `counts`.

        Returns:
            The program, or the reason why none admits the call: "" if none has its specialization.
        """
        why = ""
        for installed in self.installed:
            if not installed.program.key.admits(call):
                continue
            installed.absorbed.check(self.name)
            if not installed.is_valid():
                why = installed.describe_mismatch()
            elif (guard := installed.find_failed_guard(self.block, leaves)) is not None:
                why = str(guard)
            else:
                return installed
            self.counts.last_failed_guard = why
        self.counts.guard_failures += bool(why)
        return why and f"guard failed: {why}"

    def find_traced(self, call: Specialization, leaves: Leaves) -> InstalledProgram | None:
        """Find the program for a call that Dynamo traces, which turns these checks into guards."""
        for installed in self.installed:
            if installed.program.key.admits(call) and installed.find_failed_guard(self.block, leaves) is None:
                return installed if installed.program.unchanged(self.block) else None
        return None

    def find_valid(self, call: Specialization) -> list[InstalledProgram]:
        """Return the programs for this specialization whose attributes are unchanged."""
        admitted = [installed for installed in self.installed if installed.program.key.admits(call)]
        for installed in admitted:
            installed.absorbed.check(self.name)
        return [installed for installed in admitted if installed.is_valid()]

    def find_blocking_conditions(self, call: Specialization, leaves: Leaves) -> tuple[str, ...]:
        """Return the failed guards of programs with this specialization, if they mark another branch of the block."""
        conditions = []
        for installed in self.installed if leaves else []:
            if installed.program.key.admits(call):
                guard = installed.find_failed_guard(self.block, leaves)
                conditions += [guard.condition] if guard is not None and guard.one_way else []
        return tuple(conditions)

    def move_to_front(self, first: Collection[InstalledProgram]) -> None:
        """Try these programs before the others."""
        self.installed = sorted(self.installed, key=lambda installed: installed not in first)
