"""`weights_later`: the point of a graph at which the backward computes the gradients of the experts' matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .op_definition import op


@op("weights_later(Tensor[] up, Tensor[] down) -> Tensor", contract="up[*], down[*] -> later[_]")
def weights_later(up: list[Tensor], down: list[Tensor]) -> Tensor:
    """Mark where the backward computes the gradients of an `expert_mlp`'s matrices, as if they were used here.

    No other node waits for these gradients. Autograd runs in reverse order of the forward: it computes them after the
    nodes between this op and the `expert_mlp`, and before the nodes ahead of this op.

    Returns:
        An empty tensor for `expert_mlp(later=...)`.
    """
    return up[0].new_empty(0)


def _matrices_later(ctx: Any, grads: Sequence[Any]) -> Sequence[Any]:
    if not hasattr(ctx, "compute_matrices"):
        return None, None  # the `expert_mlp` is in another graph, and computed them itself
    compute_matrices, ctx.compute_matrices = ctx.compute_matrices, None
    return compute_matrices(*ctx.needs)


weights_later.fake(lambda up, down: up[0].new_empty(0))
weights_later.autograd(save=lambda ctx, args, kwargs, outputs: None, backward=_matrices_later)
