"""Tile sizes and the like, by kernel, target, dtype and shape."""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class Config:
    """How a GEMM kernel of `gemm` is cut and launched.

    Attributes:
        bm, bn, bk: the tile; bn counts columns of the result (of each part, in the up-projection).
        warps, stages: of Triton.
        group: row tiles that run together.
        persistent: programs for each multiprocessor; 0: one program for each tile.
        flatten: persistent loops as one software pipeline.
        descriptors: tensor descriptors (TMA) for weights, and for rows that are not gathered.
        slices: of the pointwise part in `act_backward_kernel`.
        fused: the pointwise part is in the GEMM ("up", "act_backward"); else it has a kernel of its own, and the
            GEMM is one of `rows_kernel`.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    persistent: int = 0
    flatten: bool = False
    descriptors: bool = False
    slices: int = 1
    fused: bool = True


@functools.cache
def target(device: torch.device) -> str:
    """`sm90`, `gfx942`, ..., or `interpreter`."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


_HOPPER = {
    "up": Config(128, 128, 64, warps=8, stages=4, descriptors=True),
    "rows": Config(128, 256, 64, warps=8, stages=3, descriptors=True, persistent=1, flatten=True),
    "act_backward": Config(
        128, 256, 64, warps=8, stages=3, descriptors=True, persistent=1, flatten=True, fused=False
    ),
    "outer": Config(128, 128, 64, warps=4, stages=5, descriptors=True),
}
_PORTABLE = {
    "up": Config(128, 64, 32, warps=8, stages=3),
    "rows": Config(128, 128, 32, warps=8, stages=3),
    "act_backward": Config(128, 64, 32, warps=8, stages=3, slices=2),
    "outer": Config(128, 128, 32, warps=8, stages=3),
}
_FLOAT32 = {
    "up": Config(64, 32, 32, warps=4, stages=2),
    "rows": Config(64, 64, 32, warps=4, stages=2),
    "act_backward": Config(64, 32, 32, warps=4, stages=2),
    "outer": Config(64, 64, 32, warps=4, stages=2),
}


def config(kernel: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Config:
    """For a kernel ("up", "rows", "act_backward", "outer") on [columns of the result, inner size]."""
    if dtype is torch.float32:
        return _FLOAT32[kernel]
    return (_HOPPER if target(device) == "sm90" else _PORTABLE)[kernel]


def candidates(kernel: str, device: torch.device, dtype: torch.dtype) -> list[Config]:
    """What tuning tries."""
    c = Config
    if target(device) != "sm90" or dtype is torch.float32:
        return [config(kernel, device, dtype, ())]
    d = dict(descriptors=True)
    return {
        "up": [
            c(128, 128, 64, 8, 4, **d),
            c(128, 128, 64, 8, 3, **d, persistent=1),
            c(128, 128, 64, 8, 3, **d, persistent=1, flatten=True),
            c(128, 64, 64, 4, 3, **d),
            c(128, 64, 32, 4, 4, **d),
            c(128, 256, 64, 8, 3, **d, fused=False),
            c(128, 256, 64, 8, 4, **d, fused=False),
            c(128, 256, 64, 8, 3, **d, fused=False, persistent=1, flatten=True),
        ],
        "rows": [
            c(128, 256, 64, 8, 3, **d),
            c(128, 256, 64, 8, 3, **d, persistent=1, flatten=True),
            c(128, 256, 64, 8, 4, **d, persistent=1),
            c(128, 128, 64, 4, 3, **d),
            c(128, 256, 64, 8, 4, **d, group=16),
            c(256, 128, 64, 8, 4, **d),
        ],
        "act_backward": [
            c(128, 256, 64, 8, 3, **d, slices=4),
            c(64, 128, 64, 4, 4, **d, slices=2),
            c(64, 256, 64, 4, 3, **d, slices=4),
            c(64, 128, 64, 4, 3, **d, slices=4),
            c(128, 256, 64, 8, 3, **d, fused=False),
            c(128, 256, 64, 8, 4, **d, fused=False),
            c(128, 256, 64, 8, 3, **d, fused=False, persistent=1, flatten=True),
        ],
        "outer": [
            c(128, 256, 64, 8, 5, **d),
            c(128, 256, 64, 8, 6, **d),
            c(128, 256, 64, 8, 7, **d),
            c(128, 256, 32, 8, 7, **d),
            c(128, 256, 32, 8, 9, **d),
            c(128, 128, 64, 4, 5, **d),
            c(128, 128, 64, 4, 6, **d),
            c(128, 128, 64, 8, 7, **d),
            c(256, 128, 64, 8, 5, **d),
            c(256, 128, 64, 8, 6, **d),
            c(128, 256, 64, 8, 5, **d, group=4),
        ],
    }[kernel]
