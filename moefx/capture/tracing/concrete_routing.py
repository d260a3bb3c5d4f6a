"""Concrete routing: invent the values of router scores, and so the routing decisions of a capture.

A `Routing` invents the values from which a block computes integers, router logits for instance. It does so at the
outputs of contractions. A proof demands one canonical form under several kinds of routing. Each kind tests something
else:

* `diverse`: each expert is the first choice of some token, pairs of experts vary, counts are uneven, some scores tie;
* `skewed`: some experts get most tokens, and about a third of the experts gets none;
* `overloaded`: nearly all tokens choose the same experts, so every capacity overflows; if there are more than three
  experts, one gets no token;
* `concentrated`: all tokens choose expert `seed` and the same other ones; the rest get none;
* `even`: each expert is the first choice of equally many consecutive tokens; the first expert gets the remainder;
* `contested`: as `overloaded`, and the first choice of some tokens is the second choice of others;
* `spared`: only tokens that `prefer` expert `seed` choose it;
* `unsure`: as `spared`, and these tokens score all experts nearly equally, or nearly equally and low;
* `tied`: as `overloaded`, and most tokens equal the first one, so their scores tie.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import fx

from ...ir.node_meta import find_original
from ...util.tensor_trees import has_values

RoutingKind = Literal[
    "diverse", "skewed", "overloaded", "concentrated", "even", "contested", "spared", "unsure", "tied"
]


class Routing:
    """A kind of routing with a seed.

    Args:
        prefer: experts (columns) that the first tokens choose first, because no earlier routing used them.
        keep_values: keep the values of parameters and buffers, which are varied otherwise.
        is_wild: give float parameters and buffers values of any magnitude.
        selections: the experts (columns) that the first tokens choose, the first choice first.
    """

    def __init__(
        self, kind: RoutingKind = "diverse", seed: int = 0, prefer: tuple[int, ...] = (), keep_values: bool = False,
        is_wild: bool = False, selections: tuple[tuple[int, ...], ...] = (),
    ):  # fmt: skip
        assert kind in get_args(RoutingKind), kind
        self.kind: RoutingKind = kind
        self.seed, self.prefer, self.keep_values, self.is_wild = seed, prefer, keep_values, is_wild
        self.selections = selections
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def restart(self) -> Routing:
        """Return the same routing with its random generator reset."""
        return Routing(self.kind, self.seed, self.prefer, self.keep_values, self.is_wild, self.selections)

    def __repr__(self) -> str:
        return f"Routing({self.kind!r}, seed={self.seed})"

    def invent_value(self, node: fx.Node) -> torch.Tensor:
        """Return a value for an abstract float; varied scores if it may be router scores."""
        val = node.meta["val"]
        original = find_original(node)
        shape = tuple(val.shape)
        if original is None and self.kind == "tied" and shape:
            return _tie_rows(self._invent(node, val, shape))
        if original is not None and self.is_wild:
            return self._draw_wild(shape).to(val.dtype)
        if original is not None:
            # a bias must not decide who is chosen while every expert has to be seen once
            if (
                has_values(original)
                and original.numel() <= 1 << 16
                and not (self.prefer and shape and 1 < shape[-1] == original.numel())
            ):
                return self._permute(original.detach().to("cpu", copy=True), node.meta.get("fqn", ""))
            return (0.01 * torch.randn(shape, generator=self.generator, dtype=torch.float32)).to(val.dtype)
        return self._invent(node, val, shape)

    def _invent(self, node: fx.Node, val: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if node.op == "call_function" and val.numel() and shape and 2 <= shape[-1] <= 4096:
            return self.draw_scores(val.numel() // shape[-1], shape[-1]).view(shape).to(val.dtype)
        return torch.randn(shape, generator=self.generator, dtype=torch.float32).to(val.dtype)

    def _permute(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Return the values of a parameter or buffer, permuted if `seed` is not 0.

        A single number is scaled. Equal numbers, such as an untrained bias, become different. A proof must not
        depend on which of them is large or zero.
        """
        if not self.seed or self.keep_values or not value.numel():
            return value
        generator = self._make_generator(name)
        if (value == value.flatten()[0]).all() and (value.numel() > 1 or value.item() == 0):
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            if (value != 0).any() and bool(value.isfinite().all()):
                return (value.double() * noise.exp()).to(value.dtype)
            return (noise * self._draw_factor(generator)).to(value.dtype)
        if value.numel() == 1:
            return (value.double() * self._draw_factor(generator)).to(value.dtype)
        return value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)

    def _draw_wild(self, shape: Sequence[int]) -> torch.Tensor:
        """Return numbers of all magnitudes from 1e-3 to 1e3, mostly positive."""
        sizes = 10.0 ** (6 * torch.rand(shape, generator=self.generator, dtype=torch.float32) - 3)
        return torch.where(torch.rand(shape, generator=self.generator, dtype=torch.float32) < 0.2, -sizes, sizes)

    def _draw_factor(self, generator: torch.Generator) -> float:
        """Return a factor for a number: a limit may hide a small number, and a large number may hide all others."""
        return (1.25, 16, 1 / 16)[int(torch.randint(3, (), generator=generator))]

    def _make_generator(self, name: str) -> torch.Generator:
        """Return the generator for a parameter or buffer. With `seed` not 0, equal ones get different values."""
        return torch.Generator().manual_seed(self.seed + (zlib.crc32(name.encode()) << 8 if self.seed else 0))

    def draw_scores(self, rows: int, n: int) -> torch.Tensor:
        """Return scores [rows, n] whose order along each row is the preference of the token."""
        base = torch.rand(rows, n, generator=self.generator, dtype=torch.float64) - 0.5
        if self.kind == "concentrated":
            base *= 0.1  # all tokens have the same order
        is_swapped = (
            torch.rand(rows, generator=self.generator, dtype=torch.float32) < 0.5 if self.kind == "contested" else None
        )
        ranks = min(n, 16)
        step = 2.5 / ranks
        for r in range(ranks):
            column = self._choose_experts(rows, n, r)
            if is_swapped is not None and r < 2:
                column = torch.where(is_swapped, self._choose_experts(rows, n, 1 - r), column)
            bonus = 3.0 - r * step
            # an earlier choice of the token keeps its higher score
            current = base.gather(1, column[:, None]).squeeze(1)
            base.scatter_(1, column[:, None], torch.where(current > 0.5, current, current * 0.2 + bonus)[:, None])
        if self.kind == "diverse":
            # some experts tie, and `scores >= kth` selects more than `topk`; some tokens score all experts below a
            # threshold, and select none
            repeated_rows = [r for r in range(rows) if r % _period_rows(n) >= n] or ([rows - 1] if rows > 4 else [])
            for i, row in enumerate(repeated_rows, self.seed):
                base[row] = (
                    base[row].round(),
                    (base[row] / 1.2).floor(),
                    torch.zeros(n, dtype=torch.float32),
                    base[row] - (4, 8)[i // 4 % 2],
                )[i % 4]
        if self.kind in ("spared", "unsure"):
            base[:, self.seed % n] = -4.0
        if self.kind in ("overloaded", "contested") and n > 3:
            base[:, self._spared_expert(n)] -= 4.0
        if self.kind == "skewed":
            base[:, self._order_experts(n)[_count_live(n) :]] -= 4.0  # even if there are more slots than live experts
        preferred = set[int]()
        for row, expert in enumerate(self.prefer[:rows]):
            if expert < n:
                base[row] = torch.rand(n, generator=self.generator, dtype=torch.float64) - 3.0
                next_experts = (expert + self._choose_distances(n, ranks, is_again=expert in preferred)) % n
                preferred.add(expert)
                base[row, next_experts] = 3.0 - step * torch.arange(len(next_experts), dtype=torch.float64)
                if self.kind == "unsure":
                    base[row] = 0.01 * base[row] - (0, 8)[self.seed // n % 2]
        for row, selection in enumerate(self.selections[:rows]):
            if max(selection) < n:
                base[row] = torch.rand(n, generator=self.generator, dtype=torch.float64) - 3.0
                base[row, list(selection)] = 3.0 - 2.5 / len(selection) * torch.arange(len(selection)).double()
        return base

    def _choose_distances(self, n: int, ranks: int, is_again: bool) -> torch.Tensor:
        """Return the distances from a preferred expert to the token's first `ranks` choices, the first one 0.

        Neighbours first, so that a choice of groups selects the expert too. In any order for further tokens of the
        expert: a program may mask neighbours.
        """
        if not is_again:
            return torch.arange(ranks)
        others = 1 + torch.randperm(n - 1, generator=self.generator)[: ranks - 1]
        return torch.cat([torch.zeros(1, dtype=torch.int64), others])

    def _choose_experts(self, rows: int, n: int, rank: int) -> torch.Tensor:
        if self.kind in ("diverse", "spared", "unsure"):
            pool: list[int] = []
            while len(pool) < rows:
                order = torch.randperm(n, generator=self.generator).tolist()
                pool += order + order[: _period_rows(n) - n]  # a quarter twice, to unbalance counts
            return torch.tensor(pool[:rows])
        if self.kind == "even":
            rows_per_expert = max(1, rows // n)
            return (
                (torch.arange(rows) - max(0, rows - rows_per_expert * n)).clamp(min=0) // rows_per_expert + rank
            ) % n
        if self.kind == "skewed":
            weight = torch.zeros(n, dtype=torch.float64)
            live_experts = self._order_experts(n)[: _count_live(n)]
            weight[live_experts] = 1.0 / torch.arange(1, len(live_experts) + 1, dtype=torch.float64)
            return torch.multinomial(weight, rows, replacement=True, generator=self.generator)
        if self.kind == "concentrated":
            # neighbours at first. Larger seeds leave a gap: a program may mask neighbours, or odd sums of their numbers
            distance = 1 + (rank - 1 + self.seed // n) % max(1, n - 1) if rank else 0
            return torch.full((rows,), (self.seed + distance) % n)
        choice = torch.full((rows,), (self.seed + rank) % n)
        is_stray = torch.rand(rows, generator=self.generator, dtype=torch.float32) < 0.1
        stray_experts = torch.randint(0, n, (rows,), generator=self.generator)
        if n > 3:
            stray_experts = torch.where(stray_experts == self._spared_expert(n), choice, stray_experts)
        return torch.where(is_stray, stray_experts, choice)

    def _spared_expert(self, n: int) -> int:
        """Return the column that stray tokens avoid: the last choice of the crowd."""
        return (self.seed - 1) % n

    def _order_experts(self, n: int) -> torch.Tensor:
        """Return the columns in an order that depends on the seed."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))

    def draw_coins(self, shape: Sequence[int]) -> torch.Tensor:
        """Return random booleans. Some rows are uniform, so reductions such as `(x != 0).any(-1)` vary, too."""
        outcome = torch.rand(shape, generator=self.generator, dtype=torch.float32) < 0.5
        if len(shape) > 1:
            row = torch.rand((*shape[:-1], 1), generator=self.generator, dtype=torch.float32)
            outcome = torch.where(row < 0.6, row < 0.3, outcome)
        return outcome

    def draw_numbers(self, shape: Sequence[int]) -> torch.Tensor:
        """Return floats in [0, 1) as inputs of a choice."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float32)

    def vary_integers(self, t: torch.Tensor, name: str, extra_values: Sequence[int] = ()) -> torch.Tensor:
        """Return a copy of integers with other values, so that a program that bakes in the values of a buffer is found.

        Equal values become different. Other values are permuted if `seed` is not 0, and 0, 1, 2, ... always. Each
        tensor has a permutation of its own.

        Args:
            extra_values: numbers to put among the values (see `matching.probes.boundary_values`).
        """
        if not has_values(t):
            return torch.zeros(t.shape, dtype=t.dtype)
        value = t.detach().to("cpu", copy=True)
        if not value.numel() or self.keep_values:
            return value
        generator = self._make_generator(name)
        if (value == value.flatten()[0]).all():
            value = _vary(value, generator)
        elif (self.seed or _is_identity(value)) and (value.dtype != torch.bool or value.numel() == max(value.shape)):
            axis = value.shape.index(max(value.shape)) if value.dtype == torch.bool else 0
            permuted = value.index_select(axis, torch.randperm(value.shape[axis], generator=generator))
            value = value.roll(1, axis) if torch.equal(permuted, value) else permuted  # often equal if it is short
        if extra_values:
            _insert(extra_values, value, self.seed, generator)
        return value


def _tie_rows(value: torch.Tensor) -> torch.Tensor:
    """Make most rows equal. Tensors with equally many rows have the same equal rows."""
    rows = value.flatten(0, -2) if value.dim() > 1 else value
    is_tied = torch.rand(len(rows), generator=torch.Generator().manual_seed(len(rows)), dtype=torch.float32) < 0.8
    if bool(is_tied.any()):
        rows[is_tied] = rows[is_tied][0].clone()
    return rows.view(value.shape)


def can_hold(value: torch.Tensor, number: int) -> bool:
    """Return whether an integer buffer could hold a number that it does not hold."""
    if value.dtype is torch.bool or not value.numel() or number in value:
        return False
    info = torch.iinfo(value.dtype)
    return info.min <= number <= info.max


def _insert(extra_values: Sequence[int], value: torch.Tensor, seed: int, generator: torch.Generator) -> None:
    """Put numbers in the place of random elements, each once if all elements are distinct.

    A single element becomes one of them or keeps its value, by the seed.
    """
    if value.numel() == 1:
        if which := seed % (len(extra_values) + 1):
            value.fill_(extra_values[which - 1])
        return
    are_distinct = len(value.unique()) == value.numel()
    count = len(extra_values) if are_distinct else max(len(extra_values), value.numel() // 3)
    at = torch.rand(value.numel(), generator=generator, dtype=torch.float32).argsort()[:count]
    which = (torch.arange(len(at)) + seed) % len(extra_values)
    value.view(-1)[at] = torch.tensor(extra_values)[which].to(value.dtype)


def _is_identity(value: torch.Tensor) -> bool:
    """Return whether integers are 0, 1, 2, ..., such as a map of experts to their positions."""
    return value.dim() == 1 and value.dtype != torch.bool and torch.equal(value, torch.arange(len(value)).to(value))


def _vary(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Invert some flags; increase or decrease some counters."""
    if value.dtype == torch.bool:
        return value ^ (
            torch.rand(value.shape, generator=generator, dtype=torch.float32) < (0.25 if value.numel() > 1 else 0.5)
        )
    low = -1 if value.flatten()[0] > 0 else 0
    return value + torch.randint(low, 3, value.shape, generator=generator).to(value.dtype)


def _count_live(n: int) -> int:
    """Return how many of `n` experts get tokens in a skewed routing."""
    return max(2, (2 * n) // 3)


def _period_rows(n: int) -> int:
    """Return the number of rows in which each expert is chosen, some twice."""
    return n + max(1, n // 4)
