"""A compiled model under data parallelism: two processes, numbers equal to those of the original on one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from .models import ALL

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and sys.platform == "linux"),
    reason="needs gloo",
)


PLAIN_CASES = ["ddp", "fsdp_after", "fsdp_root_only"]
CASES = {
    "loop": [*PLAIN_CASES, "ddp_before", "fsdp_meta", "fsdp_experts"],
    "stacked": [*PLAIN_CASES, "fsdp_before", "dtensor_experts", "checkpoint"],
    "qwen3": ["ddp", "fsdp_after"],
}


@pytest.mark.parametrize("kind", ALL)
def test_two_processes(kind, tmp_path):
    """All cases of a kind in one pair of processes: starting them takes longer than the cases."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CHECKPOINT": str(tmp_path / "checkpoint")
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.composition.worker"]
    outputs = [tmp_path / f"rank{rank}.txt" for rank in range(2)]
    workers = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            workers.append(
                subprocess.Popen(
                    [*command, str(rank), str(port), kind, *CASES[kind]],
                    cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    try:
        for worker in workers:
            worker.wait(timeout=200)
    finally:
        for worker in workers:
            worker.kill()
    for worker, output in zip(workers, outputs, strict=True):
        text = output.read_text()
        assert worker.returncode == 0, text[-4000:]
        assert text.count("running ") == len(CASES[kind])
