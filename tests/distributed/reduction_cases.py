"""Gradients that the user reduces: `explain` lists them, and optimizer steps without a reduction warn."""

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
from .models import Model, compile_over_mesh, is_expert_parameter

PLAN = moefx.Plan(validation="symbolic")
MANUAL = PLAN.replace(gradients="manual")


def make_mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def collect_warnings(model: nn.Module, optimizer: Any = None, x: torch.Tensor | None = None) -> list[str]:
    """Run two optimizer steps and return the warnings."""
    x = torch.randn(9 + dist.get_rank(), D) if x is None else x
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).pow(2).mean().backward()
            optimizer.step()
    caught = [w for w in found if "moefx" in str(w.message)]
    assert all(w.filename == __file__ for w in caught), [w.filename for w in caught]
    return [str(w.message) for w in caught]


def case_the_gradient_of_the_mean_loss() -> None:
    """Reduce gradients as `explain` says, over meshes of all kinds."""
    meshes = (
        (dict(dp=2, tp=2), dict(expert_axis=("dp", "tp"), sequence_axis="tp")),
        (dict(ep=4), {}),
        (dict(ep=2, dp=2), {}),
        (dict(dp=2, ep=2), {}),
        (dict(ep=2, tp=2), {}),
    )
    for sizes, options in sampled(meshes, 2):
        mesh, original = make_mesh(**sizes), Model("joined", layers=1).double()
        plan = MANUAL.replace(**options)
        compiled = compile_over_mesh(original, mesh, plan)
        axes = plan.expert_axis or ("ep",)
        shares = "tp" in sizes
        number = 10 * mesh[next(iter(sizes))].get_local_rank() if shares else dist.get_rank()
        x = torch.randn(9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        compiled(x).sum().backward()
        original(x).sum().backward()
        reductions = build_reductions(mesh, axes, plan.sequence_axis)
        for name, parameter in original.named_parameters():
            wanted = parameter.grad.clone()
            dist.all_reduce(wanted)
            wanted /= dist.get_world_size()
            gradient = dict(compiled.named_parameters())[name].grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            reduction: Reduction = reductions["experts" if is_expert_parameter(name) else "others"]
            for axis in reduction.axes:
                dist.all_reduce(local, group=mesh.get_group(axis))
            local /= reduction.divisor
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, wanted, msg=lambda m, label=(sizes, name): f"{label} {m}")


def case_explain_lists_unreduced_gradients() -> None:
    original, example = Model("gated", layers=1), (torch.zeros(9, D),)
    mesh = make_mesh(dp=2, ep=2)
    before = moefx.explain(original, mesh=mesh, plan=PLAN, example_inputs=example)
    compiled = compile_over_mesh(original, mesh, PLAN)
    assert before.gradients == moefx.explain(compiled).gradients == moefx.explain(copy.deepcopy(compiled)).gradients
    experts, others = before.gradients
    number = sum(is_expert_parameter(name) for name, _ in compiled.named_parameters())
    assert experts.split() == (
        f"experts {number} parameter(s): summed over 'ep' already, sum over 'dp' (2 ranks), divide by 4".split()
    )
    assert "sum over 'dp' and 'ep' (4 ranks), divide by 4" in others
    assert all(line in str(before) and line in str(moefx.explain(compiled)) for line in before.gradients)
    (*_, outside) = moefx.explain(compile_over_mesh(original, mesh["ep"], PLAN)).gradients
    assert "2 rank(s) are not in the mesh" in outside


def case_unreduced_steps_warn_once() -> None:
    compiled = compile_over_mesh(Model("gated", layers=1), make_mesh(ep=4), PLAN)
    (text,) = collect_warnings(compiled)
    for part in ("first.weight", "sum over 'ep' (4 ranks), divide by 4", "Plan(gradients='manual')", "of the rest"):
        assert part in text, text
    assert not collect_warnings(compiled, torch.optim.AdamW(compiled.parameters()))
    assert len(collect_warnings(copy.deepcopy(compiled))) == 1  # another model warns again
    (text,) = collect_warnings(compile_over_mesh(Model("joined", layers=1), make_mesh(dp=2, ep=2), PLAN))
    assert "its experts" in text
    assert "of the rest" in text
    compiled = compile_over_mesh(Model("gated", layers=1), make_mesh(ep=4), PLAN)
    assert len(collect_warnings(torch.compile(compiled, backend="eager"))) == 1


def case_reduced_gradients_do_not_warn() -> None:
    assert not collect_warnings(compile_over_mesh(Model("gated", layers=1), make_mesh(ep=4), MANUAL))
    assert not collect_warnings(Model("gated", layers=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel = DistributedDataParallel(compile_over_mesh(Model("gated", layers=1), make_mesh(ep=4), PLAN))
    assert not collect_warnings(parallel)
    compiled = compile_over_mesh(Model("gated", layers=1), make_mesh(ep=4), PLAN)  # only the experts
    expert_parameters = [p for name, p in compiled.named_parameters() if is_expert_parameter(name)]
    assert not collect_warnings(compiled, torch.optim.SGD(expert_parameters, lr=0.1))
    mesh = make_mesh(dp=2, tp=2)
    plan = PLAN.replace(expert_axis="tp", sequence_axis="tp")
    model = compile_over_mesh(Model("gated", layers=1), mesh, plan)
    parallel = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    assert not collect_warnings(parallel, x=x)


def case_fully_sharded_parameters() -> None:
    """Shard parameters over the ranks with different tokens: experts over one axis, the rest over both."""
    mesh = make_mesh(dp=2, ep=2)
    everything = mesh["dp", "ep"]._flatten("all_ranks")
    compiled = compile_over_mesh(Model("gated", layers=1), mesh, PLAN)
    for block in compiled.blocks:
        fully_shard(block.gate, mesh=everything)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(compiled, mesh=everything)
    assert not collect_warnings(compiled)
    compiled = compile_over_mesh(Model("gated", layers=1), mesh, PLAN)
    for block in compiled.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(compiled, mesh=mesh["dp"])
    (text,) = collect_warnings(compiled)  # the ranks of "ep" have different tokens too
    assert "its experts" not in text
    assert "first.weight" in text


def hooks_of_optimizers() -> None:
    """Remove the hook of all optimizers after the last distributed model is freed.

    Runs in separate processes: other tests may leave models that keep the hook.
    """
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not hooks
    compiled = compile_over_mesh(Model("gated", layers=1), make_mesh(ep=dist.get_world_size()), PLAN)
    proof_memory.forget_proofs()  # the memory holds blocks of the model
    other = copy.deepcopy(compiled)
    assert len(hooks) == 1
    del compiled
    gc.collect()
    assert len(hooks) == 1
    assert len(collect_warnings(other)) == 1
    del other
    gc.collect()
    assert not hooks
