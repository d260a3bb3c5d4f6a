"""Seconds of a training step and its MFU (Piper section IV.C) as formulas, and the values of their symbols."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import sympy

from ..errors import InvalidPlan
from .architecture import Architecture
from .communication import (
    VOLUMES,
    build_exchange_sheet,
    collect_level_values,
    combine_links,
    exchange_symbol,
    row_bytes,
)
from .compute import FORWARD
from .layout import CHECKPOINT_POLICIES, Layout, PlannedDispatch
from .memory_formulas import ACTIVATIONS, STATES, TOTAL
from .pipeline_order import compute_waiting_share
from .platforms import Network, Platform
from .sheet import Formula, Sheet, quantities, quantity

# Part of the bandwidth of copies that element-wise kernels of an eager model reach, some of them on strided tensors.
# Fitted to the layouts "fsdp" and "ep" of benchmarks/results/train_h200x2.jsonl.
POINTWISE_RATE = 0.5
TILE = 128  # rows, of the kernels' GEMMs on every target: moefx.lowering.triton.tile_configs

M, PP, layers, moe_layers, n_mat = quantities("M PP l l_moe n_mat")
n_again, n_up, n_attn, bubble_of = quantities("n_again n_up n_attn bubble_of")
n_tp, n_g, n_p2p, n_grads, alpha_tp, alpha_pp = quantities("n_tp n_g n_p2p n_grads alpha_tp alpha_pp")
L, L_moe, l_t, l_t_moe, h_t, T_model = quantities("L L_moe l_t l_t_moe h_t T_model")
T_attention, T_pointwise, T_experts, T_experts_step, T_rest, T_ffn, T_logits = quantities(
    "T_attention T_pointwise T_experts T_experts_step T_rest T_ffn T_logits"
)
b, w_point = quantities("b w_point")
T_exchange, T_counts, V_gather, V_p2p, V_tp, V_grad_dense, V_grad_experts = quantities(
    "T_exchange T_counts V_gather V_p2p V_tp V_grad_dense V_grad_experts"
)
beta_tp, beta_pp, beta_dp, beta_replicas, BW = quantities("beta_tp beta_pp beta_dp beta_replicas BW")
P_dense, P_experts, z_o, y_o, z_p, ranks, peak, F_token, B, s = quantities(
    "P_dense P_experts z_o y_o z_p ranks peak F_token B s"
)
n_pass, n_z3, y_p, T_compute, T_alltoall, T_tp, T_gather, T_p2p, T_params, T_micro = quantities(
    "n_pass n_z3 y_p T_compute T_alltoall T_tp T_gather T_p2p T_params T_micro"
)
T_bubble, T_grads, T_optimizer, T_step = quantities("T_bubble T_grads T_optimizer T_step")


def _build_layer_formulas(layers: sympy.Expr, moe: sympy.Expr, logits: Any) -> dict[str, sympy.Expr]:
    """Build the seconds of a micro-batch in `layers` layers, `moe` of them with experts.

    Args:
        logits: 1 to include the logits, otherwise 0.
    """
    num_recomputed = n_again + n_up * (n_mat - 1) / n_mat
    return {
        "T_compute": n_pass
        * (layers * (T_attention + T_pointwise) + moe * T_rest + (layers - moe) * T_ffn + logits * T_logits)
        + moe * (T_experts_step + num_recomputed * T_experts),
        "T_alltoall": moe * ((4 + 2 * n_again) * T_exchange + (1 + n_again) * T_counts),
        "T_tp": layers * (2 + n_again) / 2 * (V_tp * beta_tp + 2 * (1 + n_attn) * n_tp * alpha_tp),
        "T_gather": (2 + n_again) * moe * (V_gather * beta_tp + n_g * alpha_tp),
    }


_STAGE = _build_layer_formulas(l_t, l_t_moe, h_t)
STEP = Sheet(
    [
        Formula("n_pass", 3 + n_again, "1", "forwards: a backward is as long as two; one more if layers run again"),
        Formula(
            "T_pointwise", w_point * b * s / (POINTWISE_RATE * BW), "s",
            "norms, rotary embeddings and other element-wise operations of a layer, forward",
        ),
        Formula("T_compute", _STAGE["T_compute"], "s", "the kernels of a micro-batch, on the longest stage"),
        Formula(
            "T_alltoall", _STAGE["T_alltoall"], "s",
            "dispatch and combine of a micro-batch, forward (again if layers run again) and backward",
        ),
        Formula("T_tp", _STAGE["T_tp"], "s", "all-reduces of TP, a micro-batch: two or four a layer; Megatron-LM"),
        Formula("T_gather", _STAGE["T_gather"], "s", "SSMB: sequences gathered, a micro-batch; X-MoE appendix C.2"),
        Formula(
            "T_params", 4 * n_z3 * (P_dense * (1 - 1 / z_p) * beta_dp + P_experts * (1 - 1 / y_p) * beta_replicas), "s",
            "ZeRO-3: parameters gathered, forward and backward of a micro-batch",
        ),
        Formula("T_micro", T_compute + T_alltoall + T_tp + T_gather + T_params, "s", "a micro-batch; nothing overlaps"),
        Formula(
            "T_model", sum(_build_layer_formulas(L, L_moe, 1).values()) + PP * T_params, "s", "T_micro of all stages"
        ),
        Formula("T_bubble", bubble_of * (T_model - T_micro), "s", "waiting of the longest stage for the others"),
        Formula("T_p2p", n_p2p * (V_p2p * beta_pp + alpha_pp), "s", "transfers waited for; Piper section III.B.2"),
        Formula(
            "T_grads", (n_grads + 1 - n_z3) / 2 * (V_grad_dense * beta_dp + V_grad_experts * beta_replicas), "s",
            "gradients: half of it to reduce, n_grads times; half to spread results, not with ZeRO-3",
        ),
        Formula("T_optimizer", 28 * (P_dense / z_o + P_experts / y_o) / BW, "s", "12 bytes read and written, 4 beside"),
        Formula("T_step", M * T_micro + T_bubble + T_p2p + T_grads + T_optimizer, "s", "a training step"),
        Formula("MFU", F_token * B * s / (peak * ranks * T_step), "1", "FLOP of the model over the peak; Piper eq. 12"),
    ]
)  # fmt: skip

# Share of a micro-batch's time that each other stage adds to a step: 1, or 1/v with v chunks (arXiv 2104.04473). Under
# zero bubble the share depends on the number of micro-batches: see `_correct_bubble`.
_BUBBLES = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 1 / 3, "zb-h2": 1 / 3}


def compute_flop_per_token(model: Architecture, tokens: int) -> float:
    """Compute the FLOP of a token's forward and backward without recomputation: F_model of Piper eq. 12.

    Args:
        tokens: tokens of a sequence.
    """
    active = model.parameters(model.top_k) - (0 if model.is_tied else model.vocab_size * model.hidden_size)
    scores = model.num_layers * tokens * (model.attention.query_width + model.attention.out_width)
    return 6 * active + 3 * scores


def evaluate_memory(model: Architecture, layout: Layout, platform: Platform) -> dict[str, float]:
    """Evaluate `MEMORY` on the stage that needs most: the first, or the last, which has the logits."""
    ((_, memory),) = evaluate_memory_by_zero(model, layout, platform, (layout.zero,))
    return memory


def evaluate_memory_by_zero(
    model: Architecture, layout: Layout, platform: Platform, zeros: Iterable[int]
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (ZeRO stage, results of `evaluate_memory`) for several stages of ZeRO."""
    states, (_, activations) = (
        _evaluate_states(model, layout.pp, layout.tp, layout.dp, layout.ep),
        _find_fullest(model, layout),
    )
    for zero in zeros:
        parts = states[zero] | activations
        yield zero, parts | TOTAL(**parts, M_fw=platform.overhead)


def find_fullest_stage(model: Architecture, layout: Layout) -> int:
    """Return the stage that needs most memory, which `evaluate_memory` reports."""
    return _find_fullest(model, layout)[0]


def _find_fullest(model: Architecture, layout: Layout) -> tuple[int, dict[str, float]]:
    """Return the stage that keeps most activations, and the results of `ACTIVATIONS` there. States are equal on all
    stages."""
    states = _evaluate_states(model, layout.pp, layout.tp, layout.dp, layout.ep)[layout.zero]
    ends = (0, layout.pp - 1) if layout.pp > 1 else (0,)
    parts_by_stage = {stage: ACTIVATIONS(**layout.values(model, stage), **states) for stage in ends}
    return max(parts_by_stage.items(), key=lambda item: item[1]["M_activations"])


@functools.lru_cache(maxsize=64)
def _evaluate_states(model: Architecture, pp: int, tp: int, dp: int, ep: int) -> dict[int, dict[str, float]]:
    """Evaluate `STATES` for each stage of ZeRO. They do not depend on tokens and checkpoint policy."""
    layout = Layout(pp=pp, tp=tp, dp=dp, ep=ep)
    return {zero: STATES(**layout.values(model) | layout.spread(zero)) for zero in range(4)}


def collect_values(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool = True
) -> dict[str, float]:
    """Collect the symbols' values for the sheet of a step.

    The longest stage (`l_t` layers, `l_t_moe` with experts, `h_t` logits) is one with the most layers, or the last one,
    which has the logits.
    """
    values = _collect_shared_values(model, layout, platform, experts_first)
    kinds = [dict(zip(("l_t", "l_t_moe", "h_t"), kind, strict=True)) for kind in _list_longest_stages(model, layout.pp)]
    sheet = find_step_sheet(layout, platform, experts_first)
    kind = kinds[0] if len(kinds) == 1 else max(kinds, key=lambda kind: sheet(**values, **kind)["T_micro"])
    return _correct_bubble(layout, values | kind, sheet)


def _correct_bubble(layout: Layout, values: dict[str, float], formulas: Sheet) -> dict[str, float]:
    """Correct `bubble_of` of zero-bubble schedules (arXiv 2401.10241 section 2).

    With few micro-batches the pipeline fills and drains for longer than gradients of weights take. Their share of the
    time is not always a third.
    """
    if layout.pp == 1 or not layout.schedule.startswith("zb"):
        return values
    results = formulas(**values)
    layers, moe, num_recomputed = values["l_t"], values["l_t_moe"], values["n_again"]
    dense = layers * results["T_attention"] + moe * results["T_rest"] + (layers - moe) * results["T_ffn"]
    dense += values["h_t"] * results["T_logits"] + layers * results["T_pointwise"]
    scores = layers * results["F_scores"] / (values["peak"] * values["e_attn"])  # have no weights
    forward = dense + moe * (results["T_experts"] + 2 * results["T_exchange"] + results["T_counts"])
    forward += (results["T_tp"] + results["T_gather"]) / (2 + num_recomputed) + results["T_params"] / 2
    weights = (
        dense - scores - layers * results["T_pointwise"] + moe * (results["T_experts_step"] - 2 * results["T_experts"])
    )
    shares = forward / results["T_micro"], weights / results["T_micro"]
    return values | {"bubble_of": compute_waiting_share(layout.schedule, layout.pp, layout.microbatches, *shares)}


def _collect_shared_values(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool
) -> dict[str, float]:
    values = layout.values(model, layout.pp - 1)
    stage_ranks, replicas_apart = layout.tp * layout.dp, layout.ep if experts_first else 1
    tensor, stages = platform.find_network(layout.tp), platform.find_network(2, stage_ranks)
    sizes, networks = _find_expert_levels(layout, platform, experts_first)
    links = tuple((n.latency, 1 / n.bandwidth) for n in networks)
    return values | collect_level_values(sizes, links, combine_links(sizes, links), platform.handling) | {
        "t": layout.sequences * layout.tokens / values["G"], **compute_row_widths(model, layout),
        "n_z3": int(layout.zero > 2), "BW": platform.memory_bandwidth, "tile": TILE, "skew": 1.0,
        **platform.dense_rates(), **platform.expert_rates(),
        "DP": layout.dp, "R": layout.expert_replicas, "M": layout.microbatches,
        "n_up": int(CHECKPOINT_POLICIES[layout.kept].num_hidden(model.matrices) == 0 and not layout.recompute),
        "bubble_of": (layout.pp > 1) * _BUBBLES.get(layout.schedule, 1 / layout.chunks),
        "beta_tp": 1 / tensor.bandwidth, "beta_dp": platform.estimate_ring(layout.dp, layout.tp),
        "beta_replicas": platform.estimate_ring(layout.expert_replicas, replicas_apart),
        "beta_pp": 1 / (stages.p2p or stages.bandwidth), "n_p2p": layout.transfers(),
        "alpha_tp": tensor.latency, "alpha_pp": stages.latency, "n_tp": int(layout.tp > 1), "n_g": int(layout.ssmb),
        "n_grads": layout.microbatches if layout.zero > 1 else 1,
        "ranks": layout.num_ranks, "F_token": compute_flop_per_token(model, layout.tokens),
        "B": layout.sequences * layout.microbatches * layout.dp,
    }  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _list_longest_stages(model: Architecture, pp: int) -> list[tuple[int, int, int]]:
    """List (layers, layers with experts, logits) of the stages that may take longest: no other stage exceeds them in
    all."""
    counts = [(*Layout(pp=pp).count_stage_layers(model, stage), int(stage == pp - 1)) for stage in range(pp)]
    most = [k for k in counts if not any(all(map(operator.le, k, other)) and k != other for other in counts)]
    return list(dict.fromkeys(most))


def compute_row_widths(model: Architecture, layout: Layout) -> dict[str, float]:
    """Compute the bytes of a row, averaged over dispatch, combine and their backwards.

    "w" is a row with all slots of its token, "w1" one with a single slot, "w_all" one of "gather", whose destinations
    are numbers of all experts.
    """
    on_rank, is_weighted, unbounded = model.num_experts // layout.ep, model.top_k > 1, 2**31
    return {
        name: sum(row_bytes(model.hidden_size, choices, experts_per_rank, is_weighted)) / 4
        for name, choices, experts_per_rank in (
            ("w", model.top_k, on_rank),
            ("w1", 1, on_rank),
            ("w_all", model.top_k, unbounded),
        )
    }


def find_step_sheet(layout: Layout, platform: Platform, experts_first: bool = True) -> Sheet:
    """Return the sheet of a layout's step.

    Raises:
        InvalidPlan: the dispatch needs several levels, and the expert axis has one.
    """
    sizes, networks = _find_expert_levels(layout, platform, experts_first)
    if layout.dispatch in ("rbd", "halo") and len(sizes) == 1 < layout.ep:
        obstacle = f"EP={layout.ep} is within one: {networks[0].name!r}"
        raise InvalidPlan(f"dispatch={layout.dispatch!r} goes by levels, but {obstacle}")
    return build_step_sheet(layout.dispatch if layout.ep > 1 else "none", len(sizes))


def estimate_dispatches(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool = True
) -> dict[str, float]:
    """Estimate the seconds of one exchange in one direction, for each possible dispatch."""
    sizes, _ = _find_expert_levels(layout, platform, experts_first)
    results = build_exchange_sheet(len(sizes))(**_collect_shared_values(model, layout, platform, experts_first))
    return {
        dispatch: results[symbol]
        for dispatch in get_args(PlannedDispatch)
        if (symbol := exchange_symbol(dispatch)) in results
    }


def find_units_above(layout: Layout, platform: Platform, experts_first: bool = True) -> tuple[int, ...]:
    """Find the sizes in ranks of the units above a node at which the links of the expert axis change, fine to coarse.

    They are the value of `Plan(topology_levels=...)`; "rbd" and "halo" have a hop for each.
    """
    if layout.ep == 1 or layout.dispatch not in ("rbd", "halo"):
        return ()
    _, networks = _find_expert_levels(layout, platform, experts_first)
    return tuple(sorted(n.ranks for n in networks[1:] if n.ranks > platform.node_size))


def _find_expert_levels(
    layout: Layout, platform: Platform, experts_first: bool
) -> tuple[tuple[int, ...], tuple[Network, ...]]:
    """Find the levels of the expert axis: its ranks are neighbours, or their replicas are (X-MoE appendix C.1)."""
    return platform.list_levels(layout.ep, 1 if experts_first else layout.expert_replicas)


@functools.lru_cache
def build_step_sheet(dispatch: str, num_levels: int) -> Sheet:
    """Build the sheet of a step.

    Args:
        dispatch: how rows travel; "none" if each rank has all experts.
        num_levels: levels of the expert axis.
    """
    zero = sympy.Integer(0)
    rows = zero if dispatch == "none" else quantity(exchange_symbol(dispatch))
    counts = zero if dispatch in ("none", "gather") else quantity("alpha0")
    formulas = [
        Formula("T_exchange", rows, "s", f"an exchange of rows, one direction: {dispatch}"),
        Formula("T_counts", counts, "s", "an exchange of some bytes: how many rows will come"),
    ]
    return STATES + FORWARD + build_exchange_sheet(num_levels) + Sheet(formulas) + VOLUMES + STEP
