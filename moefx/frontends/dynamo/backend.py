"""Rewrite flat graphs: `moefx.rewrite_graph`, and `torch.compile(model, backend="moefx")`."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..._plan import Plan
from ...api import explain
from ...compiled_blocks import RECORD, UNCHANGED, Record
from ...compiler.survey_result import Refusal
from ...errors import Refused
from ...inspection.explain import BlockReport, merge_refusals
from ...runtime.block_forward import BlockForward, find_rewritten_blocks
from ...runtime.graph_backend import GraphBackend, register_backend
from ...verification.compiled_parts import find_compiled_parts
from ..fx import trace_artifacts
from ..fx.graph_rewrite import GraphRegions, build_refusal, check_inputs, check_plan, rewrite_regions
from ..fx.normalize import normalize, restore_calls
from . import registry
from .backend_verifier import BackendRecipe, keeping_saved_tensors, verify_traced
from .compile_options import parse_options

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_GRAPH_BREAK = "experts are selected, but Dynamo ends its graph before their results come together"
_RETURNED_CHOICE = "the graph returns the selected indices, and their results do not come together in it"


def rewrite_graph(graph: fx.GraphModule, example_inputs: Sequence[Any], plan: Plan | None = None) -> fx.GraphModule:
    """Find the MoE regions of a flat graph, prove each, and replace them by PFT graphs.

    The graph may come from `torch.export` (`.module()`), `make_fx`, Dynamo, or `symbolic_trace`. Sizes in it may be
    symbolic, or read where they are used. If they are numbers, the result holds for these sizes, as the graph did.
    Parameters may be attributes of the graph or inputs; buffers are attributes. Inputs that are numbers may differ from
    call to call: a region that depends on one is left unchanged.

    Args:
        graph: a flat graph; it is not changed.
        example_inputs: one value for each input of the graph; real, fake or on the meta device. If the nodes have
            values in their meta, only parameters among them are used.

    Returns:
        A new `GraphModule` with one module call in place of each region; all else is unchanged. `moefx.blocks`,
        `graph`, `history` and `explain` accept it. Without a region: the given graph; the log says so once, and
        `explain` says why.

    Raises:
        InvalidInput: not a graph, or inputs that do not fit it. InvalidPlan: not a plan.
    """
    plan = check_plan(plan)
    values = check_inputs(graph, example_inputs)
    try:
        ready = normalize(graph, values)
        out, regions = rewrite_regions(ready, values, plan)
    except Refused as why:
        _log_once(logging.WARNING, f"moefx left a graph as it was: {why.reason}")
        UNCHANGED[graph] = Record((), (build_refusal(why, "", ""),), 0.0)
        return graph
    _log_findings(graph, regions, "it is returned as it is")
    if out is ready:
        UNCHANGED[graph] = _build_record(graph, regions)
        return graph
    out = restore_calls(out, graph) if ready is not graph else out
    vars(out)[RECORD] = _build_record(graph, regions)
    return out


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph, as the Dynamo backend: `torch.compile(model, backend="moefx", options={...})`.

    Args:
        options: fields of a `Plan`; "backend": the compiler of the resulting graph, a name or a function, "inductor" by
            default; "backend_options": the options of that compiler.
        mode: a mode of Inductor.

    Raises:
        InvalidPlan: an unknown option, or an invalid plan.
    """
    settings = parse_options(options, mode)
    out, regions = rewrite_regions(gm, list(example_inputs), settings.plan)
    _log_findings(gm, regions, "it is compiled as it is")
    for skipped in _find_skipped_functions():
        _log_once(logging.WARNING, f"moefx: {skipped}. If these are experts: {registry.COMPILE_FIRST}")
    record = _build_record(gm, regions)
    registry.register_graph(out, regions, record)
    if out is not gm:
        vars(out)[RECORD] = record
        trace_artifacts.log_artifacts(out, lambda: str(explain(out)))
        for forward in find_rewritten_blocks(out).values():
            forward.compiled_by = settings.compiled_by
        with keeping_saved_tensors():
            return settings.rest(out, example_inputs)
    return settings.rest(out, example_inputs)


backend.reset = registry.forget  # pyright: ignore[reportFunctionMemberAccess]


# ---------------------------------------------------------------------- log and record
def _log_findings(gm: fx.GraphModule, regions: GraphRegions, action: str) -> None:
    """Log the refusals of a graph, and its graph break if one separates a selection from its results. Each text is
    logged once.
    """
    findings = regions.flatten()
    refusals = [r for f in findings for r in f.refused]
    before = [r for one in registry.COMPILED_GRAPHS for r in one.record.refused]
    blocks = [m for one in registry.COMPILED_GRAPHS for m in one.record.matched]
    few_token_refusals = [r for r in registry.find_few_token_refusals([*before, *refusals], blocks) if r in refusals]
    for level, logged in (
        (logging.INFO, few_token_refusals),
        (logging.WARNING, [r for r in refusals if r not in few_token_refusals]),
    ):
        for refusal in merge_refusals(logged):
            _log_once(level, f"moefx left a region of a graph as it was: {refusal}")
    if regions.open and (reason := _find_graph_break(gm)) is not None:
        frames = getattr(reason, "user_stack", None) or []
        location = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
        first_line = (str(getattr(reason, "reason", "")).splitlines() or [""])[0]
        for line in regions.open:
            _log_once(
                logging.WARNING,
                f"moefx: experts are selected at {line}, but Dynamo ends its graph{location} ({first_line}) before "
                f"their results come together. {registry.COMPILE_FIRST}",
            )
    if not any(f.matched or f.refused for f in findings):
        nodes = len(regions.analysis.nodes)
        _log_once(logging.INFO, "moefx found no MoE region in a graph; " + action, f" ({nodes} nodes)")


def _find_graph_break(gm: fx.GraphModule) -> Any:
    """Return Dynamo's reason for ending a graph before the end of a function, or None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason if getattr(reason, "graph_break", False) else None


def _find_skipped_functions() -> list[registry.SkippedFunction]:
    """Return the functions that Dynamo gave up. It never passes them to a backend, but counts them in a private
    counter."""
    try:
        reasons = list(torch._dynamo.utils.counters["unimplemented"])
    except Exception:  # another version of torch
        return []
    skipped = []
    for reason in reasons:
        frame = re.search(r"frame skipped: (\S+) \((.+) line (\d+)\)", reason)
        if frame and reason.startswith(("Dynamic shape operator", "Data dependent operator", "Data-dependent")):
            operator = re.search(r"debug context: (\S+)", reason)
            skipped.append(
                registry.SkippedFunction(frame[1], frame[2], int(frame[3]), operator[1] if operator else "a tensor")
            )
    return skipped


def _log_once(level: int, text: str, detail: str = "") -> None:
    """Log a text unless it was logged before. `detail` may differ from call to call."""
    if text not in _logged:
        _logged.add(text)
        _log.log(level, "%s%s", text, detail)


def _build_record(gm: fx.GraphModule, regions: GraphRegions) -> Record:
    """Build the record of a graph, which `explain` reads."""
    reports: dict[int, BlockReport] = {}  # by proof
    for f in regions.flatten():
        for region, proof in f.matched:
            holds_for = str(region.specialization(f.analysis, proof.program))
            report = reports.get(id(proof), dataclasses.replace(proof.report, names=(), holds_for=holds_for))
            reports[id(proof)] = dataclasses.replace(report, names=(*report.names, region.name))
    findings = regions.flatten()
    refusals = [r for f in findings for r in f.refused]
    if _find_graph_break(gm) is not None:
        refusals += [Refusal("", _GRAPH_BREAK, line, (), registry.COMPILE_FIRST) for line in regions.open]
    elif not reports:  # beside a mixture such a selection is statistics
        refusals += [Refusal("", _RETURNED_CHOICE, line) for line in regions.open]
    return Record(tuple(reports.values()), tuple(refusals), sum(f.seconds for f in findings))


# ---------------------------------------------------------------------- queries
def find_recipes(model: nn.Module) -> dict[str, BackendRecipe]:
    """Find how this backend compiled a model (`torch.compile`) or parts of it (`module.compile`), by name."""
    recipes = {}
    for name, part in find_compiled_parts(model).items():
        if getattr(part.compiler, "compiler_fn", part.compiler) is backend:
            keywords = getattr(part.compiler, "kwargs", {})
            options = parse_options(keywords.get("options"), keywords.get("mode"))
            recipes[name] = BackendRecipe(options.plan, options.rest, part._replace(name=str(options.name)))
    return recipes


def compiled_for(target: nn.Module | Callable[..., Any]) -> tuple[Record | None, dict[str, BlockForward]]:
    """Return the record and the regions of all graphs of a model or function, the latest for each name. The record is
    None for a model that was never compiled with this backend.
    """
    if graphs := registry.find_graphs(target, registry.COMPILED_GRAPHS):
        return registry.merge_graphs(graphs)
    was_compiled = not isinstance(target, nn.Module) or find_recipes(target)
    return (
        Record((), (registry.explain_missing(target, _find_skipped_functions()),), 0.0) if was_compiled else None
    ), {}


register_backend(GraphBackend(compiled_for, find_recipes, verify_traced))
