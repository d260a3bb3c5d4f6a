"""Clear compiled graphs, proofs and logged messages before each test."""

from __future__ import annotations

import pytest
import torch

from moefx.frontends.dynamo import backend, registry
from moefx.frontends.fx import proof_cache


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    proof_cache.forget()
    backend._logged.clear()
    registry.forget()
