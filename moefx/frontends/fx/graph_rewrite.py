"""Find the MoE regions of a flat graph, prove them, and replace them by rewritten ones."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..._plan import Plan
from ...capture.tracing.op_sets import SELECTION_OPS
from ...compiler.survey_result import Refusal
from ...driver.plan_check import check_graph_plan, check_passes
from ...errors import Cause, CompileTimeout, InvalidInput, InvalidPlan, Refused, refuse_own_bug
from ...ir.node_values import get_op_name
from . import proof_cache
from .chunking import explain_chunks
from .float_inputs import record_constant
from .graph_analysis import GraphAnalysis
from .proof_cache import CachedProof
from .region_bounds import RegionBounds, RegionSearch
from .region_isolation import find_removable
from .region_module import ExtractedRegion, RegionCall, extract_region
from .region_names import name_region
from .splice import order_units, splice

_MAX_BOUNDS = 4  # per selection
_BODY_CALLS = {"tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "invoke_subgraph"}


@dataclasses.dataclass
class GraphRegions:
    """The regions of a graph.

    Attributes:
        matched: regions with their proofs.
        refused: regions that look like a mixture and are none, or are not supported.
        open: the user's lines that select something whose results do not come together in this graph.
        seconds: time spent.
        inside: the regions of graphs that this one calls.
    """

    analysis: GraphAnalysis
    matched: list[tuple[ExtractedRegion, CachedProof]]
    refused: list[Refusal]
    open: list[str]
    seconds: float
    inside: list[GraphRegions] = dataclasses.field(default_factory=list)

    def flatten(self) -> list[GraphRegions]:
        """Return this record, and those of the graphs inside."""
        return [self, *(f for inner in self.inside for f in inner.flatten())]


def rewrite_regions(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    plan: Plan,
    origins: dict[fx.Node, fx.Node] | None = None,
    names: set[str] | None = None,
) -> tuple[fx.GraphModule, GraphRegions]:
    """Rewrite the regions of a graph, and of the bodies that it holds for checkpoints. Returns `gm` if nothing was
    found.

    Args:
        origins: for a body, the outer node of each input.
        names: for a body, the names of regions that exist already.
    """
    names = set() if names is None else names
    regions = find_regions(gm, example_inputs, plan, origins, names)
    bodies: dict[str, fx.GraphModule] = {}
    for name, values, inner in _iterate_called_bodies(regions.analysis):
        body, inner_regions = rewrite_regions(getattr(gm, name), values, plan, inner, names)
        if body is not getattr(gm, name):
            bodies[name] = body
        regions.inside.append(inner_regions)
    if not regions.matched and not bodies:
        return gm, regions
    calls: list[tuple[ExtractedRegion, RegionCall]] = []
    for region, proof in regions.matched:
        calls.append((region, region.build_call(regions.analysis, proof.program)))
        for name, number in region.floats:
            record_constant(name, number)
    out = splice(regions.analysis, calls)
    for name, body in bodies.items():
        setattr(out, name, body)
    return out, regions


def _iterate_called_bodies(analysis: GraphAnalysis) -> Iterator[tuple[str, list[Any], dict[fx.Node, fx.Node]]]:
    """Yield the graphs that nodes call with their arguments: the attribute, values for the inputs, and the outer node
    of each input.
    """
    for n in analysis.nodes:
        body: Any = n.args[0] if n.op == "call_function" and n.args else None
        if get_op_name(n) not in _BODY_CALLS or not isinstance(body, fx.Node) or body.op != "get_attr":
            continue
        if n in analysis.transforms:  # the body does not record them
            continue
        gm = getattr(analysis.gm, str(body.target), None)
        arguments = [a for a in n.args[1:] if isinstance(a, fx.Node)]
        if not isinstance(gm, fx.GraphModule) or len(arguments) != len(n.args) - 1:
            continue
        inputs = [p for p in gm.graph.nodes if p.op == "placeholder"]
        if len(inputs) == len(arguments):
            values = [_find_body_input(analysis, a) for a in arguments]
            outer = {p: analysis.origins.get(a, a) for p, a in zip(inputs, arguments, strict=True)}
            yield str(body.target), values, outer


def _find_body_input(analysis: GraphAnalysis, a: fx.Node) -> Any:
    """Return the value of a body's input. A node computed from weights alone, such as `weight.T` outside the body, is a
    weight."""
    if (integers := analysis.find_example_integers(a)) is not None:
        return integers
    if (weight := analysis.evaluate_from_weights(a)) is not None:
        return nn.Parameter(weight, False)
    return analysis.weights.get(a, analysis.examples.get(a, analysis.value.get(a)))


def find_regions(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    plan: Plan,
    origins: dict[fx.Node, fx.Node] | None,
    names: set[str],
) -> GraphRegions:
    """Find and prove the regions of a graph. Failures are refusals.

    Raises:
        CompileTimeout: another thread compiles all the time.
    """
    start = time.perf_counter()
    analysis = GraphAnalysis(gm, example_inputs, origins)
    search = RegionSearch(analysis)
    proven_regions: list[tuple[ExtractedRegion, CachedProof]] = []
    refusals: dict[fx.Node, Refusal] = {}  # by selection
    owner: dict[fx.Node, ExtractedRegion] = {}
    tried_bounds: set[tuple[fx.Node, fx.Node]] = set()
    open_lines: dict[str, None] = {}
    for selection in search.find_selections():
        if selection in owner:
            continue
        try:
            candidates = _list_candidate_bounds(search, selection)
        except Exception as error:  # the surrounding graph must not fail for it
            refusals[selection] = build_refusal(error, get_op_name(selection), analysis.find_source_line(selection))
            continue
        if not candidates and search.returns_selection(selection):
            open_lines[analysis.find_source_line(selection)] = None
        proven_region, refusal = _prove_candidates(analysis, candidates, plan, names, owner, tried_bounds)
        if proven_region is not None:
            proven_regions.append(proven_region)
        elif refusal is not None and refusal.cause is not Cause.NOT_ROUTED:  # otherwise it is sampling or a maximum
            is_choice = get_op_name(selection) in SELECTION_OPS
            refusals[selection] = refusal if is_choice else _mention_inputs(refusal, candidates, analysis)
    # Drop refusals of selections inside a later region, such as the groups that a router selects first.
    remaining = {(r.name, r.source): r for selection, r in reversed(refusals.items()) if selection not in owner}
    return GraphRegions(
        analysis, proven_regions, list(remaining.values())[::-1], list(open_lines), time.perf_counter() - start
    )


def _prove_candidates(
    analysis: GraphAnalysis,
    candidates: list[RegionBounds],
    plan: Plan,
    names: set[str],
    owner: dict[fx.Node, ExtractedRegion],
    tried_bounds: set[tuple[fx.Node, fx.Node]],
) -> tuple[tuple[ExtractedRegion, CachedProof] | None, Refusal | None]:
    """Prove the first of several bounds that matches, and add it to `names` and `owner`.

    Args:
        owner: the region of each node that a matched region has taken.
        tried_bounds: entries and exits that were tried before.

    Returns:
        The region with its proof, or the refusal of the first bounds. Neither if the region is rewritten already.
    """
    refusal: Refusal | None = None
    for bounds in candidates:
        if (bounds.entry, bounds.exit) in tried_bounds:
            continue
        tried_bounds.add((bounds.entry, bounds.exit))
        if any(n in owner for n in bounds.inside if n in analysis.active):
            continue
        if any("moefx" in str(n.target) for n in bounds.inside):
            return None, None
        region: ExtractedRegion | None = None
        try:
            region = _rename_uniquely(extract_region(analysis, bounds), names)
            proof = proof_cache.prove_region(analysis, region, plan)
            removable = dict.fromkeys(find_removable(bounds, analysis), region)
            order_units(analysis, owner | removable)
        except CompileTimeout:
            raise  # it says nothing about the region, and each further one would wait as long
        except Exception as error:
            if refusal is None:
                outside_use = proof_cache.explain_outside_use(analysis, region, plan) if region is not None else None
                reason = outside_use or explain_chunks(analysis, bounds) or error
                refusal = build_refusal(
                    reason, name_region(analysis, bounds), analysis.find_source_line(bounds.selection)
                )
            continue
        owner.update(removable)
        names.add(region.name)
        return (region, proof), None
    return None, refusal


def build_refusal(error: Exception, name: str, line: str) -> Refusal:
    """Turn an exception into the refusal of a region."""
    why = error if isinstance(error, Refused) else refuse_own_bug(error, line)
    return Refusal(name, why.reason, why.source or line, why.culprits, why.remedy, trace=why.trace, cause=why.cause)


def _rename_uniquely(region: ExtractedRegion, names: set[str]) -> ExtractedRegion:
    """Give a region an unused name: a module that is called twice, or a line in a loop, makes a region each time."""
    name = region.name
    for number in itertools.count(2):
        if name not in names:
            return dataclasses.replace(region, name=name)
        name = f"{region.name}_{number}"
    raise AssertionError


def _list_candidate_bounds(search: RegionSearch, selection: fx.Node) -> list[RegionBounds]:
    """Return the bounds to try for a selection, most likely first."""
    bounds = list(search.iterate_bounds(selection))
    wider = [w for e in bounds[:1] if (w := search.widen(e)) is not None]
    return (bounds[:1] + wider + bounds[1:])[:_MAX_BOUNDS]


def _mention_inputs(refusal: Refusal, search: list[RegionBounds], analysis: GraphAnalysis) -> Refusal:
    """Extend the refusal of a comparison: it may not select experts if the graph receives integers or masks for
    that."""
    stack = [n for bounds in search for n in bounds.side_inputs if n in analysis.side_inputs]
    seen: dict[fx.Node, None] = {}
    while stack:
        n = stack.pop()
        if n not in seen:
            seen[n] = None
            stack += analysis.deps[n]
    inputs = [
        analysis.find_source_name(n) or n.name for n in seen if n.op == "placeholder" and n not in analysis.weights
    ]
    names = ", ".join(dict.fromkeys(re.findall(r"\w+", name)[-1] for name in inputs))
    if not names:
        return refusal
    return dataclasses.replace(
        refusal,
        reason=f"the graph does not select experts here, and receives {names}: {refusal.reason}",
        remedy="expert indices as inputs are not supported in graphs; moefx.compile(model) supports them as inputs "
        "of a module",
        cause=Cause.OTHER,  # the reason is another one now
    )


def check_plan(plan: Plan | None) -> Plan:
    """Return the plan, or the default one.

    Raises:
        InvalidPlan: not a plan, one that has no effect on a graph, or one that disables an unknown pass.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise InvalidPlan(f"plan is a {type(plan).__name__}; expected a moefx.Plan or None")
    plan = plan or Plan()
    check_graph_plan(plan)
    check_passes(plan)
    return plan


def check_inputs(gm: Any, example_inputs: Any) -> list[Any]:
    """Return one value for each input of a graph; defaults fill missing ones.

    Raises:
        InvalidInput: not a graph, or the inputs do not fit it.
    """
    if not isinstance(gm, fx.GraphModule):
        raise InvalidInput(
            f"expected a torch.fx.GraphModule; got a {type(gm).__name__}. An exported program has it as .module()"
        )
    if isinstance(example_inputs, torch.Tensor) or not isinstance(example_inputs, Sequence):
        raise InvalidInput(
            f"example_inputs is a {type(example_inputs).__name__}; expected a tuple, one value for each input of the "
            "graph"
        )
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [*example_inputs, *(n.args[0] for n in placeholders[len(example_inputs) :] if n.args)]  # defaults
    if len(values) != len(placeholders):
        raise InvalidInput(f"the graph has {len(placeholders)} inputs; {len(example_inputs)} example_inputs were given")
    return values
