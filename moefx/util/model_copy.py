"""`copy_model`: a second module tree around the same parameters and buffers.

`copy.deepcopy` with the tensors in its memo takes about 0.1 ms per module: seconds for tens of thousands of expert
modules. So modules without copying methods of their own, nearly all, are copied here: first an empty object for
each, then the attributes, with references to modules already resolved.
"""

from __future__ import annotations

import copy
import functools
import gc
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import MoefxError

_ATOMIC = frozenset({type(None), bool, int, float, str, type, torch.dtype, torch.device})


def copy_model(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a copy of the module tree that shares all parameters and buffers with the original.

    Bound methods, partials, closures, hooks and instance-level forwards refer to the copied modules. Tensors in plain
    attributes, process groups and device meshes are shared too.

    Returns:
        The copy, and a map from each module of the original to its copy.

    Raises:
        MoefxError: an attribute of a module cannot be copied.
    """
    # The copy allocates about twenty containers per module and no garbage: collection would take longer than the copy.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _copy_model(model)
    finally:
        if was_enabled:
            gc.enable()


def _copy_model(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    modules = list(model.modules())
    memo: dict[int, Any] = {id(t): t for m in modules for t in _iterate_shared(m)}
    plain_modules = [m for m in modules if _copies_by_default(type(m))]
    for module in plain_modules:
        memo[id(module)] = type(module).__new__(type(module))
    # Children first: a module's own copying method may read its descendants.
    for module in reversed(plain_modules):
        attributes = memo[id(module)].__dict__
        for name, value in module.__getstate__().items():
            attributes[name] = value if type(value) in _ATOMIC else _copy_value(value, memo, (model, module, name))
    duplicate = _copy_value(model, memo, (model, model, ""))
    copies = {m: memo[id(m)] for m in modules if id(m) in memo}
    for module in copies.values():
        _rebind_closures(module, memo)
    return duplicate, copies


def _iterate_shared(module: nn.Module) -> Iterator[Any]:
    """Yield tensors and process groups among a module's own attributes."""
    for registered in (module._parameters, module._buffers):
        yield from (t for t in registered.values() if t is not None)
    for value in module.__dict__.values():
        if type(value) not in _ATOMIC and _is_shared(type(value)):
            yield value


@functools.cache
def _is_shared(cls: type) -> bool:
    shared_types: tuple[type, ...] = (torch.Tensor,)
    if torch.distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        shared_types = (torch.Tensor, torch.distributed.ProcessGroup, DeviceMesh)
    return issubclass(cls, shared_types)


@functools.cache
def _copies_by_default(cls: type) -> bool:
    """Return whether deepcopy would make an empty object and copy its `__dict__`."""
    return (
        not hasattr(cls, "__deepcopy__")
        and not hasattr(cls, "__getnewargs__")
        and not hasattr(cls, "__getnewargs_ex__")
        and cls.__reduce__ is object.__reduce__
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__getstate__ is nn.Module.__getstate__
        and cls.__setstate__ is nn.Module.__setstate__
        and not any(base.__dict__.get("__slots__") for base in cls.__mro__)
    )


def _copy_value(value: Any, memo: dict[int, Any], location: tuple[nn.Module, nn.Module, str]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is dict:
        result = memo[id(value)] = {}
        for key, item in value.items():
            new = key if type(key) is str else _copy_value(key, memo, location)
            result[new] = item if type(item) in _ATOMIC else _copy_value(item, memo, location)
        return result
    if type(value) is OrderedDict and not value:
        return memo.setdefault(id(value), OrderedDict())  # hook registries, mostly empty
    try:
        return copy.deepcopy(value, memo)
    except MoefxError:
        raise
    except Exception as error:
        model, module, attribute = location
        names = [name for name, m in model.named_modules() if m is module]
        path = ".".join(filter(None, (names[0], attribute))) or type(model).__name__
        raise MoefxError(
            f"{path} ({type(value).__name__}) cannot be copied: {error}. moefx.compile copies the model: "
            "remove the attribute before compiling, or give its class a __deepcopy__ method"
        ) from error


# -- closures --------------------------------------------------------------------------------------


def _rebind_closures(module: nn.Module, memo: dict[int, Any]) -> None:
    """Rebind a module's instance-level forward and hooks to the copies: deepcopy does not copy functions."""
    for name, value in list(module.__dict__.items()):
        if type(value) is OrderedDict:
            for key, hook in value.items() if name.endswith("hooks") else ():
                value[key] = _rebind(hook, memo)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            module.__dict__[name] = _rebind(value, memo)


def _rebind(value: Any, memo: dict[int, Any]) -> Any:
    """Return `value` with modules of the original replaced by their copies; `value` itself if it refers to none."""
    if not _refers_to_original(value, memo, set()):
        return value
    if isinstance(value, types.MethodType):
        return types.MethodType(_rebind(value.__func__, memo), _rebind(value.__self__, memo))
    if isinstance(value, functools.partial):
        keywords = {name: _rebind(v, memo) for name, v in value.keywords.items()}
        return functools.partial(_rebind(value.func, memo), *(_rebind(v, memo) for v in value.args), **keywords)
    if isinstance(value, types.FunctionType) and id(value) not in memo:
        _rebind_function(value, memo)
    return memo[id(value)]


def _rebind_function(function: types.FunctionType, memo: dict[int, Any]) -> None:
    cells = function.__closure__ or ()
    needs_copy = [_refers_to_original(_read_cell(cell), memo, set()) for cell in cells]
    # Keep unchanged cells: functions may share a variable through them.
    closure = tuple(types.CellType() if is_new else cell for cell, is_new in zip(cells, needs_copy, strict=True))
    result = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    result.__kwdefaults__ = function.__kwdefaults__
    result.__dict__.update(function.__dict__)
    memo[id(function)] = result  # before the cells are set, because a closure may enclose itself
    for cell, original, is_new in zip(closure, cells, needs_copy, strict=True):
        if is_new:
            cell.cell_contents = _rebind(original.cell_contents, memo)


def _refers_to_original(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    if isinstance(value, nn.Module):
        return memo.get(id(value), value) is not value
    parts: tuple[Any, ...] = ()
    if isinstance(value, types.MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType) and id(value) not in seen:
        seen.add(id(value))
        parts = tuple(_read_cell(cell) for cell in value.__closure__ or ())
    return any(_refers_to_original(part, memo, seen) for part in parts)


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an unassigned variable
        return None
