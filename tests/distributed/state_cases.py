"""State of distributed models: loading, full state dicts, checkpoints that reshard, clipping, FSDP and DDP."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import moefx
from moefx.errors import InvalidInput, MoefxError, Refused

from ..blocks import D, E, Gated, Loop
from .launch import sampled
from .models import BLOCKS, Model, check, compile_over_mesh, is_expert_parameter

PLAN = moefx.Plan(validation="symbolic")
BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)
KINDS = ("gated", "joined", "numbered", "flat")  # separate experts, stacked experts, and both


def make_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Build a mesh with the experts over all ranks, and one with the experts over half of them."""
    world = dist.get_world_size()
    return (
        init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep")),
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep")),
    )


def check_equal(found: dict, wanted: dict) -> None:
    assert list(found) == list(wanted), (list(found), list(wanted))
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def create_shared_folder() -> str:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def train_step(compiled: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    compiled(torch.randn(40, D)).pow(2).sum().backward()
    for name, parameter in compiled.named_parameters():
        if not is_expert_parameter(name):  # FSDP did not reduce these
            local, group = parameter.grad, None
            if isinstance(local, DTensor):
                local, group = local.to_local(), mesh.get_group("ep")
            dist.all_reduce(local, group=group)
    optimizer.step()


def case_state_dicts_of_the_original() -> None:
    for mesh in make_meshes():
        for kind in KINDS:
            original = Model(kind)
            compiled = compile_over_mesh(original, mesh, PLAN)
            check_equal(moefx.full_state_dict(compiled), original.state_dict())
            other = {name: torch.randn_like(value) for name, value in original.state_dict().items()}
            for value in other.values():
                dist.broadcast(value, 0)
            compiled.load_state_dict(other)
            check_equal(moefx.full_state_dict(copy.deepcopy(compiled)), other)
            at_one = moefx.full_state_dict(compiled, cpu=True, rank=1)
            check_equal(at_one, other if dist.get_rank() == 1 else {})
            local_state = compiled.state_dict()
            assert len(local_state) < len(other) or kind in ("joined", "flat")
            compiled.load_state_dict(local_state)
            check_equal(moefx.full_state_dict(compiled), other)


class Scaled(Loop):
    """Experts with a buffer each that no state dict holds."""

    def __init__(self):
        super().__init__(Gated)
        for number, expert in enumerate(self.experts):
            expert.register_buffer("scale", torch.full((1,), 1.0 + number), persistent=False)

    def expert(self, e, x, w):
        return self.experts[e](x) * self.experts[e].scale * w


def case_buffers_of_experts_outside_of_state_dicts() -> None:
    model = Model("gated", layers=1)
    model.blocks[0] = Scaled()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    compiled = check(model.double(), make_meshes()[0], PLAN)
    check_equal(moefx.full_state_dict(compiled), model.state_dict())


def case_invalid_state_dicts_raise() -> None:
    for kind in KINDS:
        original = Model(kind)
        compiled = compile_over_mesh(original, make_meshes()[0], PLAN)
        state = {**original.state_dict(), "more": torch.zeros(3)}
        del state["first.bias"]
        try:
            compiled.load_state_dict(state)
        except RuntimeError as found:
            assert 'Missing key(s) in state_dict: "first.bias"' in str(found), found
            assert 'Unexpected key(s) in state_dict: "more"' in str(found), found
            assert "experts" not in str(found), found
        else:
            raise AssertionError("was loaded")


def case_copies_and_pickles() -> None:
    """Keep process groups in copies, and refuse pickles, which outlive them."""
    for kind in KINDS:
        compiled, x = compile_over_mesh(Model(kind), make_meshes()[0], PLAN), torch.randn(9, D)
        torch.testing.assert_close(copy.deepcopy(compiled)(x), compiled(x))
        for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            try:
                save(compiled)
            except MoefxError as found:
                assert "cannot be pickled" in str(found)
                assert "moefx.full_state_dict" in str(found)
            else:
                raise AssertionError("names of process groups in a file")


def case_full_state_dict_of_torch_is_complete_or_raises() -> None:
    options = StateDictOptions(full_state_dict=True)
    original = Model("joined")
    check_equal(
        get_model_state_dict(compile_over_mesh(original, make_meshes()[1], PLAN), options=options),
        original.state_dict(),
    )
    try:
        get_model_state_dict(compile_over_mesh(Model("gated"), make_meshes()[1], PLAN), options=options)
    except moefx.MoefxError as found:
        assert "use moefx.full_state_dict" in str(found), found
    else:
        raise AssertionError("was incomplete")
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "ep"))
    check_equal(
        get_model_state_dict(compile_over_mesh(Model("gated"), alone, PLAN), options=options),
        Model("gated").state_dict(),
    )


def case_checkpoints_reshard() -> None:
    """Save with optimizer state over one mesh, and load over another and in the plain model: all bits are equal."""
    all_ranks, half = make_meshes()
    for kind, (before, after) in sampled(itertools.product(KINDS, [(all_ranks, half), (half, all_ranks)]), 8):
        folder, original = create_shared_folder(), Model(kind)
        saved = compile_over_mesh(original, before, PLAN)
        if before is half:
            shard_fully(saved, half)
        optimizer = torch.optim.AdamW(saved.parameters(), lr=0.01)
        train_step(saved, optimizer, before)
        whole = moefx.full_state_dict(saved)
        model_state, optimizer_state = get_state_dict(saved, optimizer, options=BY_PARAMETER)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

        other = compile_over_mesh(original, after, PLAN)
        if after is half:
            shard_fully(other, half)
        of_other = torch.optim.AdamW(other.parameters(), lr=0.01)
        load_checkpoint(other, of_other, folder)
        check_equal(moefx.full_state_dict(other), whole)

        plain = copy.deepcopy(original)
        of_plain = torch.optim.AdamW(plain.parameters(), lr=0.01)
        load_checkpoint(plain, of_plain, folder)
        check_equal(plain.state_dict(), whole)
        moments = {name: of_plain.state[p]["exp_avg"] for name, p in plain.named_parameters()}
        assert any(m.abs().sum() > 0 for name, m in moments.items() if is_expert_parameter(name))
        for name, parameter in other.named_parameters():
            local_state = of_other.state[parameter]["exp_avg"]
            if isinstance(local_state, DTensor):
                local_state = local_state.full_tensor()
            assert torch.equal(local_state, moments[name]), name


def shard_fully(compiled: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in compiled.blocks:
        fully_shard(block, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else Shard(0))
    return fully_shard(compiled, mesh=mesh["dp"])


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=BY_PARAMETER)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **states, options=BY_PARAMETER)


def case_a_meta_model() -> None:
    """Materialize only shards."""
    for kind in sampled(KINDS, 2):
        with torch.device("meta"):
            meta = Model(kind)
        compiled = compile_over_mesh(meta, make_meshes()[0], PLAN).to_empty(device="cpu")
        held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in compiled.parameters())
        everything = sum(p.numel() for p in meta.parameters())
        experts = sum(p.numel() for name, p in meta.named_parameters() if is_expert_parameter(name))
        assert held == everything - experts + experts // dist.get_world_size()
        original = Model(kind)
        compiled.load_state_dict(original.state_dict())
        x = torch.randn(11, D)
        torch.testing.assert_close(compiled(x), original(x))
        assigned = compile_over_mesh(meta, make_meshes()[0], PLAN)
        assigned.load_state_dict(original.state_dict(), assign=True)
        torch.testing.assert_close(assigned(x), original(x))


def case_the_norm_of_all_gradients() -> None:
    for kind, mesh in sampled(itertools.product(KINDS, make_meshes()), 3):
        original = Model(kind)
        compiled = compile_over_mesh(original, mesh, PLAN)
        torch.manual_seed(5)
        x = torch.randn(3, D)  # fewer slots than experts: some have no gradient
        for norm_type in (2.0, 1.0, float("inf")):
            original.zero_grad(), compiled.zero_grad()
            (original(x).sum() * mesh["ep"].size()).backward()
            compiled(x).sum().backward()
            for name, p in compiled.named_parameters():
                if p.grad is not None and not is_expert_parameter(name):
                    p.grad *= mesh["ep"].size()
            wanted = nn.utils.clip_grad_norm_(original.parameters(), 0.7, norm_type)
            norm = moefx.clip_grad_norm_(compiled, 0.7, norm_type)
            torch.testing.assert_close(norm, wanted)
            assert wanted > 0.7
            torch.testing.assert_close(moefx.clip_grad_norm_(compiled, 100.0, norm_type), torch.tensor(0.7))
    compiled.first.weight.grad[0, 0] = float("nan")
    try:
        moefx.clip_grad_norm_(compiled, 1.0, error_if_nonfinite=True)
    except RuntimeError as found:
        assert "nan" in str(found)
    else:
        raise AssertionError("nan")


def case_frozen_experts_of_one_rank() -> None:
    compiled = compile_over_mesh(Model("gated"), make_meshes()[0], PLAN)
    if dist.get_rank() == 0:
        for name, p in compiled.named_parameters():
            p.requires_grad_(not is_expert_parameter(name))
    compiled(torch.randn(9, D)).sum().backward()
    norms = [moefx.clip_grad_norm_(compiled, 1.0, norm_type) for norm_type in (2.0, float("inf"))]
    assert all(norm > 0 for norm in norms)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(BLOCKS["joined"]() for _ in range(2))
        self.blocks[1].gate_up, self.blocks[1].down = self.blocks[0].gate_up, self.blocks[0].down

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def case_blocks_that_share_their_experts() -> None:
    original = Tied()
    compiled = compile_over_mesh(original, make_meshes()[0], PLAN)
    assert compiled.blocks[0].down is compiled.blocks[1].down
    x = torch.randn(9 + dist.get_rank(), D)
    compiled(x).pow(2).sum().backward()
    original(x).pow(2).sum().backward()
    wanted = original.blocks[0].down.grad
    dist.all_reduce(wanted)
    torch.testing.assert_close(compiled.blocks[0].down.grad.full_tensor(), wanted)


def case_experts_used_outside_the_block() -> None:
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = BLOCKS["gated"]()
            self.dense = self.block.experts[0]

        def forward(self, x):
            return self.block(x) + self.dense(x)

    try:
        compile_over_mesh(Outside(), make_meshes()[0], PLAN)
    except Refused as found:
        assert "dense.gate.weight is the parameter block.experts.0.gate.weight of an expert" in str(found), found
    else:
        raise AssertionError("was spread")
    compiled = compile_over_mesh(Model("gated"), make_meshes()[0], PLAN)
    try:
        compile_over_mesh(compiled, make_meshes()[0], PLAN)
    except InvalidInput as found:
        assert "spread over a mesh already" in str(found)
    else:
        raise AssertionError("twice")


def case_fully_sharded() -> None:
    """Shard experts over the expert axis and, with the other parameters, over the data-parallel axis."""
    mesh = make_meshes()[1]
    for kind in KINDS:
        original = Model(kind)
        compiled = compile_over_mesh(original, mesh, PLAN)
        shard_fully(compiled, mesh)
        x = torch.randn(7 + dist.get_rank(), D)
        out, want = compiled(x), original(x)
        torch.testing.assert_close(out, want)
        grad = torch.randn_like(want)
        (out * grad).sum().backward()
        (want * grad).sum().backward()
        for p in original.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        squares = [
            p.grad.double().pow(2).sum() / 4 for name, p in original.named_parameters() if is_expert_parameter(name)
        ]
        local_state = dict(compiled.named_parameters())
        for name, p in original.named_parameters():
            if is_expert_parameter(name) and name in local_state:
                whole = local_state[name].grad.full_tensor()
                torch.testing.assert_close(whole, p.grad / 2, msg=lambda m, name=name: f"{name} {m}")
        for name, p in local_state.items():  # one group of ranks has one part of the dense gradients
            if not is_expert_parameter(name):
                p.grad = None
        torch.testing.assert_close(moefx.clip_grad_norm_(compiled, 1e9).double(), torch.stack(squares).sum().sqrt())
        check_equal(moefx.full_state_dict(compiled), original.state_dict())


def case_fully_sharded_in_another_dtype() -> None:
    """Specialize the first call in bfloat16 while FSDP has gathered the block."""
    mesh, original, x = make_meshes()[1], Model("gated", layers=1), torch.randn(9, D)
    compiled = compile_over_mesh(original, mesh, PLAN)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(compiled.blocks[0], mesh=mesh["dp"], mp_policy=policy)
    fully_shard(compiled, mesh=mesh["dp"], mp_policy=policy)
    torch.testing.assert_close(compiled(x), original.bfloat16()(x.bfloat16()))
    assert isinstance(compiled.blocks[0], FSDPModule)
    assert compiled.blocks[0]._forward_pre_hooks


def case_data_parallel_training() -> None:
    mesh = make_meshes()[0]
    for kind in sampled(KINDS, 2):
        original = Model(kind)
        compiled = compile_over_mesh(original, mesh, PLAN)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            compiled, moefx.expert_parameter_names(compiled)
        )
        parallel = DistributedDataParallel(compiled)
        x = torch.randn(7 + dist.get_rank(), D)
        parallel(x).pow(2).sum().backward()
        original(x).pow(2).sum().backward()
        for name, p in compiled.named_parameters():
            wanted = dict(original.named_parameters())[name].grad
            if not is_expert_parameter(name):
                dist.all_reduce(wanted)
                torch.testing.assert_close(p.grad, wanted / dist.get_world_size())
        assert E % dist.get_world_size() == 0
