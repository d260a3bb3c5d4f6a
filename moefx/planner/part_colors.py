"""The colour of each part of a GPU's memory and of a step's time, the same in every plot.

Parts that belong together, such as the attention's memory and its time, share a colour. Colours are Paul Tol's schemes
for colour-blind readers (personal.sron.nl/~pault): muted, then vibrant and light for rare parts.
"""

from __future__ import annotations

from .breakdown import LABELS

OTHER = "#BBBBBB"  # small parts, merged

_PARTS = {
    "#332288": ("M_params", "T_params"),
    "#88CCEE": ("M_grads", "T_grads"),
    "#44AA99": ("M_optimizer", "T_optimizer"),
    "#117733": ("A_attention", "T_attention"),
    "#999933": ("A_dispatch", "T_alltoall"),
    "#DDCC77": ("A_interm", "T_experts"),
    "#CC6677": ("A_combine", "T_experts_step"),
    "#882255": ("M_activations", "T_p2p"),
    "#AA4499": ("A_shared", "T_rest"),
    "#EE7733": ("A_again", "T_bubble"),
    "#0077BB": ("A_logits", "T_logits"),
    "#FFAABB": ("A_ffn", "T_ffn"),
    "#777777": ("M_gpu", "T_tp"),
    "#CC3311": ("A_mask", "T_gather"),
    "#997700": ("A_router",),
    "#BBCC33": ("A_meta",),
    "#DDAA33": ("A_buffers", "T_pointwise"),
}
_COLORS = {LABELS[name]: color for color, names in _PARTS.items() for name in names}


def find_colors(labels: list[str]) -> list[str]:
    """Return the colours of parts by their label. A part that is not in the table gets a colour that no other label
    has."""
    free = iter([color for color in _PARTS if color not in {_COLORS.get(label) for label in labels}])
    return [_COLORS.get(label) or next(free) for label in labels]
