"""Masks of the program that tell which slots count, and refusals of drops without a mask.

A block whose drops follow no rule (see `drop_rules`) may compute a tensor with one entry per token and slot. The
rewritten block keeps that computation, and drops the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.environment.code_locations import Source
from ...capture.tracing.capture_result import FORCE_VARIED
from ...errors import Cause, Refused
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import collect_numbers
from ..facts.host_comparisons import find_comparison
from ..facts.op_classes import COMPARISONS
from ..interventions.forced_outcome import ASK_ROWS, refuse_limit
from ..lift.canonical_form import Axis, Body, CanonicalForm, NodeRef
from ..lift.expert_index import enumerate_slot_views
from ..terms.index_arithmetic import unravel
from ..terms.node_semantics import Semantics
from ..terms.normal_form import Terms
from ..terms.term import Term, is_const
from .match_result import Match

TieBreak = Literal["exact", "unstable", "all_or_none"]  # how an expert treats equal weights, see `drop_rules`


def find_keep_masks(match: Match, find_tie_break: Callable[[], TieBreak | None]) -> list[NodeRef] | None:
    """Find the program's mask of the slots that count.

    Args:
        find_tie_break: tells how an expert treats slots with equal weights (see `drop_rules`).

    Returns:
        A node for each capture; None if the dropped slots have zero weights or rows, so that no mask is needed.

    Raises:
        Refused: the program has no mask.
    """
    candidates_by_capture = [_find_mask_candidates(form) for form in match.forms]
    for ref in _sort_by_directness(candidates_by_capture[0], match.forms[0]):
        refs = [ref]
        for other in candidates_by_capture[1:]:
            counterpart = next(
                (r for r in other if r.signature == ref.signature and _are_same_op(r.node, ref.node)), None
            )
            if counterpart is None:
                break
            refs.append(counterpart)
        if len(refs) == len(candidates_by_capture):
            return refs
    if all(_is_explained_by_zeros(match, i) for i in range(len(match.forms))):
        return None
    raise _explain_no_mask(match, find_tie_break)


def _explain_no_mask(match: Match, find_tie_break: Callable[[], TieBreak | None]) -> Refused:
    """Return the refusal that names the likeliest reason why slots are dropped without a mask."""
    if varied := _find_varied_value(match):
        return Refused(
            "a value that is constant for few tokens decides which slots are dropped, and the program has no mask "
            f"[tokens, slots] of the kept ones: {varied.text}",
            source=str(varied),
            remedy="compute the mask for all slots at once, before the experts, and multiply the routing weights by it",
        )
    skips = [form.forced_read for form in match.forms if not form.kept_slots.all()]
    if (source := skips[0]) is not None and None not in skips:
        return Refused(
            f"a number read from a tensor decides whether an expert runs: {source.text}",
            source=str(source),
            remedy=ASK_ROWS,
        )
    if (skipped := _explain_left_out(match.forms)) is not None:
        return skipped
    tie_break = find_tie_break()
    if tie_break == "unstable":
        return Refused(
            "among equal weights, an expert does not keep the first tokens, although its sort is stable",
            source=str(match.forms[0].cut.meta["source"]),
            remedy="sort the weights in the order of the tokens, as in "
            "weights.argsort(descending=True, stable=True)[:capacity]",
        )
    if tie_break == "all_or_none":
        return Refused(
            "an expert keeps all weights above a threshold, so equal weights are kept or dropped together; moefx "
            "supports capacities that are numbers of rows",
            source=str(match.forms[0].cut.meta["source"]),
            remedy="select a number of rows, as in weights.argsort(descending=True, stable=True)[:capacity], or "
            "multiply the routing weights, before the experts, by a mask [tokens, slots] of the kept slots",
        )
    return Refused(
        "some slots are dropped by no known rule, and the program has no mask [tokens, slots] of the kept ones",
        source=str(match.forms[0].cut.meta["source"]),
        remedy="compute a mask over all slots instead of dropping them in Python, as in kept = ranks < capacity, and "
        "multiply the routing weights by it",
        cause=Cause.UNEXPLAINED_DROPS,
    )


def _explain_left_out(forms: Sequence[CanonicalForm]) -> Refused | None:
    """Return the refusal of a program that skips whole experts by their number of tokens, or None."""
    run, left_out = set(), set()
    for form in forms:
        for e in form.ids.unique().tolist():
            kept = form.kept_slots[form.ids == e]
            if bool(kept.any()) != bool(kept.all()):
                return None
            (run if bool(kept.all()) else left_out).add(len(kept))
    if not run or not left_out or not (max(left_out) < min(run) or max(run) < min(left_out)):
        return None
    are_few = max(left_out) < min(run)
    lowest, highest = (max(left_out), min(run)) if are_few else (max(run), min(left_out))
    for read in (read for form in forms for read in form.capture.reads):
        comparison = find_comparison(read)
        limit = comparison.other if comparison is not None and comparison.depends_on_routing else None
        if type(limit) in (int, float) and lowest <= limit <= highest:
            return refuse_limit(read.source, skips_few=are_few)
    return None


def _find_varied_value(match: Match) -> Source | None:
    """Find the value whose variation (`FORCE_VARIED`) made a capture drop slots that it keeps otherwise."""
    full = {(str(form.capture.routing), form.tokens) for form in match.forms if form.kept_slots.all()}
    for form in match.forms:
        if not form.kept_slots.all() and (str(form.capture.routing), form.tokens) in full:
            for at, how in form.capture.interventions.items():
                if how == FORCE_VARIED and isinstance(at, tuple) and isinstance(at[0], Source):
                    return at[0]
    return None


def _is_explained_by_zeros(match: Match, capture: int) -> bool:
    """Return whether each dropped slot of a capture has a zero weight or row that makes its summand zero."""
    form = match.forms[capture]
    semantics = Semantics(form.capture.nodes, form.capture.concrete_value)
    terms = semantics.terms

    def is_zero(ref: NodeRef, t: int, k: int) -> bool:
        ref = ref.columns[k] if ref.columns else ref
        if not {"t", "k", "e"} & set(ref.axes) or {"tk", "kt", "m", "s"} & set(ref.axes):
            return False
        it = iter(unravel(t, form.tokens) if ref.axes.count("t") > 1 else (t,))
        index_by_axis = {
            a: k if x == "k" else int(form.ids[t, k]) if x == "e" else next(it) for a, x in enumerate(ref.axes)
        }
        term = semantics.get_term(ref.node)
        return all(0 <= i < term.shape[a] for a, i in index_by_axis.items()) and is_const(
            terms.resolve(terms.pick_axes(term, index_by_axis)), 0
        )

    owner = {e: group for group in match.groups for e in group.ids}
    for t, k in (~form.kept_slots).nonzero().tolist():
        if (group := owner.get(int(form.ids[t, k]))) is not None:
            zeros = {i for i, refs in enumerate(group.values) if is_zero(refs[capture], t, k)}
            if not is_const(_substitute_zeros(terms, group.body, zeros), 0):
                return False
    return True


def _substitute_zeros(terms: Terms, body: Body, zeros: set[int]) -> Term:
    """Build the term of a body with zeros for some of its values. Unknown ops become opaque terms."""
    args: list[Any] = [_substitute_zeros(terms, a, zeros) if isinstance(a, Body) else a for a in body.args]
    match body.op:
        case "value" if args[0] in zeros:
            return terms.const(0, body.shape)
        case "const":
            return terms.const(args[0], body.shape)
        case "pointwise":
            return terms.pointwise(args[0], *args[2:], **dict(args[1]))
        case "einsum":
            return terms.einsum(args[0], args[1], args[2:])
        case "sum":
            return terms.sum(args[1], args[0])
        case "reshape" | "expand":
            return getattr(terms, body.op)(args[0], body.shape)
        case "permute" | "slice":
            return getattr(terms, body.op)(*args)
    return terms.make("node", (body,), body.shape)


def _find_mask_candidates(form: CanonicalForm) -> list[NodeRef]:
    """Find the nodes before the cut that are nonzero (if `inverted`, zero) exactly at the slots that count."""
    out: list[NodeRef] = []

    def add_if_mask(n: torch.fx.Node, axes: tuple[Axis, ...], truth: torch.Tensor) -> None:
        for inverted in (False, True):
            if torch.equal(truth != inverted, form.kept_slots):
                out.append(NodeRef(n, axes, inverted=inverted))

    for n in form.capture.nodes:
        val = n.meta.get("val")
        if n in form.replaced_nodes or n.meta["index"] >= form.cut.meta["index"] or not isinstance(val, torch.Tensor):
            continue
        if isinstance(val, FakeTensor):
            if not n.meta.get("from_integers") or val.numel() > 1 << 20:
                continue
            val = form.capture.concrete_value(n)
        for axes, flat in enumerate_slot_views((val != 0).to(torch.int64), form.tokens):
            if flat.shape == form.kept_slots.shape:
                add_if_mask(n, axes, flat.bool())
            elif flat.shape == (len(form.kept_slots), 1):  # one entry per token
                add_if_mask(n, tuple(a for a in axes if a == "t"), flat.bool().expand(form.kept_slots.shape))
        lead = tuple(val.shape[:-1])
        if (
            lead in (form.tokens, (form.kept_slots.shape[0],))
            and val.shape[-1] > form.ids.max()
            and form.ids.min() >= 0
        ):
            flat = (val != 0).reshape(form.kept_slots.shape[0], -1)
            add_if_mask(n, ("t",) * len(lead) + ("e",), flat.gather(1, form.ids))
    return sorted(out, key=lambda ref: ref.inverted)


def _sort_by_directness(candidates: list[NodeRef], form: CanonicalForm) -> list[NodeRef]:
    """Sort candidates by how directly the experts use them: first those on a path without other candidates."""
    nodes = {ref.node for ref in candidates}
    direct: set[torch.fx.Node] = set()
    seen: set[torch.fx.Node] = set()
    stack = list(form.replaced_nodes)
    while stack:
        for a in stack.pop().all_input_nodes:
            if a in nodes:
                direct.add(a)
            elif a not in seen:
                seen.add(a)
                stack.append(a)
    return sorted(candidates, key=lambda ref: (ref.node not in direct, ref.inverted, -ref.node.meta["index"]))


def _are_same_op(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Return whether two nodes are one op of the program; comparisons in a loop must have the same number."""
    is_line = a.op == b.op and str(a.target) == str(b.target) and a.meta["source"] == b.meta["source"]
    return is_line and (get_op_name(a) not in COMPARISONS or collect_numbers([a]) == collect_numbers([b]))


__all__ = ["TieBreak", "find_keep_masks"]
