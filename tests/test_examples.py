"""The examples run, and original and compiled model train alike."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


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


@pytest.mark.timeout(900)  # half a minute alone; several times as long beside other processes on few cores
@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="needs gloo")
def test_train_expert_parallel():
    """As printed in the README, on four processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, "examples/train_expert_parallel.py", "--steps", "4", "--dispatch", "halo"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all_to_all_rows" in done.stdout and "moefx.verify: passed" in done.stdout and "step 3" in done.stdout
