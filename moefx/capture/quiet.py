"""Torch's fake kernels log the errors that they raise; ours go to the user as messages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_NOISY = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    before = _NOISY.disabled
    _NOISY.disabled = True  # `setLevel` would empty the caches of all loggers of the process, twice a capture
    try:
        yield
    finally:
        _NOISY.disabled = before
