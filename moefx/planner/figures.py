"""What a plan rests on, for readers: a platform's figures with their sources, and what is assumed beside them."""

from __future__ import annotations

import dataclasses
from html import escape

from .._html import table
from .architecture import Architecture
from .platforms import Platform
from .sheet import amount

_UNITS = {
    "capacity": "B", "overhead": "B", "peak": "FLOP/s", "expert_gemm": "FLOP/s", "memory_bandwidth": "B/s",
    "dense_rows": "B/s", "expert_rows": "B/s", "expert_weights": "B/s", "dense_launch": "s", "expert_launch": "s",
    "handling": "s/B",
}  # fmt: skip
_INSTEAD = {
    "dense_rows": "memory_bandwidth", "expert_rows": "memory_bandwidth", "expert_weights": "memory_bandwidth",
    "expert_gemm": "peak * matmul_efficiency", "fast_domain": "no limit",
}  # fmt: skip


def sources(platform: Platform) -> str:
    """Tables of its figures and its networks."""
    rows = []
    for name, value in _numbers(platform).items():
        shown = amount(value, _UNITS.get(name, "1"))
        if not value and name in _INSTEAD:
            shown = _INSTEAD[name]
        rows.append([name, shown, platform.sources.get(name, _nobody(name, value))])
    links = [
        [n.name, str(n.ranks or "all"), amount(n.bandwidth, "B/s"), amount(n.latency, "s"),
         amount(n.p2p or n.bandwidth, "B/s"), n.source or "not said"]
        for n in platform.networks
    ]  # fmt: skip
    head = ["network", "ranks", "a rank, all sending", "latency", "to one other", "source"]
    return table(["figure", "value", "source"], rows, texts=3) + table(head, links, texts=6)


def assumptions(model: Architecture, platform: Platform) -> str:
    """A list: what is a peak and what was measured, and what the formulas leave out."""
    numbers = _numbers(platform)
    measured = [name for name, source in platform.sources.items() if source.startswith("measured")]
    printed = [name for name in platform.sources if name not in measured]
    unknown = [name for name in numbers if name not in platform.sources and _nobody(name, numbers[name])]
    measured += [f"links of a {n.name}" for n in platform.networks if n.source.startswith("measured")]
    printed += [f"links of a {n.name}" for n in platform.networks if not n.source.startswith("measured")]
    said = [
        f"Of data sheets, guides and papers, so peaks and not what programs reach: {', '.join(printed)}." if printed else "",
        f"Measured: {', '.join(measured)}." if measured else "Nothing was measured on this platform.",
        f"Nobody measured, so taken as if they cost nothing: {', '.join(unknown)}. Times are too short by that."
        if unknown else "",
        "Nothing overlaps: exchanges and gradients wait for what is computed, and that for them.",
        "Tokens are shared evenly by the experts; none are dropped.",
        "16 bytes a parameter before ZeRO (half precision, float32 copy, Adam), flash attention, one-forward-one-backward.",
        f"The framework takes {amount(platform.overhead, 'B')} of a GPU's memory." if platform.overhead else
        "What the framework and its libraries take of the memory is not known, and counted as nothing.",
        f"{model.name}: {model.note}." if model.note else "",
    ]  # fmt: skip
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in said if text)}</ul>"


def _numbers(platform: Platform) -> dict[str, float]:
    found = {field.name: getattr(platform, field.name) for field in dataclasses.fields(platform)}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def _nobody(name: str, value: float) -> str:
    """What is said of a figure without a source, "" if its value needs none."""
    if name.endswith("efficiency") and value == 1 or not value and name != "fast_domain":
        return "not measured"
    return "" if name == "fast_domain" else "not said"
