"""Choose the dispatch of rows to their experts: as planned, or the fastest one as measured.

`Plan(dispatch="auto")` compares dispatches by the links between ranks and the host's time, for uniform routing
(`runtime.ranks.link_costs`).
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist

from .._plan import Plan
from ..compiler.block_compiler import BlockRewrite
from ..errors import InvalidPlan
from ..ir.expert_placement import ExchangeRoutes
from ..ir.ops.uneven_all_to_all import get_group
from ..passes.exchange.routed_region import RoutedRegion
from ..runtime.ranks.link_costs import (
    DEFAULT_TOKENS,
    EXCHANGES_PER_LAYER,
    HOST_COSTS,
    choose_dispatch,
    count_gathered_bytes,
    count_pulled_bytes,
    predict_seconds,
)
from ..runtime.ranks.topology import ExpertAxis


def choose_routes(axis: ExpertAxis, plan: Plan, result: BlockRewrite) -> tuple[ExchangeRoutes, str]:
    """Choose the dispatch of the rows. Returns it with the reason. Collective if the plan says "auto" or "pull".

    Raises:
        InvalidPlan: "gather" is planned, and the process group cannot run it; or "pull" with `max_tokens`, and it can
            run neither.
    """
    dispatch, reason = plan.dispatch, "as planned"
    if dispatch in ("rbd", "halo") and len(axis.topology.sizes) == 1:
        reason = f"{dispatch!r} as planned, over one node; set Plan(node_size=...) if there are several"
    if dispatch == "auto":
        dispatch, reason = _choose_dispatch(axis, plan, result)
    if dispatch == "pull" and (obstacle := axis.pull_obstacle):
        dispatch = "gather" if _has_reduce_scatter(axis) else "dedup"
        reason = f"{dispatch!r} for the planned 'pull': {obstacle}"
        if dispatch == "dedup" and plan.max_tokens is not None:
            raise InvalidPlan(f"Plan(max_tokens={plan.max_tokens}) has no effect on {reason}: leave max_tokens out")
    if dispatch == "gather" and not _has_reduce_scatter(axis):
        raise InvalidPlan(
            f"Plan(dispatch='gather') on {axis.mesh.device_type}: gloo has no reduce-scatter there. Use NCCL, or "
            "Plan(dispatch='dedup')"
        )
    if dispatch in ("gather", "pull"):
        routes = axis.build_routes(by_level=False, dedup=True)
        host_group = "" if plan.max_tokens else axis.host_group
        limit = {"max_tokens": plan.max_tokens, "host_group": host_group}
        return dataclasses.replace(routes, gathers=True, pulls=dispatch == "pull", **limit), reason
    if dispatch in ("rbd", "halo"):
        halo = dispatch == "halo"
        return axis.build_routes(by_level=True, dedup=not halo or plan.pilots, splits_intra_node=halo), reason
    return axis.build_routes(by_level=False, dedup=dispatch != "flat"), reason


def _choose_dispatch(axis: ExpertAxis, plan: Plan, result: BlockRewrite) -> tuple[str, str]:
    """Choose the fastest dispatch, for uniform routing. Returns it with the reason. All ranks choose the same."""
    may_gather, match = may_choose_gather(axis, plan), result.match
    if len(axis.topology.sizes) == 1 and not may_gather:
        return "dedup", "auto: one level, and 'dedup' sends the fewest rows"
    tokens = _count_planned_tokens(axis, plan) or DEFAULT_TOKENS
    token_bytes, top_k = _token_bytes(result), match.slots
    sizes, num_experts, gathered, pulled = axis.topology.sizes, match.num_experts, None, None
    if may_gather:
        gathered = count_gathered_bytes(token_bytes, top_k, plan.max_tokens or tokens)
        pulled = count_pulled_bytes(token_bytes, num_experts, top_k, axis.size, tokens, plan.max_tokens)
    row_bytes = token_bytes + 6.0 * top_k  # a weight and an expert for each slot
    seconds = predict_seconds(axis.links, sizes, num_experts, top_k, row_bytes, tokens, gathered, pulled)
    dispatch = choose_dispatch(seconds, plan.max_tokens)
    predictions = ", ".join(
        f"{name} {1e3 * EXCHANGES_PER_LAYER * s:.2f} + {1e3 * HOST_COSTS[name].seconds(plan.max_tokens):.2f} ms"
        for name, s in seconds.items()
    )
    reason = (
        f"auto: predicted for {tokens} tokens a rank {predictions}; exchanges + host of a layer's forward and backward"
    )
    if "pull" in seconds:
        reason += "; 'pull' must be named"
    if _host_runs_ahead(axis):
        can_capture = dispatch == "gather" and plan.max_tokens
        reason += "; a CUDA graph " + (
            "can hold it" if can_capture else "needs Plan(dispatch='gather', max_tokens=...)"
        )
    return dispatch, reason


def may_choose_gather(axis: ExpertAxis, plan: Plan) -> bool:
    """Return whether "auto" may choose "gather": several ranks at one level, whose hosts run ahead of their devices.

    On the CPU the host computes too, so it waits for no device, and "gather" only moves more rows.
    """
    if len(axis.topology.sizes) > 1 or axis.size == 1 or plan.chunks > 1:
        return False
    if plan.max_tokens is None:
        can_run = dist.is_gloo_available()  # hosts agree over gloo
    else:
        can_run = _count_planned_tokens(axis, plan) <= plan.max_tokens
    return can_run and _host_runs_ahead(axis) and _has_reduce_scatter(axis)


def _count_planned_tokens(axis: ExpertAxis, plan: Plan) -> int:
    """Return the tokens that a rank sends, 0 if the plan does not say. Of ranks that share a token, one sends it."""
    parts = axis.mesh[plan.sequence_axis].size() if plan.sequence_axis else 1
    return -(-(plan.tokens or 0) // parts)


def _host_runs_ahead(axis: ExpertAxis) -> bool:
    return axis.mesh.device_type != "cpu"


def _has_reduce_scatter(axis: ExpertAxis) -> bool:
    return axis.mesh.device_type == "cpu" or dist.get_backend(get_group(axis.group)) != "gloo"


def _token_bytes(result: BlockRewrite) -> float:
    """Count the bytes of a token's values in an exchange."""
    token_gathers = RoutedRegion.of(result.graph).token_gathers
    values = [n.args[0].meta.get("val") for n in token_gathers]  # type: ignore[union-attr]
    return float(sum(int(v.shape[-1]) * v.element_size() for v in values[:1] if v is not None))
