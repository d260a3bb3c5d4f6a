"""A table, and a plot, of what `bench moe` wrote.

python -m moefx bench report results.jsonl [--plot results.png]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import CEILING

Results = dict[str, dict[str, Mapping[str, Any]]]  # shape, and routing if it is not uniform -> peer -> row


def read(path: Path) -> tuple[Mapping[str, Any], Results]:
    """(environment, results) of JSON lines; of a peer measured twice the last."""
    environment: Mapping[str, Any] = {}
    results: Results = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if "environment" in row:
            environment = row["environment"]
        else:
            routing = row.get("routing", "uniform")
            what = row["shape"] if routing == "uniform" else f"{row['shape']} {routing}"
            results.setdefault(what, {})[row["peer"]] = row
    return environment, results


def peers_of(results: Results) -> list[str]:
    names = dict.fromkeys(peer for rows in results.values() for peer in rows)
    return sorted(names, key=lambda name: (name == CEILING, name != "moefx", name))


def table(results: Results) -> str:
    """Milliseconds of forward with backward, and the part of the ceiling that this is; what failed is named below."""
    peers = peers_of(results)
    lines, failed = [f"{'ms forward+backward':20}" + "".join(f"{peer:>22}" for peer in peers)], []
    for shape, rows in results.items():
        cells = []
        for peer in peers:
            row = rows.get(peer)
            if row is None or "error" in row:
                cells.append("-")
                failed += [f"{shape}, {peer}: {row['error']}"] if row else []
                continue
            part = fraction(rows, peer)
            cells.append(f"{row['step_ms']:.3f}" + (f" ({part:.2f})" if part and peer != CEILING else ""))
        lines.append(f"{shape:20}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join([*lines, *failed])


def fraction(rows: Mapping[str, Mapping[str, Any]], peer: str) -> float | None:
    """Of the ceiling."""
    if not all("step_ms" in rows.get(name, {}) for name in (peer, CEILING)):
        return None
    return rows[CEILING]["step_ms"] / rows[peer]["step_ms"]


def plot(environment: Mapping[str, Any], results: Results, path: Path) -> None:
    from matplotlib.figure import Figure  # in the extra `bench`

    shapes, peers = list(results), [peer for peer in peers_of(results) if peer != CEILING]
    figure = Figure(figsize=(1.2 * len(shapes) + 2, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(peers))
    for i, peer in enumerate(peers):
        parts = [fraction(results[shape], peer) or 0.0 for shape in shapes]
        axes.bar([n + (i - (len(peers) - 1) / 2) * width for n in range(len(shapes))], parts, width, label=peer)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), shapes, rotation=20)
    axes.set_ylabel("part of the ceiling (batched GEMMs alone)")
    devices, versions = environment.get("devices", {}), environment.get("versions", {})
    where = ", ".join([devices.get("accelerator", "?"), *(f"{n} {versions.get(n, '?')}" for n in ("torch", "triton"))])
    axes.set_title(f"MoE MLP, forward with backward, bfloat16\n{where}", fontsize=10)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m moefx bench report", description=__doc__, formatter_class=formatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path, default=None, help="a picture; needs matplotlib")
    options = parser.parse_args(argv)
    try:
        environment, results = read(options.results)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.results}: {type(error).__name__}: {error}")
    print(table(results))
    if options.plot:
        plot(environment, results, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
