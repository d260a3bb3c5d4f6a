"""Leave experts idle by the integers of a call, and crowd all tokens on the same experts.

Protects from a wrong refusal of the first loop, and from a wrong rewrite of the second one::

    for e in range(num_experts):
        if (ids % num_experts == e).any():  # True for every expert while ids spread out
            out[ids % num_experts == e] = experts[e](x[ids % num_experts == e])

    idle = [e for e in range(num_experts) if not (chosen == e).any()]
    scale = 2.0 if len(idle) > 5 else 1.0

`leave_experts_idle` adds captures in which all tokens have one id, if the program only tests for tokens.
`concentrate_tokens` checks the form of many tokens that choose the same experts, if the program tests which are idle.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from ...capture.environment.code_locations import suppress_program_errors
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing
from ...errors import Refused
from ..facts.integer_paths import evaluate_path, find_integer_ancestors, find_path
from .integer_inputs import find_doubtful_nodes

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_MAX_CAPTURES = 4
_MAX_NUMBERS = 64
_MAX_NODES = 64


class Concentration(NamedTuple):
    """All entries of an integer argument become one number.

    Attributes:
        position: index among the tensor arguments.
        number: the value of all entries.
    """

    position: int
    number: int

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return torch.full_like(value, self.number)


def leave_experts_idle(proof: ProofView) -> None:
    """Add captures in which tokens concentrate on one number of an argument, if that changes an outcome.

    Captures that do not have the form of the others are left to the probes that force an outcome.
    """
    captured, changed = proof.evidence.reference.capture, dict[Concentration, set[fx.Node]]()
    open_ = set(find_doubtful_nodes(proof)[:_MAX_NODES])
    for node in open_:
        for concentration in _find_concentrations(proof, captured, node):
            changed.setdefault(concentration, set()).add(node)
    for _ in range(_MAX_CAPTURES):
        best = max(changed, key=lambda c: len(changed[c] & open_), default=None)
        if best is None or not changed[best] & open_:
            return
        open_ -= changed.pop(best)
        with contextlib.suppress(Refused):
            form = proof.capture_and_lift(Routing("diverse", 0), proof.evidence.sizes[0], {best.position: best})
            proof.add_form(form)


def concentrate_tokens(proof: ProofView) -> None:
    """Check the form of many tokens that all choose the same experts, if the program tests which experts are idle.

    Raises:
        Refused: the form differs.
    """
    if not proof.evidence.emptiness_tests.sites:
        return
    most = max(proof.evidence.sizes, key=lambda sizes: math.prod(sizes.values()))
    for seed in (0, proof.num_experts - 1):
        proof.evidence.require_same_form(proof.capture_and_lift(Routing("concentrated", seed), most))


def _find_concentrations(proof: ProofView, captured: Capture, node: fx.Node) -> Iterator[Concentration]:
    """Yield the concentrations that change the outcome of a boolean node."""
    ancestors = find_integer_ancestors(node)
    for leaf in (n for n in ancestors if n.op == "placeholder"):
        argument = proof.arguments.tensors[leaf.meta["position"]]
        if argument.numbers_per_token > 1 or not argument.has_token_axis:
            continue
        run = _Run(captured, leaf, find_path(leaf, ancestors), node)
        numbers = leaf.meta["val"].unique()[:_MAX_NUMBERS].tolist()
        outcomes = {number: run.outcome(torch.full_like(leaf.meta["val"], number)) for number in numbers}
        as_it_was = captured.concrete_value(node).tolist()
        others = [n for n, outcome in outcomes.items() if outcome is not None and outcome != as_it_was]
        same = [n for n, outcome in outcomes.items() if outcome == as_it_was]
        if others and (not same or run.tests_emptiness(others[0], same[0])):
            yield from (Concentration(leaf.meta["position"], n) for n in others)


class _Run(NamedTuple):
    """Evaluates a node for other values of an argument."""

    captured: Capture
    leaf: fx.Node
    path: list[fx.Node]
    node: fx.Node

    def outcome(self, value: torch.Tensor) -> Any:
        with suppress_program_errors():  # the number may be out of bounds of a table
            return evaluate_path(self.captured, self.path, {self.leaf: value})[self.node].tolist()
        return None

    def tests_emptiness(self, idle: int, busy: int) -> bool:
        """Return whether only the first or the last entry changes the outcome, as entries become `busy` one by one."""
        value = torch.full_like(self.leaf.meta["val"], idle)
        outcomes = []
        for i in range(value.numel() + 1):
            outcomes.append(self.outcome(value))
            if i < value.numel():
                value.view(-1)[i] = busy
        return all(outcome == outcomes[1] for outcome in outcomes[1:-1])
