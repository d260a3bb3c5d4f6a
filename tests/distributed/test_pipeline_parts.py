"""Parts of `moefx.pipeline` that run in one process: schedules, shares of layers, micro-batches, the dry run."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import schedules

from moefx.distribution.layer_container import find_layer_container
from moefx.errors import InvalidInput, InvalidPlan
from moefx.pipelines.micro_batches import check_batch, split_inputs, split_tree
from moefx.pipelines.pipeline_schedules import KINDS, SIMULATED, StageOrder, order_stages
from moefx.pipelines.stage_modules import StagePort
from moefx.pipelines.stage_sharding import resolve_zero
from moefx.pipelines.stage_split import (
    count_layers,
    find_layer_keys,
    install_stage,
    read_split,
    reduce_to_stage,
    split_model,
)
from moefx.planner.layout import Layout, Schedule

from .pipeline_training_cases import EXAMPLE, LENGTH, D, Decoder

AVAILABLE = [name for name, kind in KINDS.items() if torch.__version__ >= (2, 13) or not kind.splits_backward]


def test_schedules_have_the_names_of_the_planner():
    assert {*get_args(Schedule)} <= {*KINDS, SIMULATED}
    assert all(inspect.isclass(getattr(schedules, kind.torch_class)) for kind in KINDS.values())


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_stage_has_one_rank(name, ranks):
    order = order_stages(name, ranks, 8, None)
    stages = [order.list_stages(rank) for rank in range(ranks)]
    assert sorted(itertools.chain(*stages)) == list(range(order.num_stages)) == list(range(ranks * KINDS[name].chunks))
    assert all(sorted(run) == run for run in stages)
    assert [order.find_rank(stage) for run in stages for stage in run] == [r for r in range(ranks) for _ in stages[r]]
    if order.kind.is_v_shaped:
        assert stages[0][-1] == order.num_stages - 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("microbatches", [4, 8, 32])
def test_the_bound_of_micro_batches_in_flight(name, microbatches):
    order = order_stages(name, 4, microbatches, None) if name in AVAILABLE else StageOrder(name, 4, 1, microbatches)
    layout = Layout(pp=4, microbatches=microbatches, schedule=name, chunks=order.chunks)
    kept = max(layout.in_flight(stage) for stage in range(4)) * order.chunks
    assert kept <= order.max_in_flight <= microbatches * order.chunks


def test_a_split_decides_the_stages_of_a_rank():
    assert order_stages("interleaved", 2, 4, 6).list_stages(1) == [1, 3, 5]
    for name, num_stages in (("interleaved", 2), ("interleaved", 5), ("gpipe", 4)):
        with pytest.raises(InvalidPlan, match=f"split has {num_stages} stages"):
            order_stages(name, 2, 4, num_stages)


def test_chunks_decide_the_stages_of_a_rank():
    assert (
        order_stages("interleaved", 2, 4, None, 3)
        == order_stages("interleaved", 2, 4, 6)
        == StageOrder("interleaved", 2, 3, 4)
    )
    for arguments, text in (
        (("1f1b", 2, 4, None, 2), "chunks=2 makes 4 stages, and schedule='1f1b' takes 2"),
        (("interleaved", 2, 4, 4, 3), "split has 4 stages, and chunks=3 makes 6"),
        (("interleaved", 2, 4, None, 0), "chunks=0: expected a whole number"),
    ):
        with pytest.raises(InvalidPlan, match=re.escape(text)):
            order_stages(*arguments)


@pytest.mark.parametrize(
    ("data", "zero", "planned", "ranks", "found"),
    [("fsdp", None, None, 4, 1), ("ddp", None, None, 4, 0), ("fsdp", None, 3, 4, 3), ("hsdp", 2, 2, 4, 2),
     ("ddp", None, 0, 4, 0), ("fsdp", None, 3, 1, 0)],
)  # fmt: skip
def test_zero_follows_the_layout(data, zero, planned, ranks, found):
    assert resolve_zero(data, zero, planned, ranks, False) == found


@pytest.mark.parametrize(
    ("data", "zero", "planned", "splits", "text"),
    [("fsdp", 0, None, False, "data='ddp' shares nothing"), ("ddp", 1, None, False, "change one of them"),
     ("fsdp", 1, 2, False, "pass zero=2"), ("fsdp", None, 0, False, "pass data='ddp'"),
     ("fsdp", 4, None, False, "expected 0, 1, 2, 3"), ("fsdp", 2, None, True, "delays those of weights")],
)  # fmt: skip
def test_sharding_that_contradicts_itself_is_refused(data, zero, planned, splits, text):
    with pytest.raises(InvalidPlan, match=re.escape(text)):
        resolve_zero(data, zero, planned, 4, splits)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [(4, 2, (2, 2)), (2, 2, (1, 1)), (6, 4, (1, 2, 2, 1)), (9, 3, (3, 4, 2)), (61, 8, (7, 8, 8, 8, 8, 8, 8, 6))],
)  # fmt: skip
def test_layers_are_shared_out_with_the_embedding_and_the_head(num_layers, num_stages, counts):
    assert count_layers(num_layers, num_stages) == counts


def test_the_longest_stage_is_as_short_as_can_be():
    for num_stages in range(2, 9):
        for num_layers in range(num_stages, 40):
            counts = count_layers(num_layers, num_stages)
            loads = [count + (stage in (0, num_stages - 1)) for stage, count in enumerate(counts)]
            assert sum(counts) == num_layers and min(counts) >= 1
            assert max(loads) == max(2, -(-(num_layers + 2) // num_stages))


def test_inputs_are_cut_along_the_batch():
    ids, mask, positions = torch.arange(12).view(6, 2), torch.rand(6, 2), torch.arange(2).view(1, 2)
    calls, batch = split_inputs((ids,), {"mask": [mask], "positions": positions, "flag": True, "scale": mask[0, 0]}, 3)
    assert batch == 6 and len(calls) == 3
    (first,), kwargs = calls[1]
    assert torch.equal(first, ids[2:4]) and torch.equal(kwargs["mask"][0], mask[2:4])
    assert kwargs["positions"] is positions and kwargs["flag"] is True and kwargs["scale"].dim() == 0
    with pytest.raises(InvalidInput, match=r"an input has the shape \[2, 6\], and the batch is 6"):
        split_inputs((ids, mask.T), {}, 3)
    with pytest.raises(InvalidInput, match="batch of 6 cannot be cut into microbatches=4"):
        split_inputs((ids,), {}, 4)
    assert [part["y"].tolist() for part in split_tree({"y": torch.arange(4)}, 4, 2, "the target")] == [[0, 1], [2, 3]]


def test_an_input_that_micro_batches_share_may_come_first():
    ids, positions = torch.arange(12).view(6, 2), torch.arange(2).view(1, 2)
    calls, batch = split_inputs((), {"position_ids": positions, "input_ids": ids}, 3)
    assert batch == 6 and torch.equal(calls[1][1]["input_ids"], ids[2:4])
    assert calls[1][1]["position_ids"] is positions
    check_batch((positions, ids), {}, (6, 2))
    with pytest.raises(InvalidInput, match=r"have the shape \[6, 2\], and the entry of the planner is for 4 sequences"):
        check_batch((positions, ids), {}, (4, 2))
    assert split_inputs((positions,), {}, 1)[1] == 1
    with pytest.raises(InvalidInput, match="batch of 1 cannot be cut into microbatches=2"):
        split_inputs((positions,), {}, 2)


def test_invalid_splits_raise():
    assert read_split("auto") == (None, None)
    assert read_split({"model.layers": [3, 5]}) == ("model.layers", (3, 5))
    wrong: list[Any] = ["even", {"layers": []}, {"layers": [1, 0]}, {"layers": 2}, {"a": [1], "b": [1]}, {3: [1]}, None]
    for split in wrong:
        with pytest.raises(InvalidPlan, match="expected 'auto'"):
            read_split(split)


@pytest.mark.parametrize("name", ["nope", "", "layers.0", "head"])
def test_a_split_that_names_no_layers_is_refused(name):
    sequential = nn.Sequential(nn.Embedding(5, D), nn.Linear(D, 5))
    for model, remedy in ((Decoder("gated", None), "Its layers seem to be 'layers'"), (sequential, "no nn.ModuleList")):
        with pytest.raises(InvalidPlan, match=rf"split={{'{name}': ...}}: .* of that name.* {remedy}"):
            find_layer_keys(model, name)


def test_modules_outside_of_layers_belong_to_the_ends():
    model = Decoder("gated", None)
    assert find_layer_container(model) == "layers"
    split = split_model(model, *find_layer_keys(model, None), (1, 1), "", EXAMPLE)
    assert split.owners == {"tokens": 0, "positions": 0, "norm": 1, "head": 1}  # the head is defined first
    assert split.list_units(0) == ["layers.0", "tokens", "positions"]
    hidden, _ = split.dry_run.run((torch.zeros(5, LENGTH, dtype=torch.long),), {})
    assert hidden.is_meta and hidden.shape == (5, LENGTH, D)


class Small(nn.Module):
    """Decoder whose second layer has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, D), nn.ModuleList([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_stages_without_parameters_are_refused():
    keys = find_layer_keys(Small(), None)
    assert split_model(Small(), *keys, (1, 2), "", None).owners == {"embed": 0}
    with pytest.raises(InvalidInput, match="stage 1 would have no parameters"):
        split_model(Small(), *keys, (1, 1, 1), "", None)


class Reader(Decoder):
    """Decoder whose forward reads its layers and the modules around them. Layers have names that placeholders use."""

    seen: list[Any]

    def __init__(self, read: Callable[[Reader], Any]) -> None:
        super().__init__("gated", None)
        self.read = read
        self.tokens.name = "words"
        for number, layer in enumerate(self.layers):
            layer.index, layer.name, layer.state, layer.port = number + 5, f"mixer {number}", "solid", 80

    def forward(self, ids, shift=None):
        self.seen = [self.read(self)]
        return super().forward(ids, shift)


def run_reader(read: Callable[[Reader], Any], training: bool = True) -> list[Any]:
    """Return what a forward reads in the model, in the dry run, and in both stages."""
    model = Reader(read).train(training)
    with torch.no_grad():
        wanted = read(model)
    split = split_model(model, *find_layer_keys(model, None), (1, 1), "", EXAMPLE)
    skeleton: Any = split.dry_run.skeleton
    read_values = [wanted, *skeleton.seen]
    for number in range(2):
        stage: Any = reduce_to_stage(model, split, number)
        port = StagePort(number, number == 1, lambda output, target: output.sum(), 1)
        port.inputs, port.boundary = [(EXAMPLE, {})], torch.empty(2, LENGTH, D, device="meta")
        install_stage(stage, split, number, port)
        stage(*(torch.zeros(2, LENGTH, D),) * number)
        read_values += stage.seen
    return read_values


@pytest.mark.parametrize("read", [
    lambda model: [(layer.index, layer.name, layer.state, layer.port) for layer in model.layers],
    lambda model: (model.tokens.name, model.tokens.num_embeddings, model.norm.eps),
    lambda model: [(module.weight.device, module.weight.dtype, module.weight.shape)
                   for module in (model.tokens, model.norm, model.head)],
    lambda model: [module.training for module in (*model.layers, model.tokens, model.head)],
    lambda model: [getattr(layer, "window", None) for layer in model.layers],
    lambda model: [(hasattr(module, "bias2"), module.dump_patches) for module in (*model.layers, model.head)],
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_a_forward_reads_the_same_in_each_stage(read, training):
    wanted, *others = run_reader(read, training)
    assert others == [wanted] * 3


@pytest.mark.parametrize(
    ("read", "name"),
    [(lambda model: model.layers[0].moe, "layers.0.moe"),
     (lambda model: hasattr(model.layers[1], "mix"), "layers.1.mix"),
     (lambda model: model.tokens.weight.sum(), "tokens.weight.sum"),
     (lambda model: model.norm.normalized_shape, "norm.normalized_shape"),
     (lambda model: F.linear(torch.ones(D), model.head.weight), "the values of head.weight"),
     (lambda model: torch.ones(1) * model.norm.bias, "the values of norm.bias")],
)  # fmt: skip
def test_reading_parts_of_other_stages_is_refused(read, name):
    text = rf"the model reads {re.escape(name)}.*in another stage of the pipeline.*\(test_pipeline_parts.py:\d+\)"
    with pytest.raises(InvalidInput, match=text):
        run_reader(read)
