"""Find integer inputs that change the outcome of the program's tests on them. A part of `integer_inputs`.

Protects from tests of ids whose outcome the example never has::

    is_special = (ids == 50256) | (ids >= vocabulary_size - 3)
    position = (step % period == period - 1)

The numbers stand in the program, or are sums and products of numbers that do. They join the values of the arguments and
buffers in all captures, unless the program fails with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.utils._pytree as pytree
from torch import fx

from ...capture.arguments.block_arguments import Arguments, ExtraValue
from ...capture.environment.code_locations import suppress_program_errors
from ...capture.state.side_effects import has_integers
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing, can_hold
from ...errors import MoefxError
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import find_lookups, is_state
from ..facts.integer_paths import evaluate_path, find_integer_ancestors, find_path
from ..facts.integer_ranges import NARROW
from .integer_inputs import BUFFER_SEEDS, Observation, are_equal, find_operands, observe_integers

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView

_NOT_A_FLAG = 2  # put into integer masks of 0 and 1, which may be counts
_MAX_NUMBER = 1 << 30
_MAX_ENTRIES_OF_TENSOR = 6
_MAX_TRIALS = 100


def add_boundary_values(proof: ProofView, sizes: dict[str, int]) -> tuple[Arguments, Capture | None]:
    """Return the arguments of a proof with the numbers that were found, and a capture with them if one was made."""
    arguments, tried_values = proof.arguments, set[ExtraValue]()
    if not any(t.accepts_other_values for t in arguments.tensors) and not has_integers(proof.block):
        return arguments, None
    while (captured := _try_capture(proof, arguments, sizes)) is not None:
        doubtful = _observe_doubtful(proof, arguments, sizes, captured)
        values = [_find_boundary_value(captured, observation, arguments) for observation in doubtful]
        new_values = {value for value in values if value is not None} - tried_values
        if not new_values:
            break
        tried_values |= new_values
        if can_run(proof, with_all := arguments.with_extra_values(new_values), sizes):
            arguments = with_all
            continue
        for value in sorted(new_values, key=str):
            if can_run(proof, with_one := arguments.with_extra_values({value}), sizes):
                arguments = with_one
    return arguments, captured


def add_larger_flags(proof: ProofView, sizes: dict[str, int]) -> tuple[Arguments, Capture] | None:
    """Return the arguments with some entries of 2 in integer masks of 0 and 1, and a capture with them.

    None if no argument is such a mask, or the program does not run with a 2.
    """
    tensors = enumerate(proof.arguments.tensors)
    masks = {(i, _NOT_A_FLAG) for i, t in tensors if t.accepts_other_values and t.is_mask and not t.is_single}
    captured = _try_capture(proof, arguments := proof.arguments.with_extra_values(masks), sizes) if masks else None
    return (arguments, captured) if captured is not None else None


def _observe_doubtful(
    proof: ProofView, arguments: Arguments, sizes: dict[str, int], captured: Capture
) -> list[Observation]:
    """Return the observations with one outcome.

    If they depend on buffers, several captures must agree, each with other values of the buffers.
    """

    def is_open(observation: Observation) -> bool:
        is_one_way = observation.is_doubtful or _is_one_truth(observation)
        return is_one_way and not _is_test_of_known_elements(observation)

    open_observations = {
        run: observation for run, observation in observe_integers(captured).items() if is_open(observation)
    }
    ancestors = set().union(*[find_integer_ancestors(observation.node) for observation in open_observations.values()])
    if any(map(is_state, ancestors)):
        for seed in BUFFER_SEEDS:
            other_capture = _try_capture(proof, arguments, sizes, seed)
            others = observe_integers(other_capture) if other_capture is not None else {}
            open_observations = {run: known | others.get(run, known) for run, known in open_observations.items()}
            open_observations = {
                run: observation for run, observation in open_observations.items() if is_open(observation)
            }
    return [*open_observations.values()]


def can_run(proof: ProofView, arguments: Arguments, sizes: dict[str, int]) -> bool:
    """Return whether the program runs with all numbers of these arguments: one capture per number of a single one."""
    most = max(map(len, (*(t.extra_values for t in arguments.tensors), *arguments.extra_buffer_values.values())))
    return all(_try_capture(proof, arguments, sizes, seed) is not None for seed in range(most + 1))


def _try_capture(proof: ProofView, arguments: Arguments, sizes: dict[str, int], seed: int = 0) -> Capture | None:
    """Capture with these arguments; None if the program does not run with them, or the capture is refused."""
    with proof.trying_arguments(arguments), suppress_program_errors(MoefxError):
        captured = proof.capture(Routing("diverse", seed), sizes)
        return captured if all(map(_has_indices_in_bounds, captured.nodes)) else None


def _has_indices_in_bounds(n: fx.Node) -> bool:
    """Return whether the indices of an op are in bounds. Abstract tensors do not check this."""
    for i, _, allowed in find_lookups(n):
        if (seen := i.meta["val"]).numel() and not allowed.start <= seen.min() <= seen.max() < allowed.stop:
            return False
    return True


def _is_one_truth(observation: Observation) -> bool:
    """Return whether a boolean had one value, even if it depends on a single integer, such as a step."""
    return observation.node.meta["val"].dtype is torch.bool and len(observation.values) == 1


def _is_test_of_known_elements(observation: Observation) -> bool:
    """Return whether an `any` or `all` has elements of both kinds: other tokens change it, and no special number."""
    return get_op_name(observation.node) in ("any", "all") and observation.operand_values == {0, 1}


def _find_boundary_value(captured: Capture, observation: Observation, arguments: Arguments) -> ExtraValue | None:
    """Find a number that changes an observation if every third entry of one argument or buffer has it."""
    made_of = find_integer_ancestors(observation.node)
    for leaf in sorted(made_of, key=lambda n: (n.op != "placeholder", n.meta["index"])):
        if leaf.op == "placeholder" and arguments.tensors[leaf.meta["position"]].accepts_other_values:
            key, leaf_takes = leaf.meta["position"], arguments.tensors[leaf.meta["position"]].can_hold
        elif leaf.op == "get_attr":
            key, leaf_takes = leaf.meta["fqn"], partial(can_hold, leaf.meta["val"])
        else:
            continue
        leaf_values, path = leaf.meta["val"], find_path(leaf, made_of)
        is_replaced = (torch.arange(leaf_values.numel()) % 3 == 0).view(leaf_values.shape)
        for number in filter(leaf_takes, itertools.islice(_propose_numbers(captured, observation, path), _MAX_TRIALS)):
            with suppress_program_errors():  # the number may be out of bounds of a table
                if _changes_outcome(captured, observation, path, {leaf: torch.where(is_replaced, number, leaf_values)}):
                    return key, number
    return None


def _changes_outcome(
    captured: Capture, observation: Observation, path: list[fx.Node], values: dict[fx.Node, torch.Tensor]
) -> bool:
    """Return whether these values of an argument or a buffer change the outcome of an observation."""
    out = evaluate_path(captured, path, values)[observation.node]
    if observation.is_same:
        known = (values[a] if a in values else captured.concrete_value(a) for a in find_operands(observation.node))
        return not any(are_equal(a, out) for a in known)
    return set(out.unique().tolist()) != observation.values


def _propose_numbers(captured: Capture, observation: Observation, path: list[fx.Node]) -> Iterator[int]:
    """Yield numbers that may change an observation.

    These are the numbers in the ops of the path and in their other operands, the indices of a table at which it has
    another entry, the neighbours of all these numbers, and their sums, products and differences.
    """
    named = {v: None for n in path for v in pytree.tree_leaves((n.args, n.kwargs)) if type(v) in (int, float)}
    for a in {a: None for n in path for a in find_operands(n) if a not in path}:
        known = captured.concrete_value(a).flatten()
        named |= dict.fromkeys(known.unique()[:_MAX_ENTRIES_OF_TENSOR].tolist())
        others = (known != next(iter(observation.values))).nonzero().flatten()
        named |= dict.fromkeys(others[:_MAX_ENTRIES_OF_TENSOR].tolist())
    narrow = {n.meta["val"].dtype for n in path if n.meta.get("val") is not None} & NARROW
    named |= dict.fromkeys(torch.iinfo(dtype).max + 1 for dtype in narrow)
    numbers = [int(v) for v in [*named, 0] if abs(v) < _MAX_NUMBER]
    near = [v + d for d in (0, 1, -1) for v in numbers]
    pairs = [n for a, b in itertools.product(numbers, repeat=2) for n in (a * b, a + b, a - b, b - a)]
    yield from dict.fromkeys([*near, *pairs, *(n + d for d in (1, -1) for n in pairs)])
