"""Instrument sandboxes to tell which block is running, and to record the inputs of the reference's blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..comparison.routing_tape import Scope
from ..comparison.sandbox import Inputs, copy_detached
from ..runtime.block_forward import BlockForward, find_rewritten_blocks


def watch_original(box: nn.Module, names: Sequence[str], scope: Scope, calls: dict[str, Inputs] | None = None) -> None:
    """Watch the named blocks of a sandbox of the reference. Record the first inputs of each in `calls`."""

    def watched(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            if calls is not None and name not in calls:
                calls[name] = copy_detached((args, kwargs))
            with scope.enter(name):
                return forward(*args, **kwargs)

        return run

    for name in names:
        block = box.get_submodule(name)
        block.forward = watched(name, block.forward)


def watch_compiled(box: nn.Module, scope: Scope) -> dict[str, BlockForward]:
    """Watch the rewritten blocks of a sandbox, and return them."""
    forwards = find_rewritten_blocks(box)
    for name, forward in forwards.items():
        forward.__class__ = WatchedForward
        vars(forward).update(scope=scope, watched_as=name)
        if forward.requests.specialize is not None:
            forward.requests.specialize = _UnobservedSpecialize(forward.requests.specialize)
    return forwards


class WatchedForward(BlockForward):
    """A `BlockForward` that enters its block's scope.

    Replaces the class of an existing object, because lazy specialization looks for the same object.
    """

    scope: Scope
    watched_as: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.scope.enter(self.watched_as):
            return super().__call__(*args, **kwargs)


class _UnobservedSpecialize:
    """Runs a lazy specialization without our dispatch modes, which would record its captures as the model's."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        with _disable_current_modes():
            return self.function(*args)
