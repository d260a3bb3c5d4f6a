"""Tile configurations of the GEMMs: defaults and candidates. `tuning` chooses among them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import torch
import triton

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and launch options of a GEMM kernel.

    Attributes:
        bm, bn, bk: tile sizes. bn counts columns of the result (in the up-projection, of each part).
        warps, stages: Triton's `num_warps` and `num_stages`.
        group: row tiles that run together.
        persistent: programs for each multiprocessor; 0: one program for each tile.
        flatten: run persistent loops as one software pipeline.
        descriptors: use tensor descriptors (TMA) for weights, and for rows that are not gathered.
        store_descriptors: use them also to store full tiles of rows; not in `act_backward_kernel`.
        slices: slices of the pointwise part in `act_backward_kernel`.
        fused: run the pointwise part in the GEMM ("up", "act_backward"). Otherwise it has its own kernel, and the GEMM
            is `rows_kernel`.
        gather_first: gather the rows into a buffer before the GEMM ("grad_up", "grad_down"; "up" and "act_backward" if
            they are not fused, or have roles). "grad_down" reuses the buffer of "act_backward".
        roles: use the kernels of `hopper` if they support the tensors; their warps have roles: load, multiply, or
            process the product. They use only stages, group, fused, gather_first and, with a pointwise part, bn
            (128 or 256 columns of the product).
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
    store_descriptors: bool = False
    slices: int = 1
    fused: bool = True
    gather_first: bool = False
    roles: bool = False

    @property
    def text(self) -> str:
        """The tile, and the options that differ from their defaults."""
        options = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)[5:]}
        texts = [name if v is True else f"{name}={int(v)}" for name, (v, default) in options.items() if v != default]
        return " ".join([f"{self.bm}x{self.bn}x{self.bk} warps={self.warps} stages={self.stages}", *texts])


# Gluon is experimental. The kernels of `hopper` compile with Triton from the first version to before the second.
_GLUON = ((3, 6), (3, 10))
HAS_ROLES = _GLUON[0] <= tuple(map(int, triton.__version__.split(".")[:2])) < _GLUON[1]


@functools.cache
def get_target(device: torch.device) -> str:
    """Return the name of a device's target: `sm90`, `gfx942`, ..., or `interpreter`."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _by_kernel(up: T, rows: T, act_backward: T, outer: T) -> dict[str, T]:
    return dict(up=up, down=rows, act_backward=act_backward, grad_x=rows, grad_up=outer, grad_down=outer)


_HOPPER = _by_kernel(
    up=GemmConfig(128, 128, 64, warps=8, stages=4, descriptors=True),
    rows=GemmConfig(128, 256, 64, warps=8, stages=3, descriptors=True, persistent=1, flatten=True),
    act_backward=GemmConfig(128, 256, 64, warps=8, stages=3, descriptors=True, persistent=1, flatten=True, fused=False),
    outer=GemmConfig(128, 256, 32, warps=8, stages=7, descriptors=True),
)
_ROLES = GemmConfig(128, 256, 64, warps=8, stages=4, persistent=1, roles=True)
_HOPPER_ROLES = _by_kernel(
    up=dataclasses.replace(_ROLES, stages=3),
    rows=_ROLES,
    act_backward=dataclasses.replace(_ROLES, stages=3),
    outer=_ROLES,
)
_PORTABLE = _by_kernel(
    up=GemmConfig(128, 64, 32, warps=8, stages=3),
    rows=GemmConfig(128, 128, 32, warps=8, stages=3),
    act_backward=GemmConfig(128, 64, 32, warps=8, stages=3, slices=2),
    outer=GemmConfig(128, 128, 32, warps=8, stages=3),
)
_FLOAT32 = _by_kernel(
    up=GemmConfig(64, 32, 32, warps=4, stages=2),
    rows=GemmConfig(64, 64, 32, warps=4, stages=2),
    act_backward=GemmConfig(64, 32, 32, warps=4, stages=2),
    outer=GemmConfig(64, 64, 32, warps=4, stages=2),
)
KERNELS = tuple(_HOPPER)


def default_config(kernel: str, device: torch.device, dtype: torch.dtype) -> GemmConfig:
    """Return the configuration of a kernel if nothing is tuned."""
    if dtype is torch.float32:
        return _FLOAT32[kernel]
    return (_HOPPER_ROLES if get_target(device) == "sm90" else _PORTABLE)[kernel]


def portable_config(kernel: str) -> GemmConfig:
    """Return the configuration on sm90 if the kernels with roles do not support the tensors."""
    return _HOPPER[kernel]


def list_candidates(kernel: str, device: torch.device, dtype: torch.dtype) -> list[GemmConfig]:
    """List the configurations that tuning tries."""
    if dtype is torch.float32:
        return [default_config(kernel, device, dtype), *_FLOAT32_CANDIDATES[kernel]]
    if get_target(device) == "sm90":
        return [tiles for tiles in _HOPPER_CANDIDATES[kernel] if HAS_ROLES or not tiles.roles]
    return [default_config(kernel, device, dtype), *_PORTABLE_CANDIDATES[kernel]]


def _hopper_candidates() -> dict[str, list[GemmConfig]]:
    c = functools.partial(GemmConfig, descriptors=True)
    t = functools.partial(c, store_descriptors=True)
    r = functools.partial(dataclasses.replace, _ROLES)
    separate = [
        r(fused=False),
        r(fused=False, gather_first=True),
        c(128, 256, 64, 8, 4, fused=False),
        c(128, 256, 64, 8, 3, fused=False, persistent=1, flatten=True),
    ]
    return _by_kernel(
        up=[
            r(stages=3),
            r(stages=3, gather_first=True),
            r(bn=128, stages=6),
            c(128, 128, 64, 8, 4),
            t(128, 128, 64, 8, 4),
            t(128, 64, 64, 4, 3),
            *separate,
        ],
        rows=[
            r(),
            c(128, 256, 64, 8, 3),
            t(128, 256, 64, 8, 3, persistent=1),
            c(128, 256, 64, 8, 3, persistent=1, flatten=True),
        ],
        act_backward=[r(stages=3), r(stages=3, gather_first=True), r(bn=128, stages=6), *separate],
        outer=[
            r(),
            r(gather_first=True),
            c(128, 256, 64, 8, 7),
            c(128, 256, 64, 8, 3, gather_first=True),
        ],
    )


def _portable_candidates() -> dict[str, list[GemmConfig]]:
    """Candidates that fit into 64 KiB of shared memory and the registers of every target."""
    c = GemmConfig
    rows = [c(128, 128, 64, 8, 2), c(128, 64, 32, 4, 3), c(64, 128, 32, 4, 3), c(128, 128, 32, 8, 3, persistent=1)]
    separate = [dataclasses.replace(tiles, fused=False) for tiles in (_PORTABLE["down"], *rows[:2])]
    return _by_kernel(
        up=[c(64, 64, 32, 4, 3), *separate],
        rows=rows,
        act_backward=[c(64, 64, 32, 4, 3, slices=2), *separate],
        outer=[c(128, 64, 32, 4, 3), c(128, 128, 64, 8, 2), c(128, 128, 32, 8, 3, gather_first=True)],
    )


def _float32_candidates() -> dict[str, list[GemmConfig]]:
    c = GemmConfig
    rows = [c(128, 64, 32, 8, 2), c(64, 128, 32, 8, 2), c(64, 64, 16, 4, 3)]
    separate = [dataclasses.replace(tiles, fused=False) for tiles in (_FLOAT32["down"], *rows[:1])]
    return _by_kernel(
        up=[c(128, 32, 32, 8, 2), *separate],
        rows=rows,
        act_backward=[c(128, 32, 32, 8, 2, slices=2), *separate],
        outer=[c(128, 64, 32, 8, 2), c(64, 64, 32, 4, 2, gather_first=True)],
    )


_HOPPER_CANDIDATES = _hopper_candidates()
_PORTABLE_CANDIDATES = _portable_candidates()
_FLOAT32_CANDIDATES = _float32_candidates()
