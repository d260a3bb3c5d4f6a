"""Record calls that are no ops: submodules, custom autograd functions, and queries of global modes.

`record_calls` patches torch while a block runs.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ..util.user_code import is_library_file
from .capture_result import SubmoduleCall
from .device_autocast import get_autocast_dtype
from .tensor_trees import suspend_modes
from .tracer import Tracer

_WITHOUT_MODE = ("range",)  # functions for which torch calls no mode


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    had = name in vars(owner)
    old = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def record_calls(tracer: Tracer, names: dict[int, str], functions: TorchFunctionMode) -> Iterator[None]:
    """Record module calls, custom autograd functions and mode queries into `tracer`.

    Args:
        names: paths of the submodules to record, by id.
        functions: also gets the functions for which torch calls no mode.
    """
    original_apply = torch.autograd.Function.__dict__["apply"]
    original_call, original_move = nn.Module.__call__, nn.Module._apply

    def wrap_apply(unrecorded: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if tracer.whole_op_depth or not tracer.is_own_thread():
                return unrecorded.__get__(None, cls)(*args, **kwargs)
            if cls is CheckpointFunction:  # run without checkpointing
                function, _, *inner = args
                return function(*inner)
            tracer.notice_autocast()
            run = original_apply.__get__(None, cls)
            return tracer.record_whole(run, args, kwargs, lambda: run(*args, **kwargs), opaque=True)

        return classmethod(apply)

    depth = 0

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        fqn = names.get(id(module))
        if fqn is None or tracer.whole_op_depth or not tracer.is_own_thread():
            return original_call(module, *args, **kwargs)
        with suspend_modes(), torch.DisableTorchFunction():
            node_args, node_kwargs = _map_tensors((args, kwargs), tracer.node_of)
        record = SubmoduleCall(fqn, node_args, node_kwargs, None, len(tracer.nodes), 0, depth, get_autocast_dtype())
        depth += 1
        try:
            out = original_call(module, *args, **kwargs)
        finally:
            depth -= 1
        with suspend_modes(), torch.DisableTorchFunction():
            record.out = _map_tensors(_open_dataclass(out), tracer.node_of)
        record.stop = len(tracer.nodes)
        tracer.calls.append(record)
        return out

    def wrap_query(name: str, fn: Callable) -> Callable:
        def query(*args: Any, **kwargs: Any) -> Any:
            if tracer.is_own_thread() and not is_library_file(sys._getframe(1).f_code.co_filename):
                tracer.modes_read.add(name)
            return fn(*args, **kwargs)

        return query

    def move(module: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
        """Run `self.lin.to(dtype)` in a forward, where torch would swap abstract parameters."""
        if not tracer.is_own_thread():
            return original_move(module, fn, recurse)
        for part in module.modules() if recurse else [module]:
            for tensors in (part._parameters, part._buffers):
                for key, t in tensors.items():
                    if t is not None and tracer.refuses_conversion(t, moved := fn(t.detach())):
                        tensors[key] = moved
        return module

    def wrap_function(fn: Callable) -> Callable:
        def called(*args: Any, **kwargs: Any) -> Any:
            if tracer.whole_op_depth or not tracer.is_own_thread():
                return fn(*args, **kwargs)
            return functions.__torch_function__(fn, (), args, kwargs)

        return called

    def length(thing: Any) -> Any:  # the builtin would make the result of `__len__` a plain number
        return thing.__len__() if isinstance(thing, torch.Tensor) else plain_len(thing)

    plain_len = len
    with contextlib.ExitStack() as stack:
        stack.enter_context(_patched(builtins, "len", length))
        stack.enter_context(_patched(torch.autograd.Function, "apply", wrap_apply(original_apply)))
        # `Function.apply` calls this one, even if it was looked up earlier: `activation = Activation.apply`
        inner_apply = inspect.getattr_static(_SingleLevelFunction, "apply")
        stack.enter_context(_patched(_SingleLevelFunction, "apply", wrap_apply(inner_apply)))
        stack.enter_context(_patched(nn.Module, "__call__", call))
        stack.enter_context(_patched(nn.Module, "_apply", move))
        for name in ("is_grad_enabled", "is_inference_mode_enabled"):
            stack.enter_context(_patched(torch, name, wrap_query(name, getattr(torch, name))))
        for name in _WITHOUT_MODE:
            stack.enter_context(_patched(torch, name, wrap_function(getattr(torch, name))))
        yield


def _map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Do the same as `pytree.tree_map_only`, faster for tensors and tuples."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if type(tree) is tuple:
        return tuple([_map_tensors(x, fn) for x in tree])
    if tree is None or (type(tree) is dict and not tree):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # without a constructor that inspects its arguments
        return tuple.__new__(type(tree), [_map_tensors(x, fn) for x in tree])
    return pytree.tree_map_only(torch.Tensor, fn, tree)


def _open_dataclass(out: Any) -> Any:
    """Return a dataclass as a dict of its fields, with keys such as `.logits`."""
    if dataclasses.is_dataclass(out) and not isinstance(out, (type, dict)):
        return {f".{f.name}": _open_dataclass(getattr(out, f.name)) for f in dataclasses.fields(out)}
    return out
