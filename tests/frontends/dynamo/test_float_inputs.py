"""Float inputs per token: masks, temperatures, weights."""

from __future__ import annotations

import pytest
import torch

import moefx
from moefx.frontends.dynamo.backend import backend

from .dense_mixture import D, Dense, E


class Given(Dense):
    """Apply `how` to rows, numbers and the router's results, which returns the rows, weights and experts to use."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, m):
        rows, m = x.reshape(-1, D), m.reshape(-1, 1)
        rows, w, ids = self.how(rows, m, *self.routed(rows))
        return self.experts(rows, torch.stack([((ids == e) * w).sum(-1) for e in range(E)], -1)).view_as(x)


HOW = {
    "weights": lambda x, m, w, i: (x, w * m, i),
    "some": lambda x, m, w, i: (x, w * (m > 0.5), i),
    "rows": lambda x, m, w, i: (torch.where(m > 0.5, x, 0), w, i),
    "choices": lambda x, m, w, i: (x, w, torch.where(m > 0.5, i, (i + 1) % E)),
    "of all tokens": lambda x, m, w, i: (x, w * m / m.sum(), i),
    "order": lambda x, m, w, i: (x, w * m.sort(0).values, i),
    "rank": lambda x, m, w, i: (x, w * (m.argsort(0).argsort(0) < 5), i),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(3, 7), (3, 7, 1), (21,)], ids=str)
def test_float_inputs_serve_other_numbers_of_tokens(how, shape):
    torch.manual_seed(0)
    model = Given(HOW[how]).double()
    call = torch.compile(model, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    for batch in (3, 5, 2):
        rows = (batch, 7, D) if len(shape) > 1 else (7 * batch, D)
        x = torch.randn(rows, dtype=torch.float64, requires_grad=True)
        m = torch.rand((*rows[:-1], *shape[2:]), dtype=torch.float64, requires_grad=True)
        out, want = call(x, m), model(x, m)
        torch.testing.assert_close(out, want)
        tensors = [x, m, *model.parameters()]
        grads = [torch.autograd.grad(y.pow(2).sum(), tensors, allow_unused=True) for y in (out, want)]
        torch.testing.assert_close(*grads)
    (block,) = moefx.blocks(call)
    assert not block.fallbacks
