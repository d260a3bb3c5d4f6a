"""`Program`: one rewritten form of a block, and the specialisation that it holds for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..inspection.history import History
from ..ir import graph_codegen
from ..ir.argument_binding import Guard, Leaves, Path, Specialisation
from ..ir.block_graph import BlockGraph
from ..ir.guards.attribute_reads import Where
from ..ir.guards.stored_values import comparisons


def _expression(where: Where) -> str | None:
    """For the value of an attribute of `self`; None where Python's syntax has none."""
    owners, names = filter(None, where.module.split(".")), filter(None, [where.name, *where.inner.split(".")])
    parts = [("_modules", p) for p in owners] + [("_parameters", p) for p in names]
    if not all(p.isidentifier() or p.isdigit() for _, p in parts):
        return None
    return "".join(["self", *(f".{held}[{p!r}]" if p.isdigit() else f".{p}" for held, p in parts)])


class Program:
    """A rewritten form of a block; a value that blocks of the same structure share.

    Args:
        key: the specialisation that it holds for.
        history: the graphs that led to it; the last one runs.
        absorbed: names, relative to the block, of the submodules whose computation the graph took over.
        guards: further conditions that capture relied on.
        attributes: plain attributes of the block and its parts that it holds for; and where a tensor is one that is
            elsewhere, too.
        moves: it holds on any device.
        weights: which arguments of a call are the weights that the graph has as attributes; of a block its own are.

    Attributes:
        fn: `(block, *values of the placeholders) -> output`.
        guard: `(block, *values of the placeholders) -> index of the guard that fails, or -1`; None without
            guards.
        unchanged: `(block) -> whether the attributes are what they were`, for Dynamo, which then guards them; not those
            of absorbed modules, of which there are many.
        picks: positions of the placeholders' values among the leaves of a call.
        reads: names of the tensors and modules of the block that it reads or calls.
    """

    # A plain class: Dynamo wraps every field of a frozen dataclass when it first sees one.
    def __init__(
        self,
        key: Specialisation,
        history: History,
        absorbed: Sequence[str] = (),
        guards: Sequence[Guard] = (),
        attributes: Mapping[Where, Any] | None = None,
        moves: bool = True,
        weights: Mapping[str, Path] | None = None,
    ):
        self.key = key
        self.history = history
        self.absorbed = tuple(absorbed)
        self.guards = tuple(guards)
        self.attributes = dict(attributes or {})
        self.moves = moves
        self.weights = dict(weights or {})
        graph = self.runnable(history.graph)
        self.fn: Callable[..., Any] = graph.compile()
        self.guard: Callable[..., int] | None = graph.compile_guards(self.guards) if self.guards else None
        self.unchanged: Callable[..., bool] = self._compile_attributes()
        self.fn_with_load: Callable[..., Any] | None = None
        self.picks = graph.binding.indices(key)
        nodes = graph.graph.nodes
        self.reads = tuple(dict.fromkeys(str(n.target) for n in nodes if n.op in ("get_attr", "call_module")))

    def _compile_attributes(self) -> Callable[..., bool]:
        tests, scope = ["True"], {}
        for i, (where, value) in enumerate(self.attributes.items()):
            if where.module.startswith("@") and callable(value):
                continue  # Dynamo guards the functions that it traces
            if where.module.startswith("@"):
                scope[f"m{i}"] = sys.modules.get(where.module[1:])
                path = f"m{i}.{'.'.join(filter(None, where[1:]))}"
            elif isinstance(value, Where):
                tests.append(f"{_expression(where)} is {_expression(value)}")
                continue
            elif where.module in self.absorbed or (path := _expression(where)) is None:
                continue
            for expression, part in comparisons(path, value):
                name = f"v{len(scope)}"
                scope[name] = part
                tests.append(f"{expression} {'is' if callable(part) else '=='} {name}")
        source = f"def unchanged(self):\n    return {' and '.join(tests)}\n"
        return graph_codegen.build(source, scope, "unchanged", f"{self.history.name} attributes")

    def find_failed_guard(self, block: Any, leaves: Leaves) -> int:
        """The index of the guard that keeps a call with these leaves out; -1 if none does."""
        return -1 if self.guard is None else self.guard(block, *[leaves[i][1] for i in self.picks])

    @property
    def objects(self) -> tuple[Path, ...]:
        """Arguments that it passes on to submodules as they are."""
        return self.history.graph.binding.objects

    @property
    def holds_for(self) -> str:
        """The specialisation, with the mode of the parts that the block looks into instead of its own."""
        modes = {bool(value) for where, value in self.attributes.items() if where.name == "training"}
        text = str(self.key)
        if self.key.training is None and len(modes) == 1:
            return text.replace("any mode", "train" if modes.pop() else "eval", 1)
        return text

    def describe_difference(self, other: Program) -> str:
        """What it holds for, and the attributes that are others than those of `other`: `eval (x: ...), top_k == 3`."""
        mine = self.attributes.items()
        values = [
            f"{where} == {value!r}"
            for where, value in mine
            if where.name != "training"
            and isinstance(value, (bool, int, float, str))
            and where in other.attributes
            and other.attributes[where] != value
        ]
        return ", ".join([self.holds_for, *values])

    def prepare_load(self) -> None:
        """Make `fn_with_load`: as `fn`, but it returns `(output, (expert_offsets, ...))`."""
        if self.fn_with_load is None:
            self.fn_with_load = self.runnable(self.history.graph).compile(record_load=True)

    def runnable(self, graph: BlockGraph) -> BlockGraph:
        """A graph of the history as it is called, with placeholders for weights that are arguments."""
        return graph.with_inputs(self.weights) if self.weights else graph

    def renamed(self, name: str) -> Program:
        """The same program for another block of the same structure."""
        return Program(self.key, self.history.renamed(name), *self._rest)

    def with_arguments(self, arguments: tuple[tuple[Path, tuple[Any, ...]], ...]) -> Program:
        """The same program for arguments of other kinds, as on another device."""
        return Program(self.key._replace(arguments=arguments), self.history, *self._rest)

    @property
    def _rest(self) -> tuple[Any, ...]:
        return self.absorbed, self.guards, self.attributes, self.moves, self.weights

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self.key, self.history, *self._rest)

    def __repr__(self) -> str:
        return f"<Program {self.history.name or 'model'}: {self.key}>"
