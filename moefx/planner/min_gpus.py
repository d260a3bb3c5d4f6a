"""Find the number of GPUs that a model needs if it does not fit the given ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..util.unit_text import amount
from .entries import TERMS, Entry, Rejected
from .search import find_first_fit

if TYPE_CHECKING:
    from ..ranking import Ranking

_MAX_GPUS = 2**16  # GPUs
_TRIES = 6  # searched numbers of GPUs, some seconds in all


@dataclasses.dataclass(frozen=True)
class MinGpus:
    """The result of doubling the GPUs until a layout fits, with the same batch.

    Attributes:
        num_ranks: the smallest number of GPUs on which a layout fits, or the largest number that was searched.
        entry: a layout that fits `num_ranks`, or None.
        nearest: if none fits, the layout that lacks the least memory; None if no layout divides `num_ranks`.
        is_all: whether the platform has fewer than twice `num_ranks` GPUs, so that larger numbers are impossible.
    """

    num_ranks: int
    entry: Entry | None = None
    nearest: Rejected | None = None
    is_all: bool = False

    def __str__(self) -> str:
        if self.entry is not None:
            needs = amount(self.entry.memory["M_gpu"], "B")
            return (
                f"Doubling the GPUs, {self.num_ranks} are the first on which something fits, in {needs} a GPU: "
                f"{self.entry.long_label}."
            )
        limit = "the platform does not have twice as many" if self.is_all else "larger numbers were not searched"
        shortage, nearest = "no layout divides", self.nearest
        if nearest is not None:
            term = f"{TERMS[nearest.term]} ({nearest.term})"
            shortage = f"{nearest.label} comes nearest and needs {amount(nearest.lacking, 'B')} more, most of it {term}"
        return f"Doubling the GPUs, nothing fits up to {self.num_ranks}, and {limit}. On {self.num_ranks}, {shortage}."


def find_min_gpus(ranking: Ranking) -> MinGpus | None:
    """Find the smallest number of GPUs, by doubling, on which a layout fits.

    Searches the `_TRIES` smallest numbers whose total memory holds the states of the parameters.

    Returns:
        None if a layout fits the ranking's own GPUs, or the platform has no more.
    """
    num_available = ranking.platform.networks[-1].ranks
    limit = min(num_available or _MAX_GPUS, _MAX_GPUS)
    numbers = [n for i in range(1, _MAX_GPUS.bit_length()) if (n := ranking.num_ranks * 2**i) <= limit]
    if len(ranking) or not numbers:
        return None
    model, memory_bytes = ranking.model, ranking.platform.memory_bytes
    states = 16 * (model.parameters() - model.embedding_parameters())
    large_enough = [n for n in numbers if states <= n * memory_bytes][:_TRIES] or numbers[-1:]
    first_fit = None
    for n in large_enough:
        first_fit = find_first_fit(ranking, n)
        if isinstance(first_fit, Entry):
            return MinGpus(n, first_fit)
    return MinGpus(large_enough[-1], nearest=first_fit, is_all=0 < num_available < 2 * large_enough[-1])
