"""Models that are cut into the stages of a pipeline: how other calls recognize and refuse them."""

from __future__ import annotations

from torch import nn

from ...errors import InvalidInput

STAGED = "_moefx_stages"  # the attribute of a Pipeline that holds its `StageGroup`


def refuse_pipeline(model: nn.Module, call: str) -> None:
    """Refuse a Pipeline (`InvalidInput`), whose stages are compiled and parallelized already."""
    if STAGED in vars(model):
        raise InvalidInput(
            f"moefx.{call} takes the original model, not a Pipeline, whose stages are compiled and parallelized "
            "already; moefx.explain(pipe.stages[number]) shows a stage"
        )
