"""The examples run, and the original and the compiled model train equally."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch

from .distributed.launch import torchrun


def test_the_deepseek_example_trains_rewritten(capsys):
    example = importlib.import_module("examples.train_deepseek_style")
    assert example.main(steps=4) < 1e-9
    printed = capsys.readouterr().out
    assert "expert_mlp" in printed and "moefx.verify: passed" in printed


@pytest.mark.hf
def test_the_qwen3_example_trains_rewritten(capsys):
    pytest.importorskip("transformers", minversion="5.0")
    example = importlib.import_module("examples.qwen3_moe")
    assert example.main(steps=4) < 1e-9
    printed = capsys.readouterr().out
    assert "expert_mlp" in printed and "moefx.verify: passed" in printed


@pytest.mark.timeout(900)  # half a minute alone, several minutes on a busy machine
@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="needs gloo")
def test_train_expert_parallel():
    """Train on two processes, first with the experts over both, then over one."""
    command = ["examples/train_expert_parallel.py", "--steps", "4"]
    done = torchrun(*command, ranks=2, timeout=850, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all_to_all_rows" in done.stdout and "moefx.verify: passed" in done.stdout and "step 3" in done.stdout


@pytest.mark.hf
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="needs gloo")
@pytest.mark.parametrize(
    "runs",
    [
        [(["--ep", "2"], 2, 2)],
        pytest.param([(["--pp", "2", "--ep", "2"], 4, 4), (["--ep", "4"], 4, 6)], marks=pytest.mark.exhaustive),
    ],
    ids=["experts over two ranks", "a pipeline, then none"],
)
def test_one_file_trains_on_every_mesh(runs, tmp_path, monkeypatch):
    """Train in one process, and over ranks, each run from the checkpoint of the one before: the losses agree."""
    pytest.importorskip("transformers", minversion="5.0")
    example = importlib.import_module("examples.train_qwen3_moe")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    *_, (_, _, total) = runs
    alone, found = example.main(example.parse_arguments(["--steps", str(total)])), {}
    for layout, ranks, steps in runs:
        command = ["examples/train_qwen3_moe.py", *layout, "--steps", str(steps), "--save-every", "2"]
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        done = torchrun(*command, "--folder", str(tmp_path), ranks=ranks, timeout=400, environment=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        seen = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", done.stdout)}
        assert min(seen) == len(found) and max(seen) == steps - 1  # goes on with the last step
        found |= seen
    assert [found[step] for step in range(total)] == pytest.approx(alone, abs=1e-3)
    assert (tmp_path / "model" / "config.json").exists()
