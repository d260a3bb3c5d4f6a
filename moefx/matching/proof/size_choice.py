"""Choose the sizes of captures, with some number of tokens and within the restrictions of the attempt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...capture.sizes.size_guards import SizeGuard
from ...errors import Cause, Refused
from ..facts.guarded_sizes import find_sequence, find_sizes

if TYPE_CHECKING:
    from .proof_state import ProofState

_SEQUENCE_LENGTHS = (1, 2, 3, 7, 29, 131, 517)
_FIRST_VARIANTS = 3  # the first captures, whose sizes differ


class SizeChoice:
    """Reads the evidence of a proof and chooses sizes for its next captures.

    Args:
        first_tokens: number of tokens of the first capture.
    """

    def __init__(self, proof: ProofState, first_tokens: int):
        self.first_tokens = first_tokens
        self._proof = proof
        self._sequences: dict[tuple[int, int], dict[str, int]] = {}  # by the numbers of tokens and of captures
        self._guards_by_count: dict[int, list[SizeGuard]] = {}  # by the number of captures

    def choose(self, tokens: int, variant: int) -> dict[str, int]:
        """Choose sizes with about `tokens` tokens.

        If the restrictions of the attempt exclude them, choose more or fewer tokens. The first variants then avoid
        numbers of tokens that a capture has: a program proven at one size would take sizes for constants.

        Raises:
            Refused: no sizes satisfy the restrictions of the attempt.
        """
        arguments, restrictions = self._proof.arguments, self._proof.size_restrictions
        sizes = arguments.choose_sizes(tokens, variant)
        known = {math.prod(captured_sizes.values()) for captured_sizes in self._proof.evidence.sizes}
        if not restrictions or (self.satisfies_restrictions(sizes) and math.prod(sizes.values()) not in known):
            return sizes
        is_first = variant < _FIRST_VARIANTS
        # the first three differ, if they are chosen for the same number of tokens
        if fitting_sizes := find_sizes(arguments, restrictions, self.first_tokens if is_first else tokens):
            sizes = fitting_sizes[variant % (_FIRST_VARIANTS if is_first else len(fitting_sizes))]
            if is_first and math.prod(sizes.values()) in known:  # 7 * 11 and 11 * 7: numbers computed from 77 are equal
                return next(
                    (candidate for candidate in fitting_sizes if math.prod(candidate.values()) not in known), sizes
                )
            return sizes
        for n in (tokens, *(tokens * 2**i for i in range(1, 7)), *(tokens >> i for i in range(1, 5))):
            sizes = arguments.choose_sizes(n, variant)
            if self.satisfies_restrictions(sizes):
                return sizes
        raise Refused(
            "no other sizes were found at which all comparisons of sizes have the outcomes of the example",
            remedy="leave out comparisons of sizes that few sizes satisfy, such as `if x.shape[0] == 20`",
            cause=Cause.NO_SIZES,
        )

    def choose_sequence(self, tokens: int) -> dict[str, int]:
        """Choose one sequence of `tokens` tokens.

        If the restrictions of the attempt exclude single sequences, or the captures' comparisons exclude all lengths of
        them, choose as few sequences as possible with `tokens` tokens or a few more. Check the result with
        `satisfies_restrictions`: it may be a single sequence that the restrictions exclude.
        """
        key = tokens, len(self._proof.evidence.forms)
        if key not in self._sequences:
            single_sequences = [*map(self._proof.arguments.choose_sequence, _SEQUENCE_LENGTHS)]
            guards = [g for g in self._consistent_guards() if not any(g.holds(sizes) for sizes in single_sequences)]
            self._sequences[key] = find_sequence(
                self._proof.arguments, (*self._proof.size_restrictions, *guards), tokens
            )
        return self._sequences[key]

    def choose_as_captured(self, tokens: int) -> dict[str, int]:
        """Choose sizes with `tokens` tokens, or a few more, at which each comparison has the captures' outcome."""
        return find_sequence(
            self._proof.arguments, (*self._proof.size_restrictions, *self._consistent_guards()), tokens
        )

    def is_as_captured(self, sizes: dict[str, int]) -> bool:
        """Return whether each comparison with one outcome in all captures has the same outcome at these sizes."""
        return all(g.holds(sizes) for g in self._consistent_guards())

    def satisfies_restrictions(self, sizes: dict[str, int]) -> bool:
        """Return whether these sizes satisfy the restrictions of the attempt."""
        return all(g.holds(sizes) for g in self._proof.size_restrictions)

    def _consistent_guards(self) -> list[SizeGuard]:
        """Return the comparisons that had one outcome in all captures."""
        evidence = self._proof.evidence
        count = len(evidence.forms)
        if count not in self._guards_by_count:
            guards = dict.fromkeys(evidence.seen_guards())
            self._guards_by_count[count] = [g for g in guards if all(g.holds(sizes) for sizes in evidence.sizes)]
        return self._guards_by_count[count]


__all__ = ["SizeChoice"]
