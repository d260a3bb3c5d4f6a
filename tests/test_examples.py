"""The examples run, and original and compiled model train alike."""

from __future__ import annotations

import importlib

import pytest


def test_train_deepseek_style(capsys):
    example = importlib.import_module("examples.train_deepseek_style")
    assert example.main(steps=4) < 1e-9
    printed = capsys.readouterr().out
    assert "expert_mlp" in printed and "moefx.verify: passed" in printed


@pytest.mark.hf
def test_qwen3_moe(capsys):
    pytest.importorskip("transformers", minversion="5.0")
    example = importlib.import_module("examples.qwen3_moe")
    assert example.main(steps=4) < 1e-9
    printed = capsys.readouterr().out
    assert "expert_mlp" in printed and "moefx.verify: passed" in printed
