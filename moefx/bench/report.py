"""Tables and a plot of the results of `bench moe`.

python -m moefx bench report results.jsonl [--plot results.png]

Several rounds are reported by their medians. A shape's name is followed by its routing if that is not uniform. The cost
of the slowest routing for each peer stands below the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import CEILING

Rows = dict[str, Mapping[str, Any]]  # by peer
Results = dict[tuple[str, str], Rows]  # by shape and routing

METRICS = {
    "step_ms": ("ms forward+backward (part of the ceiling)", ".3f"),
    "forward_ms": ("ms forward", ".3f"),
    "saved_bytes_per_token": ("bytes a token from forward to backward", ".0f"),
    "peak_mib": ("MiB at the peak of a step", ".0f"),
}


def read_results(path: Path) -> tuple[Mapping[str, Any], Results]:
    """Read (environment, results) from JSON lines."""
    environment: Mapping[str, Any] = {}
    by_case: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    ceilings: dict[str, list[Mapping[str, Any]]] = defaultdict(list)  # by shape, as they have no routing
    for row in map(json.loads, path.read_text().splitlines()):
        if "environment" in row:
            environment = row["environment"]
        else:
            by_case[row["shape"], row.get("routing", "uniform")][row["peer"]].append(row)
            if row["peer"] == CEILING:
                ceilings[row["shape"]].append(row)
    for (shape, _), peers in by_case.items():
        if shape in ceilings:
            peers[CEILING] = ceilings[shape]
    return environment, {
        case: {peer: _merge_rounds(rows) for peer, rows in peers.items()} for case, peers in by_case.items()
    }


def _merge_rounds(rounds: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the medians of the rounds that succeeded, or the last round if none did."""
    successes = [row for row in rounds if "error" not in row]
    if not successes:
        return rounds[-1]
    medians = {m: statistics.median(row[m] for row in successes) for m in METRICS if m in successes[0]}
    return {**successes[-1], **medians}


def list_peers(results: Results) -> list[str]:
    names = dict.fromkeys(peer for rows in results.values() for peer in rows)
    return sorted(names, key=lambda name: (name == CEILING, name != "moefx"))


def format_tables(results: Results) -> str:
    """Return a table for each metric, followed by the failures and the slowest routings."""
    lines = []
    names = {case: _format_row_name(*case) for case in results}
    width = max(map(len, names.values()), default=0)
    for metric, (title, number_format) in METRICS.items():
        peers = [peer for peer in list_peers(results) if any(metric in rows.get(peer, {}) for rows in results.values())]
        if metric not in ("step_ms", "forward_ms"):
            peers = [peer for peer in peers if peer != CEILING]  # the ceiling keeps no tensors for a real backward
        if peers:
            lines += [title, " " * width + "".join(f"{peer:>20}" for peer in peers)]
            for case, rows in results.items():
                cells = (f"{_format_cell(rows, peer, metric, number_format):>20}" for peer in peers)
                lines.append(f"{names[case]:{width}}" + "".join(cells))
            lines.append("")
    for case, rows in results.items():
        lines += [f"{names[case]}, {peer}: {row['error']}" for peer, row in rows.items() if "error" in row]
    return "\n".join([*lines, *_list_slowest(results)])


def _format_row_name(shape: str, routing: str) -> str:
    return shape if routing == "uniform" else f"{shape} {routing}"


def _format_cell(rows: Rows, peer: str, metric: str, number_format: str) -> str:
    if metric not in rows.get(peer, {}):
        return "-"
    part = compute_ceiling_fraction(rows, peer) if metric == "step_ms" and peer != CEILING else None
    return f"{rows[peer][metric]:{number_format}}" + (f" ({part:.2f})" if part else "")


def _list_slowest(results: Results) -> list[str]:
    """List the slowest routing of each peer, with its step time over that of uniform routing."""
    lines = []
    for peer in list_peers(results):
        times = {case: rows[peer]["step_ms"] for case, rows in results.items() if "step_ms" in rows.get(peer, {})}
        slower = {
            case: ms / times[case[0], "uniform"]
            for case, ms in times.items()
            if case[1] != "uniform" and (case[0], "uniform") in times
        }
        if slower and peer != CEILING:
            worst = max(slower, key=lambda case: slower[case])
            lines.append(f"slowest routing, {peer}: {slower[worst]:.2f} times uniform ({_format_row_name(*worst)})")
    return lines


def compute_ceiling_fraction(rows: Rows, peer: str) -> float | None:
    """Return the fraction of the ceiling that a peer reaches; None if it was not measured."""
    if not all("step_ms" in rows.get(name, {}) for name in (peer, CEILING)):
        return None
    return rows[CEILING]["step_ms"] / rows[peer]["step_ms"]


def plot(environment: Mapping[str, Any], results: Results, path: Path) -> None:
    """Plot a row of bars for each routing."""
    from matplotlib.figure import Figure  # in the extra `bench`
    from matplotlib.patches import Patch

    routings = list(dict.fromkeys(routing for _, routing in results))
    shapes = list(dict.fromkeys(shape for shape, _ in results))
    colors = {peer: f"C{i}" for i, peer in enumerate(peer for peer in list_peers(results) if peer != CEILING)}
    figure = Figure(figsize=(1.2 * len(shapes) + 2, 1 + 3 * len(routings)), layout="constrained")
    width = 0.8 / max(1, len(colors))
    for routing, axes in zip(routings, figure.subplots(len(routings), squeeze=False)[:, 0], strict=True):
        for n, shape in enumerate(shapes):
            rows = results.get((shape, routing), {})
            parts = {peer: part for peer in colors if (part := compute_ceiling_fraction(rows, peer))}
            for i, (peer, part) in enumerate(parts.items()):  # side by side, without gaps for those not measured
                axes.bar(n + (i - (len(parts) - 1) / 2) * width, part, width, color=colors[peer])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(shapes)), shapes, rotation=20)
        axes.set_ylabel(f"part of the ceiling\n{routing} routing")
    devices, versions = environment.get("devices", {}), environment.get("versions", {})
    subtitle = ", ".join(
        [devices.get("accelerator", "?"), *(f"{n} {versions.get(n, '?')}" for n in ("torch", "triton"))]
    )
    figure.suptitle(f"MoE MLP, forward with backward, bfloat16; ceiling: batched GEMMs alone\n{subtitle}", fontsize=10)
    patches = [Patch(color=color, label=peer) for peer, color in colors.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m moefx bench report", description=__doc__, formatter_class=formatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path, default=None, help="a picture; needs matplotlib")
    options = parser.parse_args(argv)
    try:
        environment, results = read_results(options.results)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.results}: {type(error).__name__}: {error}")
    print(format_tables(results))
    if options.plot:
        plot(environment, results, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
