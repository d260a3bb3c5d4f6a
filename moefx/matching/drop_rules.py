"""Capacity: which of a token's chosen experts have no place left for it, as a rule (X-MoE section 4.1, GShard).

Where captures overflow, the slots that count and those that do not show the order in which an expert's places are
given away, and how many there are. A rule that says exactly which slots count, in every capture, replaces whatever
the program does to find out: `cumsum` over one-hots, sorting, slices.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.captured import COMPARISONS, SPREAD
from ..capture.routing import Routing
from ..capture.source import Source
from ..errors import Refused
from .capacity_formulas import Formula, find_formula
from .graph_nodes import collect_numbers, find_comparison, op_name
from .lift.canonical_form import Body, CanonicalForm, NodeRef, walk_body
from .lift.expert_index import enumerate_slot_views
from .match_result import DropRule, Match
from .probes.forced_outcome import ASK_ROWS
from .terms.index_arithmetic import unravel
from .terms.node_semantics import Semantics
from .terms.normal_form import Terms
from .terms.term import Term, is_const

SKIPPED = "some chosen experts are skipped (dropped)"
Slot = tuple[int, int]
_ORDERS = ("position_token", "position_slot", "weight")
_LIMITS = {f"aten.{op}" for op in ("slice.Tensor", "lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar")}
_LEAST_POINTS = 8  # sizes at which a capacity was seen: a formula for fewer would be a guess


def explain_drops(match: Match) -> None:
    """Set `match.drop` or `match.keep` if some slots contribute nothing, and their weight or id does not say so.

    Raises:
        Refused: neither a rule nor a mask of the program says which slots count.
    """
    owned = {e for group in match.groups for e in group.ids}
    if all(torch.equal(torch.isin(lifted.ids, torch.tensor([*owned])), lifted.kept_slots) for lifted in match.evidence):
        return
    find_ties = functools.cache(lambda: _find_ties(match, owned))  # takes one capture more
    match.drop_rule = _find_rule(match, owned)
    if match.drop_rule is None:
        match.keep_masks = _find_masks(match, find_ties)
    elif match.drop_rule.order == "weight" and find_ties() != "parted":
        rule, match.drop_rule = match.drop_rule, None
        try:
            match.keep_masks = _find_masks(match, find_ties)
        except Refused:
            if find_ties() is not None:
                raise
            match.drop_rule = rule


def refuse_unexplained(match: Match) -> None:
    """Look at the first captures of a proof, before all others are made: what neither a queue nor a mask explains in
    some of them is not explained by more.

    Raises:
        Refused: some slots are dropped so.
    """
    owned = {e for group in match.groups for e in group.ids}
    if all(torch.equal(torch.isin(lifted.ids, torch.tensor([*owned])), lifted.kept_slots) for lifted in match.evidence):
        return
    for order in _ORDERS:
        ranks = [_rank_slots(lifted, order, owned) for lifted in match.evidence]
        if all(
            r is not None and _bound_capacity(one, r) is not None for one, r in zip(match.evidence, ranks, strict=True)
        ):
            return
    _find_masks(match, lambda: None)


# ---------------------------------------------------------------------- a rule
def _find_rule(match: Match, owned: set[int]) -> DropRule | None:
    """The rule by which all captures of a match drop, if there is exactly one."""
    found = []
    for order in _ORDERS:
        ranks = [_rank_slots(lifted, order, owned) for lifted in match.evidence]
        if any(r is None for r in ranks):
            continue
        places = [_bound_capacity(lifted, r) for lifted, r in zip(match.evidence, ranks, strict=True)]  # type: ignore[arg-type]
        if any(p is None for p in places):
            continue
        capacity = _find_capacity(match, places)  # type: ignore[arg-type]
        if capacity is not None:
            found.append(DropRule(order, capacity))
    return found[0] if len(found) == 1 or (found and match.slots == 1) else None


def _find_ties(match: Match, owned: set[int]) -> str | None:
    """What an expert does about choices with equal weights.

    Returns:
        "parted" if it keeps as many as it has places for, as by `topk(n).indices`; "reordered" if these are not the
        first ones although it sorts stably; "together" if it keeps them all, or none, as by
        `weights >= topk(n).values[-1]`; None if no order of weights says who is kept, or none are equal where the last
        place goes.
    """
    places = []
    for lifted in match.evidence:
        ranks = _rank_slots(lifted, "weight", owned)
        if ranks is None or (found := _bound_capacity(lifted, ranks)) is None:
            return None
        places.append(found)
    for lifted, sizes, (fewest, most) in zip(match.evidence, match.sizes, places, strict=True):
        if most is None or lifted.optional_guard:
            continue
        tracer = lifted.capture.tracer
        try:
            tied = match.lift_at(Routing("tied", tracer.routing.seed), sizes, tracer.flips)
        except Exception:  # the program's own too
            continue
        ranks = _rank_slots(tied, "weight", owned, is_tied=True)
        if ranks is None or not _has_ties_at(tied, ranks, fewest, most):
            continue
        if not _are_within(_bound_capacity(tied, ranks), fewest, most):
            return "together"
        first = _rank_slots(tied, "weight", owned)
        is_promised = any(
            n.kwargs.get("stable") is True and n.all_input_nodes[0].meta["val"].is_floating_point()
            for n in tied.capture.nodes
        )
        if is_promised and first is not None and not _are_within(_bound_capacity(tied, first), fewest, most):
            return "reordered"
        return "parted"
    return None


def _are_within(places: tuple[int, int | None] | None, fewest: int, most: int) -> bool:
    """Whether as many places as another capture has explain what one kept."""
    return places is not None and places[0] <= most and (places[1] is None or places[1] >= fewest)


def _has_ties_at(lifted: CanonicalForm, ranks: dict[Slot, int], fewest: int, most: int) -> bool:
    """Whether the last place of an expert, which is one of these, goes to one of several choices of equal weight."""
    weights = _find_weights(lifted)
    assert weights is not None
    groups: dict[tuple[int, float], list[int]] = defaultdict(list)
    for slot, rank in ranks.items():
        groups[int(lifted.ids[slot]), float(weights[slot])].append(rank)
    return any(min(group) < fewest and max(group) >= most for group in groups.values())


def _rank_slots(lifted: CanonicalForm, order: str, owned: set[int], is_tied: bool = False) -> dict[Slot, int] | None:
    """How many slots of the same expert are before each slot in the queue; if `is_tied`, of those with equal weights
    the ones that are kept come first."""
    ids = lifted.ids.tolist()
    flat = [(t, k) for t, row in enumerate(ids) for k in range(len(row))]
    if order == "position_slot":
        flat.sort(key=lambda s: (s[1], s[0]))
    elif order == "weight":
        weights = _find_weights(lifted)
        if weights is None:
            return None
        flat.sort(key=lambda s: (-float(weights[s]), is_tied and not bool(lifted.kept_slots[s])))
    taken: dict[int, int] = defaultdict(int)
    ranks = {}
    for t, k in flat:
        expert = ids[t][k]
        if expert in owned:
            ranks[t, k] = taken[expert]
            taken[expert] += 1
    return ranks


def _find_weights(lifted: CanonicalForm) -> torch.Tensor | None:
    """The routing weights [T, K] under the routing of this capture."""
    for group in lifted.groups:
        for i, ref in enumerate(group.values):
            wide = any(b.op == "value" and b.args[0] == i and math.prod(b.shape) > 1 for b in walk_body(group.body))
            each = ref.axes[-1:] in (("k",), ("tk",)) or (lifted.slots == 1 and set(ref.axes) == {"t"})
            if not wide and not ref.columns and each and not {"e", "s"} & set(ref.axes):
                return lifted.capture.shadow(ref.node).reshape(lifted.ids.shape)
    return None


def _bound_capacity(lifted: CanonicalForm, ranks: dict[Slot, int]) -> tuple[int, int | None] | None:
    """(fewest, most) places that explain what one capture kept; most is None without a drop, the whole None if
    nothing explains it."""
    kept = [r for s, r in ranks.items() if lifted.kept_slots[s]]
    dropped = [r for s, r in ranks.items() if not lifted.kept_slots[s]]
    fewest, most = max(kept, default=-1) + 1, min(dropped, default=None)
    return None if most is not None and most < fewest else (fewest, most)


def _find_capacity(match: Match, places: Sequence[tuple[int, int | None]]) -> Formula | None:
    """How many places there are at any size: the number of the program that is so in every capture, read off more."""
    overflow = next((i for i, (_, most) in enumerate(places) if most is not None), None)
    if overflow is None:
        return None
    found_numbers = [collect_numbers(lifted.capture.nodes) for lifted in match.evidence]
    # where one expert has nearly all tokens, the program comes to the places where it drops
    more = [(sizes, collect_numbers(taken.nodes)) for sizes, taken in match.sample_sizes("flooded")]
    constant: Formula | None = None
    for where, value in found_numbers[overflow].items():
        if type(value) is not int or not all(
            _fits(n.get(where), p) for n, p in zip(found_numbers, places, strict=True)
        ):
            continue
        points = [
            (dims, found)
            for dims, n in [*zip(match.sizes, found_numbers, strict=True), *more]
            if type(found := n.get(where)) is int
        ]
        formula = find_formula(points, match.expressions) if len(points) >= _LEAST_POINTS else None
        if formula is not None and all(_fits(formula(d), p) for d, p in zip(match.sizes, places, strict=True)):
            return formula
        if len(points) >= _LEAST_POINTS and {n for _, n in points} == {value} and where[1] in _LIMITS:
            constant = Formula(str(value))
    return constant


def _fits(value: float | None, places: tuple[int, int | None]) -> bool:
    """Whether `value` places explain a capture; a capture without drops need not have the number."""
    fewest, most = places
    if value is None:
        return most is None
    return value >= fewest and (most is None or value <= most)


# ---------------------------------------------------------------------- the program's own mask
def _find_masks(match: Match, find_ties: Callable[[], str | None]) -> list[NodeRef] | None:
    """The nodes that say which slots count, one for each capture; None if the others have weights or rows of zero."""
    found = [_find_mask_candidates(lifted) for lifted in match.evidence]
    for ref in _sort_by_directness(found[0], match.evidence[0]):
        refs = [ref]
        for other in found[1:]:
            twin = next((r for r in other if r.form == ref.form and _are_same_op(r.node, ref.node)), None)
            if twin is None:
                break
            refs.append(twin)
        if len(refs) == len(found):
            return refs
    if all(_is_explained_by_zeros(match, i) for i in range(len(match.evidence))):
        return None
    if found_where := _find_spread(match):
        raise Refused(
            "which choices count hangs on something that is the same for few tokens, and no mask with one entry per "
            f"token and slot says which do: {found_where.text}",
            source=str(found_where),
            remedy="compute it for all choices at once, before the experts, and multiply the routing weights by it",
        )
    skips = [lifted.forced_read for lifted in match.evidence if not lifted.kept_slots.all()]
    if (source := skips[0]) is not None and None not in skips:
        raise Refused(
            f"a number read from a tensor decides whether an expert runs: {source.text}",
            source=str(source),
            remedy=ASK_ROWS,
        )
    if skipped := _explain_left_out(match.evidence):
        raise skipped
    ties = find_ties()
    if ties == "reordered":
        raise Refused(
            "an expert keeps its largest weights, and of equal ones not those of the first tokens, which a stable sort "
            "promises",
            source=str(match.evidence[0].cut.meta["source"]),
            remedy="sort the weights in the order of the tokens, as in "
            "weights.argsort(descending=True, stable=True)[:places]",
        )
    if ties == "together":
        raise Refused(
            "an expert keeps its largest weights down to a value, so that choices whose weights are equal are kept or "
            "dropped together; a capacity is a number of places",
            source=str(match.evidence[0].cut.meta["source"]),
            remedy="keep so many by their indices, as in weights.argsort(descending=True, stable=True)[:places], or "
            "multiply the routing weights of all choices, before the experts, by the mask that says which are kept",
        )
    raise Refused(
        f"{SKIPPED}, by no rule that is known, and no mask in the program says which",
        source=str(match.evidence[0].cut.meta["source"]),
        remedy="compute who is dropped as a mask over all choices instead of in Python, as in kept = ranks < places, "
        "and multiply the routing weights by it",
    )


def _explain_left_out(several: Sequence[CanonicalForm]) -> Refused | None:
    """The refusal of a program that leaves out whole experts by how many tokens chose them, if it does."""
    run, left_out = set(), set()
    for lifted in several:
        for e in lifted.ids.unique().tolist():
            kept = lifted.kept_slots[lifted.ids == e]
            if bool(kept.any()) != bool(kept.all()):
                return None
            (run if bool(kept.all()) else left_out).add(len(kept))
    if not run or not left_out or not (max(left_out) < min(run) or max(run) < min(left_out)):
        return None
    are_few = max(left_out) < min(run)
    lowest, highest = (max(left_out), min(run)) if are_few else (max(run), min(left_out))
    for read in (read for lifted in several for read in lifted.capture.reads):
        _, number = find_comparison(read)
        if type(number) in (int, float) and lowest <= number <= highest:
            which = "fewer tokens than a limit" if are_few else "more tokens than a limit"
            return Refused(
                f"experts that {which} chose are left out, and their tokens get nothing of them: {read.source.text}",
                source=str(read.source),
                remedy="run every expert that has tokens, or take the weights away by a mask over all choices, as in "
                "weights * (counts >= limit)[ids]",
            )
    return None


def _find_spread(match: Match) -> Source | None:
    """What was spread where all choices count otherwise, and then do not."""
    full = {(str(one.capture.tracer.routing), one.tokens) for one in match.evidence if one.kept_slots.all()}
    for lifted in match.evidence:
        if not lifted.kept_slots.all() and (str(lifted.capture.tracer.routing), lifted.tokens) in full:
            for at, how in lifted.capture.tracer.flips.items():
                if how == SPREAD and isinstance(at, tuple) and isinstance(at[0], Source):
                    return at[0]
    return None


def _is_explained_by_zeros(match: Match, capture: int) -> bool:
    """Every dropped slot has a weight, or a row, that is zero by construction and makes all of it zero."""
    lifted = match.evidence[capture]
    S = Semantics(lifted.capture.nodes, lifted.capture.shadow)
    T = S.T

    def is_zero(ref: NodeRef, t: int, k: int) -> bool:
        ref = ref.columns[k] if ref.columns else ref
        if not {"t", "k", "e"} & set(ref.axes) or {"tk", "kt", "m", "s"} & set(ref.axes):
            return False
        it = iter(unravel(t, lifted.tokens) if ref.axes.count("t") > 1 else (t,))
        where = {a: k if x == "k" else int(lifted.ids[t, k]) if x == "e" else next(it) for a, x in enumerate(ref.axes)}
        term = S.term(ref.node)
        return all(0 <= i < term.shape[a] for a, i in where.items()) and is_const(
            T.resolve(T.pick_axes(term, where)), 0
        )

    owner = {e: group for group in match.groups for e in group.ids}
    for t, k in (~lifted.kept_slots).nonzero().tolist():
        if (group := owner.get(int(lifted.ids[t, k]))) is not None:
            zeros = {i for i, refs in enumerate(group.values) if is_zero(refs[capture], t, k)}
            if not is_const(_substitute_zeros(T, group.body, zeros), 0):
                return False
    return True


def _substitute_zeros(T: Terms, body: Body, zeros: set[int]) -> Term:
    """A body where some of its values are zero; what is not followed stands for itself."""
    args: list[Any] = [_substitute_zeros(T, a, zeros) if isinstance(a, Body) else a for a in body.args]
    match body.op:
        case "value" if args[0] in zeros:
            return T.const(0, body.shape)
        case "const":
            return T.const(args[0], body.shape)
        case "pw":
            return T.pw(args[0], *args[2:], **dict(args[1]))
        case "ein":
            return T.ein(args[0], args[1], args[2:])
        case "sum":
            return T.sum(args[1], args[0])
        case "reshape" | "expand":
            return getattr(T, body.op)(args[0], body.shape)
        case "permute" | "slice":
            return getattr(T, body.op)(*args)
    return T.make("node", (body,), body.shape)


def _find_mask_candidates(lifted: CanonicalForm) -> list[NodeRef]:
    """Nodes before the cut whose truth (`inverted`: falsehood) per token and slot is exactly which slots count."""
    out: list[NodeRef] = []

    def offer(n: torch.fx.Node, axes: tuple[str, ...], truth: torch.Tensor) -> None:
        for inverted in (False, True):
            if torch.equal(truth != inverted, lifted.kept_slots):
                out.append(NodeRef(n, axes, inverted=inverted))

    for n in lifted.capture.nodes:
        val = n.meta.get("val")
        if (
            n in lifted.replaced_nodes
            or n.meta["index"] >= lifted.cut.meta["index"]
            or not isinstance(val, torch.Tensor)
        ):
            continue
        if isinstance(val, FakeTensor):
            if not n.meta.get("known") or val.numel() > 1 << 20:
                continue
            val = lifted.capture.shadow(n)
        for axes, flat in enumerate_slot_views((val != 0).to(torch.int64), lifted.tokens):
            if flat.shape == lifted.kept_slots.shape:
                offer(n, axes, flat.bool())
            elif flat.shape == (len(lifted.kept_slots), 1):  # of whole tokens
                offer(n, tuple(a for a in axes if a == "t"), flat.bool().expand(lifted.kept_slots.shape))
        lead = tuple(val.shape[:-1])
        if (
            lead in (lifted.tokens, (lifted.kept_slots.shape[0],))
            and val.shape[-1] > lifted.ids.max()
            and lifted.ids.min() >= 0
        ):
            flat = (val != 0).reshape(lifted.kept_slots.shape[0], -1)
            offer(n, ("t",) * len(lead) + ("e",), flat.gather(1, lifted.ids))
    return sorted(out, key=lambda ref: ref.inverted)


def _sort_by_directness(candidates: list[NodeRef], lifted: CanonicalForm) -> list[NodeRef]:
    """Candidates by how directly the experts use them: first those that reach them past all the others."""
    nodes = {ref.node for ref in candidates}
    direct: set[torch.fx.Node] = set()
    seen: set[torch.fx.Node] = set()
    stack = list(lifted.replaced_nodes)
    while stack:
        for a in stack.pop().all_input_nodes:
            if a in nodes:
                direct.add(a)
            elif a not in seen:
                seen.add(a)
                stack.append(a)
    return sorted(candidates, key=lambda ref: (ref.node not in direct, ref.inverted, -ref.node.meta["index"]))


def _are_same_op(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Whether they are one node of the program: of a loop over the experts, comparisons with the same one."""
    is_line = a.op == b.op and str(a.target) == str(b.target) and a.meta["source"] == b.meta["source"]
    return is_line and (op_name(a) not in COMPARISONS or collect_numbers([a]) == collect_numbers([b]))


__all__ = ["explain_drops", "refuse_unexplained"]
