"""Compute the difference between two printed graphs."""

from __future__ import annotations

import difflib

from ..ir.graphs.graph_printer import Line


def diff_lines(before: list[Line], after: list[Line]) -> list[tuple[str, Line]]:
    """Return the lines of both graphs, marked " ", "-" or "+". Ignores source locations and alignment."""
    matcher = difflib.SequenceMatcher(a=[_text(n) for n in before], b=[_text(n) for n in after], autojunk=False)
    result: list[tuple[str, Line]] = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            result += [(" ", line) for line in after[j1:j2]]
        else:
            result += [("-", line) for line in before[i1:i2]]
            result += [("+", line) for line in after[j1:j2]]
    return result


def _text(line: Line) -> str:
    return f"{line.name} = {line.code} # {line.comment}"
