"""Find the modules of a model that `torch.compile` compiled, and compile copies in the same way.

A compiled model cannot be copied. So a copy of the model is compiled again with the same compiler and options. torch
stores these in private attributes (checked on 2.11 to 2.15): `dynamo_ctx`, `_compiled_call_impl`, and
`innermost_backend` of their callback.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

RECOMPILE_LIMITS = {"recompile_limit": 1 << 10, "accumulated_recompile_limit": 1 << 12}
# Compilations of copies do not count towards the recompile limit of the user's calls.
ISOLATED = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


class CompiledPart(NamedTuple):
    """How a module was compiled.

    Attributes:
        compiler: the compiler that receives the graphs, with its options.
        name: name of the compiler, for messages.
        dynamic: the argument `dynamic` of `torch.compile`.
        is_wrapped: compiled by `torch.compile(module)`, not by `module.compile()`. For modules of torch such as
            Sequential, Dynamo traces the whole in the first case and the children in the second.
    """

    compiler: Callable[..., Any]
    name: str
    dynamic: bool | None = None
    is_wrapped: bool = False


def find_compiled_parts(model: nn.Module) -> dict[str, CompiledPart]:
    """Return the compiled modules by their names in the model; "" if `torch.compile(model)` returned it."""
    parts = {}
    if hasattr(model, "_orig_mod"):
        parts[""] = _read_part(getattr(model, "dynamo_ctx", None), is_wrapped=True)
    else:
        for name, module in model.named_modules():
            if (call := getattr(module, "_compiled_call_impl", None)) is not None:
                parts[name] = _read_part(inspect.getclosurevars(call).nonlocals.get("self"), is_wrapped=False)
    return {name: part for name, part in parts.items() if part is not None}


def _read_part(context: Any, is_wrapped: bool) -> CompiledPart | None:
    """Read how a module was compiled; None if this version of torch stores it elsewhere."""
    try:
        compiler = torch._dynamo.eval_frame.innermost_backend(context.callback)
    except Exception:
        return None
    backend = getattr(compiler, "compiler_fn", compiler)
    name = getattr(compiler, "compiler_name", None) or getattr(backend, "__name__", str(backend))
    return CompiledPart(compiler, str(name), getattr(compiler, "dynamic", None), is_wrapped)


class CompiledCopies:
    """Compiles each copy of a model at its first call.

    Args:
        parts: the modules to compile, by name.
    """

    def __init__(self, parts: Mapping[str, CompiledPart]):
        self.parts = parts
        self._compiled: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()

    def __call__(self, box: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), allow_recompiles():
            if box not in self._compiled:
                self._compiled[box] = self._compile(box)
            return self._compiled[box](*args, **kwargs)

    def _compile(self, box: nn.Module) -> nn.Module:
        for name, part in self.parts.items():
            options: dict[str, Any] = {"backend": part.compiler, "dynamic": part.dynamic, **ISOLATED}
            if part.is_wrapped:
                return torch.compile(box, **options)  # pyright: ignore[reportReturnType]
            box.get_submodule(name).compile(**options)
        return box


@contextlib.contextmanager
def allow_recompiles() -> Iterator[None]:
    """Raise the recompile limits, and draw the same random numbers as eager code."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(RECOMPILE_LIMITS))
        with contextlib.suppress(ImportError):
            from torch._inductor import config

            stack.enter_context(config.patch(fallback_random=True))
        yield


__all__ = ["ISOLATED", "RECOMPILE_LIMITS", "CompiledCopies", "CompiledPart", "allow_recompiles", "find_compiled_parts"]
