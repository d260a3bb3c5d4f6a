"""Render report.html: one self-contained page (no scripts, no fonts, no requests) with the results of the demo."""

from __future__ import annotations

import inspect
import math
import platform
import string
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

import torch

import moefx
from moefx.inspection import history_page
from moefx.util.unit_text import format_bytes

from . import model as demo_model

if TYPE_CHECKING:
    from .main import Result

# (colour, stroke width, opacity): the first curve broad and pale, the second thin on top, so that both show.
SERIES = (("var(--a)", 6.0, 0.55), ("var(--b)", 1.6, 1.0))


def render(result: Result) -> str:
    """Return the page as HTML text."""
    config, costs, curves = result.config, result.costs, result.curves
    first, *others = result.graphs
    per_token = costs.tokens * len(result.graphs)
    environment = (
        f"moefx {moefx.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    )
    description = (
        f"A byte-level language model in the style of DeepSeek: {result.num_parameters / 1e6:.1f} M "
        f"parameters, {config.layers} layers ({config.dense_layers} of them dense), {config.num_experts} "
        f"fine-grained experts of hidden size {config.expert_hidden}, {config.top_k} chosen for every token, "
        f"and {config.shared_experts} shared ones. It learns {result.text_bytes / 1e6:.1f} MB of the Python "
        f"standard library's own source, {costs.tokens} tokens a step."
    )
    template = string.Template(
        resources.files("moefx.demo").joinpath("report_template.html").read_text(encoding="utf-8")
    )
    return template.substitute(
        environment=escape(environment),
        seconds=f"{result.seconds:.0f}",
        verdict=verdict(result.ok),
        model=escape(description),
        costs=cost_table(costs.rows()),
        bytes_before=f"{costs.block_bytes['original'] / per_token:,.0f}",
        bytes_after=f"{costs.block_bytes['compiled'] / per_token:,.0f}",
        byte_bars=bars(result.policy_bytes, f"bytes saved for backward by {first}, by save policy"),
        loss_chart=line_chart({"original": curves.original, "compiled": curves.compiled}),
        steps=len(curves.original),
        difference=f"{curves.largest_difference:.1e}",
        explanation=escape(result.explanation),
        compile_seconds=f"{result.compile_seconds:.1f}",
        legend=escape(result.legend),
        source=escape(inspect.getsource(demo_model.MoE)),
        first_name=escape(first),
        first_graph=escape(result.graphs[first]),
        other_graphs="\n".join(
            f"<details><summary>{escape(name)}</summary><pre>{escape(result.graphs[name])}</pre></details>"
            for name in others
        ),
        history_style=history_page.STYLE,
        history=history_page.build_fragment(result.histories[first]),
        verification=escape(result.verification),
    )


def verdict(ok: bool) -> str:
    if ok:
        return '<p class="good"><strong>Equivalent</strong>: verified, and the loss curves are equal.</p>'
    return '<p class="bad"><strong>Not equivalent</strong>: see the verification and the loss curves.</p>'


def cost_table(rows: Sequence[Sequence[str]]) -> str:
    header = "".join(f"<th>{cell}</th>" for cell in ("", "original", "compiled", "ratio"))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="costs"><tr>{header}</tr>{body}</table>'


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(label)}"><title>{escape(label)}</title>{"".join(parts)}</svg>'
    )


def bars(values: dict[str, int], label: str) -> str:
    """Draw horizontal bars, the first in the colour of the original."""
    width, height, left, right = 720, 28, 130, 90
    scale = (width - left - right) / (max(values.values()) or 1)
    parts = []
    for number, (name, value) in enumerate(values.items()):
        y, length, color = number * height, value * scale, SERIES[min(number, 1)][0]
        parts.append(
            f'<text x="0" y="{y + 18}">{escape(name)}</text>'
            f'<rect x="{left}" y="{y + 5}" width="{length:.1f}" height="{height - 10}" rx="2" '
            f'fill="{color}"/><text x="{left + length + 8:.1f}" y="{y + 18}">{format_bytes(value)}</text>'
        )
    return svg(width, height * len(values), label, parts)


def line_chart(curves: dict[str, list[float]], width: int = 720, height: int = 260) -> str:
    """Draw the loss over steps, one line a series; non-finite values are left out."""
    left, right, top, bottom = 52, 12, 12, 34
    finite = [v for curve in curves.values() for v in curve if math.isfinite(v)] or [0.0, 1.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    steps = max(max(map(len, curves.values())) - 1, 1)

    def x(step: float) -> float:
        return left + (width - left - right) * step / steps

    def y(value: float) -> float:
        return top + (height - top - bottom) * (low + span - value) / span

    def line(x1: float, x2: float, at: float, style: str) -> str:
        return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{at:.1f}" y2="{at:.1f}" {style}/>'

    parts = []
    for value in (low + span * tick / 4 for tick in range(5)):
        parts.append(line(left, width - right, y(value), 'stroke="var(--line)"'))
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    stride = next((n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if steps / n <= 8), 1000)
    for step in range(0, steps + 1, stride):
        parts.append(f'<text x="{x(step):.1f}" y="{height - 14}" text-anchor="middle">{step}</text>')
    for number, ((name, curve), look) in enumerate(zip(curves.items(), SERIES, strict=True)):
        style = 'stroke="{}" stroke-width="{}" stroke-opacity="{}"'.format(*look)
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(curve) if math.isfinite(v))
        parts.append(f'<polyline points="{points}" fill="none" stroke-linejoin="round" {style}/>')
        key, at = width - right - 110, top + 10 + 18 * number
        parts.append(line(key, key + 26, at, style))
        parts.append(f'<text x="{key + 34}" y="{at + 4}">{escape(name)}</text>')
    return svg(width, height, "loss over training steps", parts)
