"""The history of a block: an executable snapshot of the graph after every pass, with its provenance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NoSuchPass
from ..ir.graphs.block_graph import BlockGraph
from ..ir.graphs.graph_printer import format_lines, print_lines
from . import history_page, repro_script
from .line_diff import diff_lines

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The graph after one pass.

    Attributes:
        index, total: position of the pass, from 1, and number of passes.
        pass_name: name of the pass.
        ms: time of the pass in milliseconds, without checks.
        added, removed: number of added and removed nodes, without parameters and unpacked results.
        rule: file and line of the pass, `"passes/fuse.py:88"`.
        graph: the graph; its header holds the same provenance.
    """

    index: int
    total: int
    pass_name: str
    ms: float
    added: int
    removed: int
    rule: str
    graph: BlockGraph

    @property
    def header(self) -> str:
        """`after 5/8 collectives   1.9 ms   +4 -1   passes/collectives.py:88`"""
        parts = (
            f"after {self.index}/{self.total} {self.pass_name}",
            f"{self.ms:.1f} ms",
            f"+{self.added} -{self.removed}",
            self.rule,
        )
        return "   ".join(filter(None, parts))

    def with_total(self, total: int) -> Snapshot:
        """Return a copy with another total number of passes."""
        snapshot = dataclasses.replace(self, total=total)
        return dataclasses.replace(snapshot, graph=self.graph.replace(header=snapshot.header))

    def __str__(self) -> str:
        return str(self.graph.replace(header=self.header))


@dataclasses.dataclass(frozen=True)
class History:
    """The snapshots of one block, oldest first. A sequence of `Snapshot`.

    Attributes:
        name: the block's name in the model.
        snapshots: one snapshot per pass.
        captured: the block's own operations before any pass, as the proof captured them in one run. The passes
            started from it. Sizes and choices of experts are those of that run, so it is not for other inputs.
            None if it has thousands of operations.
    """

    name: str
    snapshots: tuple[Snapshot, ...]
    captured: BlockGraph | None = None

    @property
    def graph(self) -> BlockGraph:
        """The graph that runs, after the last pass."""
        return self.snapshots[-1].graph

    @property
    def passes(self) -> tuple[str, ...]:
        return tuple(snapshot.pass_name for snapshot in self.snapshots)

    def __getitem__(self, key: int | str) -> Snapshot:
        """Return the snapshot at a position, or after the named pass.

        Raises:
            NoSuchPass: that pass did not run.
        """
        if isinstance(key, int):
            return self.snapshots[key]
        for snapshot in reversed(self.snapshots):
            if snapshot.pass_name == key:
                return snapshot
        raise NoSuchPass(f"no pass {key!r} ran on {self.name or 'the model'}; there is {', '.join(self.passes)}")

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.snapshots)

    def __len__(self) -> int:
        return len(self.snapshots)

    def renamed(self, name: str) -> History:
        """Return a copy for another block of the same structure, with the same graphs."""
        snapshots = (dataclasses.replace(s, graph=s.graph.replace(name=name)) for s in self.snapshots)
        return History(name, tuple(snapshots), self.captured and self.captured.replace(name=name))

    def diff(self, after: str | None = None) -> str:
        """Return the changes of a pass, by default the last, as a diff of the printed graphs.

        Raises:
            NoSuchPass: that pass did not run.
        """
        snapshot = self.snapshots[-1] if after is None else self[after]
        position = self.snapshots.index(snapshot)
        before = print_lines(self.snapshots[position - 1].graph) if position else []
        marked_lines = diff_lines(before, print_lines(snapshot.graph))
        texts = format_lines([line for _, line in marked_lines])
        body = [f"{mark} {text}".rstrip() for (mark, _), text in zip(marked_lines, texts, strict=True)]
        return "\n".join([f"# {self.name or 'model'}   {snapshot.header}", *body])

    def html(self, path: str | PathLike[str], *, bytes_per_policy: Mapping[str, float] | None = None) -> None:
        """Write a self-contained HTML page: drawings of the block before and after, and the changes of every pass.

        Args:
            bytes_per_policy: bytes kept for the backward, by checkpoint policy; drawn as bars.
        """
        body = history_page.build_fragment(self, bytes_per_policy=bytes_per_policy)
        Path(path).write_text(history_page.build_page(self.name or "model", body), encoding="utf-8")

    def repro(self, path: str | PathLike[str], *, block: nn.Module | None = None) -> None:
        """Write a Python script that runs the graphs after all passes on random weights and inputs, and compares them.

        Args:
            block: the block, if shapes of its parameters are missing in the graphs.
        """
        Path(path).write_text(repro_script.build_script(self, block), encoding="utf-8")

    def __str__(self) -> str:
        width = max((len(s.pass_name) for s in self.snapshots), default=0)
        rows = [
            f"  {s.index}/{s.total}  {s.pass_name.ljust(width)}  {s.ms:8.1f} ms  +{s.added:<3} -{s.removed:<3} {s.rule}"
            for s in self.snapshots
        ]
        return "\n".join([f"# history of {self.name or 'model'}", *(row.rstrip() for row in rows)])
