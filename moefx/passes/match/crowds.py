"""Capacities, numbers and lines that only more tokens show than a capture has.

Each function takes a prover with its captures and goes on to where the program may change. What holds there too is
one more capture that must agree; else the form is guarded to hold below it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from ...capture.captured import MIXED, Capture
from ...capture.routing import Routing
from ...capture.sizes import SizeGuard, evaluate, plain
from ...capture.source import Source
from ...errors import CaptureError, Refused
from .agree import same_form
from .doubts import force
from .form import Lifted, most_tokens
from .limits import limits, not_reached
from .nodes import is_known, is_routed, numbers, op_name
from .ranges import Ranges

if TYPE_CHECKING:
    from .prove import Prover

_MOST_TOKENS = 600  # of a capture that overflows a capacity, or at which a number changed
_LEAK_SIZES = (131, 261, 517, 1029, 2053)  # no powers of two: these are often told apart
_LOOKUPS = {"index", "index_select", "gather", "embedding", "bucketize", "searchsorted"}
_CUTS = {"clamp", "clamp_max", "minimum", "remainder", "fmod", "bitwise_and", "__and__"}
_MOVES = {"_to_copy", "_unsafe_view", "clone", "contiguous", "detach", "flatten", "reshape", "view"}
_COPIES = {"_to_copy", "clone", "where", "zeros_like", "ones_like", "full_like"}


def overflow(prover: Prover) -> None:
    """Limits that the captures did not come to are gone beyond, with as many tokens as that takes; else the form is
    guarded to hold only where there are too few to."""
    slots, seen = prover.lifted[0].slots, [limits(lifted.capture) for lifted in prover.lifted]
    for turn in range(4):
        most = [_most_of_one(lifted) for lifted in prover.lifted]
        left = [
            found
            for place, found in not_reached(seen).items()
            # of a capacity that grows with the tokens and has room for all of them there is nothing behind
            if len(found) == 1 or any((s.get(place) or n) < n for s, n in zip(seen, most, strict=True))
        ]
        if not left:
            return
        lowest = min(map(min, left))
        tokens = int(lowest / 0.85) + 10
        sizes = prover.arguments.sequence(tokens)
        if tokens > _MOST_TOKENS or not prover.is_within(sizes):
            break
        try:  # some limits are those of all choices, some of the first ones
            lifted = prover.lift(Routing("contested" if slots > 1 and turn % 2 == 0 else "flooded", 3 + turn), sizes)
            same_form(prover.lifted[0], lifted)
        except Exception:  # the program's own too, at sizes that it is not made for
            break
        prover.add(lifted, sizes)
        seen.append(limits(lifted.capture))
    prover.extra_guards.append(SizeGuard("*".join((*prover.arguments.dims, str(slots))), "le", str(lowest), True))


def _most_of_one(lifted: Lifted) -> int:
    """How many choices one expert may get: of a token's `topk` one, else all of them."""
    tokens, node = math.prod(lifted.tokens), lifted.index.node
    while op_name(node) in _MOVES and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    is_of_topk = op_name(node) == "getitem" and op_name(node.args[0]) == "topk"  # type: ignore[arg-type]
    return tokens if is_of_topk and not lifted.index.columns else lifted.slots * tokens


def spread_numbers(prover: Prover) -> None:
    """Numbers made of counts or positions that look like constants at few tokens are made to differ."""
    for (source, op), what in {**_same_everywhere(prover), **_never_cut(prover)}.items():
        force(prover, source, {(source, op, True): MIXED}, what)


def _same_everywhere(prover: Prover) -> dict[tuple[Source, str], str]:
    """Functions that came out as one number (`counts // 300`, `relu(counts - 300)`, `table[arange(T) // 300]`), though
    not all was one that they are of."""
    made: dict[tuple[Source, str], set[float]] = {}
    of: dict[tuple[Source, str], set[float]] = {}
    for lifted in prover.lifted:
        ranges: Ranges | None = None
        for n in filter(_levels_off, filter(is_known, lifted.capture.nodes)):
            key = (n.meta["source"], str(n.target))
            seen = made.setdefault(key, set())
            if len(seen) > 1:
                continue
            seen |= _values(lifted.capture, n)
            of.setdefault(key, set()).update(*[_values(lifted.capture, a) for a in n.all_input_nodes])
            if len(seen) == 1 and is_routed(n):
                ranges = ranges or Ranges(lifted.capture.nodes)
                if ranges.decided(n):
                    seen |= {0, 1}
    same = {key: seen for key, seen in made.items() if len(seen) == 1 and len(of[key]) > 1}
    return {key: f"a number that is {next(iter(seen)):g} for few tokens" for key, seen in same.items()}


def _never_cut(prover: Prover) -> dict[tuple[Source, str], str]:
    """Fixed limits that nothing came to: `positions % 700`, `counts.clamp(max=300)`."""
    limits_at: dict[tuple[Source, str], set[str]] = {}
    for lifted in prover.lifted:
        for n in lifted.capture.nodes:
            if op_name(n) in _CUTS and is_known(n) and isinstance(before := n.args[0], fx.Node):
                uncut = is_known(before) and torch.equal(lifted.capture.shadow(n), lifted.capture.shadow(before))
                limit = str((n.args[1:], n.kwargs)) if uncut else "reached"
                limits_at.setdefault((n.meta["source"], str(n.target)), set()).add(limit)
    # not those that grow with the sizes
    fixed = [key for key, found in limits_at.items() if len(found) == 1 and "reached" not in found]
    return dict.fromkeys(fixed, "a number that is cut off for many tokens")


def leaked_sizes(prover: Prover) -> None:
    """A size, or how many tokens an expert got, that became a plain number (`int(n / 2)`) may decide a branch, or
    what `max(4, int(n / 2))` is, unseen. So more sizes are captured. Where one runs other lines than all before, the
    form is guarded to hold below it; where a number changes that was the same before, it is one more capture that
    must agree."""
    routed = any(lifted.capture.sizes.routed for lifted in prover.lifted)
    leaked = any(lifted.capture.sizes.leaks for lifted in prover.lifted)
    if not routed and not leaked and not _changes_later(prover):
        return
    crowd = Routing("flooded", 8) if routed else Routing("diverse", 8)
    many = [lifted.capture for lifted in prover.lifted if math.prod(lifted.tokens) > 1]
    every = set().union(*map(_lines, many))
    always = set.intersection(*map(_lines, many))
    columns = list(map(_all_numbers, many))
    same = {place: v for place, v in columns[0].items() if v is not None and all(c.get(place) == v for c in columns)}
    most = 4 * max(len(c.nodes) for c in many)
    # of one sequence: what is the same for 5 sequences of 19 may be another for one of 40
    below = max(sizes[prover.arguments.dims[-1]] for sizes in prover.sizes) if prover.arguments.dims else 1
    moved = False

    def has_moved(taken: Capture) -> bool:
        return any(place in same and v not in (None, same[place]) for place, v in _all_numbers(taken).items())

    @functools.cache
    def differs(tokens: int) -> tuple[bool, bool]:
        """Whether other lines run, and whether numbers are others. Raises `CaptureError` where a loop over the tokens
        makes a program too long to look at."""
        sizes = prover.arguments.sequence(tokens)
        if not all(g.holds(sizes) for g in prover.seen_guards()):
            return False, False
        taken = prover.capture(crowd, sizes, most=most)
        return not (always <= _lines(taken) <= every), has_moved(taken)

    def only_below(high: int) -> SizeGuard:
        return SizeGuard("*".join(prover.arguments.dims), "lt", str(high), True)

    proven = max(math.prod(lifted.tokens) for lifted in prover.lifted)
    longest = most_tokens(prover.lifted, times=4)
    for tokens in _LEAK_SIZES:
        if tokens <= below:
            continue
        if tokens > longest:
            prover.extra_guards.append(only_below(max(below, proven) + 1))
            return
        try:
            other_lines, other_numbers = differs(tokens)
        except CaptureError:  # too long, so a loop over the tokens
            return
        if other_lines:
            prover.extra_guards.append(only_below(_first(lambda n: differs(n)[0], below, tokens)))
            return
        if other_numbers and not moved:
            first = _first(lambda n: differs(n)[1], below, tokens)
            if not _also_at(prover, first, only_below(first), has_moved):
                prover.extra_guards.append(only_below(first))
                return
            moved = True
        below = tokens


def _levels_off(n: fx.Node) -> bool:
    """Whether an op makes one number of each: not all that do have the tag of a pointwise op."""
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype == torch.bool or not val.numel() or op_name(n) in _COPIES:
        return False
    return op_name(n) in _LOOKUPS or any(
        isinstance(v := a.meta.get("val"), torch.Tensor) and v.shape == val.shape for a in n.all_input_nodes
    )


def _values(capture: Capture, n: fx.Node) -> set[float]:
    """Two of the values, or the one that all elements have."""
    value = capture.shadow(n) if isinstance(n.meta.get("val"), torch.Tensor) else torch.empty(0)
    return {float(value.min()), float(value.max())} if value.numel() else set()


def same_by_chance(prover: Prover) -> None:
    """What was computed from sizes (`S % 2`) and was the same at all of these may be another at sizes between them: the
    form is guarded to hold where it is the same."""
    largest = max(math.prod(sizes.values()) for sizes in prover.sizes)
    for text in sorted(set().union(*[lifted.capture.sizes.used for lifted in prover.lifted])):
        with contextlib.suppress(ArithmeticError, ValueError):
            seen = {evaluate(text, sizes) for sizes in prover.sizes}
            between = {evaluate(text, prover.arguments.sequence(n)) for n in range(2, largest + 1)}
            if len(seen) == 1 and between != seen:
                prover.extra_guards.append(SizeGuard(text, "eq", str(seen.pop()), True))


def _changes_later(prover: Prover) -> bool:
    """Whether something that was computed from sizes (`S // 300`) was the same so far, and is not for more tokens."""
    later = [prover.arguments.sequence(tokens) for tokens in _LEAK_SIZES]
    for text in set().union(*[lifted.capture.sizes.used for lifted in prover.lifted]):
        with contextlib.suppress(ArithmeticError, ValueError):
            seen = {evaluate(text, sizes) for sizes in prover.sizes}
            if len(seen) == 1 and {evaluate(text, sizes) for sizes in later} != seen:
                return True
    return False


def _also_at(prover: Prover, tokens: int, below: SizeGuard, has_moved: Callable[[Capture], bool]) -> bool:
    """Whether the form holds at so many tokens in a sequence too, where a number has moved."""
    sizes = prover.arguments.choose(2 * tokens, 1)  # not of one sequence: S is to be told from B*S
    if 2 * tokens > _MOST_TOKENS:
        return False
    try:
        lifted = prover.lift(Routing("diverse", 8), sizes)
        same_form(prover.lifted[0], lifted)
    except Refused:
        return False
    if not has_moved(lifted.capture):
        return False  # it has moved back
    lifted.optional = below
    prover.add(lifted, sizes)
    return True


def _first(differs: Callable[[int], bool], low: int, high: int) -> int:
    """The least size that differs, between one that does not and one that does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return high


def _lines(taken: Capture) -> set[tuple[str, str]]:
    """Which lines of the user's ran, which ops they came to, and what the call changed."""
    ran = {(str(n.meta["source"]), str(n.target)) for n in taken.nodes if n.op == "call_function"}
    return ran | {(effect.kind, str(effect.target)) for effect in taken.effects}


def _all_numbers(taken: Capture) -> dict[Any, int | float | None]:
    """Those that ops are called with, and those that are returned."""
    returned = enumerate(pytree.tree_leaves(taken.out))
    return {**numbers(taken.nodes), **{i: plain(v) for i, v in returned if isinstance(v, (int, float))}}
