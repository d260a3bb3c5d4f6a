"""Where layouts fit and where not, and where SSMB saves more than TED."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

import sympy

from .architecture import Architecture
from .entries import Entry
from .layout import Layout
from .memory_formulas import MEMORY
from .paper_formulas import X_MOE
from .platforms import Platform
from .sheet import Formula, Sheet, quantities
from .step_formulas import find_fullest_stage
from .symbols import ExplainedFormulas, explain_formulas

if TYPE_CHECKING:
    from .ranking import Ranking

Axis = Literal["PP", "TP", "EP"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Layouts of two sizes: the fastest one that fits, or how many bytes the one that lacks least is short of."""

    best: Entry | None = None
    lacking: float = 0.0


@dataclasses.dataclass(frozen=True)
class Region:
    """Layouts by two of their sizes; where no ranks divide so there is no cell.

    Sizes of which nothing is left to fit (Piper eq. 8 to 10) are on no axis.
    """

    axes: tuple[Axis, Axis]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    cells: dict[tuple[int, int], Cell]


def build_region(ranking: Ranking, axes: tuple[Axis, Axis] = ("PP", "EP")) -> Region:
    """Layouts by the sizes of two axes, over all of the others (Piper figure 10)."""
    cells: dict[tuple[int, int], Cell] = {}
    for entry in ranking:  # the fastest first
        sizes = {"PP": entry.layout.pp, "TP": entry.layout.tp, "EP": entry.layout.ep}
        cells.setdefault((sizes[axes[0]], sizes[axes[1]]), Cell(entry))
    for rejected in sorted((r for r in ranking.rejected if r.lacking), key=lambda r: r.lacking):
        for sizes in rejected.sizes:
            cells.setdefault((sizes[axes[0]], sizes[axes[1]]), Cell(lacking=rejected.lacking))
    rows, columns = (tuple(sorted({where[i] for where in cells})) for i in (0, 1))
    return Region(axes, rows, columns, cells)


c, k, E, EP, F, n_mat, d, G, b, s, l_moe, m, n_kept = quantities("c k E EP F n_mat d G b s l_moe m n_kept")

# X-MoE appendix C.2 for a GPU: all its layers, the micro-batches in flight, and experts of the matrices that they have.
TRADE_OFF = Sheet(
    [
        Formula("A_saving", 4 * n_kept * c * k * b * s * d * (G - 1) / G, "B", "what SSMB keeps less, X-MoE eq. 1"),
        Formula(
            "M_cost", l_moe * E / EP * 4 * n_mat * F * d * (G - 1) / G, "B",
            "what TED has less of parameters and gradients, X-MoE appendix C.2",
        ),
    ]
)  # fmt: skip


def ssmb_border(tokens: int, capacity: float = 1.0) -> float:
    """Choices over an expert's width at which SSMB and TED save alike (X-MoE figure 17): above, SSMB saves more."""
    anything = dict.fromkeys(X_MOE.inputs, 1)
    return X_MOE(**anything | {"S": tokens, "c": capacity})["r_border"]


def trade_off_values(model: Architecture, layout: Layout) -> dict[str, float]:
    """What `TRADE_OFF` is given. `n_kept`: layers' activations that are kept at once, of all micro-batches in flight. A
    layout without TP is taken as one of two ranks."""
    layers = math.ceil(model.num_moe_layers / layout.pp)
    return {
        "c": 1, "k": model.top_k, "E": model.num_experts, "EP": layout.ep, "F": model.expert_size,
        "n_mat": model.matrices, "d": model.hidden_size, "G": max(2, layout.tp), "b": layout.sequences,
        "s": layout.tokens, "l_moe": layers, "n_kept": 1 if layout.recompute else layers * layout.in_flight(0),
    }  # fmt: skip


A_block, A_mask, A_less, A_moe_layer, A_dense_layer, A_again, moe_layers = quantities(
    "A_block A_mask A_less A_moe_layer A_dense_layer A_again l_moe"
)
_LESS = Formula(
    "A_less", (G - 1) * (A_block + G * A_mask - 4 * (E / EP + 1)), "B",
    "without SSMB a block keeps G times as much, of masks G**2; where an expert's rows begin, as much",
)  # fmt: skip
_SAVED = {
    False: m * moe_layers * A_less,
    True: sympy.Max(A_moe_layer + A_less, A_dense_layer) - A_again,  # one layer keeps more than its input at a time
}


def saved_by_ssmb(model: Architecture, layout: Layout, platform: Platform) -> ExplainedFormulas | None:
    """What a layout with SSMB keeps less than without it, by the formulas of `memory`, with their numbers; None of a
    layout that cannot have it."""
    if layout.tp == 1 or layout.ep % layout.tp:
        return None
    formula = Formula("M_saved", _SAVED[layout.recompute], "B", "of all blocks in flight, on the stage that needs most")
    stage = find_fullest_stage(model, with_it := dataclasses.replace(layout, ssmb=True))
    sheet = MEMORY + Sheet([_LESS, formula])
    return explain_formulas(sheet, "M_saved", **with_it.values(model, stage), M_fw=platform.overhead)
