"""What became of the graphs that were compiled with the backend, for those who ask about the model or the function."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from .api import Record
from .capture.source import Source
from .graphs.dims import NO_TOKENS, ONE_TOKEN
from .graphs.nodes import sources_of
from .graphs.rewriting import Found
from .inspection.explain import MatchedBlock
from .runtime.module import BlockForward, rewritten_blocks
from .survey import Refusal

_MOST = 64
_FEW = "graphs of a single token, or of none, run as they were"
_NOTHING = Refusal(
    "",
    "no graph of it has a region: it was not called yet, or Dynamo breaks it apart, or the experts are in no graph",
    remedy="call it first. What moefx.compile finds, moefx.explain says of the model that torch.compile was called on",
)


@dataclasses.dataclass
class Compiled:
    """A graph that experts were found in.

    Attributes:
        weights: that its regions take, or it, weakly.
        entered: the lines of the function that Dynamo compiled from which the graph's ops come.
    """

    record: Record
    forwards: dict[str, BlockForward]
    weights: list[weakref.ref[torch.Tensor]]
    entered: set[tuple[str, int]]


KEPT: list[Compiled] = []


def keep(out: fx.GraphModule, found: Found, record: Record) -> None:
    forwards = {forward.name: forward for forward in rewritten_blocks(out).values()}
    every = found.every()
    held = [f.facts.weights[n] for f in every for region, _ in f.matched for n in region.weights]
    held = held or [t for f in every for t in f.facts.weights.values()]
    outermost: set[Source] = {sources_of(n, 0)[-1] for n in found.facts.nodes if n.stack_trace}
    entered = {(source.file, source.line) for source in outermost}
    KEPT.append(Compiled(record, forwards, [weakref.ref(t) for t in held], entered))
    del KEPT[:-_MOST]


def of_model(model: nn.Module) -> list[Compiled]:
    mine = {id(t) for t in (*model.parameters(), *model.buffers())}
    alive = [(one, next((t for ref in one.weights if (t := ref()) is not None), None)) for one in KEPT]
    return [one for one, weight in alive if weight is not None and id(weight) in mine]


def of_function(function: Callable[..., Any]) -> list[Compiled]:
    """Of what `torch.compile` made of a function: weights may be anywhere, but it is entered at its own lines."""
    code = inspect.unwrap(getattr(function, "_torchdynamo_orig_callable", function)).__code__
    lines = {(code.co_filename, line) for _, _, line in code.co_lines() if line is not None}
    return [one for one in KEPT if lines & one.entered]


def together(mine: list[Compiled]) -> tuple[Record, dict[str, BlockForward]]:
    """The regions of several graphs, the latest of each name."""
    matched: dict[tuple[str, ...], MatchedBlock] = {}
    refused: dict[str, Refusal] = {}
    forwards: dict[str, BlockForward] = {}
    for one in mine:
        forwards.update(one.forwards)
        matched.update({report.names: report for report in one.record.matched})
        refused.update({str(r): r for r in one.record.refused})
    for r in rewritten_otherwise([*refused.values()], [*matched.values()]):
        del refused[str(r)]
        for names, report in matched.items():
            if r.name in names and _FEW not in report.notes:
                matched[names] = dataclasses.replace(report, notes=(*report.notes, _FEW))
    seconds = sum(one.record.seconds for one in mine)
    return Record(tuple(matched.values()), tuple(refused.values()), seconds), forwards


def rewritten_otherwise(refused: Iterable[Refusal], matched: Iterable[MatchedBlock]) -> list[Refusal]:
    """Those that are left for having a single token, or none, and are rewritten in graphs of more."""
    names = {name for report in matched for name in report.names}
    return [r for r in refused if r.reason in (NO_TOKENS, ONE_TOKEN) and r.name in names]


def nothing() -> Refusal:
    """What is said where there is no graph."""
    if not KEPT:
        return _NOTHING
    return dataclasses.replace(
        _NOTHING,
        reason=_NOTHING.reason + ", or Dynamo runs the graphs of an equal model that was compiled before",
        remedy="torch._dynamo.reset() forgets those; then " + _NOTHING.remedy,
    )
