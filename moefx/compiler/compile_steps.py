"""The steps of a compilation, in one table: from the user's model to a program.

`COMPILE_STEPS` is the only place that knows the order of passes. The lists of passes before and after the numeric check
follow from it, and the names that `Plan(disable=...)` takes. docs/architecture.md shows the same table.

`driver.compile_pipeline` runs the steps on a model, `block_compiler` on one block. A step without `run` is no pass: it
makes the first graph, or only reads a graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .._plan import Plan
from ..ir.graphs.block_graph import BlockGraph
from ..passes.capacity_limit import limit_capacity
from ..passes.checkpoint import set_checkpoint_policy
from ..passes.collectives import insert_collectives
from ..passes.fuse import fuse
from ..passes.overlap import overlap_exchanges
from ..passes.pass_manager import Pass
from ..passes.ssmb import shard_sequence

if TYPE_CHECKING:
    from ..runtime.ranks.expert_layout import ExpertLayout


@dataclasses.dataclass(frozen=True)
class PassContext:
    """The block that passes run on, its plan, and the layout of its experts; None without a mesh."""

    block: nn.Module
    plan: Plan
    expert_layout: ExpertLayout | None = None


@dataclasses.dataclass(frozen=True)
class Condition:
    """When a step runs: in words, and as a test."""

    words: str
    holds: Callable[[PassContext], bool] = lambda context: True


ALWAYS = Condition("always")
WITH_FUSION = Condition("unless `Plan(fuse=False)`", lambda context: context.plan.fuse)
BY_POLICY = Condition("as `Plan(validation=...)` says")  # `check_policy` decides
WITH_CAPACITY = Condition("with `Plan(capacity_factor=...)`", lambda context: context.plan.capacity_factor is not None)
OVER_MESH = Condition("over a mesh", lambda context: context.expert_layout is not None)
WITH_SEQUENCE_AXIS = Condition(
    "over a mesh, with `Plan(sequence_axis=...)`",
    lambda context: context.expert_layout is not None and context.expert_layout.sequence is not None,
)


def _bind_sequence(context: PassContext) -> dict[str, Any]:
    assert context.expert_layout is not None
    return {"sequence": context.expert_layout.sequence}


def _bind_layout(context: PassContext) -> dict[str, Any]:
    assert context.expert_layout is not None
    return {
        "placement": context.expert_layout.placement,
        "routes": context.expert_layout.routes,
        "stacked": context.expert_layout.parameters.stacked,
        "trained": frozenset(name for name, p in context.block.named_parameters() if p.requires_grad),
        "sampler_number": context.expert_layout.number,
    }


@dataclasses.dataclass(frozen=True)
class CompileStep:
    """A step of a compilation.

    Attributes:
        name: of a pass: its name in histories, printed graphs and `Plan.disable`.
        code: the file that performs the step.
        level: the level of the graph that the step makes (`ir.graphs.graph_levels`); "" if it makes none.
        run: the pass; None for a step that is no pass.
        when: the condition under which the step runs.
        bind: makes further arguments of the pass.
        is_optional: whether `Plan.disable` may name the step.
    """

    name: str
    code: str
    level: str = ""
    run: Callable[..., BlockGraph] | None = None
    when: Condition = ALWAYS
    bind: Callable[[PassContext], dict[str, Any]] | None = None
    is_optional: bool = False

    def make_pass(self, context: PassContext) -> Pass:
        """Return the pass with its further arguments."""
        assert self.run is not None
        return self.run if self.bind is None else functools.partial(self.run, **self.bind(context))


REWRITE, CHECKPOINT, NUMERIC_CHECK = "rewrite_block", "checkpoint", "numeric check"
COMPILE_STEPS = (
    CompileStep("survey", "compiler/survey.py"),
    CompileStep("capture", "capture/concolic.py", "captured"),
    CompileStep("match", "matching/prove.py"),
    CompileStep(REWRITE, "passes/rewrite.py", "dialect"),
    CompileStep("fuse", "passes/fuse.py", "fused", fuse, WITH_FUSION, is_optional=True),
    CompileStep(CHECKPOINT, "passes/checkpoint.py", "fused", set_checkpoint_policy, is_optional=True),
    CompileStep(NUMERIC_CHECK, "compiler/numeric_check.py", when=BY_POLICY),
    CompileStep("limit", "passes/capacity_limit.py", "fused", limit_capacity, WITH_CAPACITY),
    CompileStep("ssmb", "passes/ssmb.py", "distributed", shard_sequence, WITH_SEQUENCE_AXIS, _bind_sequence),
    CompileStep("collectives", "passes/collectives.py", "distributed", insert_collectives, OVER_MESH, _bind_layout),
    CompileStep("overlap", "passes/overlap.py", "distributed", overlap_exchanges, OVER_MESH, is_optional=True),
    CompileStep("lowering", "ir/op_providers.py"),
)


def list_passes(context: PassContext, first: str, until: str = "") -> list[Pass]:
    """List the passes of the steps from `first` on, in order.

    Args:
        until: the first step that does not count; none by default.
    """
    steps = COMPILE_STEPS[_find_step(first) : _find_step(until) if until else None]
    return [step.make_pass(context) for step in steps if step.run is not None and step.when.holds(context)]


def find_level_after(name: str) -> str:
    """Return the level of the graph that exists after a step."""
    return next(step.level for step in reversed(COMPILE_STEPS[: _find_step(name) + 1]) if step.level)


def list_optional_passes() -> list[str]:
    """List the names that `Plan.disable` may contain."""
    return [step.name for step in COMPILE_STEPS if step.is_optional]


def _find_step(name: str) -> int:
    """Return the position of a step in the table."""
    return next(i for i, step in enumerate(COMPILE_STEPS) if step.name == name)


__all__ = ["COMPILE_STEPS", "CompileStep", "PassContext", "find_level_after", "list_optional_passes", "list_passes"]
