"""Go beyond limits that no capture reached, such as a capacity of 64 slots at 29 tokens.

Protects from a capacity that seems to drop nothing::

    rank = F.one_hot(chosen, num_experts).cumsum(0).gather(1, chosen)
    weights = weights * (rank <= 64)  # True in captures of 29 tokens
    token = torch.where(chosen == e)[0][:64]

`find_limits` reads the numbers that counts and ranks are compared with, and the ends of slices. `overflow_limits`
captures enough tokens to go beyond them. If that takes too many tokens, a guard restricts the form to fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.environment.code_locations import Source, is_internal_error, is_program_error
from ...capture.sizes.size_guards import SizeGuard
from ...capture.tracing.capture_result import Capture
from ...capture.tracing.concrete_routing import Routing
from ...errors import Refused
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import depends_on_routing, fold_ancestors, follows_from_integers
from ..facts.integer_ranges import NARROW, UNBOUNDED, IntegerRanges, find_token_sizes
from ..facts.load_statistics import has_loads
from ..facts.op_classes import AXIS_MOVES, NOT_COUNT_PRESERVING, ORDERED, RESHAPED_COPIES, TWO_SIDED
from ..lift.canonical_form import CanonicalForm
from ..lift.lift_refusals import NothingRouted

if TYPE_CHECKING:
    from .proof_view import ProofView

_MAX_CROWDS = 4  # captures that go beyond limits
_CROWD_SHARE = 0.85  # of the tokens choose one expert under "overloaded" and "contested": 0.9 on average
MAX_CROWD_TOKENS = 600  # limit of captures that overflow a capacity, or confirm a number's change
_COUNTING = {"_to_copy", "sum", "cumsum", "index_add", "index_put", "scatter_add"}  # ops that may make a narrow count
_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}  # the dtype holds all integers up to this one
UNKNOWN = 0  # limit of a number that is no plain count: the tokens that reach it are unknown
OpSite = tuple[Source, str]


def overflow_limits(proof: ProofView) -> None:
    """Capture as many tokens as it takes to go beyond the limits that no capture reached. If that fails, guard the
    form to hold for fewer tokens.

    Raises:
        Refused: a limited number is no plain count, so the tokens that reach the limit are unknown.
    """
    attempts = iter(range(_MAX_CROWDS))
    while (lowest := _find_lowest_unreached(proof)) is not None:
        attempt = next(attempts, None)
        if attempt is None or not _add_crowd_beyond(proof, lowest, attempt):
            slots = proof.evidence.reference.slots
            proof.add_guard(SizeGuard(f"{proof.arguments.tokens}*{slots}", "le", str(lowest), True))
            return
    _overflow_every_expert(proof)


def _find_lowest_unreached(proof: ProofView) -> int | None:
    """Find the lowest limit that no capture reached, and that more tokens can reach.

    Raises:
        Refused: the limited number is no plain count.
    """
    limits_by_capture = _find_limits_by_capture(proof)
    sites = find_unreached(limits_by_capture)
    highest_counts = [_count_most(form) for form in proof.evidence.forms]
    unreached: set[int] = set()
    for site, limits in sites.items():
        if len(limits) == 1:
            unreached |= limits
            continue
        # a capacity that grows with the tokens and has room for all of them is never exceeded
        pairs = [
            (capture_limits.get(site), count)
            for capture_limits, count in zip(limits_by_capture, highest_counts, strict=True)
        ]
        if too_small := {limit for limit, count in pairs if limit and limit < count}:
            unreached |= too_small | limits & {UNKNOWN}
    lowest = min(unreached, default=None)
    if lowest == UNKNOWN:
        site = next(site for site, limits in sites.items() if UNKNOWN in limits)
        raise Refused(
            "a number computed from counts or positions is compared, and the comparison had one outcome in all "
            "captures; it is not a plain count, so moefx cannot tell which number of tokens changes the outcome",
            source=str(site[0]), culprits=(site[1],), remedy="compare the count itself",
        )  # fmt: skip
    return lowest


def _find_limits_by_capture(proof: ProofView) -> list[dict[OpSite, int | None]]:
    return [find_limits(form.capture, proof.evidence.unforced_lengths) for form in proof.evidence.forms]


def _add_crowd_beyond(proof: ProofView, limit: int, attempt: int) -> bool:
    """Add a capture in which more tokens than a limit choose one expert.

    Some limits hold for all choices, some for first choices only: the kind of the routing changes by `attempt`.

    Returns:
        Whether there is such a capture with the form of the others. It may take too many tokens.
    """
    tokens = proof.arguments.choose_tokens_near(int(limit / _CROWD_SHARE) + 10)
    sizes = proof.size_choice.choose_sequence(tokens)
    if tokens > MAX_CROWD_TOKENS or not proof.size_choice.satisfies_restrictions(sizes):
        return False
    kind = "contested" if proof.evidence.reference.slots > 1 and attempt % 2 == 0 else "overloaded"
    try:
        proof.add_form(proof.capture_and_lift(Routing(kind, 3 + attempt), sizes), may_relift=True)
    except Exception as error:  # an error of the program, too, at sizes that it does not support
        if is_internal_error(error):
            raise
        return False
    return True


def _overflow_every_expert(proof: ProofView) -> None:
    """Add a capture in which each expert exceeds the limits, unless it needs too many tokens. A limit may hold for one
    expert only (`(rank >= 16) & (chosen == 3)`).

    Raises:
        Refused: the form differs, or there is none although some slots are kept.
    """
    by_site = _group_by_site(_find_limits_by_capture(proof)).values()
    limits = {limit for limits in by_site if None in limits for limit in limits if limit}
    candidates = (choose_even_sizes(proof, limit + 1) for limit in sorted(limits, reverse=True))
    if (sizes := next(filter(None, candidates), None)) is None:
        return
    try:
        form = proof.capture_and_lift(Routing("even"), sizes)
    except NothingRouted:  # each expert drops all of its slots: the limit holds for each
        return
    except Exception as error:
        if not is_program_error(error):
            raise
        return
    proof.add_form(form, may_relift=True)


def choose_even_sizes(proof: ProofView, limit: int) -> dict[str, int] | None:
    """Choose sizes at which an even routing gives each expert more choices than `limit`. None if these take more than
    `MAX_CROWD_TOKENS` tokens, or the proof does not cover them."""
    slots, experts = proof.evidence.reference.slots, proof.num_experts
    tokens = proof.arguments.choose_tokens_near(experts * -(-(limit + 1) // slots) + experts)
    sizes = proof.size_choice.choose_sequence(tokens)
    return sizes if tokens <= MAX_CROWD_TOKENS and proof.size_choice.satisfies_restrictions(sizes) else None


def _count_most(form: CanonicalForm) -> int:
    """Return how many choices one expert may get: one of each token's `topk`, otherwise all."""
    tokens, node = math.prod(form.tokens), form.expert_index.node
    while get_op_name(node) in RESHAPED_COPIES and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    comes_from_topk = get_op_name(node) == "getitem" and get_op_name(node.args[0]) == "topk"  # type: ignore[arg-type]
    return tokens if comes_from_topk and not form.expert_index.columns else form.slots * tokens


def find_limits(capture: Capture, lengths: Set[tuple[Source, ...]] = frozenset()) -> dict[OpSite, int | None]:
    """Find the limits that counts and ranks of a capture are compared with, by source line and op.

    Computed once per capture.

    Args:
        lengths: call stacks of Python comparisons with an expert's number of rows, which count as limits, too.

    Returns:
        The limit; None if a count or rank reached it; `UNKNOWN` if the compared number is no plain count.
    """
    return capture.compute_once(("limits", frozenset(lengths)), lambda: _find_limits(capture, lengths))


def _find_limits(capture: Capture, lengths: Set[tuple[Source, ...]]) -> dict[OpSite, int | None]:
    limits: dict[OpSite, int | None] = {}

    def note(site: OpSite, limit: int, is_reached: bool) -> None:
        limits[site] = None if is_reached or limits.get(site, limit) is None else limit

    for read in capture.reads:
        op, limit = read.comparison or ("", None)
        if read.call_stack in lengths and op in ORDERED and type(limit) is int and limit > 1:
            note((read.source, "length"), limit, bool(read.value) is (op in ("gt", "ge")))
    for n in capture.nodes:
        if n.op != "call_function":
            continue
        site = (n.meta["source"], str(n.target))
        if dtype_limit := _find_exact_limit(capture, n) or _find_narrow_limit(capture, n):
            limits[site] = dtype_limit
        elif limits.get(site, UNKNOWN) is not None:  # else another iteration of a loop reached it
            for limit, is_reached in _find_op_limits(capture, n):
                note(site, limit, is_reached)
    return limits


def _find_op_limits(capture: Capture, n: fx.Node) -> Iterator[tuple[int, bool]]:
    """Yield the limits of a slice or a comparison, and whether a number of the capture is beyond."""
    name = get_op_name(n)
    if name == "slice":
        yield from _find_ends(capture, n)
    if name not in TWO_SIDED or not follows_from_integers(n):
        return
    for number, limit, is_reached, has_both in _find_compared(capture, n, name):
        ranges, is_routed = IntegerRanges.with_more_tokens(capture), depends_on_routing(number)
        if has_loads(capture, number) and not _grows(ranges, number):
            continue  # more tokens do not reach the limit
        if is_routed and not _is_count(ranges, number, limit):
            yield UNKNOWN, has_both
        elif 2 <= limit < UNBOUNDED and not (is_routed and _is_below(ranges, number, limit)):
            yield limit, is_reached or (is_routed and _is_highest(capture, ranges, number, limit))


def find_unreached(limits_by_capture: Sequence[dict[OpSite, int | None]]) -> dict[OpSite, set[int]]:
    """Return the limits that no capture reached, by op and source line."""
    return {site: seen for site, seen in _group_by_site(limits_by_capture).items() if None not in seen}  # type: ignore[misc]


def _group_by_site(limits_by_capture: Sequence[dict[OpSite, int | None]]) -> dict[OpSite, set[int | None]]:
    """Return what several captures found at each op, see `find_limits`."""
    sites = dict.fromkeys(site for limits in limits_by_capture for site in limits)
    return {site: {limits[site] for limits in limits_by_capture if site in limits} for site in sites}


def _find_ends(capture: Capture, n: fx.Node) -> Iterator[tuple[int, bool]]:
    """Yield the bounds of a slice of an expert's rows, or of tokens, and whether there are more rows than the bound.

    A negative bound is yielded as a positive number.
    """
    source, dim, start, end = (*n.args, *(0, None, None)[len(n.args) - 1 :])[:4]
    val: Any = source.meta.get("val")  # type: ignore[union-attr]
    if not isinstance(val, torch.Tensor) or not val.dim():
        return
    rows, ragged = val.shape[dim], source.meta.get("ragged") and dim == 0  # type: ignore[union-attr]
    if not ragged and rows not in capture.sizes.expressions:
        return
    for bound in (abs(at) for at in (start, end) if isinstance(at, int)):
        if 0 < bound < UNBOUNDED and (ragged or bound != rows):
            yield bound, rows > bound


def _find_compared(capture: Capture, n: fx.Node, name: str) -> Iterator[tuple[fx.Node, int, bool, bool]]:
    """Yield (compared node, limit, whether the limit was reached, whether the comparison had both outcomes)."""
    left, right = n.args[:2]
    for rows, other in ((left, right), (right, left)):
        limit = _read_number(other)
        if limit is None or not isinstance(rows, fx.Node) or not follows_from_integers(rows):
            continue
        value = capture.concrete_value(rows)
        value = value.nan_to_num(0) if value.is_floating_point() else value
        largest = int(min(float(value.max()), UNBOUNDED)) if value.numel() else 0
        # else only positions in a sequence or a batch count, with a limit that is no size itself
        sizes = capture.sizes.expressions
        if not (depends_on_routing(rows) or is_made_of_rows(rows)) and (largest + 1 not in sizes or limit in sizes):
            continue
        if name in ORDERED:
            has_both = len(capture.concrete_value(n).unique()) > 1
            yield rows, limit, has_both or largest > limit, has_both
        elif not isinstance(other, fx.Node) or n.meta["val"].shape[-1:] == (limit,):  # `one_hot(rank, capacity)`
            yield rows, limit, largest >= limit, largest >= limit


def is_made_of_rows(node: fx.Node) -> bool:
    """Return whether a number depends on an expert's number of rows, such as `arange(len(rows))`."""
    return fold_ancestors(node, "of_rows", lambda n, are: bool(n.meta.get("ragged")) or any(are))


def _read_number(x: Any) -> int | None:
    """Return the number that elements are compared with; n for `arange(n)`; None for other tensors."""
    if type(x) in (int, float):
        return math.ceil(max(-UNBOUNDED, min(x, UNBOUNDED))) if x == x else None
    if not isinstance(x, fx.Node) or depends_on_routing(x) or not follows_from_integers(x):
        return None
    val = x.meta["val"].flatten()
    if val.numel() == 1:
        return int(val[0])
    return val.numel() if val.numel() and torch.equal(val, torch.arange(len(val), dtype=val.dtype)) else None


def _is_below(ranges: IntegerRanges, rows: fx.Node, limit: int) -> bool:
    """Return whether the values are below the limit under every routing, such as ids of experts."""
    row_range = ranges.get(rows)
    return row_range is not None and bool((row_range[1] < limit).all())


def _is_highest(capture: Capture, ranges: IntegerRanges, rows: fx.Node, limit: int) -> bool:
    """Return whether a value equals the limit and none can be larger, such as `ids.max()`: no token exceeds it."""
    row_range = ranges.get(rows)
    return (
        row_range is not None
        and bool((row_range[1] <= limit).all())
        and bool((capture.concrete_value(rows) == limit).any())
    )


def _find_narrow_limit(capture: Capture, n: fx.Node) -> int | None:
    """Return the largest number of a dtype that a number which depends on the routing may overflow, else None.

    Numbers wrap around beyond: a capture of more tokens does not show all sizes.
    """
    val, name = n.meta.get("val"), get_op_name(n)
    if not isinstance(val, torch.Tensor) or val.dtype not in NARROW or name not in _COUNTING:
        return None
    inputs = n.all_input_nodes
    if not depends_on_routing(n) or not all(map(follows_from_integers, inputs)):
        return None
    if name == "index_put" and n.args[3:4] != (True,):  # it does not accumulate
        return None
    largest = torch.iinfo(val.dtype).max
    is_exact = name == "_to_copy" and _is_bounded(IntegerRanges.with_more_tokens(capture), inputs[0], largest + 1)
    return None if is_exact else largest


def _find_exact_limit(capture: Capture, n: fx.Node) -> int | None:
    """Return the largest number that a detour through floats of few digits keeps exact: `arange(T).bfloat16().long()`.

    None if the node is no conversion from these floats to integers, or its numbers do not grow with the tokens.
    """
    before = n.all_input_nodes[0] if get_op_name(n) == "_to_copy" and n.all_input_nodes else None
    dtype = before.meta["val"].dtype if before is not None and follows_from_integers(before) else None
    if before is None or dtype not in _EXACT or n.meta["val"].is_floating_point():
        return None
    while get_op_name(before) in AXIS_MOVES and before.meta["val"].is_floating_point():
        before = before.all_input_nodes[0]
    if not follows_from_integers(before):
        return None
    if before.meta["val"].is_floating_point():
        is_any = not before.all_input_nodes and before.meta["val"].numel() in find_token_sizes(capture)
    else:
        is_any = not _is_bounded(IntegerRanges.with_more_tokens(capture), before)
    return _EXACT[dtype] if is_any else None


def _is_bounded(ranges: IntegerRanges, n: fx.Node, limit: int = UNBOUNDED // 2) -> bool:
    """Return whether absolute values are below the limit for any number of tokens, also for floats of integers."""
    node_range = ranges.get(n)
    if node_range is not None:
        return bool((node_range[1] < limit).all()) and bool((node_range[0] > -limit).all())
    is_same = get_op_name(n) in AXIS_MOVES and n.all_input_nodes
    return bool(is_same) and _is_bounded(ranges, n.all_input_nodes[0], limit)


def _is_count(ranges: IntegerRanges, n: fx.Node, limit: int) -> bool:
    """Return whether a number grows with the tokens like a count, so that its limit is a number of tokens.

    No op on the way scales it, reverses it, or rounds it to fewer digits than the limit has.
    """
    seen, stack = {n}, [n]
    while stack:
        step = stack.pop()
        if step.op != "call_function" or not _grows(ranges, step):
            continue
        grown = [a for a in step.all_input_nodes if _grows(ranges, a)]
        if _breaks_count(ranges, step, grown, limit):
            return False
        stack += [a for a in grown if a not in seen]
        seen.update(grown)
    return True


def _grows(ranges: IntegerRanges, n: fx.Node) -> bool:
    return depends_on_routing(n) and not _is_bounded(ranges, n)


def _breaks_count(ranges: IntegerRanges, n: fx.Node, grown: list[fx.Node], limit: int) -> bool:
    """Return whether the result of an op on a count is no count itself."""
    name, operands, val = get_op_name(n), n.args[:2], n.meta.get("val")
    if isinstance(val, torch.Tensor) and limit > _EXACT.get(val.dtype, UNBOUNDED):
        return True
    if not grown:
        return False
    if name == "mul":
        return not any(_is_truth(ranges, a) for a in operands)
    if name in ("add", "sub") and any(type(a) in (int, float) and abs(a) > 1 for a in operands):  # type: ignore[arg-type]
        return True
    return name in NOT_COUNT_PRESERVING or (name == "sub" and not depends_on_routing(operands[0]))


def _is_truth(ranges: IntegerRanges, a: Any) -> bool:
    """Return whether a number is always 0 or 1."""
    return a in (0, 1) if not isinstance(a, fx.Node) else _is_bounded(ranges, a, 2)


__all__ = [
    "MAX_CROWD_TOKENS",
    "UNKNOWN",
    "choose_even_sizes",
    "find_limits",
    "find_unreached",
    "is_made_of_rows",
    "overflow_limits",
]
