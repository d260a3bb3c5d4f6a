"""Vary results of integer inputs (token ids, lengths, steps in buffers) that look like constants.

Protects from padding, special tokens or a warm-up that the example does not have::

    mask = ids != pad_id  # True everywhere without padding in the example
    weights = weights * mask[:, None]
    if step < warmup_steps:  # True in the first steps
        ...

`boundary_values` puts numbers into the arguments that change these results. `vary_integer_inputs` captures with each
number. It then forces another outcome of each result that had one outcome in all captures; the experts must not depend
on it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.environment.code_locations import is_internal_error, is_raised_by_program, suppress_program_errors
from ...capture.state.side_effects import has_integers
from ...capture.tracing.capture_result import FORCE_MIXED, Capture
from ...capture.tracing.concrete_routing import Routing
from ...capture.tracing.node_origins import is_abstract
from ...errors import Refused
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import (
    depends_on_arguments,
    depends_on_call,
    find_extremes,
    follows_from_integers,
    line,
    skip_moves,
)
from ..facts.integer_ranges import NARROW, IntegerRanges
from ..facts.op_classes import CLAMPS, COPIES, FILLS, INTEGER_FUNCTIONS, LOOKUPS, SATURATING, VIEWS
from ..lift.canonical_form import CanonicalForm

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

BUFFER_SEEDS = (2, 3, 4)  # seeds of captures in which buffers have other values
_FIRST_BOUNDARY_SEED = 50  # first seed of captures that use the numbers of `boundary_values`
_FEW_TOKENS_SEEDS = (70, 71, 72)  # seeds of captures in which few experts have tokens
OpRun = tuple[Any, str, int]  # call stack, op, and a count of the op's runs there, from 1


@dataclasses.dataclass
class Observation:
    """The result of an operation on integers of a call.

    Attributes:
        values: two of its values, or the one that all elements have.
        operand_values: values of its operands.
        is_same: the result equals an operand.
        num_runs: how often the program ran the op with this call stack.
    """

    node: fx.Node
    values: set[float]
    operand_values: set[float]
    is_same: bool
    num_runs: int = 0

    @property
    def is_doubtful(self) -> bool:
        return self.is_same or (len(self.values) == 1 and len(self.operand_values) > 1)

    def __or__(self, other: Observation) -> Observation:
        is_same = self.is_same and other.is_same
        return Observation(self.node, self.values | other.values, self.operand_values | other.operand_values, is_same)


def observe_integers(capture: Capture) -> dict[OpRun, Observation]:
    """Return the results of the operations on integers of a call, by runs of the ops."""
    observations: dict[OpRun, Observation] = {}
    counts = Counter[Any]()
    ranges: list[IntegerRanges] = []
    for n in filter(_depends_on_call_integers, capture.nodes):
        site = (n.meta.get("calls") or n.meta["source"], str(n.target))
        counts[site] += 1
        made_of = find_operands(n)
        operand_values = set().union(
            *[find_extremes(capture, a) for a in (made_of[:1] if get_op_name(n) in LOOKUPS else made_of)]
        )
        is_same = (
            _can_saturate(n)
            and not _is_mask_of_constant(n)
            and any(are_equal(capture.concrete_value(a), capture.concrete_value(n)) for a in made_of)
        )
        observation = Observation(n, find_extremes(capture, n), operand_values, is_same)
        # doubtful, alone or together with other captures
        is_one_way = observation.is_same or len(observation.values) == 1
        if is_one_way and not ranges:
            ranges.append(IntegerRanges(capture.nodes, of_call=True))
        if not is_one_way or not _is_decided(ranges[0], n):
            observations[(*site, counts[site])] = observation
    for (*site, _), observation in observations.items():
        observation.num_runs = counts[tuple(site)]
    return observations


def _is_decided(ranges: IntegerRanges, n: fx.Node) -> bool:
    """Return whether a node has this outcome for all inputs: `(ids % 4).clamp(max=3)` never clamps."""
    node_range = ranges.get(n)
    bounds = [ranges.get(a) for a in find_operands(n)] if get_op_name(n) in CLAMPS else []
    return ranges.is_decided(n) or any(node_range and r and all(map(are_equal, node_range, r)) for r in bounds)


def _can_saturate(n: fx.Node) -> bool:
    return get_op_name(n) in SATURATING or (get_op_name(n) == "_to_copy" and n.meta["val"].dtype in NARROW)


def _is_mask_of_constant(n: fx.Node) -> bool:
    """Return whether a boolean op returns an operand for all inputs: `mask = ones(...); mask &= ids != 0`."""
    return n.meta["val"].dtype is torch.bool and any(map(_is_filled, find_operands(n)))


def _is_filled(node: fx.Node) -> bool:
    """Return whether all elements of a tensor are one number, because the program filled it."""
    return get_op_name(skip_moves(node, COPIES | VIEWS)) in FILLS


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements, whatever their dtypes."""
    return a.shape == b.shape and bool((a == b).all())


def find_operands(n: fx.Node) -> list[fx.Node]:
    """Return the tensors that an op takes; for a `getitem`, the tensors that the op before it takes."""
    return [a for b in n.all_input_nodes for a in (b.all_input_nodes if b.meta.get("val") is None else [b])]


def vary_integer_inputs(proof: ProofView) -> None:
    """Capture with each number of `boundary_values`, then force another outcome of each result with one outcome.

    An outcome is forced in a capture that has the result: one behind a branch occurs only there.

    Raises:
        Refused: the experts seem to depend on the result. The forced capture need not show how: it may have changed
            one of several equal masks alone, which no ids would do.
    """
    observed: list[dict[OpRun, Observation]] = []  # by capture
    settled: set[OpRun] = set()
    extra = [*(t.extra_values for t in proof.arguments.tensors), *proof.arguments.extra_buffer_values.values()]
    extra_seeds = (
        range(_FIRST_BOUNDARY_SEED, _FIRST_BOUNDARY_SEED + max(map(len, extra), default=0) + 1) if any(extra) else ()
    )
    few_tokens = iter(_FEW_TOKENS_SEEDS)
    seeds = iter((*(BUFFER_SEEDS if has_integers(proof.block) else ()), *extra_seeds))
    while True:
        observed += [observe_integers(form.capture) for form in proof.evidence.forms[len(observed) :]]
        run = next((p for p in _find_doubtful_runs(observed) if p not in settled), None)
        if run is None:
            return
        if (seed := next(seeds, None)) is not None:
            proof.add_form(proof.capture_and_lift(Routing("diverse", seed), proof.evidence.sizes[0]))
            continue
        first = next(i for i, by_run in enumerate(observed) if run in by_run)
        node = observed[first][run].node
        if _is_test_of_tokens(node) and (seed := next(few_tokens, None)) is not None:
            _capture_few_tokens(proof, seed)
            continue
        settled.add(run)
        _force_other_value(proof, node, first)


def _is_test_of_tokens(node: fx.Node) -> bool:
    """Return whether a node is one boolean, such as whether any token chose an expert: few tokens may change it."""
    val: Any = node.meta["val"]
    return val.dtype is torch.bool and not val.dim() and depends_on_arguments(node)


def _capture_few_tokens(proof: ProofView, seed: int) -> None:
    """Add a capture of about three tokens, if it has the form of the others: `vary_token_counts` refuses another."""
    near = proof.arguments.choose_tokens_near(3, avoid=(proof.evidence.reference.slots,))
    sizes = proof.size_choice.choose_sequence(near)
    if proof.size_choice.satisfies_restrictions(sizes):
        with suppress_program_errors(Refused):
            proof.add_form(proof.capture_and_lift(Routing("diverse", seed), sizes))


def find_doubtful_nodes(proof: ProofView) -> list[fx.Node]:
    """Return the nodes of the first capture that had one outcome in all captures."""
    observed = [observe_integers(form.capture) for form in proof.evidence.forms]
    return [observed[0][run].node for run in _find_doubtful_runs(observed) if run in observed[0]]


def _find_doubtful_runs(observed: list[dict[OpRun, Observation]]) -> list[OpRun]:
    """Return the runs with one outcome in all captures.

    Each iteration of a loop is a run of its own, unless the number of iterations depends on the routing: an iteration
    then belongs to different experts in different captures.
    """
    all_pairs = [(run, observation) for by_run in observed for run, observation in by_run.items()]
    num_runs: dict[Any, set[int]] = {}
    for run, observation in all_pairs:
        num_runs.setdefault(run[:2], set()).add(observation.num_runs)
    pairs_by_key: dict[Any, list[tuple[OpRun, Observation]]] = {}
    for run, observation in all_pairs:
        key = run if len(num_runs[run[:2]]) == 1 else run[:2]
        pairs_by_key.setdefault(key, []).append((run, observation))
    merged = [
        (pairs[0][0], functools.reduce(operator.or_, [seen for _, seen in pairs])) for pairs in pairs_by_key.values()
    ]
    return [run for run, observation in merged if observation.is_doubtful]


def _force_other_value(proof: ProofView, node: fx.Node, index: int) -> None:
    """Force another outcome of a node in the capture with this index, which must not change the experts.

    Raises:
        Refused: the form, the lines that values are read from, or the kept slots change.
    """
    source, base = node.meta["source"], proof.evidence.forms[index]
    description = "a comparison" if node.meta["val"].dtype is torch.bool else f"a number made by {get_op_name(node)}"
    refusal = Refused(
        f"the experts depend on {description} of given integers or buffers, which had the same outcome for all values "
        f"that were tried: {source.text}",
        source=str(source),
        remedy="pass example_inputs with which both outcomes occur, or set the buffers so",
    )
    interventions = {**base.capture.interventions, (source, str(node.target), True): FORCE_MIXED}
    try:
        form = proof.capture_and_lift(base.capture.routing.restart(), base.sizes, interventions)
        aligned = proof.evidence.require_same_form(form)
    except Exception as error:
        if is_internal_error(error):
            raise
        if is_raised_by_program(error):  # the original raises the error, too
            return
        raise refusal from error
    if _find_read_lines(aligned) != _find_read_lines(base) or not torch.equal(aligned.kept_slots, base.kept_slots):
        raise refusal
    proof.add_form(form)


def _find_read_lines(form: CanonicalForm) -> list[Any]:
    """Return the lines that experts and shared terms are read from, each with a count of its nodes."""
    counts, at = Counter[Any](), {}
    for n in form.capture.nodes:
        counts[line(n)] += 1
        at[n] = (line(n), counts[line(n)])
    refs = [form.expert_index, *form.shared, *(v for group in form.groups for v in group.values)]
    return [at[n] for ref in refs for n in ref.nodes]


def _depends_on_call_integers(n: fx.Node) -> bool:
    """Return whether a tensor is computed from integers of the call, and no operand from abstract floats.

    If it depends only on buffers, which have other values in each capture, it counts if its op computes new numbers.
    """
    if n.op != "call_function" or not isinstance(n.meta.get("val"), torch.Tensor) or not follows_from_integers(n):
        return False
    is_one = depends_on_arguments(n) or (depends_on_call(n) and _is_computation(n))
    return is_one and not any(map(is_abstract, find_operands(n)))


def _is_computation(n: fx.Node) -> bool:
    """Return whether an op computes new integers, rather than move or reduce its operands."""
    return get_op_name(n) in INTEGER_FUNCTIONS or torch.Tag.pointwise in getattr(n.target, "tags", ())
