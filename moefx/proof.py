"""What is rewritten in a model: found, proven, checked with numbers, and over a mesh the same on all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import nn

from ._plan import Plan
from .capture.autocast import under
from .capture.lifting import lifting
from .ir.binding import device_of
from .numeric import numeric_check
from .survey import Refusal, Survey, first_line, survey

if TYPE_CHECKING:
    from .runtime.topology import ExpertAxis


def agreed(model: nn.Module, example_inputs: Any, plan: Plan, axis: ExpertAxis | None) -> tuple[Survey, dict[int, str]]:
    """What was found in a model, and what the numeric checks say of it. With the expert axis of a mesh all of its ranks
    have found the same, or all raise; collective."""
    if axis is None:
        return _proven(model, example_inputs, plan)
    from .distribute import agree

    try:
        found, verdicts = _proven(model, example_inputs, plan)
    except Exception as error:
        agree(axis, plan, f"none, {type(error).__name__}: {error}")
        raise
    agree(axis, plan, _outline(found))
    return found, verdicts


def _proven(model: nn.Module, example_inputs: Any, plan: Plan) -> tuple[Survey, dict[int, str]]:
    """What was found, and what the numeric checks say; without autocast, for which calls are proven when they come."""
    with lifting(), under(device_of(model).type, None):
        found = survey(model, example_inputs, plan)
        return found, _validate(model, found, plan)


def _validate(model: nn.Module, found: Survey, plan: Plan) -> dict[int, str]:
    """The numeric check of each rewrite on a few tokens. What differs is refused."""
    verdicts = {}
    modules = dict(model.named_modules())
    left = plan.validation_seconds
    for matched in list(found.matched):
        block = modules[matched.names[0]]
        if plan.validation == "symbolic":
            verdicts[id(matched)] = "off (plan.validation)"
            continue
        if any(t.is_meta for t in (*block.parameters(), *block.buffers())):
            verdicts[id(matched)] = "skipped, the weights are on the meta device"
            continue
        if left <= 0 and plan.validation == "auto":
            verdicts[id(matched)] = "skipped, the time budget is spent"
            continue
        start = time.perf_counter()
        ok, verdicts[id(matched)] = numeric_check(block, matched.result, matched.names[0], max(left, 1.0))
        left -= time.perf_counter() - start
        if not ok:
            found.matched.remove(matched)
            found.refused.append(
                Refusal(
                    matched.names[0],
                    verdicts[id(matched)],
                    source=first_line(block),
                    remedy="please report this model",
                )
            )
    return verdicts


def shown(name: str) -> str:
    return repr(name) if name else "'' (the model itself)"


def _outline(found: Survey) -> str:
    """What is rewritten, briefly: ranks that do not agree on it would wait for each other."""
    return (
        "; ".join(
            f"{', '.join(map(shown, m.names))} ({m.result.match.num_experts} experts, {m.result.match.slots} a token)"
            for m in found.matched
        )
        or "none"
    )
