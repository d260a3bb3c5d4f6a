"""Refusals in the cache of proofs: see `moefx.frontends.fx.proof_cache`."""

from __future__ import annotations

import pytest

from moefx.errors import Cause, Refused
from moefx.frontends.fx.proof_cache import CachedRefusal


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
