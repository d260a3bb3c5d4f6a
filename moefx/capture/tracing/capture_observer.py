"""What a search learns from a capture while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .tracer import Tracer


class CaptureObserver(Protocol):
    """Sees the calls of modules and the ops of a capture. The capture then records no calls of submodules itself."""

    def wrap_call(self, tracer: Tracer, original: Callable) -> Callable:
        """Return what runs in place of `original`, which is `nn.Module.__call__`."""
        ...

    def log_op(self, func: Any, args: tuple, position: int) -> None:
        """Log an op before it runs. Args: position: the index that its first node will have."""
        ...
