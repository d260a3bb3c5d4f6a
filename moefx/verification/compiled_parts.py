"""What `torch.compile` made of a model or of modules of one, and copies that are compiled in the same way.

What was compiled cannot be copied. So a copy of the model is compiled again, by what compiled the model, with the same
options. What torch keeps of that is private (checked on 2.11 to 2.15): `dynamo_ctx`, `_compiled_call_impl`, and
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
# What is compiled here does not count among what the user's calls may compile.
ISOLATED = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


class CompiledPart(NamedTuple):
    """How a module was compiled.

    Attributes:
        compiler: what graphs are handed to, with its options.
        name: of it, for messages.
        dynamic: `torch.compile`'s.
        is_wrapped: `torch.compile(module)` did it, not `module.compile()`. Of modules of torch's own, a Sequential say,
            Dynamo takes the whole in one case and their parts in the other.
    """

    compiler: Callable[..., Any]
    name: str
    dynamic: bool | None = None
    is_wrapped: bool = False


def find_compiled_parts(model: nn.Module) -> dict[str, CompiledPart]:
    """The compiled modules by their names in the model, "" for what `torch.compile(model)` returned."""
    parts = {}
    if hasattr(model, "_orig_mod"):
        parts[""] = _read_part(getattr(model, "dynamo_ctx", None), is_wrapped=True)
    else:
        for name, module in model.named_modules():
            if (call := getattr(module, "_compiled_call_impl", None)) is not None:
                parts[name] = _read_part(inspect.getclosurevars(call).nonlocals.get("self"), is_wrapped=False)
    return {name: part for name, part in parts.items() if part is not None}


def _read_part(context: Any, is_wrapped: bool) -> CompiledPart | None:
    """None: another torch keeps something else."""
    try:
        compiler = torch._dynamo.eval_frame.innermost_backend(context.callback)
    except Exception:
        return None
    own = getattr(compiler, "compiler_fn", compiler)
    name = getattr(compiler, "compiler_name", None) or getattr(own, "__name__", str(own))
    return CompiledPart(compiler, str(name), getattr(compiler, "dynamic", None), is_wrapped)


class CompiledCopies:
    """Calls copies of a model as `torch.compile` does, each compiled at its first call.

    Args:
        parts: the modules that are compiled, and how.
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
            how: dict[str, Any] = {"backend": part.compiler, "dynamic": part.dynamic, **ISOLATED}
            if part.is_wrapped:
                return torch.compile(box, **how)  # pyright: ignore[reportReturnType]
            box.get_submodule(name).compile(**how)
        return box


@contextlib.contextmanager
def allow_recompiles() -> Iterator[None]:
    """Compile as often as needed, and draw the random numbers that eager code draws."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(RECOMPILE_LIMITS))
        with contextlib.suppress(ImportError):
            from torch._inductor import config

            stack.enter_context(config.patch(fallback_random=True))
        yield


__all__ = ["ISOLATED", "RECOMPILE_LIMITS", "CompiledCopies", "CompiledPart", "allow_recompiles", "find_compiled_parts"]
