"""Blocks whose calls depend on the previous call are refused."""

from __future__ import annotations

import pytest
import torch

import moefx

from ...blocks import D, Loop


class KeepsChoice(Loop):
    """Store the selected experts in a buffer or attribute, and reuse them for the same number of tokens."""

    def __init__(self, is_buffer):
        super().__init__()
        last = torch.zeros(0, self.k, dtype=torch.long)
        if is_buffer:
            self.register_buffer("last", last, persistent=False)
        else:
            self.last = last

    def route(self, x):
        scores = self.gate(x).softmax(-1)
        if self.last.size(0) == len(x):
            ids = self.last
        else:
            ids = scores.topk(self.k, -1).indices
            self.last = ids.detach()
        return scores.gather(-1, ids), ids


class LogsChoice(KeepsChoice):
    def route(self, x):
        weights, ids = Loop.route(self, x)
        self.last = ids.detach()
        return weights, ids


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_choice_that_the_next_call_uses_again_is_refused(is_buffer):
    model, x = KeepsChoice(is_buffer), torch.randn(9, D)
    (refused,) = moefx.explain(model, (x,)).refused
    assert "reads an attribute that its previous call has set" in refused.reason
    assert model.last.shape == (0, model.k)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_choice_that_is_only_logged_is_rewritten(is_buffer):
    torch.manual_seed(0)
    model = LogsChoice(is_buffer)
    compiled = moefx.compile(model, (torch.randn(9, D),))
    for tokens in (9, 9, 5, 20):
        x = torch.randn(tokens, D)
        torch.testing.assert_close(compiled(x), model(x))
        assert torch.equal(compiled.last, model.last)
    assert moefx.blocks(compiled)[0].fallbacks == 0
