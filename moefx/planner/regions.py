"""Grids of sizes: at which layouts fit, and at which SSMB saves more memory than TED."""

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
    from ..ranking import Ranking

Axis = Literal["PP", "TP", "EP"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Layouts with two given sizes.

    Attributes:
        best: the fastest one that fits, or None.
        lacking: bytes that the nearest one lacks if none fits.
    """

    best: Entry | None = None
    lacking: float = 0.0


@dataclasses.dataclass(frozen=True)
class LayoutGrid:
    """Layouts by two of their sizes.

    Sizes that the constraints exclude (Piper eq. 8 to 10) are on no axis. Sizes that do not divide the ranks together
    have no cell.
    """

    axes: tuple[Axis, Axis]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    cells: dict[tuple[int, int], Cell]


def build_layout_grid(ranking: Ranking, axes: tuple[Axis, Axis] = ("PP", "EP")) -> LayoutGrid:
    """Build the grid of two axes, with the best of all other sizes in each cell (Piper figure 10)."""
    cells: dict[tuple[int, int], Cell] = {}
    for entry in ranking:  # the fastest first
        sizes = {"PP": entry.layout.pp, "TP": entry.layout.tp, "EP": entry.layout.ep}
        cells.setdefault((sizes[axes[0]], sizes[axes[1]]), Cell(entry))
    for rejected in sorted((r for r in ranking.rejected if r.lacking), key=lambda r: r.lacking):
        for sizes in rejected.sizes:
            cells.setdefault((sizes[axes[0]], sizes[axes[1]]), Cell(lacking=rejected.lacking))
    rows, columns = (tuple(sorted({cell_key[i] for cell_key in cells})) for i in (0, 1))
    return LayoutGrid(axes, rows, columns, cells)


c, k, E, EP, F, n_mat, d, G, b, s, l_moe, m, n_kept = quantities("c k E EP F n_mat d G b s l_moe m n_kept")

# X-MoE appendix C.2 for a GPU: with all its layers, its micro-batches in flight, and the experts' own matrices.
TRADE_OFF = Sheet(
    [
        Formula(
            "A_saving", 4 * n_kept * c * k * b * s * d * (G - 1) / G, "B", "activations that SSMB saves, X-MoE eq. 1"
        ),
        Formula(
            "M_cost", l_moe * E / EP * 4 * n_mat * F * d * (G - 1) / G, "B",
            "parameters and gradients that TED saves, X-MoE appendix C.2",
        ),
    ]
)  # fmt: skip


def compute_ssmb_border(tokens: int, capacity_factor: float = 1.0) -> float:
    """Return the ratio of top-k to expert width at which SSMB and TED save the same (X-MoE figure 17). Above, SSMB
    saves more.

    Args:
        tokens: tokens of a sequence.
        capacity_factor: rows of an expert over its even share.
    """
    placeholders = dict.fromkeys(X_MOE.inputs, 1)
    return X_MOE(**placeholders | {"S": tokens, "c": capacity_factor})["r_border"]


def collect_trade_off_values(model: Architecture, layout: Layout) -> dict[str, float]:
    """Return the symbols' values for `TRADE_OFF`. A layout without TP is treated as TP of two ranks.

    `n_kept` is the number of layers whose activations are kept at the same time, over all micro-batches in flight.
    """
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


def explain_ssmb_saving(model: Architecture, layout: Layout, platform: Platform) -> ExplainedFormulas | None:
    """Return the formulas of the memory that SSMB saves for a layout, with numbers; None if the layout cannot have
    SSMB."""
    if layout.tp == 1 or layout.ep % layout.tp:
        return None
    formula = Formula("M_saved", _SAVED[layout.recompute], "B", "of all blocks in flight, on the stage that needs most")
    stage = find_fullest_stage(model, with_it := dataclasses.replace(layout, ssmb=True))
    sheet = MEMORY + Sheet([_LESS, formula])
    return explain_formulas(sheet, "M_saved", **with_it.values(model, stage), M_fw=platform.overhead)
