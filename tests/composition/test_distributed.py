"""Compiled models under data parallelism: two processes compute the results of the original on one."""

from __future__ import annotations

import sys

import pytest
import torch.distributed

from ..distributed.launch import torchrun
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ALL)
def test_two_processes(kind, tmp_path):
    """Run all cases of a kind in one pair of processes: starting them takes longer than the cases."""
    command = ["-m", "tests.composition.worker", kind, *CASES[kind]]
    done = torchrun(*command, ranks=2, environment={"CHECKPOINT": str(tmp_path / "checkpoint")})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("running") == 2 * len(CASES[kind])
