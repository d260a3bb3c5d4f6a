"""`Program`: a rewritten form of a block, and its specialization."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..inspection.history import History
from ..ir.argument_binding import Guard, Leaves, Path, Specialization
from ..ir.graphs import graph_codegen
from ..ir.graphs.block_graph import BlockGraph
from ..ir.guards.attribute_reads import AttributeLocation
from ..ir.guards.stored_values import list_comparisons
from ..ir.shared_memory import find_written_buffers, find_written_inputs


def _format_attribute_expression(location: AttributeLocation) -> str | None:
    """Return Python source that reads an attribute of `self`; None if its name is no identifier."""
    owners, names = filter(None, location.module.split(".")), filter(None, [location.name, *location.inner.split(".")])
    parts = [("_modules", p) for p in owners] + [("_parameters", p) for p in names]
    if not all(p.isidentifier() or p.isdigit() for _, p in parts):
        return None
    return "".join(["self", *(f".{container}[{p!r}]" if p.isdigit() else f".{p}" for container, p in parts)])


class Program:
    """A rewritten form of a block, which blocks of the same structure share. Only `prepare_load` changes it.

    Args:
        key: the specialization.
        history: the graphs after each pass; the last one runs.
        absorbed: names, relative to the block, of submodules whose computation is part of the graph.
        guards: further conditions that capture relied on.
        attributes: values of plain attributes of the block and its submodules at capture. For a tensor with two names,
            the value is the other name.
        is_device_independent: the program holds on any device.
        weights: the paths of arguments that replace attributes of the graph. Empty if the block owns its weights.
        is_repeatable: a run that fails leaves no trace: the block draws no random numbers and changes no state.

    Attributes:
        fn: `(block, *values of the placeholders) -> output`, for eager calls.
        traced_fn: the same, op by op, for calls that a compiler traces.
        guard: `(block, *values of the placeholders) -> index of the failed guard, or -1`; None without guards.
        unchanged: `(block) -> whether the attributes have their values of capture`. Dynamo traces it and guards them.
            Omits absorbed modules, because they are many.
        binding: which arguments of a call feed the placeholders.
        leaf_indices: positions of the placeholders' values among the leaves of a call.
        read_names: names of the block's tensors and modules that the graph reads or calls.
        written_inputs: positions of the placeholders that the graph writes to.
        written_buffers: names of the buffers that the graph writes to.
    """

    # No frozen dataclass: Dynamo wraps every field of one on first sight.
    def __init__(
        self,
        key: Specialization,
        history: History,
        absorbed: Sequence[str] = (),
        guards: Sequence[Guard] = (),
        attributes: Mapping[AttributeLocation, Any] | None = None,
        is_device_independent: bool = True,
        weights: Mapping[str, Path] | None = None,
        is_repeatable: bool = False,
    ):
        self.key = key
        self.history = history
        self.absorbed = tuple(absorbed)
        self.guards = tuple(guards)
        self.attributes = dict(attributes or {})
        self.is_device_independent = is_device_independent
        self.weights = dict(weights or {})
        self.is_repeatable = is_repeatable
        graph = self.runnable(history.graph)
        self.fn: Callable[..., Any] = graph.compile(join=True)
        self.traced_fn: Callable[..., Any] = graph.compile()
        self.guard: Callable[..., int] | None = graph.compile_guards(self.guards) if self.guards else None
        self.unchanged: Callable[..., bool] = self._compile_attributes()
        self.fn_with_load: Callable[..., Any] | None = None
        self.binding = graph.binding
        self.leaf_indices = graph.binding.indices(key)
        nodes = graph.graph.nodes
        self.read_names = tuple(dict.fromkeys(str(n.target) for n in nodes if n.op in ("get_attr", "call_module")))
        self.written_inputs = tuple(find_written_inputs(graph.graph))
        self.written_buffers = tuple(find_written_buffers(graph.graph))

    def _compile_attributes(self) -> Callable[..., bool]:
        tests, scope = ["True"], {}
        for i, (location, value) in enumerate(self.attributes.items()):
            if location.module.startswith("@") and callable(value):
                continue  # Dynamo guards the functions that it traces
            if location.module.startswith("@"):
                scope[f"m{i}"] = sys.modules.get(location.module[1:])
                path = f"m{i}.{'.'.join(filter(None, location[1:]))}"
            elif isinstance(value, AttributeLocation):
                tests.append(f"{_format_attribute_expression(location)} is {_format_attribute_expression(value)}")
                continue
            elif location.module in self.absorbed or (path := _format_attribute_expression(location)) is None:
                continue
            for expression, part in list_comparisons(path, value):
                name = f"v{len(scope)}"
                scope[name] = part
                tests.append(f"{expression} {'is' if callable(part) else '=='} {name}")
        source = f"def unchanged(self):\n    return {' and '.join(tests)}\n"
        return graph_codegen.compile_source(source, scope, "unchanged", f"{self.history.name} attributes")

    def find_failed_guard(self, block: Any, leaves: Leaves) -> Guard | None:
        """Return the first guard that a call with these leaves fails; None if it fails none."""
        if self.guard is None:
            return None
        index = self.guard(block, *[leaves[i][1] for i in self.leaf_indices])
        return None if index < 0 else self.guards[index]

    @property
    def objects(self) -> tuple[Path, ...]:
        """Arguments that the graph passes on to submodules unchanged."""
        return self.history.graph.binding.objects

    @property
    def holds_for(self) -> str:
        """The specialization as text. Shows the mode of submodules if the block's own mode does not matter."""
        modes = {bool(value) for location, value in self.attributes.items() if location.name == "training"}
        text = str(self.key)
        if self.key.training is None and len(modes) == 1:
            return text.replace("any mode", "train" if modes.pop() else "eval", 1)
        return text

    def describe_difference(self, other: Program) -> str:
        """Return the specialization, and attributes with other values than in `other`: `eval (x: ...), top_k == 3`."""
        items = self.attributes.items()
        values = [
            f"{location} == {value!r}"
            for location, value in items
            if location.name != "training"
            and isinstance(value, (bool, int, float, str))
            and location in other.attributes
            and other.attributes[location] != value
        ]
        return ", ".join([self.holds_for, *values])

    def prepare_load(self) -> None:
        """Compile `fn_with_load`: like `fn`, but returns `(output, (expert_offsets, ...))`."""
        if self.fn_with_load is None:
            self.fn_with_load = self.runnable(self.history.graph).compile(record_load=True)

    def runnable(self, graph: BlockGraph) -> BlockGraph:
        """Return a graph of the history with placeholders for the weights that are arguments."""
        return graph.with_inputs(self.weights) if self.weights else graph

    def renamed(self, name: str) -> Program:
        """Return a copy for another block of the same structure."""
        return self._copy(history=self.history.renamed(name))

    def with_arguments(self, arguments: tuple[tuple[Path, tuple[Any, ...]], ...]) -> Program:
        """Return a copy for other arguments, for example on another device."""
        key = self.key._replace(arguments=arguments)
        return self._copy(key=key, leaf_indices=self.binding.indices(key))

    def _copy(self, **changes: Any) -> Program:
        """Return a copy with other attributes. It shares the compiled functions, which take 22 ms for 256 experts."""
        program = object.__new__(Program)
        program.__dict__.update(self.__dict__, **changes)
        return program

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (
            self.absorbed,
            self.guards,
            self.attributes,
            self.is_device_independent,
            self.weights,
            self.is_repeatable,
        )
        return Program, (self.key, self.history, *fields)

    def __repr__(self) -> str:
        return f"<Program {self.history.name or 'model'}: {self.key}>"
