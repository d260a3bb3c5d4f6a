"""Record the routing of one run and impose it on others.

Two correct programs round differently. If the scores of two experts differ by less than the rounding, the programs may
select different experts, and then their values are not comparable. So every run is compared **under the reference's
routing**. A `Tape` records each decision that the original takes on floating-point values: any op with a floating-point
input and an integer or boolean result, such as topk, sort, argmax, a comparison with a threshold, nonzero, or a cast to
int. This works for any router. The tape also records random draws, which differ between float32 and float64.

* `ReplayMode` runs the same code on other floats (float64, or perturbed weights) and imposes all decisions and draws.
* `AlignMode` runs the compiled program, whose routers are the user's own. It imposes the reference's selection for a
  token only if the scores of both selections are equal to within rounding, by the same rule as for values. A wrong
  selection stays wrong and shows in the values. `RoutingRow`s count the imposed tokens.

Entries are found by block, op and shapes, in order. So ops that only one of the programs has do not disturb the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .decisions import OpTraits, Selection, distance, find_traits, is_decision, is_selection, largest_magnitude
from .float64_ops import find_equivalent
from .policy import Tolerance
from .work_count import WorkCount

_LOW = (torch.float32, torch.bfloat16, torch.float16)
_LOW_NAMES = re.compile('"(float32|bfloat16|float16)"')


class CannotReplay(Exception):
    """The original's run cannot be replayed: a fused kernel draws random numbers, or the code takes another path."""


class Scope:
    """The innermost rewritten block that is running; None outside.

    Attributes:
        region: the running region of a graph, only for `RoutingRow`s: the reference has no module of that name.
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
    """The decisions of one router in the compiled model, compared with the reference.

    Attributes:
        identical: fraction of tokens with the same set of experts.
        margin: smallest gap between the last selected and the best rejected score, relative to the largest score; NaN
            if all experts are selected.
        imposed: tokens whose selections differ only by rounding, computed with the reference's selection.
        beyond: tokens whose selections differ by more than rounding, which is an error.
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
    results: tuple[Tensor, ...]  # integers and booleans; the ids of a selection, [..., k]
    scores: Tensor | None = None  # the scores of a selection, [..., N]
    noise: float = 0.0  # rounding error of the scores, measured by the float64 run

    def count_close(self, rounding: float) -> int:
        """Return the number of rows with a selected and a rejected score that differ by at most `rounding`."""
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
    """Decisions and random draws of the original, in order, by (block, op, shapes)."""

    def __init__(self) -> None:
        self.decisions: dict[Any, list[_Decision]] = defaultdict(list)
        self.draws: dict[Any, list[Tensor]] = defaultdict(list)
        self.cannot_replay = ""


class _Mode(TorchDispatchMode):
    """Base of the modes: holds the tape and the positions on it.

    With `promote`, everything runs in float64. Explicit casts would round (`.float()`, `softmax(dtype=torch.float32)`,
    dtypes in a captured graph), so they become float64 too. Tensors of the default dtype (`torch.zeros(n)`) do too,
    because they would not match float64 operands. `work` counts what runs.
    """

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, scope: Scope, *, promote: bool = False, work: WorkCount | None = None):
        super().__init__()
        self.tape, self.scope, self.promote, self.work = tape, scope, promote, work
        self._seen: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, traits = kwargs or {}, find_traits(func)
        if self.promote and traits.may_name_dtypes:
            if not _NAMES_DTYPES.isdisjoint(map(type, args)):
                args = tuple(_promote_dtypes(func, a) for a in args)
            if kwargs:
                kwargs = {name: _promote_dtypes(func, a) for name, a in kwargs.items()}
        return self.run(func, traits, args, kwargs)

    def call(self, func: Any, traits: OpTraits, args: Any, kwargs: Any) -> Any:
        equivalent = find_equivalent(func, args)
        out = equivalent(*args, **kwargs) if equivalent is not None else func(*args, **kwargs)
        if self.work is not None:
            self.work.add(func, args, kwargs, out)
        if self.promote and traits.makes_low_precision and out.dtype in _LOW:
            return out.double()
        return out

    def run(self, func: Any, traits: OpTraits, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def key(self, func: Any, args: Any) -> Any:
        """Return the key of a decision or draw, equal in all runs."""
        return self.scope.names[-1], str(func), _describe_call(args)

    def next(self, entries: dict[Any, list[Any]], key: Any) -> Any | None:
        """Return the entry for this occurrence of `key`; None if the recording has fewer."""
        recorded, index = entries.get(key, ()), self._seen[key]
        self._seen[key] += 1
        return recorded[index] if index < len(recorded) else None


class RecordingMode(_Mode):
    """Runs the original and records its decisions and random draws."""

    def run(self, func: Any, traits: OpTraits, args: Any, kwargs: Any) -> Any:
        out = self.call(func, traits, args, kwargs)
        if traits.is_random:
            if isinstance(out, Tensor):
                self.tape.draws[self.key(func, args)].append(out.detach().clone())
            elif func is torch.ops.aten.native_dropout.default:
                self.tape.draws[self.key(func, args)].append(out[1].clone())
            elif kwargs.get("dropout_p") or any(isinstance(a, float) and 0 < a < 1 for a in args):
                self.tape.cannot_replay = f"{func} draws random numbers inside its kernel"
        elif is_selection(traits, args):
            selection = Selection(func, args, kwargs)
            ids, scores = selection.read_ids(out).clone(), selection.scores.detach().clone()
            self.tape.decisions[self.key(func, args)].append(_Decision((ids,), scores))
        elif is_decision(traits, args, out):
            outs = (out,) if isinstance(out, Tensor) else out
            self.tape.decisions[self.key(func, args)].append(_Decision(tuple(o.clone() for o in outs)))
        return out


class ReplayMode(_Mode):
    """Runs the original on other floats, with the recorded decisions and draws.

    With `promote` (the truth), also measures the rounding error of the recorded scores.
    """

    def __init__(self, tape: Tape, scope: Scope, *, promote: bool):
        if tape.cannot_replay:
            raise CannotReplay(tape.cannot_replay)
        super().__init__(tape, scope, promote=promote)

    def run(self, func: Any, traits: OpTraits, args: Any, kwargs: Any) -> Any:
        if traits.is_random and (drawn := self.next(self.tape.draws, self.key(func, args))) is not None:
            return self.draw(func, args, drawn)
        out = self.call(func, traits, args, kwargs)
        selecting = is_selection(traits, args)
        if not (selecting or is_decision(traits, args, out)):
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


class AlignMode(_Mode):
    """Runs the compiled program, see the module. Afterwards `rows` holds one row per router decision."""

    def __init__(
        self, tape: Tape, scope: Scope, tol: Tolerance, case: str = "", *, promote: bool = False,
        work: WorkCount | None = None,
    ):  # fmt: skip
        super().__init__(tape, scope, promote=promote, work=work)
        self.tol, self.case = tol, case
        self.rows: list[RoutingRow] = []

    def run(self, func: Any, traits: OpTraits, args: Any, kwargs: Any) -> Any:
        out = self.call(func, traits, args, kwargs)
        if not is_selection(traits, args):
            return out
        decision: _Decision | None = self.next(self.tape.decisions, self.key(func, args))
        if decision is None:
            return out
        selection, (chosen,) = Selection(func, args, kwargs), decision.results
        own_ids, scores = selection.read_ids(out), selection.scores
        # Impose the reference's selection if our scores for it equal those of our selection to within rounding. Equal
        # scores in both runs are no rounding: then a tie was broken differently.
        ours, theirs = (selection.ignore_order(scores.gather(-1, ids)) for ids in (own_ids, chosen))
        rounding = 2 * (self.tol.factor * decision.noise + self.tol.floor * largest_magnitude(scores))
        alike = distance(ours, theirs).amax(-1) <= rounding
        if decision.scores is not None:
            alike &= (scores != decision.scores).any(-1)
        if (block := self.scope.region or self.scope.names[-1]) is not None:
            differ = (selection.ignore_order(own_ids) != selection.ignore_order(chosen)).any(-1)
            imposed, beyond = int((differ & alike).sum()), int((differ & ~alike).sum())
            identical = 1 - (imposed + beyond) / differ.numel()
            margin = selection.margin(own_ids.shape[-1])
            self.rows.append(
                RoutingRow(block, selection.op, differ.numel(), identical, margin, imposed, beyond, self.case)
            )
        if torch.equal(own_ids, chosen):
            return out
        return selection.build_outputs(torch.where(alike[..., None], chosen, own_ids))


def _describe_call(args: Any) -> Any:
    """Describe a call without values and dtypes. Omits Python floats, which may depend on data."""
    if isinstance(args, Tensor):
        return tuple(args.shape)
    if isinstance(args, (list, tuple)):
        return tuple(_describe_call(a) for a in args)
    return args if isinstance(args, (int, str)) else None


_NAMES_DTYPES = {str, torch.dtype}


def _promote_dtypes(func: Any, a: Any) -> Any:
    if isinstance(a, str) and func.namespace == "moefx":  # the string of an expert body names dtypes
        return _LOW_NAMES.sub('"float64"', a)
    return torch.float64 if isinstance(a, torch.dtype) and a in _LOW else a
