"""Ranks that die, stall or have different plans."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import InvalidPlan, NoMoEBlockFound, RanksLost

from ..blocks import D, Gated, Loop
from .launch import sampled
from .models import BLOCKS, Model, compile_over_mesh


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def check_raises(compile, *texts: str, error: type[Exception] = InvalidPlan) -> None:
    try:
        compile()
    except error as found:
        assert all(text in str(found) for text in texts), found
    else:
        raise AssertionError("compiled")


def case_different_plans() -> None:
    plan = moefx.Plan(dispatch="flat" if dist.get_rank() == 1 else "dedup")
    check_raises(
        lambda: compile_over_mesh(Model("gated"), make_mesh(), plan),
        "do not agree on Plan(dispatch=...)",
        "'flat'",
        "'dedup'",
    )


def case_different_models() -> None:
    kind = "gated" if dist.get_rank() else "every expert"
    check_raises(lambda: compile_over_mesh(Model(kind), make_mesh(), moefx.Plan()),
            "rewritten blocks", "4 experts, 2 a token", "4 experts, 4 a token")  # fmt: skip


def case_one_rank_finds_no_block() -> None:
    model = BLOCKS["gated"]() if dist.get_rank() else Gated()
    check_raises(
        lambda: moefx.compile(model, mesh=make_mesh(), example_inputs=(torch.zeros(9, D),)), "rewritten blocks", "none"
    )


def case_one_rank_fails() -> None:
    inputs = (torch.zeros(9, D if dist.get_rank() else 3),)
    model = BLOCKS["gated"]()
    check_raises(lambda: moefx.compile(model, mesh=make_mesh(), example_inputs=inputs), "rewritten blocks", "none, ")


def case_no_rank_finds_a_block() -> None:
    inputs = (torch.zeros(9, D),)
    check_raises(lambda: moefx.compile(Gated(), mesh=make_mesh(), example_inputs=inputs), error=NoMoEBlockFound)


def case_different_node_sizes() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "4" if dist.get_rank() else "2"
    try:
        check_raises(
            lambda: compile_over_mesh(Model("gated"), make_mesh(), moefx.Plan()), "nodes of ranks", "2 x 2", "4"
        )
        os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() else "3"
        check_raises(
            lambda: compile_over_mesh(Model("gated"), make_mesh(), moefx.Plan()), "nodes of ranks", "not whole nodes"
        )
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


class Sharp(Loop):
    """Use a number of the call in the experts, on rows of other ranks too."""

    sharpness = 1.5

    def forward(self, x, slope=1.0):
        w, ids = self.gate(x).softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y = torch.tanh(self.experts[e](x[t]) * self.sharpness).mul(slope).sin()
            out = out.index_add(0, t, y * w[t, k, None])
        return out


def case_different_calls() -> None:
    torch.manual_seed(0)
    block, x = Sharp(), torch.randn(5, D)
    for dispatch in sampled(("halo", "dedup"), 2):
        plan = moefx.Plan(dispatch=dispatch, node_size=2, timeout=120.0)  # enough on slow machines
        compiled = moefx.compile(copy.deepcopy(block), mesh=make_mesh(), plan=plan, example_inputs=(x,))
        odd = dist.get_rank() == 1

        def check_call_raises(call, compiled=compiled) -> None:
            others = "ranks 0, 2, 3" if dist.get_rank() == 1 else "rank 1 run"
            check_raises(call, f"rank {dist.get_rank()} and {others}", error=RanksLost)
            torch.testing.assert_close(compiled(x), block(x))  # all ranks continue

        check_call_raises(lambda compiled=compiled, odd=odd: compiled(x, 2.0 if odd else 1.0))
        compiled.sharpness = 2.0 if odd else 1.5
        check_raises(lambda compiled=compiled: compiled(x), "run different programs for one block", error=RanksLost)
        compiled.sharpness = 1.5

        def run_mixed(compiled=compiled, odd=odd):
            with torch.autocast("cpu", torch.bfloat16, enabled=odd):
                compiled(x)

        check_call_raises(run_mixed)
        torch.testing.assert_close(compiled(x, slope=3.0), block(x, slope=3.0))


def _run_without_rank_1(leave, calls: int = 1, **fields: Any) -> None:
    """Let rank 1 leave after some calls. The others raise in the next one."""
    fields = fields or {"dispatch": "rbd", "node_size": 2}
    compiled = compile_over_mesh(Model("gated"), make_mesh(), moefx.Plan(timeout=3.0, **fields))
    for _ in range(calls):
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
    _run_without_rank_1(lambda: None)


def stalls() -> None:
    _run_without_rank_1(lambda: time.sleep(12))


def dies_before_an_all_gather() -> None:
    _run_without_rank_1(lambda: None, calls=2, dispatch="gather", max_tokens=8)


def stalls_before_experts_are_compared() -> None:
    """A dispatch without row counts compares the experts of ranks in calls 1, 2, 4, 8 and so on."""
    _run_without_rank_1(lambda: time.sleep(12), dispatch="gather", max_tokens=8)
