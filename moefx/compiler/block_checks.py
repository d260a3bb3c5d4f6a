"""Check the rewrites of a survey numerically."""

from __future__ import annotations

import dataclasses

from .._plan import Plan
from ..capture.environment.worker_thread import run_proof
from ..errors import Refused
from ..ir.argument_binding import find_device
from ..util.module_names import quote_name
from ..util.user_code import forward_line
from .check_policy import CheckPolicy
from .survey_result import Refusal, Survey


def check_blocks(survey: Survey, plan: Plan) -> Survey:
    """Check each rewrite numerically on a few tokens, as long as `plan.validation_seconds` last.

    Autocast is off: calls under autocast are proven when they occur.

    Returns:
        The survey with the verdicts, and with the rewrites that differ among the refused.
    """
    return run_proof(lambda: _check_blocks(survey, plan), find_device(survey.twin).type)


def _check_blocks(survey: Survey, plan: Plan) -> Survey:
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
