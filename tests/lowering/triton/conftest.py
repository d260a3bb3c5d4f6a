"""Run the kernels of these tests on a GPU if there is one, else in Triton's interpreter on the CPU."""

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
def same_numbers():
    """Some values lie where a clamp or a rounding decides: the same ones in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_tapes():
    """An earlier test's launches were recorded, perhaps at the same addresses, for other configurations."""
    from moefx.lowering.triton import launch_replay

    launch_replay._tapes.clear()
