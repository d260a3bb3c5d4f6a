"""Record calls that are no ops: submodules, custom autograd functions, and queries of global modes.

`record_calls` patches torch while a block runs.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ...util.tensor_trees import suspend_modes
from ...util.user_code import is_library_file
from ..environment.code_locations import is_user_asking_tensor
from ..environment.device_autocast import get_autocast_dtype
from .capture_result import SubmoduleCall
from .tracer import Tracer

_WITHOUT_MODE = ("range",)  # functions for which torch calls no mode


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    is_own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def record_calls(tracer: Tracer, names: dict[int, str], functions: TorchFunctionMode) -> Iterator[None]:
    """Record module calls, custom autograd functions and mode queries into `tracer`.

    Args:
        names: paths of the submodules to record, by id.
        functions: also gets the functions for which torch calls no mode.
    """
    apply = torch.autograd.Function.__dict__["apply"]
    # Until torch 2.14, `Function.apply` calls this one, even if looked up earlier: `activation = Activation.apply`
    inner_apply = inspect.getattr_static(_SingleLevelFunction, "apply")
    plain_len = len
    observer = tracer.observer

    def call_module(original: Callable) -> Callable:
        if observer is not None:
            return observer.wrap_call(tracer, original)
        return _wrap_module_call(tracer, original, names)

    def length(obj: Any) -> Any:  # the builtin would make the result of `__len__` a plain number
        return obj.__len__() if isinstance(obj, torch.Tensor) else plain_len(obj)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_patched(builtins, "len", length))
        stack.enter_context(_patched(torch.autograd.Function, "apply", _wrap_apply(tracer, apply, apply)))
        stack.enter_context(_patched(_SingleLevelFunction, "apply", _wrap_apply(tracer, apply, inner_apply)))
        stack.enter_context(_patched(type(torch.autograd.Function), "__getattribute__", _wrap_lookup(tracer, apply)))
        stack.enter_context(_patched(nn.Module, "__call__", call_module(nn.Module.__call__)))
        stack.enter_context(_patched(nn.Module, "_apply", _wrap_conversion(tracer, nn.Module._apply)))
        stack.enter_context(_patched(FakeTensor, "__getattr__", _refuse_attribute(tracer)))
        for name in ("is_grad_enabled", "is_inference_mode_enabled"):
            stack.enter_context(_patched(torch, name, _wrap_query(tracer, name, getattr(torch, name))))
        for name in _WITHOUT_MODE:
            stack.enter_context(_patched(torch, name, _wrap_function(tracer, functions, getattr(torch, name))))
        yield


def _wrap_apply(tracer: Tracer, original: Any, unrecorded: Any) -> Any:
    """Wrap `Function.apply` to record an autograd function as one node.

    Args:
        original: `torch.autograd.Function.apply`, which runs the function.
        unrecorded: runs it outside of the capture.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.whole_op_depth or not tracer.is_own_thread():
            return unrecorded.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:  # run without checkpointing
            function, _, *inner = args
            return function(*inner)
        tracer.update_autocast()
        run = original.__get__(None, cls)
        return tracer.record_whole(run, args, kwargs, lambda: run(*args, **kwargs), opaque=True)

    return classmethod(apply)


def _wrap_lookup(tracer: Tracer, apply: Any) -> Any:
    """Wrap the lookup of class attributes of autograd functions, to record calls that no patch of `apply` sees.

    From torch 2.15, `activation = Activation.apply` is a builtin function. Each call of it looks up the attribute
    `setup_context` and then `forward`, without gradients. This gives it a `forward` that records the whole function.

    Args:
        apply: `torch.autograd.Function.apply`, which runs the function.
    """
    no_setup_context = _SingleLevelFunction.setup_context
    called: Any = None
    has_gradients = True

    def look_up(cls: Any, name: str) -> Any:
        nonlocal called, has_gradients
        if name not in ("setup_context", "forward") or tracer.whole_op_depth or not tracer.is_own_thread():
            return type.__getattribute__(cls, name)
        if name == "setup_context":
            called, has_gradients = cls, torch.is_grad_enabled()
            return no_setup_context  # the one of `cls` runs inside of the recorded function
        if called is not cls:
            return type.__getattribute__(cls, name)
        called = None
        run = _wrap_apply(tracer, apply, apply).__get__(None, cls)
        return functools.partial(_run_with_gradients, run, has_gradients)

    return look_up


def _run_with_gradients(run: Callable, has_gradients: bool, ctx: Any, *args: Any) -> Any:
    """Return the results of an autograd function inside of another one, and pass on which of them have gradients."""
    with torch.set_grad_enabled(has_gradients):
        out = run(*args)
    with suspend_modes(), torch.DisableTorchFunction():
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        ctx.mark_dirty(*[t for t in results if any(t is arg for arg in args)])
        ctx.mark_non_differentiable(*[t for t in results if not t.requires_grad])
    return out


def _wrap_module_call(tracer: Tracer, original: Callable, names: dict[int, str]) -> Callable:
    """Wrap `nn.Module.__call__` to record the calls of the named modules."""
    depth = 0

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        fqn = names.get(id(module))
        if fqn is None or tracer.whole_op_depth or not tracer.is_own_thread():
            return original(module, *args, **kwargs)
        with suspend_modes(), torch.DisableTorchFunction():
            node_args, node_kwargs = _map_tensors((args, kwargs), tracer.node_of)
        record = SubmoduleCall(fqn, node_args, node_kwargs, None, len(tracer.nodes), 0, depth, get_autocast_dtype())
        depth += 1
        try:
            out = original(module, *args, **kwargs)
        finally:
            depth -= 1
        with suspend_modes(), torch.DisableTorchFunction():
            record.out = _map_tensors(_open_dataclass(out), tracer.node_of)
        record.stop = len(tracer.nodes)
        tracer.calls.append(record)
        return out

    return call


def _wrap_conversion(tracer: Tracer, original: Callable) -> Callable:
    """Wrap `nn.Module._apply`, so that `self.lin.to(dtype)` in a forward does not swap abstract parameters."""

    def apply(module: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
        if not tracer.is_own_thread():
            return original(module, fn, recurse)
        for part in module.modules() if recurse else [module]:
            for tensors in (part._parameters, part._buffers):
                for key, t in tensors.items():
                    if t is not None and tracer.check_conversion(t, converted := fn(t.detach())):
                        tensors[key] = converted
        return module

    return apply


def _refuse_attribute(tracer: Tracer) -> Any:
    """Make `__getattr__` of fake tensors, which refuses a program that asks a tensor for an attribute of its own."""

    def get_missing(t: torch.Tensor, name: str) -> Any:
        if tracer.is_own_thread() and not name.startswith("__") and is_user_asking_tensor():
            tracer.refuse(
                f"the block reads the attribute `{name}` of a tensor: a capture does not have it, and a rewrite would "
                "not see a later value",
                f"keep it in a module, as self.{name}",
            )
        raise AttributeError(f"'{type(t).__name__}' object has no attribute '{name}'")

    return get_missing


def _wrap_query(tracer: Tracer, name: str, fn: Callable) -> Callable:
    """Wrap a query of a global mode, so that a read by the program is noted under `name`."""

    def query(*args: Any, **kwargs: Any) -> Any:
        if tracer.is_own_thread() and not is_library_file(sys._getframe(1).f_code.co_filename):
            tracer.modes_read.add(name)
        return fn(*args, **kwargs)

    return query


def _wrap_function(tracer: Tracer, functions: TorchFunctionMode, fn: Callable) -> Callable:
    """Wrap a function for which torch calls no mode, so that `functions` gets its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if tracer.whole_op_depth or not tracer.is_own_thread():
            return fn(*args, **kwargs)
        return functions.__torch_function__(fn, (), args, kwargs)

    return call


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
