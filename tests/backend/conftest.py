"""Each test begins with nothing compiled, nothing proven, nothing said."""

from __future__ import annotations

import pytest
import torch

from moefx import _kept, backend
from moefx.graphs import matching


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    matching.forget()
    backend._told.clear()
    _kept.forget()
