"""Tests of the planner's results for models, which prove equal blocks once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moefx.planner.ranking_page import render
from moefx.ranking import Ranking, plan

from ..pace import limit_time
from ..proof_memory import share_checks, share_proofs


@pytest.fixture(autouse=True)
def _proofs_are_shared() -> Iterator[None]:
    with share_proofs(), share_checks():
        yield


@pytest.fixture(scope="session")
def large() -> tuple[Ranking, str, list[str]]:
    """Return the ranking, the page and the printed text of a model of 671 B on 1024 GPUs."""
    messages: list[str] = []
    ranking = plan("deepseek-v3", "frontier", 1024)
    with limit_time(15):
        text = render(ranking, messages.append)
    return ranking, text, messages
