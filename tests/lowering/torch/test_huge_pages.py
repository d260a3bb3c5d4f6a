"""Buffers on huge pages: only large buffers request them, and only on Linux."""

from __future__ import annotations

import sys

import pytest
import torch

from moefx.lowering.torch import huge_pages
from moefx.lowering.torch.huge_pages import new_buffer


def test_new_buffer_has_dtype_and_device_of_its_model():
    like = torch.zeros(3, dtype=torch.float64)
    assert new_buffer(like, (2, 5)).dtype is torch.float64
    assert new_buffer(like, (2, 5), torch.bfloat16).dtype is torch.bfloat16
    assert new_buffer(like, (2, 5)).shape == (2, 5)
    assert new_buffer(like, (0, 5)).numel() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="madvise")
def test_only_large_buffers_request_huge_pages(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *args: asked.append(args))
    new_buffer(torch.zeros(1), (2**20 - 1,))
    assert not asked
    buffer = new_buffer(torch.zeros(1), (2**20,))
    ((start, length, _),) = asked
    assert start % 4096 == 0
    assert buffer.data_ptr() <= start and start + length == buffer.data_ptr() + buffer.nbytes
    monkeypatch.undo()
    new_buffer(torch.zeros(1), (2**21,)).fill_(1)  # the system accepts the request


def test_other_systems_request_nothing(monkeypatch):
    huge_pages._madvise.cache_clear()
    monkeypatch.setattr(sys, "platform", "win32")
    assert huge_pages._madvise() is None
    huge_pages._madvise.cache_clear()
