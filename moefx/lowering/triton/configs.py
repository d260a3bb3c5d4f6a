"""Tile sizes and the like, by kernel, target, dtype and shape."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

TABLE = Path(os.environ.get("MOEFX_TUNING") or Path(__file__).with_name("tuning.jsonl"))


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
        store_descriptors: for full tiles of rows that are stored as well; not in `act_backward_kernel`.
        slices: of the pointwise part in `act_backward_kernel`.
        fused: the pointwise part is in the GEMM ("up", "act_backward"); else it has a kernel of its own, and the
            GEMM is one of `rows_kernel`.
        gather_first: gather the rows into a buffer before the GEMM ("grad_up", "grad_down"; "up" and "act_backward"
            where they are not fused).
        roles: the kernels of `hopper`, whose warps load, multiply or go on with the product, where they take the
            tensors. Of the rest only stages, group, fused, gather_first and, where there is a pointwise part, bn
            (128 or 256 columns of the product) count then.
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
        """Tile and what is not its default."""
        rest = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)[5:]}
        words = [name if v is True else f"{name}={int(v)}" for name, (v, default) in rest.items() if v != default]
        return " ".join([f"{self.bm}x{self.bn}x{self.bk} warps={self.warps} stages={self.stages}", *words])


# Gluon is experimental: with which Tritons the kernels of `hopper` are known to compile.
_GLUON = ((3, 6), (3, 10))
HAS_ROLES = _GLUON[0] <= tuple(map(int, triton.__version__.split(".")[:2])) < _GLUON[1]


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


def _defaults(up: Config, rows: Config, act_backward: Config, outer: Config) -> dict[str, Config]:
    return dict(up=up, down=rows, act_backward=act_backward, grad_x=rows, grad_up=outer, grad_down=outer)


_HOPPER = _defaults(
    up=Config(128, 128, 64, warps=8, stages=4, descriptors=True),
    rows=Config(128, 256, 64, warps=8, stages=3, descriptors=True, persistent=1, flatten=True),
    act_backward=Config(128, 256, 64, warps=8, stages=3, descriptors=True, persistent=1, flatten=True, fused=False),
    outer=Config(128, 256, 32, warps=8, stages=7, descriptors=True),
)
_ROLES = Config(128, 256, 64, warps=8, stages=4, persistent=1, roles=True)
_HOPPER_ROLES = _defaults(
    up=dataclasses.replace(_ROLES, stages=3),
    rows=_ROLES,
    act_backward=dataclasses.replace(_ROLES, stages=3),
    outer=_ROLES,
)
_PORTABLE = _defaults(
    up=Config(128, 64, 32, warps=8, stages=3),
    rows=Config(128, 128, 32, warps=8, stages=3),
    act_backward=Config(128, 64, 32, warps=8, stages=3, slices=2),
    outer=Config(128, 128, 32, warps=8, stages=3),
)
_FLOAT32 = _defaults(
    up=Config(64, 32, 32, warps=4, stages=2),
    rows=Config(64, 64, 32, warps=4, stages=2),
    act_backward=Config(64, 32, 32, warps=4, stages=2),
    outer=Config(64, 64, 32, warps=4, stages=2),
)
KERNELS = tuple(_HOPPER)


def config(kernel: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Config:
    """For a GEMM, one of `KERNELS`, on shape (columns of the result, inner size, mean rows of an expert).

    The nearest one of the tuning table, where that has the target and the dtype; else a default. `used` tells.
    """
    chosen, reason = choice(kernel, device, dtype, shape)
    if target(device) != "interpreter":
        _used[kernel, f"{_name(dtype)} {_text(shape)}"] = (chosen, reason)
    return chosen


def choice(kernel: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Config, str]:
    """`config`, and why."""
    entries = _table().get((target(device), _name(dtype), kernel))
    if entries:
        tuned, chosen = min(entries, key=lambda entry: _distance(entry[0], shape))
        reason = f"tuned for {_text(tuned)}"
    else:
        defaults = _HOPPER_ROLES if target(device) == "sm90" else _PORTABLE
        chosen = (_FLOAT32 if dtype is torch.float32 else defaults)[kernel]
        reason = f"the default: nothing is tuned for {target(device)} {_name(dtype)}"
    if chosen.roles and not HAS_ROLES:
        chosen = portable(kernel)
        reason = f"without Gluon's kernels, which are not known to compile with Triton {triton.__version__}"
    return chosen, reason


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_used: dict[tuple[str, str], tuple[Config, str]] = {}


def used() -> list[str]:
    """What `config` chose so far in this process and why, a line for each kernel and shape."""
    return [f"{kernel} {shape}: {chosen.text}; {why}" for (kernel, shape), (chosen, why) in sorted(_used.items())]


def _text(shape: Sequence[int]) -> str:
    columns, inner, rows = shape
    return f"[{inner} -> {columns}], {rows} rows an expert"


def portable(kernel: str) -> Config:
    """Where `Config.roles` does not take the tensors."""
    return _HOPPER[kernel]


def _distance(a: Sequence[int], b: Sequence[int]) -> float:
    return sum(math.log2(max(x, 1) / max(y, 1)) ** 2 for x, y in zip(a, b, strict=True))


@functools.cache
def _table() -> dict[tuple[str, str, str], list[tuple[tuple[int, ...], Config]]]:
    """(target, dtype, kernel) -> [(shape, config)], from the JSON lines of `TABLE`; `bench tune` writes them."""
    table: dict[tuple[str, str, str], list[tuple[tuple[int, ...], Config]]] = {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        row = json.loads(line)
        entry = (tuple(row["shape"]), Config(**row["config"]))
        table.setdefault((row["target"], row["dtype"], row["kernel"]), []).append(entry)
    return table


def candidates(kernel: str, device: torch.device, dtype: torch.dtype) -> list[Config]:
    """What tuning tries."""
    if target(device) != "sm90" or dtype is torch.float32:
        return [config(kernel, device, dtype, (1, 1, 1))]
    return _HOPPER_CANDIDATES[kernel]


def _hopper_candidates() -> dict[str, list[Config]]:
    c = functools.partial(Config, descriptors=True)
    t = functools.partial(c, store_descriptors=True)
    r = functools.partial(dataclasses.replace, _ROLES)
    rows = [
        r(),
        c(128, 256, 64, 8, 3),
        t(128, 256, 64, 8, 3, persistent=1),
        c(128, 256, 64, 8, 3, persistent=1, flatten=True),
    ]
    separate = [
        r(fused=False),
        r(fused=False, gather_first=True),
        c(128, 256, 64, 8, 4, fused=False),
        c(128, 256, 64, 8, 3, fused=False, persistent=1, flatten=True),
    ]
    outer = [
        r(),
        r(gather_first=True),
        c(128, 256, 64, 8, 7),
        c(128, 256, 64, 8, 3, gather_first=True),
    ]
    return dict(
        up=[
            r(stages=3),
            r(bn=128, stages=5),
            c(128, 128, 64, 8, 4),
            t(128, 128, 64, 8, 4),
            t(128, 64, 64, 4, 3),
            *separate,
        ],
        down=rows,
        act_backward=[r(stages=3), r(bn=128, stages=5), *separate],
        grad_x=rows,
        grad_up=outer,
        grad_down=outer,
    )


_HOPPER_CANDIDATES = _hopper_candidates()
