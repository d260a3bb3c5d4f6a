"""Load the model that a command names as `package.module:factory`, and choose inputs for it."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from torch import nn


TARGET_HELP = (
    "package.module:factory, called without arguments; returns an nn.Module, or (nn.Module, inputs) "
    "with inputs a tuple (positional), a dict (keyword) or one tensor"
)


class UsageError(Exception):
    """The command line names something unusable. Printed without a traceback; exit status 2."""


class Target(NamedTuple):
    model: nn.Module
    inputs: tuple | dict | None


def load(spec: str, device: str | None = None) -> Target:
    """Build the model that `package.module:factory` names; the current directory is importable.

    Raises:
        UsageError: names the wrong part of `spec`, or the line where the factory failed.
    """
    import torch
    from torch import nn

    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{spec!r} is not of the form package.module:factory")
    if module_name.endswith(".py") or "/" in module_name:
        name = module_name.removeprefix("./").removesuffix(".py").replace("/", ".")
        raise UsageError(f"{module_name} is a file, expected a module: {name}:{attribute}, where it can be imported")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UsageError(f"no module named {error.name!r} (searched the current directory and sys.path)") from None
        _raise_failure(f"importing {module_name} failed", error)
    except Exception as error:
        _raise_failure(f"importing {module_name} failed", error)
    factory: Any = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise UsageError(
                f"module {module_name!r} has no attribute {attribute!r}{_suggest_attribute(module, attribute)}"
            )
        factory = getattr(factory, part)
    if isinstance(factory, nn.Module):
        made: Any = factory
    elif not callable(factory):
        raise UsageError(f"{spec} is a {type(factory).__name__}, expected a function that returns a model")
    else:
        try:
            with torch.device(device) if device else contextlib.nullcontext():
                made = factory()
        except Exception as error:
            _raise_failure(f"{spec} failed" + (f" on the {device} device" if device else ""), error)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{spec} returned {_describe(made)}, expected an nn.Module or a pair (nn.Module, inputs)")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if inputs is not None and not isinstance(inputs, (tuple, dict)):
        raise UsageError(
            f"{spec} returned inputs of type {type(inputs).__name__}, expected a tuple, a dict or a tensor"
        )
    return Target(model, inputs)


def _raise_failure(action: str, error: BaseException) -> NoReturn:
    """Raise a `UsageError` of one line: the error, with the last line of the user's code in its traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "site-packages" not in frame.filename and frame.filename[0] != "<"
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    raise UsageError(f"{action}: {type(error).__name__}: {error}{where}") from error


def _suggest_attribute(module: Any, name: str) -> str:
    from .errors import nearest

    return nearest(name, (n for n in dir(module) if not n.startswith("_")))


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"


def guess_inputs(model: nn.Module) -> tuple | dict:
    """Choose inputs as `compile` does, with random numbers for tensors that have only a shape."""
    import torch
    from torch.utils._pytree import tree_map_only

    from .capture.search.example_calls import find_example_calls

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    calls = [tree_map_only(torch.Tensor, filled, call) for call in find_example_calls(model, None)]
    for args, kwargs in calls[:-1]:
        with contextlib.suppress(Exception), torch.no_grad():
            model(*args, **kwargs)
            return kwargs or args
    args, kwargs = calls[-1]
    return kwargs or args
