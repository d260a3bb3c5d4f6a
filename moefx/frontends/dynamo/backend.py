"""Flat graphs: `moefx.rewrite_graph`, and `torch.compile(model, backend="moefx")`."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..._plan import Plan
from ...api import RECORD, UNCHANGED, Record, check_passes, explain
from ...compiler.survey import Refusal
from ...errors import Refused
from ...inspection.explain import BlockReport, merge_refusals
from ...runtime.module import BlockForward, rewritten_blocks
from ...verification.compiled_parts import find_compiled_parts
from ...verification.traced import BackendRecipe, keeping_saved_tensors
from ..fx import trace_artifacts
from ..fx.graph_rewrite import GraphRegions, build_refusal, check_inputs, check_plan, rewrite_regions
from ..fx.normalize import normalize, restore_calls
from . import registry as kept
from .compile_options import parse_options

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_GRAPH_BREAK = "experts are selected, but Dynamo ends its graph before their results come together"
_RETURNED_CHOICE = "what was selected is returned by the graph, and in it nothing of that comes together"


def rewrite_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: Plan | None = None) -> fx.GraphModule:
    """Find the MoE regions of a flat graph, prove what they compute, and put PFT graphs in their place.

    The graph may come from `torch.export` (`.module()`), from `make_fx`, from Dynamo, or from `symbolic_trace`. Sizes
    in it may be symbolic, or asked for where they are needed; where they are numbers, the result is for these sizes as
    the graph was. Parameters may be attributes of the graph or inputs; buffers are attributes. Inputs that are numbers
    may differ from call to call: a region that needs one is left as it is.

    Args:
        example_inputs: one value for each input of the graph; real, fake or on the meta device. Where the nodes have
            values in their meta, only parameters are looked at.

    Returns:
        A new `GraphModule` in which one module call stands for each region, and all else is as it was: `moefx.blocks`,
        `graph`, `history` and `explain` take it. Without a region: the graph that was given,
        said once in the log; `explain` has why.

    Raises:
        InvalidInput: no graph, or inputs that it does not take. InvalidPlan: no plan.
    """
    plan = check_passes(check_plan(plan))
    values = check_inputs(gm, example_inputs)
    try:
        ready = normalize(gm, values)
        out, found = rewrite_regions(ready, values, plan)
    except Refused as why:
        _log_once(logging.WARNING, f"moefx left a graph as it was: {why.reason}")
        UNCHANGED[gm] = Record((), (build_refusal(why, "", ""),), 0.0)
        return gm
    _log_findings(gm, found, "it is returned as it is")
    if out is ready:
        UNCHANGED[gm] = _build_record(gm, found)
        return gm
    out = restore_calls(out, gm) if ready is not gm else out
    vars(out)[RECORD] = _build_record(gm, found)
    return out


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: `torch.compile(model, backend="moefx", options={...})`.

    Args:
        options: fields of a `Plan`; "backend": what compiles the graph afterwards, a name or a function, "inductor" by
            default; "backend_options": its own options.
        mode: Inductor's.

    Raises:
        InvalidPlan: an unknown option, or an invalid plan.
    """
    chosen = parse_options(options, mode)
    out, found = rewrite_regions(gm, list(example_inputs), chosen.plan)
    _log_findings(gm, found, "it is compiled as it is")
    for skipped in _find_skipped_functions():
        _log_once(logging.WARNING, f"moefx: {skipped}. If these are experts: {kept.COMPILE_FIRST}")
    record = _build_record(gm, found)
    kept.register_graph(out, found, record)
    if out is not gm:
        vars(out)[RECORD] = record
        trace_artifacts.log_artifacts(out, lambda: str(explain(out)))
        for forward in rewritten_blocks(out).values():
            forward.compiled_by = chosen.compiled_by
        with keeping_saved_tensors():
            return chosen.rest(out, example_inputs)
    return chosen.rest(out, example_inputs)


backend.reset = kept.forget  # pyright: ignore[reportFunctionMemberAccess]


# ---------------------------------------------------------------------- what is said
def _log_findings(gm: fx.GraphModule, found: GraphRegions, then: str) -> None:
    """In the log, each thing once."""
    every = found.with_inner()
    refused = [r for f in every for r in f.refused]
    before = [r for one in kept.COMPILED_GRAPHS for r in one.record.refused]
    matched = [m for one in kept.COMPILED_GRAPHS for m in one.record.matched]
    others = [r for r in kept.find_few_token_refusals([*before, *refused], matched) if r in refused]
    for level, those in (logging.INFO, others), (logging.WARNING, [r for r in refused if r not in others]):
        for refusal in merge_refusals(those):
            _log_once(level, f"moefx left a region of a graph as it was: {refusal}")
    if found.open and (reason := _find_graph_break(gm)) is not None:
        frames = getattr(reason, "user_stack", None) or []
        where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
        what = (str(getattr(reason, "reason", "")).splitlines() or [""])[0]
        for line in found.open:
            _log_once(
                logging.WARNING,
                f"moefx: experts are selected at {line}, but Dynamo ends its graph{where} ({what}) before their "
                f"results come together. {kept.COMPILE_FIRST}",
            )
    if not any(f.matched or f.refused for f in every):
        nodes = len(found.analysis.nodes)
        _log_once(logging.INFO, "moefx found no MoE region in a graph; " + then, f" ({nodes} nodes)")


def _find_graph_break(gm: fx.GraphModule) -> Any:
    """Why Dynamo ended a graph before the end of a function; None, if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason if getattr(reason, "graph_break", False) else None


def _find_skipped_functions() -> list[kept.SkippedFunction]:
    """Dynamo never hands them to a backend. They are in counters of its own, which are private."""
    try:
        reasons = list(torch._dynamo.utils.counters["unimplemented"])
    except Exception:  # another torch
        return []
    found = []
    for reason in reasons:
        frame = re.search(r"frame skipped: (\S+) \((.+) line (\d+)\)", reason)
        if frame and reason.startswith(("Dynamic shape operator", "Data dependent operator", "Data-dependent")):
            operator = re.search(r"debug context: (\S+)", reason)
            found.append(
                kept.SkippedFunction(frame[1], frame[2], int(frame[3]), operator[1] if operator else "a tensor")
            )
    return found


def _log_once(level: int, text: str, detail: str = "") -> None:
    if text not in _logged:
        _logged.add(text)
        _log.log(level, "%s%s", text, detail)


def _build_record(gm: fx.GraphModule, found: GraphRegions) -> Record:
    reports: dict[int, BlockReport] = {}  # by proof
    for f in found.with_inner():
        for region, proof in f.matched:
            holds_for = str(region.specialisation(f.analysis, proof.program))
            known = reports.get(id(proof), dataclasses.replace(proof.report, names=(), holds_for=holds_for))
            reports[id(proof)] = dataclasses.replace(known, names=(*known.names, region.name))
    every = found.with_inner()
    refused = [r for f in every for r in f.refused]
    if _find_graph_break(gm) is not None:
        refused += [Refusal("", _GRAPH_BREAK, line, (), kept.COMPILE_FIRST) for line in found.open]
    elif not reports:  # beside a mixture it is statistics
        refused += [Refusal("", _RETURNED_CHOICE, line) for line in found.open]
    return Record(tuple(reports.values()), tuple(refused), sum(f.seconds for f in every))


# ---------------------------------------------------------------------- what was compiled with the backend
def find_recipes(model: nn.Module) -> dict[str, BackendRecipe]:
    """How `torch.compile` made a model, or modules of one (`module.compile`), with this backend."""
    ways = {}
    for name, part in find_compiled_parts(model).items():
        if getattr(part.compiler, "compiler_fn", part.compiler) is backend:
            given = getattr(part.compiler, "kwargs", {})
            chosen = parse_options(given.get("options"), given.get("mode"))
            ways[name] = BackendRecipe(chosen.plan, chosen.rest, part._replace(name=str(chosen.name)))
    return ways


def compiled_for(given: nn.Module | Callable[..., Any]) -> tuple[Record | None, dict[str, BlockForward]]:
    """The regions of the graphs of a model or a function that was compiled with the backend, the latest of each name.
    Of a model that never was, unless it is what `torch.compile` returned, there is no record."""
    if mine := kept.find_graphs(given, kept.COMPILED_GRAPHS):
        return kept.merge_graphs(mine)
    was_compiled = not isinstance(given, nn.Module) or find_recipes(given)
    return (Record((), (kept.explain_missing(given, _find_skipped_functions()),), 0.0) if was_compiled else None), {}
