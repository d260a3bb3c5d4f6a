"""Derive SymPy formulas of an expert's pointwise part, and of its gradients, from ATen calls.

No activation is a special case. The expression runs once on small tensors, under torch's autograd and
decompositions. A dispatch mode translates each call by `rules`. So the derivatives are torch's, also at kinks and
infinities: relu has gradient 0 at 0, clamp passes the gradient at its bounds, hardtanh does not, and equal operands of
maximum share it. Value and derivatives share subexpressions.

All formulas compute in float32. Casts are dropped, so they round less often than the original.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from sympy import S, Symbol
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.expressions.pointwise_derivative import run_in_fresh_thread
from ..ir.expressions.pointwise_expression import Expr, compile_expression, list_variables, to_canonical_text
from .formula import to_number
from .rules import RULES, Underivable, as_number


class _NoRule(Underivable):
    """An op has neither a rule nor a decomposition."""


def derive_formula(expr: Expr, names: Sequence[str] | None = None) -> Any:
    """Derive the SymPy formula of an expression.

    Args:
        names: the variables in order, as symbols of the formula; by default the variables of the expression.

    Raises:
        Underivable: an op of the expression has no rule.
    """
    return _derive_formulas(to_canonical_text(expr), tuple(list_variables(expr) if names is None else names), None, ())[
        0
    ]


def derive_gradients(expr: Expr, grad: str, wrt: Sequence[str], ones: Sequence[str] = ()) -> list[Any]:
    """Derive [expr, grad * d expr / d wrt[0], ...].

    Args:
        grad: symbol of the incoming gradient.
        wrt: variables to differentiate by.
        ones: variables, or `grad`, to replace by 1.

    Raises:
        Underivable: an op of the expression has no rule.
    """
    other_names = [name for name in list_variables(expr) if name not in wrt]
    value, *gradients = _derive_formulas(to_canonical_text(expr), (*wrt, *other_names), grad, tuple(ones))
    return [value, *gradients[: len(wrt)]]


@functools.lru_cache(maxsize=1024)
def _derive_formulas(text: str, names: tuple[str, ...], grad: str | None, ones: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the formula of the value and, if `grad` is given, its vector-Jacobian product for each name."""

    def trace() -> tuple[Any, ...]:
        try:
            return _trace_formulas(text, names, grad, ones, contextlib.nullcontext())
        except _NoRule as reason:
            # The op may be a derivative without a decomposition: decompose the forward op instead.
            try:
                return _trace_formulas(text, names, grad, ones, _DecomposeMode())
            except Underivable:
                raise reason from None

    return run_in_fresh_thread(trace)


def _trace_formulas(
    text: str, names: Sequence[str], grad: str | None, ones: Sequence[str], outer_mode: Any
) -> tuple[Any, ...]:
    tracer = _FormulaTracer()
    try:
        with tracer, outer_mode:
            inputs = [tracer.input(S.One if name in ones else Symbol(name)) for name in names]
            value = compile_expression(text)(dict(zip(names, inputs, strict=True)))
            if not isinstance(value, torch.Tensor):
                raise Underivable(f"{value} instead of an expression")
            if not value.dtype.is_floating_point:
                raise Underivable(f"a result in {value.dtype}")
            gradients: Sequence[Any] = ()
            if grad is not None:
                gradients = [None] * len(names)
                if value.requires_grad:
                    seed = tracer.input(S.One if grad in ones else Symbol(grad)).to(value.dtype)
                    gradients = torch.autograd.grad(value, inputs, seed, allow_unused=True)
        return tuple(S.Zero if t is None else as_number(tracer.get_formula(t)) for t in (value, *gradients))
    except Underivable:
        raise
    except Exception as error:  # torch raises many kinds for unsupported arguments
        reason = (str(error).splitlines() or [""])[0]
        raise Underivable(f"something that torch cannot run ({type(error).__name__}: {reason})") from error


class _FormulaTracer(TorchDispatchMode):
    """Runs ATen calls on small tensors and records each tensor's formula.

    Ops without a rule are decomposed by torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Any] = {}
        self.known: dict[Any, Any] = {}
        self.alive: list[torch.Tensor] = []  # ids stay unique while the tensors live
        self.decomposing: list[str] = []  # names of the ops that are being decomposed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `ir.expressions.pointwise_derivative`

    def input(self, value: Any) -> torch.Tensor:
        # Always float32, so that no type promotion occurs.
        tensor = torch.ones((2, 3), dtype=torch.float32, device="cpu", requires_grad=True)
        return self._record(tensor, value)

    def _record(self, tensor: torch.Tensor, value: Any) -> torch.Tensor:
        # Equal formulas become the same object, which makes later comparisons fast.
        self.values[id(tensor)] = self.known.setdefault(value, value)
        self.alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _base_name(func)
        if name not in RULES:
            parts = decomposition_table.get(func, func.decompose)
            self.decomposing.append(name)
            with self:
                output = parts(*args, **kwargs)
            if output is NotImplemented:
                raise _NoRule(f"{' in '.join(dict.fromkeys([name, self.decomposing[0]]))}, which has no rule")
            self.decomposing.pop()
            return output
        output = func(*args, **kwargs)
        try:
            value = RULES[name](*map(self.get_formula, args), **{k: self.get_formula(v) for k, v in kwargs.items()})
        except (TypeError, AttributeError) as error:
            raise Underivable(f"{name} with arguments {args[1:]} {kwargs}") from error
        return self._record(output, value)

    def get_formula(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            # An unknown tensor is a constant that torch made from a number.
            value = self.values.get(id(argument))
            return to_number(argument.item()) if value is None and id(argument) not in self.values else value
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return to_number(argument)
        return argument


class _DecomposeMode(TorchFunctionMode):
    """Decomposes ops above autograd, which then differentiates the parts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and _base_name(func) not in RULES:
            func = decomposition_table.get(func, func)
        return func(*args, **(kwargs or {}))


def _base_name(op: Any) -> str:
    """Return the name without namespace and overload: `silu` for aten::silu.out."""
    return op._schema.name.rpartition("::")[2]
