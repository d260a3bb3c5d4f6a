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
        entries: the programs in the order of trial, with the checks of this block's modules and attributes. Replaced as
            a whole, except by `add`: other threads may be reading.
        objects: arguments that programs pass on unchanged.
        records_load: the programs can return their `expert_offsets`.
    """

    def __init__(self, block: nn.Module, name: str, counts: CallCounts):
        self.block, self.name, self.counts = block, name, counts
        self.entries: list[InstalledProgram] = []
        self.objects: tuple[Path, ...] = ()
        self.records_load = False

    def add(self, program: Program) -> None:
        """Add a program, to be tried after the existing ones."""
        if self.records_load:
            program.prepare_load()
        self.objects = tuple(dict.fromkeys((*self.objects, *program.objects)))
        self.entries.append(InstalledProgram(program, AbsorbedModules(self.block, program.absorbed)))

    def record_load(self, on: bool) -> None:
        """Make all programs return their `expert_offsets`, the later ones too."""
        self.records_load = on
        for entry in self.entries if on else ():
            entry.program.prepare_load()

    def find(self, call: Specialization, leaves: Leaves) -> InstalledProgram | str:
        """Find a program for an eager call. Record the last failed guard in `counts`.

        Returns:
            The program, or the reason why none admits the call: "" if none has its specialization.
        """
        why = ""
        for entry in self.entries:
            if not entry.program.key.admits(call):
                continue
            entry.absorbed.check(self.name)
            if not entry.is_valid():
                why = entry.describe_mismatch()
            elif (index := entry.find_failed_guard(self.block, leaves)) >= 0:
                why = str(entry.program.guards[index])
            else:
                return entry
            self.counts.last_failed_guard = why
        self.counts.guard_failures += bool(why)
        return why and f"guard failed: {why}"

    def find_traced(self, call: Specialization, leaves: Leaves) -> InstalledProgram | None:
        """Find the program for a call that Dynamo traces, which turns these checks into guards."""
        for entry in self.entries:
            if entry.program.key.admits(call) and entry.find_failed_guard(self.block, leaves) < 0:
                return entry if entry.program.unchanged(self.block) else None
        return None

    def find_valid(self, call: Specialization) -> list[InstalledProgram]:
        """Return the programs for this specialization whose attributes are unchanged."""
        admitted = [entry for entry in self.entries if entry.program.key.admits(call)]
        for entry in admitted:
            entry.absorbed.check(self.name)
        return [entry for entry in admitted if entry.is_valid()]

    def find_blocking_conditions(self, call: Specialization, leaves: Leaves) -> tuple[str, ...]:
        """Return the failed guards of programs with this specialization, if they mark another branch of the block."""
        conditions = []
        for entry in self.entries if leaves else []:
            if entry.program.key.admits(call):
                index, guards = entry.find_failed_guard(self.block, leaves), entry.program.guards
                conditions += [guards[index].condition] if index >= 0 and guards[index].one_way else []
        return tuple(conditions)

    def move_to_front(self, entries: Collection[InstalledProgram]) -> None:
        """Try these programs before the others."""
        self.entries = sorted(self.entries, key=lambda entry: entry not in entries)
