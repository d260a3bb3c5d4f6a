"""`PassManager`: run passes over a block's graph, check each result, and keep a snapshot of it.

A pass is a pure function `(BlockGraph, plan) -> BlockGraph`. After each pass the manager lints the graph, checks the
level's ops and dead code, propagates fake values into new and changed nodes, and compares them with the values that
the pass declares. It records the pass's name, time, added and removed nodes, file and line. A violation is a bug in the
pass, not in the user's model: it raises a `PassError` that names pass and nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import Node
from torch.fx.node import map_arg

from .._plan import Plan
from ..errors import MoefxError
from ..inspection.history import History, Snapshot
from ..ir.graphs.block_graph import BlockGraph
from ..ir.graphs.graph_codegen import is_getitem
from ..ir.graphs.graph_levels import LEVELS, find_violations
from ..ir.node_meta import BlockMeta
from ..ir.node_values import TensorSpec

Pass = Callable[[BlockGraph, Any], BlockGraph]
P = TypeVar("P", bound=Callable[..., BlockGraph])
_PACKAGE = Path(__file__).resolve().parents[1]
_META_KEYS = tuple(key for key in BlockMeta.__annotations__ if key != "val")


class PassError(MoefxError):
    """A pass produced an illegal graph. The message names the pass and the nodes; please report it."""


def graph_pass(*, level: str, name: str = "") -> Callable[[P], P]:
    """Decorate a pass with the level of its result, and with a name if it differs from the function's."""

    def declare(function: P) -> P:
        function.level = LEVELS[level]  # type: ignore[attr-defined]
        function.pass_name = name or function.__name__  # type: ignore[attr-defined]
        return function

    return declare


class PassManager:
    """Runs passes, checks each result against its level, and records it in the history.

    Args:
        block: the user's block; its parameters give the values of `get_attr` nodes when fakes are propagated.
    """

    def __init__(self, block: nn.Module | None = None):
        self.block = block

    def run(
        self,
        graph: BlockGraph,
        passes: Sequence[Pass],
        plan: Plan,
        *,
        made_by: str | Callable[..., Any] = "capture",
        ms: float = 0.0,
        level: str = "captured",
    ) -> History:
        """Run `passes` on `graph`, except those in `plan.disable`, and return the history.

        Args:
            graph: the first graph of the history.
            made_by: the name of the step that made `graph`, or its function, whose file and line are recorded too.
            ms: duration of that step.
            level: level of `graph`; a pass without a declared level keeps the level of its input.

        Raises:
            PassError: a pass changed its input, or its result is not legal.
        """
        enabled_passes = _select_enabled(passes, plan)
        _check_graph(graph, made_by if isinstance(made_by, str) else get_pass_name(made_by), LEVELS[level])
        first = _take_snapshot(graph, None, made_by, 1, 1 + len(enabled_passes), ms)
        return self.extend(History(graph.name, (first,)), enabled_passes, plan, level=level)

    def extend(self, history: History, passes: Sequence[Pass], plan: Plan, *, level: str) -> History:
        """Run more passes on the last graph of a history, which has this level. All passes count as one pipeline."""
        passes = _select_enabled(passes, plan)
        graph, total = history.graph, len(history) + len(passes)
        snapshots, current = [snapshot.with_total(total) for snapshot in history], LEVELS[level]
        for index, function in enumerate(passes, start=len(snapshots) + 1):
            before, fingerprint = graph, _list_node_facts(graph)
            start = time.perf_counter()
            graph = function(graph, plan)
            ms = (time.perf_counter() - start) * 1e3
            name = get_pass_name(function)
            if _list_node_facts(before) != fingerprint:
                raise PassError(f"pass {name} changed its input graph; it must work on graph.copy()")
            current = getattr(_unwrap(function), "level", current)
            _check_graph(graph, name, current)
            self._propagate(graph, before, name)
            snapshots.append(_take_snapshot(graph, before, function, index, total, ms))
            graph = snapshots[-1].graph
        return dataclasses.replace(history, snapshots=tuple(snapshots))

    def _propagate(self, graph: BlockGraph, before: BlockGraph, name: str) -> None:
        """Compute the fake values of nodes that a pass made or changed, and of nodes whose inputs changed."""
        mode = _find_fake_mode(graph)
        if mode is None:
            return
        old_nodes = {node.name: node for node in before.graph.nodes}
        fakes = _FakeEvaluator(mode, self.block)
        changed_nodes: set[Node] = set()  # nodes with another shape or dtype than before the pass
        for node in graph.graph.nodes:
            if node.op not in ("call_function", "get_attr"):
                continue
            old_node = old_nodes.get(node.name)
            is_same = (
                old_node is not None
                and _is_same_call(node, old_node)
                and changed_nodes.isdisjoint(node.all_input_nodes)
            )
            if is_same and ("val" in node.meta or node.op == "get_attr"):
                continue
            if old_node is not None and node.meta.get("val") is old_node.meta.get("val"):
                node.meta.pop("val", None)  # a copy of the old value: the pass declares none
            value = fakes.evaluate(node, name) if node.op == "call_function" else fakes.find(node)
            if old_node is None or _describe_shapes(value) != _describe_shapes(old_node.meta.get("val")):
                changed_nodes.add(node)
            if value is None:
                continue
            if (declared := _describe_shapes(node.meta.get("val"))) and declared != _describe_shapes(value):
                raise PassError(
                    f"pass {name}: {node.name} is declared as {declared} but computes {_describe_shapes(value)}"
                )
            if node.op == "call_function":
                node.meta.setdefault("val", value)


def _select_enabled(passes: Sequence[Pass], plan: Plan) -> list[Pass]:
    return [p for p in passes if get_pass_name(p) not in plan.disable]


def get_pass_name(function: Callable[..., Any]) -> str:
    """Return the name of a pass in headers, histories and `Plan.disable`."""
    function = _unwrap(function)
    return getattr(function, "pass_name", None) or getattr(function, "__name__", type(function).__name__)


def find_pass_location(function: Callable[..., Any]) -> str:
    """Return the file and line of a pass, relative to the package: `"passes/fuse.py:88"`."""
    function = _unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename)
    shown_path = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{shown_path}:{code.co_firstlineno}"


class _FakeEvaluator:
    def __init__(self, mode: FakeTensorMode, block: nn.Module | None):
        self.mode, self.block = mode, block

    def evaluate(self, node: Node, pass_name: str) -> Any:
        """Compute a node's fake value; None if an input has none, or if its shape depends on data.

        Raises:
            PassError: the node cannot run.
        """
        missing = False

        def value(argument: Node) -> Any:
            nonlocal missing
            fake = self.find(argument)
            missing = missing or fake is None
            return fake

        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        if missing or not callable(node.target) or node.target is setattr:
            return None
        try:
            with self.mode:
                return node.target(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return None
        except Exception as error:
            raise PassError(f"pass {pass_name}: {node.format_node()} cannot run: {error}") from error

    def find(self, node: Node) -> Any:
        """Return the known fake value of a node; None if it has none."""
        value = node.meta.get("val")
        if value is None and node.op == "get_attr" and self.block is not None:
            owner, _, name = str(node.target).rpartition(".")
            value = getattr(self.block.get_submodule(owner), name)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            value = self.mode.from_tensor(value)
        results: Any = value if isinstance(value, (tuple, list)) and not isinstance(value, TensorSpec) else (value,)
        return None if any(isinstance(v, TensorSpec) for v in results) else value


def _check_graph(graph: BlockGraph, name: str, level: Any) -> None:
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise PassError(f"pass {name} left a malformed graph: {error}") from error
    if violations := find_violations(graph, level):
        violations_text = "\n  ".join(map(str, violations[:8]))
        raise PassError(f"pass {name}: not a legal graph of level {level.name!r}:\n  {violations_text}")


def _take_snapshot(
    graph: BlockGraph,
    before: BlockGraph | None,
    function: str | Callable[..., Any],
    index: int,
    total: int,
    ms: float,
) -> Snapshot:
    nodes, nodes_before = _list_counted_nodes(graph), _list_counted_nodes(before) if before else set()
    name, location = (
        (function, "") if isinstance(function, str) else (get_pass_name(function), find_pass_location(function))
    )
    snapshot = Snapshot(index, total, name, ms, len(nodes - nodes_before), len(nodes_before - nodes), location, graph)
    return snapshot.with_total(total)


def _list_counted_nodes(graph: BlockGraph) -> set[tuple[str, Any]]:
    return {(n.name, n.target) for n in graph.graph.nodes if n.op not in ("get_attr", "output") and not is_getitem(n)}


def _list_node_facts(graph: BlockGraph) -> list[tuple[Any, ...]]:
    """List the facts that a pass must not change in its input: nodes, arguments and `BlockMeta`, with the shapes and
    dtypes of values."""
    return [
        (
            n.name,
            n.op,
            n.target,
            n.args,
            n.kwargs,
            [n.meta.get(key) for key in _META_KEYS],
            _describe_shapes(n.meta.get("val")),
        )
        for n in graph.graph.nodes
    ]


def _is_same_call(node: Node, other: Node) -> bool:
    """Return whether nodes of two graphs have the same target and arguments; nodes are compared by name."""

    def name_nodes(arguments: Any) -> Any:
        return map_arg(arguments, lambda argument: f"%{argument.name}")

    return node.target == other.target and name_nodes((node.args, node.kwargs)) == name_nodes(
        (other.args, other.kwargs)
    )


def _find_fake_mode(graph: BlockGraph) -> FakeTensorMode | None:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def _describe_shapes(value: Any) -> Any:
    """Return the shapes and dtypes in a value, for comparison and messages."""
    if isinstance(value, (torch.Tensor, TensorSpec)):
        return tuple(map(str, value.shape)), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_describe_shapes(v) for v in value)
    return None


def _unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)
