"""The arguments of a block at any number of tokens.

The survey records the arguments of one call. `Arguments` infers the token axes from the first float tensor (all but its
last axis), and builds arguments at other sizes. Captures at several sizes show which values depend on a size.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...util.tensor_trees import has_values
from .size_collisions import ModelNumbers

NAMES = ("B", "S", "P", "Q", "R")
_MIN_VARIED_TOKENS = 8  # fewer tokens get no extra values, which might mask all of them
# Sizes of the first of several token dims, and of dims between the first and the last, by variant. An axis with one
# size in the first three captures would look like a constant of the program.
_OUTER = ((3, 7, 13), (2, 6, 10), (5, 9, 11), (4, 8, 12))
_INNER = ((2, 5, 8, 11), (3, 7, 10, 13), (4, 6, 9, 14), (3, 5, 7, 9))
_REMAINDERS = {0: 2, 1: 1}  # modulo 3, of the last of several token dims in the first two captures
_CANDIDATES = 6  # sizes of the last token dim to compare
COST_OF_DOUBLE_TOKENS = 60  # cost: up to eight times the tokens cost less than a size next to a number of the model
_USUAL_TOKENS = 29  # captures that need fewer tokens may have as many at no cost
_COST_OF_LARGER_BATCH = 150  # cost of a larger batch with shorter sequences
_NEAR = 5  # range of sequence lengths to compare
_MANY_SEQUENCES = 19
Axis = tuple[int, int]  # position among the tensor arguments, and the axis
ExtraValue = tuple[int | str, int]  # position of a tensor argument, or name of a buffer, and a number to put into it


@dataclasses.dataclass(frozen=True)
class TensorArgument:
    """A tensor argument.

    Attributes:
        shape: each axis is a number or an expression over the token dims, such as `S` or `B*S`.
        example: for integers and booleans, the values of the recorded call.
        extra_values: numbers to put among the values, such as those of `matching.probes.boundary_values`.
        is_fixed: keep the number of the example, such as a position in a table.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    example: torch.Tensor | None
    requires_grad: bool
    extra_values: tuple[int, ...] = ()
    is_fixed: bool = False

    @property
    def numbers_per_token(self) -> int:
        """Number of elements that belong to one token: the product of the axes after the last token axis."""
        sizes = itertools.takewhile(lambda size: isinstance(size, int), reversed(self.shape))
        return math.prod(int(size) for size in sizes)

    @property
    def has_token_axis(self) -> bool:
        """Whether an axis depends on the number of tokens or sequences."""
        return any(isinstance(size, str) for size in self.shape)

    @property
    def is_single(self) -> bool:
        """Whether it is one number for all tokens, such as a step."""
        return all(size == 1 for size in self.shape)

    @property
    def is_mask(self) -> bool:
        """Whether it has one element per token, 0 or 1."""
        return self.numbers_per_token == 1 and bool(((self.example == 0) | (self.example == 1)).all())  # type: ignore[operator]

    @property
    def accepts_other_values(self) -> bool:
        """Whether it may hold other numbers than the example: it has elements per token, or single integers."""
        is_integer = self.example is not None and self.dtype != torch.bool and self.example.numel() > 0
        return is_integer and (self.numbers_per_token == 1 or self.has_token_axis)

    @property
    def is_single_integer(self) -> bool:
        return self.is_single and self.accepts_other_values

    def can_hold(self, number: int) -> bool:
        """Return whether it may hold a number. The numbers of one token must stay distinct."""
        assert self.example is not None
        info = torch.iinfo(self.dtype)
        return info.min <= number <= info.max and (self.numbers_per_token == 1 or number not in self.example)

    def draw_values(self, n: int, seed: int, generator: torch.Generator) -> torch.Tensor:
        """Draw `n` integers or booleans from the example.

        Rows of one token stay together: the experts of a token, for example, are distinct.
        """
        assert self.example is not None
        per_token = self.numbers_per_token
        pool = self._split_rows()
        if not pool.numel():
            return torch.zeros(n, dtype=self.dtype)
        if self.is_single and self.dtype != torch.bool:  # a step or a length, which later calls may change
            example, largest = int(pool[0, 0]), torch.iinfo(self.dtype).max
            candidates = (example, *self.extra_values, *(() if self.is_fixed else (example + 1, example + 10007)))
            return torch.full((n,), min(largest, candidates[seed % len(candidates)]), dtype=self.dtype)
        pool = self._vary(pool, generator)
        kinds = pool.unique(dim=0)
        if 1 < len(kinds) < len(pool):  # so a few tokens are no padding, even if nearly all of the example is
            pool = torch.cat([pool, kinds.repeat(-(-len(pool) // len(kinds)), 1)])
        rows = n // pool.shape[1]
        order = (torch.arange(rows) + (seed if rows == 1 else 0)) % len(pool)
        if seed and rows > 1:
            order = torch.randint(0, len(pool), (rows,), generator=generator)
        if self.is_mask and rows > 1 and (pool[order] == pool[order[0]]).all():  # by chance, with few sequences
            order[seed % rows] = int((pool != pool[order[0]]).flatten().nonzero()[0])
        out = pool[order].flatten()
        if seed and per_token > 1 and self.has_token_axis and out.dtype != torch.bool:
            out = _permute_numbers(out, pool[pool >= 0].unique(), generator)
        if self.extra_values and rows > 1:  # for a third of the tokens, one each
            at = torch.rand(rows, generator=generator, dtype=torch.float32).argsort()[: -(-rows // 3)]
            value_index = (torch.arange(len(at)) + seed * len(at)) % len(self.extra_values)
            column = torch.randint(0, per_token, (len(at),), generator=generator)
            out[at * per_token + column] = torch.tensor(self.extra_values)[value_index].to(self.dtype)
        return out

    def _split_rows(self) -> torch.Tensor:
        """Return the example as [tokens, numbers per token], or as [numbers, 1] if it has no whole rows."""
        assert self.example is not None
        row_length = max(1, self.numbers_per_token)
        return self.example.reshape(-1, 1 if self.example.numel() % row_length else row_length)

    def _vary(self, pool: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return rows to draw from. If the example has too few kinds to show their effect, add others."""
        if self.is_mask:  # the example may mask nearly everything, or nothing
            pool = torch.tensor([[0], [1], [1], [1]] if pool.float().mean() > 0.5 else [[0], [0], [0], [1]])
            pool = pool.to(self.dtype).repeat(7, 1)[torch.randperm(28, generator=generator)]
        elif (pool == pool[0, 0]).all():  # add the next value, so that a dependence shows
            is_changed = torch.rand((29, pool.shape[1]), generator=generator, dtype=torch.float32) < 0.25
            pool = torch.where(is_changed, ~pool[:1] if self.dtype == torch.bool else pool[:1] + 1, pool[:1])
        elif (pool == pool[:1]).all():  # one row for all tokens, or a map of experts, which later calls may change
            pool = self._vary_row(pool[0], generator)
        if self.numbers_per_token > 1 and self.dtype == torch.bool:  # tokens with everything or nothing masked
            pool = torch.cat([pool, torch.zeros_like(pool[:1]), torch.ones_like(pool[:1])])
        return pool

    def _vary_row(self, row: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return variants of a row: some flags inverted; distinct numbers permuted; others drawn with repetition."""
        if self.dtype == torch.bool:
            is_flipped = torch.rand((30, len(row)), generator=generator, dtype=torch.float32) < 0.4
            is_flipped[0], is_flipped[1] = False, torch.arange(len(row)) % 2 == 1
            is_flipped[2] = ~is_flipped[1]  # so that each flag is inverted in one of two rows
            return row ^ is_flipped
        if len(row.unique()) < len(row):
            indices = torch.randint(0, len(row), (28, len(row)), generator=generator)
        else:
            indices = torch.stack([torch.randperm(len(row), generator=generator) for _ in range(28)])
        return torch.cat([row[None], row[indices]]).to(self.dtype)


def _permute_numbers(numbers: torch.Tensor, distinct: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Permute the values of non-negative numbers, so that a proof cannot rely on a 0 in each row."""
    if not len(distinct):
        return numbers
    permuted = distinct[torch.randperm(len(distinct), generator=generator)]
    index = torch.searchsorted(distinct, numbers.clamp_min(0)).clamp_max(len(distinct) - 1)
    return torch.where(numbers >= 0, permuted[index], numbers)


class Arguments:
    """The recorded arguments of a block, resizable.

    Args:
        feature: the feature axis of the hidden states: the last, or 1 for channels first.
        numbers: numbers of the model, which captures avoid as sizes.
        fixed: token dims that the model fixes, such as the positions of a table. Only the others vary.
        names: interpretations of axes that differ from the most likely one, see `axis_interpretations`.

    Attributes:
        token_dims: names of all token dims, outermost first: `("S",)` for [S,D] inputs, `("B", "S")` for [B,S,D].
        dims: those that vary.
        sizes: their sizes in the recorded call.
        fixed: the token dims that the model fixes, and their sizes.
        tokens_per_unit: tokens per unit of `sizes`, more than 1 if dims are `fixed`.
        width: size of the feature axis.
        axis_interpretations: for each axis that equals a token dim, all interpretations, the chosen one first.
        unit_batch_axes: first axes of size 1 of other tensors, if the batch size is 1.
        extra_buffer_values: numbers to put among the values of integer buffers, by the buffer's name.
        variant_offset: number of variants that captures skip in their choice of sizes.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        feature: int = -1,
        numbers: ModelNumbers | None = None,
        fixed: Collection[str] = (),
        names: Mapping[Axis, int | str] | None = None,
    ):
        flat, self.spec = pytree.tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        hidden = next((t for t in tensors if t.is_floating_point() and t.dim() >= 2), None)
        if hidden is None:
            hidden = next((t for t in tensors if t.dim() >= 1), torch.empty(0, dtype=torch.float32))
            lead, self.feature = hidden.shape, hidden.dim()
        else:
            self.feature = feature % hidden.dim()
            lead = (*hidden.shape[: self.feature], *hidden.shape[self.feature + 1 :])
        self.token_dims: tuple[str, ...] = NAMES[: len(lead)] if len(lead) > 1 else ("S",) * len(lead)
        size_by_dim: dict[str, int] = dict(zip(self.token_dims, lead, strict=True))
        self.dims: tuple[str, ...] = tuple(d for d in self.token_dims if d not in fixed)
        self.sizes: dict[str, int] = {d: size_by_dim[d] for d in self.dims}
        self.fixed: dict[str, int] = {d: size_by_dim[d] for d in self.token_dims if d in fixed}
        self.tokens_per_unit = math.prod(self.fixed.values())
        self.width = hidden.shape[self.feature] if hidden.dim() > len(lead) else 0
        self.axis_interpretations: dict[Axis, list[int | str]] = {}
        self.unit_batch_axes: list[Axis] = []
        positions = itertools.count()
        self.flat: list[Any] = [
            self._make_tensor(t, next(positions), t is hidden, names or {}) if isinstance(t, torch.Tensor) else t
            for t in flat
        ]
        self.tensors = [t for t in self.flat if isinstance(t, TensorArgument)]
        self.extra_buffer_values: dict[str, tuple[int, ...]] = {}
        self.variant_offset = 0
        dim_sizes = {n for t in self.tensors for n in t.shape if isinstance(n, int)}
        self.numbers = (numbers or ModelNumbers()).with_exact(dim_sizes)

    @property
    def tokens(self) -> str:
        """The number of tokens as an expression over the dims."""
        return "*".join((*self.dims, *([str(self.tokens_per_unit)] if self.tokens_per_unit > 1 else [])))

    def __str__(self) -> str:
        return " ".join(f"[{', '.join(map(str, t.shape))}]" for t in self.tensors)

    def at_other_sizes(self) -> Arguments:
        """Return these arguments for captures at other sizes."""
        out = copy.copy(self)
        out.variant_offset += 1
        return out

    def with_extra_values(self, numbers: Iterable[ExtraValue]) -> Arguments:
        """Return these arguments with more numbers among their values."""
        extra_values = sorted(numbers, key=str)
        out = self._replace_tensors(
            dataclasses.replace(t, extra_values=(*t.extra_values, *(v for at, v in extra_values if at == i)))
            for i, t in enumerate(self.tensors)
        )
        by_buffer = dict(self.extra_buffer_values)
        for at, number in extra_values:
            if isinstance(at, str):
                by_buffer[at] = (*by_buffer.get(at, ()), number)
        out.extra_buffer_values = by_buffer
        return out

    def with_fixed_integers(self) -> Arguments | None:
        """Return these arguments with single integers fixed to their examples; None if they are already."""
        if all(t.is_fixed or not t.is_single_integer for t in self.tensors):
            return None
        return self._replace_tensors(dataclasses.replace(t, is_fixed=t.is_single_integer) for t in self.tensors)

    def _replace_tensors(self, tensors: Iterable[TensorArgument]) -> Arguments:
        out = copy.copy(self)
        out.tensors = list(tensors)
        new_tensors = iter(out.tensors)
        out.flat = [next(new_tensors) if isinstance(t, TensorArgument) else t for t in self.flat]
        return out

    def _make_tensor(
        self, t: torch.Tensor, position: int, is_hidden: bool, names: Mapping[Axis, int | str]
    ) -> TensorArgument:
        shape: list[int | str] = []
        used_dims: set[str] = set()
        for axis, n in enumerate(t.shape):
            if is_hidden:
                dim = self.token_dims[axis - (axis > self.feature)] if axis != self.feature else ""
                name: int | str = dim if dim in self.dims else n
            else:
                options = self._list_options(n, used_dims)
                name = names.get((position, axis), options[0])
                batch = self.token_dims[0] if len(self.token_dims) > 1 else ""
                if axis == 0 and n == 1 < t.dim() and self.sizes.get(batch) == 1:
                    self.unit_batch_axes.append((position, axis))
                if len(options) > 1:
                    self.axis_interpretations[position, axis] = [name, *(other for other in options if other != name)]
            if isinstance(name, str):
                used_dims.add(name)
            shape.append(name)
        keep = (
            None
            if t.is_floating_point()
            else t.detach().cpu().reshape(-1)
            if has_values(t)
            else torch.zeros(1, dtype=t.dtype)
        )
        return TensorArgument(tuple(shape), t.dtype, keep, t.requires_grad)

    def _list_options(self, n: int, used_dims: set[str]) -> list[int | str]:
        """List the interpretations of an axis of size `n`, the most likely first: a token dim, all tokens, a constant.

        A mask may have two axes of positions, but no tensor has two batch axes.
        """
        if n == 1:
            return [1]
        free = [d for d in self.dims if d not in used_dims or (d,) == self.token_dims[-1:]]
        exact = sorted((d for d in free if self.sizes[d] == n), key=lambda d: d in used_dims)
        all_tokens = self.tokens_per_unit * math.prod(self.sizes.values())
        is_product = bool(self.dims) and self.tokens not in self.dims and n == all_tokens
        return [*exact, *([self.tokens] if is_product else []), n]

    def choose_sizes(self, tokens: int, variant: int = 0) -> dict[str, int]:
        """Choose sizes with about `tokens` tokens that collide with no number of the model and no product of sizes.

        Args:
            variant: each capture has its own, and so its own sizes.
        """
        tokens = max(1, -(-tokens // self.tokens_per_unit))
        variant += self.variant_offset
        outer = _OUTER[variant % len(_OUTER)]

        def cost(sizes: dict[str, int]) -> int:
            surplus = max(0, math.prod(sizes.values()) - tokens)
            samples = outer.index(sizes[self.dims[0]]) if len(self.dims) > 1 else 0
            extra = COST_OF_DOUBLE_TOKENS * surplus // max(tokens, _USUAL_TOKENS) + _COST_OF_LARGER_BATCH * samples
            return self.numbers.cost(sizes, self.tokens_per_unit) + extra

        return min(self._list_candidates(tokens, variant), key=cost, default={})

    def _list_candidates(self, tokens: int, variant: int) -> Iterator[dict[str, int]]:
        """Yield the sizes that `choose_sizes` compares."""
        if not self.dims:
            return
        inner = _INNER[variant % len(_INNER)]
        remainder = _REMAINDERS.get(variant) if len(self.dims) > 1 else None
        lead = [_OUTER[variant % len(_OUTER)], *[inner] * (len(self.dims) - 2)][: len(self.dims) - 1]
        for outer in itertools.product(*lead):
            inner_size = max(2, -(-tokens // math.prod(outer))) if outer else tokens + 2 * variant
            for n in itertools.islice(_iterate_unround(inner_size, remainder), _CANDIDATES):
                yield dict(zip(self.dims, [*outer, n], strict=True))

    def choose_sequences(self) -> dict[str, int]:
        """Choose many short sequences: enough for routers that choose once per sequence."""
        return (
            self.choose_sizes(3 * _MANY_SEQUENCES) | {self.dims[0]: _MANY_SEQUENCES} | dict.fromkeys(self.dims[1:], 3)
        )

    def choose_sequence(self, tokens: int) -> dict[str, int]:
        """Return the sizes of one sequence of `tokens` tokens."""
        return dict.fromkeys(self.dims, 1) | {self.dims[-1]: max(1, tokens // self.tokens_per_unit)}

    def choose_tokens_near(self, tokens: int, avoid: Collection[int] = ()) -> int:
        """Return `tokens` or slightly more, so that the length of a sequence collides with no number of the model."""
        min_units = -(-tokens // self.tokens_per_unit) | 1  # odd, like all sizes of captures
        candidates = [self.tokens_per_unit * n for n in range(min_units, min_units + _NEAR, 2)]
        candidates = [n for n in candidates if n not in avoid] if self.dims else [tokens]
        return min(candidates, key=lambda n: self.numbers.cost(self.choose_sequence(n), self.tokens_per_unit) + n)

    def build_call(self, sizes: dict[str, int], seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """Build (args, kwargs) at these sizes: meta tensors for floats, small real ones for integers."""
        generator = torch.Generator().manual_seed(77 + seed)
        out = []
        is_small = self.tokens_per_unit * math.prod(sizes.values()) < _MIN_VARIED_TOKENS
        for argument in self.flat:
            if not isinstance(argument, TensorArgument):
                out.append(argument)
                continue
            argument = dataclasses.replace(argument, extra_values=()) if is_small else argument
            shape = [_evaluate_axis(n, sizes) if isinstance(n, str) else n for n in argument.shape]
            if argument.example is None:
                out.append(torch.empty(shape, dtype=argument.dtype, device="meta"))
                continue
            out.append(argument.draw_values(math.prod(shape), seed, generator).reshape(shape))
        args, kwargs = pytree.tree_unflatten(out, self.spec)
        return args, kwargs


def _evaluate_axis(name: str, sizes: Mapping[str, int]) -> int:
    """Return the size of an axis such as `S`, `B*S` or `B*10`."""
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in name.split("*"))


def _iterate_unround(minimum: int, remainder: int | None) -> Iterator[int]:
    """Yield odd numbers from `minimum` on, and of the multiples of 3 and 5 only these two.

    Args:
        remainder: modulo 3, if it is given.
    """
    numbers = (n for n in itertools.count(minimum | 1, 2) if n in (3, 5) or (n % 3 and n % 5))
    return (n for n in numbers if remainder in (None, n % 3))
