"""The numbers of a region as expressions over its token dims.

Dynamo writes the sizes of its example into a graph as numbers, unless it was told that they vary. Here the region is
run without data at other sizes: where it runs only if a number is `B*S`, it is. Where both would run, it is
taken for a token dim where it stands in a shape as in that of the entry, and else for what it is; what turns out wrong
later is taken back.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate
from torch.utils._sympy.printers import PythonPrinter

from ..capture.inputs import NAMES
from ..errors import Refused
from .code import Size, Value, call, map_leaves, modes
from .extents import Extent
from .facts import Facts
from .nodes import SELECT, hint, plain, target_name

_PROBES = (101, 103, 107, 109, 113)
_FACTORIES = {
    "zeros", "ones", "full", "empty", "arange", "rand", "randn", "eye", "linspace", "randperm", "randint",
    "empty_strided", "empty_permuted", "tensor", "scalar_tensor",
}  # fmt: skip
_SHAPED = _FACTORIES | {
    "new_zeros", "new_ones", "new_full", "new_empty", "view", "reshape", "_unsafe_view", "expand", "repeat", "tile",
    "unflatten",
}  # fmt: skip
_MOST_TRIED = 4000
_MOST_TIMES = 4096


class Dims:
    """The token dims of an entry: its axes but the last, without those of size one.

    Attributes:
        names: outermost first. axes: of the entry. given: as it has them. sizes: what they are in the graph, by name.
        probe: sizes that look like nothing else.
    """

    def __init__(self, shape: Sequence[Any], constants: set[int]):
        self.rank = len(shape)
        self.axes = [i for i, n in enumerate(shape[:-1]) if not (type(n) is int and n == 1)]
        names: tuple[str, ...] = NAMES[: len(self.axes)] if len(self.axes) > 1 else ("S",) * len(self.axes)
        self.names = names
        self.symbols = [sympy.Symbol(name, integer=True, positive=True) for name in names]
        self.given = [shape[i] for i in self.axes]
        self.sizes = {name: hint(shape[i]) for name, i in zip(names, self.axes, strict=True)}
        if 0 in self.sizes.values():
            raise Refused("there are no tokens in the graph's inputs: sizes do not show what is of tokens")
        # A symbolic size is symbolic everywhere: a number that equals it here is a constant.
        self.fixed = [at for at, i in enumerate(self.axes) if type(shape[i]) is int]
        self.expressions = {n.node.expr: s for n, s in zip((shape[i] for i in self.axes), self.symbols, strict=True)
                            if isinstance(n, torch.SymInt)}  # fmt: skip
        free = itertools.filterfalse(constants.__contains__, _PROBES)
        self.probe: dict[str, int] = dict(zip(names, free, strict=False))

    def number(self, n: int) -> list[Size]:
        """What a number may be: of the sizes that are numbers in the graph."""
        found = []
        for count in range(len(self.fixed), 0, -1):
            for chosen in itertools.combinations(self.fixed, count):
                whole = math.prod(self.sizes[self.names[i]] for i in chosen)
                times, rest = divmod(n, whole)
                if rest or not 1 <= times <= _MOST_TIMES or (times > 1 and count < len(self.names) and chosen[-1] == 0):
                    continue
                product = sympy.Mul(times, *(self.symbols[i] for i in chosen))
                found.append((times, Size(PythonPrinter().doprint(product))))
        return [size for _, size in sorted(found, key=lambda f: f[0])]

    def stands(self, shape: Sequence[int], place: int) -> bool:
        """Whether the number at this place of a shape is likely one of tokens: where the entry has it, whose axes of
        size one may be missing, or in front."""
        units = [i for i in range(self.rank - 1) if i not in self.axes]
        has_units = all(shape[i : i + 1] == [1] for i in units)
        sizes, n = list(self.sizes.values()), shape[place]
        at = dict(zip(self.axes if has_units else range(len(sizes)), sizes, strict=True))
        return at.get(place) == n or (place == 0 and n % math.prod(sizes) == 0)

    def symbolic(self, n: Any) -> list[Size | int]:
        """What a symbolic number of the graph is."""
        expr = n.node.expr
        for known, symbol in sorted(self.expressions.items(), key=lambda e: -len(e[0].free_symbols)):
            expr = expr.subs(known, symbol)
        if expr.free_symbols - set(self.symbols):
            return self._known_equal(n) if isinstance(n, torch.SymInt) else []
        if expr.is_Integer:
            return [int(expr)]
        return [Size(PythonPrinter().doprint(expr))]

    def _known_equal(self, n: torch.SymInt) -> list[Size | int]:
        """Symbols of another input, where the graph has seen that they must make as many."""
        for count in range(len(self.names), 0, -1):
            for chosen in itertools.combinations(range(len(self.names)), count):
                if statically_known_true(n == math.prod(self.given[i] for i in chosen)):
                    return [Size("*".join(self.names[i] for i in chosen))]
        return []


class Generalised:
    """The region at all sizes.

    Attributes:
        dims: the token dims.
        arguments: of each node inside, (args, kwargs) with `Value`s and `Size`s.
        shapes: of each given value, with `Size`s.
    """

    def __init__(self, facts: Facts, extent: Extent, number_of: dict[fx.Node, int]):
        self.facts, self.extent, self.number_of = facts, extent, number_of
        self.node_at = {i: n for n, i in number_of.items()}
        entry = facts.value[extent.entry]
        # The meta device has no autocast, and is faster where there is none.
        device = entry.device.type
        has_autocast = device != "meta" and torch.is_autocast_enabled(device)
        has_autocast |= any(facts.modes[n].autocast for n in extent.inside)
        self.mode = FakeTensorMode() if has_autocast else None
        self.device = entry.device if has_autocast else torch.device("meta")
        constants = {c for n in extent.inside for c in self._numbers((n.args, n.kwargs))}
        constants |= {hint(s) for n in extent.inside if (t := facts.tensor(n)) is not None for s in t.shape}
        self.dims = Dims([plain(n) for n in entry.shape], constants)
        if not self.dims.names:
            raise Refused("there is one token only: sizes do not show what is of tokens")
        self.arguments: dict[fx.Node, tuple[tuple, dict]] = {}
        self.shapes: dict[fx.Node, tuple] = {}
        self.probed: dict[fx.Node, Any] = {}
        self._search(entry)

    def _search(self, entry: torch.Tensor) -> None:
        steps = [*self.extent.given, *self.extent.inside]
        names = dict(zip(self.dims.axes, self.dims.names, strict=True))
        rows = [self.dims.probe[names[i]] if i in names else hint(n) for i, n in enumerate(entry.shape)]
        self.probed[self.extent.entry] = self._empty(rows, entry.dtype)
        for n, t in self.facts.weights.items():
            if n in self.number_of:
                self.probed[n] = self._empty([hint(s) for s in t.shape], t.dtype, [hint(s) for s in t.stride()])
        levels: list[Iterator[None]] = []
        tried, furthest = 0, 0
        while len(levels) < len(steps) or not self._closes():
            if len(levels) < len(steps):
                levels.append(self._options(steps[len(levels)]))
            while levels:
                try:
                    next(levels[-1])
                    break
                except StopIteration:
                    furthest = max(furthest, len(levels) - 1)
                    levels.pop()
            tried += 1
            if not levels or tried > _MOST_TRIED + len(steps):
                n = steps[min(furthest, len(steps) - 1)]
                raise Refused(
                    "the sizes in the graph do not show which of them are of tokens",
                    culprits=(target_name(n),),
                    remedy=self._remedy(),
                )

    def _remedy(self) -> str:
        """What would show them."""
        others = {hint(n) for w in self.facts.weights if w in self.number_of for n in self.facts.weights[w].shape}
        others |= {n for s in self.extent.inside if target_name(s) in SELECT for n in self._numbers((s.args, s.kwargs))}
        sizes = list(self.dims.sizes.items())
        alike = [f"{name} = {n}" for i, (name, n) in enumerate(sizes) if n in others or n in dict(sizes[:i]).values()]
        way = "dynamic=False" if self.dims.expressions else "dynamic=True, or mark_dynamic the token dims"
        if not alike:
            return f"compile with {way}"
        rows = f"of rows [{', '.join(self.dims.names)}, ...], {', '.join(alike)} is the length of something else, too"
        return f"{rows}: make the first call with other sizes, or compile with {way}"

    def _closes(self) -> bool:
        """Whether what came out has a row for each token, as the graph's has."""
        exit_ = self.extent.exit
        out, was = self.probed[exit_], self.facts.value[exit_]
        tokens, rows = math.prod(self.dims.sizes.values()), [hint(n) for n in was.shape]
        if math.prod(rows[:-1]) != tokens:
            return True  # of another kind: the lifter will say
        return math.prod(out.shape[:-1]) == math.prod(self.dims.probe.values()) and out.shape[-1] == rows[-1]

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        with self.mode or contextlib.nullcontext():
            if strides is None:
                return torch.empty(shape, dtype=dtype, device=self.device)
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    # ------------------------------------------------------------------ one node
    def _options(self, n: fx.Node) -> Iterator[None]:
        if n in self.extent.given:
            yield from self._given(n)
            return
        leaves: list[list[Any]] = []
        is_shape, place = target_name(n) in _SHAPED, itertools.count()
        shape = self._numbers((n.args, n.kwargs))

        def candidates(a: Any) -> None:
            if isinstance(a, fx.Node):
                if self.facts.is_number(a):
                    leaves.append(self._of_number(self.facts.value[a]))
                    next(place)
            elif type(a) is int:
                at = next(place)
                if a > 1:
                    is_token = self.dims.stands([a], 0) if target_name(n) == "arange" else self.dims.stands(shape, at)
                    leaves.append(self._of_number(a, first=is_shape and is_token))

        map_aggregate((n.args, n.kwargs), candidates)
        for chosen in itertools.product(*leaves):
            rest = iter(chosen)

            def leaf(a: Any, rest: Iterator[Any] = rest) -> Any:
                if isinstance(a, fx.Node):
                    return next(rest) if self.facts.is_number(a) else Value(self.number_of[a])
                return next(rest) if type(a) is int and a > 1 else a

            args, kwargs = map_leaves(n.args, leaf), map_leaves(n.kwargs, leaf)
            try:
                out = self._run(n, args, kwargs)
            except Exception:  # torch's, of shapes that do not fit
                continue
            if not _alike(out, self.facts.value[n]):
                continue
            self.arguments[n], self.probed[n] = (args, kwargs), out
            yield

    def _numbers(self, tree: Any) -> list[int]:
        """All numbers among the arguments of a node, as they are in the graph."""
        found: list[int] = []

        def number(a: Any) -> None:
            if isinstance(a, fx.Node) and self.facts.is_number(a):
                found.append(hint(self.facts.value[a]) if isinstance(self.facts.value[a], torch.SymInt) else 0)
            elif type(a) is int:
                found.append(a)

        map_aggregate(tree, number)
        return found

    def _of_number(self, value: Any, first: bool = False) -> list[Any]:
        value = plain(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self.dims.symbolic(value)
        if type(value) is not int:
            return [value]
        sizes = self.dims.number(value)
        return [*sizes, value] if first else [value, *sizes]

    def _given(self, n: fx.Node) -> Iterator[None]:
        t = self.facts.value[n]
        if not isinstance(t, torch.Tensor):
            return
        sizes = [plain(s) for s in t.shape]
        known = [hint(s) for s in sizes]
        axes = [self._of_number(s, first=type(s) is int and self.dims.stands(known, at)) for at, s in enumerate(sizes)]
        for shape in itertools.product(*axes):
            self.shapes[n] = shape
            sizes = [s.at(self.dims.probe) if isinstance(s, Size) else s for s in shape]
            self.probed[n] = self._empty(sizes, t.dtype)
            yield

    def _run(self, n: fx.Node, args: tuple, kwargs: dict) -> Any:
        def value(a: Any) -> Any:
            if isinstance(a, Value):
                return self.probed[self.node_at[a.index]]
            if isinstance(a, Size):
                return a.at(self.dims.probe)
            return self.device if isinstance(a, torch.device) else a

        args, kwargs = map_leaves(args, value), map_leaves(kwargs, value)
        if n.op == "call_function" and n.target is operator.setitem:
            operator.setitem(*args)
            return args[0]
        if "grouped_mm" in target_name(n):
            return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
        if target_name(n) in _FACTORIES and all(self.facts.is_number(a) for a in n.all_input_nodes):
            kwargs["device"] = self.device
        with self.mode or contextlib.nullcontext(), modes(self.facts.modes[n]):
            return call(n.target, n.op == "call_method", args, kwargs)


def _alike(out: Any, was: Any) -> bool:
    """Of the same kind, whatever its sizes."""
    if isinstance(was, torch.Tensor):
        return isinstance(out, torch.Tensor) and out.dim() == was.dim() and out.dtype == was.dtype
    if isinstance(was, (tuple, list)):
        return isinstance(out, (tuple, list)) and len(out) == len(was) and all(map(_alike, out, was))
    return True
