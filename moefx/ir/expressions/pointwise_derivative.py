"""Derivatives of pointwise expressions: traced once from torch's autograd, run as straight-line ATen calls.

The backward of an expert needs the derivative of the pointwise part between its GEMMs. No table of activations is
needed: autograd runs once on small tensors, and a dispatch mode records its ATen calls. Value and gradients share
subexpressions. The recorded function runs inside an op, without an autograd graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .pointwise_expression import Expr, assemble, compile_expression, list_variables, to_canonical_text

# Sizes of the traced tensors. Some derivatives take sizes as arguments (expand, zeros). These numbers are unusual, so
# the trace can tell them from constants and replace them by the sizes of a call.
_ROWS, _COLUMNS = 1009, 211
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def vjp(
    expr: Expr, env: Mapping[str, Tensor], grad: Tensor, wrt: Sequence[str], *, value: bool = True
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Compute the value of `expr` (None with `value=False`) and its gradient for each name in `wrt` that occurs.

    Args:
        env: the variables, matrices [B,n] or columns [B,1]; the gradient of a column is summed over each row.
        grad: gradient of the value, [B,n].
        wrt: names of the variables to differentiate by.
    """
    function, wrt = build_vjp(expr, env, grad, wrt, value=value)
    result, *grads = function(env, grad)
    return result, dict(zip(wrt, grads, strict=True))


def build_vjp(
    expr: Expr, env: Mapping[str, Tensor], grad: Tensor, wrt: Sequence[str], *, value: bool = True
) -> tuple[Callable[[Mapping[str, Tensor], Tensor], tuple[Any, ...]], tuple[str, ...]]:
    """Build `vjp` for repeated calls: `function(env, grad) -> (value, *gradients)`, and the gradients' names."""
    names = list_variables(expr)
    wrt = tuple(n for n in wrt if n in names)
    signature = tuple((env[n].dtype, env[n].shape[-1] == 1) for n in names)
    return _build_vjp(to_canonical_text(expr), names, signature, (grad.dtype, grad.shape[-1] == 1), wrt, value), wrt


@functools.lru_cache(maxsize=1024)
def _build_vjp(
    text: str,
    names: tuple[str, ...],
    signature: tuple[tuple[torch.dtype, bool], ...],
    grad_signature: tuple[torch.dtype, bool],
    wrt: tuple[str, ...],
    value: bool,
) -> Callable[..., Any]:
    def joint(*args: Tensor) -> tuple[Tensor | None, ...]:
        leaves = {n: a.detach().requires_grad_(n in wrt) for n, a in zip(names, args, strict=False)}
        result = compile_expression(text)(leaves)
        inputs = [leaves[n] for n in wrt]
        if result.requires_grad:
            grads = torch.autograd.grad(result, inputs, args[-1], materialize_grads=True)
        else:
            grads = tuple(map(torch.zeros_like, inputs))  # the variables occur in comparisons only
        return (result if value else None, *grads)

    def trace() -> Callable[..., Any]:
        # On the CPU for any device: autograd has one thread for each GPU, and that thread waits here if the backward
        # of an op needs this trace.
        args = [
            torch.ones((_ROWS, 1 if column else _COLUMNS), dtype=dtype, device="cpu")
            for dtype, column in (*signature, grad_signature)
        ]
        return _trace(joint, args, names)

    return run_in_fresh_thread(trace)


def _trace(
    function: Callable[..., tuple[Tensor | None, ...]], args: Sequence[Tensor], variable_names: Sequence[str]
) -> Callable[..., Any]:
    """Build a function (env, grad) from the ATen calls that `function` makes, without unused ones."""
    recorder = _Recorder(args)
    with recorder:
        results = function(*args)
    names = ["None" if r is None else recorder.names[id(r)] for r in results]
    needed_names = set(names)
    lines = []
    for target, inputs, text in reversed(recorder.calls):
        if target in needed_names:
            needed_names.update(inputs)
            lines.insert(0, text)
    wide = next((i for i, a in enumerate(args) if a.shape[1] == _COLUMNS), 0)
    inputs = [recorder.names[id(a)] for a in args]
    read_lines = [f"{t} = env[{name!r}]" for t, name in zip(inputs, variable_names, strict=False)]
    sizes = f"(rows, columns), device = {inputs[wide]}.shape, {inputs[wide]}.device"
    parameters = f"env, {inputs[-1]}"
    return assemble(parameters, [*read_lines, sizes, *lines], f"({', '.join(names)},)", recorder.scope)


class _Recorder(TorchDispatchMode):
    """Records each ATen call below autograd as a line of Python over named tensors."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.names: dict[int, str] = {}
        self.scope: dict[str, Any] = {}
        self.calls: list[tuple[str, set[str], str]] = []  # assigned name, names read, text
        self._alive: list[Tensor] = []  # ids stay unique while the tensors live
        for tensor in inputs:
            self._name(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports Dynamo, which takes more than a second. This mode lives in one thread anyway.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if func in _ALIASES:
            self.names[id(outputs)] = self._operand(args[0], set())
            self._alive.append(outputs)
            return outputs
        names_read: set[str] = set()
        arguments = [self._operand(a, names_read) for a in args]
        arguments += [f"{k}={self._operand(v, names_read)}" for k, v in kwargs.items()]
        symbol = f"{func.__name__.replace('.', '_')}_{len(self.scope)}"
        self.scope[symbol] = func
        call = f"{symbol}({', '.join(arguments)})"
        if isinstance(outputs, Tensor):
            target = self._name(outputs)  # the result of an in-place op already has a name
            self.calls.append((target, names_read, f"{target} = {call}"))
        else:
            targets = [self._name(o) if isinstance(o, Tensor) else "_" for o in outputs]
            text = f"{', '.join(targets)}, = {call}"
            # One line may define several names: any needed name keeps the line.
            self.calls.append((targets[0], names_read, text))
            self.calls.extend((t, {targets[0]}, "pass") for t in targets[1:])
        return outputs

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) not in self.names:
            self.names[id(tensor)] = f"t{len(self._alive)}"
            self._alive.append(tensor)
        return self.names[id(tensor)]

    def _operand(self, value: Any, names_read: set[str]) -> str:
        if isinstance(value, Tensor):
            if id(value) not in self.names:  # a constant, such as a wrapped number
                self.scope[self._name(value)] = value
            names_read.add(self.names[id(value)])
            return self.names[id(value)]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._operand(v, names_read) for v in value)}]"
        if value is not True and value is not False and value in (_ROWS, _COLUMNS):
            return "rows" if value == _ROWS else "columns"
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            symbol = f"constant_{len(self.scope)}"
            self.scope[symbol] = value
            return symbol
        return repr(value)


def run_in_fresh_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a new thread, with torch's thread-local state as at start-up.

    Inside an op, `enable_grad` cannot switch autograd on, and autocast, inference mode or tracing modes may be on.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function()
        except BaseException as error:  # raised again in the caller's thread
            outcome["error"] = error

    thread = threading.Thread(target=run, name="moefx-derivative")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
