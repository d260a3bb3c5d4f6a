"""Prove the blocks of a model in one process, and check each rewrite numerically."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from torch import nn

from .._plan import Plan
from ..capture.worker_thread import run_proof
from ..ir.argument_binding import find_device
from ..util.progress import announce
from ..util.user_code import forward_line
from .numeric_check import NumericCheck, check_numerically, find_nonfinite
from .survey import survey_model
from .survey_result import MatchedBlock, Refusal, Survey


def survey_and_check(model: nn.Module, example_inputs: Any, plan: Plan, survey: Survey | None = None) -> Survey:
    """Prove the blocks of a model and check each rewrite numerically. Autocast is off: calls under autocast are proven
    when they occur.

    Args:
        survey: the survey, if it exists already.

    Returns:
        The survey without the rewrites that the check refuses.
    """
    return run_proof(
        lambda: _check_blocks(survey or survey_model(model, example_inputs, plan), plan), find_device(model).type
    )


def _check_blocks(survey: Survey, plan: Plan) -> Survey:
    """Check each rewrite numerically on a few tokens, as long as `plan.validation_seconds` last.

    Returns:
        The survey with the verdicts, and with the rewrites that differ among the refused.
    """
    modules = dict(survey.twin.named_modules())
    seconds_left = plan.validation_seconds
    matched, refused, unchecked = [], [*survey.refused], [*survey.unchecked]
    for unchecked_block in survey.matched:
        if reason := _find_reason_to_skip(modules[unchecked_block.names[0]], plan, seconds_left):
            matched.append(dataclasses.replace(unchecked_block, verdict=reason))
            continue
        start = time.perf_counter()
        check, cannot_tell = _check_block(unchecked_block, modules, max(seconds_left, 1.0))
        seconds_left -= time.perf_counter() - start
        if not check.was_possible:
            unchecked.append(f"{quote_name(unchecked_block.names[0])}: {check.text}")
        if check.ok:
            matched.append(dataclasses.replace(unchecked_block, verdict=check.text))
            continue
        reason, remedy = cannot_tell or (check.text, "please report this model")
        refused += [
            Refusal(name, reason, source=forward_line(modules[name]), remedy=remedy) for name in unchecked_block.names
        ]
    return dataclasses.replace(survey, matched=tuple(matched), refused=tuple(refused), unchecked=tuple(unchecked))


def _find_reason_to_skip(block: nn.Module, plan: Plan, seconds_left: float) -> str:
    """Return why a block is not checked numerically, or ""."""
    if plan.validation == "symbolic":
        return "off (plan.validation)"
    if any(t.is_meta for t in (*block.parameters(), *block.buffers())):
        return "skipped, the weights are on the meta device"
    if seconds_left <= 0 and plan.validation == "auto":
        return "skipped, the time budget is spent"
    return ""


def _check_block(
    matched: MatchedBlock, modules: dict[str, nn.Module], seconds: float
) -> tuple[NumericCheck, tuple[str, str] | None]:
    """Check one rewrite numerically, on the first of its modules, or on the first with finite weights if that fails.

    Returns:
        The check, and the reason and remedy if no module of a failed check has finite weights.
    """
    name = matched.names[0]
    announce(f"running {name or type(modules[name]).__name__} on a few tokens")
    check = check_numerically(modules[name], matched.result, name, seconds)
    cannot_tell = None if check.ok else find_nonfinite(modules[name])
    if cannot_tell is None:
        return check, None
    if (finite := _first_finite(matched.names, modules)) is None:
        return check, cannot_tell
    return check_numerically(modules[finite], matched.result, finite, seconds), None


def _first_finite(names: Iterable[str], modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the first block with finite weights, or None."""
    return next((name for name in names if not find_nonfinite(modules[name])), None)


def quote_name(name: str) -> str:
    """Quote the name of a module for a message."""
    return repr(name) if name else "'' (the model itself)"
