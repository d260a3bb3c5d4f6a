"""Prove the blocks of a model in one process, and check each rewrite numerically."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from .._plan import Plan
from ..capture.default_device import neutral_device
from ..capture.device_autocast import use_device_autocast
from ..capture.worker_thread import run_in_worker
from ..ir.argument_binding import find_device
from ..util.compile_lock import compile_lock
from ..util.progress import announce
from ..util.user_code import forward_line
from .numeric_check import check_numerically, find_nonfinite
from .survey import survey_model
from .survey_result import Refusal, Survey


def survey_and_verify(model: nn.Module, example_inputs: Any, plan: Plan, survey: Survey | None = None) -> Survey:
    """Prove the blocks of a model and check each rewrite numerically. Autocast is off: calls under autocast are proven
    when they occur.

    Args:
        survey: the survey, if it exists already.

    Returns:
        The survey without the rewrites that the check refuses.
    """

    def prove() -> Survey:
        with use_device_autocast(find_device(model).type, None):
            surveyed = survey or survey_model(model, example_inputs, plan)
            _check_blocks(surveyed, plan)
            return surveyed

    with compile_lock(), neutral_device():
        return run_in_worker(prove)


def _check_blocks(survey: Survey, plan: Plan) -> None:
    """Run the numeric check of each rewrite on a few tokens, and refuse rewrites that differ."""
    modules = dict(survey.twin.named_modules())
    seconds_left = plan.validation_seconds
    for matched in list(survey.matched):
        block = modules[matched.names[0]]
        if plan.validation == "symbolic":
            matched.verdict = "off (plan.validation)"
            continue
        if any(t.is_meta for t in (*block.parameters(), *block.buffers())):
            matched.verdict = "skipped, the weights are on the meta device"
            continue
        if seconds_left <= 0 and plan.validation == "auto":
            matched.verdict = "skipped, the time budget is spent"
            continue
        announce(f"running {matched.names[0] or type(block).__name__} on a few tokens")
        start = time.perf_counter()
        check = check_numerically(block, matched.result, matched.names[0], max(seconds_left, 1.0))
        cannot_tell = None if check.ok else find_nonfinite(block)
        # An equal block with finite weights decides.
        if cannot_tell and (finite := _first_finite(matched.names, modules)):
            cannot_tell = None
            check = check_numerically(modules[finite], matched.result, finite, max(seconds_left, 1.0))
        matched.verdict = check.text
        seconds_left -= time.perf_counter() - start
        if not check.was_possible:
            survey.unchecked.append(f"{quote_name(matched.names[0])}: {check.text}")
        if not check.ok:
            survey.matched.remove(matched)
            reason, remedy = cannot_tell or (check.text, "please report this model")
            survey.refused += [
                Refusal(name, reason, source=forward_line(modules[name]), remedy=remedy) for name in matched.names
            ]


def _first_finite(names: list[str], modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the first block with finite weights, or None."""
    return next((name for name in names if not find_nonfinite(modules[name])), None)


def quote_name(name: str) -> str:
    """Quote the name of a module for a message."""
    return repr(name) if name else "'' (the model itself)"
