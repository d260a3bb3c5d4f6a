"""The computation of a region as straight-line code: calls on numbered values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...capture.environment.code_locations import Source, override_user_stack
from ...capture.sizes.symbolic_sizes import SYMBOLIC_FUNCTIONS


class ValueRef(NamedTuple):
    """An argument: the number of a value. Inputs come first, then weights, then the results of the steps."""

    index: int


class SizeExpression(NamedTuple):
    """An argument: a number that follows from the token dims of the first input, such as `B*S` or `2*S`."""

    text: str

    def at(self, dims: dict[str, Any]) -> Any:
        return eval(self.text, {"__builtins__": {}, **SYMBOLIC_FUNCTIONS}, dims)


class Autocast(NamedTuple):
    device: str
    dtype: torch.dtype | None
    enabled: bool


class Modes(NamedTuple):
    """The modes that a program has switched on around an op.

    Attributes:
        grad: grad mode; None: as outside.
        autocast: the open contexts, outermost first.
    """

    grad: bool | None = None
    autocast: tuple[Autocast, ...] = ()


class Step(NamedTuple):
    """One call. With `method`, the target is the name of a method of the first argument."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: tuple[Source, ...]
    modes: Modes
    method: bool = False


@dataclasses.dataclass(frozen=True)
class RegionCode:
    """The computation of a region.

    Attributes:
        dims: the token dims, outermost first, with the axis of the first input that has each.
        steps: the calls, in order.
        outputs: numbers of the values to return, read after the last step.
    """

    dims: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def run(self, inputs: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, ...]:
        dims = {name: inputs[0].shape[axis] for name, axis in self.dims}
        values = [*inputs, *weights]

        def value(a: Any) -> Any:
            return values[a.index] if isinstance(a, ValueRef) else a.at(dims) if isinstance(a, SizeExpression) else a

        for step in self.steps:
            args, kwargs = map_leaves(step.args, value), map_leaves(step.kwargs, value)
            with override_user_stack(step.sources), apply_modes(step.modes):
                values.append(call_target(step.target, step.method, args, kwargs))
        return tuple(values[i] for i in self.outputs)


def call_target(target: Any, method: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, an op or a method."""
    if method and target == "histc":
        return _histc(*args, **kwargs)
    if method:
        return getattr(args[0], target)(*args[1:], **kwargs)
    function: Any = _COMPOSITE_FUNCTIONS.get(target, target)
    return function(*args, **kwargs)


def _histc(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute `torch.histc`, also for integers on devices that lack it."""
    if t.is_floating_point():
        return torch.histc(t, *args, **kwargs)
    return torch.histc(t.double(), *args, **kwargs).to(t.dtype)


# Composite ops that `torch.export` keeps would be decomposed if called as overloads; these functions are not.
_COMPOSITE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.histc: _histc,
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten.linear.default: F.linear,
    torch.ops.aten.matmul.default: torch.matmul,
    torch.ops.aten.einsum.default: lambda equation, operands, **_: torch.einsum(equation, *operands),
}


@contextlib.contextmanager
def apply_modes(modes: Modes) -> Iterator[None]:
    """Enter the modes of a step."""
    with contextlib.ExitStack() as stack:
        if modes.grad is not None:
            stack.enter_context(torch.set_grad_enabled(modes.grad))
        for one in modes.autocast:
            stack.enter_context(torch.autocast(one.device, dtype=one.dtype, enabled=one.enabled))
        yield


def map_leaves(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to all leaves of nested arguments. Containers become plain ones."""
    if isinstance(tree, (ValueRef, SizeExpression)):
        return fn(tree)
    if isinstance(tree, torch.Size):
        return torch.Size([map_leaves(x, fn) for x in tree])
    if isinstance(tree, tuple):
        return tuple([map_leaves(x, fn) for x in tree])
    if isinstance(tree, list):
        return [map_leaves(x, fn) for x in tree]
    if isinstance(tree, dict):
        return {k: map_leaves(v, fn) for k, v in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(x, fn) for x in (tree.start, tree.stop, tree.step)))
    return fn(tree)
