"""A thread with the modes of another one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moefx.runtime.surrounding_modes import ThreadModes


class CountingDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ones else result


def run_in_thread(function: Callable[[], Any], modes: ThreadModes | None = None) -> Any:
    """Run a function in a new thread, with some modes."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.nullcontext() if modes is None else modes.applied():
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def read_modes() -> Any:
    saved: Any = (torch.ones(2, requires_grad=True) ** 2).grad_fn
    made = torch.ones(1)
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device(),
        made.device,
        None if made.is_meta else float(made),
        None if saved is None or made.is_meta else float(saved._saved_self.detach().sum()),
    )


@pytest.mark.parametrize(
    "make",
    [
        contextlib.nullcontext,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
        Doubling,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() + 1, lambda t: t.cpu() * 5),
    ],
    ids=["nothing", "no_grad", "autocast", "device", "function mode", "saved tensors"],
)
def test_a_thread_gets_the_modes(make):
    plain = read_modes()
    with make():
        wanted, modes = read_modes(), ThreadModes()
        assert run_in_thread(read_modes, modes) == wanted
        assert run_in_thread(read_modes) == plain  # another thread has none of them
    assert make is contextlib.nullcontext or wanted != plain


def test_dispatch_modes_see_the_ops_of_the_thread():
    counting = CountingDispatch()
    with counting:
        run_in_thread(lambda: torch.ones(2).sin(), ThreadModes())
        run_in_thread(lambda: torch.ones(2).cos())
    assert "aten::sin" in counting.names and "aten::cos" not in counting.names


def test_the_casts_of_other_threads_are_kept():
    """A weight that is used twice has one cast: the gradients of both uses add up in its dtype."""
    linear, x, counting = nn.Linear(4, 4, bias=False), torch.randn(2, 4), CountingDispatch()

    def autocast_again() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.linear(x, torch.randn(4, 4))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x)
        run_in_thread(autocast_again, ThreadModes())
        with counting:
            linear(x)
    assert counting.names.count("aten::_to_copy") == 1  # of x
