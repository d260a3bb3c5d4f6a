"""Blocks must not use objects whose state guards cannot compare."""

from __future__ import annotations

import io
import itertools

import pytest
import torch

import moefx

from ..blocks import D, Loop, Mlp

_OPAQUE = {
    "count": (itertools.count, lambda clock: next(clock) > 30),
    "bytearray": (bytearray, lambda kept: kept.append(1) or len(kept) > 30),
    "StringIO": (io.StringIO, lambda log: log.write("x") and len(log.getvalue()) > 30),
}


class Keeps(Loop):
    def __init__(self, make, ask):
        super().__init__(Mlp)
        self.kept, self.ask = make(), ask

    def forward(self, x):
        out = super().forward(x)
        return out * 0.5 if self.ask(self.kept) else out


@pytest.mark.parametrize("kind", _OPAQUE)
def test_state_that_cannot_be_compared_is_refused(kind):
    with pytest.raises(moefx.NoMoEBlockFound, match=rf"uses kept, an? {kind}, whose state cannot be compared"):
        moefx.compile(Keeps(*_OPAQUE[kind]), example_inputs=(torch.randn(9, D),))


def test_the_iterator_of_a_refused_block_is_unchanged():
    model = Keeps(*_OPAQUE["count"])
    moefx.compile(model, example_inputs=(torch.randn(9, D),), strict=False)
    assert next(model.kept) == 0
