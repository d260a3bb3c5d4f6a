"""Captures of a proven block at more sizes, to find the formula of a number that differs between captures."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from typing import Protocol

import torch
import torch.utils._pytree as pytree
from torch import fx

from ...capture.environment.code_locations import suppress_program_errors
from ...capture.sizes.size_guards import evaluate_size
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing, RoutingKind
from ...capture.tracing.host_reads import Interventions
from ...errors import MoefxError
from ..facts.guarded_sizes import find_sequence, find_sizes
from ..lift.canonical_form import CanonicalForm, max_capture_tokens
from .match_result import Match

# numbers of tokens: small ones, multiples to which capacities are rounded, and large ones that tell slopes apart
_SAMPLED_TOKENS = (2, 3, 6, 7, 10, 13, 20, 33, 40, 64, 65, 100, 127, 128, 200, 320, 333, 512, 1031, 4096, 4099)
_TOKENS_PER_EXPERT = (24, 40)  # capacities are not rounded at these
_MIN_EXACT = (7, 60, 300)  # sizes without rounding are searched from these on; clamps may hide some
_MIN_SAMPLES = 12
_MAX_DELICATE, _MAX_EXPRESSIONS = 1100, 32


class Capturer(Protocol):
    """Captures a block under a routing, and lifts a capture like those of its proof; `ProofState` is one."""

    def capture(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None, max_nodes: int = 0
    ) -> Capture: ...

    def capture_and_lift(
        self, routing: Routing, sizes: dict[str, int], interventions: Interventions | None = None
    ) -> CanonicalForm: ...


class SizeSamples:
    """Makes captures of a proven block at more sizes on demand, and keeps them.

    Args:
        match: the proof. Its guards and restrictions limit the sizes.
        capturer: makes the captures.
    """

    def __init__(self, match: Match, capturer: Capturer):
        self.match, self.capturer = match, capturer
        self._by_kind: dict[RoutingKind, list[tuple[dict[str, int], Capture]]] = {}

    def narrow(self, match: Match) -> SizeSamples:
        """Return the samples for a match with fewer captures of the same proof."""
        samples = SizeSamples(match, self.capturer)
        samples._by_kind = self._by_kind
        return samples

    @property
    def kinds(self) -> list[RoutingKind]:
        """The kinds of routing that have samples."""
        return list(self._by_kind)

    def sample(self, kind: RoutingKind = "diverse") -> list[tuple[dict[str, int], Capture]]:
        """Return captures at more sizes under this kind of routing, to find formulas for numbers.

        Returns:
            (sizes, capture) pairs, without sizes at which the block fails. Cached.
        """
        if kind not in self._by_kind:
            samples = self._by_kind[kind] = []
            max_nodes = 4 * max(len(form.capture.nodes) for form in self.match.forms)
            most = max_capture_tokens(self.match.forms, times=2)
            guards = [*self.match.size_restrictions, *self.match.guards]
            counts = itertools.takewhile(
                lambda tokens: tokens <= most, sorted({*_SAMPLED_TOKENS, *self._delicate_sizes})
            )
            sequences = [find_sequence(self.match.arguments, guards, tokens) for tokens in counts]
            fitting = [s for i, s in enumerate(sequences) if all(g.holds(s) for g in guards) and s not in sequences[:i]]
            if len(fitting) < _MIN_SAMPLES:  # guards may allow multiples of a number only
                fitting += [s for s in find_sizes(self.match.arguments, guards, 64) if s not in fitting][:_MIN_SAMPLES]
            for sizes in fitting:
                is_long = self.match.arguments.tokens_per_unit * math.prod(sizes.values()) > 512
                with suppress_program_errors(MoefxError):
                    samples.append(
                        (sizes, self.capturer.capture(Routing(kind, 0), sizes, max_nodes=max_nodes if is_long else 0))
                    )
        return self._by_kind[kind]

    @functools.cached_property
    def _delicate_sizes(self) -> set[int]:
        """Return numbers of tokens that tell formulas apart: without rounding, and on both sides of a comparison."""
        per_expert = [times * self.match.num_experts for times in _TOKENS_PER_EXPERT]
        delicate = {tokens for tokens in per_expert if tokens < _SAMPLED_TOKENS[-1]}
        tokens = range(2, _MAX_DELICATE)
        for text in sorted(self.match.expressions, key=lambda e: (len(e), e))[:_MAX_EXPRESSIONS]:
            with contextlib.suppress(ArithmeticError, ValueError, TypeError):
                values = [evaluate_size(text, self.match.arguments.choose_sequence(n)) for n in tokens]
                exact = [n for n, v in zip(tokens, values, strict=True) if v == int(v)]
                if len(exact) < len(values):
                    delicate |= {n for least in _MIN_EXACT for n in exact[bisect.bisect(exact, least) :][:1]}
        for guard in dict.fromkeys(g for form in self.match.forms for g in form.capture.sizes.guards):
            with contextlib.suppress(ArithmeticError, ValueError, TypeError):
                sides = [guard.holds(self.match.arguments.choose_sequence(n)) for n in tokens]
                changes = [n for n, (a, b) in zip(tokens, itertools.pairwise(sides), strict=False) if a is not b]
                delicate |= {n for change in changes[:1] for n in (change, change + 1)}
        return delicate

    def is_empty_without_tokens(self) -> bool:
        """Return whether a call without tokens returns only empty tensors, and has no side effects."""
        for sizes in self.match.sizes_without_tokens:
            capture = None
            with suppress_program_errors(MoefxError):
                capture = self.capturer.capture(Routing("diverse", 0), sizes)
            if capture is None:
                return False
            values = [leaf.meta.get("val") for leaf in pytree.tree_leaves(capture.out) if isinstance(leaf, fx.Node)]
            if capture.effects or len(values) != len(pytree.tree_leaves(capture.out)):
                return False
            if not all(isinstance(value, torch.Tensor) and value.numel() == 0 for value in values):
                return False
        return True
