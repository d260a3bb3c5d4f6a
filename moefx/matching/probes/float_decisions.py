"""Mix the outcomes of comparisons of floats that had one outcome in all captures.

Protects from thresholds, and from floats that become one integer::

    weights, chosen = scores.softmax(-1).topk(2)
    weights = weights * (weights > 0.01)  # True for all tokens
    chosen = chosen + (scores.amax(-1, keepdim=True) > 9).long()  # 0 for all tokens

A comparison with one outcome for all tokens, for all first slots, or for all tokens of an expert looks like a constant.
So does an integer made of floats. The probe captures again with mixed outcomes, of each and of all together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.environment.code_locations import Source
from ...capture.tracing.capture_result import FORCE_MIXED, Capture
from ...capture.tracing.graph_recorder import DecisionSite
from ...capture.tracing.node_origins import find_float_decisions
from ...ir.node_values import get_op_name
from ..interventions.forced_outcome import ForcedStep, OutcomeKind, force_outcome
from ..lift.canonical_form import CanonicalForm

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_COMPARISON = "a comparison with the same outcome in all captures"
_TOGETHER = "one of several comparisons with the same outcome in all captures"
_INTEGER = "an integer made of floats with the same outcome in all captures"
_ORDERS = {"sort": 1, "argsort": 1, "topk": 2}  # op: index of the argument that is the dimension
_FEW_TOKENS = 5  # captures up to this size may not show the form


@dataclasses.dataclass
class _Decision:
    """A comparison of floats, or an integer made of floats, in all captures.

    Attributes:
        description: the kind of decision, in words for the refusal.
        forms: the forms whose captures have the decision.
        outcomes_by_group: the outcomes of each group of elements.
    """

    source: Source
    description: str
    made_of: set[DecisionSite] = dataclasses.field(default_factory=set)  # to force
    forms: list[CanonicalForm] = dataclasses.field(default_factory=list)
    outcomes_by_group: list[set[int]] = dataclasses.field(default_factory=list)


def mix_decisions(proof: ProofView) -> None:
    """Force mixed outcomes of comparisons of floats, and of integers made of floats, that had one outcome in all
    captures.

    Raises:
        Refused: mixed outcomes change the form.
    """
    doubtful = [d for d in _find_decisions(proof) if any(len(values) == 1 for values in d.outcomes_by_group)]
    by_nodes = {frozenset(d.made_of): d for d in reversed(doubtful)}  # the first iteration of each loop
    for sites, decision in reversed(by_nodes.items()):
        _force_each(proof, decision.source, sites, decision.description, decision.forms)
    comparisons = [d for d in doubtful if d.description == _COMPARISON]
    if len(comparisons) > 1:  # one may matter only together with another
        all_sites = frozenset().union(*[d.made_of for d in comparisons])
        _force_each(proof, comparisons[0].source, all_sites, _TOGETHER, comparisons[0].forms[:1])


def _find_decisions(proof: ProofView) -> list[_Decision]:
    """Return the decisions that no capture forced, one per op and call stack."""
    decisions: dict[tuple[Any, str, str], _Decision] = {}
    for form in proof.evidence.forms:
        for n in form.capture.nodes:
            made_of = find_float_decisions(n)
            sites = set(map(locate_decision, made_of))
            if not sites or sites & form.capture.interventions.keys():
                continue
            is_boolean = n.meta["val"].dtype is torch.bool
            decided = n if is_boolean else made_of[0]
            compared = str([_name_operand(a) for a in decided.args] if is_boolean else [])
            site = (decided.meta.get("calls") or decided.meta["source"], str(decided.target), compared)
            description = _COMPARISON if is_boolean else _INTEGER
            decision = decisions.setdefault(site, _Decision(decided.meta["source"], description))
            decision.made_of |= sites
            decision.forms.append(form)
            outcomes_by_group = [
                set(v.unique().tolist()) for v in _split_groups(n.meta["val"], decided, form, proof.num_experts)
            ]
            if outcomes_by_group:
                # the last positions of a long order do not occur in every capture
                known = decision.outcomes_by_group or outcomes_by_group
                decision.outcomes_by_group = [a | b for a, b in zip(known, outcomes_by_group, strict=False)]
    return list(decisions.values())


def _force_each(
    proof: ProofView, source: Source, sites: frozenset[DecisionSite], description: str, forms: list[CanonicalForm]
) -> None:
    """Force mixed outcomes in one capture of each kind of routing, once."""
    step = ForcedStep(OutcomeKind.OP, source, description)
    for captured in choose_captures(forms):
        if not proof.evidence.is_settled((sites, captured.graph)):
            force_outcome(proof, step, dict.fromkeys(sites, FORCE_MIXED), captured, is_safe=False)
            proof.settle((sites, captured.graph))


def _name_operand(a: Any) -> Any:
    """Return the identity of an operand: a number itself, the FQN of a parameter, "" for other nodes."""
    return a if not isinstance(a, fx.Node) else a.meta["fqn"] if a.op == "get_attr" else ""


def choose_captures(forms: list[CanonicalForm]) -> list[Capture]:
    """Choose the first capture, and the largest capture of each kind of routing.

    A decision may matter only with many tokens or a crowd. Captures of a few tokens may not show the form.
    """
    many = sorted((form for form in forms if len(form.ids) > _FEW_TOKENS), key=lambda form: len(form.ids))
    largest = {form.capture.routing.kind: form for form in many}
    return list({id(form.capture): form.capture for form in (forms[0], *largest.values())}.values())


def locate_decision(n: fx.Node) -> DecisionSite:
    """Return the key of a node in `Interventions`."""
    return n.meta["source"], str(n.target), all(a.meta.get("from_integers") for a in n.all_input_nodes)


def _split_groups(val: torch.Tensor, decided: fx.Node, form: CanonicalForm, experts: int) -> Sequence[torch.Tensor]:
    """Split a decision into groups of elements that may have one outcome.

    The groups are slots and experts for a value per choice, positions for an order, otherwise one group of all.
    """
    if val.shape[-1:] == (form.slots,) and val.numel() == form.ids.numel():
        flat = val.reshape(-1, form.slots)
        by_expert = [flat[form.ids == e] for e in range(experts)] if val.dtype is torch.bool else []
        return [*flat.unbind(-1), *by_expert]
    if get_op_name(decided) in _ORDERS and val.dim():
        at = _ORDERS[get_op_name(decided)]
        dim: Any = decided.kwargs.get("dim", decided.args[at] if len(decided.args) > at else -1)
        return val.unbind(dim)
    return [val]
