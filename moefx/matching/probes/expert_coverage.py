"""Run each expert in some capture.

Protects from an expert that differs and is never chosen::

    experts = nn.ModuleList([Mlp() for _ in range(63)] + [WideMlp()])  # 29 tokens choose 58 of 64 experts
    ids = table[token_ids]  # a table of zeros that is loaded later: only expert 0 runs

The probe counts the experts by their parameters, prefers missing ones in more captures, and puts ids into arguments and
buffers that choose them. It refuses the block if some expert cannot be made to run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.arguments.block_arguments import ExtraValue
from ...capture.environment.code_locations import is_program_error
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing, can_hold
from ...errors import Refused
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import depends_on_call
from ..facts.integer_paths import evaluate_path, find_integer_ancestors, find_path
from ..facts.integer_ranges import IntegerRanges
from ..facts.range_arithmetic import UNBOUNDED
from ..terms.parameter_slices import ParameterSlice, Siblings, get_tensor, guess_experts
from .boundary_values import can_run

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_MAX_EXTRA = 8
_MIN_CHANCE = 1e-3
_MAX_NUMBERS = 4096
_CHOOSABLE_ONLY = "let the router choose every expert, or remove the experts that it cannot choose"
_CHOOSE_ALL = "pass example_inputs, or set buffers, with which some token chooses each expert"


def show_all_experts(proof: ProofView) -> None:
    """Count the experts, and capture until each one has run.

    Raises:
        Refused: some expert runs under no routing tried.
    """
    extra = 0
    proof.set_num_experts(_count_experts(proof))
    if missing := set(range(proof.num_experts)) - proof.evidence.seen_experts - _find_zero_experts(proof):
        _choose_by_numbers(proof, missing)
    while missing := sorted(set(range(proof.num_experts)) - proof.evidence.seen_experts - _find_zero_experts(proof)):
        if extra == _MAX_EXTRA:
            raise Refused(
                f"{len(missing)} of {proof.num_experts} experts were never chosen under any routing tried, "
                f"the first is expert {missing[0]}",
                source=str(proof.evidence.reference.cut.meta["source"]),
                remedy=_CHOOSE_ALL
                if all(map(depends_on_call, proof.evidence.reference.expert_index.nodes))
                else _CHOOSABLE_ONLY,
            )
        extra += 1
        sizes = proof.size_choice.choose(max(17, min(len(missing), 4 * proof.max_experts)), extra)
        before = set(missing)
        prefer = tuple(missing) * max(1, 16 // len(missing))
        proof.add_form(proof.capture_and_lift(Routing("diverse", 10 + extra, prefer=prefer), sizes))
        after = set(range(proof.num_experts)) - proof.evidence.seen_experts - _find_zero_experts(proof)
        if after == before and extra > 2:
            extra = _MAX_EXTRA


def choose_unseen_experts(proof: ProofView) -> tuple[int, ...]:
    """Choose first experts of tokens so that each expert runs that no capture has shown.

    The other slots of a token choose the experts behind its first one. Return nothing if integers of the call choose
    the experts.
    """
    first = proof.evidence.reference
    if all(map(depends_on_call, first.expert_index.nodes)):
        return ()
    chosen: list[int] = []
    for e in sorted(set(range(_count_experts(proof))) - proof.evidence.seen_experts):
        if not chosen or e >= chosen[-1] + first.slots:
            chosen.append(e)
    return tuple(chosen)


def _choose_by_numbers(proof: ProofView, missing: set[int]) -> None:
    """Lift all captures again with integers that choose the missing experts, if arguments or buffers choose experts.

    The example may lack the tokens that choose them, and a table of experts that is loaded later is all zeros.
    """
    first = proof.evidence.reference
    if not all(map(depends_on_call, first.expert_index.nodes)):
        return
    choosing_values: set[ExtraValue] = set()
    for node in first.expert_index.nodes:
        ancestors = find_integer_ancestors(node)
        for leaf in (n for n in ancestors if n.op == "placeholder"):
            argument = proof.arguments.tensors[leaf.meta["position"]]
            numbers = (
                _find_choosing_numbers(first.capture, node, leaf, missing) if argument.accepts_other_values else {}
            )
            choosing_values |= {(leaf.meta["position"], n) for n in numbers.values() if argument.can_hold(n)}
            missing = missing - numbers.keys()
        for leaf in (n for n in ancestors if n.op == "get_attr" and not n.meta["val"].is_floating_point()):
            choosing_values |= {(leaf.meta["fqn"], e) for e in missing if can_hold(leaf.meta["val"], e)}
    arguments = proof.arguments.with_extra_values(choosing_values)
    if choosing_values and can_run(proof, arguments, proof.evidence.sizes[0]):
        proof.remake_evidence(arguments)


def _find_choosing_numbers(captured: Capture, node: fx.Node, leaf: fx.Node, experts: set[int]) -> dict[int, int]:
    """Return, by expert, the least number of an argument below `_MAX_NUMBERS` that chooses the expert."""
    value, number_by_expert = leaf.meta["val"], dict[int, int]()
    path = find_path(leaf, find_integer_ancestors(node))
    for start in range(0, _MAX_NUMBERS if value.numel() else 0, max(1, value.numel())):
        tried_numbers = (torch.arange(value.numel()) + start).to(value.dtype)
        try:
            chosen = evaluate_path(captured, path, {leaf: tried_numbers.view(value.shape)})[node].reshape(
                value.numel(), -1
            )
        except Exception as error:  # the number may be out of bounds of a table
            if not is_program_error(error):
                raise
            break
        for e in experts - number_by_expert.keys():
            hits = (chosen == e).any(1).nonzero()
            if len(hits):
                number_by_expert[e] = int(tried_numbers[hits[0, 0]])
    return number_by_expert


def _find_zero_experts(proof: ProofView) -> set[int]:
    """Return the ids that are chosen and never contribute: experts that do nothing.

    They must be chosen too often for chance, both in slots and in captures. Masks, a capacity, or a buffer that allows
    some experts only may drop the slots of an expert that works.
    """
    chosen = [(form, form.ids.flatten().tolist()) for form in proof.evidence.forms]
    slots = [seen for form, ids in chosen for seen in zip(ids, form.kept_slots.flatten().tolist(), strict=True)]
    captures = [(e, bool(form.kept_slots[form.ids == e].any())) for form, ids in chosen for e in set(ids)]
    by_slots, by_captures = _find_never_true(slots), _find_never_true(captures)
    return {e for e, n in Counter(e for e, _ in captures).items() if e in by_slots & by_captures and n > 1}


def _count_experts(proof: ProofView) -> int:
    """Return the number of experts: the maximum over lengths of stacks, counts of sibling modules, and ids + 1."""
    first = proof.evidence.reference
    total = max(proof.evidence.seen_experts) + 1
    for group in first.groups:
        for table in group.tables:
            total = max(total, _count_siblings(proof, table), _count_stacked(proof, table, group.tables))
    for node in first.expert_index.nodes:
        if get_op_name(node) in ("masked_fill", "where"):  # the number that it fills in may be no expert's
            continue
        ids = IntegerRanges(first.capture.nodes).get(node)
        if ids is not None and (ids[0] >= 0).all() and ids[1].numel() and ids[1].max() < UNBOUNDED:
            total = max(total, int(ids[1].max()) + 1)
    return total


def _count_stacked(proof: ProofView, table: dict[int, ParameterSlice], tables: list[dict[int, ParameterSlice]]) -> int:
    """Return how many experts a stacked tensor has parts for, divided among its tables; 0 if not numbered by expert."""
    if any(guess_experts(part, proof.siblings)[:1] != [e] for e, part in table.items()):
        return 0
    tensor, length = _find_stack(proof, next(iter(table.values())))
    own_slices = set(table.values())
    others = [set(t.values()) for t in tables if _find_stack(proof, next(iter(t.values()))) == (tensor, length)]
    disjoint = [parts for parts in others if not parts & own_slices]
    return length // (1 + len(disjoint))


def _find_stack(proof: ProofView, part: ParameterSlice) -> tuple[Any, int]:
    """Return the stacked tensor (FQN and steps to it) that contains a slice, and its number of parts."""
    shape = get_tensor(proof.block, part.fqn).shape
    for i, (op, *rest) in enumerate(part.steps):
        if op == "select":
            return (part.fqn, part.steps[:i]), shape[rest[1][0][0]]
        if op == "slice":
            _, dim, start, stop, _ = rest
            return (part.fqn, part.steps[:i]), shape[dim] // (stop - start)
        if op in ("reshape", "permute", "expand"):
            shape = rest[0]
    return part.fqn, 0


def _count_siblings(proof: ProofView, table: dict[int, ParameterSlice]) -> int:
    """Return the number of sibling modules that hold experts, if their numbers are the experts' ids; otherwise 0.

    A shared expert in their list does not count.
    """
    names = {e: part.fqn.split(".") for e, part in table.items()}
    for depth, _ in enumerate(min(names.values(), key=len)):
        before = next(iter(names.values()))[:depth]
        siblings = proof.siblings.get(".".join(before), Siblings())
        if all(siblings.numbers.get(parts[depth]) == e for e, parts in names.items()):
            heads = {tuple(fqn.split(".")[: depth + 1]) for fqn in proof.expert_parameters}
            return sum((*before, name) in heads for name in siblings)
    return 0


def _find_never_true(seen: list[tuple[int, bool]]) -> set[int]:
    """Return the keys that were never true, and were tried too often for chance (below `_MIN_CHANCE`)."""
    num_trials, num_hits = Counter(e for e, _ in seen), Counter(e for e, is_true in seen if is_true)
    missed = 1 - num_hits.total() / max(1, sum(n for e, n in num_trials.items() if e in num_hits))
    return {e for e, n in num_trials.items() if e not in num_hits and missed**n < _MIN_CHANCE}
