"""Turn off the numeric check, which could hide a wrong proof: these tests compare outputs themselves."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

import moefx.compiler.check_policy
from moefx.compiler.numeric_check import NumericCheck, Outcome


@pytest.fixture(autouse=True)
def _proof_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip the numeric check, except in exhaustive tests."""
    if request.node.get_closest_marker("exhaustive"):
        yield
        return
    passed = NumericCheck(Outcome.AGREES, "not run by this test")
    with mock.patch.object(moefx.compiler.check_policy, "check_numerically", lambda *_: passed):
        yield
