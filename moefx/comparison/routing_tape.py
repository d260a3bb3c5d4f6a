"""Separate the discrete from the continuous.

Two correct programs round differently, and where two experts score alike to within that rounding they choose
differently: from there on their values have nothing to do with each other. So every run is compared **under
the reference's routing**. A `Tape` records each decision that the original takes on floating-point values;
that is generically any op with a floating-point input and an integer or boolean result (topk, sort, argmax, a
comparison with a threshold, nonzero, a cast to int), so it needs to know no router. It also records random
draws, which differ between float32 and float64 even for one seed.

* `Replay` runs the same code again on other floats (float64, or slightly moved weights) and imposes all of
  them.
* `Align` runs the compiled program, whose routers are the user's own: it imposes the reference's choice per
  token only where the scores of the two choices are equal to within rounding, by the same rule as for values.
  A wrong choice stays wrong, and is seen in the values. What was imposed is counted in `RoutingRow`s.

Entries are found by what they are (block, op, shapes, in order), so ops that one of the programs lacks do no
harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .decisions import Selection, distance, is_decision, is_random, is_selection, largest_magnitude
from .float64_ops import find_equivalent
from .policy import Tolerance

_LOW = (torch.float32, torch.bfloat16, torch.float16)
_LOW_NAMES = re.compile('"(float32|bfloat16|float16)"')
# Numbers that become tensors, `torch.tensor([...])` and `torch.where(mask, 1.1, 0.3)`: rounded wherever the code runs.
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.scalar_tensor.default)
_NO_CASTS = (torch.ops.aten.view.dtype, torch.ops.aten.scalar_tensor.default)


class CannotReplay(Exception):
    """The original's run cannot be repeated in another precision: it draws random numbers inside a fused
    kernel, or its code takes another path there."""


class Scope:
    """The rewritten block that is running now, innermost; None outside of them.

    Attributes:
        region: of a graph, which is no module of the reference that a decision could be found by.
    """

    def __init__(self) -> None:
        self.names: list[str | None] = [None]
        self.region: str | None = None

    @contextlib.contextmanager
    def enter(self, name: str) -> Iterator[None]:
        self.names.append(name)
        try:
            yield
        finally:
            self.names.pop()


@dataclasses.dataclass(frozen=True)
class RoutingRow:
    """How one router decided in the compiled model, beside the reference.

    Attributes:
        identical: fraction of the tokens with the identical set of experts.
        margin: smallest gap between the last chosen and the best refused score, relative to the largest score
            (NaN where everything is chosen).
        imposed: tokens where the choices differ by no more than rounding; they were computed with the
        reference's. beyond: tokens where the choices differ by more: a difference to find, not rounding.
    """

    block: str
    op: str
    tokens: int
    identical: float
    margin: float
    imposed: int
    beyond: int
    case: str = ""


@dataclasses.dataclass
class _Decision:
    results: tuple[Tensor, ...]  # integers and booleans; for a selection its ids, [..., k]
    scores: Tensor | None = None  # what a selection chose from, [..., N]
    noise: float = 0.0  # how far rounding moves these scores, measured by the float64 run

    def count_close(self, rounding: float) -> int:
        """How many rows have a chosen score that is no further than `rounding` from one that was not chosen."""
        (ids,), scores = self.results, self.scores
        assert scores is not None
        if ids.shape[-1] == scores.shape[-1]:
            return 0
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ids, True)

        def least_gap(above: Tensor, below: Tensor) -> Tensor:
            least = scores.double().masked_fill(~above, torch.inf).amin(-1)
            return least - scores.double().masked_fill(~below, -torch.inf).amax(-1)

        apart = torch.maximum(least_gap(is_chosen, ~is_chosen), least_gap(~is_chosen, is_chosen))
        return int((apart <= rounding).sum())


class Tape:
    """What the original decided and drew, by (block, op, shapes), in order."""

    def __init__(self) -> None:
        self.decisions: dict[Any, list[_Decision]] = defaultdict(list)
        self.draws: dict[Any, list[Tensor]] = defaultdict(list)
        self.cannot_replay = ""


class _Mode(TorchDispatchMode):
    """What the modes share: the tape, the place on it, and `promote`.

    With `promote`, everything is float64: casts that the code spells out (`.float()`,
    `softmax(dtype=torch.float32)`, dtypes in a captured graph) would round, so they become float64 too, and so do
    tensors of the default dtype (`torch.zeros(n)`), which other operands would not go with.
    """

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, scope: Scope, *, promote: bool = False):
        super().__init__()
        self.tape, self.scope, self.promote = tape, scope, promote
        self._seen: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.promote and _may_name_dtypes(func):
            args = tuple(_promote_dtypes(func, a) for a in args)
            kwargs = {name: _promote_dtypes(func, a) for name, a in kwargs.items()}
        return self.run(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = (find_equivalent(func, args) or func)(*args, **kwargs)
        if self.promote and (func in _LITERALS or _is_factory(func)) and out.dtype in _LOW:
            return out.double()
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def key(self, func: Any, args: Any) -> Any:
        """By what a decision or a draw is found in another run."""
        return self.scope.names[-1], str(func), _describe_call(args)

    def next(self, entries: dict[Any, list[Any]], key: Any) -> Any | None:
        """The entry for this occurrence of `key`; None when the recording had fewer."""
        found, index = entries.get(key, ()), self._seen[key]
        self._seen[key] += 1
        return found[index] if index < len(found) else None


class Record(_Mode):
    """Run the original; write its decisions and random draws on the tape."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self.call(func, args, kwargs)
        if is_random(func):
            if isinstance(out, Tensor):
                self.tape.draws[self.key(func, args)].append(out.detach().clone())
            elif func is torch.ops.aten.native_dropout.default:
                self.tape.draws[self.key(func, args)].append(out[1].clone())
            elif kwargs.get("dropout_p") or any(isinstance(a, float) and 0 < a < 1 for a in args):
                self.tape.cannot_replay = f"{func} draws random numbers inside its kernel"
        elif is_selection(func, args):
            selection = Selection(func, args, kwargs)
            ids, scores = selection.read_ids(out).clone(), selection.scores.detach().clone()
            self.tape.decisions[self.key(func, args)].append(_Decision((ids,), scores))
        elif is_decision(func, args, out):
            outs = (out,) if isinstance(out, Tensor) else out
            self.tape.decisions[self.key(func, args)].append(_Decision(tuple(o.clone() for o in outs)))
        return out


class Replay(_Mode):
    """Run the original's code again on other floats, with the recorded decisions and draws. With `promote`
    (the truth) it also measures how far rounding had moved the scores."""

    def __init__(self, tape: Tape, scope: Scope, *, promote: bool):
        if tape.cannot_replay:
            raise CannotReplay(tape.cannot_replay)
        super().__init__(tape, scope, promote=promote)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_random(func) and (drawn := self.next(self.tape.draws, self.key(func, args))) is not None:
            return self.draw(func, args, drawn)
        out = self.call(func, args, kwargs)
        selecting = is_selection(func, args)
        if not (selecting or is_decision(func, args, out)):
            return out
        decision: _Decision | None = self.next(self.tape.decisions, self.key(func, args))
        if decision is None:
            if selecting:
                raise CannotReplay(f"{func} was not run on {_describe_call(args)} in the original's precision")
            return out
        if not selecting:
            imposed = tuple(t.clone() for t in decision.results)
            return imposed[0] if isinstance(out, Tensor) else imposed
        selection = Selection(func, args, kwargs)
        if self.promote and decision.scores is not None:
            moved = distance(selection.scores, decision.scores.to(selection.scores.dtype))
            decision.noise = max(decision.noise, largest_magnitude(moved))
        return selection.build_outputs(decision.results[0])

    def draw(self, func: Any, args: Any, drawn: Tensor) -> Any:
        if func._schema.is_mutable:
            return args[0].copy_(drawn)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] * drawn / (1.0 - args[1]), drawn
        dtype = torch.float64 if self.promote and drawn.is_floating_point() else drawn.dtype
        return drawn.to(dtype, copy=True)


class Align(_Mode):
    """Run the compiled program; see the module. Afterwards `rows` holds one row per router decision."""

    def __init__(self, tape: Tape, scope: Scope, tol: Tolerance, case: str = "", *, promote: bool = False):
        super().__init__(tape, scope, promote=promote)
        self.tol, self.case = tol, case
        self.rows: list[RoutingRow] = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self.call(func, args, kwargs)
        if not is_selection(func, args):
            return out
        decision: _Decision | None = self.next(self.tape.decisions, self.key(func, args))
        if decision is None:
            return out
        selection, (chosen,) = Selection(func, args, kwargs), decision.results
        own, scores = selection.read_ids(out), selection.scores
        # The reference's choice is as good as ours if our own scores for it are, to within rounding; but
        # rounding is no excuse where the scores are the same: then the tie was broken differently.
        ours, theirs = (selection.ignore_order(scores.gather(-1, ids)) for ids in (own, chosen))
        rounding = 2 * (self.tol.factor * decision.noise + self.tol.floor * largest_magnitude(scores))
        alike = distance(ours, theirs).amax(-1) <= rounding
        if decision.scores is not None:
            alike &= (scores != decision.scores).any(-1)
        if (block := self.scope.region or self.scope.names[-1]) is not None:
            differ = (selection.ignore_order(own) != selection.ignore_order(chosen)).any(-1)
            imposed, beyond = int((differ & alike).sum()), int((differ & ~alike).sum())
            identical = 1 - (imposed + beyond) / differ.numel()
            margin = selection.margin(own.shape[-1])
            self.rows.append(
                RoutingRow(block, selection.op, differ.numel(), identical, margin, imposed, beyond, self.case)
            )
        if torch.equal(own, chosen):
            return out
        return selection.build_outputs(torch.where(alike[..., None], chosen, own))


def _describe_call(args: Any) -> Any:
    """Identifies a call up to the values and dtypes of its operands (a Python float may be a measured
    threshold)."""
    if isinstance(args, Tensor):
        return tuple(args.shape)
    if isinstance(args, (list, tuple)):
        return tuple(_describe_call(a) for a in args)
    return args if isinstance(args, (int, str)) else None


@functools.cache
def _is_factory(func: Any) -> bool:
    """Whether an op makes a tensor of no other, as `torch.zeros(4)` does, in the dtype that is the default."""
    returns = [str(r.type) for r in func._schema.returns]
    return returns == ["Tensor"] and not any("Tensor" in str(a.type) for a in func._schema.arguments)


@functools.cache
def _may_name_dtypes(func: Any) -> bool:
    """Whether among the arguments of an op there may be dtypes, or texts that name some."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    return func not in _NO_CASTS and any("Tensor" not in str(a.type) for a in schema.arguments)


def _promote_dtypes(func: Any, a: Any) -> Any:
    if isinstance(a, str) and func.namespace == "moefx":  # an expert body names dtypes
        return _LOW_NAMES.sub('"float64"', a)
    return torch.float64 if isinstance(a, torch.dtype) and a in _LOW else a
