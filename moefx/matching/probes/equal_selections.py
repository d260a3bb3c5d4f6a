"""Separate two selections that were equal in all captures.

Protects from a second choice that only looks like the first one::

    chosen = scores.topk(2).indices
    limited = torch.minimum(scores, limit).topk(2).indices  # equal until a score reaches the limit
    mask = (chosen == limited).all(-1)  # True in all captures
    out = mix(x, weights * mask[:, None], chosen)

Either choice could be taken for the expert index, and the mask for a constant. If other values of parameters and
buffers make the choices differ, the probe forces another outcome of the second choice. The form must stay the same, or
take its values from nodes that tell the choices apart.

Protects also from a number computed of the expert index that equals it in all captures::

    last = table[chosen[:, 0], chosen[:, 1], chosen[:, 2]]  # chosen[:, 2] but for one of 1320 triples
    chosen = torch.cat([chosen[:, :2], last[:, None]], dim=1)

The probe gives each token the number of another token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ...capture.environment.code_locations import is_internal_error
from ...capture.tracing.capture_result import FORCE_MIXED, Capture
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.concrete_values import recompute_values
from ...capture.tracing.graph_recorder import DecisionSite
from ...capture.tracing.node_origins import find_float_decisions
from ...errors import Refused
from ...ir.ancestors import collect_ancestors
from ...ir.node_values import get_op_name
from ...util.tensor_trees import is_float
from ..facts.graph_nodes import follows_from_integers
from ..facts.integer_ranges import IntegerRanges
from ..facts.op_classes import ELEMENT_MOVES, FLAT_MOVES, RESHAPED_COPIES
from ..interventions.forced_outcome import ForcedStep, OutcomeKind, find_capture, force_outcome
from ..lift.canonical_form import CanonicalForm, count_sequences
from ..lift.distinct_choices import view_as_slots
from .float_decisions import choose_captures, locate_decision

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_SECOND_SELECTION = "a second selection that equalled the first one in all captures"
_EQUAL_NUMBER = "a number that equalled the expert index in all captures"
_MAX_TRIALS = 12  # seeds of values that may make the choices differ
_MAX_NUMBERS = 1 << 12  # that an operand can be, to try them all
_SAME_ELEMENTS = {*FLAT_MOVES, *RESHAPED_COPIES}
_MOVES = {*ELEMENT_MOVES, *RESHAPED_COPIES, "getitem"}


def separate_selections(proof: ProofView) -> None:
    """Force another outcome of choices that contribute to the routed sum and equal the expert index.

    Raises:
        Refused: the other outcome changes the form.
    """
    equal_forms: dict[DecisionSite, list[CanonicalForm]] = {}
    differing: set[DecisionSite] = set()
    for form in proof.evidence.forms:
        for n in _find_other_choices(form):
            for site in map(locate_decision, find_float_decisions(n)):
                if site in form.capture.interventions or not _are_alike(n.meta["val"], form.ids, form):
                    differing.add(site)
                equal_forms.setdefault(site, []).append(form)
    for site, forms in equal_forms.items():
        if site not in differing and _can_differ(forms[0], site):
            for captured in choose_captures(forms):
                _separate(proof, site, FORCE_MIXED, _SECOND_SELECTION, captured)
    for site, first in _find_equal_numbers(proof).items():
        _separate(proof, site, _swap_tokens(len(first.ids)), _EQUAL_NUMBER, first.capture)


def _find_equal_numbers(proof: ProofView) -> dict[DecisionSite, CanonicalForm]:
    """Find computed numbers that equal the expert index, or one slot of it, in all captures.

    Numbers that are moved, or that no routing makes different, are left out. So are those that the same ops compute of
    the same numbers as the index: `ids % E` on two lines.

    Returns:
        The first form that has the number, by the key of the op in `Interventions`.
    """
    equal: dict[DecisionSite, CanonicalForm] = {}
    differing: set[DecisionSite] = set()
    for form in proof.evidence.forms:
        index = form.expert_index.nodes
        ranges = IntegerRanges.with_more_tokens(form.capture)
        numbers = _number_integers(form.capture.nodes)
        of_index = {numbers.get(source) for node in index for source in _follow_moves(node)}
        for n in collect_ancestors(form.cut) - collect_ancestors(*index):
            val = n.meta.get("val")
            if n.op != "call_function" or not follows_from_integers(n) or not isinstance(val, torch.Tensor):
                continue
            if is_float(val) or val.dtype is torch.bool:
                continue
            if numbers[n] in of_index or get_op_name(n) in _MOVES:
                continue
            if find_float_decisions(n) or _changes_nothing(n, ranges):
                continue
            site = locate_decision(n)
            if site in form.capture.interventions or not _equals_slots(val, form.ids):
                differing.add(site)
            elif len(form.ids.unique(dim=0)) > 1:
                equal.setdefault(site, form)
    return {site: first for site, first in equal.items() if site not in differing}


def _number_integers(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """Number values that follow from integers only: the same ops on the same values have one number."""
    numbers: dict[fx.Node, int] = {}
    seen: dict[str, int] = {}
    for n in nodes:
        if n.op == "call_function" and follows_from_integers(n):
            args, kwargs = map_arg((n.args, n.kwargs), lambda a: f"value {numbers.get(a, a.name)}")
            numbers[n] = seen.setdefault(f"{n.target} {args} {kwargs}", len(seen))
    return numbers


def _follow_moves(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, and the nodes that it has the elements of, in the same order."""
    yield node
    while get_op_name(node) in _SAME_ELEMENTS and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        yield node


def _equals_slots(val: torch.Tensor, ids: torch.Tensor) -> bool:
    """Return whether integers equal the expert index [T, K], or one of its columns."""
    if not val.numel() or val.numel() not in (ids.numel(), len(ids)):
        return False
    by_token = val.reshape(len(ids), -1)
    return torch.equal(by_token, ids) or any(torch.equal(by_token[:, 0], column) for column in ids.unbind(1))


def _changes_nothing(n: fx.Node, ranges: IntegerRanges) -> bool:
    """Return whether an op maps each number that its operand can be to itself: `ids * 1`, `ids.clamp(0, E - 1)`."""
    operands = n.all_input_nodes
    if torch.Tag.pointwise not in getattr(n.target, "tags", ()) or len(operands) != 1:
        return False
    if operands[0].meta["val"].dtype is torch.bool:
        return False
    if (operand_range := ranges.get(operands[0])) is None or not operand_range[0].numel():
        return False
    low, high = int(operand_range[0].min()), int(operand_range[1].max())
    if high - low > _MAX_NUMBERS:
        return False
    numbers = torch.arange(low, high + 1, dtype=operands[0].meta["val"].dtype)
    args, kwargs = map_arg((n.args, n.kwargs), lambda _: numbers)
    return torch.equal(n.target(*args, **kwargs).to(numbers.dtype), numbers)  # type: ignore[operator]


def _swap_tokens(tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an intervention that gives each token the numbers of the token before it."""
    return lambda t: t.reshape(tokens, -1).roll(1, 0).reshape(t.shape)


def _find_other_choices(form: CanonicalForm) -> list[fx.Node]:
    """Find integers and masks per token that the routed sum depends on, but the expert index does not."""
    if "m" in form.expert_index.axes:  # each expert has a slot
        return []
    candidates = collect_ancestors(form.cut) - collect_ancestors(*form.expert_index.nodes) - form.replaced_nodes
    return sorted((n for n in candidates if _is_per_token(n, form)), key=lambda n: n.meta["index"])


def _is_per_token(n: fx.Node, form: CanonicalForm) -> bool:
    if not find_float_decisions(n) or not (val := n.meta["val"]).numel():
        return False
    by_token = _align_with_tokens(val, form)
    return by_token is not None and (val.dtype is not torch.bool or by_token.shape[1] > int(form.ids.max()))


def _align_with_tokens(val: torch.Tensor, form: CanonicalForm) -> torch.Tensor | None:
    """View a tensor as the entries of each token, or of its sequence, [T, N]; None if it has no such axis."""
    tokens, shape = len(form.ids), tuple(val.shape)
    if any(shape[: len(lead)] == lead for lead in (form.tokens, (tokens,))):
        return val.reshape(tokens, -1)
    sequences = count_sequences(form.capture, form.tokens)
    if not sequences or shape[:1] != (sequences,):
        return None
    return val.reshape(sequences, -1).repeat_interleave(tokens // sequences, 0)


def _are_alike(val: torch.Tensor, ids: torch.Tensor, form: CanonicalForm) -> bool:
    """Return whether a second choice agrees with the expert index.

    Integers agree if they are a subset or a superset of each token's choices; a mask if it is constant on all choices.
    """
    of_tokens = _align_with_tokens(val, form)
    assert of_tokens is not None
    if val.dtype is torch.bool:
        return len(of_tokens.gather(1, ids).unique()) == 1
    same = of_tokens[:, :, None] == ids[:, None, :]
    return bool(same.any(1).all()) or bool(same.any(2).all())


def _can_differ(form: CanonicalForm, site: DecisionSite) -> bool:
    """Return whether other values of parameters and buffers make the two choices differ."""
    refs = form.expert_index.columns or (form.expert_index,)
    others = [n for n in _find_other_choices(form) if site in map(locate_decision, find_float_decisions(n))]
    nodes = sorted(collect_ancestors(*form.expert_index.nodes, *others), key=lambda n: n.meta["index"])
    for seed in range(_MAX_TRIALS):
        try:
            with torch.random.fork_rng(devices=()):  # a router may draw noise
                torch.default_generator.manual_seed(seed)
                values = recompute_values(nodes, Routing("diverse", seed, is_wild=True).invent_value)
            ids = torch.cat([view_as_slots(values[ref.node], form.tokens, ref.axes) for ref in refs], dim=1)
            if not all(_are_alike(values[n], ids, form) for n in others):
                return True
        except Exception as error:  # the number of choices may change
            if is_internal_error(error):
                raise
            return True
    return False


def _separate(proof: ProofView, site: DecisionSite, force: Any, description: str, captured: Capture) -> None:
    """Force another outcome of a choice. If that changes the form, read all captures from nodes that tell both apart.

    Args:
        force: the intervention.
        description: the number that is forced, in words for the refusal.

    Raises:
        Refused: no nodes give all captures one form.
    """
    if (at := find_capture(proof, captured, {site: force})) is None:
        return
    form = proof.evidence.forms[at]
    capture, sizes = form.capture, form.sizes
    try:
        step = ForcedStep(OutcomeKind.OP, site[0], description)
        force_outcome(proof, step, {site: force}, captured, is_safe=False)
    except Refused as refusal:
        interventions: dict[Any, Any] = {**capture.interventions, site: force}
        try:
            parted = proof.lift(proof.capture(capture.routing.restart(), sizes, interventions), follows_evidence=False)
            proof.relift_evidence(parted)
            proof.add_form(parted)
        except Refused:
            raise refusal from None
