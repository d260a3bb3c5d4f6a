"""Prove that a block is a mixture of experts: captures under several routings must lift to one canonical form.

`prove` lists the steps. Each works on a `ProofState`: it adds a capture whose form must agree, adds a guard, or refuses
the block.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..capture.tracing.concrete_routing import Routing
from ..errors import Refused
from .first_captures import capture_first_routings
from .lift.canonical_form import CanonicalForm
from .lift.distinct_choices import has_distinct_slots
from .lift.same_form import ONE_FUNCTION
from .probes.probe import Probe
from .probes.probe_list import CONFIRMATIONS, COVERAGE, INTERVENTIONS
from .proof.evidence import find_value_lines, have_same_lines
from .proof.proof_state import ProofState
from .results.drop_rules import refuse_unexplained
from .results.match_result import Match, ProvenGroup
from .terms.parameter_slices import ParameterSlice
from .unsupported_effects import refuse_effects

_MAX_EXTRA_CAPTURES = 8  # captures to complete the evidence
_COMPLETING_SEED = 30  # the first of their seeds
_MIN_COMPLETE_CAPTURES = 3  # captures in which all groups of experts ran


def prove(proof: ProofState) -> Match:
    """Prove the canonical form of a block.

    `check_first_captures` and `merge_groups` refuse blocks, too, but are no probes: `build_match`, `explain_drops` and
    the rewrite repeat their checks for all captures. They make refusals faster.

    Raises:
        Refused: no canonical form exists, or a routing, a branch or a size changes the form and no guard can exclude
            it.
    """
    proof.evidence.postpone_comparison()  # `align_with_richest` compares them with the richest one
    capture_first_routings(proof)
    run_probes(proof, COVERAGE)
    align_with_richest(proof)
    check_first_captures(proof)
    run_probes(proof, INTERVENTIONS)
    run_probes(proof, CONFIRMATIONS)
    read_values_from_same_nodes(proof)
    merge_groups(proof)  # refuse before `complete_evidence` makes more captures
    full = complete_evidence(proof)
    return build_match(proof, [proof.evidence.forms[i] for i in full])


def run_probes(proof: ProofState, probes: Iterable[Probe]) -> None:
    """Run probes in order, and record each."""
    for probe in probes:
        with proof.record_probe(probe.name, probe.again):
            probe.run(proof)


# --------------------------------------------------------------- steps between the probes
def align_with_richest(proof: ProofState) -> None:
    """Require all captures to have the form of the richest one, and put that one first.

    The richest capture has the most slots, then groups of experts, then shared summands.
    """

    def richness(i: int) -> tuple[int, ...]:
        form = proof.evidence.forms[i]
        return form.slots, len(form.groups), len(form.shared), -i

    richest = max(range(len(proof.evidence.forms)), key=richness)
    best = proof.evidence.forms[richest]
    # A capture has fewer slots if it dropped every second choice. It has other shared summands if no token, or every
    # token, chose an identity expert.
    proof.evidence.replace_forms(
        [
            proof.aligner.lift_with_hint(form.capture, best)
            if form.slots < best.slots or len(form.shared) != len(best.shared)
            else form
            for form in proof.evidence.forms
        ]
    )
    proof.evidence.set_reference(richest)
    proof.aligner.align_evidence()


def check_first_captures(proof: ProofState) -> None:
    """Refuse a block early for reasons that the first captures already show.

    Raises:
        Refused: parameters, side effects, or slots that are dropped without a rule.
    """
    merge_groups(proof)
    for form in proof.evidence.forms:
        refuse_effects(form.capture)
    complete = _find_complete_captures(proof)
    if not complete:
        return
    forms = [proof.evidence.forms[i] for i in complete]
    try:
        refuse_unexplained(build_match(proof, forms))
    except Refused as refusal:
        reference = proof.evidence.reference
        if not has_distinct_slots(reference, proof.evidence.seen_experts):  # `repeated_experts` gives a better reason
            return
        try:  # `read_values_from_same_nodes` may read weights off other nodes, those behind a mask
            relifted = [proof.aligner.relift(form, reference, reference, True) for form in forms]
            refuse_unexplained(build_match(proof, relifted))
        except Refused:
            raise refusal from None


def read_values_from_same_nodes(proof: ProofState) -> None:
    """Read the values of all captures from the same nodes.

    If a mask or limit drops nothing in a capture, a value is found before and after the mask; otherwise only after it.
    If captures have the value at different nodes, such as the branches of a `where`, read it after both.
    """
    lines = [find_value_lines(form) for form in proof.evidence.forms]
    # the first capture of each kind, by the lines that supply its values
    firsts = sorted({own_lines: i for i, own_lines in reversed([*enumerate(lines)])}.values())
    for source in firsts:
        if all(have_same_lines(own_lines, lines[source]) for own_lines in lines):
            continue
        if relifted := _relift_all(proof, source, firsts):
            proof.evidence.replace_forms(relifted)
            return
    if len(firsts) > 1 and (relifted := _relift_all(proof, 0, firsts, align_to_last=True)):
        proof.evidence.replace_forms(relifted)


def _relift_all(
    proof: ProofState, source: int, firsts: list[int], align_to_last: bool = False
) -> list[CanonicalForm] | None:
    """Lift all captures again from the nodes of one of them, or from the last nodes that fit.

    Args:
        source: the index of that capture.
        firsts: captures that are lifted first, because they fail most often.

    Returns:
        The forms in the order of the captures, or None if they do not read their values from the same lines.
    """
    forms, relifted = proof.evidence.forms, dict[int, CanonicalForm]()
    expected = None if align_to_last else find_value_lines(forms[source])
    for i in sorted(range(len(forms)), key=lambda i: i not in firsts):
        try:
            relifted[i] = proof.aligner.relift(forms[i], forms[source], proof.evidence.reference, align_to_last)
        except Refused:
            return None
        lines = find_value_lines(relifted[i])
        expected = lines if expected is None else expected
        if not have_same_lines(lines, expected):
            return None
    return [relifted[i] for i in range(len(forms))]


# ---------------------------------------------------------------------- the match
def complete_evidence(proof: ProofState) -> list[int]:
    """Choose the captures in which all groups of experts ran, and capture more until there are enough.

    The graph is read from these captures. Parameters are read from all, since some experts may run only in others.

    Raises:
        Refused: too few routings use all groups, or those that do have the same sizes.
    """
    for seed in range(_COMPLETING_SEED, _COMPLETING_SEED + _MAX_EXTRA_CAPTURES):
        if _is_enough(proof, complete := _find_readable_captures(proof)):
            return complete
        sizes = proof.size_choice.choose(max(21, proof.max_experts // 4), seed)
        form = proof.capture_and_lift(Routing(("diverse", "overloaded")[seed % 2], seed), sizes)
        proof.add_form(form, may_relift=True)
    if _is_enough(proof, complete := _find_readable_captures(proof)):
        return complete
    captures, kinds = len(proof.evidence.forms), len(proof.evidence.reference.groups)
    source = str(proof.evidence.reference.cut.meta["source"])
    if len(complete) < _MIN_COMPLETE_CAPTURES:
        raise Refused(
            f"{len(complete)} of {captures} captures use all {kinds} kinds of experts at once, and a proof needs "
            f"{_MIN_COMPLETE_CAPTURES}",
            source=source,
            remedy="let a call select experts of all kinds",
        )
    texts = (", ".join(f"{dim}={n}" for dim, n in proof.evidence.sizes[i].items()) for i in complete)
    sizes = "; ".join(dict.fromkeys(texts))
    raise Refused(
        f"the {len(complete)} of {captures} captures that use all {kinds} kinds of experts at once do not differ "
        f"enough in their sizes ({sizes}), so numbers that depend on a size look like constants",
        source=source,
        remedy="let calls of any size select experts of all kinds",
    )


def _find_complete_captures(proof: ProofState) -> list[int]:
    """Return the indices of the captures in which all groups of experts ran."""
    return [i for i, form in enumerate(proof.evidence.forms) if all(g.ids for g in form.groups)]


def _find_readable_captures(proof: ProofState) -> list[int]:
    """Return the complete captures; if some of them have a value for unrouted tokens, these alone."""
    complete = _find_complete_captures(proof)
    return [i for i in complete if proof.evidence.forms[i].unrouted_value] or complete


def _is_enough(proof: ProofState, complete: list[int]) -> bool:
    return len(complete) >= _MIN_COMPLETE_CAPTURES and _do_sizes_vary(proof, complete)


def _do_sizes_vary(proof: ProofState, captures: list[int]) -> bool:
    """Return whether some captures differ in their sizes, and in each axis that varies among all captures.

    A number that depends on an axis of fixed size would look like a constant.
    """

    def count(axes: tuple[str, ...], among: Iterable[int]) -> int:
        return len({tuple(proof.evidence.sizes[i][dim] for dim in axes) for i in among})

    all_captures, dims = range(len(proof.evidence.sizes)), proof.arguments.dims
    return count(dims, captures) >= min(3, count(dims, all_captures)) and all(
        count((dim,), captures) >= min(2, count((dim,), all_captures)) for dim in dims
    )


def merge_groups(proof: ProofState) -> list[ProvenGroup]:
    """Merge the groups of experts of all captures, with complete tables of parameters.

    Raises:
        Refused: an expert uses different parameters, or computes different functions, in two captures.
    """
    merged_groups = []
    for g, first in enumerate(proof.evidence.reference.groups):
        ids = sorted({e for form in proof.evidence.forms for e in form.groups[g].ids})
        tables = []
        for j in range(len(first.tables)):
            merged: dict[int, ParameterSlice] = {}
            for form in proof.evidence.forms:
                for e, part in form.groups[g].tables[j].items():
                    if merged.setdefault(e, part) != part:
                        raise Refused(
                            f"expert {e} uses {part} under one routing and {merged[e]} under another",
                            culprits=(part.fqn,),
                            source=str(form.cut.meta["source"]),
                            remedy="select the parameters of an expert by its number only",
                        )
            tables.append([merged[e] for e in ids])
        merged_groups.append(ProvenGroup(ids, first.body, tables, []))
    owners = [e for group in merged_groups for e in group.ids]
    if repeated := sorted({e for e in owners if owners.count(e) > 1}):
        raise Refused(
            f"expert {repeated[0]} computes different functions under different routings",
            source=str(proof.evidence.reference.cut.meta["source"]),
            remedy=ONE_FUNCTION,
        )
    return merged_groups


def build_match(proof: ProofState, forms: list[CanonicalForm]) -> Match:
    """Build the match of some captures, with the parameters that any capture has shown."""
    groups = merge_groups(proof)
    for group, merged in enumerate(groups):
        merged.values = [list(refs) for refs in zip(*[form.groups[group].values for form in forms], strict=True)]
    compared = {g for form in forms for g in form.capture.sizes.guards if all(g.holds(other.sizes) for other in forms)}
    return Match(
        block=proof.block,
        arguments=proof.arguments,
        forms=forms,
        groups=groups,
        num_experts=proof.num_experts,
        extra_guards=[g for g in dict.fromkeys((*proof.size_restrictions, *proof.guards)) if g not in compared],
        modes_read=set().union(*[form.capture.modes_read for form in forms]),
        size_restrictions=proof.size_restrictions,
        probe_runs=proof.probe_runs,
    )


__all__ = ["prove"]
