"""Tests of comparisons of compiled models, which prove equal blocks once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..proof_memory import share_checks, share_proofs


@pytest.fixture(autouse=True)
def _proofs_are_shared() -> Iterator[None]:
    with share_proofs(), share_checks():
        yield
