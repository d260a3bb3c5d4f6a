"""Split the bytes of a GPU and the seconds of a step into parts.

The parts follow from the formulas, so none is forgotten when a formula changes: a sum is split into its terms, and a
term that is a multiple of another sum of the same unit is split again. A term without such a result stays with the sum.
"""

from __future__ import annotations

import functools

import sympy

from .architecture import Architecture
from .layout import Layout
from .memory_formulas import MEMORY
from .platforms import Platform
from .sheet import Formula, Sheet
from .step_formulas import collect_values, find_fullest_stage, find_step_sheet

# Labels of the parts. A part without a label is shown by the name of its formula.
LABELS = {
    "M_params": "parameters", "M_grads": "gradients", "M_optimizer": "optimizer states", "A_attention": "attention",
    "A_dispatch": "dispatched rows", "A_interm": "experts' hidden rows", "A_combine": "experts' outputs",
    "A_mask": "dispatch masks", "A_meta": "ERI arrays", "A_router": "router", "A_shared": "shared experts",
    "A_ffn": "FFN without experts", "A_again": "a layer that runs again", "A_logits": "logits",
    "A_buffers": "buffers for all tokens",
    "M_activations": "inputs of layers", "M_gpu": "framework",
    "T_attention": "attention", "T_pointwise": "norms, element-wise", "T_experts": "experts",
    "T_experts_step": "gradients of experts' weights",
    "T_rest": "router, shared experts", "T_ffn": "FFN without experts", "T_logits": "logits",
    "T_alltoall": "all-to-all", "T_tp": "TP all-reduce", "T_gather": "SSMB gather", "T_p2p": "between stages",
    "T_params": "ZeRO-3 gather", "T_bubble": "pipeline bubble", "T_grads": "gradient all-reduce",
    "T_optimizer": "optimizer",
}  # fmt: skip


def compute_memory_parts(model: Architecture, platform: Platform, layout: Layout) -> dict[str, float]:
    """Compute the bytes of each part on the stage that needs most. They add up to `M_gpu`."""
    stage = find_fullest_stage(model, layout)
    return evaluate_parts(MEMORY, "M_gpu", layout.values(model, stage) | {"M_fw": platform.overhead})


def compute_time_parts(
    model: Architecture, platform: Platform, layout: Layout, experts_first: bool = True
) -> dict[str, float]:
    """Compute the seconds of each part of a step. They add up to `T_step`."""
    sheet = find_step_sheet(layout, platform, experts_first)
    return evaluate_parts(sheet, "T_step", collect_values(model, layout, platform, experts_first))


def evaluate_parts(sheet: Sheet, name: str, values: dict[str, float]) -> dict[str, float]:
    """Evaluate `split_sum`."""
    terms, with_parts = _split_sheet(sheet, name)
    results = with_parts(**values)
    return {term: results[f"part_{term}"] for term in terms}


def split_sum(sheet: Sheet, name: str) -> dict[str, sympy.Expr]:
    """Return the terms of a sum by the name of their formula, in the order of the sheet."""
    terms: dict[str, sympy.Expr] = {}

    def take(formula: Formula, factor: sympy.Expr) -> None:
        for term, inside in _list_terms(sheet, formula):
            if inside is None:
                terms[formula.name] = terms.get(formula.name, sympy.Integer(0)) + factor * term
            elif _is_sum(sheet, inside):
                take(inside, factor * term / inside.symbol)
            else:
                terms[inside.name] = terms.get(inside.name, sympy.Integer(0)) + factor * term

    take(sheet.formulas[name], sympy.Integer(1))
    return {name: terms[name] for name in sheet.formulas if name in terms}


def _list_terms(sheet: Sheet, formula: Formula) -> list[tuple[sympy.Expr, Formula | None]]:
    """List the terms of a sum, each with the result of the same unit that it is a multiple of, or None."""
    terms = []
    for term in sympy.Add.make_args(sympy.expand(formula.expression)):
        factors = [sheet.formulas.get(str(factor)) for factor in sympy.Mul.make_args(term)]
        inside = [f for f in factors if f is not None and f.unit == formula.unit]
        terms.append((term, inside[0] if len(inside) == 1 else None))
    return terms


def _is_sum(sheet: Sheet, formula: Formula) -> bool:
    """Return whether the formula is a sum to split. A bubble is not: it is a multiple of a micro-batch's time."""
    return formula.expression.is_Add and any(inside is not None for _, inside in _list_terms(sheet, formula))


@functools.lru_cache
def _split_sheet(sheet: Sheet, name: str) -> tuple[tuple[str, ...], Sheet]:
    terms, unit = split_sum(sheet, name), sheet.formulas[name].unit
    return tuple(terms), sheet + Sheet(Formula(f"part_{term}", terms[term], unit, "") for term in terms)
