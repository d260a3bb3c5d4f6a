"""Find the limits that the counts and ranks of a capture are compared with, such as a capacity of 64 slots.

A limit is a number in a comparison, the end of a slice, or the largest number that a dtype holds::

    rank = F.one_hot(chosen, num_experts).cumsum(0).gather(1, chosen)
    weights = weights * (rank <= 64)
    token = torch.where(chosen == e)[0][:64]
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import fx

from ...capture.environment.code_locations import Source
from ...capture.tracing.capture_result import Capture
from ...ir.ancestors import fold_ancestors
from ...ir.node_values import get_op_name
from .graph_nodes import depends_on_arguments, depends_on_routing, follows_from_integers
from .integer_ranges import NARROW, IntegerRanges, find_token_sizes
from .load_statistics import has_loads
from .op_classes import AXIS_MOVES, NOT_COUNT_PRESERVING, ORDERED, TWO_SIDED
from .range_arithmetic import UNBOUNDED
from .token_functions import is_token_function

_COUNTING = {"_to_copy", "sum", "cumsum", "index_add", "index_put", "scatter_add"}  # ops that may make a narrow count
_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}  # the dtype holds all integers up to this one


@dataclasses.dataclass(frozen=True)
class OpSite:
    """An op on a source line: equal for all runs of a loop."""

    source: Source
    op: str

    @staticmethod
    def locate(node: fx.Node) -> OpSite:
        """Return the site of a node."""
        return OpSite(node.meta["source"], str(node.target))


class LimitKind(enum.Enum):
    """What a capture shows of a limit.

    Attributes:
        REACHED: a count or rank of the capture reaches it.
        OF_COUNT: none does. The limit is a number of tokens.
        UNKNOWN: none does, and the limited number is no plain count: the tokens that reach it are unknown.
    """

    REACHED = enum.auto()
    OF_COUNT = enum.auto()
    UNKNOWN = enum.auto()


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit in one capture. `number` is set for `OF_COUNT` only."""

    kind: LimitKind
    number: int | None = None

    @staticmethod
    def of_count(number: int, is_reached: bool) -> Limit:
        """Return a limit on tokens."""
        return REACHED if is_reached else Limit(LimitKind.OF_COUNT, number)


REACHED, UNKNOWN = Limit(LimitKind.REACHED), Limit(LimitKind.UNKNOWN)


def find_limits(capture: Capture, lengths: Set[tuple[Source, ...]] = frozenset()) -> dict[OpSite, Limit]:
    """Find the limits that counts and ranks of a capture are compared with, by their place.

    Computed once per capture.

    Args:
        lengths: call stacks of Python comparisons with an expert's number of rows, which count as limits, too.
    """
    return capture.compute_once(("limits", frozenset(lengths)), lambda: _find_limits(capture, lengths))


def _find_limits(capture: Capture, lengths: Set[tuple[Source, ...]]) -> dict[OpSite, Limit]:
    limits: dict[OpSite, Limit] = {}

    def log_limit(site: OpSite, limit: Limit) -> None:
        if limits.get(site) != REACHED:  # else another iteration of a loop reached it
            limits[site] = limit

    for read in capture.reads:
        op, number = read.comparison or ("", None)
        if read.call_stack in lengths and op in ORDERED and type(number) is int and number > 1:
            is_reached = bool(read.value) is (op in ("gt", "ge"))
            log_limit(OpSite(read.source, "length"), Limit.of_count(number, is_reached))
    for n in capture.nodes:
        if n.op != "call_function":
            continue
        site = OpSite.locate(n)
        if dtype_limit := _find_exact_limit(capture, n) or _find_narrow_limit(capture, n):
            limits[site] = Limit.of_count(dtype_limit, is_reached=False)
        elif limits.get(site) != REACHED:
            for limit in _find_op_limits(capture, n):
                log_limit(site, limit)
    return limits


def _find_op_limits(capture: Capture, n: fx.Node) -> Iterator[Limit]:
    """Yield the limits of a slice or a comparison."""
    name = get_op_name(n)
    if name == "slice":
        yield from _find_ends(capture, n)
    if name not in TWO_SIDED or not follows_from_integers(n):
        return
    for number, limit, is_reached, has_both in _find_compared(capture, n, name):
        ranges, is_routed = IntegerRanges.with_more_tokens(capture), depends_on_routing(number)
        if has_loads(capture, number) and not _may_grow(ranges, number):
            continue  # more tokens do not reach the limit
        if is_routed and not depends_on_arguments(number) and is_token_function(capture, number):
            continue  # nor do they reach one of a token's choices
        if is_routed and not _is_count(ranges, number, limit):
            yield REACHED if has_both else UNKNOWN
        elif 2 <= limit < UNBOUNDED and not (is_routed and _is_below(ranges, number, limit)):
            yield Limit.of_count(limit, is_reached or (is_routed and _is_highest(capture, ranges, number, limit)))


def find_unreached(limits_by_capture: Sequence[dict[OpSite, Limit]]) -> dict[OpSite, set[Limit]]:
    """Return the limits that no capture reached, by their place."""
    return {site: seen for site, seen in group_by_site(limits_by_capture).items() if REACHED not in seen}


def group_by_site(limits_by_capture: Sequence[dict[OpSite, Limit]]) -> dict[OpSite, set[Limit]]:
    """Return what several captures found at each place, see `find_limits`."""
    sites = dict.fromkeys(site for limits in limits_by_capture for site in limits)
    return {site: {limits[site] for limits in limits_by_capture if site in limits} for site in sites}


def _find_ends(capture: Capture, n: fx.Node) -> Iterator[Limit]:
    """Yield the bounds of a slice of an expert's rows, or of tokens. A negative bound counts as a positive one."""
    source, dim, start, end = (*n.args, *(0, None, None)[len(n.args) - 1 :])[:4]
    val: Any = source.meta.get("val")  # type: ignore[union-attr]
    if not isinstance(val, torch.Tensor) or not val.dim():
        return
    rows, ragged = val.shape[dim], source.meta.get("ragged") and dim == 0  # type: ignore[union-attr]
    if not ragged and rows not in capture.sizes.expressions:
        return
    for bound in (abs(at) for at in (start, end) if isinstance(at, int)):
        if 0 < bound < UNBOUNDED and (ragged or bound != rows):
            yield Limit.of_count(bound, rows > bound)


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
        if step.op != "call_function" or not _may_grow(ranges, step):
            continue
        grown = [a for a in step.all_input_nodes if _may_grow(ranges, a)]
        if _breaks_count(ranges, step, grown, limit):
            return False
        stack += [a for a in grown if a not in seen]
        seen.update(grown)
    return True


def _may_grow(ranges: IntegerRanges, n: fx.Node) -> bool:
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
    # `rank + 1` is still a count, `rank + 100` is not
    if name in ("add", "sub") and any(type(a) in (int, float) and abs(a) > 1 for a in operands):  # type: ignore[arg-type]
        return True
    return name in NOT_COUNT_PRESERVING or (name == "sub" and not depends_on_routing(operands[0]))


def _is_truth(ranges: IntegerRanges, a: Any) -> bool:
    """Return whether a number is always 0 or 1."""
    return a in (0, 1) if not isinstance(a, fx.Node) else _is_bounded(ranges, a, 2)


__all__ = ["REACHED", "UNKNOWN", "Limit", "OpSite", "find_limits", "find_unreached", "group_by_site", "is_made_of_rows"]
