"""Capture tokens whose choices pass several tests at once.

Protects from tests of single choices that meet behind the routing weights, and that no token of a capture passes
together::

    for slot, number in enumerate((3, 7, 5, 11)):  # one of 43680 ordered selections of 4 among 16 experts
        is_rare = (chosen[:, slot] == number)[token, None]
        changed = torch.where(is_rare, changed, result)

The probe learns from the captures which choices pass each test, and captures again with tokens that choose accordingly.
`vary_count_functions` forces a single number that is made of several choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

from ...capture.environment.code_locations import Source, suppress_program_errors
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.node_origins import is_abstract
from ...capture.tracing.op_sets import SHAPE_ONLY
from ...errors import MoefxError, Refused
from ..facts.count_limits import OpSite
from ..facts.graph_nodes import depends_on_arguments, depends_on_choices, follows_from_integers
from ..facts.integer_ranges import MAX_OTHER_SIZE
from ..facts.token_functions import hash_without_sizes, is_token_function
from ..interventions.forced_outcome import ForcedStep, OutcomeKind, refuse_change
from .unreached_limits import MAX_CROWD_TOKENS

if TYPE_CHECKING:
    from ..lift.canonical_form import CanonicalForm
    from ..proof.proof_view import ProofView

_MAX_TESTS = 24
_MAX_SELECTIONS = 16
_MIN_TOKENS = 3  # that pass a test, to learn which of their choices matter
_TOKENS_PER_EXPERT = 8
_SEED = 17
_TOGETHER = "whether the choices of a token pass several tests at once"


class _TestKey(NamedTuple):
    """A test in all captures: a value per token that is made of its choices, and one outcome.

    Attributes:
        computation: hash of the computation, equal in captures of other sizes.
        column: the column of the value; 0 if it has one per token.
        outcome: the value of the rarer tokens.
    """

    source: Source
    computation: int
    column: int
    outcome: float


class _Selection(NamedTuple):
    """The choices that pass a test.

    Attributes:
        by_slot: the expert of some slots.
        anywhere: experts in any other slot.
    """

    by_slot: dict[int, int]
    anywhere: frozenset[int]

    def merge(self, other: _Selection, slots: int) -> _Selection | None:
        """Return a selection that passes both tests, or None if there is none."""
        by_slot = {**self.by_slot, **other.by_slot}
        experts = [*by_slot.values()]
        anywhere = (self.anywhere | other.anywhere) - {*experts}
        is_same = all(by_slot[k] == e for k, e in self.by_slot.items()) and len({*experts}) == len(experts)
        return _Selection(by_slot, anywhere) if is_same and len(experts) + len(anywhere) <= slots else None

    def fill(self, slots: int, experts: int, seed: int) -> tuple[int, ...]:
        """Return the experts of all slots; the free ones get experts in an order that depends on the seed."""
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()
        taken = {*self.by_slot.values(), *self.anywhere}
        rest = iter([*sorted(self.anywhere), *(e for e in order if e not in taken)])
        return tuple(self.by_slot[k] if k in self.by_slot else next(rest) for k in range(slots))


def combine_choices(proof: ProofView) -> None:
    """Capture tokens that pass several tests of their choices at once, if the program tests choices.

    Raises:
        Refused: these tokens have another form.
    """
    reference = proof.evidence.reference
    tests = {key: chosen for key, chosen in _learn_tests(proof).items() if chosen.by_slot or chosen.anywhere}
    slots = reference.list_choices().shape[1]
    selections = _combine(list(tests.values())[:_MAX_TESTS], slots, proof.num_experts)
    if not selections:
        return
    routing = Routing("diverse", _SEED, selections=tuple(selections))
    try:
        proof.add_form(proof.capture_and_lift(routing, reference.sizes), may_relift=True)
    except Refused as refusal:
        source = next(iter(tests)).source
        raise refuse_change(ForcedStep(OutcomeKind.OP, source, _TOGETHER)) from refusal


def _combine(tests: list[_Selection], slots: int, experts: int) -> list[tuple[int, ...]]:
    """Return selections that pass as many tests as possible, starting from each test; none that pass a single one."""
    if slots > experts:
        return []
    selections: dict[tuple[int, ...], None] = {}
    for start in range(len(tests)):
        merged, count = tests[start], 1
        for other in (*tests[start + 1 :], *tests[:start]):
            if (both := merged.merge(other, slots)) is not None and both != merged:
                merged, count = both, count + 1
        if count > 1:
            selections[merged.fill(slots, experts, start)] = None
    return list(selections)[:_MAX_SELECTIONS]


def _learn_tests(proof: ProofView) -> dict[_TestKey, _Selection]:
    """Learn which choices pass each test, from all captures without forced outcomes.

    If few tokens pass some test, learn from one more capture, of several tokens for each expert and slot.
    """
    passing: dict[_TestKey, list[list[int]]] = {}

    def learn(form: CanonicalForm) -> None:
        if not form.capture.interventions and MAX_OTHER_SIZE < form.capture.sizes.tokens <= len(form.ids):
            for key, is_passed in _find_passing_tokens(form, proof.num_experts):
                passing.setdefault(key, []).extend(form.list_choices()[is_passed].tolist())

    for form in proof.evidence.forms:
        learn(form)
    if len(passing) > 1 and any(len(rows) < _MIN_TOKENS for rows in passing.values()):
        tokens = min(MAX_CROWD_TOKENS, _TOKENS_PER_EXPERT * proof.num_experts)
        sizes = proof.size_choice.choose_sequence(proof.arguments.choose_tokens_near(tokens))
        if proof.size_choice.satisfies_restrictions(sizes):
            with suppress_program_errors(MoefxError):
                learn(proof.capture_and_lift(Routing("diverse", _SEED), sizes))
    return {key: _find_common(rows) for key, rows in passing.items() if len(rows) >= _MIN_TOKENS}


def _find_common(rows: list[list[int]]) -> _Selection:
    """Return the choices that all selections have in common."""
    by_slot = {k: column[0] for k, column in enumerate(zip(*rows, strict=True)) if len({*column}) == 1}
    return _Selection(by_slot, frozenset(set.intersection(*map(set, rows)) - {*by_slot.values()}))


def _find_passing_tokens(form: CanonicalForm, num_experts: int) -> Iterator[tuple[_TestKey, torch.Tensor]]:
    """Yield the tests of a capture, and which tokens pass each, bool [T]: the minority.

    A line that tests as many numbers as there are experts is a loop over experts, and no test of several choices.
    """
    nodes = [n for n in form.capture.nodes if _is_test(form.capture, n)]
    computations: dict[OpSite, set[int]] = {}
    for n in nodes:
        computations.setdefault(OpSite.locate(n), set()).add(hash_without_sizes(n))
    for n in nodes:
        if len(computations[OpSite.locate(n)]) >= max(2, num_experts - 1):
            continue
        value = form.capture.concrete_value(n).double().reshape(form.capture.sizes.tokens, -1)
        for column, values in itertools.islice(enumerate(value.unbind(1)), num_experts):
            outcomes, counts = values.unique(return_counts=True)
            if 1 < len(outcomes) <= MAX_OTHER_SIZE:
                for outcome, count in zip(outcomes.tolist(), counts.tolist(), strict=True):
                    if 2 * count <= len(values):
                        yield _TestKey(n.meta["source"], hash_without_sizes(n), column, outcome), values == outcome


def _is_test(capture: Capture, n: fx.Node) -> bool:
    """Return whether a node tests a token's choices: a boolean, or a number that an op on floats takes."""
    val = n.meta.get("val")
    if n.op != "call_function" or not isinstance(val, torch.Tensor):
        return False
    if capture.sizes.tokens not in (math.prod(val.shape[:1]), math.prod(val.shape[:2])):
        return False
    if not follows_from_integers(n) or n.target in SHAPE_ONLY or not n.users:
        return False
    is_asked = val.dtype is torch.bool or any(map(is_abstract, n.users))
    return is_asked and depends_on_choices(n) and not depends_on_arguments(n) and is_token_function(capture, n)


__all__ = ["combine_choices"]
