"""Format a report as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..comparison.compare import NO_TRUTH
from ..comparison.policy import Row
from ..comparison.routing_tape import RoutingRow
from ..comparison.sandbox import SECOND_BACKWARD

if TYPE_CHECKING:
    from .verify_report import VerifyReport

MAX_FAILED = 20
OTHER_VALUES = "the two models hold different values before they run"
NOTHING_REWRITTEN = "the compiled model has no rewritten block: nothing of moefx ran"
LEGEND = (
    "errors are relative to the original in float64 (in later calls and other routings to the original itself if it is "
    "close enough), less the rounding of the largest gradient; "
    "norm: row is the worst row, rel2 the whole tensor"
)


def format_report(report: VerifyReport) -> str:
    """Format one line for each (block, kind) with its worst tensor, the routing of each block, and the failures."""
    rows, failures = report.rows, report.failed
    blocks = list(dict.fromkeys(row.block for row in rows))
    verdict = "passed" if report.ok else f"FAILED, {len(failures)} of {len(rows)} comparisons"
    if without_truth := sum(NO_TRUTH in note for note in report.notes):
        verdict += f"; {without_truth} part(s) without a float64 truth, compared with the original in its own precision"
    lines = [f"moefx.verify: {verdict}"]
    lines += _align_columns(
        [("block", "kind", "compared", "worst error", "allowed", "norm", "worst tensor", "")]
        + [
            _summarize_rows(block, kind, [row for row in rows if (row.block, row.kind) == (block, kind)])
            for block in blocks
            for kind in dict.fromkeys(row.kind for row in rows if row.block == block)
        ]
    )
    lines.append(f"  {LEGEND}")
    if seconds := sum(row.name.endswith(SECOND_BACKWARD) for row in rows):
        lines.append(f"  {seconds} of the comparisons are of a second backward, with cotangents of stride 0")
    lines += [f"  also compared: {entry}" for entry in report.covered]
    lines += [f"  not compared: {entry}" for entry in report.not_covered]
    if report.routing:
        lines += ["", "routing, beside the reference's"]
        lines += _align_columns(
            [("block", "op", "tokens", "same experts", "smallest margin", "imposed", "beyond rounding")]
            + [
                _summarize_routing([row for row in report.routing if (row.block, row.op) == key])
                for key in dict.fromkeys((row.block, row.op) for row in report.routing)
            ]
        )
    if failures:
        lines += ["", "failed"]
        lines += _align_columns([_format_failure(row) for row in failures[:MAX_FAILED]])
        lines += [f"  ... and {len(failures) - MAX_FAILED} more"] if len(failures) > MAX_FAILED else []
        lines += ["", _format_culprit(report)]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)


def _format_culprit(report: VerifyReport) -> str:
    if any(row.note == OTHER_VALUES for row in report.rows):
        return "The two models hold different weights or buffers: compare models with equal weights."
    if report.failed and all(row.note == NOTHING_REWRITTEN for row in report.failed):
        return (
            "The two models agree, but the first one has no rewritten block. Pass what moefx.compile returned first: "
            "verify(compiled, model, inputs). If you did, moefx.explain(compiled) says why no block was rewritten."
        )
    if report.first_block is None:
        return (
            "No rewritten block differs on the reference's own inputs: the difference lies outside the blocks. "
            "Check that the compiled model is the first argument, and the reference the second."
        )
    pass_text = f"; first pass that differs: {report.first_pass}" if report.first_pass else ""
    return f"First block that differs: {_format_block(report.first_block)}{pass_text}"


def _summarize_rows(block: str, kind: str, rows: Sequence[Row]) -> tuple[str, ...]:
    worst = max(rows, key=lambda r: (not r.ok, r.error / r.bound if r.bound else r.error))
    num_failed = sum(not row.ok for row in rows)
    return (
        _format_block(block), kind, str(len(rows)), f"{worst.error:.2g}", f"{worst.bound:.2g}", worst.norm,
        worst.name, f"FAILED ({num_failed})" if num_failed else "ok",
    )  # fmt: skip


def _summarize_routing(rows: Sequence[RoutingRow]) -> tuple[str, ...]:
    tokens = sum(row.tokens for row in rows)
    identical = sum(row.identical * row.tokens for row in rows) / max(tokens, 1)
    margins = [row.margin for row in rows if not math.isnan(row.margin)]
    return (
        _format_block(rows[0].block), rows[0].op, str(tokens), f"{identical:.2%}",
        f"{min(margins):.2g}" if margins else "-",
        str(sum(row.imposed for row in rows)), str(sum(row.beyond for row in rows)),
    )  # fmt: skip


def _format_failure(row: Row) -> tuple[str, ...]:
    difference = row.note or f"{row.norm} error {row.error:.2g}, allowed {row.bound:.2g}"
    return _format_block(row.block), row.kind, row.name, difference, row.case


def _format_block(block: str) -> str:
    return block or "(model)"


def _align_columns(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded_rows = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
    return ["  " + "  ".join(row).rstrip() for row in padded_rows]
