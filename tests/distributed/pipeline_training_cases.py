"""`moefx.pipeline`: training in stages equals training in one process."""

from __future__ import annotations

import functools
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import moefx
from moefx.errors import InvalidInput, MoefxError
from moefx.ir.ops import expert_mlp as experts
from moefx.pipelines.stage_dry_run import DryRun

from ..blocks import D
from ..ir.counting import Counting
from .models import BLOCKS
from .parallelize_cases import check_raises
from .state_cases import BY_PARAMETER, create_shared_folder, load_checkpoint

VOCAB, LENGTH, STEPS = 11, 3, 3
DELAYED = ("zb-h1", "zbv", "dualpipev") if torch.__version__ >= (2, 13) else ()  # with delayed gradients of weights
V_SHAPED = "zbv" if DELAYED else "interleaved"
EXAMPLE = (torch.zeros(2, LENGTH, dtype=torch.long),)
PLAN = moefx.Plan(validation="symbolic")
Training = tuple[list[Tensor], dict[str, Tensor]]  # losses and norms, and the final parameters


class Layer(nn.Module):
    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(D), nn.Linear(D, D)
        self.moe = nn.Linear(D, D) if kind is None else BLOCKS[kind]()

    def forward(self, x, mask):
        x = x + self.mix(x.cumsum(1)) * mask
        return x + self.moe(self.norm(x).flatten(0, 1)).view_as(x)


class RecomputedLayer(Layer):
    def forward(self, x, mask):
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class InPlaceLayer(Layer):
    """Layer that writes to its input, which may be a received tensor."""

    def forward(self, x, mask):
        x += super().forward(x.clone(), mask) - x
        return x


class Decoder(nn.Module):
    """Embedding with positions, layers that get a mask, a norm and a head."""

    def __init__(self, *kinds: str | None, layer: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(D, VOCAB, bias=False)  # defined before the layers: stages do not depend on the order
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(LENGTH, D)
        self.layers = nn.ModuleList([layer(kind) for kind in kinds])
        self.norm = nn.LayerNorm(D)

    def forward(self, ids, shift=None):
        x = self.tokens(ids) * 2 + self.positions(torch.arange(ids.shape[1], device=ids.device))
        if shift is not None:
            x = x + shift[..., None]
        mask = (ids != 0)[..., None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x)) / 2


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@functools.cache
def make_mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def draw_batch(step: int, data_ranks: int, size: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all data ranks, [data ranks, size, LENGTH]."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (data_ranks, size, LENGTH + 1), generator=generator)
    return ids[..., :-1], ids[..., 1:]


@functools.cache
def train_in_one_process(kinds: tuple[str | None, ...], data_ranks: int, microbatches: int) -> Training:
    model, seen = Decoder(*kinds).double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, target = (tensor.flatten(0, 1) for tensor in draw_batch(step, data_ranks, 2 * microbatches))
        parts = zip(ids.chunk(data_ranks * microbatches), target.chunk(data_ranks * microbatches), strict=True)
        loss = torch.stack([loss_fn(model(x), y) for x, y in parts]).mean()
        loss.backward()
        for parameter in model.parameters():  # AdamW also decays weights of experts without tokens
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        seen += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        optimizer.step()
    return seen, model.state_dict()


def find_data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the index of this rank among the ranks with different tokens, and their number."""
    number, ranks = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name not in ("pp", "tp"):
            number, ranks = number * mesh[name].size() + mesh[name].get_local_rank(), ranks * mesh[name].size()
    return number, ranks


def train(pipe: Any, mesh: DeviceMesh, microbatches: int) -> Training:
    seen, optimizer = [], torch.optim.AdamW(pipe.parameters(), lr=0.05, foreach=True)
    number, ranks = find_data_rank(mesh)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, target = (tensor[number] for tensor in draw_batch(step, ranks, 2 * microbatches))
        loss = pipe.step(ids, target=target)
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        seen += [loss, moefx.clip_grad_norm_(pipe, 0.1)]
        optimizer.step()
    return seen, moefx.full_state_dict(pipe)


def build(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    options = dict(plan=PLAN, loss_fn=loss_fn, microbatches=4, example_inputs=EXAMPLE) | options
    return moefx.pipeline(model, mesh, **options)


def check_training(
    kinds: tuple[str | None, ...], sizes: dict[str, int], *, layer: type[Layer] = Layer, **options: Any
) -> None:
    mesh, microbatches = make_mesh(**sizes), 4
    pipe = build(Decoder(*kinds, layer=layer).double(), mesh, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "moefx")  # no warning about unreduced gradients
        seen, parameters = train(pipe, mesh, microbatches)
    wanted, reference = train_in_one_process(kinds, find_data_rank(mesh)[1], microbatches)
    assert all(norm > 0.1 for norm in wanted[1::2])  # clipping changes the gradients
    message = functools.partial(str.format, "{} {} {}: {}", kinds, sizes, options)
    torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-9, msg=message)
    assert list(parameters) == list(reference)
    torch.testing.assert_close(parameters, dict(reference), rtol=0, atol=1e-9, msg=message)


def case_training_equals_one_process() -> None:
    for schedule in ("gpipe", "1f1b"):
        check_training(("gated", "joined"), dict(pp=2, ep=2), schedule=schedule)


def case_schedules_with_several_stages_on_a_rank() -> None:
    for schedule in ("interleaved", *DELAYED):
        check_training(("gated", "joined", "gated", "gated"), dict(pp=2, ep=2), schedule=schedule)


def case_delayed_weights_repeat_no_work() -> None:
    """Run the experts' backward as often as a schedule without delays: once for each layer and micro-batch."""
    mesh, original = make_mesh(pp=2, ep=2), experts.expert_mlp_backward
    number, ranks = find_data_rank(mesh)
    ids, target = (tensor[number] for tensor in draw_batch(0, ranks, 8))
    for schedule in ("interleaved", *DELAYED):
        pipe = build(Decoder("gated", "joined", "gated", "gated").double(), mesh, schedule=schedule)
        counting = Counting(original)
        with mock.patch.object(experts, "expert_mlp_backward", counting):
            pipe.step(ids, target=target)
        assert counting.parts == {"rows": 2 * 4, "weights": 2 * 4}, (schedule, counting.parts)


def case_layers_that_recompute() -> None:
    for schedule in ("gpipe", "1f1b"):
        check_training(("gated", "joined"), dict(pp=2, ep=2), schedule=schedule, layer=RecomputedLayer)


def case_layers_that_recompute_with_delayed_weights() -> None:
    for schedule in DELAYED[:1]:
        check_training(("gated", "joined"), dict(pp=2, ep=2), schedule=schedule, layer=RecomputedLayer)


def case_gradients_accumulate() -> None:
    """Accumulate gradients over steps without `zero_grad`, and start at zero after it."""
    mesh, kinds = make_mesh(pp=2, ep=2), ("gated", "joined")
    pipe, (ids, target) = build(Decoder(*kinds).double(), mesh), draw_batch(0, 2, 8)
    number, _ = find_data_rank(mesh)
    with torch.no_grad():
        check_raises(
            InvalidInput, "call pipe.evaluate(...) for the loss", pipe.step, ids[number], target=target[number]
        )
    assert not pipe.step(ids[number], target=target[number]).requires_grad
    once = [parameter.grad.clone() for parameter in pipe.parameters()]
    pipe.step(ids[number], target=target[number])
    for parameter, gradient in zip(pipe.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)
    blocks = moefx.blocks(pipe)
    assert [block.name for block in blocks] == [f"layers.{stage}.moe" for stage in pipe.stages]
    assert all(block.fallbacks == 0 for block in blocks)


def case_other_meshes() -> None:
    """Run stages without experts, stages of one rank each, and a single stage."""
    check_training((None, "gated"), dict(pp=2, ep=2))
    check_training((None, "gated", None, "joined"), dict(pp=4), split={"layers": [1, 1, 1, 1]})
    check_training((None, "gated", None, "joined"), dict(pp=1, ep=4))
    for schedule in ("gpipe", *DELAYED[:1]):
        check_training((None, "gated", None, "joined"), dict(pp=4), schedule=schedule, layer=InPlaceLayer)


def case_evaluation_and_inference() -> None:
    mesh, kinds = make_mesh(pp=2, ep=2), ("gated", None, None, "joined")
    number, ranks = find_data_rank(mesh)
    for schedule in ("1f1b", V_SHAPED):
        pipe, model = build(Decoder(*kinds).double(), mesh, schedule=schedule), Decoder(*kinds).double()
        for size in (8, 4):  # batch sizes, which change the shapes between the stages
            ids, target = draw_batch(0, ranks, size)
            wanted = loss_fn(model(ids.flatten(0, 1)), target.flatten(0, 1))
            torch.testing.assert_close(pipe.evaluate(ids[number], target=target[number]), wanted)
            output = pipe(ids[number])
            assert (output is not None) == (3 // (2 if schedule == "1f1b" else 1) in pipe.stages)
            if output is not None:
                torch.testing.assert_close(output, model(ids[number]))
            assert all(parameter.grad is None for parameter in pipe.parameters())
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        pipe.load_state_dict(model.state_dict())  # after a forward, which gathered the parameters
        wanted = loss_fn(model(ids.flatten(0, 1)), target.flatten(0, 1))
        torch.testing.assert_close(pipe.evaluate(ids[number], target=target[number]), wanted)
        assert not any(module.training for stage in pipe.eval().stages.values() for module in stage.modules())


def case_the_cut_is_checked_once_for_each_mode() -> None:
    mesh = make_mesh(pp=2, ep=2)
    pipe = build(Decoder("gated", "joined"), mesh)
    (ids,), losses = EXAMPLE, []
    ids = ids.repeat(4, 1)
    with mock.patch.object(DryRun, "run", autospec=True, side_effect=DryRun.run) as run:
        for _ in range(3):
            losses += [pipe.train().step(ids, target=ids), pipe.eval().evaluate(ids, target=ids)]
        assert run.call_count == 2, run.call_count
        pipe.evaluate(ids[:, :2], target=ids[:, :2])
        assert run.call_count == 3, run.call_count
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(6))


def case_arguments_of_the_model() -> None:
    """Compute masks and positions from the inputs in each stage. Micro-batches share tensors with a single row."""
    mesh, model = make_mesh(pp=2, ep=2), Decoder("gated", "joined").double()
    number, ranks = find_data_rank(mesh)
    pipe, (ids, target) = build(Decoder("gated", "joined").double(), mesh), draw_batch(0, ranks, 8)
    for shift in (torch.rand(1, LENGTH).double(), torch.rand(8, LENGTH).double()):
        dist.broadcast(shift, 0)
        wanted = [loss_fn(model(x, shift=shift), y) for x, y in zip(ids, target, strict=True)]
        torch.testing.assert_close(pipe.evaluate(ids[number], shift=shift, target=target[number]), sum(wanted) / ranks)


def case_models_on_meta() -> None:
    """Allocate only the stages of each rank."""
    mesh, model = make_mesh(pp=2, ep=2), Decoder("gated", "joined").double()
    with torch.device("meta"):
        pipe = build(Decoder("gated", "joined").double(), mesh)
    assert all(parameter.is_meta for parameter in pipe.parameters())
    pipe.to_empty(device="cpu")
    pipe.load_state_dict(model.state_dict())
    wanted, found = model.state_dict(), moefx.full_state_dict(pipe, cpu=True, rank=0)
    assert list(found) == (list(wanted) if dist.get_rank() == 0 else [])
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert len(list(pipe.parameters())) < len(list(model.parameters()))
    number, ranks = find_data_rank(mesh)
    ids, target = draw_batch(0, ranks, 8)
    wanted_loss = loss_fn(model(ids.flatten(0, 1)), target.flatten(0, 1))
    torch.testing.assert_close(pipe.step(ids[number], target=target[number]), wanted_loss)


def case_checkpoints_reshard() -> None:
    """Load a checkpoint with optimizer state into another split, schedule and mesh: all bits are equal."""
    kinds, folder = ("gated", "joined", None, "gated"), create_shared_folder()
    saved = build(Decoder(*kinds).double(), make_mesh(pp=2, ep=2), schedule=V_SHAPED)
    other = build(Decoder(*kinds).double(), make_mesh(pp=4))
    plain = Decoder(*kinds).double()
    for model in (other, plain):
        for parameter in model.parameters():
            parameter.data.zero_()
    train(saved, make_mesh(pp=2, ep=2), 4)
    optimizer, of_other, of_plain = (torch.optim.AdamW(model.parameters()) for model in (saved, other, plain))
    number, ranks = find_data_rank(make_mesh(pp=2, ep=2))
    ids, target = (tensor[number] for tensor in draw_batch(7, ranks, 8))
    saved.step(ids, target=target)
    optimizer.step()
    for call in (get_state_dict, get_optimizer_state_dict):
        check_raises(MoefxError, f"{call.__name__}(model, optimizer): group 0 of AdamW has", call, saved, optimizer)
    model_state, optimizer_state = get_state_dict(saved, optimizer, options=BY_PARAMETER)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    load_checkpoint(other, of_other, folder)
    load_checkpoint(plain, of_plain, folder)
    wanted = moefx.full_state_dict(saved)
    for found in (moefx.full_state_dict(other), plain.state_dict()):
        assert list(wanted) == list(found) and all(torch.equal(found[name], value) for name, value in wanted.items())
    for name, parameter in other.named_parameters():
        moment = of_other.state[parameter]["exp_avg"]
        assert torch.equal(moment, of_plain.state[plain.get_parameter(name)]["exp_avg"]), name
    assert of_other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def pipelines_of_eight() -> None:
    """Combine stages, experts and replicas."""
    for schedule in ("1f1b", V_SHAPED):
        check_training(("gated", "joined", None, "gated"), dict(pp=2, dp=2, ep=2), schedule=schedule)
    check_training(("gated", "joined", None, "gated"), dict(pp=2, ep=2, tp=2))


def pipelines_of_two() -> None:
    """Run an expert axis of one rank."""
    check_training(("gated", "joined"), dict(pp=2, ep=1), plan=PLAN.replace(expert_axis="ep"))
