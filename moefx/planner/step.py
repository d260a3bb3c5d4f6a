"""Seconds of a training step and its MFU (Piper section IV.C), as formulas, and the layouts' numbers that they take."""

from __future__ import annotations

import functools
from typing import get_args

import sympy

from .architecture import Architecture
from .communication import VOLUMES, exchange, level_values, row_bytes, whole_link
from .compute import FORWARD
from .layout import KEPT, Layout, Way
from .memory import MEMORY, STATES
from .platforms import Network, Platform
from .sheet import Formula, Sheet, quantities, quantity

TILE = 128  # rows, of the kernels' GEMMs on every target: moefx.lowering.triton.configs

M, PP, layers, moe_layers, n_mat = quantities("M PP l l_moe n_mat")
n_again, n_up, bubble_of = quantities("n_again n_up bubble_of")
n_tp, n_g, n_pp, n_grads, alpha_tp, alpha_pp = quantities("n_tp n_g n_pp n_grads alpha_tp alpha_pp")
T_attention, T_experts, T_experts_step, T_rest, T_ffn, T_logits = quantities(
    "T_attention T_experts T_experts_step T_rest T_ffn T_logits"
)
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

STEP = Sheet(
    [
        Formula("n_pass", 3 + n_again, "1", "a backward is two forwards; one more where layers run again"),
        Formula(
            "T_compute",
            n_pass * (layers * T_attention + moe_layers * T_rest + (layers - moe_layers) * T_ffn + T_logits)
            + moe_layers * (T_experts_step + (n_again + n_up * (n_mat - 1) / n_mat) * T_experts),
            "s", "a stage, a micro-batch; up-projections again where only X is kept",
        ),
        Formula(
            "T_alltoall", moe_layers * (4 * T_exchange + T_counts), "s",
            "dispatch and combine, forward and backward; numbers of rows ahead of the first",
        ),
        Formula("T_tp", layers * (V_tp * beta_tp + 4 * n_tp * alpha_tp), "s", "four all-reduces a layer; Megatron-LM"),
        Formula("T_gather", 2 * moe_layers * (V_gather * beta_tp + n_g * alpha_tp), "s", "X-MoE appendix C.2"),
        Formula("T_p2p", 2 * n_pp * (V_p2p * beta_pp + alpha_pp), "s", "Piper section III.B.2"),
        Formula(
            "T_params", 4 * n_z3 * (P_dense * (1 - 1 / z_p) * beta_dp + P_experts * (1 - 1 / y_p) * beta_replicas), "s",
            "ZeRO-3: parameters gathered, forward and backward",
        ),
        Formula("T_micro", T_compute + T_alltoall + T_tp + T_gather + T_p2p + T_params, "s", "nothing overlaps"),
        Formula("T_bubble", bubble_of * (PP - 1) * T_micro, "s", "micro-batches that a stage waits for"),
        Formula(
            "T_grads", (n_grads + 1 - n_z3) / 2 * (V_grad_dense * beta_dp + V_grad_experts * beta_replicas), "s",
            "half of it to reduce, in each micro-batch with ZeRO-2 and 3; half to spread results, not with ZeRO-3",
        ),
        Formula("T_optimizer", 28 * (P_dense / z_o + P_experts / y_o) / BW, "s", "12 bytes read and written, 4 beside"),
        Formula("T_step", M * T_micro + T_bubble + T_grads + T_optimizer, "s", "1F1B and the like"),
        Formula("MFU", F_token * B * s / (peak * ranks * T_step), "1", "Piper eq. 12"),
    ]
)  # fmt: skip

# Of a micro-batch, how much each stage before or behind adds to a step: all of it; with v chunks 1/v (arXiv
# 2104.04473); zero bubble H1 a third, H2 nothing (arXiv 2401.10241 section 2).
_BUBBLES = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 1 / 3, "zb-h2": 0.0}


def flop_per_token(model: Architecture, tokens: int) -> float:
    """FLOP of forward and backward that the model itself asks for, nothing run again: F_model of Piper eq. 12."""
    active = model.parameters(model.top_k) - (0 if model.is_tied else model.vocab_size * model.hidden_size)
    scores = model.num_layers * tokens * (model.attention.query_width + model.attention.out_width)
    return 6 * active + 3 * scores


def memory(model: Architecture, layout: Layout, platform: Platform) -> dict[str, float]:
    """Results of `MEMORY`, of the stage that needs most: the first, or the last, which has the logits."""
    stages = (0, layout.pp - 1) if layout.pp > 1 else (0,)
    found = [MEMORY(**layout.values(model, stage), M_fw=platform.overhead) for stage in stages]
    return max(found, key=lambda results: results["M_gpu"])


def given(model: Architecture, layout: Layout, platform: Platform, experts_first: bool = True) -> dict[str, float]:
    """What the sheets of a step are given, of the last stage, which has the logits."""
    values = layout.values(model, layout.pp - 1)
    stage_ranks = layout.tp * layout.dp
    tensor, data = platform.network_of(layout.tp), platform.network_of(layout.dp, layout.tp)
    replicas = platform.network_of(layout.expert_replicas, layout.ep if experts_first else 1)
    stages = platform.network_of(2, stage_ranks)
    sizes, networks = _levels(layout, platform, experts_first)
    links = tuple((n.latency, 1 / n.bandwidth) for n in networks)
    return values | level_values(sizes, links, whole_link(sizes, links), platform.handling) | {
        "t": layout.sequences * layout.tokens / values["G"], **widths(model, layout),
        "n_z3": int(layout.zero > 2), "BW": platform.memory_bandwidth, "tile": TILE, "skew": 1.0,
        **platform.dense_rates(), **platform.expert_rates(),
        "DP": layout.dp, "R": layout.expert_replicas, "M": layout.microbatches,
        "n_up": int(KEPT[layout.kept].num_hidden(model.matrices) == 0 and not layout.recompute),
        "bubble_of": _BUBBLES.get(layout.schedule, 1 / layout.chunks), "beta_tp": 1 / tensor.bandwidth,
        "beta_dp": 1 / data.bandwidth, "beta_replicas": 1 / replicas.bandwidth,
        "beta_pp": 1 / (stages.p2p or stages.bandwidth),
        "alpha_tp": tensor.latency, "alpha_pp": stages.latency, "n_tp": int(layout.tp > 1), "n_g": int(layout.ssmb),
        "n_pp": int(layout.pp > 1), "n_grads": layout.microbatches if layout.zero > 1 else 1,
        "ranks": layout.num_ranks, "F_token": flop_per_token(model, layout.tokens),
        "B": layout.sequences * layout.microbatches * layout.dp,
    }  # fmt: skip


def widths(model: Architecture, layout: Layout) -> dict[str, float]:
    """Bytes of a row, on average of dispatch, combine and their backwards."""
    places, is_weighted = model.num_experts // layout.ep, model.top_k > 1
    return {
        name: sum(row_bytes(model.hidden_size, choices, places, is_weighted)) / 4
        for name, choices in (("w", model.top_k), ("w1", 1))
    }


def sheet_of(layout: Layout, platform: Platform, experts_first: bool = True) -> Sheet:
    """All formulas of a step of that layout."""
    return sheet(layout.way if layout.ep > 1 else "none", len(_levels(layout, platform, experts_first)[0]))


def seconds_of_ways(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool = True
) -> dict[str, float]:
    """Of one exchange, one direction, by way of rows."""
    sizes, _ = _levels(layout, platform, experts_first)
    found = exchange(len(sizes))(**given(model, layout, platform, experts_first))
    return {way: found[f"T_{way}"] for way in get_args(Way) if f"T_{way}" in found}


def _levels(layout: Layout, platform: Platform, experts_first: bool) -> tuple[tuple[int, ...], tuple[Network, ...]]:
    """Of the expert axis: its ranks are next to each other, or their replicas are (X-MoE appendix C.1)."""
    return platform.levels(layout.ep, 1 if experts_first else layout.expert_replicas)


@functools.lru_cache
def sheet(way: str, num_levels: int) -> Sheet:
    """All formulas of a step with that way of rows; `way` "none": experts are on every rank."""
    spread = way != "none"
    chosen = [
        Formula("T_exchange", quantity(f"T_{way}") if spread else sympy.Integer(0), "s", f"one direction, {way}"),
        Formula("T_counts", quantity("alpha0") if spread else sympy.Integer(0), "s", "of some bytes"),
    ]
    return STATES + FORWARD + exchange(num_levels) + Sheet(chosen) + VOLUMES + STEP
