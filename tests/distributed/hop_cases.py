"""Exchanges over several levels of a topology: RBD, HALO with and without pilots."""

from __future__ import annotations

import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
import moefx.runtime.ranks.topology
from moefx.errors import InvalidPlan

from ..blocks import D
from .launch import sampled
from .models import Model, check, compile_over_mesh

PLANS = {
    "rbd": moefx.Plan(dispatch="rbd", validation="symbolic"),
    "halo": moefx.Plan(dispatch="halo", validation="symbolic"),
    "halo, no pilots": moefx.Plan(dispatch="halo", pilots=False, validation="symbolic"),
}


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def case_kinds_of_experts() -> None:
    mesh = make_mesh()
    for plan, kind in sampled(itertools.product(PLANS.values(), ("biased", "every expert", "joined")), 4):
        check(Model(kind, layers=1, num_experts=dist.get_world_size()).double(), mesh, plan.replace(node_size=2))


def case_topologies() -> None:
    mesh, world = make_mesh(), dist.get_world_size()
    levels = [(2, ()), (1, ()), (4, ())] if world == 4 else [(4, ()), (2, (4,))]
    for plan, (node_size, above) in sampled(itertools.product(PLANS.values(), levels), 2):
        planned = plan.replace(node_size=node_size, topology_levels=above)
        check(Model("stacked", layers=1, num_experts=2 * world).double(), mesh, planned)


def case_ranks_in_another_order() -> None:
    """Order the ranks of the axis differently from their positions."""
    world = dist.get_world_size()
    orders = (torch.arange(world).flip(0), torch.arange(world).view(2, -1).t().flatten())
    for kind, order, plan in sampled(itertools.product(("gated", "flat"), orders, PLANS.values()), 11):
        mesh, planned = DeviceMesh("cpu", order, mesh_dim_names=("ep",)), plan.replace(node_size=world // 2)
        check(Model(kind, layers=1, num_experts=world).double(), mesh, planned)


def case_few_tokens() -> None:
    """Run no tokens on some ranks, and all on one."""
    mesh, world = make_mesh(), dist.get_world_size()
    for plan in [PLANS["halo"]] if world == 8 else PLANS.values():
        for some in (lambda rank: rank % 2, lambda rank: 11 * (rank == 1)):
            x = torch.randn(some(dist.get_rank()), D, dtype=torch.float64)
            check(Model("stacked", layers=1, num_experts=world).double(), mesh, plan.replace(node_size=2), x)


def case_equal_sums() -> None:
    """Return equal bits with every dispatch if all sums are exact, and in repeated runs with any numbers."""
    mesh, world = make_mesh(), dist.get_world_size()
    model = Model("stacked", layers=1, num_experts=world)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.copy_((parameter * 4).round())
        model.blocks[0].gate.weight.zero_()  # equal weights
    x = torch.randint(-3, 4, (20, D)).float()
    dispatches = [moefx.Plan(dispatch="flat"), moefx.Plan(dispatch="dedup"), *PLANS.values()]
    outs = []
    for plan in dispatches:
        compiled = compile_over_mesh(model.blocks[0], mesh, plan.replace(node_size=2))
        outs.append(compiled(x))
        assert torch.equal(outs[-1], outs[0])
        rough = torch.randn(30, D)
        assert torch.equal(compiled(rough), compiled(rough))


def case_chunks() -> None:
    """Exchange tokens in several chunks."""
    mesh, world = make_mesh(), dist.get_world_size()
    for plan in sampled((moefx.Plan(dispatch="flat"), moefx.Plan(dispatch="dedup"), *PLANS.values()), 2):
        planned = plan.replace(node_size=2, validation="symbolic")
        few = torch.randn(dist.get_rank() % 2, D, dtype=torch.float64)  # some chunks have no token
        for chunks, x in ((2, None), (3, few)):
            in_parts = planned.replace(chunks=chunks)
            kind = "picky" if plan.dispatch == "dedup" else "stacked"
            check(Model(kind, layers=1, num_experts=world).double(), mesh, in_parts, x)


def case_auto_picks_the_fastest_dispatch() -> None:
    """Pick the dispatch that is fastest by measurements, on all ranks the same."""
    mesh, world = make_mesh(), dist.get_world_size()
    for above in [(), (4,)] if world == 8 else [()]:
        plan = moefx.Plan(node_size=2, topology_levels=above, validation="symbolic")
        (line,) = read_expert_lines(check(Model("stacked", layers=1, num_experts=world).double(), mesh, plan))
        predictions = line.partition("auto: predicted for 4096 tokens a rank ")[2].rstrip(")").split(", ")
        assert [way.split()[0] for way in predictions] == ["flat", "dedup", "rbd", "halo"], line
        found = [None] * world
        dist.all_gather_object(found, line)
        assert len(set(found)) == 1, found


def case_one_node_needs_no_measurement() -> None:
    """Decide without measurements."""
    mesh, world = make_mesh(), dist.get_world_size()
    plan = moefx.Plan(node_size=world, validation="symbolic")
    with mock.patch.object(moefx.runtime.ranks.topology, "measure_link", side_effect=AssertionError):
        (line,) = read_expert_lines(compile_over_mesh(Model("stacked", layers=1, num_experts=world), mesh, plan))
    assert "auto: one level, and 'dedup' sends the fewest rows" in line, line


def read_expert_lines(compiled: nn.Module) -> list[str]:
    return [line for line in str(moefx.explain(compiled)).splitlines() if "experts over" in line]


def case_invalid_node_sizes_raise() -> None:
    world = dist.get_world_size()

    def refused(text: str, mesh: DeviceMesh, **plan) -> None:
        try:
            compile_over_mesh(Model("gated", layers=1, num_experts=world), mesh, moefx.Plan(dispatch="rbd", **plan))
        except InvalidPlan as found:
            assert text in str(found), found
        else:
            raise AssertionError(f"expected {text}")

    refused(f"Plan(node_size=...) is 3, but the {world} ranks are not whole nodes", make_mesh(), node_size=3)
    refused(
        "units of 3 ranks do not consist of several whole units of 2, the level below (a node)",
        make_mesh(),
        node_size=2,
        topology_levels=(3,),
    )
