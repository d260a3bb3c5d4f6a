"""The pointwise part of an expert as formulas: aten -> SymPy, value and derivatives.

No activation is named here. The expression runs once on small tensors, under torch's autograd and with torch's own
decompositions, while a dispatch mode writes down as formulas what the calls give for which there are `rules`.
So the derivatives are those of torch, at the kinks and for infinities too: relu has none at 0, clamp passes it at
its bounds, hardtanh does not, equal operands of maximum share it. Value and derivatives share their subexpressions.

Everything is computed in float32; casts in the expression are left out, which rounds less often than the original.
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

from ..ir.pointwise_derivative import run_in_fresh_thread
from ..ir.pointwise_expression import Expr, compile_expression, list_variables, to_canonical_text
from .formula import to_number
from .rules import RULES, Underivable, as_number


class _NoRule(Underivable):
    """There is neither a rule nor a decomposition for an op."""


def derive_formula(expr: Expr, names: Sequence[str] | None = None) -> Any:
    """The SymPy expression of an expression of the variables `names`, which become symbols.

    Raises:
        Underivable: there is no rule for something in it.
    """
    return _formulas(to_canonical_text(expr), tuple(list_variables(expr) if names is None else names), None, ())[0]


def derive_gradients(expr: Expr, grad: str, wrt: Sequence[str], ones: Sequence[str] = ()) -> list[Any]:
    """[expr, grad * d expr / d wrt[0], ...], the variables named in `ones` (and `grad`, if it is) being 1."""
    others = [name for name in list_variables(expr) if name not in wrt]
    value, *gradients = _formulas(to_canonical_text(expr), (*wrt, *others), grad, tuple(ones))
    return [value, *gradients[: len(wrt)]]


@functools.lru_cache(maxsize=1024)
def _formulas(text: str, names: tuple[str, ...], grad: str | None, ones: tuple[str, ...]) -> tuple[Any, ...]:
    """The value, and with `grad` its product with the derivative by each of the names."""

    def read() -> tuple[Any, ...]:
        try:
            return _read(text, names, grad, ones, contextlib.nullcontext())
        except _NoRule as reason:
            # Perhaps a derivative without decomposition: then decompose what it is the derivative of.
            try:
                return _read(text, names, grad, ones, _Decomposed())
            except Underivable:
                raise reason from None

    return run_in_fresh_thread(read)


def _read(text: str, names: Sequence[str], grad: str | None, ones: Sequence[str], above: Any) -> tuple[Any, ...]:
    reader = _Reader()
    try:
        with reader, above:
            inputs = [reader.input(S.One if name in ones else Symbol(name)) for name in names]
            value = compile_expression(text)(dict(zip(names, inputs, strict=True)))
            if not isinstance(value, torch.Tensor):
                raise Underivable(f"{value} instead of an expression")
            if not value.dtype.is_floating_point:
                raise Underivable(f"a result in {value.dtype}")
            gradients: Sequence[Any] = ()
            if grad is not None:
                gradients = [None] * len(names)
                if value.requires_grad:
                    seed = reader.input(S.One if grad in ones else Symbol(grad)).to(value.dtype)
                    gradients = torch.autograd.grad(value, inputs, seed, allow_unused=True)
        return tuple(S.Zero if t is None else as_number(reader.value_of(t)) for t in (value, *gradients))
    except Underivable:
        raise
    except Exception as error:  # whatever torch raises for what it does not take
        reason = (str(error).splitlines() or [""])[0]
        raise Underivable(f"something that torch cannot run ({type(error).__name__}: {reason})") from error


class _Reader(TorchDispatchMode):
    """Runs ATen calls on small tensors, and keeps for each tensor the SymPy expression of its elements.

    What has no rule is taken apart by torch's own decomposition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Any] = {}
        self.known: dict[Any, Any] = {}
        self.alive: list[torch.Tensor] = []  # ids stay unique while the tensors live
        self.within: list[str] = []  # what is being decomposed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `ir.derivative`

    def input(self, value: Any) -> torch.Tensor:
        # float32 whatever the call computes in: no promotions to undo.
        tensor = torch.ones((2, 3), dtype=torch.float32, device="cpu", requires_grad=True)
        return self._keep(tensor, value)

    def _keep(self, tensor: torch.Tensor, value: Any) -> torch.Tensor:
        # The same object for equal expressions: it takes no time to see that they are.
        self.values[id(tensor)] = self.known.setdefault(value, value)
        self.alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _base_name(func)
        if name not in RULES:
            parts = decomposition_table.get(func, func.decompose)
            self.within.append(name)
            with self:
                output = parts(*args, **kwargs)
            if output is NotImplemented:
                raise _NoRule(f"{' in '.join(dict.fromkeys([name, self.within[0]]))}, for which there is no rule")
            self.within.pop()
            return output
        output = func(*args, **kwargs)
        try:
            value = RULES[name](*map(self.value_of, args), **{k: self.value_of(v) for k, v in kwargs.items()})
        except (TypeError, AttributeError) as error:
            raise Underivable(f"{name} with arguments {args[1:]} {kwargs}") from error
        return self._keep(output, value)

    def value_of(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            # Unknown is only a constant that torch made from a number.
            known = self.values.get(id(argument))
            return to_number(argument.item()) if known is None and id(argument) not in self.values else known
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return to_number(argument)
        return argument


class _Decomposed(TorchFunctionMode):
    """Decomposes above autograd, which then differentiates the parts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and _base_name(func) not in RULES:
            func = decomposition_table.get(func, func)
        return func(*args, **(kwargs or {}))


def _base_name(op: Any) -> str:
    """`silu` of aten::silu.out."""
    return op._schema.name.rpartition("::")[2]
