"""The facts for a bug report: versions, devices, and the implementation of each op on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from ._version import __version__


def environment() -> dict[str, dict[str, str]]:
    """Return the sections "versions", "devices", "providers" and "kernels", each with plain strings."""
    return {"versions": versions(), "devices": devices(), "providers": providers(), "kernels": kernels()}


def versions() -> dict[str, str]:
    by_package = {"moefx": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("sympy", "triton", "transformers", "numpy"):
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            by_package[package] = "not installed"
    return by_package


def devices() -> dict[str, str]:
    description = {
        "platform": platform.platform(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use",
        "accelerator": "none",
    }
    if torch.cuda.is_available():
        kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        description["accelerator"] = f"{kind}: {', '.join(names)}"
    return description


def providers() -> dict[str, str]:
    """Find the provider of each op for each device type and dtype, by running a tiny block."""
    by_device = {}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            ran = run_tiny_block(device, dtype)
            by_device[f"{device} {str(dtype).removeprefix('torch.')}"] = ", ".join(
                f"{op}: {provider}" for op, provider in sorted(ran) if not op.endswith("_backward")
            )
    return by_device


def run_tiny_block(device: str, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Run two experts on four tokens. Returns the (op, provider) pairs."""
    from .ir import op_providers
    from .ir.expressions.expert_body import ExpertBody, Gemm
    from .ir.ops.dialect import build_pft, combine, expert_mlp

    gemm = Gemm(num=1, transposed=True)
    body = ExpertBody(up=(gemm,), parts=((0, None, None, 1),), act=("relu", "a0"), down=gemm)
    with torch.device(device):
        x = torch.ones(4, 16, dtype=dtype, requires_grad=True)
        weight = torch.ones(2, 16, 16, dtype=dtype, requires_grad=True)
        ids = torch.tensor([[0], [1], [1], [0]])
    op_providers.reset_counters()
    token_ids, _, offsets, inverse, _ = build_pft(ids, None, None, num_experts=2)
    rows, *_ = expert_mlp(
        x, token_ids, offsets, inverse, None, [weight], [], [weight], [], body=body.to_json(), keep="h"
    )
    combine(rows, None, token_ids, offsets, inverse).sum().backward()
    return list(op_providers.counters())


def kernels() -> dict[str, str]:
    """Describe the tile configuration of each GPU kernel for a layer of medium size, and its origin."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return {"triton": "not used: no GPU, or no Triton"}
    from .lowering.triton import autotune, tile_configs, tuning

    device = torch.device("cuda", torch.cuda.current_device())
    choices = {
        name: tuning.find_nearest_config(name, device, torch.bfloat16, (2048, 2048, 1024))
        for name in tile_configs.KERNELS
    }
    lines = {name: f"{chosen.text}; {why}" for name, (chosen, why, _) in choices.items()}
    kept, seconds = autotune.read_cached_lines(tuning.gpu_name(device)), autotune.seconds_left()
    directory = _without_home(autotune.cache_directory())
    return lines | {"tuned here": f"{len(kept)} shapes ({directory}), {seconds:.0f} s for more in a process"}


def _without_home(directory: Path | None) -> str:
    """Replace the home directory by `~`, so that the report does not name the user."""
    home = Path(os.path.expanduser("~"))
    return (
        f"~/{directory.relative_to(home)}" if directory and home.name and home in directory.parents else str(directory)
    )
