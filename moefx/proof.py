"""What is rewritten in a model: found, proven, checked with numbers, and over a mesh the same on all ranks."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._plan import Plan
from .capture.autocast import under
from .capture.defaults import neutral_device
from .capture.lifting import lifting
from .capture.worker import run_in_worker
from .ir.binding import device_of
from .numeric import not_finite, numeric_check
from .pipeline import with_policy
from .survey import Refusal, Survey, first_line, survey

if TYPE_CHECKING:
    from .planner.decision import Decision
    from .runtime.topology import ExpertAxis


@dataclasses.dataclass(frozen=True)
class Proven:
    """What is rewritten.

    Attributes:
        plan: with nothing left to decide for the planner.
        verdicts: what the numeric checks say, by `id` of what was found.
        axis: of the experts, over a mesh.
        decision: of the planner, where it was asked.
    """

    plan: Plan
    found: Survey
    verdicts: dict[int, str]
    axis: ExpertAxis | None = None
    decision: Decision | None = None


def agreed(model: nn.Module, example_inputs: Any, plan: Plan, mesh: Any = None) -> Proven:
    """What was found in a model, and what the numeric checks say of it. Of a mesh all ranks of the expert axis have
    found the same, or all raise; where the planner is asked, all ranks of the mesh. Collective.

    Raises:
        InvalidPlan: the mesh has no such axis, its ranks do not agree, or its pipeline has no stages.
        UnknownPlatform: see `planner.here`.
    """
    found, decision, axis = None, None, None
    if mesh is not None:
        from .pipeline_stages import check_stages

        check_stages(model, mesh)
    if plan.is_undecided:
        found, decision = _decided(model, example_inputs, plan, mesh)
        plan = decision.plan
    if mesh is None:
        return Proven(plan, *_proven(model, example_inputs, plan, found), None, decision)
    from .distribute import agree, planned_axis

    axis = planned_axis(mesh, plan)
    try:
        found, verdicts = _proven(model, example_inputs, plan, found)
    except Exception as error:
        agree(axis, plan, f"none, {type(error).__name__}: {error}")
        raise
    agree(axis, plan, _outline(found))
    return Proven(plan, found, verdicts, axis, decision)


def _proven(
    model: nn.Module, example_inputs: Any, plan: Plan, found: Survey | None = None
) -> tuple[Survey, dict[int, str]]:
    """What was found, and what the numeric checks say; without autocast, for which calls are proven when they come."""

    def prove() -> tuple[Survey, dict[int, str]]:
        with under(device_of(model).type, None):
            surveyed = found or survey(model, example_inputs, plan)
            return surveyed, _validate(surveyed, plan)

    with lifting(), neutral_device():
        return run_in_worker(prove)


def _decided(model: nn.Module, example_inputs: Any, plan: Plan, mesh: Any) -> tuple[Survey, Decision]:
    """What was found, and what the planner decides; the ranks of a mesh come to the same. Collective."""
    from .planner.auto import decide, facts, platform_of_ranks  # with the planner and its formulas

    if mesh is not None:
        from .distribute import everywhere
    try:
        with lifting(), neutral_device(), under(device_of(model).type, None):
            found = run_in_worker(lambda: survey(model, example_inputs, plan))
        own = facts(model, found, plan, platform_of_ranks(mesh, plan), example_inputs, mesh)
    except Exception as error:
        if mesh is not None:
            everywhere(mesh, f"{type(error).__name__}: {error}")
        raise
    if mesh is None:
        decision = decide({0: own}, 0)
    else:
        world = torch.distributed
        is_whole = mesh.size() == world.get_world_size()
        decision = decide(everywhere(mesh, own), world.get_rank(), mesh, is_whole=is_whole)
    for matched in found.matched:
        matched.result = with_policy(model.get_submodule(matched.names[0]), matched.result, decision.plan)
    return found, decision


def _validate(found: Survey, plan: Plan) -> dict[int, str]:
    """The numeric check of each rewrite on a few tokens. What differs is refused."""
    verdicts = {}
    modules = dict(found.twin.named_modules())
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
        check = numeric_check(block, matched.result, matched.names[0], max(left, 1.0))
        cannot_tell = None if check.ok else not_finite(block)
        if cannot_tell and (finite := _finite(matched.names, modules)):  # a twin with other weights can
            check, cannot_tell = numeric_check(modules[finite], matched.result, finite, max(left, 1.0)), None
        verdicts[id(matched)] = check.text
        left -= time.perf_counter() - start
        if not check.was_possible:
            found.unchecked.append(f"{shown(matched.names[0])}: {check.text}")
        if not check.ok:
            found.matched.remove(matched)
            reason, remedy = cannot_tell or (check.text, "please report this model")
            found.refused += [
                Refusal(name, reason, source=first_line(modules[name]), remedy=remedy) for name in matched.names
            ]
    return verdicts


def _finite(names: list[str], modules: dict[str, nn.Module]) -> str | None:
    """The first block of these whose weights are finite."""
    return next((name for name in names if not not_finite(modules[name])), None)


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
