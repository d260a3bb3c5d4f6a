"""Times of exchanges and of other kernels in a profiled step, and of both at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Parts of the names of exchange kernels.
_EXCHANGES = ("nccl", "mirrored_exchange", "read_rows_kernel", "add_rows_kernel", "barrier_kernel")


def compute_overlap(kernels: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Compute the milliseconds of exchanges, of other kernels, and of both at once (the hidden exchanges)."""
    exchanges = _merge_spans([(b, e) for name, b, e in kernels if _is_exchange(name)])
    others = _merge_spans([(b, e) for name, b, e in kernels if not _is_exchange(name)])
    both = sum(max(0.0, min(e, f) - max(b, c)) for b, e in exchanges for c, f in others)
    return {"exchange_ms": _sum_lengths(exchanges), "compute_ms": _sum_lengths(others), "hidden_ms": both}


def _is_exchange(name: str) -> bool:
    return any(part in name.lower() for part in _EXCHANGES)


def _merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _sum_lengths(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def plot_timeline(kernels: dict[str, Sequence[tuple[str, float, float]]], path: Path) -> None:
    """Plot one step of each variant on one time axis, exchanges above all other kernels."""
    from matplotlib.figure import Figure  # in the extra `bench`

    figure = Figure(figsize=(11, 1.4 * len(kernels) + 0.8), layout="constrained")
    rows = figure.subplots(len(kernels), sharex=True, squeeze=False)[:, 0]
    for axes, (variant, spans) in zip(rows, kernels.items(), strict=True):
        parts: dict[str, list[tuple[float, float]]] = {"other kernels": [], "exchanges": []}
        for name, begin, end in spans:
            parts["exchanges" if _is_exchange(name) else "other kernels"].append((begin, end - begin))
        for lane, color in enumerate(("tab:blue", "tab:orange")):
            axes.broken_barh(list(parts.values())[lane], (lane + 0.1, 0.8), color=color)
        axes.set_yticks([0.5, 1.5], list(parts))
        hidden = compute_overlap(spans)
        axes.set_title(
            f"{variant}: exchanges {hidden['exchange_ms']:.2f} ms, {hidden['hidden_ms']:.2f} ms of them beside others "
            f"({hidden['compute_ms']:.2f} ms)",
            fontsize=9,
            loc="left",
        )
    rows[-1].set_xlabel("ms")
    figure.savefig(path, dpi=110)
