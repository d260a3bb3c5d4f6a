"""Compute targets that were met, ratios and strong scaling from the results of `benchmarks/scale.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .results_file import Record

Result = dict[str, Any]

# Efficiency of the best way against the faster one of one GPU eager and captured, by shape and GPUs.
EFFICIENCY_BARS = {("qwen3_30b", 4): 0.88, ("qwen3_30b", 8): 0.80, ("dsv3_e64", 4): 0.95, ("dsv3_e64", 8): 0.92}
_AUTO_BAR, _PREDICTION_BAR = 0.05, 0.20
PEERLESS = ("one", "one+graph")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A demand and what was measured."""

    name: str
    demand: str
    found: str
    is_met: bool


def collect_results(records: Sequence[Record], prefix: str) -> list[Result]:
    """Return the results in the last record of each row whose name starts with `prefix`. Adds "gpus"."""
    last = {record.row: record for record in records}
    rows = [record for record in last.values() if record.row.startswith(prefix)]
    return [result | {"gpus": record.gpus} for record in rows for result in record.results]


def group_layers(results: Sequence[Result]) -> dict[tuple[str, int], dict[str, Result]]:
    """Return the measured ways by (shape, GPUs)."""
    groups: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        if "ms" in result:
            groups.setdefault((result["shape"], result["gpus"]), {})[result["way"]] = result
    return groups


def find_best(ways: dict[str, Result]) -> str:
    """Return the fastest way over several GPUs.

    Raises:
        ValueError: none was measured.
    """
    return min((way for way in ways if way not in PEERLESS), key=lambda way: ways[way]["ms"])


def judge(records: Sequence[Record]) -> list[Bar]:
    """Judge all bars whose rows were measured."""
    layers = group_layers(collect_results(records, "layer/"))
    return [*_judge_layers(layers), *_judge_models(collect_results(records, "model/"))]


def _judge_layers(layers: dict[tuple[str, int], dict[str, Result]]) -> Iterator[Bar]:
    for (shape, gpus), ways in layers.items():
        several = [way for way in ways if way not in PEERLESS]
        if not several:
            continue
        bar = EFFICIENCY_BARS.get((shape, gpus))
        best = ways[find_best(ways)]
        if bar is not None and "strict_efficiency" in best:
            found = best["strict_efficiency"]
            yield Bar(f"{shape} over {gpus}, best way", f">= {bar}", f"{found:.3f} by {best['way']}", found >= bar)
        eager = {way: ways[way]["ms"] for way in several if not way.endswith("+graph")}
        least = min(eager, key=lambda way: eager[way], default="")
        for way in several:
            if way.startswith("auto") and way in eager:
                over = eager[way] / eager[least] - 1
                found = f"{over:+.1%} behind {least} (chose {ways[way].get('dispatch', '?')})"
                yield Bar(f"{shape} over {gpus}, {way}", f"within {_AUTO_BAR:.0%} of the best eager way", found,
                          over <= _AUTO_BAR)  # fmt: skip


def _judge_models(results: Sequence[Result]) -> Iterator[Bar]:
    for result in results:
        if "predicted_ms" in result:
            error = result["predicted_ms"] / result["gradients_ms"] - 1
            name = f"prediction of {result['system']} over {result['gpus']}"
            yield Bar(name, f"within {_PREDICTION_BAR:.0%}", f"{error:+.1%}", abs(error) <= _PREDICTION_BAR)


def find_strong_scaling(results: Sequence[Result]) -> dict[tuple[str, int], float]:
    """Return the tokens a second over those of the same number of single GPUs, by (system, GPUs).

    The single GPU trains with "fsdp", the peer with its own layout: as many sequences a step everywhere.
    """
    alone = {result["system"]: result["tokens_per_s"] for result in results if result["gpus"] == 1}
    found = {}
    for result in results:
        base = alone.get(result["system"], alone.get("fsdp"))
        if base:
            found[result["system"], result["gpus"]] = result["tokens_per_s"] / (base * result["gpus"])
    return found


def find_skew_costs(records: Sequence[Record]) -> list[Result]:
    """Return the skewed ways with the ms of the same way under uniform routing, "uniform_ms", if that was measured."""
    uniform = group_layers(collect_results(records, "layer/"))
    costs = []
    for result in collect_results(records, "skew/"):
        if "ms" in result:
            even = uniform.get((result["shape"], result["gpus"]), {}).get(result["way"], {})
            costs.append(result | ({"uniform_ms": even["ms"]} if even else {}))
    return costs
