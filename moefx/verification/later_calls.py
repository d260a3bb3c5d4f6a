"""Plan the calls after the given one: tokens in another order, other token counts, other layouts.

`interpret_arguments` infers the token axes from the arguments, and a run of the original tells whether it accepts other
sizes. Counts are drawn so that many remainders occur, which exposes a fault at `T % 7 == 4`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..capture.arguments.argument_interpretations import interpret_arguments
from ..capture.arguments.block_arguments import Arguments, TensorArgument
from ..capture.arguments.size_collisions import ModelNumbers
from ..comparison.input_layouts import Layout
from ..comparison.sandbox import Inputs, Parameters, RunOptions, copy_detached, execute, leaves, make_sandbox
from ..errors import summarize_error

MODULI = (7, 5, 8, 6, 3, 4, 2)  # token counts cover the remainders by these, in this order of priority
NUM_SMALL = 4  # calls with few tokens, forward only
MANY_TOKENS = 1024
MAX_WORK = 1 << 29  # tokens * parameters of a call above MANY_TOKENS
MAX_SECONDS = 20  # of a call above MANY_TOKENS, predicted from the time per token of earlier calls
MAX_CPU_PARAMETERS = 1 << 28  # a larger model on an accelerator is not tried on the CPU first
_MAX_INTERPRETATIONS = 5
_MIN_TOKENS = 3
_SMALL, _LARGE = range(_MIN_TOKENS, _MIN_TOKENS + 14), range(MANY_TOKENS + 1, MANY_TOKENS + 200)
Sizes = dict[str, int]


@dataclasses.dataclass(frozen=True)
class LaterCall:
    """One call after the given one.

    Attributes:
        num_tokens: None if the token axes are unknown.
        is_resized: whether the token count differs from the given call's.
    """

    inputs: Inputs
    num_tokens: int | None = None
    is_resized: bool = False
    layout: Layout = ""
    backward: bool = True

    def apply_to(self, options: RunOptions) -> RunOptions:
        """Return the options for a run of this call."""
        return dataclasses.replace(options, layout=self.layout, backward=self.backward)

    def __str__(self) -> str:
        tokens = "" if self.num_tokens is None else f"{self.num_tokens} tokens"
        values = "" if self.is_resized else "in another order" if tokens else "the same inputs"
        return ", ".join(filter(None, [tokens, values, self.layout, "" if self.backward else "forward alone"]))


@dataclasses.dataclass
class CallPlan:
    """The calls in order, and the reasons for omitted ones."""

    calls: list[LaterCall] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)


class _Draw(NamedTuple):
    """A token count to draw, and the options of its call.

    Attributes:
        candidates: counts to draw from.
        allowed: counts to accept after rounding to whole sizes.
    """

    candidates: range
    allowed: range
    backward: bool = True
    layout: Layout = ""


class CallPlanner:
    """Plans calls that the original accepts.

    Args:
        parameters: parameters of the sandboxes, in the precision under test.
        token_counts: see `verify`; None draws them.
        is_costly: each new size or layout recompiles, so plan only one call with another size.
    """

    def __init__(
        self, original: nn.Module, inputs: Inputs, options: RunOptions, parameters: Parameters,
        dtype: torch.dtype | None, token_counts: Sequence[int] | None, is_costly: bool = False,
    ):  # fmt: skip
        self.original, self.inputs, self.options = original, inputs, options
        self.parameters, self.dtype, self.token_counts = parameters, dtype, token_counts
        self.is_costly = is_costly
        self.generator = torch.Generator().manual_seed(options.seed)
        self.plan = CallPlan()
        self._is_on_cpu = _is_on_cpu(original, inputs)

    def plan_calls(self) -> CallPlan:
        """Plan a call of the given size, then calls of other sizes."""
        interpretation = next(self._iterate_interpretations(), None)
        tokens = None if interpretation is None else _count_tokens(interpretation, interpretation.sizes)
        resized_inputs = (
            self.inputs
            if interpretation is None
            else resize_inputs(self.inputs, interpretation, interpretation.sizes, self.generator)
        )
        layout: Layout = "" if self.is_costly else "rows apart"
        second = LaterCall(resized_inputs, tokens, layout=layout, backward=False)
        if not self._is_on_cpu and self._find_refusal(second) is not None:
            second = LaterCall(self.inputs, layout=layout, backward=False)
        self.plan.calls.append(second)
        if self.token_counts is None or self.token_counts:
            self._add_other_counts()
        return self.plan

    def _add_other_counts(self) -> None:
        reason = "the token axes of the inputs are unknown"
        if not self._is_on_cpu and sum(p.numel() for p in self.original.parameters()) > MAX_CPU_PARAMETERS:
            # An index out of range on an accelerator would break the process.
            reason = "the model is too large to try it on the CPU first"
            interpretations: Iterable[Arguments] = ()
        else:
            interpretations = self._iterate_interpretations()
        for interpretation in interpretations:
            calls = list(self._iterate_calls(interpretation))
            # If the model accepts the fewest and the most tokens, assume that it accepts the counts in between.
            extremes = sorted(calls, key=lambda call: call.num_tokens or 0)[:: max(len(calls) - 1, 1)]
            error = next(filter(None, map(self._find_refusal, extremes)), None)
            if calls and error is None:
                self.plan.calls += calls
                return
            reason = error or reason
        self.plan.reasons.append(f"other token counts: {reason}")

    def _iterate_interpretations(self) -> Iterator[Arguments]:
        """Iterate over interpretations of the inputs with axes that can be resized."""
        first = itertools.islice(interpret_arguments(*self.inputs, ModelNumbers()), _MAX_INTERPRETATIONS)
        return (arguments for arguments in first if arguments.dims and math.prod(arguments.sizes.values()))

    def _iterate_calls(self, interpretation: Arguments) -> Iterator[LaterCall]:
        for sizes, backward, layout in self._iterate_sizes(interpretation):
            inputs = resize_inputs(self.inputs, interpretation, sizes, self.generator)
            yield LaterCall(inputs, _count_tokens(interpretation, sizes), True, layout, backward)

    def _iterate_sizes(self, interpretation: Arguments) -> Iterator[tuple[Sizes, bool, Layout]]:
        """Yield (sizes, whether to run the backward, layout) of each call.

        Yields the requested counts, else one count below the given one, a few small ones, and one above.
        """
        num_tokens = _count_tokens(interpretation, interpretation.sizes)
        if self.token_counts is not None:
            for number in self.token_counts:
                yield _choose_sizes(interpretation, -(-number // interpretation.tokens_per_unit)), True, ""
            return
        seen = [num_tokens]
        is_many = num_tokens <= MANY_TOKENS and _LARGE.stop * _count_parameters(self.original) <= MAX_WORK
        # Stay near the given count if MANY_TOKENS would take too long.
        larger = _LARGE if is_many else range(num_tokens + 1, num_tokens + max(num_tokens // 8, 8))
        below = range(max(num_tokens // 4, _MIN_TOKENS), max(num_tokens // 2, min(num_tokens, _MIN_TOKENS + 8)))
        unit = interpretation.tokens_per_unit
        small = range(unit, 9 * unit, unit) if unit > 1 else _SMALL
        draws = [
            _Draw(below, range(num_tokens), layout="transposed"),
            *[_Draw(small, range(sys.maxsize), backward=False)] * NUM_SMALL,
            _Draw(larger, range(max(num_tokens, MANY_TOKENS * is_many) + 1, sys.maxsize)),  # last: see MAX_SECONDS
        ]
        if self.is_costly:
            del draws[1:]
            self.plan.reasons.append("more token counts: each recompiles; set token_counts=(...) for more")
        for draw in draws:
            sizes = self._draw_sizes(interpretation, draw, seen)
            if sizes is not None:
                seen.append(_count_tokens(interpretation, sizes))
                yield sizes, draw.backward, draw.layout
        if not is_many and num_tokens <= MANY_TOKENS and not self.is_costly:
            self.plan.reasons.append(
                f"more than {MANY_TOKENS} tokens: too slow with {_count_parameters(self.original):,} parameters; "
                f"set token_counts=({_LARGE.start},)"
            )

    def _draw_sizes(self, interpretation: Arguments, draw: _Draw, seen: Sequence[int]) -> Sizes | None:
        """Draw sizes whose token count adds the most new remainders; ties are broken at random."""
        order = torch.randperm(len(draw.candidates), generator=self.generator).tolist()
        proposals = [
            _choose_sizes(interpretation, -(-draw.candidates[i] // interpretation.tokens_per_unit)) for i in order
        ]
        proposals = [s for s in proposals if (n := _count_tokens(interpretation, s)) in draw.allowed and n not in seen]

        def is_new(sizes: Sizes) -> list[bool]:
            tokens = _count_tokens(interpretation, sizes)
            return [tokens % m not in {n % m for n in seen} for m in MODULI]

        return max(proposals, key=is_new, default=None)

    def _find_refusal(self, call: LaterCall) -> str | None:
        """Return the error of the original in a call, or None. Runs on the CPU, where an index out of range is an
        error."""
        options = dataclasses.replace(self.options, layout=call.layout, backward=False)
        try:
            box = make_sandbox(
                self.original, self.parameters if self._is_on_cpu else _copy_parameter_to_cpu, self.dtype
            )
            inputs = call.inputs
            if not self._is_on_cpu:
                _move_state_to_cpu(box)
                inputs = _copy_inputs_to_cpu(inputs)
            execute(box, inputs, options, cast=lambda t: t.to(self.dtype) if self.dtype else t)
        except Exception as error:
            return f"on {call} the original raises {summarize_error(error)[:160]}"
        return None


def resize_inputs(inputs: Inputs, interpretation: Arguments, sizes: Sizes, generator: torch.Generator) -> Inputs:
    """Make inputs of other sizes: cut or repeat the given ones, and shuffle them along each token axis."""
    flat, spec = pytree.tree_flatten(inputs)
    order = {}
    for dim, size in interpretation.sizes.items():
        mixed = torch.randperm(size, generator=generator)
        order[dim] = mixed[torch.arange(sizes[dim]) % size]

    def index(name: str) -> Tensor:
        """Return indices into the given inputs along an axis such as `S`, `B*S` or `B*10`."""
        indices = torch.zeros(1, dtype=torch.int64)
        for part in name.split("*"):
            size = int(part) if part.isdigit() else interpretation.sizes[part]
            positions = torch.arange(size) if part.isdigit() else order[part]
            indices = (indices[:, None] * size + positions).flatten()
        return indices

    def changed(value: Any, leaf: Any) -> Any:
        if not isinstance(leaf, TensorArgument):
            return value
        value = value.detach()
        for axis, name in enumerate(leaf.shape):
            if isinstance(name, str):
                value = value.index_select(axis, index(name).to(value.device))
        return value

    args, kwargs = pytree.tree_unflatten([changed(*pair) for pair in zip(flat, interpretation.flat, strict=True)], spec)
    return args, kwargs


def _choose_sizes(interpretation: Arguments, units: int) -> Sizes:
    """Choose sizes whose product is about `units`. Only the first axis may be longer than given."""
    first, *inner = interpretation.dims
    num_outer = max(1, -(-units // math.prod(interpretation.sizes[dim] for dim in inner))) if inner else units
    num_outer = next((n for n in range(num_outer, 2 * num_outer + 2) if units % n == 0), num_outer)
    sizes, remaining = {first: num_outer}, max(1, units // num_outer)
    for dim in reversed(inner):
        sizes[dim] = min(remaining, interpretation.sizes[dim])
        remaining = max(1, remaining // sizes[dim])
    return sizes


def _count_tokens(interpretation: Arguments, sizes: Sizes) -> int:
    return interpretation.tokens_per_unit * math.prod(sizes.values())


def _count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------- on the CPU
def _is_on_cpu(model: nn.Module, inputs: Inputs) -> bool:
    tensors = [t for _, t in leaves(inputs) if isinstance(t, Tensor)]
    return all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers(), *tensors))


def _copy_parameter_to_cpu(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.detach().cpu(), requires_grad=p.requires_grad)


def _move_state_to_cpu(box: nn.Module) -> None:
    """Move buffers, and tensors that are plain attributes, to the CPU."""
    for module in box.modules():
        module._buffers.update({name: None if b is None else b.cpu() for name, b in module._buffers.items()})
        vars(module).update({name: v.cpu() for name, v in vars(module).items() if type(v) is Tensor})


def _copy_inputs_to_cpu(inputs: Inputs) -> Inputs:
    flat, spec = pytree.tree_flatten(copy_detached(inputs))
    args, kwargs = pytree.tree_unflatten([v.cpu() if isinstance(v, Tensor) else v for v in flat], spec)
    return args, kwargs


__all__ = ["CallPlan", "CallPlanner", "LaterCall", "resize_inputs"]
