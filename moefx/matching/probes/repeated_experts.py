"""Let a token choose one expert in two slots, if nothing in the program prevents it.

Protects from weights that do not add up then::

    first = scores.argmax(-1)
    second = (scores * (1 - F.one_hot(first, num_experts))).argmax(-1)  # equal if all other scores are 0
    gates = torch.zeros_like(scores).scatter(1, torch.stack([first, second], 1), weights)  # one weight remains

A `topk` gives different experts. A second `argmax`, or a table of experts, may give one expert twice. A mask then has
the expert once, and a sum over slots twice. The probe forces such choices in one capture, whose sums must fit the form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.environment.code_locations import is_internal_error
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.host_reads import Interventions
from ...errors import MoefxError, Refused
from ...ir.node_values import get_op_name
from ..facts.op_classes import LOOKUPS
from ..lift.canonical_form import CanonicalForm
from ..lift.distinct_choices import has_distinct_slots, view_as_slots
from ..lift.integer_derivations import MOVES
from ..lift.repeated_choices import RepeatedChoiceRefused
from ..lift.same_form import require_same_form

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_MOVES = MOVES - {"cat", "constant_pad_nd", "stack"} | {"_to_copy"}  # ops on one tensor that create no new elements
_MAX_PAIRED_SLOTS = 8  # up to this many slots, try every pair of them
_TOKENS_PER_CHANGE = 3  # one token in this many repeats an expert, the others show the form
# A node, and the flat indices of every token's choices in its value: int64 [T, K], or [T, 1] if each slot has a node.
_ChoosingNode = tuple[fx.Node, torch.Tensor]
# Takes the choices of the slots so far, [T] each, and returns new choices of the last of them.
_Change = Callable[[list[torch.Tensor]], torch.Tensor]


def repeat_experts(proof: ProofView) -> None:
    """Let tokens choose an expert twice, if the program allows it.

    Raises:
        Refused: the two weights do not add up, or no capture shows that they do.
    """
    first, sizes, experts = proof.evidence.reference, proof.evidence.sizes[0], proof.evidence.seen_experts
    if has_distinct_slots(first, experts, proof.evidence.forms):
        return
    choosing_nodes = _find_choosing_nodes(first, experts)
    pairs = _pair_slots(first.slots)
    if len(first.ids) < _TOKENS_PER_CHANGE * len(pairs):  # one token for each pair, and others that show the form
        sizes = proof.size_choice.choose(_TOKENS_PER_CHANGE * len(pairs), 0)
        first = require_same_form(first, proof.capture_and_lift(Routing("diverse", 0), sizes))
        choosing_nodes = _find_choosing_nodes(first, experts)
    culprits = tuple(dict.fromkeys(get_op_name(node) for node, _ in choosing_nodes))
    source = str(choosing_nodes[-1][0].meta["source"])
    refusal = RepeatedChoiceRefused(source, culprits)
    form = _lift_with_choices(
        proof, sizes, _build_interventions(first, choosing_nodes, _repeat_earlier(pairs)), refusal
    )
    if form is not None and not all(_has_shown(form, i, pairs) for i in range(len(pairs))):
        raise refusal
    if any(map(_is_looked_up, (node for node, _ in choosing_nodes))):
        invalid_id = Refused(
            "the program looks up an expert by a number that may be below 0, which counts from the end",
            culprits=culprits, source=source, remedy="index the experts with the result of topk directly",
        )  # fmt: skip
        form = _lift_with_choices(
            proof, sizes, _build_interventions(first, choosing_nodes, _choose_no_expert), invalid_id
        )
        if form is not None and any(e < 0 for group in form.groups for e in group.ids):
            raise invalid_id


def _has_shown(form: CanonicalForm, i: int, pairs: list[tuple[int, int | None]]) -> bool:
    """Return whether some token chose one expert in all slots of pair `i`, and a slot of the pair is kept."""
    tokens = [t for t in form.repeated_tokens if _is_changed_token(t, i, pairs)]
    slots = [*range(form.slots)] if pairs[i][1] is None else [*pairs[i]]
    return any(bool(form.kept_slots[t, slots].any()) and len({*form.ids[t, slots].tolist()}) == 1 for t in tokens)


def _lift_with_choices(
    proof: ProofView, sizes: dict[str, int], interventions: Interventions, refusal: Refused
) -> CanonicalForm | None:
    """Lift a capture with forced choices.

    Returns:
        The form, or None if the program raises an error: the original would raise it, too.

    Raises:
        Refused: `refusal`, if the form differs from the other captures' or there is none.
    """
    try:
        captured = proof.capture(Routing("diverse", 0), sizes, interventions)
    except MoefxError as cause:
        raise refusal from cause
    except Exception as error:
        if is_internal_error(error):
            raise
        return None
    try:
        form = proof.evidence.require_same_form(proof.lift(captured))
        proof.relift_evidence(form)
    except Refused as cause:
        raise refusal from cause
    return form


# ---------------------------------------------------------------------- where choices come from
def _find_choosing_nodes(form: CanonicalForm, experts: set[int]) -> list[_ChoosingNode]:
    """Find the nodes that made the choices, in program order."""
    choosing_nodes: list[_ChoosingNode] = []
    refs = form.expert_index.columns or (form.expert_index,)
    for ref in refs:
        moves: list[fx.Node] = []
        node: Any = ref.node
        while True:
            if get_op_name(node) in _MOVES:
                moves.append(node)
                node = node.args[0]
                continue
            earlier = _find_unfilled(node, form.capture, experts) or (_find_unshifted(node) if len(refs) == 1 else None)
            if earlier is None:
                break
            node = earlier
        val = node.meta["val"]
        indices = torch.arange(val.numel()).view(val.shape)
        for n in reversed(moves):
            if get_op_name(n) != "_to_copy":
                indices = n.target(indices, *n.args[1:], **n.kwargs)  # type: ignore[operator]
        choosing_nodes.append((node, view_as_slots(indices, form.tokens, ref.axes)))
    return sorted(choosing_nodes, key=lambda pair: pair[0].meta["index"])


def _find_unshifted(node: fx.Node) -> fx.Node | None:
    """Return the choices before an op that adds one number to all of them; None for other ops."""
    if get_op_name(node) in ("add", "sub") and len(node.all_input_nodes) == 1 and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


def _find_unfilled(node: fx.Node, capture: Capture, experts: set[int]) -> fx.Node | None:
    """Return the choices before an op that replaces some of them by a number of no expert; None for other ops."""
    if get_op_name(node) == "masked_fill":
        operand_pairs = [(node.args[0], node.args[2])]
    elif get_op_name(node) == "where" and len(node.args) == 3:
        operand_pairs = [(node.args[1], node.args[2]), (node.args[2], node.args[1])]
    else:
        return None
    for choices, put in operand_pairs:
        if isinstance(choices, fx.Node) and choices.meta["val"].shape == node.meta["val"].shape:
            number = capture.concrete_value(put) if isinstance(put, fx.Node) else torch.tensor(put)
            if number.numel() == 1 and int(number) not in experts:
                return choices
    return None


def _is_looked_up(node: fx.Node) -> bool:
    """Return whether a node looks up integers in a buffer."""
    table = node.args[0] if node.args else None
    return get_op_name(node) in LOOKUPS and isinstance(table, fx.Node) and table.op == "get_attr"


def _build_interventions(form: CanonicalForm, choosing_nodes: list[_ChoosingNode], change: _Change) -> Interventions:
    """Build interventions that apply `change` to the choices where their ops compute them."""
    chosen: list[torch.Tensor] = []
    slots_at: dict[Any, dict[int, list[torch.Tensor]]] = {}  # by call site of the op, then by its n-th run there
    for node, indices in choosing_nodes:
        op: Any = node.args[0] if get_op_name(node) == "getitem" else node
        site, run = op.meta.get("position"), 0
        if site is None:
            site = op.meta["source"], str(op.target), all(a.meta.get("from_integers") for a in op.all_input_nodes)
            before = [n for n in form.capture.nodes[: op.meta["index"]] if n.target == op.target]
            run = sum(n.meta["source"] == site[0] for n in before)
        slots_at.setdefault(site, {}).setdefault(run, []).extend(indices.unbind(1))

    def build_intervention(by_run: dict[int, list[torch.Tensor]]) -> Callable[[torch.Tensor], torch.Tensor]:
        count = itertools.count()

        def force(out: torch.Tensor) -> torch.Tensor:
            flat = out.flatten().clone()
            for at in by_run.get(next(count), ()):
                chosen.append(flat[at])
                chosen[-1] = flat[at] = change(chosen).to(flat.dtype)
            return flat.view(out.shape)

        return force

    return {site: build_intervention(by_run) for site, by_run in slots_at.items()}


def _pair_slots(slots: int) -> list[tuple[int, int | None]]:
    """Return pairs (first, again) of slots: `again` is to repeat the expert of `first`; None for all later slots."""
    numbers = range(slots)
    pairs = itertools.pairwise(numbers) if slots > _MAX_PAIRED_SLOTS else itertools.combinations(numbers, 2)
    return [*pairs, (0, None)] if slots > 2 else [*pairs]


def _is_changed_token(token: Any, i: int, pairs: list[tuple[int, int | None]]) -> Any:
    """Return whether a token repeats an expert in pair `i`: a bool for an int, a mask for a tensor of tokens."""
    return token % (_TOKENS_PER_CHANGE * len(pairs)) == _TOKENS_PER_CHANGE * i + 1


def _repeat_earlier(pairs: list[tuple[int, int | None]]) -> _Change:
    """Build the change that lets tokens repeat an expert, with different tokens for each pair of slots."""

    def change(chosen: list[torch.Tensor]) -> torch.Tensor:
        changed, slot = chosen[-1].clone(), len(chosen) - 1
        for i, (first, again) in enumerate(pairs):
            if slot == again or (again is None and slot):
                at = _is_changed_token(torch.arange(len(changed)), i, pairs)
                changed[at] = chosen[first][at].to(changed.dtype)
        return changed

    return change


def _choose_no_expert(chosen: list[torch.Tensor]) -> torch.Tensor:
    """Replace the first slot's choice by -1 in one token of `_TOKENS_PER_CHANGE`."""

    is_changed = (torch.arange(len(chosen[-1])) % _TOKENS_PER_CHANGE == 1) & (len(chosen) == 1)
    return torch.where(is_changed, -1, chosen[-1])
