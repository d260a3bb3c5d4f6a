"""`moefx.pipeline`: training in stages is training in one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx

from ..passes.blocks import D
from .models import BLOCKS

VOCAB, LENGTH, STEPS = 11, 3, 3
EXAMPLE = (torch.zeros(2, LENGTH, dtype=torch.long),)
PLAN = moefx.Plan(validation="symbolic")
Training = tuple[list[Tensor], dict[str, Tensor]]  # losses and norms; the parameters afterwards


class Layer(nn.Module):
    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(D), nn.Linear(D, D)
        self.moe = nn.Linear(D, D) if kind is None else BLOCKS[kind]()

    def forward(self, x, mask):
        x = x + self.mix(x.cumsum(1)) * mask
        return x + self.moe(self.norm(x).flatten(0, 1)).view_as(x)


class Decoder(nn.Module):
    """An embedding with positions, layers that get a mask, a norm and a head."""

    def __init__(self, *kinds: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(D, VOCAB, bias=False)  # before the layers: order of definition does not matter
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(LENGTH, D)
        self.layers = nn.ModuleList([Layer(kind) for kind in kinds])
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
def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def batch(step: int, data_ranks: int, size: int) -> tuple[Tensor, Tensor]:
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
        ids, target = (each.flatten(0, 1) for each in batch(step, data_ranks, 2 * microbatches))
        parts = zip(ids.chunk(data_ranks * microbatches), target.chunk(data_ranks * microbatches), strict=True)
        loss = torch.stack([loss_fn(model(x), y) for x, y in parts]).mean()
        loss.backward()
        for parameter in model.parameters():  # AdamW decays weights of experts without tokens, too
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        seen += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        optimizer.step()
    return seen, model.state_dict()


def find_data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """The number of this rank among those with other tokens, and their number."""
    number, ranks = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name != "pp":
            number, ranks = number * mesh[name].size() + mesh[name].get_local_rank(), ranks * mesh[name].size()
    return number, ranks


def train(pipe: Any, mesh: DeviceMesh, microbatches: int) -> Training:
    seen, optimizer = [], torch.optim.AdamW(pipe.parameters(), lr=0.05)
    number, ranks = find_data_rank(mesh)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, target = (each[number] for each in batch(step, ranks, 2 * microbatches))
        seen += [pipe.step(ids, target=target), moefx.clip_grad_norm_(pipe, 0.1)]
        optimizer.step()
    return seen, moefx.full_state_dict(pipe)


def check_training(kinds: tuple[str | None, ...], sizes: dict[str, int], microbatches: int = 4, **options: Any) -> Any:
    mesh = mesh_of(**sizes)
    options = dict(plan=PLAN, loss_fn=loss_fn, microbatches=microbatches, example_inputs=EXAMPLE) | options
    pipe = moefx.pipeline(Decoder(*kinds).double(), mesh, **options)
    seen, parameters = train(pipe, mesh, microbatches)
    wanted, reference = train_in_one_process(kinds, find_data_rank(mesh)[1], microbatches)
    assert all(norm > 0.1 for norm in wanted[1::2])  # clipping changes something
    what = functools.partial(str.format, "{} {} {}: {}", kinds, sizes, options)
    torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-9, msg=what)
    assert list(parameters) == list(reference)
    torch.testing.assert_close(parameters, dict(reference), rtol=0, atol=1e-9, msg=what)
    return pipe


def case_training_is_that_of_one_process() -> None:
    for schedule in ("gpipe", "1f1b"):
        check_training(("gated", "joined"), dict(pp=2, ep=2), schedule=schedule)


def case_schedules_with_several_stages_on_a_rank() -> None:
    kinds = ("gated", "joined", "gated", "gated")
    for schedule in ("zb-h1", "interleaved", "zbv", "dualpipev"):
        check_training(kinds, dict(pp=2, ep=2), schedule=schedule)
