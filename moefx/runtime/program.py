"""`Program`: one rewritten form of a block, and the specialisation that it holds for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..inspection.history import History
from ..ir.binding import Guard, Specialisation


class Program:
    """A rewritten form of a block; a value that blocks of the same structure share.

    Args:
        key: the specialisation that it holds for.
        history: the graphs that led to it; the last one runs.
        absorbed: names, relative to the block, of the submodules whose computation the graph took over.
        guards: further conditions that capture relied on.

    Attributes:
        fn: `(block, *values of the placeholders) -> output`.
        guard: `(block, *values of the placeholders) -> index of the guard that fails, or -1`; None without
            guards.
        picks: positions of the placeholders' values among the leaves of a call.
    """

    # A plain class: Dynamo wraps every field of a frozen dataclass when it first sees one.
    def __init__(
        self,
        key: Specialisation,
        history: History,
        absorbed: Sequence[str] = (),
        guards: Sequence[Guard] = (),
    ):
        self.key = key
        self.history = history
        self.absorbed = tuple(absorbed)
        self.guards = tuple(guards)
        graph = history.graph
        self.fn: Callable[..., Any] = graph.compile()
        self.guard: Callable[..., int] | None = graph.compile_guards(self.guards) if self.guards else None
        self.fn_with_load: Callable[..., Any] | None = None
        self.picks = graph.binding.indices(key)

    def prepare_load(self) -> None:
        """Make `fn_with_load`: as `fn`, but it returns `(output, (expert_offsets, ...))`."""
        if self.fn_with_load is None:
            self.fn_with_load = self.history.graph.compile(record_load=True)

    def renamed(self, name: str) -> Program:
        """The same program for another block of the same structure."""
        return Program(self.key, self.history.renamed(name), self.absorbed, self.guards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self.key, self.history, self.absorbed, self.guards)

    def __repr__(self) -> str:
        return f"<Program {self.history.name or 'model'}: {self.key}>"
