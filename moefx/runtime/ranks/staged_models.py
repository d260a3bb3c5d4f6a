"""Models that are cut into the stages of a pipeline: how other calls find their stages or refuse them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ...errors import InvalidInput

if TYPE_CHECKING:
    from ...pipelines.stage_state import StageGroup

STAGED = "_moefx_stages"  # the attribute of a Pipeline that holds its `StageGroup`


def find_stages(model: nn.Module) -> StageGroup | None:
    """Return the stages of a Pipeline, None for other models."""
    return vars(model).get(STAGED)


def refuse_pipeline(model: nn.Module, call: str) -> None:
    """Refuse a Pipeline (`InvalidInput`), whose stages are compiled and parallelized already."""
    if STAGED in vars(model):
        raise InvalidInput(
            f"moefx.{call} takes the original model, not a Pipeline, whose stages are compiled and parallelized "
            "already; moefx.explain(pipe.stages[number]) shows a stage"
        )
