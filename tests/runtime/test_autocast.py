"""Programs that enable or disable autocast in a part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx

from .autocast_block import Block, D


@pytest.mark.sampled(6)
@pytest.mark.parametrize("router", ["", None, torch.bfloat16], ids=["router", "router_off", "router_on"])
@pytest.mark.parametrize("experts", ["", None, torch.bfloat16], ids=["experts", "experts_off", "experts_on"])
@pytest.mark.parametrize("outside", [False, True], ids=["outside_off", "outside_on"])
@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["eager", "traced"])
def test_regions_of_autocast_are_kept(router, experts, outside, traced):
    _regions(router, experts, outside, traced)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("router", "experts", "outside"),
    [("", "", True), ("", None, True), (None, torch.bfloat16, False), (torch.bfloat16, "", True)],
)
def test_regions_that_are_traced(router, experts, outside):
    _regions(router, experts, outside, True)


def _regions(router, experts, outside, traced):
    torch.manual_seed(0)
    model, x = Block(router, experts), torch.randn(33, D)
    compiled = moefx.compile(model, example_inputs=(x,), plan=moefx.Plan(validation="numeric"))
    torch._dynamo.reset()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager") if traced else compiled
    exact = Block(router="", experts="").double()
    exact.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        expected, actual = model(x), run(x)
    assert actual.dtype == expected.dtype
    # both round at the same places, or one of them sums in a higher precision
    error, yardstick = (actual - expected).abs().max(), (expected - exact(x.double())).abs().max()
    assert error <= 3 * yardstick + 1e-6
    if not traced:  # experts without autocast run the original, which `explain` reports
        fallback = outside and experts is None
        assert moefx.explain(compiled).matched[0].calls[:2] == ((0, 1) if fallback else (1, 0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpt_oss(dtype):
    """Multiply in `dtype` under autocast, and add the biases in float32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    config = transformers.GptOssConfig(**sizes, experts_implementation="eager")
    model = transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 33, 32)
    compiled = moefx.compile(model, example_inputs=(x,))
    with torch.autocast("cpu", dtype):
        compiled(x)
        moefx.verify(compiled, model, (x,)).raise_if_failed()
    (block,) = moefx.blocks(compiled)
    assert block.fallbacks == 0 and len(block.forward.programs) == 2
    (mlp,) = block.forward.programs[1].history.graph.find(torch.ops.moefx.expert_mlp.default)
    assert mlp.kwargs["dtype"] is dtype
