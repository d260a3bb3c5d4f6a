"""Recurrences in the router or outside the experts remain unchanged, for any number of steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx

from ..blocks import D, Loop, Mlp
from ..models.case import run_and_differentiate


def draw_sequences(batch, steps):
    return torch.randn(batch, steps, D, dtype=torch.float64)


class RoutedByStates(Loop):
    """Route by the states of a recurrence, with its inputs as the experts' inputs."""

    def __init__(self, recurrence):
        super().__init__(Mlp)
        self.recurrence = recurrence

    def forward(self, x):
        states, _ = self.recurrence(x)
        return self.mixed(x.flatten(0, 1), *self.route(states.flatten(0, 1))).view_as(x)


class RoutedByLastState(Loop):
    """Route each sequence by its last state."""

    def __init__(self):
        super().__init__(Mlp)
        self.recurrence = nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        _, last = self.recurrence(x)
        w, ids = self.route(last[-1])
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b, k = torch.where(ids == e)
            out = out.index_add(0, b, expert(x[b]) * w[b, k, None, None])
        return out


CASES = {
    "RNN": lambda: RoutedByStates(nn.RNN(D, D, num_layers=2, nonlinearity="relu", batch_first=True)),
    "projected LSTM": lambda: RoutedByStates(nn.LSTM(D, 2 * D, proj_size=D, batch_first=True)),
    "both ways": lambda: RoutedByStates(nn.GRU(D, D // 2, bidirectional=True)),
    "last state": RoutedByLastState,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_recurrences_are_not_unrolled(case):
    torch.manual_seed(0)
    model = CASES[case]().double()
    compiled = moefx.compile(model, example_inputs=(draw_sequences(3, 5),))
    assert "recurrence" in str(moefx.graph(compiled, ""))
    for batch, steps in ((1, 7), (4, 1), (3, 30)):
        x = draw_sequences(batch, steps)
        torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))
    assert moefx.blocks(compiled)[0].fallbacks == 0


def test_dropout_between_layers_draws_the_same():
    torch.manual_seed(0)
    model = RoutedByStates(nn.LSTM(D, D, num_layers=2, dropout=0.5, batch_first=True)).double()
    x = draw_sequences(3, 6)
    compiled = moefx.compile(model, example_inputs=(x,))
    results = []
    for m in (compiled, model):
        torch.manual_seed(1)
        results.append((run_and_differentiate(m, m, x), torch.rand(1)))
    torch.testing.assert_close(*results)


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(D, D)

    def forward(self, x):
        h, states = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            h = self.cell(step, h)
            states.append(h)
        return torch.stack(states, 1), h


class OwnLoop(RoutedByStates):
    """Loop over the steps in the block itself."""

    def forward(self, x):
        states, _ = Steps.forward(self.recurrence, x)
        return self.mixed(x.flatten(0, 1), *self.route(states.flatten(0, 1))).view_as(x)


def test_a_loop_over_steps():
    x = draw_sequences(3, 5)
    with pytest.raises(moefx.NoMoEBlockFound, match=r"the routing or on sizes.*put it into a submodule"):
        moefx.compile(OwnLoop(Steps()).double(), example_inputs=(x,))
    model = RoutedByStates(Steps()).double()
    compiled = moefx.compile(model, example_inputs=(x,))
    for steps in (2, 9):
        x = draw_sequences(2, steps)
        torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))


class Scaled(Loop):
    """Scale by parameters in a container."""

    def __init__(self, hold):
        super().__init__(Mlp)
        self.before, self.after = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.scales = hold([self.before, self.after])

    def forward(self, x):
        return super().forward(x * self.scales[0]) * self.scales[1]


def test_parameters_in_a_list():
    x = torch.randn(9, D, dtype=torch.float64)
    with pytest.raises(moefx.NoMoEBlockFound, match=r"its parameter before by way of a list.*ParameterList"):
        moefx.compile(Scaled(list).double(), example_inputs=(x,))
    model = Scaled(nn.ParameterList).double()
    compiled = moefx.compile(model, example_inputs=(x,))
    torch.testing.assert_close(*(run_and_differentiate(m, m, x) for m in (compiled, model)))
