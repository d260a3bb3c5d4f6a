"""Keep the default device (`torch.set_default_device`, `with torch.device(...)`) for the user's code only.

moefx creates its own tensors on the CPU.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch

_users: contextvars.ContextVar[torch.device | None] = contextvars.ContextVar("default_device", default=None)


@contextlib.contextmanager
def neutral_device() -> Iterator[None]:
    """Create new tensors on the CPU, except inside `users_device`. May be nested."""
    device = torch.get_default_device()
    if device.type == "cpu":
        yield
        return
    token = _users.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _users.reset(token)


@contextlib.contextmanager
def users_device() -> Iterator[None]:
    """Run the user's code with the user's default device, in a worker thread, too."""
    device = _users.get()
    with torch.device(device) if device is not None else contextlib.nullcontext():
        yield


__all__ = ["neutral_device", "users_device"]
