"""Run consecutive dialect ops as one autograd node, with one trip through autograd instead of one for each op.

A call of an op through the dispatcher and autograd takes 30 us or more on the host: too long for a layer with few
tokens. In eager mode the generated function of a block calls `JoinedOps` instead:

    local_ids = moefx.place_choices(ids, None)                  out = joined_ops(ids, x, weights, up, down)
    pft = moefx.build_pft(local_ids, weights, None)     ->
    out = moefx.expert_mlp(x, *pft, [up], [], [down], [])

The forward runs the ops' providers in the order of the graph. The backward runs their derivatives in reverse, and adds
up gradients as autograd does, so results are equal bit by bit. Dispatch modes, subclasses of tensors and compilers see
the single ops, because their calls go through the dispatcher. `op_joining` finds the ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from ..guards import recomputed_choice
from ..ops.op_definition import (
    NAMESPACE,
    Op,
    flatten_lists,
    is_profiled,
    raise_double_backward,
    run_joined,
    skip_in_dynamo,
)
from ..ops.partial_backward import BackwardRuns, DelayedGradients

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_DEVICES = ("cpu", "cuda")


class Wiring(NamedTuple):
    """How values flow between joined ops. Values have numbers: the inputs first, then the results of each op.

    Attributes:
        arguments: for each op, the numbers in each positional argument: several for a list, none for a constant.
        is_list: for each op, whether each positional argument is a list.
        results: for each op, the numbers of its results, up to the last one that is used.
        outputs: the numbers of the returned values.
    """

    arguments: tuple[tuple[tuple[int, ...], ...], ...]
    is_list: tuple[tuple[bool, ...], ...]
    results: tuple[range, ...]
    outputs: tuple[int, ...]
    num_inputs: int
    num_values: int


# -- the ways to run


def _run_op(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any], Any]:
    """Return the arguments, after the op's autocast rule if autocast is on, and the outputs."""
    autocast_off: Any = contextlib.nullcontext()
    if op.cast is not None:
        device = _find_tensor(args).device.type
        if torch.is_autocast_enabled(device):
            args, kwargs = op.cast(torch.get_autocast_dtype(device), *args, **kwargs)
            autocast_off = torch.autocast(device, enabled=False)
    with autocast_off:
        if not is_profiled():
            return args, kwargs, op.run(*args, **kwargs)
        with torch.profiler.record_function(f"{NAMESPACE}::{op.name}"):
            return args, kwargs, op.run(*args, **kwargs)


def _find_tensor(args: Sequence[Any]) -> Tensor:
    """Return the first tensor among arguments, which may be lists."""
    return next(item for item in flatten_lists(args) if isinstance(item, Tensor))


class _DispatchedOps:
    """Call the ops through the dispatcher."""

    def run(self, op: Op, index: int, *args: Any, **kwargs: Any) -> Any:
        return op.overload(*args, **kwargs)


class _OpsWithoutGradient:
    """Run the ops of a call that needs no gradient."""

    def run(self, op: Op, index: int, *args: Any, **kwargs: Any) -> Any:
        return _run_op(op, args, {**kwargs, **op.without_backward})[-1]


class _OpCall:
    """One op in a call that needs gradients: the `ctx` of its `Derivative`, which adds further attributes.

    Attributes:
        index: the op's position.
        needs: whether each argument, or any element of it, needs a gradient in the running backward.
        needs_ever: the same for any backward. needs_later: for another backward.
        delayed: the gradients that an earlier run has left to this one.
        saved_positions: positions of its saved tensors among those of the joined node.
        num_results: the number of its results.
        next_functions: as of an autograd node, of its last argument only.
        saved_tensors: set while the backward runs.
    """

    def __init__(self, op: Op, index: int, needs: tuple[bool, ...], last_maker: Any):
        self.dialect_op, self.index, self.needs = op, index, needs
        self.needs_ever, self.needs_later = needs, (False,) * len(needs)
        self.delayed: DelayedGradients | None = None
        self.next_functions = [(last_maker, 0)]
        self.to_save: Sequence[Any] = ()
        self.saved_positions: Sequence[int] = ()
        self.constant: Sequence[int] = ()  # ids of results without gradient, while the forward runs
        self.choice: recomputed_choice.RoutingChoice | None = None
        self.num_results = 1
        self.saved_tensors: Sequence[Any] = ()

    def name(self) -> str:
        """Return the name that autograd gives the op's own node."""
        return f"{self.dialect_op.name}Backward"

    def save_for_backward(self, *tensors: Any) -> None:
        self.to_save = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.constant = [id(t) for t in tensors]


class _RecordedOps:
    """Run the ops of a call, and record their state for the backward.

    Attributes:
        needs: whether each value needs a gradient. dtypes: of these values.
        makers: the `_OpCall` of these values, None for inputs.
        calls: the ops that need a backward.
        saved: tensors to save, each once.
    """

    def __init__(self, wiring: Wiring, inputs: Sequence[Any], needs: Sequence[bool]):
        unset = [None] * (wiring.num_values - wiring.num_inputs)
        self.wiring = wiring
        self.needs: list[Any] = [*needs, *unset]
        self.dtypes: list[Any] = [*(t.dtype if need else None for t, need in zip(inputs, needs, strict=True)), *unset]
        self.makers: list[_OpCall | None] = [None] * wiring.num_values
        self.calls: list[_OpCall] = []
        self.saved: list[Any] = []
        self._positions: dict[int, int] = {}

    def save(self, tensor: Any) -> int:
        """Save a tensor for the backward, and return its position."""
        position = self._positions.setdefault(id(tensor), len(self.saved))
        if position == len(self.saved):
            self.saved.append(tensor)
        return position

    def run(self, op: Op, index: int, *args: Any, **kwargs: Any) -> Any:
        numbers, needs = self.wiring.arguments[index], self.needs
        gradients_needed = tuple([any([needs[n] for n in value_numbers]) for value_numbers in numbers])
        if op.derivative is None or not any(gradients_needed):
            return _run_op(op, args, {**kwargs, **op.without_backward})[-1]
        op_args, kwargs, outputs = _run_op(op, args, kwargs)
        call = _OpCall(op, index, gradients_needed, self.makers[numbers[-1][-1]] if numbers[-1] else None)
        op.derivative.save(call, op_args, kwargs, outputs)
        call.choice = recomputed_choice.record_routing(
            op.name, [op_args[i] for i in op.routing_arguments], call.to_save
        )
        call.saved_positions, call.to_save = [self.save(t) for t in call.to_save], ()
        results = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        call.num_results = len(results)
        for number, tensor in zip(self.wiring.results[index], results, strict=False):  # the last ones may be unused
            if tensor.is_floating_point() and id(tensor) not in call.constant:
                needs[number], self.dtypes[number], self.makers[number] = True, tensor.dtype, call
        call.constant = ()
        self.calls.append(call)
        return outputs


class _JoinedNode(torch.autograd.Function):
    """The autograd node of one call. Its last output is an empty tensor, `link`, which connects gradients to the
    inputs."""

    @staticmethod
    def forward(ctx: Any, joined_ops: JoinedOps, *inputs: Any) -> Any:
        wiring = joined_ops.wiring
        ops = _RecordedOps(wiring, inputs, ctx.needs_input_grad[1:])
        with run_joined():
            outputs = joined_ops.function(None, ops, *inputs)
        link = torch.empty(0, device="cpu")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(link, *ops.saved)
        ctx.mark_non_differentiable(*(t for t, n in zip(outputs, wiring.outputs, strict=True) if not ops.needs[n]))
        ctx.joined_ops, ctx.calls, ctx.dtypes = joined_ops, ops.calls, ops.dtypes
        ctx.runs = BackwardRuns([False, *(isinstance(t, Tensor) for t in inputs)])
        ctx.makers = [ops.makers[n] for n in wiring.outputs]
        return *outputs, link

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        wiring: Wiring = ctx.joined_ops.wiring
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        link, *saved = ctx.saved_tensors
        needs = ctx.runs.find_needs(ctx)
        _set_needs(ctx, wiring, needs)
        completes_earlier_run = ctx.runs.has_left_all(needs[1:], grads)
        value_gradients: list[Any] = [None] * wiring.num_values
        for number, grad in zip(wiring.outputs, grads[:-1], strict=True):
            value_gradients[number] = grad
        with run_joined(), torch.no_grad():
            for call in reversed(ctx.calls):
                if completes_earlier_run:
                    _finish_backward(ctx, call, wiring, value_gradients)
                else:
                    call.delayed = None
                    _run_backward(ctx, call, wiring, saved, value_gradients)
        ctx.runs.end(grads, ctx.calls, lambda call: wiring.arguments[call.index])
        gradients = value_gradients[: wiring.num_inputs]
        if torch.is_grad_enabled():
            incoming = [g for g in grads if g is not None]
            indices = [i for i, gradient in enumerate(gradients) if gradient is not None]
            name, results = ctx.joined_ops.names[-1], [gradients[i] for i in indices]
            tracked = _DifferentiableOnce.apply(name, len(incoming), link, *incoming, *results)
            for i, gradient in zip(indices, tracked, strict=True):
                gradients[i] = gradient
        return None, *gradients


class _DifferentiableOnce(torch.autograd.Function):
    """Return gradients that raise `DoubleBackward` if they are differentiated, by an input of the joined ops (to which
    `link` leads) or by an incoming gradient."""

    @staticmethod
    def forward(ctx: Any, name: str, num_incoming: int, link: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tensors[num_incoming:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise_double_backward(ctx.name)


def _set_needs(ctx: Any, wiring: Wiring, needs: Sequence[bool]) -> None:
    """Set which arguments of each call need a gradient in the running backward, by the needs of the node's inputs."""
    if needs is ctx.needs_input_grad:
        for call in ctx.calls:
            call.needs, call.needs_later = call.needs_ever, (False,) * len(call.needs_ever)
        return
    are_needed = [*needs[1:], *[False] * (wiring.num_values - wiring.num_inputs)]
    for call in ctx.calls:
        numbers = wiring.arguments[call.index]
        needed = [any([are_needed[n] for n in value_numbers]) for value_numbers in numbers]
        call.needs = tuple([ever and need for ever, need in zip(call.needs_ever, needed, strict=True)])
        call.needs_later = tuple([ever and not need for ever, need in zip(call.needs_ever, needed, strict=True)])
        for number in wiring.results[call.index] if any(call.needs) else ():
            are_needed[number] = ctx.dtypes[number] is not None


def _finish_backward(ctx: Any, call: _OpCall, wiring: Wiring, value_gradients: list[Any]) -> None:
    """Add the gradients that an earlier run of a call has left to this one."""
    if call.delayed is not None:
        _add_gradients(ctx, call, wiring, value_gradients, call.delayed.compute(call.needs))


def _run_backward(ctx: Any, call: _OpCall, wiring: Wiring, saved: Sequence[Any], value_gradients: list[Any]) -> None:
    """Add the gradients of an op's arguments to `value_gradients`, and clear those of its results."""
    results = wiring.results[call.index]
    grads = value_gradients[results.start : results.stop]
    if all(g is None for g in grads):
        return
    value_gradients[results.start : results.stop] = [None] * len(grads)
    if not any(call.needs):
        return
    grads += [None] * (call.num_results - len(grads))
    numbers = wiring.arguments[call.index]
    if call.next_functions[0][0] is None and numbers[-1] and numbers[-1][-1] < wiring.num_inputs:
        call.next_functions = [(_find_maker(ctx, numbers[-1][-1]), 0)]
    call.saved_tensors = [saved[position] for position in call.saved_positions]
    assert call.dialect_op.derivative is not None
    gradients = call.dialect_op.derivative.backward(call, grads)
    call.saved_tensors = ()
    _add_gradients(ctx, call, wiring, value_gradients, gradients)


def _add_gradients(
    ctx: Any, call: _OpCall, wiring: Wiring, value_gradients: list[Any], gradients: Sequence[Any]
) -> None:
    """Add the gradients of a call's arguments to `value_gradients`."""
    numbers, is_list = wiring.arguments[call.index], wiring.is_list[call.index]
    for targets, is_one_list, gradient in zip(numbers, is_list, gradients, strict=True):
        if gradient is None:
            continue
        for target, grad in zip(targets, gradient if is_one_list else (gradient,), strict=True):
            if grad is None or (dtype := ctx.dtypes[target]) is None:
                continue
            grad = grad if grad.dtype is dtype else grad.to(dtype)
            value_gradients[target] = grad if value_gradients[target] is None else value_gradients[target] + grad


def _find_maker(ctx: Any, number: int) -> Any:
    """Return the node that made an input: an op's call inside of another joined node, or a node of autograd."""
    node, output = ctx.next_functions[sum(ctx.runs.are_tensors[: 1 + number])]
    makers = getattr(node, "makers", None)
    return node if makers is None else makers[output]


class JoinedOps:
    """Several ops that run as one. Called with the values that they read, it returns those that others read.

    Args:
        function: the generated function. Its second argument runs the ops: `ops.run(build_pft, 2, x, num_experts=8)`.
        names: of the ops.
    """

    def __init__(self, function: Callable[..., Any], wiring: Wiring, names: Sequence[str]):
        self.function, self.wiring, self.names = function, wiring, names
        self.__name__ = "joined_ops"

    def __call__(self, *inputs: Any) -> Any:
        if not _are_plain(inputs):
            outputs = self.function(None, _DispatchedOps(), *inputs)
        elif torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            *outputs, _ = _JoinedNode.apply(self, *inputs)
        else:
            with run_joined():
                outputs = self.function(None, _OpsWithoutGradient(), *inputs)
        return outputs if len(self.wiring.outputs) > 1 else outputs[0]

    def __repr__(self) -> str:
        return f"<JoinedOps {', '.join(self.names)}>"


def _are_plain(inputs: Sequence[Any]) -> bool:
    """Return whether these are plain tensors without modes or subclasses, on which autograd alone acts."""
    if torch._C._len_torch_dispatch_stack() or _find_tensor(inputs).device.type not in _DEVICES:
        return False
    if torch._C._len_torch_function_stack():
        modes = torch.overrides._get_current_function_mode_stack()
        if not all(isinstance(mode, DeviceContext) for mode in modes):  # of `torch.set_default_device`
            return False
    return all([type(t) in _PLAIN_TYPES or not isinstance(t, Tensor) for t in inputs])


for _function in (JoinedOps.__call__, _JoinedNode.forward, _JoinedNode.backward):
    skip_in_dynamo(_function)
