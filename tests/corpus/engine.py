"""Internals of moefx that the suites read: refusals, fallbacks, provider counters."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

import torch.nn as nn

from moefx.runtime.block_forward import find_rewritten_blocks
from tests.models.case import Case


@dataclasses.dataclass
class Refusal:
    name: str
    reason: str
    source: str


def list_refusals(explanation: Any) -> list[Refusal]:
    """List the refused blocks of an explanation."""
    refused = explanation.refused
    items = list(refused.items()) if isinstance(refused, dict) else [(getattr(r, "name", ""), r) for r in refused]
    return [Refusal(str(n), str(getattr(r, "reason", r)), str(getattr(r, "source", ""))) for n, r in items]


def _find_providers() -> Any:
    return importlib.import_module("moefx.ir.op_providers")


def reset() -> None:
    with contextlib.suppress(ImportError, AttributeError):
        _find_providers().reset_counters()


def count_provider_calls() -> dict[tuple[str, str], int]:
    try:
        return dict(_find_providers().counters())
    except (ImportError, AttributeError):
        return {}


def count_fallbacks(compiled: nn.Module) -> int:
    """Return the number of calls of rewritten blocks that ran the original forward."""
    return sum(forward.counts.original for forward in find_rewritten_blocks(compiled).values())


def check_rewritten_path_ran(compiled: nn.Module, case: Case) -> None:
    """Check that every rewritten block ran its program, called a provider, and never ran the original forward."""
    assert any(count_provider_calls().values()), "no provider of a dialect op was called"
    for name, forward in find_rewritten_blocks(compiled).items():
        assert forward.counts.rewritten, f"block {name!r} never ran its program"
        if case.verdict == "match":
            assert not forward.counts.original, (
                f"{forward.counts.original} calls of {name!r} ran the original forward; "
                f"last failed guard: {forward.counts.last_failed_guard or 'none'}"
            )
