"""FLOP and seconds of one micro-batch on one GPU, forward (Piper section IV), as formulas over `Layout.values`.

A GEMM takes a launch, and its FLOP or its operands through memory, whichever is slower: small and skinny GEMMs reach
less of the peak. Experts take the sum of their FLOP, rows, weights and launches. `bench.rate_fit` fits these rates to a
few shapes; other shapes are then predicted to some per cent. The rows of an expert fill tiles of `tile` rows, and half
of the last tile is empty on average, so experts with few rows waste much of the time (Piper figure 4). `symbols` has
the meaning of each symbol.
"""

from __future__ import annotations

from typing import Any

import sympy

from .sheet import Formula, Sheet, quantities

d, V, E, k, F, n_mat, EP, TP, G = quantities("d V E k F n_mat EP TP G")
N_attn, N_expert, N_rest, N_ffn, w_scores, n_logits = quantities("N_attn N_expert N_rest N_ffn w_scores n_logits")
b, s, peak, e_gemm, e_attn, tile, skew = quantities("b s peak e_gemm e_attn tile skew")
v_gemm, v_rows, v_weights, t_launch = quantities("v_gemm v_rows v_weights t_launch")
w_attn, w_latent, n_attn, n_shared, F_shared, F_dense, v_dense, t_dense = quantities(
    "w_attn w_latent n_attn n_shared F_shared F_dense v_dense t_dense"
)
V_proj, V_rest, V_ffn, V_logits = quantities("V_proj V_rest V_ffn V_logits")
F_proj, F_scores, F_experts, F_rest, F_ffn, F_logits = quantities("F_proj F_scores F_experts F_rest F_ffn F_logits")
m_expert, fill, V_rows, V_weights, T_experts = quantities("m_expert fill V_rows V_weights T_experts")


def _gemms(flop: sympy.Expr, operands: sympy.Expr, launches: Any) -> sympy.Expr:
    return sympy.Max(flop / (peak * e_gemm), operands / v_dense) + launches * t_dense


FORWARD = Sheet(
    [
        Formula("F_proj", 2 * b * s * N_attn / TP, "FLOP", "projections of attention: 2 a parameter and token"),
        Formula("F_scores", b * s**2 * w_scores / TP, "FLOP", "Q*K and P*V of the tokens before, half of all"),
        Formula("F_experts", 2 * b * s / G * k * N_expert * skew, "FLOP", "experts of the busiest rank: k a token"),
        Formula("F_rest", 2 * b * s * N_rest / TP, "FLOP", "router and shared experts"),
        Formula("F_ffn", 2 * b * s * N_ffn / TP, "FLOP", "FFN of a layer without experts"),
        Formula("F_logits", n_logits * 2 * b * s * V * d / TP, "FLOP", "logits, on the last stage"),
        Formula("m_expert", b * s / G * k * EP / E * skew, "1", "rows of an expert of the busiest rank"),
        Formula("fill", m_expert / (m_expert + tile / 2), "1", "of the tiles, half of the last one empty"),
        Formula(
            "V_rows", 2 * b * s / G * k * skew * (3 * d + (n_mat + 1) * F), "B",
            "rows of the experts: in, hidden ones out and in, out, in and summed",
        ),
        Formula("V_weights", 2 * E / EP * N_expert, "B", "weights of the experts of a rank, once"),
        Formula(
            "V_proj", 2 * (b * s * (4 * d * n_attn + 2 * w_latent + w_attn / TP) + N_attn / TP), "B",
            "operands of attention's projections: rows in and out, weights",
        ),
        Formula(
            "V_rest", 2 * (b * s * (d + E + n_mat * (d * n_shared + F_shared / TP)) + N_rest / TP), "B",
            "operands of router and shared experts",
        ),
        Formula("V_ffn", 2 * (b * s * n_mat * (d + F_dense / TP) + N_ffn / TP), "B", "operands of the FFN"),
        Formula("V_logits", n_logits * 2 * (b * s * (d + V / TP) + V * d / TP), "B", "operands of the logits"),
        Formula(
            "T_attention", _gemms(F_proj, V_proj, 4 * n_attn) + F_scores / (peak * e_attn), "s",
            "attention of a layer; Piper section IV.A.1",
        ),
        Formula(
            "T_experts", F_experts / (v_gemm * fill) + V_rows / v_rows + V_weights / v_weights + t_launch, "s",
            "experts of a layer, forward; Piper section IV.A.2",
        ),
        Formula(
            "T_experts_step", 3 * T_experts + V_weights / v_weights, "s",
            "experts of a layer, forward and backward: gradients of weights too",
        ),
        Formula(
            "T_rest", _gemms(F_rest, V_rest, n_mat * n_shared + 1), "s", "router and shared experts of a layer, forward"
        ),
        Formula(
            "T_ffn", _gemms(F_ffn, V_ffn, n_mat), "s", "FFN of a layer without experts, forward"
        ),
        Formula(
            "T_logits", _gemms(F_logits, V_logits, n_logits), "s", "logits, forward"
        ),
    ]
)  # fmt: skip
