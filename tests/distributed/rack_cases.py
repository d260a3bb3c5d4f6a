"""Exchanges over nodes and racks, for eight ranks."""

from __future__ import annotations

from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
import moefx.runtime.ranks.topology
from moefx.ir.expert_placement import TopologyLevel
from moefx.runtime.ranks.link_costs import Link

from .hop_cases import PLANS, make_mesh, read_expert_lines
from .models import Model, check


def case_groups_of_ranks_that_are_not_neighbours() -> None:
    for names in (("ep", "dp"), ("dp", "ep")):
        mesh = init_device_mesh("cpu", (4, 2) if names[0] == "ep" else (2, 4), mesh_dim_names=names)
        for plan in (PLANS["rbd"], PLANS["halo"]):
            check(
                Model("gated", layers=1, num_experts=8).double(),
                mesh,
                plan.replace(node_size=2 if names[0] == "dp" else 4),
            )


def case_slow_links_between_racks() -> None:
    mesh = make_mesh()

    def link(level: TopologyLevel, device: torch.device) -> Link:
        return Link(0.0, 1e-6 if level.axis in ("ep", "ep/level1") else 1e-9)

    plan = moefx.Plan(node_size=2, topology_levels=(4,), validation="symbolic")
    topology = moefx.runtime.ranks.topology
    # No times are measured, not even of packing: HALO packs less, which would decide a difference of 2 %.
    for handling, way in ((0.0, "rbd"), (1e-7, "halo")):
        with (
            mock.patch.object(topology, "measure_link", link),
            mock.patch.object(topology, "measure_handling", lambda *_, found=handling: found),
        ):
            (line,) = read_expert_lines(check(Model("stacked", layers=1, num_experts=8).double(), mesh, plan))
        assert "(2 x 2 x 2)" in line, line
        assert f"its ranks, {way} (auto: predicted" in line, line
