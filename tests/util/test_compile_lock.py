"""One thread compiles at a time; others wait, and raise if that takes too long."""

from __future__ import annotations

import threading

import pytest
import torch

import moefx
from moefx.errors import CompileTimeout
from moefx.util import compile_lock
from moefx.util.compile_lock import holds_compile_lock

from ..blocks import D, Loop
from ..frontends.dynamo import models as graph_models
from ..frontends.dynamo.models import build_model


@pytest.fixture
def busy_thread(monkeypatch):
    """A thread that compiles until the end of the test."""
    monkeypatch.setattr(compile_lock, "_MAX_WAIT", 0.05)
    has_lock, is_done = threading.Event(), threading.Event()

    def hold():
        with compile_lock.compile_lock():
            has_lock.set()
            is_done.wait(60)

    thread = threading.Thread(target=hold, name="trainer")
    thread.start()
    assert has_lock.wait(60)
    yield thread
    is_done.set()
    thread.join()


def test_waiting_has_an_end(busy_thread):
    with pytest.raises(CompileTimeout, match=r"thread 'trainer' .* 'MainThread' waited for 0\.05 s.* repeat this call"):
        moefx.compile(Loop(), torch.randn(24, D))
    assert not holds_compile_lock()


def test_a_graph_raises_instead_of_refusing_its_regions(busy_thread):
    module, x = build_model("dense_masked", num_layers=1), torch.randn(2, 9, graph_models.D, dtype=torch.float64)
    graph = torch.export.export(module, (x,)).module()
    with pytest.raises(CompileTimeout):
        moefx.rewrite_graph(graph, (x,))
