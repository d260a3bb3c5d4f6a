"""Run the kernels of these tests on a GPU if the machine has one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

if not torch.cuda.is_available():
    from .interpreter import mend

    mend()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed_numbers():
    """Seed each test equally: some values are at a clamp or between two roundings."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def clear_tapes():
    """Remove launches recorded by earlier tests, for the same addresses but other configurations."""
    from moefx.lowering.triton import launch_replay

    launch_replay._tapes.clear()
