"""`bench stages`: the stages of a step and the parts of a forward."""

from __future__ import annotations

import itertools

import pytest
import torch

from moefx.bench import stages
from moefx.bench.mlp_pieces import MlpPieces
from moefx.bench.shapes import Shape

SMALL = Shape("small", T=24, d=32, h=16, E=4, K=2)


def test_the_stages_of_a_step(device, monkeypatch):
    """Run all stages: their GEMMs, bytes and results are those of a step."""

    def one(work):
        work()
        return 1.0

    monkeypatch.setattr(stages, "measure_milliseconds", one)
    monkeypatch.setattr(stages, "settle_clock", one)
    case = MlpPieces(SMALL, device=device)
    rows = {row["stage"]: row for row in stages.measure_stages(case)}
    assert list(rows)[:4] == ["routing", "up", "down", "combine"]
    assert sum(row["tflops"] for row in rows.values()) * 1e9 == pytest.approx(9 * SMALL.flops)
    weights = 2 * SMALL.E * SMALL.d * SMALL.h  # bytes of one matrix of each expert
    assert 9 * weights < sum(row["gbs"] for row in rows.values()) * 1e6 < 9 * weights + 2**19
    tokens, offsets = case.token_ids.long(), case.offsets.tolist()
    for e, (start, stop) in enumerate(itertools.pairwise(offsets)):
        hidden = case.x[tokens[start:stop]].float() @ case.w1[e].float().t()
        gate, up = case.hidden[start:stop].float().chunk(2, -1)
        torch.testing.assert_close(torch.cat([gate, up], 1), hidden, rtol=0.02, atol=0.02)
        act = case.act[start:stop].float()
        torch.testing.assert_close(act, torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.02)
        grad = case.grad_hidden[start:stop].float() @ case.w1[e].float()  # `grad_x` wrote last
        torch.testing.assert_close(case.out[start:stop].float(), grad, rtol=0.05, atol=0.05)


def test_the_parts_of_a_forward(device):
    """Compare both systems on equal inputs: routing arrays, rows, and the weighted sum of rows."""
    case = MlpPieces(SMALL, device=device)
    parts = case.list_parts()
    assert list(parts) == ["gating", "dispatch", "experts", "combine"]
    scores, ids = parts["gating"]["moefx"]()
    assert scores.shape == ids.shape == (SMALL.T, SMALL.K)
    inverse, ends, rows = parts["dispatch"]["torch"]()
    (pft,) = parts["dispatch"]["moefx"]()
    assert torch.equal(inverse, pft[3].reshape(-1)) and torch.equal(ends, pft[2][1:])
    assert torch.equal(rows, case.x[pft[0].long()])
    expected = parts["experts"]["torch"]()
    parts["experts"]["moefx"]()
    torch.testing.assert_close(case.out, expected, rtol=0.05, atol=0.05)
    expected = parts["combine"]["torch"]()
    torch.testing.assert_close(parts["combine"]["moefx"]()[0], expected, rtol=0.05, atol=0.05)
