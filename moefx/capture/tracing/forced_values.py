"""Force the results of ops that depend on data: other integers and booleans than the routing gives.

A proof captures again with such values, and demands the same form. `FORCE_MIXED` and `FORCE_VARIED` say how values
vary.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ...util.tensor_trees import collect_tensors, is_float, map_tensors
from ..environment.code_locations import Source, find_user_source
from .capture_result import FORCE_MIXED, FORCE_VARIED
from .op_runner import OpRunner
from .op_sets import ELEMENT_SELECTIONS, bare_name

# Ops that return positions of the elements that they select.
_POSITION_OPS = {
    "argmax", "argmin", "argsort", "cummax", "cummin", "kthvalue", "max", "median", "min", "mode", "nanmedian", "sort",
    "topk",
}  # fmt: skip


class ForcedValues:
    """The forced values of one capture. Ops that repeat a computation, as in a loop, get equal values."""

    def __init__(self, runner: OpRunner):
        self.runner, self.routing = runner, runner.routing
        self._coins: dict[tuple[int, torch.Size], torch.Tensor] = {}  # by computation and shape
        self._numbers: dict[tuple[Source, torch.Size], torch.Tensor] = {}  # inputs of selections, by location and shape

    def apply(
        self, outcome: Any, func: Any, args: tuple, kwargs: dict[str, Any], results: tuple[Any, Any], computation: int,
        from_integers: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Replace the visible and the concrete result of an op.

        Args:
            outcome: an entry of `Interventions`.
            results: the results of `OpRunner.compute`.
            computation: the hash of the op with its arguments.
            from_integers: whether the result follows from routing integers alone.
        """
        out, concrete = results
        if callable(outcome):
            forced_by_id = {id(t): outcome(t) for t in collect_tensors(out) if not is_float(t)}
            out, concrete = (map_tensors(tree, lambda t: forced_by_id.get(id(t), t)) for tree in (out, concrete))
        elif outcome == FORCE_VARIED:
            return self._vary(func, args, kwargs, out, concrete, computation)
        elif outcome == FORCE_MIXED:
            return self._mix(func, args, kwargs, out, concrete, computation, from_integers)
        return out, concrete

    def _mix(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        out: Any,
        concrete: Any,
        computation: int,
        from_integers: bool,
    ) -> tuple[Any, Any]:
        """Return mixed results: see `FORCE_MIXED`."""
        source = find_user_source()
        if bare_name(func) in ELEMENT_SELECTIONS:

            def replace_input(t: torch.Tensor) -> torch.Tensor:
                if from_integers:
                    return self._toss(self.runner.concrete(t), computation)
                numbers = self._numbers.setdefault((source, t.shape), self.routing.draw_numbers(t.shape))
                return numbers.to(t.dtype) if is_float(t) else self.runner.concrete(t)

            concrete = func(*map_tensors(args, replace_input), **kwargs)
            values = iter(collect_tensors(concrete))
            return map_tensors(out, lambda t: other if not is_float(other := next(values)) else t), concrete
        if not isinstance(out, torch.Tensor):
            return out, concrete
        if is_float(out):
            concrete = func(*map_tensors(args, self.runner.concrete), **kwargs) if concrete is None else concrete
            return out, self._toss(concrete, computation)
        mixed = self._toss(out, computation)
        if torch.equal(mixed, out):
            mixed = ~out if out.dtype is torch.bool else out + 1
        return mixed, mixed

    def _vary(
        self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, concrete: Any, computation: int
    ) -> tuple[Any, Any]:
        """Return varied results: see `FORCE_VARIED`. Selections return positions in other numbers."""
        if concrete is None:
            concrete = func(*map_tensors(args, self.runner.concrete), **map_tensors(kwargs, self.runner.concrete))
        if bare_name(func) in _POSITION_OPS:
            args = map_tensors(
                args, lambda t: self.routing.draw_numbers(t.shape) if t.dim() else self.runner.concrete(t)
            )
            others = iter(collect_tensors(func(*args, **kwargs)))
        else:
            others = itertools.repeat(None)

        def vary_tensor(t: torch.Tensor) -> torch.Tensor:
            other = next(others)
            if other is None or is_float(other) or other.shape != t.shape:
                return self._vary_elements(t, computation)
            return other.to(t.dtype)

        concrete = map_tensors(concrete, vary_tensor)
        remaining = iter(collect_tensors(concrete))
        return map_tensors(out, lambda t: t if is_float(varied := next(remaining)) else varied), concrete

    def _vary_elements(self, value: torch.Tensor, computation: int) -> torch.Tensor:
        """Make each element itself, one more, or zero; of booleans, either."""
        if not value.numel():
            return value
        varied = self._toss(value, computation)
        if value.dtype is not torch.bool:
            is_zero = self._coins.setdefault((computation + 1, value.shape), self.routing.draw_coins(value.shape))
            is_zero = is_zero ^ bool(is_zero.sum() > is_zero.numel() // 2)  # keep at least half of the values
            is_first = torch.arange(value.numel()).view(value.shape) == 0
            varied = torch.where(is_zero if is_zero.any() else is_first, torch.zeros_like(value), varied)
        if torch.equal(varied, value) or (value.numel() == 1 and value.dtype is not torch.bool):
            varied = ~value if value.dtype is torch.bool else value + 1
        return varied

    def _toss(self, value: torch.Tensor, computation: int) -> torch.Tensor:
        """Return random booleans, or each number as it is or one more. Equal computations get equal coins."""
        coins = self._coins.setdefault((computation, value.shape), self.routing.draw_coins(value.shape)).clone()
        return coins if value.dtype is torch.bool else value + coins.to(value.dtype)
