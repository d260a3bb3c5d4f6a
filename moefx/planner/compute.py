"""FLOP and seconds of one micro-batch on one GPU, forward (Piper section IV), as formulas over `Layout.values`.

A GEMM takes as long as its FLOP at the speed that large ones reach, or as its bytes through memory, whichever is
longer. Experts' rows fill tiles of the kernels' `tile` rows, half of the last one empty on average: of few rows an
expert much of the time goes into nothing (Piper figure 4).

    peak, e_gemm, e_attn   FLOP a second, and which part of it GEMMs and attention reach
    BW                     bytes a second of the memory
"""

from __future__ import annotations

import sympy

from .sheet import Formula, Sheet, quantities

d, V, E, k, F, n_mat, EP, TP, G = quantities("d V E k F n_mat EP TP G")
N_attn, N_expert, N_rest, N_ffn, w_scores, n_logits = quantities("N_attn N_expert N_rest N_ffn w_scores n_logits")
b, s, peak, e_gemm, e_attn, BW, tile, skew = quantities("b s peak e_gemm e_attn BW tile skew")
F_proj, F_scores, F_experts, F_rest, F_ffn, F_logits = quantities("F_proj F_scores F_experts F_rest F_ffn F_logits")
m_expert, fill, V_experts = quantities("m_expert fill V_experts")

FORWARD = Sheet(
    [
        Formula("F_proj", 2 * b * s * N_attn / TP, "FLOP", "projections: 2 a parameter and token"),
        Formula("F_scores", b * s**2 * w_scores / TP, "FLOP", "Q*K and P*V of the tokens before, half of all"),
        Formula("F_experts", 2 * b * s / G * k * N_expert * skew, "FLOP", "k experts a token, the busiest rank"),
        Formula("F_rest", 2 * b * s * N_rest / TP, "FLOP", "router and shared experts"),
        Formula("F_ffn", 2 * b * s * N_ffn / TP, "FLOP", "FFN of a layer without experts"),
        Formula("F_logits", n_logits * 2 * b * s * V * d / TP, "FLOP", "last stage"),
        Formula("m_expert", b * s / G * k * EP / E, "1", "rows of an expert"),
        Formula("fill", m_expert / (m_expert + tile / 2), "1", "of the tiles, half of the last one empty"),
        Formula(
            "V_experts", 2 * E / EP * N_expert + 2 * b * s / G * k * (3 * d + (n_mat + 1) * F), "B",
            "weights once; rows in, hidden rows out and in, rows out, in and summed",
        ),
        Formula("T_attention", F_proj / (peak * e_gemm) + F_scores / (peak * e_attn), "s", "Piper section IV.A.1"),
        Formula("T_experts", sympy.Max(F_experts / (peak * e_gemm * fill), V_experts / BW), "s", "Piper IV.A.2"),
        Formula("T_rest", F_rest / (peak * e_gemm), "s", "router and shared experts"),
        Formula("T_ffn", F_ffn / (peak * e_gemm), "s", "a layer without experts"),
        Formula("T_logits", F_logits / (peak * e_gemm), "s", "last stage"),
    ]
)  # fmt: skip
