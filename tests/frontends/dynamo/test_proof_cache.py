"""Proofs and refusals in the cache: see `moefx.frontends.fx.proof_cache`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import moefx
from moefx import Plan
from moefx.capture.sizes.size_guards import SizeGuard
from moefx.errors import Cause, Refused
from moefx.frontends.fx import proof_cache
from moefx.frontends.fx.proof_cache import CachedProof, CachedRefusal

from ...blocks import D, E, H, K, Stacked


def test_each_call_raises_an_exception_of_its_own():
    """A cached exception would keep the frames of its first raise alive, and the graph and weights in them."""
    refusal = Refused("why", culprits=("w",), source="a.py:3", remedy="what to do", cause=Cause.NOT_ROUTED)
    cached = CachedRefusal.copy_from(refusal)
    errors = [cached.build_error() for _ in range(2)]
    assert errors[0] is not errors[1] and refusal not in errors
    for error in errors:
        with pytest.raises(Refused) as raised:
            raise error
        assert str(raised.value) == str(refusal) and raised.value.cause is Cause.NOT_ROUTED


def test_a_refusal_of_some_sizes_concerns_these_only():
    refusal = Refused("the proof does not hold")
    assert CachedRefusal.copy_from(refusal).concerns({"s0": 3})
    of_sizes = CachedRefusal.copy_from(refusal, {"s0": 3})
    assert of_sizes.concerns({"s0": 3}) and not of_sizes.concerns({"s0": 4})


class Region(NamedTuple):
    """All that the cache reads of an `ExtractedRegion`."""

    key: str
    dims: dict[str, int]
    device: str = "cpu"
    autocast: tuple = ()


@pytest.fixture
def prove_for(monkeypatch):
    """Return a function that asks the cache for the proof of one region at some number of tokens.

    The proof of n tokens holds from `n - n % 10` tokens on; a multiple of 10 is refused by a guard.
    """
    tried = []

    def prove(analysis, region, plan):
        n = region.dims["s0"]
        tried.append(n)
        guard = SizeGuard("s0", "gt", str(n - n % 10), True)
        return CachedProof(None, None, (guard,), frozenset())

    monkeypatch.setattr(proof_cache, "_prove", prove)

    def prove_for(n):
        return proof_cache.prove_region(None, Region("key", {"s0": n}), Plan())

    prove_for.tried = tried
    return prove_for


def test_a_proof_serves_all_sizes_that_its_guards_admit(prove_for):
    many = prove_for(25)
    few = prove_for(12)
    assert prove_for.tried == [25, 12] and few is not many
    assert prove_for(27) is many and prove_for(14) is few and prove_for.tried == [25, 12]


def test_sizes_at_which_their_own_proof_does_not_hold_are_refused_alone(prove_for):
    for _ in range(2):
        with pytest.raises(Refused, match="the proof does not hold for the graph's own sizes: it requires s0 > 20"):
            prove_for(20)
    assert prove_for(21).holds({"s0": 22}) and prove_for.tried == [20, 21]


def test_outcomes_of_one_region_are_bounded(prove_for):
    sizes = range(10 * proof_cache._MAX_OUTCOMES + 11, 10, -10)
    proofs = [prove_for(n) for n in sizes]
    (outcomes,) = proof_cache._proofs.values()
    assert len(sizes) == proof_cache._MAX_OUTCOMES + 1 and list(outcomes) == proofs[1:]


class Rotated(Stacked):
    """Rotates the experts by a number in a long buffer."""

    def __init__(self):
        super().__init__(lambda block, x: (x @ block.up).relu() @ block.down, up=(D, H), down=(H, D))
        self.register_buffer("shifts", torch.zeros(70_000, dtype=torch.int64))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K, -1)
        ids = (ids + self.shifts[0]) % E
        dense = self.body(self, x.expand(E, *x.shape)).transpose(0, 1)
        return (dense.gather(1, ids[..., None].expand(*ids.shape, D)) * w[..., None]).sum(1)


def test_a_proof_counts_for_the_integers_that_a_long_buffer_had():
    """The identity of a tensor says nothing of its values, and a new tensor may have that of one that is gone."""
    block, x, before = Rotated(), torch.randn(9, D), proof_cache.num_proofs_tried
    for shift, num_proofs in ((0, 1), (0, 1), (3, 2)):
        block.shifts.fill_(shift)
        graph = moefx.rewrite_graph(torch.export.export(block, (x,)).module(), (x,), Plan(validation="symbolic"))
        assert proof_cache.num_proofs_tried == before + num_proofs
        assert len(moefx.blocks(graph)) == 1
        torch.testing.assert_close(graph(x), block(x))
