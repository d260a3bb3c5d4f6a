"""Log the numbers and booleans that Python reads from tensors during a capture, and force their outcomes.

A branch on a tensor's value is invisible in the graph. Each read is therefore logged with its location in the user's
code, so that a proof can force the other outcome and compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...errors import Refused
from ...ir.node_meta import find_original
from ...util.tensor_trees import has_values, is_float
from ..emptiness.idle_tests import BOOLEAN, KEYS, LOADS, EmptinessTests
from ..environment.code_locations import (
    Source,
    find_user_opcode,
    find_user_stack,
    is_user_asking_number,
    is_user_asking_tensor,
)
from ..sizes.routed_numbers import ROW_COUNT, RoutedFloat, RoutedInt, is_row_emptiness_test
from ..sizes.symbolic_sizes import peek_value
from .capture_result import HostRead, LimitedOutcome
from .concrete_routing import Routing
from .graph_recorder import DecisionSite
from .node_origins import find_float_decisions, find_leaf_kinds, follows_from_floats, is_abstract, is_nan_check
from .op_runner import OpRunner

# Different activations that one call site reads, and that end a capture: the fixed part, and the part per token.
_MAX_READS, _MAX_READS_PER_TOKEN = 500, 8

# Forced outcomes. Keys: the call stack of a read; the site of a comparison or a number; the position of an argument.
# Values: the outcome, `FORCE_MIXED`, `FORCE_VARIED`, or a function that maps the integers which an op returned, or an
# argument has.
Interventions = Mapping[tuple[Source, ...] | DecisionSite | int, Any]


class ReadLogger(OpRunner):
    """Logs reads; it is the `RoutedNumberLog` of the numbers of the routing.

    Attributes:
        reads: booleans and floats that Python read, or comparisons of routed numbers.
        plain_reads: integers that neither routing nor state determines, by the call stack that read them.
        emptiness_tests: where the program tests which experts have tokens (see `idle_tests`).
        has_routed_argument: whether the current op was called with a number of the routing.
    """

    def __init__(self, routing: Routing, interventions: Interventions | None = None):
        super().__init__(routing)
        self.interventions = interventions or {}
        self.reads: list[HostRead] = []
        self.plain_reads: dict[tuple[Source, ...], list[Any]] = {}
        self.emptiness_tests = EmptinessTests()
        self.has_routed_argument = False
        self._num_forced: Counter[tuple[Source, ...]] = Counter()  # reads with a limited forced outcome
        self._activations: dict[tuple[Source, ...], set[fx.Node]] = {}  # the values made of activations that are read

    # ---------------------------------------------------------------- `RoutedNumberLog`
    def log_comparison(self, number: Any, op: str, other: Any, value: bool) -> bool:
        if is_user_asking_number():
            self.log_emptiness_test(BOOLEAN if is_row_emptiness_test(number, op, other) else LOADS)
        if isinstance(other, (RoutedInt, RoutedFloat)) and op in ("eq", "ne") and find_user_opcode() != "COMPARE_OP":
            return value  # a dict compares its keys: no branch
        if is_row_emptiness_test(number, op, other):
            return value  # without rows nothing is computed; other captures have experts without rows
        if number.expr is ROW_COUNT and number.value == 0:  # both outcomes compute nothing
            return self._force(find_user_stack(), value, (op, other))
        node = number.expr if isinstance(number.expr, fx.Node) else None
        return self.log_read(value, node, (op, other), number.origins)

    def log_leak(self, expr: Any) -> None:
        self.sizes.leaked_routing = True

    def log_key(self) -> None:
        if is_user_asking_number():
            self.log_emptiness_test(KEYS)

    def log_use(self, size: Any) -> None:
        self.has_routed_argument = True
        self.sizes.op_arguments |= {size.value}

    # ---------------------------------------------------------------- reads
    def log_read(
        self,
        value: Any,
        node: fx.Node | None = None,
        comparison: tuple[str, Any] | None = None,
        origins: frozenset[Any] = frozenset(),
    ) -> Any:
        """Log a value that Python reads, and return it or the outcome that is forced here."""
        call_stack = find_user_stack()
        if node is not None and (is_abstract(node) or find_float_decisions(node)):
            self._require_end(call_stack, node)
        value = self._force(call_stack, value, comparison)
        self.reads.append(HostRead(call_stack, value, node, comparison, origins))
        return value

    def _require_end(self, call_stack: tuple[Source, ...], node: fx.Node) -> None:
        """Refuse a loop that waits for an activation: abstract floats may never converge.

        Such a loop computes a new value in each round. Loops over the items of one list may read them often.
        """
        activations = self._activations.setdefault(call_stack, set())
        activations.add(node)
        reads = _MAX_READS + _MAX_READS_PER_TOKEN * self.sizes.tokens
        if len(activations) > reads and call_stack:
            raise Refused(
                f"a loop compares activations and has not ended after {reads} rounds on abstract numbers: "
                f"{call_stack[0].text}",
                source=str(call_stack[0]),
                remedy="run the loop a fixed number of times: for _ in range(8)",
            )

    def _force(self, call_stack: tuple[Source, ...], value: Any, comparison: tuple[str, Any] | None) -> Any:
        forced = self.interventions.get(call_stack, value)
        if not isinstance(forced, LimitedOutcome):
            return forced
        if comparison is not None and forced.compared_with and peek_value(comparison[1]) not in forced.compared_with:
            return value
        self._num_forced[call_stack] += 1
        return forced.value if self._num_forced[call_stack] <= forced.num_reads else value

    def read_item(self, t: torch.Tensor) -> Any:
        """Return what `t.item()` returns. Log booleans, floats and state."""
        node = self.node_of(t)
        original = find_original(node) if node.op == "get_attr" and not is_float(t) else None
        value = (original if original is not None and has_values(original) else self.concrete(t)).item()
        is_logged = t.dtype is torch.bool or is_float(t) or self._is_state(node)
        if t.dtype is torch.bool and follows_from_floats(node) and is_user_asking_tensor() and not is_nan_check(node):
            self.log_emptiness_test(BOOLEAN)
        if not is_logged and not follows_from_floats(node):
            self.log_plain_read(node, value)
        return self.log_read(value, node) if is_logged else value

    def read_requires_grad(self, t: torch.Tensor) -> bool:
        """Return whether a tensor requires a gradient. It may differ in another call, so log it as a read."""
        return self.log_read(t.requires_grad)

    def _is_state(self, node: fx.Node) -> bool:
        """Return whether a value is computed only from buffers, attributes and single integers, such as a step
        counter."""
        leaves = find_leaf_kinds(node)
        is_number = node.meta["val"].dim() == 0
        return leaves == {"state"} or ("state" in leaves and is_number and not follows_from_floats(node))

    def log_plain_read(self, node: fx.Node, value: Any) -> None:
        """Log integers that neither routing nor state determines: see `matching.probes.python_integers`."""
        is_computed = node.op == "call_function" or node.meta.get("kind") == "constant"
        if is_computed and find_leaf_kinds(node) == {"other"}:
            self.plain_reads.setdefault(find_user_stack(), []).append(value)

    # ---------------------------------------------------------------- emptiness tests
    def log_emptiness_test(self, kind: str) -> None:
        """Log that the program tests here which experts have tokens: see `idle_tests`."""
        self.emptiness_tests.log(kind)

    def log_error(self, depends_on_rows: bool) -> None:
        """Log that an op raised an error, which the program may catch.

        Args:
            depends_on_rows: whether the number of rows may be the reason.
        """
        if is_user_asking_tensor():
            call_stack = find_user_stack()
            self.emptiness_tests.errors[call_stack] = depends_on_rows or self.emptiness_tests.errors.get(
                call_stack, False
            )

    def log_routed_rows(self, start: int) -> None:
        """Log that the nodes since index `start` have as many rows as the routing determines."""
        for node in self.nodes[start:]:
            node.meta["ragged"] = True
            if isinstance(val := node.meta.get("val"), torch.Tensor) and val.dim():
                self.row_counts.add(val.shape[0])
