"""Common mistakes with `moefx.pipeline` raise with the correct call, on every rank that they affect."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moefx
from moefx.errors import CaptureError, InvalidInput, InvalidPlan, MoefxError, NoMoEBlockFound

from ..blocks import D, Loop
from .launch import TIMEOUT
from .parallelize_cases import check_raises, make_mesh
from .pipeline_training_cases import DELAYED, EXAMPLE, LENGTH, PLAN, Decoder, Layer, build, loss_fn

IDS = torch.zeros(8, LENGTH, dtype=torch.long)


class Broken(torch.Tensor):
    """A tensor that cannot be cut, and raises an error of its own."""

    def chunk(self, *args):
        raise ZeroDivisionError("broken")


def case_arguments_of_the_call() -> None:
    mesh, model = make_mesh(pp=2, ep=2), Decoder("gated", None)
    counts = {"pp": 2, "ep": 2, "zero": 1, "microbatches": 8}
    build(model, mesh, plan=PLAN.replace(expert_axis="ep", layout=counts), microbatches=8)
    for text, options in (
        ("'zb-h2' is simulated by the planner only", dict(schedule="zb-h2")),
        ("expected one of 'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zbv', 'dualpipev'", dict(schedule="1F1B")),
        ("microbatches=0: expected a whole number", dict(microbatches=0)),
        ("microbatches=1, and schedule='1f1b' of 2 stages takes 2 or more", dict(microbatches=1)),
        ("microbatches=3, and schedule='interleaved' on 2 ranks of the pipeline axis takes a multiple of 2",
         dict(microbatches=3, schedule="interleaved")),
        ("microbatches=2, and schedule='dualpipev' of 4 stages" if DELAYED else "use torch 2.13 or later",
         dict(microbatches=2, schedule="dualpipev")),
        ("2 layers, fewer than the 4 stages", dict(schedule="interleaved")),
        ("split has 3 stages, and schedule='1f1b' takes 2", dict(split={"layers": [1, 1, 1]})),
        ("such as {'model.layers': [3, 5]}", dict(split=[1, 1])),
        ("no list of modules of that name. Its layers seem to be 'layers'", dict(split={"blocks": [1, 1]})),
        ("has 3 layers, the model 2", dict(split={"layers": [1, 2]})),
        ("the planner's layout has pp=4, and pipeline was given pp=2", dict(plan=PLAN.replace(layout={"pp": 4}))),
        ("layout has microbatches=8, and pipeline was given microbatches=4", dict(plan=PLAN.replace(layout=counts))),
        ("expected a moefx.Plan, 'auto' or None", dict(plan="fastest")),
        ("the planner's layout has zero=3, and pipeline was given data='fsdp' and zero=1",
         dict(plan=PLAN.replace(layout={"zero": 3}), zero=1)),
        ("data='ddp' shares nothing (ZeRO-0)", dict(data="ddp", zero=2)),
        ("chunks=2 makes 4 stages, and schedule='1f1b' takes 2", dict(chunks=2)),
    ):  # fmt: skip
        check_raises(InvalidPlan, text, build, model, mesh, **options)
    check_raises(InvalidPlan, 'mesh_dim_names=("pp", "ep")', build, model, make_mesh(dp=2, ep=2))
    check_raises(InvalidInput, "expected a function of (output, target)", build, model, mesh, loss_fn=None)
    check_raises(NoMoEBlockFound, "no stage of the pipeline has a block", build, Decoder(None, None), mesh)
    compiled = moefx.compile(Decoder("gated", "gated"), EXAMPLE, plan=PLAN)
    check_raises(InvalidInput, "pass the original model", build, compiled, mesh)
    loss = functools.partial(lambda model, output, target: model.layers[0].balance, model)
    check_raises(InvalidInput, "loss_fn uses Decoder of the model", build, model, mesh, loss_fn=loss)
    check_raises(
        InvalidInput, "loss_fn uses Linear of the model", build, model, mesh, loss_fn=nn.Sequential(model.head)
    )


def case_inputs_of_a_step() -> None:
    mesh = make_mesh(pp=2, ep=2)
    pipe = build(Decoder("gated", "joined"), mesh)
    check_raises(InvalidInput, "the batch of 6 cannot be cut into microbatches=4", pipe.step, IDS[:6], target=IDS[:6])
    check_raises(InvalidInput, "Ranks of one pipeline pass the same inputs", pipe.step, target=IDS)
    check_raises(InvalidInput, "step(..., target=) is missing", pipe.step, IDS)
    check_raises(
        InvalidInput, "the target has the shape [24], and the batch is 8", pipe.step, IDS, target=IDS.flatten()
    )
    shift = torch.zeros(5, LENGTH)
    check_raises(InvalidInput, "an input has the shape [5, 3]", pipe.step, IDS, shift=shift, target=IDS)
    shard = IDS[:, : 1 + mesh["pp"].get_local_rank()]
    check_raises(
        InvalidInput,
        "ranks of a pipeline differ in input 0: '[2, 1] of torch.int64', '[2, 2]",
        pipe.step,
        shard,
        target=shard,
    )
    assert pipe.step(IDS, target=IDS) > 0  # the calls above left the pipeline unchanged
    check_raises(InvalidInput, "the batch of 6 cannot be cut", pipe.step, IDS[:6], target=IDS[:6])
    assert pipe.step(IDS, target=IDS) > 0


def case_mistakes_after_the_first_step() -> None:
    """Raise on every rank of the mesh, whichever rank makes the mistake. The next step runs."""
    mesh = make_mesh(pp=2, ep=2)
    pipe = build(Decoder("gated", "joined"), mesh)
    loss, stage, number = pipe.step(IDS, target=IDS), mesh["pp"].get_local_rank(), mesh["ep"].get_local_rank()
    for text, ids, target in (
        ("(..., target=) is missing", IDS, None),
        ("(..., target=) is missing", IDS, None if stage and number else IDS),
        ("the target has the shape [24], and the batch is 8", IDS, IDS.flatten() if stage else IDS),
        ("the batch of 6 cannot be cut into microbatches=4", IDS[: 8 - 2 * stage], IDS),
        ("the batch of 6 cannot be cut into microbatches=4", IDS[: 8 - 2 * number], IDS),
        (
            "ranks of a pipeline differ in input 0: '[2, 2] of torch.int64', '[2, 3] of torch.int64'. Pass",
            IDS[:, : 2 + stage],
            IDS,
        ),
        ("a pipeline needs the model's inputs on every rank", None if number else IDS, IDS),
    ):
        start = time.monotonic()
        inputs = () if ids is None else (ids,)
        check_raises(InvalidInput, text, pipe.step, *inputs, target=target)
        check_raises(InvalidInput, text, pipe.evaluate, *inputs, target=target)
        assert time.monotonic() - start < TIMEOUT.total_seconds()  # no rank waited for one that raised
        torch.testing.assert_close(pipe.evaluate(IDS, target=IDS), loss)
    pipe.train(stage == 0)
    check_raises(
        InvalidInput, "ranks of a pipeline differ in pipe.training: True, False", pipe.evaluate, IDS, target=IDS
    )
    pipe.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=stage == 1):
        for call in (pipe.step, pipe.evaluate):
            text = "ranks of a pipeline differ in autocast: 'off', 'torch.bfloat16'. Pass"
            check_raises(InvalidInput, text, call, IDS, target=IDS)
    torch.testing.assert_close(pipe.evaluate(IDS, target=IDS), loss)
    inputs, expected, text = IDS, InvalidInput, "rank 3 failed: ZeroDivisionError"
    if stage and number:
        inputs, expected, text = IDS.as_subclass(Broken), ZeroDivisionError, "broken"
    check_raises(expected, text, pipe.step, inputs, target=IDS)
    assert pipe.step(IDS, target=IDS) > 0


def case_other_calls() -> None:
    mesh = make_mesh(pp=2, ep=2)
    pipe = build(Decoder("gated", "joined"), mesh)
    for call in (moefx.compile, moefx.explain):
        check_raises(InvalidInput, "moefx.explain(pipe.stages[number]) shows a stage", call, pipe, EXAMPLE)
    assert all(moefx.explain(model).matched for model in pipe.stages.values())
    check_raises(InvalidInput, "moefx.parallelize takes the original model", moefx.parallelize, pipe, mesh)
    check_raises(InvalidInput, "moefx.pipeline takes the original model", build, pipe, mesh)
    check_raises(InvalidInput, "would reduce its gradients twice", DistributedDataParallel, pipe)
    for call in (pickle.dumps, copy.deepcopy, lambda pipe: torch.save(pipe, io.BytesIO())):
        check_raises(MoefxError, "can be neither pickled nor copied", call, pipe)
    assert "schedule='1f1b', microbatches=4, layers: 1 + 1" in repr(pipe)


class Odd(Decoder):
    """Decoder with one property that stages cannot reproduce."""

    def __init__(self, kind: str) -> None:
        super().__init__("gated", "joined")
        self.kind = kind
        if kind == "own parameter":
            self.scale = nn.Parameter(torch.ones(D))
        if kind == "saved buffer":
            self.register_buffer("steps", torch.zeros(1))
        if kind == "shared parameter":
            self.layers[1].mix.weight = self.layers[0].mix.weight

    def forward(self, ids, shift=None):
        x = first = self.tokens(ids)
        mask = (ids != 0)[..., None]
        if self.kind == "learned mask":
            mask = self.positions(ids % LENGTH)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask)
            if self.kind == "between" and i == 0:
                x = x + first
            if self.kind == "in place" and i == 0:
                x *= 2
            if self.kind == "norm between" and i == 0:
                self.norm(x)
        if self.kind == "attribute":
            x = x + self.layers[0].moe.gate.weight.sum()
        if self.kind == "repeated":
            x = self.layers[0](x, mask)
        if self.kind == "skip":
            x = x + first
        x = self.norm(x)
        if self.kind == "late skip":
            return self.head(x) + first.sum()
        if self.kind == "called twice":
            x = self.tokens(ids) + x
        return {"scores": self.head(x)} if self.kind == "dictionary" else self.head(x)


def case_models_that_cannot_be_cut() -> None:
    for kind, text in (
        ("own parameter", "scale is a parameter of Odd"),
        ("saved buffer", "steps is a buffer of Odd"),
        ("shared parameter", "layers.0.mix.weight and layers.1.mix.weight are the same parameter, in stages 0 and 1"),
        ("learned mask", "layers.0 receives a second tensor that depends on parameters outside"),
        ("between", "layers.1 does not receive the layer's output as it is (pipeline_mistake_cases.py"),
        ("in place", "layers.1 does not receive the layer's output as it is"),
        ("norm between", "norm runs between the layers"),
        ("attribute", "its forward does not run when its layers only pass hidden states on"),
        ("repeated", "layers.0 runs as number 2"),
        ("skip", "norm runs after the layers on a tensor from before them"),
        ("late skip", "its output depends on a tensor from before the layers"),
        ("called twice", "tokens runs before the first and after the last layer"),
        ("dictionary", "an output with a field 'logits'"),
    ):
        check_raises(InvalidInput, text, build, Odd(kind), make_mesh(pp=2, ep=2))
    check_raises(InvalidInput, "no nn.ModuleList of layers", build, Layer(None), make_mesh(pp=2, ep=2))


class BlockLayer(Loop):
    """Layer that is an MoE block."""

    def forward(self, x, mask):
        return super().forward(x.flatten(0, 1)).view_as(x)


def case_sharding_of_one_stage_fails() -> None:
    """Raise on every rank before any rank makes a process group for the sharding."""
    mesh, model = make_mesh(pp=2, ep=2), Decoder("gated", "joined")
    model.layers[1].gain = nn.Parameter(torch.ones(()))
    start, text = time.monotonic(), "gain has no dimension, and FSDP shards the first one"
    check_raises(InvalidInput, text, build, model, mesh)
    block_layers = Decoder("gated", "joined")
    block_layers.layers[1] = BlockLayer()
    check_raises(InvalidInput, "layers.1 is an MoE block itself", build, block_layers, mesh, recompute=True)
    assert time.monotonic() - start < TIMEOUT.total_seconds()
    assert build(Decoder("gated", "joined"), mesh).stages


def case_results_of_a_stage() -> None:
    """Check a stage's result in its own process: other stages would wait for it."""
    pipe = build(Decoder("gated", "joined"), make_mesh(pp=2, ep=2))
    (stage,) = pipe._own_stages
    stage.port.boundary = torch.empty(8, LENGTH, D, device="meta")
    stage.port.inputs, stage.port.targets = [((IDS,), {})], [IDS]
    if stage.number == 0:
        stage.model.layers[0].register_forward_hook(lambda *args: args[-1].double())
        text = "the last layer of stage 0 returned [8, 3, 6] in torch.float64, and the first layer of the model takes"
        check_raises(InvalidInput, text, stage.model)


def case_a_loss_that_fails() -> None:
    """Raise on every rank at the end of the step, also if one rank fails in one micro-batch. The next step runs."""
    mesh = make_mesh(pp=2, ep=2)
    stage, number = mesh["pp"].get_local_rank(), mesh["ep"].get_local_rank()
    calls, fatal_call = [], None

    def compute_loss(output, target):
        calls.append(target)
        if number and len(calls) == fatal_call:
            raise ZeroDivisionError("no loss")
        return loss_fn(output, target)

    pipe = build(Decoder("gated", "joined"), mesh, loss_fn=compute_loss)
    loss = pipe.step(IDS, target=IDS)
    for run in (pipe.step, pipe.evaluate):
        fatal_call, start = len(calls) + 2, time.monotonic()
        is_own = stage == 1 and number == 1
        expected, text = (
            (ZeroDivisionError, "no loss") if is_own else (InvalidInput, "rank 3 failed: ZeroDivisionError")
        )
        check_raises(expected, text, run, IDS, target=IDS)
        assert time.monotonic() - start < TIMEOUT.total_seconds() / 2
        fatal_call = None
        torch.testing.assert_close(pipe.step(IDS, target=IDS), loss)
    pipe = build(Decoder("gated", "joined"), mesh, loss_fn=lambda output, target: output.sum(-1))
    text = "loss_fn(output, target) returned [2, 3], expected a tensor of one number"
    check_raises(InvalidInput, text, pipe.step, IDS, target=IDS)


def case_a_stage_that_fails() -> None:
    """Raise on every rank, including those of the other stage."""
    mesh, model = make_mesh(pp=2, ep=2), Decoder("gated", "joined")
    model.layers[0].mix.register_forward_hook(lambda *args: args[-1].double())
    if mesh["pp"].get_local_rank() == 0:
        check_raises(CaptureError, "does not run on the example inputs", build, model, mesh)
    else:
        check_raises(InvalidInput, "rank 0 failed: CaptureError: Decoder does not run", build, model, mesh)
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))  # new groups on all ranks
    assert build(Decoder("gated", "joined"), again).stages
