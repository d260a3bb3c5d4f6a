"""`moefx.parallelize`: training over ranks equals training in one process, and mistakes raise."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import moefx
from moefx.distribution.data_parallelism import _list_layers_around_blocks, choose_placements
from moefx.errors import InvalidInput, InvalidPlan, MoefxError

from ..blocks import D, Gated, Loop
from .models import BLOCKS, Model, compile_over_mesh, is_expert_parameter
from .state_cases import BY_PARAMETER, create_shared_folder, load_checkpoint

PLAN = moefx.Plan(validation="symbolic")
RANKS, STEPS, PARTS = 4, 3, 2
LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    (dict(ep=4), {}),
    (dict(dp=2, ep=2), {}),
    (dict(ep=2, dp=2), dict(data="hsdp", replicate_axes="dp")),
    (dict(dp=2, ep=2), dict(data="ddp")),
)
Training = tuple[list[torch.Tensor], dict[str, torch.Tensor]]  # losses and norms, and the final parameters


@functools.cache
def make_mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def draw_batch(step: int, part: int) -> torch.Tensor:
    """Tokens of all ranks, [RANKS, tokens, D]."""
    generator = torch.Generator().manual_seed(PARTS * step + part)
    return torch.randn(RANKS, 5, D, dtype=torch.float64, generator=generator)


def compute_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean() / PARTS


@functools.cache
def train_in_one_process(kind: str) -> Training:
    model, seen = Model(kind, layers=1).double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(PARTS):
            loss = compute_loss(model, draw_batch(step, part).flatten(0, 1))
            loss.backward()
            seen.append(loss.detach())
        for parameter in model.parameters():  # AdamW also decays weights of experts without tokens
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return seen, model.state_dict()


def train(model: Any, mesh: DeviceMesh, **options: bool) -> Training:
    """Train on parts of the batches. Only the last part of a step communicates."""
    seen, optimizer = [], torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(PARTS):
            model.set_requires_gradient_sync(part == PARTS - 1)
            loss = compute_loss(model, draw_batch(step, part)[dist.get_rank()])
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            seen.append(total / RANKS)
        seen.append(moefx.clip_grad_norm_(model, 0.1))
        optimizer.step()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return seen, moefx.full_state_dict(model)


def parallelize_model(kind: str, sizes: dict[str, int], plan: moefx.Plan = PLAN, **options: Any) -> Any:
    mesh = make_mesh(**sizes)
    return moefx.parallelize(compile_over_mesh(Model(kind, layers=1).double(), mesh, plan), mesh, **options)


def case_training_equals_one_process() -> None:
    choices = itertools.cycle([{"fused": True}, {"foreach": True}, {"foreach": True}, {"fused": True}])
    for (sizes, options), kind in itertools.product(LAYOUTS, ("gated", "joined")):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "moefx")  # no warning about unreduced gradients
            seen, parameters = train(parallelize_model(kind, sizes, **options), make_mesh(**sizes), **next(choices))
        wanted, reference = train_in_one_process(kind)
        assert all(norm > 0.1 for norm in wanted[PARTS :: PARTS + 1])  # clipping changes the gradients
        message = functools.partial(str.format, "{} {} {}: {}", sizes, options, kind)
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-9, msg=message)
        torch.testing.assert_close(parameters, dict(reference), rtol=0, atol=1e-9, msg=message)


def case_experts_without_data_axes_stay_whole() -> None:
    """FSDP would copy stacked experts that no axis shards. Their gradients are divided without it."""

    def get_block(model: Any) -> nn.Module:
        (name,) = moefx.blocks(model)
        return model.get_submodule(name.name)

    cast = MixedPrecisionPolicy(param_dtype=torch.float32)
    assert isinstance(get_block(parallelize_model("joined", dict(ep=4), mp_policy=cast)), FSDPModule)
    model = parallelize_model("joined", dict(ep=4))
    assert not isinstance(get_block(model), FSDPModule)

    reference = Model("joined", layers=1).double()
    compute_loss(reference, draw_batch(0, 0).flatten(0, 1)).backward()
    wanted = reference.blocks[0].gate_up.grad[dist.get_rank(), None]

    def check_gradient(run: Any) -> None:
        model.zero_grad()
        compute_loss(run, draw_batch(0, 0)[dist.get_rank()]).backward()
        gradient = get_block(model).gate_up.grad.to_local()
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)

    check_gradient(model)
    # torch drops the hooks of parameters that are replaced
    model.to_empty(device="cpu")
    model.load_state_dict(Model("joined", layers=1).double().state_dict())
    check_gradient(model)
    block = get_block(model)
    block.gate_up = nn.Parameter(block.gate_up.detach().clone())
    check_gradient(model)
    block.gate_up = nn.Parameter(block.gate_up.detach().clone())
    compiled = torch.compile(model, backend="aot_eager")
    check_gradient(compiled)
    block.load_state_dict({name: value.clone() for name, value in block.state_dict().items()}, assign=True)
    check_gradient(compiled)


def case_originals_are_freed_at_once() -> None:
    """FSDP replaces the parameters. Their memory is free before Python collects cycles."""
    for kind in ("gated", "joined"):
        gc.collect()
        gc.disable()
        try:
            plan = PLAN.replace(expert_axis="ep")
            model = compile_over_mesh(Model(kind, layers=1), make_mesh(dp=2, ep=2), plan)
            originals = [weakref.ref(parameter) for parameter in model.parameters()]
            moefx.parallelize(model, make_mesh(dp=2, ep=2))
            assert not any(reference() is not None for reference in originals), kind
        finally:
            gc.enable()


def case_training_is_deterministic() -> None:
    sizes, _ = LAYOUTS[1]
    for kind in ("gated", "numbered"):
        (seen, parameters), again = (train(parallelize_model(kind, sizes), make_mesh(**sizes)) for _ in range(2))
        assert all(map(torch.equal, seen, again[0]))
        assert all(torch.equal(value, again[1][name]) for name, value in parameters.items())


def case_evaluations_keep_the_trained_parameters() -> None:
    """FSDP gathers parameters for a forward, and without a backward nothing frees those of the outermost module."""
    model, x = parallelize_model("gated", dict(dp=2, ep=2)), draw_batch(0, 0)[dist.get_rank()]
    names = list(dict(model.named_parameters()))
    for no_grad in (torch.no_grad, torch.inference_mode):
        with no_grad():
            model(x)
        assert list(dict(model.named_parameters())) == names
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(x).sum().backward()
    wanted = moefx.clip_grad_norm_(model, 1e9)
    model(x)  # with gradients, without a backward
    assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.testing.assert_close(moefx.clip_grad_norm_(model, 1e9), wanted)


def case_optimizers_of_replaced_parameters() -> None:
    mesh, x = make_mesh(dp=2, ep=2), draw_batch(0, 0)[dist.get_rank()]
    for kind in ("gated", "joined"):
        original = Model(kind, layers=1).double()
        stale = [torch.optim.SGD(original.parameters(), lr=0.1)]
        model = moefx.compile(original, mesh=mesh, plan=PLAN, example_inputs=(x,))
        stale.append(torch.optim.SGD(model.parameters(), lr=0.1))
        model = moefx.parallelize(model, mesh)
        with torch.no_grad():
            model(x)
        current = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(x).sum()
        gathered = torch.optim.SGD(model.parameters(), lr=0.1)
        loss.backward()
        for optimizer in stale:
            check_raises(InvalidInput, "moefx.pipeline replaced them. Build the optimizer", optimizer.step)
        check_raises(InvalidInput, "FSDP had gathered them for a forward", gathered.step)
        current.step()
        original(x).sum().backward()  # it may be trained beside the other
        stale[0].step()
        copy.deepcopy(original), pickle.dumps(original)
        assert not any(hasattr(parameter, "_moefx_replaced") for parameter in model.to("cpu").parameters())


def case_tokens_shared_by_ranks() -> None:
    """Average gradients only over "dp"."""
    plan = PLAN.replace(expert_axis=("dp", "tp"), sequence_axis="tp")
    model, original = parallelize_model("joined", dict(dp=2, tp=2), plan), Model("joined", layers=1).double()
    x = draw_batch(0, 0)[:2]
    model(x[make_mesh(dp=2, tp=2)["dp"].get_local_rank()]).pow(2).mean().backward()
    original(x.flatten(0, 1)).pow(2).mean().backward()
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)


class TensorParallelLayers(nn.Module):
    """Layers that tensor parallelism cuts, around MoE blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D), BLOCKS[kind]()) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def case_between_tensor_parallel_layers() -> None:
    """Train with FSDP2, tensor parallelism and experts over ranks, where "tp" ranks share tokens."""
    mesh, cuts = make_mesh(dp=2, tp=2), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    of_sequences = PLAN.replace(expert_axis=("dp", "tp"), sequence_axis="tp")
    for kind, plan, data, is_cut_first in (
        ("gated", of_sequences, "fsdp", False),
        ("joined", PLAN.replace(expert_axis="dp"), "ddp", True),
    ):
        original, model = (TensorParallelLayers(kind).double() for _ in range(2))
        for is_compiled in (False, True):
            model = compile_over_mesh(model, mesh, plan) if is_compiled else model
            for layer in model.layers if is_compiled != is_cut_first else ():
                parallelize_module(layer, mesh["tp"], cuts)
        moefx.parallelize(model, mesh, data=data)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in (model, original)]
        for step in range(STEPS):
            x = draw_batch(step, 0)[:2]
            model(x[mesh["dp"].get_local_rank()]).pow(2).mean().backward()
            original(x.flatten(0, 1)).pow(2).mean().backward()
            for parameter in original.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            norms = moefx.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(original.parameters(), 0.1)
            torch.testing.assert_close(*norms, rtol=0, atol=1e-9)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        wanted = dict(original.state_dict())
        torch.testing.assert_close(moefx.full_state_dict(model), wanted, rtol=0, atol=1e-9, msg=f"{kind} {plan}")


class Attention(nn.Module):
    """Causal attention to all ranks' parts of a sequence, as context parallelism computes it.

    Attributes:
        group: the ranks that hold the parts, in the order of the sequence; None: this rank holds all of it.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        start = 0
        if self.group is not None:
            key, value = (all_gather_tensor_autograd(t, 1, self.group) for t in (key, value))
            start = dist.get_rank(self.group) * x.shape[1]
        positions = torch.arange(start, start + x.shape[1])
        mask = positions[:, None] >= torch.arange(key.shape[1])
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class ContextParallelLayers(nn.Module):
    """Layers of attention and MoE blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(2))

    def forward(self, x):
        for attention, block in zip(self.attentions, self.blocks, strict=True):
            x = x + attention(x)
            x = x + block(x.flatten(0, 1)).view_as(x)
        return x


def case_within_context_parallelism() -> None:
    """Cut sequences over an axis of the mesh. It is a data axis."""
    x = draw_batch(0, 0)[:2].repeat(1, 2, 1)  # two sequences
    original = ContextParallelLayers("joined").double()
    original(x).pow(2).mean().backward()
    for sizes, expert_axis in ((dict(cp=2, ep=2), "ep"), (dict(dp=2, cp=2), ("dp", "cp")), (dict(dp=2, cp=2), "cp")):
        mesh = make_mesh(**sizes)
        sequence, part = mesh[min(set(sizes) - {"cp"})].get_local_rank(), mesh["cp"].get_local_rank()
        plan = PLAN.replace(expert_axis=expert_axis)
        model = ContextParallelLayers("joined").double()
        model = moefx.parallelize(moefx.compile(model, (x[:, :7],), mesh=mesh, plan=plan), mesh)
        for module in model.modules():
            if isinstance(module, Attention):
                module.group = mesh.get_group("cp")
        model(x[sequence : sequence + 1].chunk(2, dim=1)[part]).pow(2).mean().backward()
        for name, parameter in original.named_parameters():
            gradient = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12, msg=f"{sizes} {name}")


def case_scaled_losses() -> None:
    """Skip a step on all ranks if one rank's gradient overflows, of its own expert or of a part of another layer."""
    for kind, of_experts in itertools.product(("gated", "joined"), (True, False)):
        model = parallelize_model(kind, dict(dp=2, ep=2))
        names = sorted(dict(model.named_parameters()), key=is_expert_parameter, reverse=True)  # experts first
        optimizer = torch.optim.SGD(map(model.get_parameter, names), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0)
        scaler.scale(compute_loss(model, draw_batch(0, 0)[dist.get_rank()])).backward()
        if dist.get_rank() == RANKS - 1:
            own = [p for name, p in model.named_parameters() if is_expert_parameter(name) == of_experts]
            next(g for p in own if (g := p.grad.to_local()).numel()).view(-1)[0] = torch.inf
        dist.barrier()
        before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        now = [parameter.to_local() for parameter in model.parameters()]
        assert scaler.get_scale() == 4.0, (kind, of_experts)
        assert all(map(torch.equal, before, now)), (kind, of_experts)


def case_a_scaler_that_decides_alone() -> None:
    model = parallelize_model("gated", dict(dp=2, ep=2))
    for options in ({"fused": True}, {"foreach": True}):
        optimizer, scaler = torch.optim.AdamW(model.parameters(), **options), torch.amp.GradScaler("cpu", 8.0)
        scaler.scale(compute_loss(model, draw_batch(0, 0)[dist.get_rank()])).backward()
        check_raises(InvalidInput, "Use torch.distributed.fsdp.sharded_grad_scaler", scaler.step, optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def case_averages_of_weights() -> None:
    """Average the weights of a model into those of another one."""
    model, average = (parallelize_model("joined", dict(dp=2, ep=2)) for _ in range(2))
    before = moefx.full_state_dict(model)
    train(model, make_mesh(dp=2, ep=2))
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.25)
    after = moefx.full_state_dict(model)
    wanted = {name: value.lerp(after[name], 0.25) for name, value in before.items()}
    torch.testing.assert_close(moefx.full_state_dict(average), wanted, rtol=0, atol=1e-12)


def case_layouts_of_parameters() -> None:
    for (sizes, options), (of_experts, of_others) in zip(LAYOUTS, ((4, 4), (4, 4), (2, 2), (2, 1)), strict=True):
        for kind in ("gated", "joined"):
            for name, parameter in parallelize_model(kind, sizes, **options).named_parameters():
                if is_expert_parameter(name):  # if not stacked: whole experts, cut over the ranks with the same expert
                    num_parts = of_experts if kind == "joined" else of_experts // sizes["ep"]
                else:
                    num_parts = of_others
                shape = [p.is_shard() or "Shard" in type(p).__name__ for p in parameter.placements]
                sizes_cut = [n for n, cut in zip(parameter.device_mesh.shape, shape, strict=True) if cut]
                assert torch.Size(sizes_cut).numel() == num_parts, (name, parameter.device_mesh, parameter.placements)


def case_state_dicts_of_the_original() -> None:
    for (sizes, options), kind in zip(LAYOUTS, ("gated", "joined", "numbered", "gated"), strict=True):
        model, other = parallelize_model(kind, sizes, **options), Model(kind, layers=1).double()
        for parameter in other.parameters():
            parameter.data.mul_(2)
        model.load_state_dict(other.state_dict())
        found = moefx.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())
        x = draw_batch(0, 0)[dist.get_rank()]
        torch.testing.assert_close(model(x), other(x))
    moved = parallelize_model("gated", dict(ep=4)).state_dict()
    check_raises(InvalidInput, "Load moefx.full_state_dict(other_model)", model.load_state_dict, moved)


def case_checkpoints_reshard() -> None:
    """Load a checkpoint with optimizer state into another layout: all bits are equal."""
    for kind, (before, after) in (("gated", LAYOUTS[:2]), ("joined", LAYOUTS[2:0:-1])):
        folder, saved, other = (
            create_shared_folder(),
            *(parallelize_model(kind, sizes, **options) for sizes, options in (before, after)),
        )
        train(saved, make_mesh(**before[0]))
        optimizer, of_other = (torch.optim.AdamW(model.parameters()) for model in (saved, other))
        saved(draw_batch(0, 0)[dist.get_rank()]).sum().backward()
        optimizer.step()
        model_state, optimizer_state = get_state_dict(saved, optimizer, options=BY_PARAMETER)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        load_checkpoint(other, of_other, folder)
        wanted, found = moefx.full_state_dict(saved), moefx.full_state_dict(other)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        plain = Model(kind, layers=1).double()
        of_plain = torch.optim.AdamW(plain.parameters())
        load_checkpoint(plain, of_plain, folder)
        assert all(torch.equal(wanted[name], value) for name, value in plain.state_dict().items())
        for name, parameter in other.named_parameters():
            moment = of_other.state[parameter]["exp_avg"].full_tensor()
            assert torch.equal(moment, of_plain.state[plain.get_parameter(name)]["exp_avg"]), name


def case_groups_of_experts_are_saved() -> None:
    """An optimizer with a group of experts, whose names differ between ranks."""
    folder, x = create_shared_folder(), draw_batch(0, 0)[dist.get_rank()]
    saved, other = (parallelize_model("gated", dict(dp=2, ep=2)) for _ in range(2))
    optimizers = []
    for model, rate in ((saved, 0.1), (other, 0.2)):
        experts = [p for name, p in model.named_parameters() if is_expert_parameter(name)]
        others = [p for name, p in model.named_parameters() if not is_expert_parameter(name)]
        optimizers.append(torch.optim.AdamW([{"params": experts, "lr": rate}, {"params": others, "lr": rate / 2}]))
    saved(x).sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    for call in (get_state_dict, get_optimizer_state_dict):
        check_raises(MoefxError, "group 0 of AdamW has parameters of this rank only", call, saved, optimizers[0])
    assert "param_groups" not in get_optimizer_state_dict(saved, optimizers[0], options=BY_PARAMETER)
    model_state, optimizer_state = get_state_dict(saved, optimizers[0], options=BY_PARAMETER)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    load_checkpoint(other, optimizers[1], folder)
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.1, 0.05]
    for model, optimizer in zip((saved, other), optimizers, strict=True):
        model(x).sum().backward()
        optimizer.step()
    wanted, found = moefx.full_state_dict(saved), moefx.full_state_dict(other)
    torch.testing.assert_close(found, wanted)


class Reshaping(Loop):
    """Block that returns a view."""

    def forward(self, x):
        return super().forward(x.view(-1, D)).view(x.shape)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(D, D), Reshaping(Gated)

    def forward(self, x):
        y = self.moe(self.mix(x))
        y += x
        return y


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Linear(D, D), nn.ModuleList([nn.Linear(D, D), Layer(), Layer()])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def case_layers_of_a_decoder() -> None:
    """Gather layers one after another, in the dtype of the policy."""
    mesh, original, x = make_mesh(dp=2, ep=2), Decoder(), torch.randn(9, D)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = moefx.parallelize(compile_over_mesh(original, mesh, PLAN), mesh, mp_policy=policy)
    sharded = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert sharded == {"", "layers.0", "layers.1", "layers.1.moe", "layers.2", "layers.2.moe"}
    out = model(x)
    torch.testing.assert_close(out, original.bfloat16()(x.bfloat16()))
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def case_layers_in_other_containers() -> None:
    """Find layers in a dictionary and in a sequence, but no norm next to them."""
    named = {"0": nn.Sequential(nn.Linear(2, 2)), "1": Decoder(), "2": Decoder(), "norm": nn.LayerNorm(2)}
    for container in (nn.ModuleDict(named), nn.Sequential(*named.values())):
        root = nn.ModuleDict({"model": nn.ModuleDict({"layers": container})})
        names = [name for name, layer in container.named_children() if isinstance(layer, Decoder)]
        found = _list_layers_around_blocks(root, [f"model.layers.{names[0]}.layers.1.moe"])
        layers = {container.get_submodule(name) for name in names}
        inner = {*container.get_submodule(names[0]).layers}
        assert {*found} == layers | inner


def check_raises(
    error: type[Exception] | tuple[type[Exception], ...],
    text: str,
    call: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> None:
    try:
        call(*args, **options)
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(f"no error: {text}")


def case_mistakes_in_the_call() -> None:
    mesh = make_mesh(dp=2, ep=2)
    model = compile_over_mesh(Model("gated", layers=1).double(), mesh, PLAN)
    for text, options in (
        ("expected one of 'fsdp', 'ddp', 'hsdp'", dict(data="zero")),
        ("no such axis; it has dp=2, ep=2", dict(shard_axes="fsdp")),
        ("which axes of the mesh (dp=2, ep=2) hold replicas", dict(data="hsdp")),
        ("'ep' of the mesh is neither sharded nor replicated", dict(shard_axes="dp")),
        ("'dp' of the mesh is both", dict(data="hsdp", shard_axes=("dp", "ep"), replicate_axes="dp")),
        ("use data='hsdp' to replicate", dict(replicate_axes="dp")),
        ("use data='fsdp' or 'hsdp' to shard", dict(data="ddp", shard_axes="dp")),
    ):
        check_raises(InvalidPlan, text, moefx.parallelize, model, mesh, **options)
    check_raises(InvalidPlan, "compiled over the mesh (dp=2, ep=2)", moefx.parallelize, model, make_mesh(ep=2, dp=2))
    check_raises(InvalidInput, "call moefx.compile(model, mesh=mesh)", moefx.parallelize, Model("gated"), mesh)
    shared = make_mesh(ep=2, tp=2)
    replicas = compile_over_mesh(Model("gated", layers=1).double(), shared, PLAN)
    check_raises(InvalidPlan, "The data axes are 'ep'", moefx.parallelize, replicas, shared, shard_axes=("ep", "tp"))
    stages, stage = make_mesh(pp=2, ep=2), Model("gated", layers=1).double()
    stage.first.bias.data.fill_(stages["pp"].get_local_rank())
    stage = compile_over_mesh(stage, stages, PLAN)
    check_raises(InvalidPlan, "over the ranks of the stage, mesh['ep']", moefx.parallelize, stage, stages)
    moefx.parallelize(model, mesh)  # the calls above left the model unchanged
    check_raises(InvalidInput, "is parallelized already", moefx.parallelize, model, mesh)
    wrapped = nn.Sequential(compile_over_mesh(Model("gated", layers=1).double(), mesh, PLAN))
    check_raises(InvalidInput, "call moefx.parallelize(model.0, mesh)", moefx.parallelize, wrapped, mesh)


def case_models_that_cannot_be_sharded() -> None:
    mesh = make_mesh(dp=2, ep=2)
    tied = Model("joined")
    tied.blocks[1].gate_up, tied.blocks[1].down = tied.blocks[0].gate_up, tied.blocks[0].down
    tied = compile_over_mesh(tied, mesh, PLAN)
    text = "blocks.0.gate_up and blocks.1.gate_up are the same parameter"
    check_raises(InvalidInput, text, moefx.parallelize, tied, mesh)
    scaled = Model("joined", layers=1)
    scaled.scale = nn.Parameter(torch.tensor(1.0))
    scaled = compile_over_mesh(scaled, mesh, PLAN)
    check_raises(InvalidInput, "scale has no dimension", moefx.parallelize, scaled, mesh)
    block = compile_over_mesh(BLOCKS["gated"](), mesh, PLAN)
    check_raises(InvalidInput, "nn.Sequential(block)", moefx.parallelize, block, mesh)


def case_experts_that_cannot_be_cut() -> None:
    holder, axis = nn.Module(), make_mesh(dp=2, ep=2)["ep"]
    holder.stack = nn.Parameter(DTensor.from_local(torch.zeros(1, 3), axis, [Shard(0)], run_check=False))
    ((_, placement),) = choose_placements(holder, {holder.stack}, num_shards=3)
    assert placement == Shard(1)
    text = "stack has the shape [1, 3] on a rank, and no dimension can be cut into 2"
    check_raises(InvalidPlan, text, lambda: dict(choose_placements(holder, {holder.stack}, num_shards=2)))


def case_other_calls() -> None:
    mesh, x = make_mesh(dp=2, ep=2), draw_batch(0, 0)[dist.get_rank()]
    model = parallelize_model("gated", dict(dp=2, ep=2))
    check_raises(InvalidInput, "would reduce its gradients twice", DistributedDataParallel, model)
    parent = nn.Sequential(nn.Linear(D, D).double(), model)
    ignored = [f"1.{name}" for name, _ in model.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, ignored)
    check_raises(InvalidInput, "would reduce its gradients twice", DistributedDataParallel(parent), x)
    check_raises(InvalidInput, "before moefx.parallelize", moefx.verify, model, Model("gated", layers=1).double(), (x,))
    experts, others, _ = moefx.explain(model).gradients
    assert experts.endswith("sharded over 'dp'")
    assert others.endswith("sharded over 'dp' and 'ep'")
    sharded = compile_over_mesh(Model("gated", layers=1).double(), mesh, PLAN)
    fully_shard(sharded, mesh=mesh["dp"])
    check_raises(InvalidInput, "fully_shard was called on the model", moefx.parallelize, sharded, mesh)
