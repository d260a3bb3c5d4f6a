"""A block's arguments at any token count.

The finder records the arguments of one call; capture replays the block at sizes of its own (and several of them, so
that what depends on a size shows). Which axes are token axes is read off the first float tensor: all but its last.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree

from .captured import has_values

NAMES = ("B", "S", "P", "Q", "R")
_FEW = 8


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor argument: each axis is a number or an expression over the token dims, such as `S` or `B*S`."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    example: torch.Tensor | None  # values to draw from, for integers and booleans
    requires_grad: bool
    turns: tuple[int, ...] = ()  # numbers that are among the values, too (see `passes.match.turns`)
    is_place: bool = False  # in a table, say, which has no others

    @property
    def together(self) -> int:
        """How many numbers belong to one token."""
        sizes = itertools.takewhile(lambda size: isinstance(size, int), reversed(self.shape))
        return math.prod(int(size) for size in sizes)

    @property
    def is_of_tokens(self) -> bool:
        """Whether there are as many as tokens or sequences."""
        return any(isinstance(size, str) for size in self.shape)

    @property
    def is_single(self) -> bool:
        """Whether it is one number for all tokens, such as a step."""
        return all(size == 1 for size in self.shape)

    @property
    def is_mask(self) -> bool:
        """Whether it has ones and zeros only, one at a time."""
        return self.together == 1 and bool(((self.example == 0) | (self.example == 1)).all())  # type: ignore[operator]

    @property
    def takes_turns(self) -> bool:
        """Whether other numbers than the example has may stand in it: of tokens, of sequences, or a single one."""
        is_integer = self.example is not None and self.dtype != torch.bool and self.example.numel() > 0
        return is_integer and (self.together == 1 or self.is_of_tokens)

    def takes(self, number: int) -> bool:
        """Whether a number may. Of several of a token no two are to be the same."""
        assert self.example is not None
        info = torch.iinfo(self.dtype)
        return info.min <= number <= info.max and (self.together == 1 or number not in self.example)

    def values(self, n: int, seed: int, generator: torch.Generator) -> torch.Tensor:
        """So many integers or booleans like those of the example. What belongs to one token stays together, as the
        experts of a token do, of which no two are the same."""
        assert self.example is not None
        together = self.together
        pool = self._rows()
        if not pool.numel():
            return torch.zeros(n, dtype=self.dtype)
        if self.is_single and self.dtype != torch.bool:  # a step, a length: of later calls it may be any other
            own, most = int(pool[0, 0]), torch.iinfo(self.dtype).max
            tried = (own, *self.turns, *(() if self.is_place else (own + 1, own + 10007)))
            return torch.full((n,), min(most, tried[seed % len(tried)]), dtype=self.dtype)
        pool = self._varied(pool, generator)
        kinds = pool.unique(dim=0)
        if 1 < len(kinds) < len(pool):  # where nearly all is padding, a few tokens still have some of the rest
            pool = torch.cat([pool, kinds.repeat(-(-len(pool) // len(kinds)), 1)])
        rows = n // pool.shape[1]
        order = (torch.arange(rows) + (seed if rows == 1 else 0)) % len(pool)
        if seed and rows > 1:
            order = torch.randint(0, len(pool), (rows,), generator=generator)
        if self.is_mask and rows > 1 and (pool[order] == pool[order[0]]).all():  # few sequences, by chance
            order[seed % rows] = int((pool != pool[order[0]]).flatten().nonzero()[0])
        out = pool[order].flatten()
        if seed and together > 1 and self.is_of_tokens and out.dtype != torch.bool:
            out = _renamed(out, pool[pool >= 0].unique(), generator)
        if self.turns and rows > 1:  # one of a token, here and there
            at = torch.rand(rows, generator=generator, dtype=torch.float32).argsort()[: -(-rows // 3)]
            which = (torch.arange(len(at)) + seed * len(at)) % len(self.turns)
            column = torch.randint(0, together, (len(at),), generator=generator)
            out[at * together + column] = torch.tensor(self.turns)[which].to(self.dtype)
        return out

    def _rows(self) -> torch.Tensor:
        """[tokens, numbers of one token]; [numbers, 1] where the example's are no whole rows."""
        assert self.example is not None
        whole = max(1, self.together)
        return self.example.reshape(-1, 1 if self.example.numel() % whole else whole)

    def _varied(self, pool: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Rows to draw from: those of the example, and others where it has too few kinds to show what hangs on them."""
        together = self.together
        if self.is_mask:  # whose example may mask nearly all, or nothing
            pool = torch.tensor([[0], [1], [1], [1]] if pool.float().mean() > 0.5 else [[0], [0], [0], [1]])
            pool = pool.to(self.dtype).repeat(7, 1)[torch.randperm(28, generator=generator)]
        elif (pool == pool[0, 0]).all():  # of one value nothing shows what hangs on it: some are the next one
            others = torch.rand((29, pool.shape[1]), generator=generator, dtype=torch.float32) < 0.25
            pool = torch.where(others, ~pool[:1] if self.dtype == torch.bool else pool[:1] + 1, pool[:1])
        elif (pool == pool[:1]).all():  # one row for all tokens, or a map of experts: later calls may have others
            pool = self._others(pool[0], generator)
        if together > 1 and self.dtype == torch.bool:  # all that is masked for somebody, and nothing
            pool = torch.cat([pool, torch.zeros_like(pool[:1]), torch.ones_like(pool[:1])])
        return pool

    def _others(self, row: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Rows like one: flags of which some are the other way round; the same numbers in another order, and of those
        that are there several times any of them."""
        if self.dtype == torch.bool:
            flips = torch.rand((30, len(row)), generator=generator, dtype=torch.float32) < 0.4
            flips[0], flips[1] = False, torch.arange(len(row)) % 2 == 1
            flips[2] = ~flips[1]  # each of them in one of two captures
            return row ^ flips
        if len(row.unique()) < len(row):
            drawn = torch.randint(0, len(row), (28, len(row)), generator=generator)
        else:
            drawn = torch.stack([torch.randperm(len(row), generator=generator) for _ in range(28)])
        return torch.cat([row[None], row[drawn]]).to(self.dtype)


def _renamed(numbers: torch.Tensor, known: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other numbers for the same ones, but for the negative: that a row always has a 0, say, must not be relied on."""
    if not len(known):
        return numbers
    others = known[torch.randperm(len(known), generator=generator)]
    place = torch.searchsorted(known, numbers.clamp_min(0)).clamp_max(len(known) - 1)
    return torch.where(numbers >= 0, others[place], numbers)


class Arguments:
    """The recorded arguments of a block, resizable.

    Args:
        feature: the axis of the hidden states that is not a token axis: the last, or 1 for channels first.

    Attributes:
        dims: names of the token dims, outermost first: `("S",)` for [S,D] inputs, `("B", "S")` for [B,S,D].
        sizes: their sizes in the recorded call.
        held: by name of an integer buffer, numbers that are to be among its values, too.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], feature: int = -1):
        flat, self.spec = pytree.tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        hidden = next((t for t in tensors if t.is_floating_point() and t.dim() >= 2), None)
        if hidden is None:
            hidden = next((t for t in tensors if t.dim() >= 1), torch.empty(0, dtype=torch.float32))
            lead, self.feature = hidden.shape, hidden.dim()
        else:
            self.feature = feature % hidden.dim()
            lead = (*hidden.shape[: self.feature], *hidden.shape[self.feature + 1 :])
        names = NAMES[: len(lead)] if len(lead) > 1 else ("S",) * len(lead)
        self.dims: tuple[str, ...] = names
        self.sizes: dict[str, int] = dict(zip(names, lead, strict=True))
        self.width = hidden.shape[self.feature] if hidden.dim() > len(lead) else 0
        self.flat: list[Any] = [self._leaf(t, t is hidden) if isinstance(t, torch.Tensor) else t for t in flat]
        self.tensors = [leaf for leaf in self.flat if isinstance(leaf, Leaf)]
        self.held: dict[str, tuple[int, ...]] = {}

    def turned(self, numbers: Iterable[tuple[int | str, int]]) -> Arguments:
        """With more numbers among the values of tensors, by the positions of these among all; by name for buffers."""
        more = sorted(numbers, key=str)
        out = self._with(
            dataclasses.replace(leaf, turns=(*leaf.turns, *(v for at, v in more if at == i)))
            for i, leaf in enumerate(self.tensors)
        )
        names = dict.fromkeys(at for at, _ in more if isinstance(at, str))
        out.held = self.held | {n: (*self.held.get(n, ()), *(v for at, v in more if at == n)) for n in names}
        return out

    def in_places(self) -> Arguments | None:
        """With single integers as they are, if there are any that were not."""
        if all(leaf.is_place or not (leaf.takes_turns and leaf.is_single) for leaf in self.tensors):
            return None
        return self._with(
            dataclasses.replace(leaf, is_place=leaf.takes_turns and leaf.is_single) for leaf in self.tensors
        )

    def _with(self, tensors: Iterable[Leaf]) -> Arguments:
        out = copy.copy(self)
        out.tensors = list(tensors)
        left = iter(out.tensors)
        out.flat = [next(left) if isinstance(t, Leaf) else t for t in self.flat]
        return out

    def _leaf(self, t: torch.Tensor, is_hidden: bool) -> Leaf:
        shape: list[int | str] = []
        used: set[str] = set()
        for axis, n in enumerate(t.shape):
            # a mask may have two axes of positions, but nothing has two of sequences
            free = [s for s in self.dims if s not in used or (s,) == self.dims[-1:]]
            exact = sorted((s for s in free if self.sizes[s] == n and n != 1), key=lambda s: s in used)
            if is_hidden:
                name: int | str = n if axis == self.feature else self.dims[axis - (axis > self.feature)]
            elif exact:
                name = exact[0]
            elif len(self.dims) > 1 and n == math.prod(self.sizes.values()) and n > 1:
                name = "*".join(self.dims)
            else:
                name = n
            if isinstance(name, str):
                used.add(name)
            shape.append(name)
        keep = (
            None
            if t.is_floating_point()
            else t.detach().cpu().reshape(-1)
            if has_values(t)
            else torch.zeros(1, dtype=t.dtype)
        )
        return Leaf(tuple(shape), t.dtype, keep, t.requires_grad)

    def choose(self, tokens: int, variant: int = 0) -> dict[str, int]:
        """Sizes with about `tokens` tokens that are unlike each other and unlike the model's own dims."""
        if len(self.dims) <= 1:
            return {d: _odd(tokens + 2 * variant, {self.width}) for d in self.dims}
        outer = (3, 2, 5, 4)[variant % 4]  # no two captures share a size by accident
        sizes = {self.dims[0]: outer}
        for d in self.dims[1:-1]:
            sizes[d] = 2 + variant
        rest = max(2, -(-tokens // math.prod(sizes.values())))
        sizes[self.dims[-1]] = _odd(rest, {self.width, *sizes.values()})
        return sizes

    def sequence(self, tokens: int) -> dict[str, int]:
        """Sizes of one sequence with so many tokens."""
        return dict.fromkeys(self.dims, 1) | {self.dims[-1]: tokens}

    def at(self, sizes: dict[str, int], seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) at these sizes: meta tensors for floats, small real ones for integers."""
        generator = torch.Generator().manual_seed(77 + seed)
        out = []
        few = math.prod(sizes.values()) < _FEW  # of which all might be masked, say
        for leaf in self.flat:
            if not isinstance(leaf, Leaf):
                out.append(leaf)
                continue
            leaf = dataclasses.replace(leaf, turns=()) if few else leaf
            shape = [math.prod(sizes[d] for d in n.split("*")) if isinstance(n, str) else n for n in leaf.shape]
            if leaf.example is None:
                out.append(torch.empty(shape, dtype=leaf.dtype, device="meta"))
                continue
            out.append(leaf.values(math.prod(shape), seed, generator).reshape(shape))
        args, kwargs = pytree.tree_unflatten(out, self.spec)
        return args, kwargs


def _odd(n: int, avoid: set[int]) -> int:
    n |= 1
    while n in avoid or (any(n % p == 0 for p in (3, 5)) and n > 5):
        n += 2
    return n
