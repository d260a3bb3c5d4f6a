"""`rewrite_graph`: find the MoE regions of a flat graph, prove them, put the rewritten ones in their place."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .._plan import Plan
from ..errors import InvalidInput, InvalidPlan, Refused
from ..survey import Refusal
from . import matching
from .extents import Extent, Extents
from .facts import Facts, sources_of
from .matching import Proven
from .region import Extracted, RegionCall, extract
from .splice import order, splice

_log = logging.getLogger(__name__)
_MOST_TRIED = 4  # extents of one seed


@dataclasses.dataclass
class Found:
    """What there is in a graph.

    Attributes:
        matched: regions with their proofs. refused: what looks like one and is none.
        open: the user's lines that select something, of which nothing comes together in this graph.
    """

    facts: Facts
    matched: list[tuple[Extracted, Proven]]
    refused: list[Refusal]
    open: list[str]
    seconds: float


def rewritten(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: Plan) -> tuple[fx.GraphModule, Found]:
    found = find(gm, example_inputs, plan)
    if not found.matched:
        return gm, found
    calls: list[tuple[Extracted, RegionCall]] = []
    for region, proof in found.matched:
        calls.append((region, region.call(found.facts, proof.program)))
    return splice(found.facts, calls), found


def find(gm: fx.GraphModule, example_inputs: Sequence[Any], plan: Plan) -> Found:
    start = time.perf_counter()
    facts = Facts(gm, example_inputs)
    extents = Extents(facts)
    matched: list[tuple[Extracted, Proven]] = []
    refused: dict[tuple[str, str], Refusal] = {}
    taken: dict[fx.Node, Extracted] = {}
    tried: set[tuple[fx.Node, fx.Node]] = set()
    open_: dict[str, None] = {}
    for seed in extents.seeds():
        if seed in taken:
            continue
        first: Refusal | None = None
        candidates = _candidates(extents, seed)
        if not candidates and extents.leaves(seed):
            open_[str(sources_of(seed, facts.at[seed])[0])] = None
        for extent in candidates:
            if (extent.entry, extent.exit) in tried:
                continue
            tried.add((extent.entry, extent.exit))
            if any(n in taken for n in extent.inside if n in facts.live):
                continue
            if any("moefx" in str(n.target) for n in extent.inside):
                first = None
                break  # rewritten already
            region: Extracted | None = None
            try:
                region = extract(facts, extent)
                proof = matching.match(facts, region, plan)
                mine = {n: region for n in extent.inside if n in facts.live}
                order(facts, taken | mine)
            except Refused as why:
                name = region.name if region is not None else ""
                where = why.source or str(sources_of(seed, facts.at[seed])[0])
                first = first or Refusal(name, why.reason, where, why.culprits, why.remedy)
                continue
            taken |= mine
            matched.append((region, proof))
            first = None
            break
        if first is not None and not _is_idle(first):
            refused.setdefault((first.name, first.source), first)
    return Found(facts, matched, list(refused.values()), list(open_), time.perf_counter() - start)


def _candidates(extents: Extents, seed: fx.Node) -> list[Extent]:
    found = list(extents.of(seed))
    wider = [w for e in found[:1] if (w := extents.wider(e)) is not None]
    return (found[:1] + wider + found[1:])[:_MOST_TRIED]


def _is_idle(refusal: Refusal) -> bool:
    """Something is chosen, and no weight depends on it: sampling, a maximum."""
    return "nothing is routed" in refusal.reason


def checked_plan(plan: Plan | None) -> Plan:
    if plan is not None and not isinstance(plan, Plan):
        raise InvalidPlan(f"plan is a {type(plan).__name__}; expected a moefx.Plan or None")
    return plan or Plan()


def checked_graph(gm: Any, example_inputs: Any) -> list[Any]:
    if not isinstance(gm, fx.GraphModule):
        raise InvalidInput(
            f"expected a torch.fx.GraphModule; got a {type(gm).__name__}. Of an exported program that is .module()"
        )
    if isinstance(example_inputs, torch.Tensor) or not isinstance(example_inputs, Sequence):
        raise InvalidInput(
            f"example_inputs is a {type(example_inputs).__name__}; expected a tuple, one value for each input of the "
            "graph"
        )
    wanted = sum(n.op == "placeholder" for n in gm.graph.nodes)
    if len(example_inputs) != wanted:
        raise InvalidInput(f"the graph has {wanted} inputs; {len(example_inputs)} example_inputs were given")
    return list(example_inputs)
