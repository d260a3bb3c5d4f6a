"""Record the graphs that the backend has compiled, for `explain` and `blocks`."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...capture.environment.code_locations import Source
from ...compiled_blocks import Record
from ...compiler.survey_result import Refusal
from ...errors import Cause
from ...inspection.explain import BlockReport
from ...runtime.block_forward import BlockForward, find_rewritten_blocks
from ..fx.graph_rewrite import GraphRegions
from ..fx.node_queries import find_user_sources

_MAX_GRAPHS = 64
_FEW_TOKENS_NOTE = "graphs of a single token, or of none, run unchanged"
COMPILE_FIRST = "moefx.compile(model) supports code that depends on data; call it first"
_EXPLAIN_ADVICE = "To see what moefx.compile finds, call moefx.explain on the model before torch.compile"


class SkippedFunction(NamedTuple):
    """A function that Dynamo does not compile, because an op in one of its loops depends on data."""

    name: str
    file: str
    line: int
    operator: str

    def __str__(self) -> str:
        location = f"{self.name} ({self.file.rpartition('/')[2]}:{self.line})"
        return f"Dynamo does not compile {location}, because the rows in a loop depend on data ({self.operator})"


@dataclasses.dataclass
class CompiledGraph:
    """A compiled graph and its findings.

    Attributes:
        record: the findings.
        forwards: the regions by name.
        weights: weak references to the weights of its regions, or of the graph if it has no regions.
        entered: the lines of the compiled function that the graph's ops come from.
    """

    record: Record
    forwards: dict[str, BlockForward]
    weights: list[weakref.ref[torch.Tensor]]
    entered: set[tuple[str, int]]


COMPILED_GRAPHS: list[CompiledGraph] = []
GRAPHS_WITHOUT_MOE: list[CompiledGraph] = []  # nothing in them looks like experts


def register_graph(out: fx.GraphModule, regions: GraphRegions, record: Record) -> None:
    """Record a compiled graph with its findings. Old graphs are dropped beyond `_MAX_GRAPHS`."""
    forwards = {forward.name: forward for forward in find_rewritten_blocks(out).values()}
    findings = regions.flatten()
    weights = [f.analysis.weights[n] for f in findings for region, _ in f.matched for n in region.weights]
    weights = weights or [t for f in findings for t in f.analysis.weights.values()]
    outermost: set[Source] = {find_user_sources(n, 0)[-1] for n in regions.analysis.nodes if n.stack_trace}
    entry_lines = {(source.file, source.line) for source in outermost}
    graphs = COMPILED_GRAPHS if record.matched or record.refused else GRAPHS_WITHOUT_MOE
    graphs.append(CompiledGraph(record, forwards, [weakref.ref(t) for t in weights], entry_lines))
    del graphs[:-_MAX_GRAPHS]


def forget() -> None:
    """Drop all graphs. `torch.compiler.reset()` calls it, because earlier graphs do not run any more."""
    COMPILED_GRAPHS.clear()
    GRAPHS_WITHOUT_MOE.clear()


def find_graphs(target: nn.Module | Callable[..., Any], graphs: Sequence[CompiledGraph]) -> list[CompiledGraph]:
    """Select the graphs of a model, by its weights, or of a compiled function, by its lines: its weights may be
    anywhere."""
    if not isinstance(target, nn.Module):
        lines = function_lines(target)
        return [one for one in graphs if lines & one.entered]
    tensor_ids = {id(t) for t in (*target.parameters(), *target.buffers())}
    graphs_with_weight = [(one, next((t for ref in one.weights if (t := ref()) is not None), None)) for one in graphs]
    return [one for one, weight in graphs_with_weight if weight is not None and id(weight) in tensor_ids]


def function_lines(function: Callable[..., Any]) -> set[tuple[str, int]]:
    """Return the (file, line) pairs of a function's code."""
    code = inspect.unwrap(getattr(function, "_torchdynamo_orig_callable", function)).__code__
    return {(code.co_filename, line) for _, _, line in code.co_lines() if line is not None}


def merge_graphs(graphs: list[CompiledGraph]) -> tuple[Record, dict[str, BlockForward]]:
    """Merge the records and regions of several graphs. The latest region of each name wins."""
    report_by_names: dict[tuple[str, ...], BlockReport] = {}
    refusal_by_text: dict[str, Refusal] = {}
    forwards: dict[str, BlockForward] = {}
    for one in graphs:
        forwards.update(one.forwards)
        report_by_names.update({report.names: report for report in one.record.matched})
        refusal_by_text.update({str(r): r for r in one.record.refused})
    for r in find_few_token_refusals([*refusal_by_text.values()], [*report_by_names.values()]):
        del refusal_by_text[str(r)]
        for names, report in report_by_names.items():
            if r.name in names and _FEW_TOKENS_NOTE not in report.notes:
                report_by_names[names] = dataclasses.replace(report, notes=(*report.notes, _FEW_TOKENS_NOTE))
    seconds = sum(one.record.seconds for one in graphs)
    return Record(tuple(report_by_names.values()), tuple(refusal_by_text.values()), seconds), forwards


def find_few_token_refusals(refusals: Sequence[Refusal], blocks: Iterable[BlockReport]) -> list[Refusal]:
    """Select refusals for a single token, or none, of regions that also occur with more tokens."""
    few_token = [r for r in refusals if r.cause is Cause.FEW_TOKENS]
    names = {name for report in blocks for name in report.names} | {r.name for r in refusals if r not in few_token}
    return [r for r in few_token if r.name in names]


def explain_missing(target: nn.Module | Callable[..., Any], skipped: Sequence[SkippedFunction]) -> Refusal:
    """Explain why no graph of a model or function contains anything like experts.

    Args:
        skipped: functions that Dynamo gave up.
    """
    codes = [m.forward for m in target.modules()] if isinstance(target, nn.Module) else [target]
    codes = [code for code in codes if hasattr(inspect.unwrap(code), "__code__")] if skipped else []
    lines = set[tuple[str, int]]().union(*map(function_lines, codes))
    plain_graphs = find_graphs(target, GRAPHS_WITHOUT_MOE)
    if own_skipped := [one for one in skipped if (one.file, one.line) in lines]:
        reason, remedy = f"{own_skipped[0]}", f"if these are experts: {COMPILE_FIRST}"
    elif plain_graphs:
        graphs = f"{len(plain_graphs)} graphs" if len(plain_graphs) > 1 else "one graph"
        reason, remedy = f"Dynamo made {graphs} of it, and none selects experts", _EXPLAIN_ADVICE
    elif COMPILED_GRAPHS or GRAPHS_WITHOUT_MOE:
        reason = (
            "it has no graph: it was not called yet, or Dynamo reuses graphs of an equal model, or of earlier "
            "parameters of this one"
        )
        remedy = f"call it first; torch.compiler.reset() drops earlier graphs. {_EXPLAIN_ADVICE}"
    else:
        reason, remedy = "it has no graph: it was not called yet", f"call it first. {_EXPLAIN_ADVICE}"
    return Refusal("", reason, remedy=remedy, seen=False)
