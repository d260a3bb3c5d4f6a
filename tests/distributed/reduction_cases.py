"""Gradients that the user reduces: `explain` lists them, and an optimizer that steps without a reduction warns."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moefx
from moefx.runtime.ranks.reductions import Reduction, build_reductions

from .. import proof_memory
from ..blocks import D
from .launch import sampled
from .models import Model, compiled_beside, is_of_experts

PLAN = moefx.Plan(validation="symbolic")
MANUAL = PLAN.replace(gradients="manual")


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def told(model: nn.Module, optimizer: Any = None, x: torch.Tensor | None = None) -> list[str]:
    """What steps of an optimizer warn of."""
    x = torch.randn(9 + dist.get_rank(), D) if x is None else x
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).pow(2).mean().backward()
            optimizer.step()
    own = [w for w in found if "moefx" in str(w.message)]
    assert all(w.filename == __file__ for w in own), [w.filename for w in own]
    return [str(w.message) for w in own]


def case_the_gradient_of_the_mean_loss() -> None:
    """As `explain` says, over meshes of all kinds."""
    meshes = (
        (dict(dp=2, tp=2), dict(expert_axis=("dp", "tp"), sequence_axis="tp")),
        (dict(ep=4), {}),
        (dict(ep=2, dp=2), {}),
        (dict(dp=2, ep=2), {}),
        (dict(ep=2, tp=2), {}),
    )
    for sizes, more in sampled(meshes, 2):
        mesh, original = mesh_of(**sizes), Model("joined", layers=1).double()
        plan = MANUAL.replace(**more)
        compiled = compiled_beside(original, mesh, plan)
        axes = plan.expert_axis or ("ep",)
        shares = "tp" in sizes
        number = 10 * mesh[next(iter(sizes))].get_local_rank() if shares else dist.get_rank()
        x = torch.randn(9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        compiled(x).sum().backward()
        original(x).sum().backward()
        of = build_reductions(mesh, axes, plan.sequence_axis)
        for name, parameter in original.named_parameters():
            wanted = parameter.grad.clone()
            dist.all_reduce(wanted)
            wanted /= dist.get_world_size()
            own = dict(compiled.named_parameters())[name].grad
            local = own.to_local() if isinstance(own, DTensor) else own
            reduction: Reduction = of["experts" if is_of_experts(name) else "others"]
            for axis in reduction.axes:
                dist.all_reduce(local, group=mesh.get_group(axis))
            local /= reduction.divisor
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            torch.testing.assert_close(whole, wanted, msg=lambda m, what=(sizes, name): f"{what} {m}")


def case_explained() -> None:
    original, example = Model("gated", layers=1), (torch.zeros(9, D),)
    mesh = mesh_of(dp=2, ep=2)
    before = moefx.explain(original, mesh=mesh, plan=PLAN, example_inputs=example)
    compiled = compiled_beside(original, mesh, PLAN)
    assert before.gradients == moefx.explain(compiled).gradients == moefx.explain(copy.deepcopy(compiled)).gradients
    experts, others = before.gradients
    number = sum(is_of_experts(name) for name, _ in compiled.named_parameters())
    assert experts.split() == (
        f"experts {number} parameter(s): summed over 'ep' already, sum over 'dp' (2 ranks), divide by 4".split()
    )
    assert "sum over 'dp' and 'ep' (4 ranks), divide by 4" in others
    assert all(line in str(before) and line in str(moefx.explain(compiled)) for line in before.gradients)
    (*_, outside) = moefx.explain(compiled_beside(original, mesh["ep"], PLAN)).gradients
    assert "2 rank(s) are not in the mesh" in outside


def case_a_naive_step_is_told_once() -> None:
    compiled = compiled_beside(Model("gated", layers=1), mesh_of(ep=4), PLAN)
    (text,) = told(compiled)
    for part in ("first.weight", "sum over 'ep' (4 ranks), divide by 4", "Plan(gradients='manual')", "of the rest"):
        assert part in text, text
    assert not told(compiled, torch.optim.AdamW(compiled.parameters()))
    assert len(told(copy.deepcopy(compiled))) == 1  # another model
    (text,) = told(compiled_beside(Model("joined", layers=1), mesh_of(dp=2, ep=2), PLAN))
    assert "its experts" in text and "of the rest" in text
    compiled = compiled_beside(Model("gated", layers=1), mesh_of(ep=4), PLAN)
    assert len(told(torch.compile(compiled, backend="eager"))) == 1


def case_what_is_reduced_is_not_told() -> None:
    assert not told(compiled_beside(Model("gated", layers=1), mesh_of(ep=4), MANUAL))
    assert not told(Model("gated", layers=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel = DistributedDataParallel(compiled_beside(Model("gated", layers=1), mesh_of(ep=4), PLAN))
    assert not told(parallel)
    compiled = compiled_beside(Model("gated", layers=1), mesh_of(ep=4), PLAN)  # experts alone
    own = [p for name, p in compiled.named_parameters() if is_of_experts(name)]
    assert not told(compiled, torch.optim.SGD(own, lr=0.1))
    mesh = mesh_of(dp=2, tp=2)
    plan = PLAN.replace(expert_axis="tp", sequence_axis="tp")
    model = compiled_beside(Model("gated", layers=1), mesh, plan)
    parallel = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    assert not told(parallel, x=x)


def case_fully_sharded_parameters() -> None:
    """Over the ranks with other tokens: those of experts over one axis, all else over both."""
    mesh = mesh_of(dp=2, ep=2)
    everything = mesh["dp", "ep"]._flatten("all_ranks")
    compiled = compiled_beside(Model("gated", layers=1), mesh, PLAN)
    for block in compiled.blocks:
        fully_shard(block.gate, mesh=everything)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(compiled, mesh=everything)
    assert not told(compiled)
    compiled = compiled_beside(Model("gated", layers=1), mesh, PLAN)
    for block in compiled.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(compiled, mesh=mesh["dp"])
    (text,) = told(compiled)  # the ranks of "ep" have tokens of their own too
    assert "its experts" not in text and "first.weight" in text


def hooks_of_optimizers() -> None:
    """The hook of all optimizers is removed after the last spread model is freed; in processes of its own, since any
    model of another test that still lives keeps it."""
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not hooks
    compiled = compiled_beside(Model("gated", layers=1), mesh_of(ep=dist.get_world_size()), PLAN)
    proof_memory.forget()  # it holds blocks of the model
    other = copy.deepcopy(compiled)
    assert len(hooks) == 1
    del compiled
    gc.collect()
    assert len(hooks) == 1 and len(told(other)) == 1
    del other
    gc.collect()
    assert not hooks
