"""Samples of the experts' parameters, which ranks exchange together with the row counts.

Every call runs the collective of `exchange_counts` and the copy of `read_counts`, so a few more numbers need no further
collective or host synchronisation. All ranks of the group receive the same numbers: if one raises, all raise.

`runtime.ranks.overwrite_detection` makes the samples. Blocks with equal graphs share a sampler number, an argument of
`exchange_counts`. An eager call selects the sampler of its block by `select_sampler`. A graph of torch.compile runs no
Python of the block, so its calls take the samplers of their number in turn.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

NUM_WORDS = 8


class Sampler(Protocol):
    """A block whose ranks compare samples."""

    number: int

    def take_sample(self) -> Tensor | None:
        """Return this rank's sample, int64 [NUM_WORDS] on the device of the block, or None."""

    def compare_samples(self, samples: Sequence[Sequence[int]]) -> None:
        """Compare the samples of all ranks, in the order of the process group. May raise, then on all ranks."""


_samplers: dict[int, list[weakref.ref[Sampler]]] = {}  # by number
_turns: dict[int, int] = {}
_selected = threading.local()


def register_sampler(sampler: Sampler) -> None:
    """Let exchanges with the sampler's number take its samples, as long as the sampler lives."""
    for number, refs in list(_samplers.items()):
        if not any(ref() is not None for ref in refs):
            del _samplers[number]
    _samplers.setdefault(sampler.number, []).append(weakref.ref(sampler))


def select_sampler(sampler: Sampler) -> None:
    """Select the sampler for the next exchange that this thread starts."""
    _selected.sampler = weakref.ref(sampler)


def take_sampler(number: int) -> Sampler | None:
    """Return the selected sampler if it has this number, otherwise the next one that has it."""
    sampler_ref, _selected.sampler = getattr(_selected, "sampler", None), None
    if sampler_ref is not None and (sampler := sampler_ref()) is not None and sampler.number == number:
        return sampler
    refs = _samplers.get(number)
    if not refs:
        return None
    _turns[number] = turn = (_turns.get(number, -1) + 1) % len(refs)
    return refs[turn]()


def local_sample(sampler: Sampler | None, device: torch.device) -> Tensor:
    """Return this rank's sample, or zeros if it has none."""
    words = None if sampler is None else sampler.take_sample()
    if words is None or words.device != device:
        return torch.zeros(NUM_WORDS, dtype=torch.int64, device=device)
    return words
