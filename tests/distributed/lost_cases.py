"""Ranks that die, stall or have other plans."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import InvalidPlan, NoMoEBlockFound, RanksLost

from ..passes.blocks import D, Gated
from .models import BLOCKS, Model, compiled_beside


def one_axis():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def differs(compile, *texts: str, error: type[Exception] = InvalidPlan) -> None:
    try:
        compile()
    except error as found:
        assert all(text in str(found) for text in texts), found
    else:
        raise AssertionError("compiled")


def case_other_plans() -> None:
    plan = moefx.Plan(dispatch="flat" if dist.get_rank() == 1 else "dedup")
    differs(lambda: compiled_beside(Model("gated"), one_axis(), plan), "do not agree on the plan", '"flat"', '"dedup"')


def case_other_models() -> None:
    kind = "gated" if dist.get_rank() else "every expert"
    differs(lambda: compiled_beside(Model(kind), one_axis(), moefx.Plan()),
            "rewritten blocks", "4 experts, 2 a token", "4 experts, 4 a token")  # fmt: skip


def case_a_rank_that_finds_nothing() -> None:
    model = BLOCKS["gated"]() if dist.get_rank() else Gated()
    differs(
        lambda: moefx.compile(model, mesh=one_axis(), example_inputs=(torch.zeros(9, D),)), "rewritten blocks", "none"
    )


def case_a_rank_that_raises() -> None:
    inputs = (torch.zeros(9, D if dist.get_rank() else 3),)
    model = BLOCKS["gated"]()
    differs(lambda: moefx.compile(model, mesh=one_axis(), example_inputs=inputs), "rewritten blocks", "none, ")


def case_none_finds_anything() -> None:
    inputs = (torch.zeros(9, D),)
    differs(lambda: moefx.compile(Gated(), mesh=one_axis(), example_inputs=inputs), error=NoMoEBlockFound)


def _without_rank_1(leave) -> None:
    compiled = compiled_beside(Model("gated"), one_axis(), moefx.Plan(timeout=3.0, dispatch="rbd", node_size=2))
    compiled(torch.randn(5, D))
    dist.barrier()
    if dist.get_rank() == 1:
        leave()
        os._exit(0)
    start = time.monotonic()
    try:
        compiled(torch.randn(5, D))
    except RanksLost as found:
        assert f"rank {dist.get_rank()} waits for rows of other ranks" in str(found)
        assert time.monotonic() - start < 11
        os._exit(0)  # the group is broken
    raise AssertionError("went on")


def dies() -> None:
    _without_rank_1(lambda: None)


def stalls() -> None:
    _without_rank_1(lambda: time.sleep(12))
