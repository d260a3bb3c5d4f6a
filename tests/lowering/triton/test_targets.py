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
# Bytes of shared memory of one block.
SHARED = {
    "sm80": 163 * 1024,
    "sm90": 227 * 1024,
    "sm100": 227 * 1024,
    "gfx90a": 64 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
TENSOR_MEMORY = 512  # columns, sm100
# Bytes of registers that a thread may spill. Values such as epilogue addresses, unused in a loop, are stored and loaded
# once. Accumulators that do not fit take hundreds of bytes in each step.
SPILLED = 64
DTYPES = ["bfloat16", "float16", "float32", "tf32"]
GEMMS = {"up_kernel", "rows_kernel", "act_backward_kernel", "outer_kernel"}
GEMMS |= {f"hopper_{name}" for name in GEMMS}


def run_aot(*options: str) -> list[dict[str, Any]]:
    """Return the output of `aot`, from a process in which Triton compiles (see tests/conftest.py)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"{__package__}.aot", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def uses_matrix_units(line: dict[str, Any]) -> bool:
    """Return whether a GEMM kernel has the expected instructions."""
    target, dtype = line["target"], line["dtype"]
    if target.startswith("gfx"):
        return line["mfma"] > 0
    if dtype == "float32":  # CUDA's matrix units lack products as exact as torch's default, which use FMA
        return True
    if target == "sm90":
        return line["wgmma"] > 0
    return line["wgmma"] + line["mma"] + line["tcgen05"] > 0


def list_faults(line: dict[str, Any]) -> list[str]:
    if "error" in line:
        return [line["error"]]
    found, target = [], line["target"]
    if line["shared"] > SHARED[target]:
        found.append(f"{line['shared']} bytes of shared memory, there are {SHARED[target]}")
    if line["tensor_memory"] > TENSOR_MEMORY:
        found.append(f"{line['tensor_memory']} columns of tensor memory, there are {TENSOR_MEMORY}")
    if line["stack"] > SPILLED:
        found.append(f"{line['stack']} bytes of registers spilled, accepted are {SPILLED}")
    if line["kernel"] in GEMMS and not uses_matrix_units(line):
        found.append("no matrix instructions")
    return found


def check(lines: list[dict[str, Any]]) -> None:
    fields = ("target", "dtype", "case", "choice", "kernel", "launch")
    wrong = [f"{'; '.join(found)}: {[line[name] for name in fields]}" for line in lines if (found := list_faults(line))]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(lines)}:", *wrong])


def list_kernels(*targets: str) -> set[str]:
    """Return the names of all kernels of the package for some targets."""
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    names = {name for module in modules for name, value in vars(module).items() if isinstance(value, KernelInterface)}
    return {n for n in names if n.endswith("_kernel") and ("sm90" in targets or not n.startswith("hopper_"))}


@pytest.mark.slow
def test_kernels_with_biases_compile():
    lines = run_aot("--dtypes", "bfloat16", "--targets", "sm90,gfx942", "--cases", "interleaved")
    check(lines)
    assert {line["target"] for line in lines} == {"sm90", "gfx942"}


@pytest.mark.exhaustive
def test_default_configurations():
    """Compile for one target of each kind; `test_all_kernels_compile` covers all."""
    targets = ("sm90", "sm100", "gfx942")
    lines = run_aot("--dtypes", "bfloat16", "--targets", ",".join(targets))
    lines += run_aot("--dtypes", "tf32", "--targets", "sm90")
    check(lines)
    assert {line["target"] for line in lines} == set(targets)
    assert {line["kernel"] for line in lines} == list_kernels(*targets)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", SHARED)
def test_all_kernels_compile(target, dtype):
    lines = run_aot("--targets", target, "--dtypes", dtype, "--everything")
    check(lines)
    if target == "sm90" and dtype in ("bfloat16", "float16"):  # these have a better kernel, or use two steps
        expected = list_kernels(target) - {"act_backward_kernel"}
    else:
        expected = list_kernels()
    assert {line["kernel"] for line in lines} == expected
