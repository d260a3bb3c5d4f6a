"""Programs read numbers from buffers and parameters in every call, where Python read them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx

from ...blocks import D, E, Loop


class Tempered(Loop):
    """Read an annealed temperature from a buffer, and a gain from a parameter, as numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("tau", torch.tensor(2.0))
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def route(self, x):
        if self.training:
            self.tau.mul_(0.9).clamp_(min=0.2)
        return (self.gate(x) / float(self.tau) * self.gain.item()).softmax(-1).topk(self.k, -1)


class Inverted(Loop):
    def __init__(self):
        super().__init__()
        self.register_buffer("tau", torch.tensor(2.0))

    def route(self, x):
        return (self.gate(x) * (1 / self.tau.item())).softmax(-1).topk(self.k, -1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Tempered, Inverted])
def test_scores_are_scaled_by_the_current_value(kind, dtype):
    torch.manual_seed(0)
    original, other = kind().to(dtype), kind().to(dtype)
    other.load_state_dict(original.state_dict())
    compiled = moefx.compile(other, example_inputs=(torch.randn(5, D).to(dtype),))
    for tau in (2.0, 0.3, 7.0):
        x, results = torch.randn(9, D).to(dtype), []
        for model in (original, compiled):
            model.tau.fill_(tau)
            results.append((model(x), model.tau.clone()))
        torch.testing.assert_close(results[1], results[0])
    assert moefx.explain(compiled).matched[0].calls == (3, 0, 0)  # never the original


def test_the_block_stays_one_graph():
    compiled = moefx.compile(Tempered().eval(), example_inputs=(torch.randn(5, D),))
    x = torch.randn(6, D)
    torch.testing.assert_close(torch.compile(compiled, fullgraph=True, backend="aot_eager")(x), compiled(x))


class Compared(Loop):
    """Branch on a number from a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.tensor(1.0))

    def route(self, x):
        w, ids = super().route(x)
        return (w / w.sum(0, keepdim=True) if float(self.step) > 100 else w), ids


def test_a_branch_on_the_number_is_refused():
    with pytest.raises(moefx.NoMoEBlockFound, match=r"depends on the buffer step: .*test_scalar_reads"):
        moefx.compile(Compared(), example_inputs=(torch.randn(5, D),))


class Counted(Loop):
    def forward(self, x):
        return super().forward(x) * torch.full((D,), float(self.gate.weight[0, 0]) + E)


def test_another_use_of_the_number_names_its_line():
    with pytest.raises(moefx.NoMoEBlockFound, match=r"constant depends on the routing|Python read.*test_scalar_reads"):
        moefx.compile(Counted(), example_inputs=(torch.randn(5, D),))


class Window(Loop):
    """Change the output only in a window of steps."""

    def __init__(self, inside):
        super().__init__()
        self.register_buffer("step", torch.tensor(0))
        self.inside, self.start, self.width = inside, 100, 20

    def forward(self, x):
        self.step.add_(1)
        return super().forward(x) * (0.5 if self.inside(self, self.step.item()) else 1.0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "inside",
    [
        lambda m, step: 50 <= step < 60,
        lambda m, step: step == 7,
        lambda m, step: m.start < step <= m.start + 1,
        lambda m, step: abs(step - 30) < 1,
    ],
)
def test_a_window_of_steps_is_seen(inside):
    with pytest.raises(moefx.NoMoEBlockFound, match=r"step|a constant depends"):
        moefx.compile(Window(inside).double(), example_inputs=(torch.randn(5, D, dtype=torch.float64),))
