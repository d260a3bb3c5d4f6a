"""What the suites read of moefx beyond `compile`: refusals, fallbacks, provider counters."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

import torch.nn as nn

import moefx
from tests.models.case import Case


@dataclasses.dataclass
class Refusal:
    name: str
    reason: str
    source: str


def refusals(explanation: Any) -> list[Refusal]:
    """The refused blocks of an explanation."""
    refused = explanation.refused
    items = (
        list(refused.items()) if isinstance(refused, dict) else [(getattr(r, "name", ""), r) for r in refused]
    )
    return [Refusal(str(n), str(getattr(r, "reason", r)), str(getattr(r, "source", ""))) for n, r in items]


def _select() -> Any:
    return importlib.import_module("moefx.lowering.select")


def reset() -> None:
    with contextlib.suppress(ImportError, AttributeError):
        _select().reset_counters()


def provider_calls() -> dict[tuple[str, str], int]:
    try:
        return dict(_select().counters())
    except (ImportError, AttributeError):
        return {}


def fallbacks(compiled: nn.Module) -> int:
    """Calls of rewritten blocks that ran the original forward instead."""
    total = 0
    for block in moefx.blocks(compiled):
        count = getattr(block, "fallbacks", 0)
        total += count() if callable(count) else len(count) if isinstance(count, (list, dict)) else count
    return total


def check_rewritten_path_ran(compiled: nn.Module, case: Case) -> None:
    calls = {op for (op, _), n in provider_calls().items() if n}
    assert calls, "no provider of a dialect op was called: the rewritten path did not run"
    if case.verdict == "match":
        assert not fallbacks(compiled), f"{fallbacks(compiled)} calls ran the original forward"
