"""Pipelines with each way to share states, entries of the planner as they run, and plans that the planner decides."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from moefx.errors import InvalidInput, InvalidPlan, UnknownArchitecture
from moefx.planner.layout import Layout
from moefx.planner.search import estimate_entry
from moefx.ranking import Ranking

from .parallelize_cases import check_raises
from .pipeline_training_cases import (
    EXAMPLE,
    LENGTH,
    Decoder,
    Layer,
    build,
    check_training,
    draw_batch,
    find_data_rank,
    loss_fn,
    make_mesh,
)

KINDS = ("gated", "joined")


def check_gradients(pipe: Any, mesh: DeviceMesh, kinds: tuple[str | None, ...], size: int) -> None:
    """The loss and the gradients are those of one process, for a batch of `size` sequences on each data rank."""
    model, (number, ranks) = Decoder(*kinds).double(), find_data_rank(mesh)
    ids, target = draw_batch(0, ranks, size)
    loss = pipe.step(ids[number], target=target[number])
    wanted = loss_fn(model(ids.flatten(0, 1)), target.flatten(0, 1))
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=0, atol=1e-9)
    compared = 0
    for name, parameter in pipe.named_parameters():
        gradient, reference = parameter.grad, model.get_parameter(name).grad
        assert gradient is not None or reference is None, name
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if gradient is not None:
            reference = torch.zeros_like(gradient) if reference is None else reference
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
            compared += 1
    assert compared > 5


class CountedLayer(Layer):
    calls = 0

    def forward(self, x, mask):
        CountedLayer.calls += 1
        return super().forward(x, mask)


def case_what_ranks_of_a_stage_share() -> None:
    """Gradients are those of one process, whatever states are shared."""
    two, three, four = dict(pp=2, ep=2), dict(pp=1, dp=2, ep=2), ("gated", "joined", None, "gated")
    for kinds, sizes, options in (
        (KINDS, two, dict(data="ddp")),
        (KINDS, three, dict(data="hsdp", replicate_axes="dp")),
        ((None, "gated"), two, dict(zero=3)),
        (four, two, dict(schedule="interleaved", chunks=2, zero=2)),
    ):
        check_gradients(build(Decoder(*kinds).double(), make_mesh(**sizes), **options), make_mesh(**sizes), kinds, 8)
    check_training(KINDS, two, zero=3)


def case_layers_run_again() -> None:
    mesh = make_mesh(pp=2, ep=2)
    for recompute, passes in ((False, 1), (True, 2)):
        pipe = build(Decoder(*KINDS, layer=CountedLayer).double(), mesh, zero=3, recompute=recompute)
        CountedLayer.calls = 0
        check_gradients(pipe, mesh, KINDS, 8)
        assert CountedLayer.calls == 4 * passes, CountedLayer.calls  # one layer, four micro-batches


class CollectiveNames(TorchDispatchMode):
    """Names of the collectives that run, those of a backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def count_collectives(pipe: Any, mesh: DeviceMesh) -> tuple[int, int]:
    """Count the reductions of gradients and the gathers of parameters in a step."""
    number, ranks = find_data_rank(mesh)
    ids, target = (each[number] for each in draw_batch(0, ranks, 8))
    pipe.step(ids, target=target)  # ranks agree on shapes in the first step
    with CollectiveNames() as seen:
        pipe.step(ids, target=target)
    return sum("reduce_scatter" in name for name in seen.names), sum("allgather" in name for name in seen.names)


def case_what_is_shared_while_a_step_runs() -> None:
    """ZeRO-1 reduces gradients once a step, ZeRO-2 and 3 after each micro-batch. ZeRO-3 gathers for each pass."""
    mesh, counts = make_mesh(pp=2, ep=2), {}
    for zero in (1, 2, 3):
        pipe = build(Decoder(*KINDS).double(), mesh, zero=zero, microbatches=2)
        counts[zero] = count_collectives(pipe, mesh)
    reduced, gathered = ({zero: both[i] for zero, both in counts.items()} for i in range(2))
    assert reduced[2] == reduced[3] == 2 * reduced[1] > 0, counts
    assert gathered[3] > 2 * gathered[1] == 2 * gathered[2] > 0, counts


def case_stages_that_spread_no_experts() -> None:
    """A layout with EP = 1 keeps all experts on every rank, whatever the axis is called."""
    plan = moefx.Plan(validation="symbolic", layout={"ep": 1})
    for sizes, options in ((dict(pp=2, dp=2), {}), (dict(pp=1, ep=4), dict(zero=3)), (dict(pp=2, dp=2), dict(zero=2))):
        mesh = make_mesh(**sizes)
        pipe = build(Decoder(*KINDS).double(), mesh, plan=plan, **options)
        check_gradients(pipe, mesh, KINDS, 8)
        assert not moefx.expert_parameter_names(pipe)
        here = {name for name, _ in pipe.named_parameters()}
        layers = tuple(f"layers.{number}." for number in (pipe.stages if sizes["pp"] > 1 else (0, 1)))
        assert {name for name, _ in Decoder(*KINDS).named_parameters() if name.startswith(layers)} <= here


def case_mixed_precision() -> None:
    """Hidden states travel in the dtype of the policy."""
    mesh = make_mesh(pp=2, ep=2)
    pipe = build(Decoder(*KINDS), mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    number, ranks = find_data_rank(mesh)
    ids, target = draw_batch(0, ranks, 8)
    wanted = loss_fn(Decoder(*KINDS)(ids.flatten(0, 1)), target.flatten(0, 1))
    torch.testing.assert_close(pipe.step(ids[number], target=target[number]), wanted.double(), rtol=2e-2, atol=0)
    assert all(parameter.grad.dtype == torch.float32 for parameter in pipe.parameters())


@functools.cache
def rank_layouts(world: int, tokens: int = LENGTH) -> Ranking:
    """On another machine's platform, as rankings are made. A layout of each kind fits."""
    return moefx.plan(Decoder(*KINDS), "h200", world, batch=16, tokens=tokens, example_inputs=EXAMPLE)


def rank_layout(experts_first: bool = True, **sizes: Any) -> Ranking:
    """A ranking for four ranks with one entry."""
    ranking = rank_layouts(4)
    layout = Layout(**{"tokens": LENGTH, "sequences": 2, "microbatches": 4, **sizes})
    entry = estimate_entry(ranking.model, layout, ranking.platform, experts_first)
    return dataclasses.replace(ranking, result=dataclasses.replace(ranking.result, entries=(entry,)))


ENTRIES: tuple[tuple[dict[str, Any], str], ...] = (  # layouts, and what the pipeline shows
    (dict(pp=2, dp=2, ep=2, recompute=True), "'1f1b', microbatches=4, layers: 1 + 1 (equal predicted times"),
    (dict(dp=4, ep=2, zero=3, dispatch="flat"), "layers: 2 ("),
    (dict(dp=4, ep=2, zero=2, kept="x", experts_first=False), "layers: 2 ("),
    (dict(pp=2, dp=2, schedule="gpipe"), "'gpipe', microbatches=4, layers: 1 + 1 ("),
    (dict(dp=2, tp=2, ep=2, ssmb=True), "layers: 2 ("),
)


def case_entries_run() -> None:
    """Losses and gradients are those of one process; the pipeline does what the entry says."""
    for sizes, shown in ENTRIES:
        ranking, options = rank_layout(**sizes), {"replicate_dense": "ssmb" in sizes, "validation": "symbolic"}
        pipe = ranking.build(0, Decoder(*KINDS).double(), loss_fn, example_inputs=EXAMPLE, **options)
        axes = ranking[0].mesh
        mesh = make_mesh(**dict(zip(axes["mesh_dim_names"], axes["mesh_shape"], strict=True)))
        check_gradients(pipe, mesh, KINDS, 8)
        assert shown in repr(pipe), repr(pipe)
        graphs = [str(block.graph) for block in moefx.blocks(pipe)]
        assert all(f'keep="{sizes.get("kept", "h")}"' in graph for graph in graphs), graphs
        assert graphs, graphs
        assert all(("dedup=False" in graph) == (sizes.get("dispatch") == "flat") for graph in graphs), graphs
        assert all(("plan_dispatch" in graph) == (sizes.get("ep", 1) > 1) for graph in graphs), graphs


def case_entries_of_a_ranking() -> None:
    ranking, model = rank_layouts(4), Decoder(*KINDS).double()
    options: dict[str, Any] = dict(example_inputs=EXAMPLE, validation="symbolic")
    layouts = [(x.pp, x.ep, x.microbatches) for x in (entry.layout for entry in ranking)]
    assert (2, 2, 1) not in layouts  # fewer micro-batches than stages
    index = layouts.index((2, 2, 2))
    entry = ranking[index]
    pipe = ranking.build(index, model, loss_fn, **options)
    check_gradients(pipe, make_mesh(pp=2, ep=2), KINDS, entry.layout.microbatches * entry.layout.sequences)
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    check_raises(InvalidInput, "the entry of the planner is for 8 sequences of 3 tokens", pipe.step, ids, target=ids)
    with_tensor_ranks = next(i for i, entry in enumerate(ranking) if entry.layout.tp > 1)
    check_raises(InvalidPlan, "which moefx does not do", ranking.build, with_tensor_ranks, model, loss_fn)
    for text, change in (
        ("nodes of 8 ranks ('rbd'), and a node of this job has 4", dict(dispatch="rbd")),
        ("use schedule='gpipe'", dict(microbatches=1)),
    ):
        changed = dataclasses.replace(entry, layout=dataclasses.replace(entry.layout, **change))
        other = dataclasses.replace(ranking, result=dataclasses.replace(ranking.result, entries=(changed,)))
        check_raises(InvalidPlan, text, other.build, 0, model, loss_fn, **options)
    check_raises(InvalidPlan, "for 2 ranks, and this job has 4", rank_layouts(2).build, 0, model, loss_fn)
    text = "is not the model of the ranking, Decoder: it has num_layers 3 instead of 2"
    other = Decoder("gated", "gated", "gated").double()
    check_raises(InvalidInput, text, ranking.build, index, other, loss_fn, **options)


def case_errors_of_one_rank_in_an_entry() -> None:
    """Raise on all ranks, with the class of the error on its own rank."""
    ranking, model = rank_layout(pp=2, dp=2, ep=2), Decoder(*KINDS).double()
    options: dict[str, Any] = dict(example_inputs=EXAMPLE, validation="symbolic")
    is_first = dist.get_rank() == 0
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "3" if is_first else "4"}):
        error, text = (InvalidPlan, "LOCAL_") if is_first else (InvalidInput, "rank 0 failed: InvalidPlan: LOCAL_WORLD")
        check_raises(error, text, ranking.build, 0, model, loss_fn, **options)
    unread = Decoder("kinds", "kinds").double()  # the planner cannot read it
    check_raises(UnknownArchitecture, "layers.0.moe has 2", ranking.build, 0, unread, loss_fn, **options)


def case_plans_that_the_planner_decides() -> None:
    """One decision for all stages, which `explain` shows."""
    mesh = make_mesh(pp=2, ep=2)
    pipe = build(Decoder(*KINDS).double(), mesh, plan=moefx.Plan(expert_axis="auto", checkpoint="auto"))
    check_gradients(pipe, mesh, KINDS, 8)
    for stage in pipe.stages.values():
        decision = moefx.explain(stage).planned
        assert decision is not None
        plan = decision.plan
        assert (plan.expert_axis, plan.checkpoint, plan.sequence_axis) == ("ep", "h", None)
    replicas = make_mesh(pp=2, dp_replicate=2)
    check_raises(InvalidPlan, "holds replicas", build, Decoder(*KINDS).double(), replicas, plan="auto")


def case_stages_of_equal_times() -> None:
    """Dense layers take less time. Layers count as equal if the planner cannot read the model, and the pipeline says
    so."""
    mesh = make_mesh(pp=2, ep=2)
    pipe = build(Decoder(None, None, None, None, "gated", "gated"), mesh)
    assert "layers: 4 + 2 (equal predicted times, by the figures of dgx-h100)" in repr(pipe), repr(pipe)
    pipe = build(Decoder(None, None, None, None, "gated", "kinds"), mesh)
    assert "layers: 3 + 3 (equal numbers of layers, because no times can be predicted: layers.5.moe has 2" in repr(
        pipe
    ), pipe
