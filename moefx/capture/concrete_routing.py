"""The routing decisions that a capture runs under: which values the abstract floats seem to have.

A `Routing` invents the outputs of contractions (router logits among them) where the block turns a float into an
integer. Several unlike routings must lead to one template (design section 3.2), so each kind stresses something else:

* `diverse`: every expert is somebody's first choice, tokens have unlike partners, counts are uneven, some scores tie;
* `skewed`: some experts get most tokens, and about a third of the experts gets none;
* `flooded`: nearly all tokens choose the same experts, so that every capacity overflows, and of more than three one
  gets none;
* `crowded`: all tokens choose the same experts, and the other experts get none;
* `even`: every expert is the first choice of as many tokens, one after the other; the first gets what is left over;
* `contested`: as `flooded`, and what is the first choice of some is the second one of others;
* `spared`: no token chooses expert `seed`, but for those that `prefer` it;
* `unsure`: the same, but these score all experts nearly alike, or nearly alike and low;
* `tied`: as `flooded`, and most tokens are the same as the first of them: all their scores are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import fx

from .tensor_trees import has_values


class Routing:
    def __init__(
        self, kind: str = "diverse", seed: int = 0, prefer: tuple[int, ...] = (), as_they_are: bool = False,
        is_wild: bool = False,
    ):  # fmt: skip
        """`prefer`: experts (columns) that tokens should choose first, because no earlier routing hit them.
        `as_they_are`: integer buffers, which have stand-ins else. `is_wild`: parameters and buffers of floats have
        values of any size."""
        self.kind, self.seed, self.prefer, self.as_they_are, self.is_wild = kind, seed, prefer, as_they_are, is_wild
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def restart(self) -> Routing:
        """The same, from the start."""
        return Routing(self.kind, self.seed, self.prefer, self.as_they_are, self.is_wild)

    def __repr__(self) -> str:
        return f"Routing({self.kind!r}, seed={self.seed})"

    def invent_value(self, node: fx.Node) -> torch.Tensor:
        """A value for an abstract float of this shape: unlike scores where it may be router scores."""
        val = node.meta["val"]
        original = node.meta.get("original")
        shape = tuple(val.shape)
        if original is None and self.kind == "tied" and shape:
            return _tied(self._invented(node, val, shape))
        if original is not None and self.is_wild:
            return self._wild(shape).to(val.dtype)
        if original is not None:
            # a bias must not decide who is chosen while every expert has to be seen once
            if (
                has_values(original)
                and original.numel() <= 1 << 16
                and not (self.prefer and shape and 1 < shape[-1] == original.numel())
            ):
                return self._moved(original.detach().to("cpu", copy=True), node.meta.get("fqn", ""))
            return (0.01 * torch.randn(shape, generator=self.generator, dtype=torch.float32)).to(val.dtype)
        return self._invented(node, val, shape)

    def _invented(self, node: fx.Node, val: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if node.op == "call_function" and val.numel() and shape and 2 <= shape[-1] <= 4096:
            return self.draw_scores(val.numel() // shape[-1], shape[-1]).view(shape).to(val.dtype)
        return torch.randn(shape, generator=self.generator, dtype=torch.float32).to(val.dtype)

    def _moved(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """What a parameter or buffer has, in another order from the second routing of this kind on, a single number
        larger or smaller, others for those that are all the same, as a bias is before the first step: which of them is
        large, or zero, is not part of the specialisation."""
        if not self.seed or self.as_they_are or not value.numel():
            return value
        generator = self._generator(name)
        if (value == value.flatten()[0]).all() and (value.numel() > 1 or value.item() == 0):
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            if (value != 0).any() and bool(value.isfinite().all()):
                return (value.double() * noise.exp()).to(value.dtype)
            return (noise * self._times(generator)).to(value.dtype)
        if value.numel() == 1:
            return (value.double() * self._times(generator)).to(value.dtype)
        return value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)

    def _wild(self, shape: Sequence[int]) -> torch.Tensor:
        """Small ones and large ones, above zero mostly."""
        sizes = 10.0 ** (6 * torch.rand(shape, generator=self.generator, dtype=torch.float32) - 3)
        return torch.where(torch.rand(shape, generator=self.generator, dtype=torch.float32) < 0.2, -sizes, sizes)

    def _times(self, generator: torch.Generator) -> float:
        """What a number may be larger by: limits may hide what is small, and what is large hides all else."""
        return (1.25, 16, 1 / 16)[int(torch.randint(3, (), generator=generator))]

    def _generator(self, name: str) -> torch.Generator:
        """Of a parameter or buffer; two that are the same now are told apart from the second routing on."""
        return torch.Generator().manual_seed(self.seed + (zlib.crc32(name.encode()) << 8 if self.seed else 0))

    def draw_scores(self, rows: int, n: int) -> torch.Tensor:
        """Scores [rows, n] whose order along each row is the wanted preference."""
        base = torch.rand(rows, n, generator=self.generator, dtype=torch.float64) - 0.5
        if self.kind == "crowded":
            base *= 0.1  # all tokens have one order
        swapped = (
            torch.rand(rows, generator=self.generator, dtype=torch.float32) < 0.5 if self.kind == "contested" else None
        )
        ranks = min(n, 16)
        step = 2.5 / ranks
        for r in range(ranks):
            column = self._choices(rows, n, r)
            if swapped is not None and r < 2:
                column = torch.where(swapped, self._choices(rows, n, 1 - r), column)
            bonus = 3.0 - r * step
            # a token's earlier, better choice stays the better one
            current = base.gather(1, column[:, None]).squeeze(1)
            base.scatter_(1, column[:, None], torch.where(current > 0.5, current, current * 0.2 + bonus)[:, None])
        if self.kind == "diverse":
            # now and then experts come out equal: `scores >= kth` then chooses more than `topk`; or all below what a
            # program may ask of them, and there is none to choose
            again = [r for r in range(rows) if r % _period(n) >= n] or ([rows - 1] if rows > 4 else [])
            for i, row in enumerate(again, self.seed):
                base[row] = (
                    base[row].round(),
                    (base[row] / 1.2).floor(),
                    torch.zeros(n, dtype=torch.float32),
                    base[row] - (4, 8)[i // 4 % 2],
                )[i % 4]
        if self.kind in ("spared", "unsure"):
            base[:, self.seed % n] = -4.0
        if self.kind in ("flooded", "contested") and n > 3:
            base[:, self._spared(n)] -= 4.0
        if self.kind == "skewed":
            base[:, self._order(n)[_live(n) :]] -= 4.0  # for more slots than experts that get tokens
        for row, expert in enumerate(self.prefer[:rows]):
            if expert < n:  # it and its neighbours stand out, so that a choice of groups comes out right too
                base[row] = torch.rand(n, generator=self.generator, dtype=torch.float64) - 3.0
                near = (expert + torch.arange(min(n, ranks))) % n
                base[row, near] = 3.0 - step * torch.arange(len(near), dtype=torch.float64)
                if self.kind == "unsure":
                    base[row] = 0.01 * base[row] - (0, 8)[self.seed // n % 2]
        return base

    def _choices(self, rows: int, n: int, rank: int) -> torch.Tensor:
        if self.kind in ("diverse", "spared", "unsure"):
            pool: list[int] = []
            while len(pool) < rows:
                order = torch.randperm(n, generator=self.generator).tolist()
                pool += order + order[: _period(n) - n]  # a quarter comes twice: counts are not balanced
            return torch.tensor(pool[:rows])
        if self.kind == "even":
            each = max(1, rows // n)
            return ((torch.arange(rows) - max(0, rows - each * n)).clamp(min=0) // each + rank) % n
        if self.kind == "skewed":
            weight = torch.zeros(n, dtype=torch.float64)
            live = self._order(n)[: _live(n)]
            weight[live] = 1.0 / torch.arange(1, len(live) + 1, dtype=torch.float64)
            return torch.multinomial(weight, rows, replacement=True, generator=self.generator)
        crowded = (self.seed + rank) % n  # flooded
        choice = torch.full((rows,), crowded)
        if self.kind == "crowded":
            return choice
        stray = torch.rand(rows, generator=self.generator, dtype=torch.float32) < 0.1
        elsewhere = torch.randint(0, n, (rows,), generator=self.generator)
        if n > 3:
            elsewhere = torch.where(elsewhere == self._spared(n), choice, elsewhere)
        return torch.where(stray, elsewhere, choice)

    def _spared(self, n: int) -> int:
        """The column that no token of a crowd strays to: the last one that it would choose."""
        return (self.seed - 1) % n

    def _order(self, n: int) -> torch.Tensor:
        """Columns in an order of this routing's own."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))

    def draw_coins(self, shape: Sequence[int]) -> torch.Tensor:
        """Outcomes of a comparison, both in some rows, and in others the same one: what is asked of a row as a whole
        (`(x != 0).any(-1)`) comes out both ways, too."""
        outcome = torch.rand(shape, generator=self.generator, dtype=torch.float32) < 0.5
        if len(shape) > 1:
            row = torch.rand((*shape[:-1], 1), generator=self.generator, dtype=torch.float32)
            outcome = torch.where(row < 0.6, row < 0.3, outcome)
        return outcome

    def draw_numbers(self, shape: Sequence[int]) -> torch.Tensor:
        """Floats of no meaning."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float32)

    def vary_integers(self, t: torch.Tensor, name: str, turns: Sequence[int] = ()) -> torch.Tensor:
        """A stand-in for an integer parameter or buffer. Its values are not part of the specialisation: where all are
        the same there are others, too, and routings after the first see them in another order, 0, 1, 2, ... all
        routings; these see each of them in its own. What was baked in shows, as does that two are the same now.
        `turns`: numbers that are among its values, too (see `matching.probes.turning_integers`)."""
        if not has_values(t):
            return torch.zeros(t.shape, dtype=t.dtype)
        value = t.detach().to("cpu", copy=True)
        if not value.numel() or self.as_they_are:
            return value
        generator = self._generator(name)
        if (value == value.flatten()[0]).all():
            value = _varied(value, generator)
        elif (self.seed or _is_identity(value)) and (value.dtype != torch.bool or value.numel() == max(value.shape)):
            along = value.shape.index(max(value.shape)) if value.dtype == torch.bool else 0
            value = value.index_select(along, torch.randperm(value.shape[along], generator=generator))
        if turns:
            _put(turns, value, self.seed, generator)
        return value


def _tied(value: torch.Tensor) -> torch.Tensor:
    """Rows of which most are the first of these, the same ones in all that has so many rows."""
    rows = value.flatten(0, -2) if value.dim() > 1 else value
    same = torch.rand(len(rows), generator=torch.Generator().manual_seed(len(rows)), dtype=torch.float32) < 0.8
    if bool(same.any()):
        rows[same] = rows[same][0].clone()
    return rows.view(value.shape)


def can_hold(value: torch.Tensor, number: int) -> bool:
    """Whether a number that an integer buffer does not have may be among its values."""
    if value.dtype is torch.bool or not value.numel() or number in value:
        return False
    info = torch.iinfo(value.dtype)
    return info.min <= number <= info.max


def _put(turns: Sequence[int], value: torch.Tensor, seed: int, generator: torch.Generator) -> None:
    """Numbers here and there in the place of others: each once where no two are the same. A single one is one of them,
    or as it was, in turn."""
    if value.numel() == 1:
        if which := seed % (len(turns) + 1):
            value.fill_(turns[which - 1])
        return
    are_distinct = len(value.unique()) == value.numel()
    many = len(turns) if are_distinct else max(len(turns), value.numel() // 3)
    at = torch.rand(value.numel(), generator=generator, dtype=torch.float32).argsort()[:many]
    which = (torch.arange(len(at)) + seed) % len(turns)
    value.view(-1)[at] = torch.tensor(turns)[which].to(value.dtype)


def _is_identity(value: torch.Tensor) -> bool:
    """A map of experts, say, to where they are, each to itself."""
    return value.dim() == 1 and value.dtype != torch.bool and torch.equal(value, torch.arange(len(value)).to(value))


def _varied(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Flags of which some are the other way round; counters that have counted on, or not yet to what they are."""
    if value.dtype == torch.bool:
        return value ^ (
            torch.rand(value.shape, generator=generator, dtype=torch.float32) < (0.25 if value.numel() > 1 else 0.5)
        )
    least = -1 if value.flatten()[0] > 0 else 0
    return value + torch.randint(least, 3, value.shape, generator=generator).to(value.dtype)


def _live(n: int) -> int:
    """How many of `n` experts get tokens in a skewed routing."""
    return max(2, (2 * n) // 3)


def _period(n: int) -> int:
    """Rows after which every expert was chosen, some twice."""
    return n + max(1, n // 4)
