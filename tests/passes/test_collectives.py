"""Graphs with collectives, on one process: process groups appear by name only."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import fx

import moefx
from moefx.errors import Refused
from moefx.ir.expert_placement import ExchangeRoutes, Placement, SharedTokens, TopologyLevel
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.passes.collectives import insert_collectives
from moefx.passes.ssmb import shard_sequence

from .. import golden
from ..ir.graphs import E, K, build_block_graph

RANKS = 4
PLAN = moefx.Plan()


def make_routes(*sizes: int, position: int = 0, **options: Any) -> ExchangeRoutes:
    """Build the routes over levels of these sizes, coarse to fine."""
    names = ("ep",) if len(sizes) == 1 else ("ep/inter", "ep/intra")
    levels = tuple(TopologyLevel(name, size, name) for name, size in zip(names, sizes, strict=True))
    return ExchangeRoutes(levels, position, tuple(range(RANKS)), **({"dedup": True} | options))


ROUTES = {
    "flat": make_routes(RANKS, dedup=False),
    "dedup": make_routes(RANKS),
    "rbd": make_routes(2, 2),
    "halo": make_routes(2, 2, splits_intra_node=True),
    "chunks": make_routes(RANKS, chunks=2),
    "gather": make_routes(RANKS, gathers=True, max_tokens=16),
    "gather_agreed": make_routes(RANKS, gathers=True, host_group="hosts"),
}
AGREED = [name for name in ROUTES if name != "gather"]  # with `max_tokens` the ranks agree on nothing in a call


def insert(block: BlockGraph, routes: ExchangeRoutes, rank: int = 0, **options: Any) -> BlockGraph:
    placement = Placement.in_order(E, RANKS, rank, axis="ep", group="ep")
    return insert_collectives(block, PLAN, placement=placement, routes=routes, **({"stacked": {}} | options))


def find_fingerprint(block: BlockGraph) -> int:
    (fingerprint,) = {n.kwargs["fingerprint"] for n in block.graph.nodes if "fingerprint" in n.kwargs}
    return fingerprint


@pytest.mark.parametrize("name", ROUTES)
def test_graphs_with_collectives(name):
    block = build_block_graph()
    before = str(block)
    text = str(insert(block, ROUTES[name]))
    assert str(block) == before, "the pass changed its input"
    golden.check(f"exchange_{name}.txt", re.sub(r"fingerprint=\d+", "fingerprint=...", text))


def test_a_rank_keeps_its_own_experts():
    for rank in range(RANKS):
        graph = insert(build_block_graph(), ROUTES["dedup"], rank).graph
        names = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        assert names == {f"experts.{rank}.{name}.weight" for name in ("gate", "up", "down")}


@pytest.mark.parametrize("name", AGREED)
def test_fingerprints_are_equal_on_all_ranks(name):
    """Ranks compare fingerprints at each exchange, to detect that another rank runs another program."""
    routes = ROUTES[name]
    fingerprints = {
        find_fingerprint(insert(build_block_graph(), dataclasses.replace(routes, position=rank), rank))
        for rank in range(RANKS)
    }
    assert len(fingerprints) == 1


def test_fingerprints_differ_between_programs():
    fingerprints = [find_fingerprint(insert(build_block_graph(), ROUTES[name])) for name in AGREED]
    other = build_block_graph()
    (mlp,) = (n for n in other.graph.nodes if n.target is torch.ops.moefx.expert_mlp.default)
    mlp.update_kwarg("keep", "x")
    fingerprints.append(find_fingerprint(insert(other, ROUTES["dedup"])))
    assert len(set(fingerprints)) == len(fingerprints)


def test_a_shared_trained_value_is_refused():
    """The gradient of a parameter that all experts use would include tokens of other ranks."""
    block = build_block_graph(fused=False)
    (combine,) = (n for n in block.graph.nodes if n.target is torch.ops.moefx.combine.default)
    rows = combine.args[0]
    assert isinstance(rows, fx.Node)
    with block.graph.inserting_before(combine):
        scale = block.graph.get_attr("scale")
        scaled = block.graph.call_function(torch.ops.aten.mul.Tensor, (rows, scale))
    scaled.meta.update(rows.meta)
    combine.update_arg(0, scaled)
    with pytest.raises(Refused, match="the experts share a value"):
        insert(block, ROUTES["dedup"], trained={"scale"})
    assert "all_to_all_rows" in str(insert(block, ROUTES["dedup"]))


@pytest.mark.parametrize("gradients", ["replicated", "partial"])
def test_graphs_with_sharded_tokens(gradients):
    sequence = SharedTokens("tp", "tp", size=2, rank=1, gradients=gradients)
    block = build_block_graph()
    before = str(block)
    text = str(shard_sequence(block, PLAN, sequence=sequence))
    assert str(block) == before, "the pass changed its input"
    golden.check(f"ssmb_{gradients}.txt", text)


@pytest.mark.parametrize(
    ("layers", "keep", "wanted"),
    [
        (None, "h", {"keep": "h"}),
        (2.0, "h", {"keep": "h", "stash_rows": 2.0 * K / RANKS}),
        (2.0, "all", {"keep": "all", "stash_rows": 2.0 * K / RANKS}),
        (2.0, "x", {"keep": "x"}),
        (0.0, "all", {"keep": "x"}),
    ],
)
def test_gathered_experts_keep_rows_in_the_stash(layers, keep, wanted):
    block = build_block_graph()
    (mlp,) = block.find(torch.ops.moefx.expert_mlp.default)
    mlp.update_kwarg("keep", keep)
    block = insert(block, make_routes(RANKS, gathers=True, max_tokens=16, stash_layers=layers))
    (mlp,) = block.find(torch.ops.moefx.expert_mlp.default)
    assert {name: mlp.kwargs[name] for name in ("keep", "stash_rows") if name in mlp.kwargs} == wanted
