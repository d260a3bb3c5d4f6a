"""Samples of the experts' parameters, which ranks exchange beside the row counts.

The collective of `exchange_counts` and the copy of `read_counts` run in every call. A few more numbers cost neither a
collective nor a host synchronisation, and every rank of the group hears the same numbers: if one raises, all raise.

`runtime.overwriting` makes the samples. Blocks whose graphs are the same share a number, an argument of
`exchange_counts`. A call names the sampler of its block by `select`; a graph that torch.compile made runs no Python of
the block, and its calls take the samplers of their number in turn.
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
        """This rank's sample, int64 [NUM_WORDS] on the device of the block; None without one."""

    def compare_samples(self, samples: Sequence[Sequence[int]]) -> None:
        """Compare the samples of all ranks, in the order of the process group. May raise, on all ranks alike."""


_samplers: dict[int, list[weakref.ref[Sampler]]] = {}  # by number
_turns: dict[int, int] = {}
_selected = threading.local()


def register(sampler: Sampler) -> None:
    """Let exchanges of the sampler's number take its samples, as long as it lives."""
    for number, refs in list(_samplers.items()):
        if not any(ref() is not None for ref in refs):
            del _samplers[number]
    _samplers.setdefault(sampler.number, []).append(weakref.ref(sampler))


def select(sampler: Sampler) -> None:
    """Take this sampler in the next exchange, which this thread starts."""
    _selected.sampler = weakref.ref(sampler)


def take_sampler(number: int) -> Sampler | None:
    """The selected sampler, else the next one of a number."""
    selected, _selected.sampler = getattr(_selected, "sampler", None), None
    if selected is not None and (sampler := selected()) is not None and sampler.number == number:
        return sampler
    refs = _samplers.get(number)
    if not refs:
        return None
    _turns[number] = turn = (_turns.get(number, -1) + 1) % len(refs)
    return refs[turn]()


def local_sample(sampler: Sampler | None, device: torch.device) -> Tensor:
    """What this rank tells: zeros without a sample."""
    words = None if sampler is None else sampler.take_sample()
    if words is None or words.device != device:
        return torch.zeros(NUM_WORDS, dtype=torch.int64, device=device)
    return words
