"""Order calls in several streams of a GPU, find the stream of a thread, and recognise the capture of a CUDA graph."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is captured as a CUDA graph."""
    if device.type != "cuda":
        return False
    is_current = torch.cuda.current_device() == device.index
    with contextlib.nullcontext() if is_current else torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def find_accelerator_stream() -> torch.Stream | None:
    """Return the stream of this thread, which determines the device; None if no accelerator is in use."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.get_device_module(device).is_initialized():
        return None
    return torch.accelerator.current_stream()


class LastStream:
    """The stream in which memory was used last."""

    def __init__(self) -> None:
        self._stream: Any = None

    def follow(self, device: torch.device) -> torch.cuda.Stream | None:
        """Let the current stream of the device wait for the last one. Returns it if it is another one."""
        stream, last = torch.cuda.current_stream(device), self._stream
        self._stream = stream
        if last is None or last == stream:
            return None
        stream.wait_stream(last)
        return stream
