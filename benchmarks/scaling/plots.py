"""Plots of the results of `benchmarks/scale.py`. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .results_file import Record
from .targets import (
    EFFICIENCY_TARGETS,
    PEERLESS,
    VARIANT,
    collect_results,
    find_best,
    find_skew_costs,
    find_strong_scaling,
    group_layers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_all(records: Sequence[Record], path: Path) -> list[Path]:
    """Plot each part that has results, as PNG files beside the file of results. Returns their paths.

    Raises:
        ValueError: a record is of a dry run, whose figures mean nothing.
    """
    if any(record.is_dry for record in records):
        raise ValueError(f"{path} has rows of a dry run: their figures mean nothing")
    parts: dict[str, Callable[[Sequence[Record], Path], bool]] = {
        "layer": _plot_efficiency, "variants": _plot_variants, "ssmb": _plot_ssmb, "model": _plot_models,
        "skew": _plot_skew, "stragglers": _plot_stragglers,
    }  # fmt: skip
    pictures = {name: path.with_name(f"{path.stem}_{name}.png") for name in parts}
    return [picture for name, picture in pictures.items() if parts[name](records, picture)]


def _draw(count: int, titles: Sequence[str], path: Path, draw: Callable[[int, Axes], None], width: float = 4.5) -> bool:
    """Draw `count` plots side by side. Returns whether there is one."""
    from matplotlib.figure import Figure

    if not count:
        return False
    figure = Figure(figsize=(width * count + 0.5, 4), layout="constrained")
    for number, axes in enumerate(figure.subplots(1, count, squeeze=False)[0]):
        draw(number, axes)
        axes.set_title(titles[number], fontsize=9)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return True


def _plot_efficiency(records: Sequence[Record], path: Path) -> bool:
    """Plot the weak scaling of each shape by its best variant, with the targets."""
    layers = group_layers(collect_results(records, "layer/"))
    found: dict[str, dict[int, float]] = {}
    for (shape, gpus), variants in layers.items():
        best = variants["one"] if gpus == 1 and "one" in variants else None
        if any(variant not in PEERLESS for variant in variants):
            best = variants[find_best(variants)]
        if best and "strict_efficiency" in best:
            found.setdefault(shape, {})[gpus] = 1.0 if gpus == 1 else best["strict_efficiency"]

    def draw(_: int, axes: Axes) -> None:
        for number, (shape, by_gpus) in enumerate(found.items()):
            gpus = sorted(by_gpus)
            axes.plot(gpus, [by_gpus[n] for n in gpus], marker="o", color=f"C{number}", label=shape)
            for (name, n), target in EFFICIENCY_TARGETS.items():
                if name == shape:
                    axes.plot(n, target, marker="_", markersize=18, color=f"C{number}")
        axes.set_xlabel("GPUs")
        axes.set_ylabel("efficiency of the best variant; dashes are targets")
        axes.set_ylim(0, 1.15)
        axes.legend(fontsize=8)

    return _draw(int(bool(found)), ["weak scaling, 8192 tokens a GPU"], path, draw, 6.0)


def _plot_variants(records: Sequence[Record], path: Path) -> bool:
    """Plot the ms of all variants over the most GPUs, with exchanges and their hidden part."""
    layers = group_layers(collect_results(records, "layer/"))
    most = max((gpus for _, gpus in layers), default=0)
    cases = [(case, variants) for case, variants in layers.items() if case[1] == most > 1]

    def draw(number: int, axes: Axes) -> None:
        _, variants = cases[number]
        names = list(variants)
        axes.barh(names, [variants[variant]["ms"] for variant in names], color="lightgrey", label="step")
        axes.barh(
            names, [variants[variant]["exchange_ms"] for variant in names], height=0.4, color="C1", label="exchanges"
        )
        axes.barh(
            names, [variants[variant]["hidden_ms"] for variant in names], height=0.2, color="C2", label="of them hidden"
        )
        axes.set_xlabel("ms")
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)

    return _draw(len(cases), [f"{shape} over {gpus}" for (shape, gpus), _ in cases], path, draw)


def _plot_ssmb(records: Sequence[Record], path: Path) -> bool:
    """Plot kept memory against ms, a point for each variant and each number of tensor-parallel ranks."""
    results = collect_results(records, "ssmb/")
    cases = sorted({(result["shape"], result["gpus"]) for result in results})

    def draw(number: int, axes: Axes) -> None:
        own = [r for r in results if (r["shape"], r["gpus"]) == cases[number]]
        for i, variant in enumerate(dict.fromkeys(r[VARIANT] for r in own)):
            of_variant = [r for r in own if r[VARIANT] == variant]
            axes.scatter(
                [r["ms"] for r in of_variant], [r["kept_mib"] for r in of_variant], label=variant, color=f"C{i}"
            )
            for r in of_variant:
                axes.annotate(f"TP={r['tensor_parallel']}", (r["ms"], r["kept_mib"]), fontsize=7)
        axes.set_xlabel("ms")
        axes.set_ylabel("MiB kept for the backward")
        axes.legend(fontsize=7)

    return _draw(len(cases), [f"{shape} over {gpus}" for shape, gpus in cases], path, draw)


def _plot_models(records: Sequence[Record], path: Path) -> bool:
    """Plot tokens a second of all systems, and predictions against measurements."""
    results = collect_results(records, "model/")
    predicted = [r for r in results if "predicted_ms" in r]
    scaling = find_strong_scaling(results)

    def draw(number: int, axes: Axes) -> None:
        if number == 0:
            names = [f"{r['system']} x{r['gpus']}" for r in results]
            axes.barh(names, [r["tokens_per_s"] for r in results], color="C0")
            axes.set_xlabel("tokens a second")
            axes.tick_params(labelsize=7)
        elif number == 1:
            largest = max([r["gradients_ms"] for r in predicted], default=1.0)
            axes.plot([0, largest], [0, largest], color="black", linewidth=0.8)
            axes.fill_between([0, largest], [0, 0.8 * largest], [0, 1.2 * largest], alpha=0.2, label="20 %")
            axes.scatter([r["gradients_ms"] for r in predicted], [r["predicted_ms"] for r in predicted])
            axes.set_xlabel("measured ms, without the optimizer")
            axes.set_ylabel("predicted ms")
            axes.legend(fontsize=8)
        else:
            for system in dict.fromkeys(system for system, _ in scaling):
                gpus = sorted(n for name, n in scaling if name == system)
                axes.plot(gpus, [scaling[system, n] for n in gpus], marker="o", label=system)
            axes.set_xlabel("GPUs")
            axes.set_ylabel("tokens a second and GPU, by one GPU")
            axes.set_ylim(0, 1.15)
            axes.legend(fontsize=6)

    titles = ["12 layers of Qwen3-30B-A3B, 16 sequences of 4096", "the planner's prediction", "strong scaling"]
    return _draw(3 if results else 0, titles, path, draw, 5.5)


def _plot_skew(records: Sequence[Record], path: Path) -> bool:
    """Plot what skewed routing costs each variant."""
    costs = [cost for cost in find_skew_costs(records) if "uniform_ms" in cost]
    cases = sorted({(cost["shape"], cost["gpus"]) for cost in costs})

    def draw(number: int, axes: Axes) -> None:
        own = [cost for cost in costs if (cost["shape"], cost["gpus"]) == cases[number]]
        axes.barh([cost[VARIANT] for cost in own], [cost["ms"] / cost["uniform_ms"] for cost in own])
        axes.axvline(own[0]["imbalance"], color="black", linewidth=0.8, label="rows of the busiest rank / mean")
        axes.set_xlabel("ms under Zipf's law by ms under uniform routing")
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)

    return _draw(len(cases), [f"{shape} over {gpus}" for shape, gpus in cases], path, draw)


def _plot_stragglers(records: Sequence[Record], path: Path) -> bool:
    """Plot the percentiles of exchanges by the median of their size."""
    results = collect_results(records, "stragglers/exchanges")
    cases = sorted({(result["kind"], result["gpus"]) for result in results})

    def draw(number: int, axes: Axes) -> None:
        for result in results:
            if (result["kind"], result["gpus"]) == cases[number]:
                ratios = [ms / result["ms"] for ms in result["percentiles_ms"]]
                axes.plot(range(101), ratios, label=f"{result['num_bytes'] / 1024:.0f} KiB")
        axes.set_xlabel("percentile of the exchanges")
        axes.set_ylabel("seconds by the median")
        axes.set_yscale("log")
        axes.legend(fontsize=6)

    return _draw(len(cases), [f"{kind} over {gpus}" for kind, gpus in cases], path, draw)
