"""Choose the tile configuration of a GEMM: the nearest tuned one, from this machine or the table, or a default.

The choice costs nothing. Timing all configurations of a shape that is far from any tuned one takes up to a minute, and
happens only on request (see `autotune`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from ...errors import InvalidPlan
from . import autotune, tile_configs
from .tile_configs import GemmConfig

TABLE = Path(os.environ.get("MOEFX_TUNING") or Path(__file__).with_name("tuning.jsonl"))
_NEAR = 1.0  # largest `_distance` of a usable entry: one of three sizes off by a factor of 2

TunedConfig = tuple[tuple[int, ...], GemmConfig, str]  # shape, configuration, origin
_HERE = "here for"
_log = logging.getLogger(__name__)
_used: dict[tuple[str, str], tuple[GemmConfig, str]] = {}


def choose_config(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    num_experts: int = 0,
    trial: Callable[[GemmConfig], object] | None = None,
) -> GemmConfig:
    """Choose the configuration of a GEMM. `list_used_configs` has the reasons.

    Args:
        kernel: one of `tile_configs.KERNELS`.
        shape: (columns of the result, inner size, mean rows of an expert).
        trial: runs the GEMM with a configuration; None if it must not be tuned.
    """
    tiles, reason, distance = find_nearest_config(kernel, device, dtype, shape)
    if tile_configs.get_target(device) == "interpreter":
        return tiles
    if distance > _NEAR and trial and autotune.can_tune(shape, num_experts):
        with autotune.tuning_lock:
            # another thread may have found it
            tiles, reason, distance = find_nearest_config(kernel, device, dtype, shape)
            if distance > _NEAR:
                tiles, reason = _tune(kernel, device, dtype, shape, trial, tiles, reason)
    if distance == math.inf:
        _log_untuned(tile_configs.get_target(device), _dtype_name(dtype))
    _used[kernel, f"{_dtype_name(dtype)} {_format_shape(shape)}"] = (tiles, reason)
    return tiles


@functools.cache
def _log_untuned(target: str, dtype: str) -> None:
    """Log once that the kernels of a kind of GPU run with default configurations."""
    _log.info(
        "no configuration of the expert kernels was tuned for %s in %s: defaults are used. MOEFX_AUTOTUNE=60 tunes in "
        "the first step, and keeps the result on disk", target, dtype,
    )  # fmt: skip


def find_nearest_config(
    kernel: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> tuple[GemmConfig, str, float]:
    """Choose a configuration without tuning.

    Returns:
        The configuration, its reason, and the distance to the shape that it was tuned for.
    """
    # float16 has bfloat16's width and runs on the same units, so its entries serve too.
    dtypes = (dtype, torch.bfloat16) if dtype is torch.float16 else (dtype,)
    table = _load_entries(device)
    entries = [
        (*e, d) for d in dtypes for e in table.get((tile_configs.get_target(device), _dtype_name(d), kernel), ())
    ]
    if entries:
        tuned_shape, tiles, environment, its_dtype = min(entries, key=lambda entry: _distance(entry[0], shape))
        reason, distance = f"tuned {environment} {_format_shape(tuned_shape)}", _distance(tuned_shape, shape)
        reason += "" if its_dtype is dtype else f", {_dtype_name(its_dtype)}"
    else:
        tiles, distance = tile_configs.default_config(kernel, device, dtype), math.inf
        reason = f"the default: nothing is tuned for {tile_configs.get_target(device)} {_dtype_name(dtype)}"
    if tiles.roles and not tile_configs.HAS_ROLES:
        tiles = tile_configs.portable_config(kernel)
        reason = f"without Gluon's kernels, which are not known to compile with Triton {triton.__version__}"
    return tiles, reason, distance


def list_used_configs() -> list[str]:
    """Return the choices of `config` so far in this process and their reasons, a line for each kernel and shape."""
    return [f"{kernel} {shape}: {tiles.text}; {reason}" for (kernel, shape), (tiles, reason) in sorted(_used.items())]


def _tune(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    trial: Callable[[GemmConfig], object],
    first: GemmConfig,
    reason: str,
) -> tuple[GemmConfig, str]:
    others = [tiles for tiles in tile_configs.list_candidates(kernel, device, dtype) if tiles != first]
    best, is_complete = autotune.find_fastest(
        f"{kernel} {_dtype_name(dtype)} {_format_shape(shape)}", [first, *others], trial
    )
    if best is None:
        return first, f"{reason}; none fit when tuned here"
    key = (tile_configs.get_target(device), _dtype_name(dtype), kernel)
    _load_entries(device).setdefault(key, []).append((shape, best, _HERE))
    if not is_complete:
        return best, f"tuned {_HERE} {_format_shape(shape)}, until the seconds of MOEFX_AUTOTUNE were used up"
    autotune.append_cached_line(gpu_name(device), format_line(*key, shape, best))
    return best, f"tuned {_HERE} {_format_shape(shape)}"


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"


@functools.cache
def _load_entries(device: torch.device) -> dict[tuple[str, str, str], list[TunedConfig]]:
    """(target, dtype, kernel) -> tuned entries, from the table and from this machine's cache."""
    entries: dict[tuple[str, str, str], list[TunedConfig]] = {}
    try:
        lines = TABLE.read_text(errors="replace").splitlines()
    except OSError as error:
        raise InvalidPlan(f"MOEFX_TUNING={TABLE}: {error.strerror}") from None
    for number, text in enumerate(lines, 1):
        try:
            key, shape, tiles = _parse_line(text)
        except _MALFORMED as error:
            raise InvalidPlan(f"{TABLE}:{number} is not a line of a tuning table ({error}): {text[:80]}") from None
        entries.setdefault(key, []).append((shape, tiles, "for"))
    for text in autotune.read_cached_lines(gpu_name(device)):
        try:
            key, shape, tiles = _parse_line(text)
        except _MALFORMED:  # for example half a line; the shape is tuned again
            _log.warning(
                "%s: skipped a line that is not a configuration: %.80s", autotune.cache_file(gpu_name(device)), text
            )
            continue
        entries.setdefault(key, []).append((shape, tiles, _HERE))
    return entries


def format_line(target: str, dtype: str, kernel: str, shape: Sequence[int], tiles: GemmConfig) -> str:
    """Format a line of a tuning table."""
    row = dict(target=target, dtype=dtype, kernel=kernel, shape=list(shape), config=dataclasses.asdict(tiles))
    return json.dumps(row)


_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)  # what `_parse_line` may raise


def _parse_line(text: str) -> tuple[tuple[str, str, str], tuple[int, ...], GemmConfig]:
    row = json.loads(text)
    columns, inner, rows = map(int, row["shape"])
    tiles = GemmConfig(**row["config"])
    for name, value in dataclasses.asdict(tiles).items():
        is_size = name in ("bm", "bn", "bk", "warps")
        minimum = 0 if name == "persistent" or isinstance(value, bool) else 1
        if not isinstance(value, int) or value < minimum or (is_size and value & (value - 1)):
            raise ValueError(f"{name} is {value!r}")
    key = row["target"], row["dtype"], row["kernel"]
    if not all(isinstance(name, str) for name in key):
        raise TypeError(f"{key} are not names")
    return key, (columns, inner, rows), tiles


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format_shape(shape: Sequence[int]) -> str:
    columns, inner, rows = shape
    return f"[{inner} -> {columns}], {rows} rows an expert"


def _distance(a: Sequence[int], b: Sequence[int]) -> float:
    return sum(math.log2(max(x, 1) / max(y, 1)) ** 2 for x, y in zip(a, b, strict=True))
