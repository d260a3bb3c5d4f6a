"""Show branches that skip an expert without tokens. A part of `branch_outcomes`.

Protects from a wrong refusal of tests for tokens::

    mask = chosen == e
    if mask.any():  # or mask.sum() == 0, start == end
        out[mask] += experts[e](x[mask])

With few experts each one has tokens in all captures, and the branch takes one way. A forced outcome would contradict
the mask. A capture of two or three tokens leaves an expert without tokens instead.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from ...capture.environment.code_locations import is_program_error
from ...capture.sizes.routed_numbers import RoutedInt, is_emptiness_test
from ...capture.sizes.size_guards import COMPARE
from ...capture.tracing.capture_result import HostRead
from ...capture.tracing.concrete_routing import Routing
from ...errors import MoefxError
from ...ir.ancestors import fold_ancestors
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import depends_on_routing, follows_from_integers
from ..facts.host_comparisons import find_comparison
from ..facts.integer_ranges import NARROW
from ..facts.op_classes import FLAT_MOVES, MASK_REDUCTIONS, NEGATIONS

if TYPE_CHECKING:
    from ..lift.canonical_form import CanonicalForm
    from ..proof.proof_view import ProofView

_MAX_CAPTURES = 8
_STEPS = FLAT_MOVES | NEGATIONS | MASK_REDUCTIONS | COMPARE.keys()
_COUNTS_TO_TRY = (0, 1, 2, 3, 4, 7, 8, 64, 10**6)  # counts of true entries to try


class _EmptinessTest(NamedTuple):
    """A test whether any entry of a mask is true.

    Attributes:
        mask: the mask, at least one-dimensional.
        if_some: the outcome if some entry is true; the opposite if none is.
    """

    mask: fx.Node
    if_some: bool


def _read_emptiness_test(read: HostRead) -> _EmptinessTest | None:
    """Return the test that Python reads; None if it is no test whether any entry of a mask is true."""
    steps: list[fx.Node] = []
    node = read.node
    if node is None or (read.comparison is None and node.meta["val"].dtype != torch.bool):
        return None
    while not _is_mask(node):
        if len(node.all_input_nodes) != 1 or get_op_name(node) not in _STEPS:
            return None
        steps.append(node)
        node = node.all_input_nodes[0]
    outcome_without_tokens, *outcomes_with_tokens = [
        _find_outcome_for_count([*reversed(steps)], read.comparison, count) for count in _COUNTS_TO_TRY
    ]
    if outcome_without_tokens is None or any(
        outcome is not (not outcome_without_tokens) for outcome in outcomes_with_tokens
    ):
        return None
    return _EmptinessTest(node, not outcome_without_tokens)


def _is_mask(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype == torch.bool and val.dim() > 0


def _find_outcome_for_count(steps: list[fx.Node], comparison: tuple[str, Any] | None, count: int) -> bool | None:
    """Return the outcome of a test on a mask with `count` true entries; None if it depends on more than the count."""
    value: int | bool | None = None  # None while the steps act on the entries, before a reduction
    for n in steps:
        name = get_op_name(n)
        if n.meta["val"].dtype in NARROW:  # 256 are 0 in 8 bits
            return None
        if name in MASK_REDUCTIONS:
            if value is None:
                value = count if name in ("sum", "count_nonzero") else count > 0
        elif name not in FLAT_MOVES:
            if value is None:  # changes the entries, and so their count
                return None
            value = not value if name in NEGATIONS else _compare(name, value, n.args[1])
            if value is None:
                return None
    if value is None:
        return None
    return bool(value) if comparison is None else _compare(comparison[0], value, comparison[1])


def _compare(name: str, value: int | bool, number: Any) -> bool | None:
    if name not in COMPARE or type(number) not in (int, float, bool):
        return None
    return bool(getattr(operator, name)(value, number))


def _marks_one_expert(mask: Any) -> bool:
    """Return whether a mask marks the choices of one expert: `ids == e`."""
    while get_op_name(mask) in FLAT_MOVES | {"any"}:
        mask = mask.args[0]
    return get_op_name(mask) == "eq" and follows_from_integers(mask) and depends_on_routing(mask)


def is_token_test(read: HostRead) -> bool:
    """Return whether a read compares a count with 0 or another count (`if start == end` skips an idle expert)."""
    if read.node is not None and _is_narrow(read.node):
        return False
    if (comparison := find_comparison(read)) is None:
        return False
    op, other, node = comparison
    if node is None:
        return isinstance(other, RoutedInt) or is_emptiness_test(op, other)
    is_count = follows_from_integers(node) and depends_on_routing(node.args[0])
    return is_count and (depends_on_routing(other) or is_emptiness_test(op, other))


def _is_narrow(node: fx.Node) -> bool:
    """Return whether a number went through a dtype in which 256 tokens may count as none."""

    def of(n: fx.Node, inputs: list[bool]) -> bool:
        val = n.meta.get("val")
        return (isinstance(val, torch.Tensor) and val.dtype in NARROW) or any(inputs)

    return fold_ancestors(node, "narrow", of)


def is_chosen_test(node: fx.Node) -> bool:
    """Return whether a comparison tells for each expert if it has tokens: `greater(one_hot(ids).sum((0, 1)), 0)`.

    More tokens do not change the result for an expert that has some.
    """
    name = get_op_name(node)
    return name in COMPARE and is_emptiness_test(name, node.args[1]) and _is_count(node.args[0])


def _is_count(node: Any) -> bool:
    """Return whether a number counts the true entries of a mask, or the ones of a `one_hot`."""
    counted = False
    while isinstance(node, fx.Node) and node.meta["val"].dtype not in NARROW:
        name = get_op_name(node)
        if name in ("sum", "count_nonzero"):
            counted = True
        elif name == "bincount":
            return len(node.all_input_nodes) == 1
        elif _is_mask(node) or name == "one_hot":
            return counted
        elif name == "scatter":  # the decomposition of `one_hot`
            base = node.args[0]
            return counted and isinstance(base, fx.Node) and get_op_name(base) == "zeros" and node.args[3:] == (1,)
        elif name not in FLAT_MOVES | {"permute", "transpose"}:
            return False
        node = node.args[0]
    return False


def show_idle_expert(proof: ProofView, read: HostRead) -> bool:
    """Add a capture of few tokens that leaves an expert idle, if the read only tests whether an expert has tokens.

    Returns:
        Whether the outcome need not be forced.

    Raises:
        Refused: the program does more than skip the expert.
    """
    test = _read_emptiness_test(read)
    if test is None and not is_token_test(read):
        return False
    last_refusal: MoefxError | None = None
    for seed in range(_MAX_CAPTURES):
        try:
            if (form := _lift_few_tokens(proof, read, seed)) is None:
                continue
            proof.add_form(form)
        except MoefxError as refusal:
            last_refusal = refusal  # a few tokens may not show the form: try others
            continue
        return True
    if test is None:
        return False
    if last_refusal is not None:
        raise last_refusal
    # the program only tests experts that were chosen (`for e in ids.unique()`)
    return read.value == test.if_some and _marks_one_expert(test.mask)


def _lift_few_tokens(proof: ProofView, read: HostRead, seed: int) -> CanonicalForm | None:
    """Lift a capture of two or three tokens; None if it has the same outcome, or the program does not run."""
    sizes = proof.size_choice.choose_sequence(2 + seed % 2)
    routing = Routing(("overloaded", "diverse")[seed // 2 % 2], 40 + seed)
    if not proof.size_choice.satisfies_restrictions(sizes):
        return None
    try:
        captured = proof.capture(routing, sizes)
    except Exception as error:
        if not is_program_error(error):
            raise
        return None
    if all(other.value == read.value for other in captured.reads if other.call_stack == read.call_stack):
        return None
    # a second capture under the same `Routing` chooses other experts
    return proof.lift(captured)
