"""Rates of experts from measured times, for the planner's figures of a platform."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..planner.architecture import Architecture, Attention
from ..planner.compute import FORWARD
from ..planner.layout import Layout
from ..planner.platforms import Platform
from ..planner.step import TILE
from .shapes import Shape, shape_of


class Measured(NamedTuple):
    """Seconds of the experts of a shape, forward, or forward and backward."""

    shape: Shape
    seconds: float
    is_step: bool


def measured(path: Path, peer: str = "moefx") -> list[Measured]:
    """What `python -m moefx bench moe --out path` wrote of a peer."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Measured(shape_of(row["shape"]), row[key] / 1000, key == "step_ms")
        for row in rows if row.get("peer") == peer for key in ("forward_ms", "step_ms")
    ]  # fmt: skip


def expert_rates(times: Sequence[Measured]) -> dict[str, float]:
    """`expert_gemm`, `expert_rows`, `expert_weights` and `expert_launch` of a `Platform`: of the smallest squares of
    relative errors.

    Raises:
        ValueError: the times are of fewer than four kinds, or ask for a rate below 0.
    """
    parts = torch.tensor([[x / time.seconds for x in _parts(time)] for time in times], dtype=torch.float64)
    ones = torch.ones(len(times), 1, dtype=torch.float64)
    if len(times) < 4 or int(torch.linalg.matrix_rank(parts)) < 4:
        raise ValueError(f"{len(times)} times do not tell FLOP, rows, weights and launches apart")
    gemm, rows, weights, launch = torch.linalg.lstsq(parts, ones, driver="gelsd").solution[:, 0].tolist()
    if min(gemm, rows, weights, launch) <= 0:
        raise ValueError(f"the times ask for rates below 0 ({gemm=:.3g}, {rows=:.3g}, {weights=:.3g}, {launch=:.3g})")
    return {
        "expert_gemm": 1e12 / gemm, "expert_rows": 1e12 / rows, "expert_weights": 1e12 / weights,
        "expert_launch": launch * 1e-6,
    }  # fmt: skip


def predicted(shape: Shape, platform: Platform) -> dict[str, float]:
    """Results of `FORWARD` for experts of a shape: `T_experts` and `T_experts_step` are seconds."""
    return _forward(shape, platform.expert_rates())


def errors(times: Iterable[Measured], platform: Platform) -> dict[tuple[str, bool], float]:
    """By shape and whether it is a step: predicted over measured, less 1."""
    found = {}
    for shape, seconds, is_step in times:
        result = predicted(shape, platform)["T_experts_step" if is_step else "T_experts"]
        found[shape.name, is_step] = result / seconds - 1
    return found


def _parts(time: Measured) -> tuple[float, float, float, float]:
    """Seconds of each part at a TFLOP or a TB a second, or with launches of a microsecond; the others take none."""
    alone = []
    for chosen in ("v_gemm", "v_rows", "v_weights", "t_launch"):
        rates = {"v_gemm": 1e30, "v_rows": 1e30, "v_weights": 1e30, "t_launch": 0.0}
        rates[chosen] = 1e-6 if chosen == "t_launch" else 1e12
        alone.append(_forward(time.shape, rates)["T_experts_step" if time.is_step else "T_experts"])
    return tuple(alone)  # type: ignore[return-value]


def _forward(shape: Shape, rates: dict[str, float]) -> dict[str, float]:
    model = Architecture(
        name=shape.name, hidden_size=shape.d, num_layers=1, num_moe_layers=1,
        attention=Attention(num_heads=1, num_kv_heads=1, head_size=1), num_experts=shape.E, top_k=shape.K,
        expert_size=shape.h, matrices=shape.matrices,
    )  # fmt: skip
    values = Layout(tokens=shape.T).values(model)
    return FORWARD(**values, **rates, peak=1.0, e_gemm=1.0, e_attn=1.0, tile=TILE, skew=1.0)
