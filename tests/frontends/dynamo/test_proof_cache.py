"""Proofs and refusals in the cache: see `moefx.frontends.fx.proof_cache`."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from moefx import Plan
from moefx.capture.sizes.size_guards import SizeGuard
from moefx.errors import Cause, Refused
from moefx.frontends.fx import proof_cache
from moefx.frontends.fx.proof_cache import CachedProof, CachedRefusal


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
