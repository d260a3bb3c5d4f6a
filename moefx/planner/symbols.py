"""The meaning of the formulas' input symbols. Results have their meaning in their `Formula`.

`Layout.values` and `step_formulas.collect_values` compute their values.
"""

from __future__ import annotations

import dataclasses
import re

from .sheet import Sheet, distinct_parts, format_number

# symbol -> (unit, meaning); the unit of a number is "1". "#": number of a level of the topology, 1 is the coarsest.
SYMBOLS: dict[str, tuple[str, str]] = {
    # the model
    "L": ("1", "layers"),
    "L_moe": ("1", "layers with experts"),
    "d": ("1", "width of a token's row"),
    "V": ("1", "vocabulary"),
    "E": ("1", "experts of a layer"),
    "k": ("1", "experts that a token takes"),
    "F": ("1", "hidden width of an expert"),
    "F_shared": ("1", "hidden width of the shared experts together"),
    "F_dense": ("1", "hidden width of the FFN of a layer without experts"),
    "n_mat": ("1", "matrices of an expert: 3 with a gate, else 2"),
    "n_shared": ("1", "1 if there are shared experts, else 0"),
    "n_attn": ("1", "1 if layers have attention, else 0"),
    "H": ("1", "heads of attention"),
    "w_attn": ("1", "widths of q, k, v and of attention's output together"),
    "w_latent": ("1", "widths of the latent rows of attention (MLA), 0 without"),
    "w_scores": ("1", "widths of q and of attention's output together"),
    "w_point": ("B", "bytes of a token that element-wise operations of a layer read and write, 0 if unknown"),
    "N_attn": ("1", "parameters of attention and norms, of a layer"),
    "N_expert": ("1", "parameters of an expert"),
    "N_rest": ("1", "parameters of router and shared experts, of a layer"),
    "N_ffn": ("1", "parameters of the FFN of a layer without experts"),
    "N_other": ("1", "parameters outside of layers and embeddings"),
    "n_emb": ("1", "matrices of the vocabulary on a stage: 2 if one stage has input and output and they differ"),
    "F_token": ("FLOP", "of a token, forward and backward, nothing run again; F_model of Piper eq. 12"),
    # ranks
    "ranks": ("1", "GPUs, all of them"),
    "PP": ("1", "stages of the pipeline"),
    "TP": ("1", "ranks that share the dense matrices and have the same tokens"),
    "DP": ("1", "ranks of a stage with other sequences"),
    "EP": ("1", "ranks that share the experts of a layer"),
    "R": ("1", "ranks of a stage that have the same experts"),
    "G": ("1", "ranks that a sequence is spread over in MoE blocks: TP with SSMB, else 1"),
    "z_p": ("1", "ranks that the parameters outside of routed experts are spread over: DP with ZeRO-3, else 1"),
    "z_g": ("1", "ranks that the gradients outside of routed experts are spread over: DP with ZeRO-2 and 3, else 1"),
    "z_o": ("1", "ranks that the optimizer states outside of routed experts are spread over: DP with ZeRO, else 1"),
    "y_p": ("1", "ranks that an expert's parameters are spread over: its replicas with ZeRO-3, else 1"),
    "y_g": ("1", "ranks that an expert's gradients are spread over: its replicas with ZeRO-2 and 3, else 1"),
    "y_o": ("1", "ranks that an expert's optimizer states are spread over: its replicas with ZeRO, else 1"),
    "n_z3": ("1", "1 with ZeRO-3, else 0"),
    "n_tp": ("1", "1 if TP is above 1, else 0"),
    "n_g": ("1", "1 with SSMB, else 0"),
    # tokens
    "B": ("1", "sequences of a step, over all GPUs"),
    "b": ("1", "sequences of a micro-batch of a rank"),
    "s": ("1", "tokens of a sequence"),
    "t": ("1", "tokens of a rank in an exchange"),
    "M": ("1", "micro-batches of a rank in a step"),
    "m": ("1", "micro-batches in flight: whose activations the stage keeps at once"),
    "skew": ("1", "rows of the busiest rank over the mean; 1 if tokens are spread evenly"),
    # the checkpoint policy
    "n_again": ("1", "1 if layers keep their inputs only and run again, else 0"),
    "n_up": ("1", "1 if experts keep their input only and the up-projections run again, else 0"),
    "n_rows": ("1", "copies that are kept of each row at the experts; 0: read by index, kept once a rank"),
    "n_h": ("1", "tensors of an expert's hidden width that are kept"),
    "n_y": ("1", "copies of the experts' outputs that are kept"),
    "n_kept": ("1", "layers whose activations are kept at once, over all micro-batches in flight"),
    "n_flat": ("1", "1 if a token travels once for each of its experts, else 0"),
    "n_all": ("1", "1 if a token travels to every rank, else 0"),
    "c": ("1", "capacity factor: rows that buffers have room for, over those there are"),
    "w_mask": ("B", "bytes of an element of the masks [S, E, C], all of them together; 0 without masks"),
    "M_fw": ("B", "memory of the framework and its libraries"),
    # the stages of the pipeline
    "l_moe": ("1", "layers with experts of a stage"),
    "n_logits": ("1", "1 on the stage with the logits, the last, else 0; 0 if there is no vocabulary"),
    "l_t": ("1", "layers of the stage that takes longest"),
    "l_t_moe": ("1", "layers with experts of the stage that takes longest"),
    "h_t": ("1", "1 if the stage that takes longest has the logits, else 0"),
    "bubble_of": ("1", "of a micro-batch, how much each other stage adds to a step, by the schedule; 1F1B: all"),
    "n_p2p": ("1", "how often in a step a stage waits for a transfer to the next stage or back"),
    "n_grads": ("1", "how often gradients are reduced: in each micro-batch with ZeRO-2 and 3, else once"),
    # the device
    "peak": ("FLOP/s", "the most that the GPU can do"),
    "BW": ("B/s", "bandwidth of its memory"),
    "e_gemm": ("1", "part of the peak that large GEMMs reach"),
    "e_attn": ("1", "part of the peak that attention reaches"),
    "v_dense": ("B/s", "rate of the operands of GEMMs other than the experts'"),
    "t_dense": ("s", "launch of a GEMM other than the experts'"),
    "v_gemm": ("FLOP/s", "rate of the experts' GEMMs"),
    "v_rows": ("B/s", "rate of the experts' rows, by the time that a byte adds; it may be above BW"),
    "v_weights": ("B/s", "rate of the experts' weights, likewise"),
    "t_launch": ("s", "launches of the experts' forward"),
    "tile": ("1", "rows of a tile of the experts' GEMMs"),
    # links
    "w": ("B", "bytes of a row with all choices of its token, mean of dispatch, combine and their backwards"),
    "w1": ("B", "bytes of a row with one choice of its token, mean of dispatch, combine and their backwards"),
    "w_all": ("B", "bytes of a row that every rank gets, mean of dispatch, combine and their backwards"),
    "n#": ("1", "units of level # that a unit of the level above has; 1 is the coarsest, the last are ranks"),
    "alpha#": ("s", "latency of an exchange at level #"),
    "beta#": ("s/B", "time of a byte that leaves a rank at level #"),
    "alpha0": ("s", "latency of an exchange over all levels at once"),
    "beta0": ("s/B", "time of a byte that leaves a rank over all levels at once"),
    "gamma": ("s/B", "time to pack and unpack a byte of rows"),
    "alpha_tp": ("s", "latency between the ranks of TP"),
    "beta_tp": ("s/B", "time of a byte between the ranks of TP"),
    "alpha_pp": ("s", "latency between stages"),
    "beta_pp": ("s/B", "time of a byte between stages"),
    "beta_dp": ("s/B", "time of a byte in a ring of the ranks of DP"),
    "beta_replicas": ("s/B", "time of a byte in a ring of the ranks that have the same experts"),
}  # fmt: skip
_DISTINCT = (
    "distinct_parts(E, k, n)",
    "",
    "on how many of n equal parts of the experts those of a token are, on average",
)


@dataclasses.dataclass(frozen=True)
class ExplainedFormulas:
    """Formulas with their numbers, and the meaning of their symbols.

    Attributes:
        symbols: (symbol, value with its unit, meaning) of each input, sorted.
    """

    formulas: str
    symbols: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        name, value = (max(len(row[i]) for row in self.symbols) + 2 for i in (0, 1))
        lines = [f"  {row[0]:<{name}}{row[1]:<{value}}{row[2]}" for row in self.symbols]
        return "\n".join([self.formulas, "where", *lines])


def explain_formulas(sheet: Sheet, *names: str, **values: float) -> ExplainedFormulas:
    """Explain the formulas of these results, with `values` for the inputs."""
    symbol_names: set[str] = set()
    has_parts = False
    for formula in sheet.dependencies(*names):
        symbol_names |= {str(symbol) for symbol in formula.expression.free_symbols}
        has_parts = has_parts or bool(formula.expression.atoms(distinct_parts))
    rows = []
    for symbol in sorted(symbol_names - sheet.formulas.keys(), key=lambda name: (name.lower(), name)):
        unit, text = find_meaning(symbol)
        rows.append((symbol, format_number(values[symbol]) + ("" if unit == "1" else f" {unit}"), text))
    return ExplainedFormulas(sheet.format_results(*names, **values), (*rows, *([_DISTINCT] if has_parts else [])))


def find_meaning(symbol: str) -> tuple[str, str]:
    """Return the (unit, meaning) of a symbol.

    Raises:
        KeyError: the symbol is not in `SYMBOLS`.
    """
    if symbol in SYMBOLS:
        return SYMBOLS[symbol]
    name, level = re.fullmatch(r"(.*?)(\d*)", symbol).groups()  # type: ignore[union-attr]
    unit, text = SYMBOLS[f"{name}#"]
    return unit, text.replace("#", level)
