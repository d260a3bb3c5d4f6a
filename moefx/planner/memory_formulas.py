"""Bytes that one GPU needs (Piper section III.A, X-MoE section 3.2), as formulas over `Layout.values`.

Half precision: an element has 2 bytes. Model states take 16 bytes a parameter: 2 for itself, 2 for its gradient, 12 for
the float32 copy and Adam's two moments (Piper section III.A.1; its introduction says 20). ZeRO divides states by a
number of ranks: z_p, z_g, z_o for parameters, gradients and optimizer states of the dense part, y_p, y_g, y_o for those
of experts. `symbols` has the meaning of each symbol.
"""

from __future__ import annotations

import sympy

from .sheet import Formula, Sheet, distinct, quantities

d, V, E, k, F, n_mat, H, L, L_moe = quantities("d V E k F n_mat H L L_moe")
F_shared, F_dense, N_attn, N_expert, N_rest, N_ffn, N_other = quantities(
    "F_shared F_dense N_attn N_expert N_rest N_ffn N_other"
)
w_attn, w_latent, n_attn, PP, TP, EP, G = quantities("w_attn w_latent n_attn PP TP EP G")
b, s, m, c, w_mask = quantities("b s m c w_mask")
n_rows, n_h, n_y, n_dup, n_flat, n_all, n_emb, n_logits, n_again = quantities(
    "n_rows n_h n_y n_dup n_flat n_all n_emb n_logits n_again"
)
z_p, z_g, z_o, y_p, y_g, y_o, M_fw = quantities("z_p z_g z_o y_p y_g y_o M_fw")
layers, moe_layers, P_dense, P_experts = quantities("l l_moe P_dense P_experts")
M_params, M_grads, M_optimizer, M_states = quantities("M_params M_grads M_optimizer M_states")
A_attention, A_ffn, A_router, A_meta, A_mask = quantities("A_attention A_ffn A_router A_meta A_mask")
A_dispatch, A_interm, A_combine, A_shared = quantities("A_dispatch A_interm A_combine A_shared")
A_block, A_moe_layer, A_dense_layer, A_again, A_logits, A_buffers, M_activations = quantities(
    "A_block A_moe_layer A_dense_layer A_again A_logits A_buffers M_activations"
)

STATES = Sheet(
    [
        Formula("l", sympy.ceiling(L / PP), "1", "layers of a stage, Piper section III.A.2"),
        Formula("l_moe", sympy.ceiling(L_moe / PP), "1", "layers with experts of a stage"),
        Formula(
            "P_dense",
            (layers * N_attn + (layers - moe_layers) * N_ffn + moe_layers * N_rest + n_emb * V * d + N_other) / TP,
            "1", "parameters of a rank that every token passes",
        ),
        Formula("P_experts", moe_layers * E / EP * N_expert, "1", "parameters of experts of a rank; Piper eq. 2"),
        Formula("M_params", 2 * (P_dense / z_p + P_experts / y_p), "B", "parameters, 2 bytes; ZeRO-3 spreads them"),
        Formula("M_grads", 2 * (P_dense / z_g + P_experts / y_g), "B", "gradients, 2 bytes; from ZeRO-2 on spread"),
        Formula(
            "M_optimizer", 12 * (P_dense / z_o + P_experts / y_o), "B",
            "optimizer states: float32 copy, two moments; ZeRO spreads them",
        ),
        Formula("M_states", M_params + M_grads + M_optimizer, "B", "model states; Piper section III.A.1"),
    ]
)  # fmt: skip

BLOCK = Sheet(
    [
        Formula("A_router", 4 * b * s * E / G, "B", "the router's probabilities, float32"),
        Formula(
            "A_meta", 12 * k * b * s * (n_all * EP + 1 - n_all) / G + 4 * (E / EP + 1), "B",
            "ERI arrays; X-MoE section 4.1.1",
        ),
        Formula("A_mask", w_mask * c * k * (b * s / G) ** 2, "B", "masks [S, E, C], C = c*k*S/E; X-MoE section 3.1"),
        Formula(
            "n_dup", n_flat * k + n_all * EP + (1 - n_flat - n_all) * distinct(E, k, EP), "1",
            "how often a token arrives: for each slot, at every rank, or at each rank that has some of its experts",
        ),
        Formula(
            "A_dispatch", 2 * b * s * d * (n_rows * c * k + (1 - n_rows) * n_dup) / G, "B",
            "rows that arrived at the experts; X-MoE table 2; MoEBlaze section 3: read by index",
        ),
        Formula("A_interm", 2 * c * k * b * s * n_h * F / G, "B", "hidden rows of the experts; X-MoE table 2"),
        Formula("A_combine", 2 * c * k * b * s * n_y * d / G, "B", "outputs of the experts; X-MoE table 2"),
        Formula(
            "A_block", A_dispatch + A_interm + A_combine + A_mask + A_meta + A_router, "B",
            "a block of routed experts, one micro-batch",
        ),
    ]
)  # fmt: skip

ACTIVATIONS = BLOCK + Sheet(  # uses the layer counts of STATES
    [
        Formula(
            "A_attention", 2 * b * s * (2 * d * n_attn + w_latent + w_attn / TP) + 4 * b * s * H / TP, "B",
            "attention, as flash attention keeps it; Piper table III",
        ),
        Formula("A_shared", 4 * b * s * (n_mat - 1) * F_shared / TP, "B", "shared experts, 4F with a gate"),
        Formula("A_ffn", 2 * b * s * (d + 2 * (n_mat - 1) * F_dense / TP), "B", "FFN of a layer without experts"),
        Formula("A_moe_layer", A_attention + A_block + A_shared, "B", "a layer with experts, one micro-batch"),
        Formula("A_dense_layer", A_attention + A_ffn, "B", "a layer without experts, one micro-batch"),
        Formula("A_again", sympy.Max(A_moe_layer, A_dense_layer), "B", "a layer that runs again keeps what others do"),
        Formula("A_logits", n_logits * 6 * b * s * V / TP, "B", "logits, last stage: 2 bytes, and float32 in the loss"),
        Formula(
            "A_buffers", n_all * 2 * k * b * s * EP * (n_mat * F + d) / G, "B",
            "with gather, buffers of one layer at a time for all tokens of all ranks",
        ),
        Formula(
            "M_activations",
            (1 - n_again) * m * (moe_layers * A_moe_layer + (layers - moe_layers) * A_dense_layer)
            + n_again * (m * layers * 2 * b * s * d + A_again)
            + A_logits + A_buffers,
            "B", "activations of the micro-batches in flight; Piper eq. 3 and 4",
        ),
    ]
)  # fmt: skip
TOTAL = Sheet([Formula("M_gpu", M_states + M_activations + M_fw, "B", "memory of a GPU; Piper eq. 4")])
MEMORY = STATES + ACTIVATIONS + TOTAL
