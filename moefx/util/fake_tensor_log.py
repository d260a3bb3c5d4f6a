"""Keep torch's fake kernels from logging the errors that they raise, because moefx reports them itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def without_fake_tensor_errors() -> Iterator[None]:
    """Disable the logger of fake tensors."""
    before = _FAKE_TENSOR_LOG.disabled
    _FAKE_TENSOR_LOG.disabled = True  # `setLevel` would clear the caches of all loggers
    try:
        yield
    finally:
        _FAKE_TENSOR_LOG.disabled = before
