"""On how many GPUs a model fits that does not fit those there are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..util.unit_text import amount
from .entries import TERMS, Entry, Rejected
from .search import first_fit

if TYPE_CHECKING:
    from .ranking import Ranking

_MOST = 2**16  # GPUs
_TRIES = 6  # numbers of GPUs that are searched: some seconds


@dataclasses.dataclass(frozen=True)
class MinGpus:
    """What twice the GPUs, twice those and so on have room for, the batch as it is.

    Attributes:
        num_ranks: the smallest such number on which something fits, or the largest one that was looked at.
        entry: a layout that fits there; None if none does.
        nearest: where none does, the layout that lacks least there; None if none divides so.
        is_all: whether the platform has no more GPUs, twice as many; else these were not looked at.
    """

    num_ranks: int
    entry: Entry | None = None
    nearest: Rejected | None = None
    is_all: bool = False

    def __str__(self) -> str:
        if self.entry is not None:
            taken = amount(self.entry.memory["M_gpu"], "B")
            return (
                f"Doubling the GPUs, {self.num_ranks} are the first on which something fits, in {taken} a GPU: "
                f"{self.entry.words}."
            )
        more = "the platform does not have twice as many" if self.is_all else "no more were looked at"
        lacks, least = "no layout divides so", self.nearest
        if least is not None:
            lacks = (
                f"{least.what} lacks least, {amount(least.lacking, 'B')}, most of it {TERMS[least.term]} ({least.term})"
            )
        return f"Doubling the GPUs, nothing fits up to {self.num_ranks}, and {more}. On {self.num_ranks}, {lacks}."


def find_min_gpus(ranking: Ranking) -> MinGpus | None:
    """The smallest number of GPUs on which something fits. None if something does, or the platform has no more GPUs.

    Numbers whose memory, all of it, has no room for the states of the parameters are passed over; of the others the
    smallest `_TRIES` are looked at.
    """
    there = ranking.platform.networks[-1].ranks
    limit = min(there or _MOST, _MOST)
    numbers = [n for i in range(1, _MOST.bit_length()) if (n := ranking.num_ranks * 2**i) <= limit]
    if len(ranking) or not numbers:
        return None
    model, capacity = ranking.model, ranking.platform.capacity
    states = 16 * (model.parameters() - model.embedding_parameters())
    roomy = [n for n in numbers if states <= n * capacity][:_TRIES] or numbers[-1:]
    found = None
    for n in roomy:
        found = first_fit(ranking, n)
        if isinstance(found, Entry):
            return MinGpus(n, found)
    return MinGpus(roomy[-1], nearest=found, is_all=0 < there < 2 * roomy[-1])
