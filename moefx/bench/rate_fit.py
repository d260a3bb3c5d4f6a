"""Fit a machine's rates to measured times, for the figures of a `Platform`: least squares of relative errors."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..planner.architecture import Architecture, Attention
from ..planner.compute import FORWARD
from ..planner.layout import Layout
from ..planner.platforms import FREE, Platform
from ..planner.step_formulas import TILE
from .shapes import Shape, parse_shape


class ExpertTime(NamedTuple):
    """Seconds of a shape's experts: forward, or forward and backward if `is_step`."""

    shape: Shape
    seconds: float
    is_step: bool


class GemmTime(NamedTuple):
    """Seconds of [rows, inner] times [inner, columns]."""

    rows: int
    columns: int
    inner: int
    seconds: float

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner

    @property
    def operands(self) -> float:
        """Bytes of the operands, two for each element, as in the planner's formulas."""
        return 2.0 * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)


def read_expert_times(path: Path, peer: str = "moefx") -> list[ExpertTime]:
    """Read a peer's times from the file of `python -m moefx bench moe --out path`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        ExpertTime(parse_shape(row["shape"]), row[key] / 1000, key == "step_ms")
        for row in rows if row.get("peer") == peer for key in ("forward_ms", "step_ms")
    ]  # fmt: skip


def fit_expert_rates(times: Sequence[ExpertTime]) -> dict[str, float]:
    """Fit `expert_gemm`, `expert_rows`, `expert_weights` and `expert_launch` of a `Platform`.

    A part that does not show in the times gets the rate `FREE`.

    Raises:
        ValueError: the times cannot separate the four parts.
    """
    parts = [[x / time.seconds for x in _compute_part_seconds(time)] for time in times]
    if len(times) < 4 or int(torch.linalg.matrix_rank(torch.tensor(parts, dtype=torch.float64))) < 4:
        raise ValueError(f"{len(times)} times do not tell FLOP, rows, weights and launches apart")
    gemm, rows, weights, launch = fit_shares(parts)
    return {
        "expert_gemm": _rate(gemm), "expert_rows": _rate(rows), "expert_weights": _rate(weights),
        "expert_launch": launch * 1e-6,
    }  # fmt: skip


def fit_dense_rates(gemms: Sequence[GemmTime], peak: float) -> dict[str, float]:
    """Fit `matmul_efficiency`, `dense_rows` and `dense_launch` of a `Platform`.

    Args:
        peak: the peak in FLOP a second.
    """
    ordered = sorted(gemms, key=lambda g: g.flop / g.operands)
    parts = [(g.flop * 1e-12 / g.seconds, g.operands * 1e-12 / g.seconds, 1e-6 / g.seconds) for g in ordered]
    fits = []
    for num_operand_bound in range(len(parts) + 1):  # the first ones; FLOP limit the others
        gemm, rows, launch = fit_shares(
            [(0.0, v, t) if i < num_operand_bound else (f, 0.0, t) for i, (f, v, t) in enumerate(parts)]
        )
        error = sum((max(f * gemm, v * rows) + t * launch - 1) ** 2 for f, v, t in parts)
        fits.append((error, gemm, rows, launch))
    _, gemm, rows, launch = min(fits)
    return {"matmul_efficiency": min(_rate(gemm) / peak, 1.0), "dense_rows": _rate(rows), "dense_launch": launch * 1e-6}


def compute_gemm_errors(gemms: Iterable[GemmTime], platform: Platform) -> list[float]:
    """Compute the relative errors (predicted / measured - 1) of the GEMMs."""
    rates = platform.dense_rates()
    speed = rates["peak"] * rates["e_gemm"]
    return [(max(g.flop / speed, g.operands / rates["v_dense"]) + rates["t_dense"]) / g.seconds - 1 for g in gemms]


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit (latency in seconds, bytes a second) to exchanges.

    The latency is a median over sizes that take at most twice the shortest time, the time of a byte a median over
    larger sizes. Medians limit the effect of an outlier.

    Args:
        num_bytes, seconds: bytes that left each rank, and seconds, of each exchange.
    """
    points, fastest = list(zip(num_bytes, seconds, strict=True)), min(seconds)
    short = [(n, s) for n, s in points if s <= 2 * fastest]
    long = [(n, s) for n, s in points if s > 2 * fastest]
    latency, per_byte = statistics.median(s for _, s in short), 0.0
    for _ in range(50 if long else 0):  # alternate until both converge
        per_byte = max(statistics.median((s - latency) / n for n, s in long), 0.0)
        latency = max(statistics.median(s - n * per_byte for n, s in short), 0.0)
    return latency, 1 / per_byte if per_byte else FREE


def fit_shares(parts: Sequence[Sequence[float]]) -> list[float]:
    """Find nonnegative factors with which the parts of each row add up to 1, by least squares.

    A part whose factor would be negative gets 0.
    """
    table = torch.tensor(parts, dtype=torch.float64)
    kept_columns = list(range(table.shape[1]))
    while True:
        ones = torch.ones(len(table), 1, dtype=torch.float64)
        solution = torch.linalg.lstsq(table[:, kept_columns], ones, driver="gelsd").solution[:, 0]
        if float(solution.min()) >= 0 or len(kept_columns) == 1:
            break
        kept_columns.pop(int(solution.argmin()))
    factors = dict(zip(kept_columns, solution.tolist(), strict=True))
    return [factors.get(i, 0.0) for i in range(table.shape[1])]


def _rate(tera: float) -> float:
    """Return the rate for a factor of a part that takes a second at 10^12."""
    return 1e12 / tera if tera > 0 else FREE


def predict_experts(shape: Shape, platform: Platform) -> dict[str, float]:
    """Evaluate `FORWARD` for a shape's experts: `T_experts` and `T_experts_step` are seconds."""
    return _evaluate_forward(shape, platform.expert_rates())


def compute_expert_errors(times: Iterable[ExpertTime], platform: Platform) -> dict[tuple[str, bool], float]:
    """Compute the relative errors (predicted / measured - 1) by (shape, is_step)."""
    errors = {}
    for shape, seconds, is_step in times:
        result = predict_experts(shape, platform)["T_experts_step" if is_step else "T_experts"]
        errors[shape.name, is_step] = result / seconds - 1
    return errors


def _compute_part_seconds(time: ExpertTime) -> tuple[float, float, float, float]:
    """Compute the seconds of each part alone, at a TFLOP or TB a second, or with launches of a microsecond."""
    part_seconds = []
    for rate_name in ("v_gemm", "v_rows", "v_weights", "t_launch"):
        rates = {"v_gemm": FREE, "v_rows": FREE, "v_weights": FREE, "t_launch": 0.0}
        rates[rate_name] = 1e-6 if rate_name == "t_launch" else 1e12
        part_seconds.append(_evaluate_forward(time.shape, rates)["T_experts_step" if time.is_step else "T_experts"])
    return tuple(part_seconds)  # type: ignore[return-value]


def _evaluate_forward(shape: Shape, rates: dict[str, float]) -> dict[str, float]:
    model = Architecture(
        name=shape.name, hidden_size=shape.d, num_layers=1, num_moe_layers=1,
        attention=Attention(num_heads=1, num_kv_heads=1, head_size=1), num_experts=shape.E, top_k=shape.K,
        expert_size=shape.h, matrices=shape.matrices,
    )  # fmt: skip
    values = Layout(tokens=shape.T).values(model)
    dense = dict(peak=1.0, e_gemm=1.0, e_attn=1.0, v_dense=1.0, t_dense=0.0)
    return FORWARD(**values, **rates, **dense, tile=TILE, skew=1.0)
