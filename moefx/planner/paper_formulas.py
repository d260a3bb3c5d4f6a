"""The papers' own formulas as printed, in their letters. Tests compare the planner's formulas with them.

`tests/planner/test_paper_formulas.py` names the places at which a paper disagrees with itself.
"""

from __future__ import annotations

from .sheet import Formula, Sheet, quantities

d, s, b, k, E, EP, PP, L, H, h, g = quantities("d_model s b k E EP PP L H d_ffn g")
M, i, B_NIC = quantities("M i B_NIC")

_STATES = 64 * d**2 + 48 * E / EP * d * h
_KEPT = 12 * b * s * d + 4 * H * b * s**2 + 2 * b * s * k / EP * (3 * h + d)

PIPER = Sheet(
    [
        Formula("M_attention", 64 * d**2 + 12 * b * s * d + 4 * b * H * s**2, "B", "Piper table III"),
        Formula("M_experts", 48 * E * d * h + 2 * b * s * k * (3 * h + d), "B", "Piper table III"),
        Formula("M_u", L * (_STATES + _KEPT).subs(EP, 1), "B", "Piper eq. 1"),
        Formula("M_edp", L * (_STATES + _KEPT), "B", "Piper eq. 2"),
        Formula("M_gpipe", L / PP * (_STATES + _KEPT), "B", "Piper eq. 3"),
        Formula("M_1f1b", L / PP * (_STATES + (PP - i) * _KEPT / M), "B", "Piper eq. 4"),
        Formula("Delta_M", L * (PP - 1) / PP * _KEPT / M, "B", "Piper eq. 5"),
        Formula("T_a2a", 4 * b * s * k * d / (EP * B_NIC), "s", "Piper eq. 6"),
        Formula("M_migration", 48 * E * d * h / g, "B", "Piper table IV"),
    ]
)

S, c, G, H_model, H_ffn = quantities("S c G H H_FFN")

X_MOE = Sheet(
    [
        Formula("A_theory", 2 * k * S * (2 * H_model + 2 * H_ffn), "B", "X-MoE tables 2 and 4"),
        Formula("A_saving", 4 * c * k * S * H_model * (G - 1) / G, "B", "X-MoE eq. 1"),
        Formula("M_mincost", 8 * H_ffn * H_model * (G - 1) / G, "B", "X-MoE eq. 2"),
        Formula("r", k / H_ffn, "1", "X-MoE section 4.3"),
        Formula("r_border", 2 / (c * S), "1", "X-MoE section 4.3: SSMB saves more than TED above it"),
    ]
)

T, K, width = quantities("L K d")

MOEBLAZE = Sheet([Formula("Mem_routing", 2 * T * K * width, "B", "MoEBlaze section 2.1")])
