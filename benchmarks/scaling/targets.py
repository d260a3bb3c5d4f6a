"""Compute targets that were met, ratios and strong scaling from the results of `benchmarks/scale.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .results_file import Record

Result = dict[str, Any]

# Efficiency of the best variant against the faster one of one GPU eager and captured, by shape and GPUs.
EFFICIENCY_TARGETS = {("qwen3_30b", 4): 0.88, ("qwen3_30b", 8): 0.80, ("dsv3_e64", 4): 0.95, ("dsv3_e64", 8): 0.92}
_AUTO_TARGET, _PREDICTION_TARGET = 0.05, 0.20
PEERLESS = ("one", "one+graph")
VARIANT = "way"  # the key of the variant in files of results


@dataclasses.dataclass(frozen=True)
class Target:
    """A target: what is demanded, and what was measured."""

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
    """Return the measured variants by (shape, GPUs)."""
    groups: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        if "ms" in result:
            groups.setdefault((result["shape"], result["gpus"]), {})[result[VARIANT]] = result
    return groups


def find_best(variants: dict[str, Result]) -> str:
    """Return the fastest variant over several GPUs.

    Raises:
        ValueError: none was measured.
    """
    return min(
        (variant for variant in variants if variant not in PEERLESS), key=lambda variant: variants[variant]["ms"]
    )


def judge(records: Sequence[Record]) -> list[Target]:
    """Judge all targets whose rows were measured."""
    layers = group_layers(collect_results(records, "layer/"))
    return [*_judge_layers(layers), *_judge_models(collect_results(records, "model/"))]


def _judge_layers(layers: dict[tuple[str, int], dict[str, Result]]) -> Iterator[Target]:
    for (shape, gpus), variants in layers.items():
        several = [variant for variant in variants if variant not in PEERLESS]
        if not several:
            continue
        target = EFFICIENCY_TARGETS.get((shape, gpus))
        best = variants[find_best(variants)]
        if target is not None and "strict_efficiency" in best:
            found = best["strict_efficiency"]
            yield Target(
                f"{shape} over {gpus}, best variant", f">= {target}", f"{found:.3f} by {best[VARIANT]}", found >= target
            )
        eager = {variant: variants[variant]["ms"] for variant in several if not variant.endswith("+graph")}
        least = min(eager, key=lambda variant: eager[variant], default="")
        for variant in several:
            if variant.startswith("auto") and variant in eager:
                over = eager[variant] / eager[least] - 1
                found = f"{over:+.1%} behind {least} (chose {variants[variant].get('dispatch', '?')})"
                demand = f"within {_AUTO_TARGET:.0%} of the best eager variant"
                yield Target(f"{shape} over {gpus}, {variant}", demand, found, over <= _AUTO_TARGET)


def _judge_models(results: Sequence[Result]) -> Iterator[Target]:
    for result in results:
        if "predicted_ms" in result:
            error = result["predicted_ms"] / result["gradients_ms"] - 1
            name = f"prediction of {result['system']} over {result['gpus']}"
            yield Target(name, f"within {_PREDICTION_TARGET:.0%}", f"{error:+.1%}", abs(error) <= _PREDICTION_TARGET)


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
    """Return the skewed variants, with the ms of the same variant under uniform routing, "uniform_ms", if measured."""
    uniform = group_layers(collect_results(records, "layer/"))
    costs = []
    for result in collect_results(records, "skew/"):
        if "ms" in result:
            even = uniform.get((result["shape"], result["gpus"]), {}).get(result[VARIANT], {})
            costs.append(result | ({"uniform_ms": even["ms"]} if even else {}))
    return costs
