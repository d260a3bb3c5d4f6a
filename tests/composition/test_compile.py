"""torch.compile and torch.export of a compiled model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import moefx

from ..blocks import Loop
from . import models
from .models import (
    ALL,
    CLOSE,
    NEAR,
    assert_rewritten,
    assert_same,
    build_pair,
    compute_logits,
    compute_loss,
    draw_ids,
    run_step,
)

SIZES = ((2, 6), (3, 5), (1, 11))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ALL)
def test_one_graph_for_several_sizes(kind):
    layers = 1 if kind == "qwen3" else 2
    original, compiled = build_pair(kind, layers=layers)
    backend = CompileCounterWithBackend("aot_eager")
    compiled.compile(fullgraph=True, backend=backend)
    for number, size in enumerate(SIZES):
        tokens = draw_ids(*size, seed=number)
        assert_same(run_step(compiled, tokens), run_step(original, tokens), **NEAR)
    assert backend.frame_count <= 3  # the first sizes, then dynamic ones
    names = [str(node.target) for node in backend.graphs[-1].graph.nodes]
    assert sum("expert_mlp" in name for name in names) == layers
    assert_rewritten(compiled, calls=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ALL)
def test_inference_has_its_own_graph(kind):
    original, compiled = build_pair(kind, layers=1)
    fast = torch.compile(compiled.eval(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for size in SIZES[:2]:
            torch.testing.assert_close(
                compute_logits(fast, draw_ids(*size)), compute_logits(original.eval(), draw_ids(*size)), **NEAR
            )
    assert_rewritten(compiled, calls=False)


@pytest.mark.slow
@pytest.mark.exhaustive  # a minute each
@pytest.mark.parametrize("kind", ALL)
def test_inductor_compiles_the_model_as_one_graph(kind):
    original, compiled = build_pair(kind, layers=1)
    compiled.compile(fullgraph=True, backend="inductor")
    for size in SIZES[:2]:
        assert_same(run_step(compiled, draw_ids(*size)), run_step(original, draw_ids(*size)), **NEAR)
    assert_rewritten(compiled, calls=False)


def test_compiling_layer_by_layer_traces_like_layers_once():
    original, compiled = build_pair("loop")
    backend = CompileCounterWithBackend("aot_eager")
    for moe in compiled.moes:
        moe.compile(fullgraph=True, backend=backend)
    for size in SIZES:
        assert_same(run_step(compiled, draw_ids(*size)), run_step(original, draw_ids(*size)))
    assert backend.frame_count <= 3  # not once per layer
    assert list(compiled.state_dict()) == list(original.state_dict())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_exported_models_hold_the_rewritten_blocks(kind, strict):
    original, compiled = build_pair(kind)
    compiled.eval()
    original.eval()
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=60)
    exported = torch.export.export(
        compiled, (), {"input_ids": draw_ids()}, dynamic_shapes={"input_ids": {0: batch, 1: length}}, strict=strict
    )
    assert sum("expert_mlp" in str(node.target) for node in exported.graph.nodes) == 2
    assert exported.state_dict.keys() == original.state_dict().keys()
    for size in SIZES[:2]:
        torch.testing.assert_close(
            compute_logits(exported.module(), draw_ids(*size)), compute_logits(original, draw_ids(*size)), **NEAR
        )


def test_an_exported_model_can_be_saved(tmp_path):
    original, compiled = build_pair("loop")
    exported = torch.export.export(compiled, (), {"input_ids": draw_ids()})
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(input_ids=draw_ids(seed=5)), compute_logits(original, draw_ids(seed=5)), **CLOSE)


def test_a_loss_function_around_the_model():
    """Compile a region that is larger than the model."""
    original, compiled = build_pair("stacked")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def train_loss(tokens):
        return compute_loss(compiled, tokens) * 2

    train_loss(draw_ids()).backward()
    (2 * compute_loss(original, draw_ids())).backward()
    for actual, expected in zip(compiled.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, **CLOSE)


def test_autocast_inside_of_a_compiled_region():
    original, compiled = build_pair("loop", torch.float32)
    fast = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(
            compute_logits(fast, draw_ids()), compute_logits(original, draw_ids()), rtol=0.05, atol=0.05
        )
        torch.testing.assert_close(
            compute_logits(fast, draw_ids()), compute_logits(compiled, draw_ids()), rtol=0.02, atol=0.02
        )


def test_a_changed_expert_is_noticed_when_the_graph_is_made_again():
    _, compiled = build_pair("loop")
    models.find_experts(compiled)[1].up = nn.Linear(models.D, models.H, bias=False).double()
    with pytest.raises(Exception, match=r"moes\.1\.experts\.1\.up was replaced"):
        torch.compile(compiled, fullgraph=True, backend="aot_eager")(draw_ids())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["", "moes.0", "moes.1.experts.2"])
def test_parts_that_torch_compiles_already(part):
    """Capture through `Module.compile`, and keep the compiled module usable."""
    original, _ = build_pair("loop")
    expected = run_step(original, draw_ids())
    original.get_submodule(part).compile(backend="aot_eager")
    compiled = models.compile_model(original)
    assert_same(run_step(compiled, draw_ids()), expected)
    assert_same(run_step(original, draw_ids()), expected)
    assert_rewritten(compiled)


def test_export_of_a_block_by_itself():
    torch.manual_seed(0)
    original, x = Loop(), torch.randn(20, 6)
    compiled = moefx.compile(original, example_inputs=(x,))
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(compiled, (x,), dynamic_shapes=({0: tokens},), strict=False)
    assert sum("expert_mlp" in str(node.target) for node in exported.graph.nodes) == 1
    torch.testing.assert_close(exported.module()(x[:7]), original(x[:7]), **NEAR)


class Balanced(nn.Module):
    """Select experts by integers that training counts and evaluation reads."""

    def __init__(self):
        super().__init__()
        self.block = models.LoopMoE()
        self.register_buffer("counts", torch.zeros(models.E, dtype=torch.int64))

    def forward(self, x):
        logits = self.block.router(x)
        if self.training:
            chosen = logits.argmax(-1)
            self.counts += torch.bincount(chosen.view(-1), minlength=models.E)
        else:
            chosen = (logits - 0.01 * self.counts).argmax(-1)
        gates = logits.softmax(-1) * torch.nn.functional.one_hot(chosen, models.E)
        return sum(gates[..., e, None] * expert(x) for e, expert in enumerate(self.block.experts))


def test_export_in_a_mode_without_an_earlier_call():
    """Find the other mode's program during the export, in which parameters and buffers have no values."""
    torch.manual_seed(0)
    original, x = Balanced(), torch.randn(3, 20, models.D)
    compiled = moefx.compile(copy.deepcopy(original), example_inputs=(x,))
    for model in (original, compiled):
        model(x)
        model.eval()
    exported = torch.export.export(compiled, (x,), strict=False)
    assert sum("expert_mlp" in str(node.target) for node in exported.graph.nodes) == 1
    torch.testing.assert_close(exported.module()(x), original(x), **NEAR)
    torch.testing.assert_close(compiled(x), original(x), **NEAR)
