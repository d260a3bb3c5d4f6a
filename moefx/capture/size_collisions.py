"""Numbers of a model that no size of a capture should equal.

A capture recognises sizes by their values: with B = 3 and S = 11 every axis of 33 counts as B*S. The 33 classes of a
`one_hot` over 32 experts and a padding class then look like tokens. Captures avoid this by their choice of sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from ..ir.guards.attribute_reads import find_attributes
from ..ir.guards.code_closure import collect_code, trace_closure

MAX_NUMBER = 1 << 13  # larger numbers equal no size of a capture, nor do their quotients matter
MAX_PAIRED = 48  # numbers of which products, quotients and sums are formed
MAX_ROWS_PER_TOKEN, MIN_TOKENS = 16, 17  # multiples of all tokens that `Functions` recognises
# How bad a collision is: with another size, with a number itself, or with what may follow from numbers.
SAME, EXACT, NEXT, PRODUCT, SUM, SMALL = 100_000, 1000, 500, 40, 5, 10
NEGLIGIBLE = 150
# A number next to one of up to 4 is so by chance. One next to 8 may be a class more than experts, and is avoided if
# another size costs nothing.
NEXT_TO_FEW = {4: 50, 8: 160}
MAX_SMALL = 3  # numbers in code up to this are mostly axes and slots


@dataclasses.dataclass(frozen=True)
class ModelNumbers:
    """The numbers of a model, by how much a collision of a size with one of them costs."""

    costs: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, block: nn.Module) -> ModelNumbers:
        """Collect the shapes, lengths, integer attributes and integers in the code of a block."""
        own = set(_numbers_of(block))
        named = {int(n) for n in trace_closure(collect_code(block)).numbers if abs(n) < MAX_NUMBER and n == int(n)}
        costs = _derived_costs(sorted(n for n in own | named if MAX_SMALL < n < MAX_NUMBER)[:MAX_PAIRED])
        for n in own | named:
            next_to = next((cost for few, cost in NEXT_TO_FEW.items() if n <= few), NEXT)
            for near in (n - 1, n + 1):
                costs[near] = max(next_to, costs.get(near, 0))
        for n in named:
            costs[n] = max(SMALL if n <= MAX_SMALL else EXACT, costs.get(n, 0))
        return cls({**costs, **dict.fromkeys(own, EXACT)})

    def with_exact(self, numbers: Iterable[int]) -> ModelNumbers:
        """Add numbers, such as fixed axes of the arguments."""
        return ModelNumbers({**self.costs, **dict.fromkeys(numbers, EXACT)})

    def cost(self, sizes: Mapping[str, int], each: int = 1) -> int:
        """What the collisions of these sizes cost: each alone, each product, and small multiples of all tokens.

        Args:
            each: tokens per unit of the sizes, if the model fixes an axis.
        """
        values = [math.prod(chosen) for chosen in _combinations([n for n in sizes.values() if n != 1])]
        tokens = each * math.prod(sizes.values())
        rows = [times * tokens for times in range(2, MAX_ROWS_PER_TOKEN + 1)] if tokens >= MIN_TOKENS else []
        same = len(values) - len(set(values))  # B and S, or B*S and P, would be one number
        cost = SAME * same + sum(self.costs.get(n, 0) for n in values) + sum(self.costs.get(n, 0) for n in rows) // 10
        return cost if cost >= NEGLIGIBLE else 0


def _numbers_of(block: nn.Module) -> Iterator[int]:
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


def _derived_costs(numbers: list[int]) -> dict[int, int]:
    """Costs of products, quotients, sums and differences of two numbers, and of small multiples of one."""
    costs: dict[int, int] = {}
    for a, b in itertools.combinations_with_replacement(numbers, 2):
        costs |= dict.fromkeys((a + b, b - a), SUM)
    for a, b in itertools.combinations_with_replacement([2, 3, *numbers], 2):
        costs[a * b] = PRODUCT
        if b % a == 0:
            costs[b // a] = PRODUCT
    return costs


def _combinations(values: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(values) + 1):
        yield from itertools.combinations(values, count)


__all__ = ["ModelNumbers"]
