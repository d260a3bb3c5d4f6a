"""Find numbers of a model that the sizes of a capture should avoid.

A capture recognises sizes by their values: with B = 3 and S = 11, each axis of 33 counts as B*S. A `one_hot` over 32
experts and a padding class then looks like tokens. `ModelNumbers` gives a cost to each collision, and captures choose
sizes of low cost.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from ...ir.guards.attribute_reads import find_attributes
from ...ir.guards.code_closure import collect_code, trace_closure

MAX_NUMBER = 1 << 13  # sizes of captures are smaller, and quotients of larger numbers do not matter
MAX_PAIRED = 48  # numbers whose products, quotients and sums are avoided, too
MAX_ROWS_PER_TOKEN, MIN_TOKENS = 16, 17  # multiples of all tokens that `TorchFunctions` recognises
# Costs of a collision: with another size, with a number, next to a number, with a product, a sum, or a small number.
SAME, EXACT, NEXT, PRODUCT, SUM, SMALL = 100_000, 1000, 500, 40, 5, 10
NEGLIGIBLE = 150
# A size next to a number up to 4 is a coincidence. A size next to 8 may be a class more than experts, and is avoided if
# another size costs nothing.
NEXT_TO_FEW = {4: 50, 8: 160}
MAX_SMALL = 3  # numbers in code up to this are mostly axes and slots


@dataclasses.dataclass(frozen=True)
class ModelNumbers:
    """The numbers of a model, each with the cost of a size that equals it."""

    costs: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, block: nn.Module) -> ModelNumbers:
        """Collect the shapes, lengths, integer attributes and integers in the code of a block."""
        numbers_read = set(_iterate_numbers(block))
        named = {int(n) for n in trace_closure(collect_code(block)).numbers if abs(n) < MAX_NUMBER and n == int(n)}
        costs = _derive_costs(sorted(n for n in numbers_read | named if MAX_SMALL < n < MAX_NUMBER)[:MAX_PAIRED])
        for n in numbers_read | named:
            next_to = next((cost for limit, cost in NEXT_TO_FEW.items() if n <= limit), NEXT)
            for neighbour in (n - 1, n + 1):
                costs[neighbour] = max(next_to, costs.get(neighbour, 0))
        for n in named:
            costs[n] = max(SMALL if n <= MAX_SMALL else EXACT, costs.get(n, 0))
        return cls({**costs, **dict.fromkeys(numbers_read, EXACT)})

    def with_exact(self, numbers: Iterable[int]) -> ModelNumbers:
        """Add numbers, such as fixed axes of the arguments."""
        return ModelNumbers({**self.costs, **dict.fromkeys(numbers, EXACT)})

    def cost(self, sizes: Mapping[str, int], factor: int = 1) -> int:
        """Return the cost of sizes: of each, of their products, and of small multiples of all tokens.

        Args:
            factor: tokens per unit of the sizes, if the model fixes an axis.
        """
        values = [math.prod(subset) for subset in _iterate_combinations([n for n in sizes.values() if n != 1])]
        tokens = factor * math.prod(sizes.values())
        rows = [times * tokens for times in range(2, MAX_ROWS_PER_TOKEN + 1)] if tokens >= MIN_TOKENS else []
        equal = len(values) - len(set(values))  # B and S, or B*S and P, would be one number
        cost = SAME * equal + sum(self.costs.get(n, 0) for n in values) + sum(self.costs.get(n, 0) for n in rows) // 10
        return cost if cost >= NEGLIGIBLE else 0


def _iterate_numbers(block: nn.Module) -> Iterator[int]:
    for t in itertools.chain(block.parameters(), block.buffers()):
        yield from t.shape
    for module in block.modules():
        yield len(module._modules)
    for value in find_attributes(block).values():
        if type(value) is int:
            yield abs(value)
        elif isinstance(value, torch.Tensor):
            yield from value.shape
        elif type(value) in (tuple, list, dict, set):
            yield len(value)
            yield from (n for n in value if type(n) is int)


def _derive_costs(numbers: list[int]) -> dict[int, int]:
    """Derive the costs of products, quotients, sums and differences of two numbers, and of small multiples of one."""
    costs: dict[int, int] = {}
    for a, b in itertools.combinations_with_replacement(numbers, 2):
        costs |= dict.fromkeys((a + b, b - a), SUM)
    for a, b in itertools.combinations_with_replacement([2, 3, *numbers], 2):
        costs[a * b] = PRODUCT
        if b % a == 0:
            costs[b // a] = PRODUCT
    return costs


def _iterate_combinations(values: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(values) + 1):
        yield from itertools.combinations(values, count)


__all__ = ["ModelNumbers"]
