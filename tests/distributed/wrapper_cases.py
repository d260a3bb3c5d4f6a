"""Wrappers and broadcasts around distributed models keep the experts, or the next call names what overwrote them."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moefx
from moefx.errors import ExpertsOverwritten

from ..blocks import D
from .launch import sampled
from .models import BLOCKS, Model, compile_over_mesh, is_expert_parameter

PLAN = moefx.Plan(validation="symbolic", gradients="manual")
KINDS = ("gated", "joined", "numbered", "flat")


class Parent(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.inner, self.head = model, nn.Linear(D, D)

    def forward(self, x):
        return self.head(self.inner(x))


class DeepSpeedEngine(nn.Module):
    """Broadcast like DeepSpeed's `_broadcast_model`, as bytes through `.data`. `asks`: call the modules' hook first."""

    def __init__(self, model: nn.Module, asks: bool):
        super().__init__()
        self.module = model
        for module in model.modules() if asks else ():
            if hasattr(module, "set_deepspeed_parallelism"):
                module.set_deepspeed_parallelism(False)
        broadcast(model)

    def forward(self, *args):
        return self.module(*args)


class Averaging(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model
        broadcast(model)

    def forward(self, x):
        return self.module(x)


def broadcast(model: nn.Module) -> None:
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        dist.broadcast(local.data.view(torch.uint8), 0)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def compile_over_ranks(kind: str = "gated", mesh: DeviceMesh | None = None, plan: moefx.Plan = PLAN) -> nn.Module:
    return compile_over_mesh(Model(kind, layers=1), mesh or make_mesh(), plan)


def draw_tokens() -> torch.Tensor:
    return torch.randn(9 + dist.get_rank(), D)


def check_overwritten(call: Callable[..., Any], *texts: str, x: Any = None) -> None:
    """Check that all ranks raise and continue together."""
    try:
        call(draw_tokens() if x is None else x)
    except ExpertsOverwritten as found:
        assert all(text in str(found) for text in texts), found
    else:
        raise AssertionError("ran")
    dist.barrier()


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(draw_tokens()).pow(2).mean().backward()
        optimizer.step()


def have_different_experts(compiled: nn.Module) -> bool:
    """Return whether all experts of the first block differ."""
    whole = moefx.full_state_dict(compiled)
    (name,) = [n for n in whole if n.startswith("blocks.0.") and n.endswith(("experts.0.gate.weight", "down"))][:1]
    if name.endswith("down"):
        parts = list(whole[name].chunk(4))
    else:
        parts = [whole[name.replace("experts.0", f"experts.{e}")] for e in range(4)]
    return not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


def case_ddp_leaves_experts_alone() -> None:
    for kind in KINDS:
        original = Model(kind, layers=1)
        compiled = compile_over_mesh(original, make_mesh(), PLAN)
        parallel, x = DistributedDataParallel(compiled), draw_tokens()
        torch.testing.assert_close(parallel(x), original(x))
        train(parallel)
        assert have_different_experts(compiled), kind
        managed = {name for name, _ in compiled.named_parameters()} - set(parallel.parameters_to_ignore)
        assert managed == {n for n, _ in original.named_parameters() if not is_expert_parameter(n)}


def case_ddp_around_other_modules() -> None:
    """Wrap a block as the root, a copy, and a result of torch.compile, whose names have a prefix."""
    x = draw_tokens()
    torch.manual_seed(0)
    root = moefx.compile(BLOCKS["joined"](), mesh=make_mesh(), plan=PLAN, example_inputs=(torch.zeros(9, D),))
    compiled = compile_over_ranks()
    for model in (root, copy.deepcopy(compiled), torch.compile(compiled, backend="eager")):
        want = model(x)
        torch.testing.assert_close(DistributedDataParallel(model)(x), want)


def case_ddp_over_replicas_of_experts() -> None:
    """Reduce experts like other parameters over a data-parallel axis whose ranks have the same experts."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "ep"))
    compiled = compile_over_ranks(mesh=mesh)
    parallel = DistributedDataParallel(compiled, process_group=mesh.get_group("dp"))
    assert not parallel.parameters_to_ignore
    parallel(draw_tokens()).pow(2).sum().backward()
    for parameter in compiled.parameters():
        if parameter.grad is not None:
            gathered = [torch.empty_like(parameter.grad) for _ in range(2)]
            dist.all_gather(gathered, parameter.grad.contiguous(), group=mesh.get_group("dp"))
            assert torch.equal(*gathered)
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "ep"))
    assert not DistributedDataParallel(compile_over_ranks(mesh=alone)).parameters_to_ignore


def case_ddp_warns_of_remaining_reductions() -> None:
    for plan, number in ((PLAN, 0), (PLAN.replace(gradients=None), 1)):
        compiled = compile_over_ranks(plan=plan)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DistributedDataParallel(compiled)
        texts = [str(w.message) for w in caught if "moefx" in str(w.message)]
        assert len(texts) == number, texts
        assert all("divide by 4" in text for text in texts), texts


def case_ddp_keeps_ignored_parameters() -> None:
    model = Model("gated", layers=1)
    model._ddp_params_and_buffers_to_ignore = ["first.bias"]
    parallel = DistributedDataParallel(compile_over_mesh(model, make_mesh(), PLAN))
    assert "first.bias" in parallel.parameters_to_ignore
    assert len(parallel.parameters_to_ignore) > 1


def case_ddp_around_a_parent() -> None:
    for calls in (0, 2):
        parent = Parent(compile_over_ranks())
        for _ in range(calls):
            parent(draw_tokens())
        for options in ({}, {"init_sync": False}):
            parallel = DistributedDataParallel(parent, **options)
            check_overwritten(parallel, "DistributedDataParallel around Parent",
                        "inner.blocks.0.experts.", "moefx.expert_parameter_names(module, buffers=True)")  # fmt: skip


def case_the_remedy_for_a_parent() -> None:
    for kind in ("gated", "flat"):
        original, x = Model(kind, layers=1), draw_tokens()
        parent = Parent(compile_over_mesh(original, make_mesh(), PLAN))
        names = moefx.expert_parameter_names(parent, buffers=True)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, names)
        parallel = DistributedDataParallel(parent)
        torch.testing.assert_close(parent.inner(x), original(x))
        train(parallel)
        assert have_different_experts(parent.inner)


def case_equal_experts_in_a_parent_raise() -> None:
    """Refuse wrappers even if a broadcast changes nothing: they would average gradients of different experts."""
    model = Model("gated", layers=1)
    for block in model.blocks:
        for expert in block.experts:
            expert.load_state_dict(block.experts[0].state_dict())
    compiled = compile_over_mesh(model, make_mesh(), PLAN)
    compiled(draw_tokens())
    check_overwritten(DistributedDataParallel(Parent(compiled)), "overwrites the experts of blocks.0")


def case_deepspeed() -> None:
    for wrap in (lambda model: model, Parent):
        compiled = compile_over_ranks()
        before = copy.deepcopy(moefx.full_state_dict(compiled))
        asks = functools.partial(DeepSpeedEngine, asks=True)
        check_overwritten(asks, "DeepSpeed's engine broadcasts", "without a mesh", x=wrap(compiled))
        after = moefx.full_state_dict(compiled)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        compiled(draw_tokens())
        engine = DeepSpeedEngine(wrap(compiled), asks=False)
        check_overwritten(engine, "DeepSpeed's engine broadcasts")


def case_other_broadcasts() -> None:
    for kind in sampled(KINDS, 4):
        for calls in (0, 3):
            compiled = compile_over_ranks(kind)
            for _ in range(calls):
                compiled(draw_tokens())
            ranks = f"ranks {', '.join(map(str, range(dist.get_world_size())))}"
            if calls:
                check_overwritten(Averaging(compiled), "Averaging has overwritten", ranks)
                continue
            broadcast(compiled)
            for _ in range(2):  # later calls raise too
                check_overwritten(compiled, "A broadcast of parameters", ranks, "overwritten the experts of blocks.0")


def case_a_broadcast_between_two_ranks() -> None:
    """Raise on all ranks."""
    compiled, pairs = compile_over_ranks(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("of", "pairs"))
    compiled(draw_tokens())
    if dist.get_rank() in (2, 3):
        for parameter in compiled.parameters():
            dist.broadcast(parameter.data, 2, group=pairs.get_group("pairs"))
    check_overwritten(compiled, "ranks 2, 3 had different experts before")


def case_a_broadcast_below_torch_compile() -> None:
    compiled = compile_over_ranks()
    called = torch.compile(compiled, backend="eager")
    called(draw_tokens())
    broadcast(compiled)
    check_overwritten(called, "has overwritten the experts")


def case_fully_shard_over_other_experts() -> None:
    compiled = compile_over_ranks()
    fully_shard(compiled, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    check_overwritten(compiled, "fully_shard over ranks of the expert axis")


def case_equal_experts_and_loads_do_not_raise() -> None:
    """Accept experts that are equal on purpose, loads, steps, casts and copies. Loading repairs overwritten experts."""
    original = Model("gated", layers=1)
    whole = original.state_dict()
    alike = {n: whole[".".join([*n.split(".")[:3], "0", *n.split(".")[4:]])] if "experts" in n else v
             for n, v in whole.items()}  # fmt: skip
    compiled = compile_over_ranks()
    compiled(draw_tokens())
    compiled.load_state_dict(alike)
    train(compiled)
    compiled.load_state_dict(whole)
    train(compiled)
    compiled.double()(draw_tokens().double())
    copy.deepcopy(compiled.float())(draw_tokens())
    with torch.no_grad():  # pruned
        for name, parameter in compiled.named_parameters():
            parameter.mul_(0.0 if "experts" in name else 1.0)
    compiled(draw_tokens())
    broken = compile_over_ranks()
    broadcast(broken)
    check_overwritten(broken)
    broken.load_state_dict(whole)
    x = draw_tokens()
    torch.testing.assert_close(broken(x), original(x))


def case_accelerate() -> None:
    try:
        from accelerate import Accelerator
    except ImportError:
        return
    original, x = Model("gated", layers=1), draw_tokens()
    compiled = compile_over_mesh(original, make_mesh(), PLAN)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": str(dist.get_rank())}
    with mock.patch.dict(os.environ, variables):
        prepared = Accelerator(cpu=True).prepare(compiled)
    assert isinstance(prepared, DistributedDataParallel)
    torch.testing.assert_close(prepared(x), original(x))
    train(prepared)
    assert have_different_experts(compiled)
