"""Prove the blocks of a model in one process, and check each rewrite numerically."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from .._plan import Plan
from ..capture.environment.worker_thread import run_proof
from ..errors import Refused
from ..ir.argument_binding import find_device
from ..util.module_names import quote_name
from ..util.user_code import forward_line
from .check_policy import CheckPolicy
from .survey import survey_model
from .survey_result import Refusal, Survey


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
    policy = CheckPolicy(plan)
    checked_blocks, refusals, unchecked = [], [*survey.refused], [*survey.unchecked]
    for block in survey.matched:
        blocks = {name: modules[name] for name in block.names}
        try:
            verdict = policy.check(lambda blocks=blocks: blocks, block.result)
        except Refused as why:
            refusals += [
                Refusal(name, why.reason, source=forward_line(module), remedy=why.remedy)
                for name, module in blocks.items()
            ]
            continue
        checked_blocks.append(dataclasses.replace(block, verdict=verdict.text))
        if verdict.could_not_run:
            unchecked.append(f"{quote_name(block.names[0])}: {verdict.text}")
    return dataclasses.replace(
        survey, matched=tuple(checked_blocks), refused=tuple(refusals), unchecked=tuple(unchecked)
    )
