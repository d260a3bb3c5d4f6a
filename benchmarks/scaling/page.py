"""A page of the results of `benchmarks/scale.py`: targets, tables and plots, in Markdown beside the file of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .results_file import DONE, Record, read_records
from .rows import PARTS
from .targets import VARIANT, Result, collect_results, find_skew_costs, find_strong_scaling, judge

Column = tuple[str, Callable[[Result], Any]]
_VARIANT: Column = "variant", lambda result: result.get(VARIANT, "-")


def write_page(path: Path) -> int:
    """Print the page of a file of results, and write it with its plots. Returns 0.

    A dry run is printed, and neither written nor plotted: its figures mean nothing.
    """
    records = read_records(path)
    page = format_page(records)
    print(page)
    if any(record.is_dry for record in records):
        print("a dry run: no page and no plots")
        return 0
    from .plots import plot_all

    pictures = plot_all(records, path)
    links = [f"![{picture.stem}]({picture.name})" for picture in pictures]
    path.with_suffix(".md").write_text("\n\n".join([page, *links]) + "\n")
    print(f"wrote {path.with_suffix('.md')} and {len(pictures)} pictures")
    return 0


def format_page(records: Sequence[Record]) -> str:
    """Format the environment, the targets, a table for each part, and the rows that failed."""
    environment = records[-1].environment if records else {}
    devices, versions = environment.get("devices", {}), environment.get("versions", {})
    machine = f"{devices.get('accelerator', '?')}, torch {versions.get('torch', '?')}, {environment.get('commit', '?')}"
    title = "Dry run on a CPU: the figures mean nothing" if any(r.is_dry for r in records) else "Scaling"
    parts = [f"# {title}", machine]
    if targets := [] if any(record.is_dry for record in records) else judge(records):
        rows = [
            (target.name, target.demand, target.found, "met" if target.is_met else "**missed**") for target in targets
        ]
        parts += ["## Targets", format_table(("target", "demand", "measured", ""), rows)]
    seen = set()
    for number, columns, results in list_tables(records):
        if results:
            if number not in seen:
                parts.append(f"## {number}. {PARTS[number][0].upper()}{PARTS[number][1:]}")
            seen.add(number)
            parts.append(format_results(columns, results))
    last = {record.row: record for record in records}.values()
    if failed := [(r.row, r.status, r.error.replace("\n", " ")[:300]) for r in last if r.status != DONE]:
        parts += ["## Rows that are not done", format_table(("row", "status", "error"), failed)]
    return "\n\n".join(parts)


def list_tables(records: Sequence[Record]) -> list[tuple[int, list[Column], list[Result]]]:
    """Return the part, the columns and the results of each table."""
    models = collect_results(records, "model/")
    scaling = find_strong_scaling(models)
    layer = [_get("shape"), _get("gpus"), _VARIANT, ("ms", _number("ms", ".3f"))]
    sizes: list[Column] = [(f"{name} MiB", _mib(f"{name}_bytes")) for name in ("sent", "formula", "uniform")]
    efficiency: list[Column] = [("efficiency", _number("efficiency", ".3f"))]
    strict: list[Column] = [("strict", _number("strict_efficiency", ".3f"))]
    exchange: list[Column] = [(f"{name} ms", _number(f"{name}_ms", ".3f")) for name in ("exchange", "hidden")]
    failure: list[Column] = [("not measured", lambda r: r.get("failure", "").partition("\n")[0][:120])]
    model = [_get("system"), _get("gpus"), *_columns("tokens_per_s", "ms", "gradients_ms", "peak_gib", form=".1f")]
    model += [*_columns("mfu", form=".3f"), *_columns("bubble_ms", form=".1f")]
    model += _columns("predicted_bubble_ms", "predicted_reduction_ms", "predicted_ms", form=".1f")
    model += [("predicted / measured", lambda r: _divide(r.get("predicted_ms"), r["gradients_ms"]))]
    model += [("strong scaling", lambda r: _form(scaling.get((r["system"], r["gpus"])), ".3f"))]
    late: list[Column] = [("late rank ms", _number("delayed_ms", ".3f"))]
    late += [("share of the delay", lambda r: _divide(r.get("delayed_ms", 0.0) - r.get("ms", 0.0), r.get("delay_ms")))]
    ssmb = [_get("shape"), _get("gpus"), _get("tensor_parallel"), _VARIANT]
    ssmb += [("ms", _number("ms", ".2f")), *_columns("kept_mib", "peak_mib", form=".1f")]
    ssmb += [("gather MiB", _mib("gather_bytes")), ("formula MiB", _mib("gather_formula_bytes"))]
    spread = [_get("kind"), _get("gpus"), ("KiB", lambda r: f"{r['num_bytes'] / 1024:.1f}"), _get("repeats")]
    spread += [("median ms", _number("ms", ".4f"))]
    spread += [(f"p{i}", lambda r, i=i: f"{r['percentiles_ms'][i]:.4f}") for i in (1, 90, 99, 100)]
    spread += [("p99.9", _number("p999_ms", ".4f")), ("beyond 2x", _number("late_share", ".1%"))]
    killed = [_VARIANT, _get("gpus"), _get("moment"), ("all raise RanksLost", lambda r: r["is_clean"])]
    killed += [("worst s", _number("worst_seconds", ".1f"))]
    killed += [("others", lambda r: ", ".join(sorted({end["outcome"] for end in r["ends"]})))]
    skew: list[Column] = [("uniform ms", _number("uniform_ms", ".3f"))]
    skew += [("skewed / uniform", lambda r: _divide(r["ms"], r.get("uniform_ms")))]
    skew += [("busiest rank", _number("imbalance", ".2f"))]
    return [
        (1, [*layer, *efficiency, *strict, *exchange, *sizes, *failure], collect_results(records, "layer/")),
        (2, ssmb, collect_results(records, "ssmb/")),
        (3, model, models),
        (4, [*layer, *efficiency, ("error", _number("error", ".4f")), *failure], collect_results(records, "peers/")),
        (5, [*layer, *skew, *efficiency, *sizes], find_skew_costs(records)),
        (6, spread, collect_results(records, "stragglers/exchanges")),
        (6, [*layer, *late, *failure], collect_results(records, "stragglers/late_rank")),
        (7, killed, collect_results(records, "failures/")),
    ]


def format_results(columns: Sequence[Column], results: Iterable[Result]) -> str:
    return format_table([name for name, _ in columns], [[read(result) for _, read in columns] for result in results])


def format_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _get(name: str) -> Column:
    return name.replace("_", " "), lambda result: result.get(name, "-")


def _columns(*names: str, form: str) -> list[Column]:
    labels = [name.replace("_", " ").replace("gib", "GiB").replace("mib", "MiB") for name in names]
    return [(label, _number(name, form)) for label, name in zip(labels, names, strict=True)]


def _number(name: str, form: str) -> Callable[[Result], str]:
    return lambda result: _form(result.get(name), form)


def _mib(name: str) -> Callable[[Result], str]:
    return lambda result: _form(result[name] / 2**20, ".3f") if name in result else "-"


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _divide(value: float | None, by: float | None) -> str:
    return f"{value / by:.2f}" if value is not None and by else "-"
