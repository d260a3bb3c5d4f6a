"""A platform's figures with their sources, and the planner's assumptions, as HTML."""

from __future__ import annotations

import dataclasses
from html import escape

from ..util.html_page import build_table
from ..util.unit_text import amount
from .architecture import Architecture
from .platforms import FREE, Platform

_UNITS = {
    "memory_bytes": "B", "overhead": "B", "peak": "FLOP/s", "expert_gemm": "FLOP/s", "memory_bandwidth": "B/s",
    "dense_rows": "B/s", "expert_rows": "B/s", "expert_weights": "B/s", "dense_launch": "s", "expert_launch": "s",
    "handling": "s/B",
}  # fmt: skip
_NOT_MEASURED = "not measured"
_COEFFICIENTS = (
    "expert_rows and expert_weights count the time that a byte adds to the experts. Most bytes move while the GEMMs "
    "run and add no time, so these rates can be above memory_bandwidth."
)
_INSTEAD = {
    "dense_rows": "memory_bandwidth", "expert_rows": "memory_bandwidth", "expert_weights": "memory_bandwidth",
    "expert_gemm": "peak * matmul_efficiency", "fast_domain": "no limit",
}  # fmt: skip


def render_sources(platform: Platform) -> str:
    """Render tables of the platform's figures and networks."""
    rows = []
    for name, value in _list_figures(platform).items():
        text = amount(value, _UNITS.get(name, "1"))
        if not value and name in _INSTEAD:
            text = _INSTEAD[name]
        if value >= FREE:
            text = "adds no time"
        rows.append([name, text, _find_source(platform, name, value)])
    links = [
        [n.name, str(n.ranks or "all"), amount(n.bandwidth, "B/s"), amount(n.latency, "s"),
         amount(n.p2p or n.bandwidth, "B/s"), n.source or "no source"]
        for n in platform.networks
    ]  # fmt: skip
    head = ["network", "ranks", "a rank, all sending", "latency", "to one other", "source"]
    return build_table(["figure", "value", "source"], rows, texts=3) + build_table(head, links, texts=6)


def render_assumptions(model: Architecture, platform: Platform) -> str:
    """List the peaks, the measured figures, and the effects that the formulas leave out."""
    named = {name: source for name, source in platform.sources.items() if name != "fast_domain"}
    named |= {f"links of a {network.name}": network.source for network in platform.networks}
    measured_names = [name for name, source in named.items() if source.startswith("measured")]
    fitted_names = [name for name, source in named.items() if source.startswith("fitted")]
    printed = ", ".join(name for name in named if name not in (*measured_names, *fitted_names))
    unknown_names = [
        name for name, value in _list_figures(platform).items() if _find_source(platform, name, value) == _NOT_MEASURED
    ]
    unknown_names = [name for name in unknown_names if name != "overhead"]  # of memory, below
    unknown_names += [f"latency of a {network.name}" for network in platform.networks if not network.latency]
    lines = [
        f"From data sheets, guides and papers, so peaks that programs do not reach: {printed}." if printed else "",
        f"Measured: {', '.join(measured_names)}." if measured_names else "Nothing was measured on this platform.",
        f"Coefficients of the formulas, fitted to measured times: {', '.join(fitted_names)}." if fitted_names else "",
        _COEFFICIENTS if {"expert_rows", "expert_weights"} & set(fitted_names) else "",
        f"Not measured, so assumed ideal, which makes times too short: {', '.join(unknown_names)}."
        if unknown_names
        else "",
        "Nothing overlaps: exchanges and gradients wait for computation, and computation waits for them.",
        "Tokens are spread evenly over the experts, and none is dropped.",
        "Attention is causal and full in every layer: savings of windows and sparse attention are not counted.",
        "16 bytes a parameter before ZeRO (half precision, float32 copy, Adam), flash attention.",
        "" if platform.overhead else "The framework's own memory is unknown, and counted as 0.",
        f"{model.name}: {model.note}." if model.note else "",
    ]
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in lines if text)}</ul>"


def _list_figures(platform: Platform) -> dict[str, float]:
    fields = {field.name: getattr(platform, field.name) for field in dataclasses.fields(platform)}
    return {name: value for name, value in fields.items() if isinstance(value, (int, float))}


def _find_source(platform: Platform, name: str, value: float) -> str:
    """Return the source of a figure. A figure without a source was not measured if it has its default value."""
    defaults = {field.name: field.default for field in dataclasses.fields(Platform)}
    if name in platform.sources:
        return platform.sources[name]
    return (_NOT_MEASURED if name != "fast_domain" else "") if value == defaults[name] else "no source"
