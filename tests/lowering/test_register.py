"""Registered providers: their order, their selection by the environment, and the calls that they run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(setting: str) -> subprocess.CompletedProcess[str]:
    program = """
import torch
from moefx._environment import run_tiny_block
print(sorted(run_tiny_block("cpu", torch.float32)))
"""
    environment = {**os.environ, "MOEFX_PROVIDERS": setting}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


def test_providers_from_the_environment():
    done = run("expert_mlp=reference, combine=reference")
    assert "('expert_mlp', 'reference')" in done.stdout and "('expert_mlp_backward', 'reference')" in done.stdout
    assert "('combine', 'reference')" in done.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("provider", ["grouped_mm", "triton"])
def test_providers_run_only_for_supported_arguments(provider):
    """Run Triton's kernels on GPUs only, and grouped_mm not in float64, which `compile` uses for its comparison."""
    done = run(f"expert_mlp={provider},combine=reference")
    assert "('expert_mlp', 'segments')" in done.stdout and "('combine', 'reference')" in done.stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", ["expert_mlp=fast", "mlp=reference", "expert_mlp"])
def test_providers_that_do_not_exist_are_an_error(setting):
    done = run(setting)
    assert done.returncode and f"MOEFX_PROVIDERS={setting}" in done.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", ["register", "triton", "triton.expert_mlp_call", "torch"])
def test_the_order_of_providers_does_not_depend_on_imports(first):
    program = f"""
import moefx.lowering.{first}, moefx.lowering.register
from moefx.ir.ops.op_definition import registry
print(*registry["expert_mlp"].providers)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *others, last = done.stdout.split()
    assert others[0] == "reference" and last == "triton"
