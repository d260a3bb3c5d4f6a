"""Architectures of real models: all parameters are counted, and sizes equal those of the modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound, UnknownArchitecture
from moefx.planner.breakdown import compute_time_parts
from moefx.planner.constants import render_assumptions
from moefx.planner.describe import describe
from moefx.planner.layout import Layout
from moefx.planner.platforms import find_platform
from moefx.planner.step_formulas import POINTWISE_RATE

from ..blocks import D, E, Gated, H, K, Loop, Mlp
from ..distributed.models import Model
from .decoders import Decoder


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("expert", "matrices"), [(Gated, 3), (Mlp, 2)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sizes_of_a_plain_model_are_found(device, expert, matrices):
    with torch.device(device):
        model = Decoder(expert=expert)
    found = describe(model, (torch.zeros(2, 5, dtype=torch.int64, device=device),))
    assert (found.hidden_size, found.num_experts, found.top_k, found.expert_size) == (D, E, K, H)
    assert (found.matrices, found.num_layers, found.num_moe_layers, found.vocab_size) == (matrices, 4, 2, 64)
    assert (found.attention.num_heads, found.is_tied, found.num_other) == (2, False, 0)
    # the FFN of the other layers is counted in whole hidden units
    assert found.parameters() == pytest.approx(count_parameters(model), abs=2 * matrices * D)


def test_tied_and_without_lists():
    model = nn.Sequential(nn.Embedding(50, D), Loop(Gated))
    found = describe(model, (torch.zeros(9, dtype=torch.int64),))
    assert (found.vocab_size, found.is_tied, found.num_moe_layers) == (50, True, 1)
    assert found.num_experts * found.expert_parameters() <= count_parameters(model[1])


class Narrow(nn.Module):
    """Model with an embedding narrower than its layers, two of which share a module."""

    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(500, 2), nn.Linear(2, D)
        self.layers = nn.ModuleList([block := Loop(Gated), block, Loop(Gated)])

    def forward(self, ids):
        x = self.up(self.embed(ids))
        for layer in self.layers:
            x = x + layer(x)
        return x


IDS = torch.zeros(9, dtype=torch.int64)
PIECES = {
    "a block": (lambda: Loop(Gated), torch.zeros(9, D), (0, 0)),
    "a block that is a layer": (lambda: nn.Sequential(Loop(Gated)), torch.zeros(9, D), (0, 0)),
    "with an embedding": (lambda: nn.Sequential(nn.Embedding(50, D), Loop(Gated)), IDS, (0, 50)),
    "with a head": (lambda: nn.Sequential(Loop(Gated), nn.Linear(D, 7, bias=False)), torch.zeros(9, D), (7 * D, 0)),
    "with both": (
        lambda: nn.Sequential(nn.Embedding(50, D), Loop(Gated), nn.Linear(D, 50, bias=False)), IDS, (0, 50)
    ),
    "a narrow embedding": (Narrow, IDS, (500 * 2 + 3 * D, 0)),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("piece", PIECES)
def test_parts_of_models_are_counted(piece):
    """Count norms of a decoder only if they exist."""
    make, example, expected = PIECES[piece]
    model = make()
    found = describe(model, (example,))
    assert (found.num_other, found.vocab_size) == expected and found.norms == found.attention.num_extra == 0
    assert found.parameters() == count_parameters(model) and found.source != "the modules of "
    ranking = moefx.plan(model, "h200", 1, batch=1, example_inputs=(example,))
    assert (ranking[0].step["T_logits"] > 0) == (found.vocab_size > 0)  # no time for missing logits either
    assert ranking.simulate().ratio == pytest.approx(1, abs=1e-6)


class Layer(nn.Module):
    """Layer with experts after attention without named heads, or without attention."""

    def __init__(self, attend=None):
        super().__init__()
        self.attend, self.qkv, self.moe = attend, nn.Linear(D, 3 * D), Loop(Gated)

    def forward(self, x):
        return self.moe(self.attend(*self.qkv(x).chunk(3, -1)) if self.attend else x)


ATTENTIONS = {
    "softmax": lambda q, k, v: (q @ k.mT * D**-0.5).softmax(-1) @ v,
    "masked": lambda q, k, v: torch.softmax((q @ k.mT).tril().float() / 3, -1).to(v.dtype) @ v,
    "sdpa": lambda *qkv: nn.functional.scaled_dot_product_attention(*(t[None, None] for t in qkv))[0, 0],
}  # fmt: skip


@pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_without_named_heads_is_counted(attend):
    found = describe(Layer(attend), (torch.zeros(9, D),))
    assert found.attention.num_heads == 1 and "nothing names its heads: counted as 1" in found.note


def test_element_wise_operations_take_time():
    """A residual of a layer reads twice and writes once, in each forward and the backward, which is as long as two."""

    class Residual(Layer):
        def forward(self, x):
            return x + super().forward(x)

    found = describe(nn.Sequential(nn.Sequential(Residual(), Residual())), (torch.zeros(9, D),))
    assert found.pointwise_bytes == 3 * D * 4
    assert describe(nn.Sequential(nn.Sequential(Layer(), Layer())), (torch.zeros(9, D),)).pointwise_bytes == 0
    platform, layout = find_platform("h200"), Layout(tokens=64)
    seconds = [
        compute_time_parts(model, platform, layout).get("T_pointwise", 0.0)
        for model in (found, found.replace(pointwise_bytes=0))
    ]
    moved = 3 * layout.tokens * found.pointwise_bytes * found.num_layers
    assert seconds == [pytest.approx(moved / (POINTWISE_RATE * platform.memory_bandwidth)), 0]


def test_no_attention_is_charged_to_a_model_without():
    """Do not count a router's softmax as attention."""
    ranking = moefx.plan(Layer(), "h200", 4, batch=4, example_inputs=(torch.zeros(9, D),))
    entry = next(entry for entry in ranking if entry.layout.tp > 1)
    step, model = entry.step, ranking.model
    assert (entry.memory["A_attention"], step["F_proj"], step["F_scores"], step["T_attention"]) == (0, 0, 0, 0)
    assert step["V_tp"] > 0
    assert "no attention is counted" in str(ranking)
    assert "no attention is counted" in render_assumptions(model, ranking.platform)


def test_plan_takes_modules():
    model = Decoder()
    example = (torch.zeros(2, 5, dtype=torch.int64),)
    before = copy.deepcopy(model.state_dict())
    ranking = moefx.plan(model, "a100-40gb", 2, batch=8, tokens=128, example_inputs=example)
    assert len(ranking) and ranking.model.name == "Decoder"
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_models_without_blocks_are_refused():
    with pytest.raises(UnknownArchitecture, match="Linear has no experts: no module in it looks like a MoE block"):
        describe(nn.Linear(4, 4), (torch.zeros(2, 4),))
    with pytest.raises(UnknownArchitecture, match=r"no block of Memory is rewritten\n.*single vectors looked up"):
        describe(Memory(), (torch.zeros(9, D),))


class Memory(nn.Module):
    """Memory of values that scores select: its embedding embeds no tokens."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(D, 32), nn.Embedding(32, D)

    def forward(self, x):
        weights, chosen = self.keys(x).softmax(-1).topk(2, -1)
        return (self.values(chosen) * weights[..., None]).sum(-2)


class Dense(nn.Module):
    """Language model without experts."""

    def __init__(self):
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(50, D), Mlp(), nn.Linear(D, 50)

    def forward(self, ids):
        return self.head(self.mlp(self.embed(ids)))


def test_an_embedding_of_tokens_is_no_expert():
    ids = (torch.zeros(2, 9, dtype=torch.int64),)
    assert not moefx.explain(Dense(), example_inputs=ids).refused
    with pytest.raises(UnknownArchitecture, match="Dense has no experts"):
        describe(Dense(), ids)
    with pytest.raises(NoMoEBlockFound, match="no list of equal submodules"):
        moefx.compile(Dense(), example_inputs=ids)


def test_blocks_of_different_sizes():
    wide = Loop(Gated)
    wide.experts.append(Gated())
    wide.gate = nn.Linear(D, E + 1, bias=False)
    model = nn.Sequential(Loop(Gated), wide)
    with pytest.raises(UnknownArchitecture, match=r"blocks are alike, these are not: 0: .*'num_experts': 4.*; 1: "):
        describe(model, (torch.zeros(9, D),))


def test_the_distributed_tests_model():
    model = Model("gated", layers=2)
    found = describe(model, (torch.zeros(9, D),))
    assert found.num_layers == found.num_moe_layers == 2


@pytest.mark.sampled(6)
@pytest.mark.hf
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "Olmoe", "Qwen2Moe"])
def test_all_parameters_of_a_transformers_model_are_counted(name):
    """Count all parameters of models on the meta device exactly."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=5)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    found = describe(model)
    assert found.parameters() == count_parameters(model)
    assert found.num_layers == 5 and found.top_k == config.num_experts_per_tok
    assert found.attention.num_heads == config.num_attention_heads
    assert found.expert_bias == (name == "GptOss")  # sharded with the experts, not with the router
