"""The kernels compile for every target on any machine (see `aot`), fit, and use the matrix units."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import KernelInterface

from moefx.lowering import triton as package

ROOT = Path(__file__).parents[3]
# Bytes of shared memory that one block may take.
SHARED = {
    "sm80": 163 * 1024,
    "sm90": 227 * 1024,
    "sm100": 227 * 1024,
    "gfx90a": 64 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
TENSOR_MEMORY = 512  # columns, sm100
# Bytes of registers that a thread may spill. A few are kept over a loop without being used in it, as the addresses of
# the epilogue: stored once and loaded once. Accumulators that do not fit take hundreds, at every step.
SPILLED = 64
DTYPES = ["bfloat16", "float16", "float32", "tf32"]
GEMMS = {"up_kernel", "rows_kernel", "act_backward_kernel", "outer_kernel"}
GEMMS |= {f"hopper_{name}" for name in GEMMS}


def compiled(*options: str) -> list[dict[str, Any]]:
    """What `aot` printed, in a process where Triton compiles (see tests/conftest.py)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"{__package__}.aot", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def multiplies_matrices(line: dict[str, Any]) -> bool:
    """Whether a GEMM kernel has the instructions that it should have."""
    target, dtype = line["target"], line["dtype"]
    if target.startswith("gfx"):
        return line["mfma"] > 0
    if dtype == "float32":  # products as exact as torch's default: CUDA's matrix units have none, so FMA
        return True
    if target == "sm90":
        return line["wgmma"] > 0
    return line["wgmma"] + line["mma"] + line["tcgen05"] > 0


def faults(line: dict[str, Any]) -> list[str]:
    if "error" in line:
        return [line["error"]]
    found, target = [], line["target"]
    if line["shared"] > SHARED[target]:
        found.append(f"{line['shared']} bytes of shared memory, there are {SHARED[target]}")
    if line["tensor_memory"] > TENSOR_MEMORY:
        found.append(f"{line['tensor_memory']} columns of tensor memory, there are {TENSOR_MEMORY}")
    if line["stack"] > SPILLED:
        found.append(f"{line['stack']} bytes of registers spilled, accepted are {SPILLED}")
    if line["kernel"] in GEMMS and not multiplies_matrices(line):
        found.append("no matrix instructions")
    return found


def check(lines: list[dict[str, Any]]) -> None:
    what = ("target", "dtype", "case", "choice", "kernel", "launch")
    wrong = [f"{'; '.join(found)}: {[line[name] for name in what]}" for line in lines if (found := faults(line))]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(lines)}:", *wrong])


def kernels(*targets: str) -> set[str]:
    """All that the package has for some targets."""
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    names = {name for module in modules for name, value in vars(module).items() if isinstance(value, KernelInterface)}
    return {n for n in names if n.endswith("_kernel") and ("sm90" in targets or not n.startswith("hopper_"))}


@pytest.mark.slow
def test_kernels_with_biases_compile():
    lines = compiled("--dtypes", "bfloat16", "--targets", "sm90,gfx942", "--cases", "interleaved")
    check(lines)
    assert {line["target"] for line in lines} == {"sm90", "gfx942"}


@pytest.mark.exhaustive
def test_default_configurations():
    """Of one target of each kind; all are in `test_all_kernels_compile`."""
    targets = ("sm90", "sm100", "gfx942")
    lines = compiled("--dtypes", "bfloat16", "--targets", ",".join(targets))
    lines += compiled("--dtypes", "tf32", "--targets", "sm90")
    check(lines)
    assert {line["target"] for line in lines} == set(targets)
    assert {line["kernel"] for line in lines} == kernels(*targets)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", SHARED)
def test_all_kernels_compile(target, dtype):
    lines = compiled("--targets", target, "--dtypes", dtype, "--everything")
    check(lines)
    if target == "sm90" and dtype in ("bfloat16", "float16"):  # which has a better one, or does it in two steps
        expected = kernels(target) - {"act_backward_kernel"}
    else:
        expected = kernels()
    assert {line["kernel"] for line in lines} == expected
