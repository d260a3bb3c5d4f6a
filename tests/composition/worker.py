"""Process of `test_distributed`, started by `torchrun`: `worker.py KIND CASE...`."""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import moefx

from ..proof_memory import share_checks, share_proofs
from .models import NEAR, Model, assert_rewritten, build, compute_loss, draw_ids

WORLD = 2


def draw_batches(number: int) -> list[Tensor]:
    """Return one batch per rank."""
    return [draw_ids(2, 6, seed=10 * number + rank) for rank in range(WORLD)]


def train_alone(steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train the original in one process. Return the losses of each rank's batch and the final weights."""
    model = build(KIND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        values = [compute_loss(model, tokens) for tokens in draw_batches(number)]
        (sum(values) / WORLD).backward()
        optimizer.step()
        losses.append(values[RANK].detach())
    return losses, model.state_dict()


def train(model: nn.Module, steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        value = compute_loss(model, draw_batches(number)[RANK])
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def compare(losses: list[Tensor], state: dict[str, Tensor], steps: int) -> None:
    expected_losses, expected = train_alone(steps)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected_losses), **NEAR)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=lambda text, n=name: f"{n}: {text}", **NEAR)


def list_layers(model: nn.Module) -> nn.ModuleList:
    return model.moes if isinstance(model, Model) else model.model.layers


def shard(model: nn.Module, each: bool = True) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    if each:
        for layer in list_layers(model):
            _sum_on_gloo(fully_shard(layer, mesh=mesh))
    return _sum_on_gloo(fully_shard(model, mesh=mesh))


def _sum_on_gloo(module: FSDPModule) -> FSDPModule:
    # gloo cannot average
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(WORLD)
    return module


def gather_state(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def ddp() -> None:
    compiled = moefx.compile(build(KIND))
    # an expert without tokens on one rank has a zero gradient instead of none
    parallel = nn.parallel.DistributedDataParallel(compiled)
    compare(train(parallel, 3), compiled.state_dict(), 3)
    assert_rewritten(compiled)


def ddp_before() -> None:
    """Compile a wrapped model: its copy has its own buckets."""
    compiled = moefx.compile(nn.parallel.DistributedDataParallel(build(KIND)), example_inputs=(draw_ids(),))
    compare(train(compiled, 3), compiled.module.state_dict(), 3)
    check_rewritten(compiled)


def fsdp_after() -> None:
    compiled = shard(moefx.compile(build(KIND)))
    losses = train(compiled, 3)
    compare(losses, gather_state(compiled), 3)
    check_rewritten(compiled)


def fsdp_root_only() -> None:
    compiled = shard(moefx.compile(build(KIND)), each=False)
    losses = train(compiled, 2)
    compare(losses, gather_state(compiled), 2)
    check_rewritten(compiled)


def fsdp_before() -> None:
    """Refuse FSDP modules, which cannot be copied, with an error that names the order of calls."""
    sharded = shard(build(KIND))
    for call in (moefx.compile, moefx.explain):
        try:
            call(sharded)
        except moefx.MoefxError as error:
            assert "call moefx.compile first, then fully_shard" in str(error)
        else:
            raise AssertionError("no error")
    compare(train(sharded, 1), gather_state(sharded), 1)  # as usable as before


def dtensor_experts() -> None:
    """Leave experts that are DTensors unchanged, whether sharded by hand or for tensor parallelism."""
    model, mesh = build(KIND), init_device_mesh("cpu", (WORLD,))
    experts = model.moes[0].experts
    experts.down = nn.Parameter(distribute_tensor(experts.down.detach(), mesh, [Shard(0)]))
    compiled = moefx.compile(model)
    assert [block.name for block in moefx.blocks(compiled)] == ["moes.1"]
    (refused,) = moefx.explain(compiled).refused
    assert (refused.name, refused.reason) == ("moes.0", "experts.down is a DTensor")


def fsdp_meta() -> None:
    """Start as large models do: meta device, compile, shard, materialize, load."""
    source = build(KIND)
    compiled = shard(moefx.compile(copy.deepcopy(source).to("meta"), example_inputs={"input_ids": draw_ids()}))
    compiled.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    set_model_state_dict(compiled, source.state_dict(), options=options)
    losses = train(compiled, 2)
    compare(losses, gather_state(compiled), 2)
    check_rewritten(compiled)


def fsdp_experts() -> None:
    """Raise if experts are sharded one by one after compile: they would never be gathered."""
    compiled = moefx.compile(build(KIND))
    for expert in compiled.moes[0].experts:
        fully_shard(expert, mesh=init_device_mesh("cpu", (WORLD,)))
    try:
        compute_loss(compiled, draw_ids())
    except moefx.errors.AbsorbedModuleChanged as error:
        assert "moes.0.experts.0 became a FSDPExpert" in str(error)
    else:
        raise AssertionError("no error")


def checkpoint() -> None:
    """Load a sharded compiled model's checkpoint into the original in one process, and back."""
    path = os.environ["CHECKPOINT"]
    compiled = shard(moefx.compile(build(KIND)))
    losses = train(compiled, 2)
    dcp.save({"model": get_model_state_dict(compiled)}, checkpoint_id=path)
    original = build(KIND)
    state = {"model": original.state_dict()}
    dcp.load(state, checkpoint_id=path)
    compare(losses, original.state_dict(), 2)
    fresh = shard(moefx.compile(build(KIND)))
    state = {"model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=path)
    torch.testing.assert_close(compute_loss(fresh, draw_ids()), compute_loss(original, draw_ids()), **NEAR)


def check_rewritten(model: nn.Module) -> None:
    found = moefx.blocks(model)
    assert len(found) == 2, [block.name for block in found]
    assert all(b.fallbacks == 0 and b.forward.counts.rewritten > 0 for b in found), moefx.explain(model)


if __name__ == "__main__":
    RANK, KIND = int(os.environ["RANK"]), sys.argv[1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with share_proofs(), share_checks():
        for case in sys.argv[2:]:
            print("running", case, flush=True)
            globals()[case]()
            dist.barrier()
    dist.destroy_process_group()
