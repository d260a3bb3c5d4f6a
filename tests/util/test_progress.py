"""Progress lines on standard error during long calls."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import moefx
from moefx.util import progress


def test_a_long_call_reports_progress(capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    with progress.report_progress("moefx.compile"):
        progress.announce("proving layers.0")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("moefx.compile: 0 s so far, proving layers.0") for line in lines)
    assert len(lines) <= 6  # the interval doubles


def test_a_short_call_prints_nothing_and_leaves_no_thread(capsys):
    before = threading.active_count()
    with pytest.raises(ValueError), progress.report_progress("moefx.compile"):
        raise ValueError
    assert threading.active_count() == before
    assert not capsys.readouterr().err


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    monkeypatch.setenv("RANK", "3")
    with progress.report_progress("moefx.compile"):
        time.sleep(0.05)
    assert not capsys.readouterr().err


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)


def test_compile_names_its_blocks(capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    moefx.compile(Slow(4, 4), torch.randn(3, 4), strict=False)  # a single tensor as positional argument
    assert "moefx.compile: 0 s so far, running Slow on abstract tensors" in capsys.readouterr().err
