"""Limits above the captured loads: crowded captures that exceed them, and guards for the others."""

from __future__ import annotations

import pytest
import torch

import moefx
from moefx.matching.probes import unreached_limits

from ... import blocks
from ..small_proofs import lift, new_proof


@pytest.mark.parametrize(
    "limits, guards",
    [
        ([], []),
        ([10, 20, 30, 40], []),
        ([10, 20, 30, 40, 50], ["S*2 <= 50"]),
    ],
)
def test_the_guard_has_the_lowest_limit_that_the_last_crowd_left(monkeypatch, limits, guards):
    remaining, crowds, evened = iter([*limits, None]), [], []
    monkeypatch.setattr(unreached_limits, "_find_lowest_unreached", lambda proof: next(remaining))
    monkeypatch.setattr(
        unreached_limits, "_add_crowd_beyond", lambda proof, limit, attempt: crowds.append(limit) or True
    )
    monkeypatch.setattr(unreached_limits, "_overflow_every_expert", evened.append)
    proof = new_proof()
    proof.evidence.add(lift(proof))
    unreached_limits.overflow_limits(proof)
    assert [str(guard) for guard in proof.guards] == guards
    assert crowds == limits[:4] and evened == [proof] * (not guards)


def test_a_crowd_that_cannot_be_captured_leaves_a_guard(monkeypatch):
    monkeypatch.setattr(unreached_limits, "_find_lowest_unreached", lambda proof: 64)
    monkeypatch.setattr(unreached_limits, "MAX_CROWD_TOKENS", 10)
    proof = new_proof()
    proof.evidence.add(lift(proof))
    unreached_limits.overflow_limits(proof)
    assert [str(guard) for guard in proof.guards] == ["S*2 <= 64"] and len(proof.evidence.forms) == 1


def keep_uncrowded(block, x):
    w, ids = block.route(x)
    kept = (torch.bincount(ids.flatten(), minlength=blocks.E) <= 20)[ids]
    return block.mixed(x, w * kept, ids), kept


def mix_uncrowded(block, x):
    return keep_uncrowded(block, x)[0]


def return_rows_if_all_are_crowded(block, x):
    out, kept = keep_uncrowded(block, x)
    return torch.where(kept.any(), out, x)


@pytest.mark.parametrize("forward", [mix_uncrowded, return_rows_if_all_are_crowded])
def test_a_limit_that_all_experts_exceed_drops_everything(forward):
    torch.manual_seed(0)
    model = blocks.Block(forward).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(12, blocks.D).double(),))
    for tokens in (5, 60, 400):
        x = torch.randn(tokens, blocks.D).double()
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
