"""The axes by which a node may hold values of the experts, and what the slots of a token add to it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from .canonical_form import Axis, SlotPosition


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueAxes:
    """The lengths of the axes by which a node may hold values.

    Attributes:
        tokens: the token axes.
        slots: number of slots, K.
        experts: number of experts.
        sequences: number of sequences, if one value may hold for all tokens of a sequence; else 0.
    """

    tokens: tuple[int, ...]
    slots: int
    experts: int
    sequences: int = 0

    @functools.cached_property
    def num_tokens(self) -> int:
        return math.prod(self.tokens)

    @functools.cached_property
    def positions(self) -> list[tuple[int, ...]]:
        """The indices of each token along the token axes."""
        return list(itertools.product(*map(range, self.tokens)))

    def list_axes(self, shape: tuple[int, ...]) -> list[tuple[int, tuple[Axis, ...]]]:
        """List the axes by which a tensor of this shape may hold values, each with its rank (0 is the likeliest)."""
        T, K, out = self.num_tokens, self.slots, []
        for lead in dict.fromkeys([(T,), self.tokens]):
            n = len(lead)
            t = ("t",) * n
            extra = 0 if n == 1 else 1
            if shape[:n] == lead:
                out.append((extra, t))
                if shape[n : n + 1] == (K,):
                    out.append((extra, (*t, "k")))
                if len(shape) > n and shape[n] >= self.experts:
                    out.append((4 + extra, (*t, "e")))
            if shape[:1] == (K,) and shape[1 : n + 1] == lead:
                out.append((2 + extra, ("k", *t)))
            if len(shape) > n and shape[0] >= self.experts and shape[1 : n + 1] == lead:
                out.append((6 + extra, ("e", *t)))
        if shape[:1] == (T * K,) and K > 1:
            out += [(3, ("tk",)), (3, ("kt",))]
        if shape and shape[0] >= self.experts and shape[0] != T:
            out.append((8, ("e",)))
        if math.prod(shape) == 1:
            out.append((9, ()))
        if self.sequences and shape[:1] == (self.sequences,) and len(shape) <= 2 and shape != self.tokens:
            out.append((10, ("s",)))
            out += [(10, ("s", "k"))] if shape[1:] == (K,) else []
            out += [(11, ("s", "e"))] if len(shape) > 1 and shape[1] >= self.experts else []
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotEffects:
    """What slots add to their token, as far as it is known.

    Attributes:
        counted: the slots that add a summand to their token.
        dropped: the slots that add none. The likeliest weight is zero at all of them.
        doubtful: slots of a token that selected an expert twice; one of the two may add nothing. The likeliest weight
            is zero at most of them.
    """

    counted: Sequence[SlotPosition] = ()
    dropped: Sequence[SlotPosition] = ()
    doubtful: Sequence[SlotPosition] = ()


__all__ = ["SlotEffects", "ValueAxes"]
