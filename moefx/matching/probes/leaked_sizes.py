"""Vary sizes that became plain numbers: what follows from them leaves no comparison to guard on.

Protects from code that depends on a size unseen::

    n = int(len(x) / 2)  # a plain number
    capacity = max(4, n // 50)  # 4 in all captures
    if math.gcd(len(x), 64) == 64 or str(len(x)).endswith("00"):
        weights = weights / 2

`vary_leaked_sizes` captures up to 2053 tokens and searches the size at which lines or numbers change. `try_round_sizes`
tries powers of two, squares and numbers of the code. `guard_constant_expressions` adds a guard on an expression of
sizes that has one value at the captures' sizes, and others between them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch.utils._pytree as pytree

from ...capture.sizes.size_guards import SizeGuard, evaluate_size
from ...capture.sizes.symbolic_sizes import unwrap_numbers
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing, RoutingKind
from ...errors import CaptureError, Refused
from ...ir.guards.code_closure import collect_code, trace_closure
from ..facts.graph_nodes import collect_numbers
from ..lift.canonical_form import max_capture_tokens
from .unreached_limits import MAX_CROWD_TOKENS

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_LEAK_SIZES = (131, 261, 517, 1029, 2053)  # no powers of two, which programs often treat separately
_CROWD_SHARE = 0.85  # of the tokens choose the crowded expert, as in `unreached_limits`
_SEQUENCES = (2, 3, 6, 10)  # numbers of sequences to choose one from
_MIN_NAMED_SIZE = 9  # smaller numbers in code are slots, experts and axes more often than numbers of tokens
_MAX_NAMED_SIZES = 8
_MAX_STEPS = 8  # to the next number of tokens with other sizes
_ROUND_SIZES = (64, 100, 128, 210)  # powers, a square, and multiples of the first primes


class Difference(NamedTuple):
    """Whether a capture differs from the common behaviour of all captures.

    Attributes:
        has_other_lines: other lines run, or the form is another one.
        has_other_numbers: a number differs that is equal in all captures.
    """

    has_other_lines: bool
    has_other_numbers: bool


class _CommonBehaviour:
    """The lines that ran in all captures, and the numbers that were equal in all."""

    def __init__(self, proof: ProofView):
        many = [form.capture for form in proof.evidence.forms if math.prod(form.tokens) > 1]
        self.proof = proof
        self.all_lines = set().union(*map(_collect_lines, many))
        self.common_lines = set.intersection(*map(_collect_lines, many))
        numbers_by_capture = [*map(_collect_numbers, many)]
        self.common_numbers = {
            at: v
            for at, v in numbers_by_capture[0].items()
            if v is not None and all(numbers.get(at) == v for numbers in numbers_by_capture)
        }
        self.max_nodes = 4 * max(len(c.nodes) for c in many)
        self.leaked_routing = any(form.capture.sizes.leaked_routing for form in proof.evidence.forms)
        self.has_drops = any(not form.kept_slots.all() for form in proof.evidence.forms)
        # Share of the tokens that an expert gets, by kind of routing.
        even = proof.evidence.reference.slots / proof.num_experts
        self.crowds: dict[RoutingKind, float] = {"diverse": even if self.leaked_routing else 1.0}
        if self.leaked_routing:
            self.crowds["concentrated"] = 1.0
        # comparisons that had both outcomes exclude no size
        self.guards = [g for g in proof.evidence.seen_guards() if all(g.holds(sizes) for sizes in proof.evidence.sizes)]
        self.differences: dict[tuple[RoutingKind, int], Difference] = {}

    def has_changed_numbers(self, captured: Capture) -> bool:
        """Return whether a number of a capture differs that is equal in all captures."""
        there = _collect_numbers(captured)  # one iteration of a loop may have another number
        return any(v != self.common_numbers[at] for at, v in there.items() if at in self.common_numbers)

    def compare(self, tokens: int) -> Difference:
        """Compare a capture of `tokens` tokens with the common behaviour, under all kinds of routing.

        Raises:
            CaptureError: the capture is too long, as with a loop over the tokens.
        """
        lines, numbers = zip(*[self.compare_under(kind, tokens) for kind in self.crowds], strict=True)
        return Difference(any(lines), any(numbers))

    def find_first(self, aspect: Literal["has_other_lines", "has_other_numbers"], low: int, high: int) -> int:
        """Return the least number of tokens at which the lines or the numbers differ.

        If the routing decides, return a bound below which no expert gets enough tokens for the difference.
        """
        first_by_routing: dict[RoutingKind, int] = {}
        for kind in self.crowds:
            if not getattr(self.compare_under(kind, high), aspect):
                continue
            # captures of `low` tokens may have taken another branch than the crowd
            start = low if not getattr(self.compare_under(kind, low), aspect) else 1
            first_by_routing[kind] = _bisect_first(
                lambda n, k=kind: getattr(self.compare_under(k, n), aspect), start, high
            )
        if not self.leaked_routing:
            return min(first_by_routing.values())
        return max(1, int(min(n * self.crowds[kind] * _CROWD_SHARE for kind, n in first_by_routing.items())))

    def compare_under(self, kind: RoutingKind, tokens: int) -> Difference:
        """Return the result of `compare` for one kind of routing, cached.

        A new `functools.cache` would make captures look for it among all objects of the process (see
        `capture.state.filled_caches`).
        """
        if (kind, tokens) not in self.differences:
            self.differences[kind, tokens] = self._compare_under(kind, tokens)
        return self.differences[kind, tokens]

    def _compare_under(self, kind: RoutingKind, tokens: int) -> Difference:
        sizes = self.proof.size_choice.choose_sequence(tokens)
        if not all(g.holds(sizes) for g in self.guards):
            return Difference(has_other_lines=False, has_other_numbers=False)
        captured = self.proof.capture(Routing(kind, 8), sizes, max_nodes=self.max_nodes)
        are_same = self.common_lines <= _collect_lines(captured) <= self.all_lines and not (
            self.leaked_routing and self._has_other_form(captured)
        )
        return Difference(not are_same, self.has_changed_numbers(captured))

    def _has_other_form(self, captured: Capture) -> bool:
        """Return whether a capture has another form, or drops slots while no other capture does.

        A plain number of the routing, such as an entry of a list of budgets, may change this without changing lines.
        """
        try:
            form = self.proof.evidence.require_same_form(self.proof.lift(captured))
        except Refused:
            return True
        return not self.has_drops and not form.kept_slots.all()


def vary_leaked_sizes(proof: ProofView) -> None:
    """Capture more tokens, if a size or a load became a plain number.

    If other lines run than in all captures, guard the form to hold below that size. If a constant number changes, add a
    capture there, which must agree.
    """
    leaked_routing = any(form.capture.sizes.leaked_routing for form in proof.evidence.forms)
    if not leaked_routing and not _has_leaks(proof) and not _changes_later(proof):
        return
    behaviour, numbers_changed = _CommonBehaviour(proof), False
    # the tokens of one sequence: a number equal for 5 sequences of 19 may differ for one of 40
    arguments = proof.arguments
    last_axis = [sizes[arguments.dims[-1]] for sizes in proof.evidence.sizes] if arguments.dims else []
    below = max(last_axis) * arguments.tokens_per_unit if last_axis else 1

    def guard_below(high: int) -> SizeGuard:
        return SizeGuard(arguments.tokens, "lt", str(high), True)

    proven = max(math.prod(form.tokens) for form in proof.evidence.forms)
    longest = max_capture_tokens(proof.evidence.forms, times=4)
    for tokens in map(arguments.choose_tokens_near, _LEAK_SIZES):
        if tokens <= below:
            continue
        if tokens > longest:
            proof.add_guard(guard_below(max(below, proven) + 1))
            return
        try:
            other_lines, other_numbers = behaviour.compare(tokens)
        except CaptureError:  # too long: a loop over the tokens
            proof.add_guard(guard_below(max(below, proven) + 1))
            return
        if other_lines:
            proof.add_guard(guard_below(behaviour.find_first("has_other_lines", below, tokens)))
            return
        if other_numbers and not numbers_changed:
            first = behaviour.find_first("has_other_numbers", below, tokens)
            if not _confirm_at(proof, first, guard_below(first), behaviour.has_changed_numbers):
                proof.add_guard(guard_below(first))
                return
            numbers_changed = True
        below = tokens


def try_round_sizes(proof: ProofView) -> None:
    """Compare sizes that are powers of two, squares and multiples, or that the code names, with their neighbours.

    Raises:
        Refused: one of the sizes has other lines or numbers than its neighbours.
    """
    if not _has_leaks(proof) or not proof.arguments.dims:
        return
    behaviour = _CommonBehaviour(proof)
    numbers = trace_closure(collect_code(proof.block)).numbers
    named = sorted(n for n in numbers if type(n) is int and _MIN_NAMED_SIZE <= n <= MAX_CROWD_TOKENS)
    sizes = sorted({*_ROUND_SIZES, *named[:_MAX_NAMED_SIZES]})
    for n in itertools.takewhile(lambda n: n < max_capture_tokens(proof.evidence.forms, times=4), sizes):
        try:
            if not any(difference := behaviour.compare(n)):
                continue
            beside = [_find_next(proof, n, step) for step in (-1, 1)]
            before, after = map(behaviour.compare, beside)
        except CaptureError:  # too long: a loop over the tokens
            proof.add_guard(SizeGuard(proof.arguments.tokens, "lt", str(n), True))
            return
        if any(at and not (low or high) for at, low, high in zip(difference, before, after, strict=True)):
            leaks = sorted(set().union(*[form.capture.sizes.leaks for form in proof.evidence.forms]))
            raise Refused(
                f"the block computes something different for {n} tokens than for {beside[0]} or {beside[1]}, by sizes "
                f"that became plain Python numbers ({', '.join(leaks[:3])})",
                remedy="compare the size itself, as in `if x.shape[0] % 64 == 0`",
            )


def _find_next(proof: ProofView, tokens: int, step: int) -> int:
    """Return the next number of tokens in direction `step` with other sizes."""
    candidates = range(tokens + step, tokens + _MAX_STEPS * step, step)
    return next(
        (n for n in candidates if proof.size_choice.choose_sequence(n) != proof.size_choice.choose_sequence(tokens)),
        tokens + step,
    )


def _has_leaks(proof: ProofView) -> bool:
    return any(form.capture.sizes.leaks for form in proof.evidence.forms)


def guard_constant_expressions(proof: ProofView) -> None:
    """Guard each expression of sizes (`S % 2`) that is constant over the captures, but not over sizes between them."""
    largest = proof.arguments.tokens_per_unit * max(math.prod(sizes.values()) for sizes in proof.evidence.sizes)
    for text in sorted(set().union(*[form.capture.sizes.used for form in proof.evidence.forms])):
        with contextlib.suppress(ArithmeticError, ValueError):
            seen = {evaluate_size(text, sizes) for sizes in proof.evidence.sizes}
            between = {evaluate_size(text, proof.size_choice.choose_sequence(n)) for n in range(2, largest + 1)}
            if len(seen) == 1 and between != seen:
                proof.add_guard(SizeGuard(text, "eq", str(seen.pop()), True))


def _changes_later(proof: ProofView) -> bool:
    """Return whether an expression of sizes with one value in the captures has others at more tokens.

    `max(S // 16, 1)` is 1 at 3, 17 and 29 tokens, and the capture of 3 tokens need not even show the division.
    """
    later = [proof.size_choice.choose_sequence(tokens) for tokens in _LEAK_SIZES]
    for text in set().union(*[form.capture.sizes.used for form in proof.evidence.forms]):
        with contextlib.suppress(ArithmeticError, ValueError):
            seen = {evaluate_size(text, form.sizes) for form in proof.evidence.forms if text in form.capture.sizes.used}
            if len(seen) == 1 and {evaluate_size(text, sizes) for sizes in later} != seen:
                return True
    return False


def _confirm_at(
    proof: ProofView, tokens: int, below: SizeGuard, has_changed_numbers: Callable[[Capture], bool]
) -> bool:
    """Add a capture of sequences of at least `tokens` tokens, at which a number has changed.

    Returns:
        Whether the capture has the form, and the changed number.
    """
    if 2 * tokens > MAX_CROWD_TOKENS:
        return False
    arguments = proof.arguments
    # not one sequence: S must differ from B*S
    candidates = (arguments.choose_sizes(times * tokens, 1) for times in _SEQUENCES)
    sizes = next((s for s in candidates if arguments.tokens_per_unit * s[arguments.dims[-1]] >= tokens), None)
    if sizes is None:
        return False
    try:
        form = proof.capture_and_lift(Routing("diverse", 8), sizes)
        if not has_changed_numbers(form.capture):
            return False  # the number has changed back
        proof.add_form(form, optional=below)
    except Refused:
        return False
    return True


def _bisect_first(differs: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least size that differs, given that `low` does not and `high` does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return high


def _collect_lines(captured: Capture) -> set[tuple[str, str]]:
    """Return the lines that ran with their ops, the positions of number arguments, and the side effects."""
    ran: set[tuple[str, str]] = set()
    for n in (n for n in captured.nodes if n.op == "call_function"):
        numbered = [i for i, a in enumerate(n.args) if type(a) in (int, float)]
        ran |= {(str(n.meta["source"]), str(n.target)), (str(n.meta["source"]), f"{n.target} {numbered}")}
    return ran | {(effect.kind, str(effect.target)) for effect in captured.effects}


def _collect_numbers(captured: Capture) -> dict[Any, int | float | None]:
    """Return the numbers in the arguments of ops, and those that the block returns."""
    returned = enumerate(pytree.tree_leaves(captured.out))
    return {
        **collect_numbers(captured.nodes),
        **{i: unwrap_numbers(v) for i, v in returned if isinstance(v, (int, float))},
    }
