"""Bytes and seconds of exchanges (X-MoE section 4.2 and appendix C, Piper sections III.B and V), as formulas.

An exchange at one level of the topology takes `alpha` + bytes that leave a rank * `beta` seconds.
`Plan(dispatch="auto")` decides by the same formulas (`runtime.ranks.link_costs`). `symbols` has the meaning of each
symbol; alpha1, beta1, ... are of the ranks that differ at this level only.
"""

from __future__ import annotations

import functools
import math

import sympy

from .sheet import Formula, Sheet, distinct, quantities, quantity

E, k, t, w, w1, w_all, gamma = quantities("E k t w w1 w_all gamma")
alpha0, beta0 = quantities("alpha0 beta0")
d, b, s, G, TP, DP, R, n_attn = quantities("d b s G TP DP R n_attn")
P_dense, P_experts = quantities("P_dense P_experts")


@functools.lru_cache
def build_exchange_sheet(levels: int) -> Sheet:
    """Return the formulas of one exchange of a rank's tokens in one direction.

    `rows_flat_2` are the rows of a token that leave a rank over level 2 with dispatch "flat", `T_flat` the
    seconds. Dispatches of several hops ("rbd", "halo") need at least two levels.
    """
    sizes = [quantity(f"n{i + 1}") for i in range(levels)]
    links = [(quantity(f"alpha{i + 1}"), quantity(f"beta{i + 1}")) for i in range(levels)]
    ranks = sympy.Mul(*sizes)
    units_above = [sympy.Mul(*sizes[:i]) for i in range(levels)]  # number of units at the level above
    nodes = units_above[-1]
    formulas: list[Formula] = []

    def formula(name: str, expression: sympy.Expr, unit: str, meaning: str) -> sympy.Symbol:
        formulas.append(Formula(name, expression, unit, meaning))
        return formulas[-1].symbol

    def add_even_exchange(dispatch: str, rows: sympy.Expr, w: sympy.Expr, note: str) -> None:
        """Add the formulas of an exchange among all ranks, which uses the links of all levels at the same time."""
        leaving = [
            formula(
                f"rows_{dispatch}_{i + 1}",
                rows / within * (1 - 1 / size),
                "1",
                f"rows of a token that leave a rank over level {i + 1}: {note}",
            )
            for i, (size, within) in enumerate(zip(sizes, units_above, strict=True))
        ]
        slowest = [rows_out * t * w * beta for rows_out, (_, beta) in zip(leaving, links, strict=True)]
        transfer = sympy.Max(*slowest, rows * (1 - 1 / ranks) * t * w * beta0)
        took = f"an exchange, one direction: {note}; the slowest level"
        formula(f"T_{dispatch}", alpha0 + transfer + rows * t * w * gamma, "s", took)

    add_even_exchange("flat", k, w1, "one row for each slot")
    of_ranks = formula("D", distinct(E, k, ranks), "1", "ranks that a token's experts are on; X-MoE figure 4")
    add_even_exchange("dedup", of_ranks, w, "one row for each rank")
    add_even_exchange("all_gather", ranks, w_all, "one row for every rank")
    if levels > 1:
        seconds, hop_rows = [], []
        for i, (size, within) in enumerate(zip(sizes, units_above, strict=True)):
            level = f"level {i + 1}"
            parts = formula(f"D{i + 1}", distinct(E, k, within * size), "1", f"units of {level} with a token's experts")
            leave = f"rows of a token that leave a rank over {level} alone; X-MoE section 4.2"
            rows = formula(f"rows_rbd_{i + 1}", parts * (1 - 1 / size), "1", leave)
            alpha, beta = links[i]
            hop_rows.append(parts)
            seconds.append(formula(f"T_hop_{i + 1}", alpha + rows * t * w * beta, "s", f"a hop over {level}"))
        handling = sympy.Add(*hop_rows) * t * w * gamma
        formula("T_rbd", sympy.Add(*seconds) + handling, "s", "an exchange, one direction: one hop after the other")
        alpha, beta = links[-1]
        inside = of_ranks * (1 - 1 / sizes[-1]) * t * w
        own_node, other_nodes = alpha + inside / nodes * beta, alpha + inside * (1 - 1 / nodes) * beta
        hops = sympy.Add(*seconds[:-1])
        handled_rows = sympy.Add(*hop_rows[:-1]) * (1 - 1 / nodes) + of_ranks
        formula(
            "T_halo",
            sympy.Max(hops, own_node) + other_nodes + handled_rows * t * w * gamma,
            "s",
            "an exchange, one direction, in three phases; Piper eq. 13",
        )
    return Sheet(formulas)


REDUNDANCY = Sheet(
    [
        Formula("D_nodes", distinct(E, k, quantity("N")), "1", "nodes that a token's experts are on"),
        Formula("redundancy", 1 - quantity("D_nodes") / k, "1", "rows that need not cross nodes; X-MoE figure 4"),
    ]
)

V_gather, V_p2p, V_tp, V_grad_dense, V_grad_experts = quantities("V_gather V_p2p V_tp V_grad_dense V_grad_experts")
VOLUMES = Sheet(
    [
        Formula(
            "V_gather",
            2 * b * s * d * (G - 1) / G,
            "B",
            "SSMB: bytes that a rank receives per layer in one direction; X-MoE C.2",
        ),
        Formula("V_p2p", 2 * b * s * d, "B", "to the next stage or back, of a micro-batch; Piper section III.B.2"),
        Formula(
            "V_tp",
            4 * (1 + n_attn) * 2 * b * s * d * (TP - 1) / TP,
            "B",
            "all-reduces of TP, a layer: two, four with attention, as rings; Megatron-LM",
        ),
        Formula(
            "V_grad_dense", 4 * P_dense * (DP - 1) / DP, "B", "all-reduce of gradients of 2 bytes over DP, as a ring"
        ),
        Formula(
            "V_grad_experts", 4 * P_experts * (R - 1) / R, "B", "all-reduce of experts' gradients over their R replicas"
        ),
    ]
)


def exchange_symbol(dispatch: str) -> str:
    """Return the symbol of the seconds of an exchange in one direction with a dispatch."""
    return "T_all_gather" if dispatch == "gather" else f"T_{dispatch}"  # T_gather is that of SSMB


def row_bytes(
    width: int, slots: int, experts_per_rank: int, is_weighted: bool = True, weight_bytes: int = 4
) -> tuple[int, int, int, int]:
    """Compute the bytes of a row in (dispatch, combine, backward of combine, backward of dispatch).

    A row has the token's values of two bytes each. In dispatch each slot adds its routing weight and its expert's
    number on the rank, in the backward of dispatch the weight's gradient. Columns begin at multiples of 16 bytes
    (`ir.ops.row_packing`).

    Args:
        slots: number of slots of a row.
        experts_per_rank: experts on a rank.
        is_weighted: whether routing weights travel. They do not for k = 1.
        weight_bytes: bytes of a routing weight.
    """
    bytes_per_number = next((num_bytes for num_bytes in (1, 2) if experts_per_rank <= 2 ** (8 * num_bytes - 1)), 4)
    values, weights = _aligned(2 * width), _aligned(weight_bytes * slots * is_weighted)
    return values + weights + _aligned(bytes_per_number * slots), 2 * width, 2 * width, values + weights


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


Links = tuple[tuple[float, float], ...]


def combine_links(sizes: tuple[int, ...], links: Links) -> tuple[float, float]:
    """Compute (alpha, beta) of an even exchange among all ranks.

    Each level carries its part of the bytes that leave a rank. The levels work in parallel, so the slowest one counts.
    """
    num_units, ranks, slowest = 1, math.prod(sizes), 0.0
    for size, (_, beta) in zip(sizes, links, strict=True):
        slowest = max(slowest, (1 - 1 / size) / num_units * beta)
        num_units *= size
    return max(alpha for alpha, _ in links), slowest / (1 - 1 / ranks) if ranks > 1 else links[0][1]


def collect_level_values(
    sizes: tuple[int, ...], links: Links, even_link: tuple[float, float], handling: float = 0.0
) -> dict[str, float]:
    """Return a topology's values for `build_exchange_sheet(len(sizes))`.

    Args:
        sizes, links: units and (alpha, beta) of each level, coarse to fine.
        even_link: (alpha, beta) over all levels.
        handling: seconds to pack and unpack a byte.
    """
    values = {"alpha0": even_link[0], "beta0": even_link[1], "gamma": handling}
    for i, (size, (alpha, beta)) in enumerate(zip(sizes, links, strict=True)):
        values |= {f"n{i + 1}": size, f"alpha{i + 1}": alpha, f"beta{i + 1}": beta}
    return values
