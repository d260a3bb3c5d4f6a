"""What the captures did not show: branches, comparisons, limits and sizes that came out one way in all of them.

Each function takes a prover with its captures, makes the program go the other way where it can, and adds what that
gives to the captures that must agree, or a guard. A form that holds only one way is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.captured import MIXED, Capture, comparisons
from ...capture.routing import Routing
from ...capture.sizes import SizeGuard, evaluate, plain
from ...capture.source import Source
from ...capture.tracer import Flips
from ...errors import CaptureError, Refused
from ...ir.attributes import attributes
from ...ir.reached import code_of, reached
from .agree import same_form
from .limits import limits, not_reached
from .nodes import asks_for_rows, is_known, is_routed, line, numbers, op_name
from .ranges import Ranges

if TYPE_CHECKING:
    from .prove import Prover

_MOST_TOKENS = 600  # of a capture that overflows a capacity, or at which a number changed
_LOOKUPS = {"index", "index_select", "gather", "embedding", "bucketize", "searchsorted"}
_CUTS = {"clamp", "clamp_max", "minimum", "remainder", "fmod", "bitwise_and", "__and__"}
_COPIES = {"_to_copy", "clone", "where", "zeros_like", "ones_like", "full_like"}
_NO_LIMIT = 1e9
_MOST_NUMBERS = 50
_READ = "a value read from a tensor"
_LEAK_SIZES = (131, 261, 517, 1029, 2053)  # no powers of two: these are often told apart


def flip_branches(prover: Prover) -> None:
    """A branch that went one way in every capture is forced the other way once: it must not matter. A float that
    Python read is given the values that turn any comparison with it."""
    outcomes: dict[Source, set[Any]] = {}
    for lifted in prover.lifted:
        for read in lifted.capture.reads:
            outcomes.setdefault(read.source, set()).add(read.value)
    for lifted in prover.lifted:
        doubtful = [read for read in lifted.capture.reads if len(outcomes[read.source]) == 1]
        ranges = Ranges(lifted.capture.nodes) if doubtful else None
        for read in doubtful:
            if ranges and read.node is not None and ranges.decided(read.node, read.asked):
                outcomes[read.source] = {True, False}
    asked = {read.source: read.node for lifted in prover.lifted for read in lifted.capture.reads}
    named: list[float] | None = None
    for source, seen in outcomes.items():
        if seen == {True} and asks_for_rows(asked[source]):
            _without_rows(prover, source)
            continue
        kinds = {type(v) for v in seen}
        others: list[Any] = [not v for v in seen] if len(seen) == 1 else []
        if kinds & {float, int}:
            named = _numbers_named(prover.block) if named is None else named
            others = [1e30, -1e30, 0.0] if float in kinds else [10**6, -1, 0]
            between = named if float in kinds else list(dict.fromkeys(map(round, named)))
            others += _that_turn(prover, source, others, between)
        for value in others:
            _force(prover, source, {source: value}, _READ)


def _that_turn(prover: Prover, source: Source, known: list[Any], values: list[Any]) -> list[Any]:
    """The values with which the program does what it does with none of the known ones: it runs other ops, or computes
    with other numbers than the value itself."""

    def outline(value: Any) -> tuple[Any, list[Any], dict[Any, Any]] | None:
        with contextlib.suppress(Exception):  # it may check the value
            nodes = prover.capture(Routing("diverse", 0), prover.sizes[0], {source: value}).nodes
            return value, list(map(line, nodes)), numbers(nodes)
        return None

    def differ(a: Any, b: Any) -> set[Any]:
        return {p for p, n in a[2].items() if n != b[2].get(p) and (n, b[2].get(p)) != (a[0], b[0])}

    seen = [o for o in map(outline, known) if o is not None]
    found = []
    for new in map(outline, values):
        if new is None:
            continue
        alike = [o for o in seen if o[1] == new[1]]
        if not alike or differ(new, alike[0]) - set().union(*[differ(o, alike[0]) for o in alike]):
            found.append(new[0])
            seen.append(new)
    return found


def _numbers_named(block: nn.Module) -> list[float]:
    """Where a comparison with a step or a temperature may turn: the numbers in the code and the attributes of a block,
    what is next to them, and what is between."""
    found = set(reached(code_of(block)).numbers)
    found |= {v for v in attributes(block).values() if type(v) in (int, float) and math.isfinite(v)}
    own = sorted(n for n in found if abs(n) < _NO_LIMIT)
    near = [n + d for d in (0, 1, -1) for n in own]
    return [*dict.fromkeys([*near, *((a + b) / 2 for a, b in itertools.pairwise(own))])][:_MOST_NUMBERS]


def _without_rows(prover: Prover, source: Source) -> None:
    """Whether an expert has rows came out true everywhere. At a few tokens it may not, and must not matter; where
    it does even then, the program only asks about experts that were chosen (`for e in ids.unique()`)."""
    why: Refused | None = None
    for seed in range(8):
        sizes = prover.arguments.sequence(2 + seed % 2)
        kind = ("flooded", "diverse")[seed // 2 % 2]
        try:
            reads = prover.capture(Routing(kind, 40 + seed), sizes).reads if prover.is_within(sizes) else ()
        except Exception:
            continue  # the program does not run on so few
        if all(read.value for read in reads if read.source == source):
            continue
        try:
            lifted = prover.lift(Routing(kind, 40 + seed), sizes)
            same_form(prover.lifted[0], lifted)
        except Refused as refusal:
            why = refusal  # few tokens may not show the form: others will
            continue
        prover.add(lifted, sizes)
        return
    if why is not None:
        raise _changes(source, _READ) from why


def mix_comparisons(prover: Prover) -> None:
    """A comparison of floats that came out the same for all elements in every capture (`weight > 0.01`), or for all
    tokens' first choices, looks like a constant: once it is made to come out both ways."""
    outcomes: dict[tuple[Source, int], set[bool]] = {}
    asked: dict[Source, set[Source]] = {}  # where the floats were compared
    for lifted in prover.lifted:
        for n in lifted.capture.nodes:
            if not (made_of := comparisons(n)):
                continue
            val = n.meta["val"]
            asked.setdefault(n.meta["source"], set()).update(a.meta["source"] for a in made_of)
            per_slot = val.shape[-1:] == (lifted.slots,) and val.numel() == lifted.ids.numel()
            for slot, column in enumerate(val.reshape(-1, lifted.slots).t() if per_slot else [val]):
                outcomes.setdefault((n.meta["source"], slot), set()).update(column.unique().tolist())
    for source in dict.fromkeys(source for (source, _), seen in outcomes.items() if len(seen) == 1):
        what = "a comparison that came out the same everywhere"
        _force(prover, source, dict.fromkeys(asked[source], MIXED), what)


def spread_numbers(prover: Prover) -> None:
    """Functions of counts or positions that came out as one number everywhere (`counts // 300`, `relu(counts - 300)`,
    `table[arange(T) // 300]`), though not all was one that they are of, look like a constant: they are made to differ.
    """
    made: dict[tuple[Source, str], set[float]] = {}
    of: dict[tuple[Source, str], set[float]] = {}
    for lifted in prover.lifted:
        ranges: Ranges | None = None
        for n in lifted.capture.nodes:
            if not (is_known(n) and _levels_off(n)):
                continue
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
    for (source, op), seen in made.items():
        if len(seen) == 1 and len(of[source, op]) > 1:
            _force(prover, source, {(source, op): MIXED}, f"a number that is {seen.pop():g} for few tokens")
    cuts: dict[tuple[Source, str], set[str]] = {}  # where, and what stands in the way
    for lifted in prover.lifted:
        for n in lifted.capture.nodes:
            if op_name(n) in _CUTS and is_known(n) and isinstance(n.args[0], fx.Node):
                limit = str((n.args[1:], n.kwargs)) if _is_as_before(lifted.capture, n) else "reached"
                cuts.setdefault((n.meta["source"], str(n.target)), set()).add(limit)
    for (source, op), limits_there in cuts.items():
        if len(limits_there) == 1 and "reached" not in limits_there:  # not one that grows with the sizes
            _force(prover, source, {(source, op): MIXED}, "a number that is cut off for many tokens")


def _is_as_before(capture: Capture, n: fx.Node) -> bool:
    """Whether nothing was cut off: `positions % 700`, `counts.clamp(max=300)`."""
    before: Any = n.args[0]
    return is_known(before) and torch.equal(capture.shadow(n), capture.shadow(before))


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


def overflow(prover: Prover) -> None:
    """Limits that the captures did not come to are gone beyond, with as many tokens as that takes; else the form is
    guarded to hold only where there are too few to."""
    slots, seen = prover.lifted[0].slots, [limits(lifted.capture) for lifted in prover.lifted]
    for _ in range(3):
        pairs = [lifted.slots * math.prod(lifted.tokens) for lifted in prover.lifted]
        left = [
            found
            for place, found in not_reached(seen).items()
            # of a capacity that grows with the tokens and has room for all of them there is nothing behind
            if len(found) == 1 or any((s.get(place) or p) < p for s, p in zip(seen, pairs, strict=True))
        ]
        if not left:
            return
        lowest = min(map(min, left))
        tokens = int(lowest / 0.85) + 10
        sizes = prover.arguments.sequence(tokens)
        if tokens > _MOST_TOKENS or sizes in prover.sizes or not prover.is_within(sizes):
            break
        try:
            lifted = prover.lift(Routing("contested" if slots > 1 else "flooded", 3), sizes)
            same_form(prover.lifted[0], lifted)
        except Exception:  # the program's own too, at sizes that it is not made for
            break
        prover.add(lifted, sizes)
        seen.append(limits(lifted.capture))
    prover.extra_guards.append(SizeGuard("*".join((*prover.arguments.dims, str(slots))), "le", str(lowest), True))


def carry_over(prover: Prover) -> None:
    """What a call leaves in the block's attributes must not change what the next call computes."""
    first = prover.lifted[0].capture
    buffers = dict(prover.block.named_buffers())  # these are read when the call comes
    left = {str(e.target): e.node for e in first.effects if e.kind == "attribute" and e.target not in buffers}
    if not left:
        return
    with contextlib.ExitStack() as stack:
        for path, node in left.items():
            owner, _, key = path.rpartition(".")
            state = vars(prover.block.get_submodule(owner))
            stack.callback(state.update, {key: state[key]}) if key in state else stack.callback(state.pop, key)
            val = node.meta["val"]
            state[key] = _random(val) if isinstance(val, FakeTensor) else val.clone()
        again = prover.lift(Routing("diverse", 0), prover.sizes[0])
    same_form(prover.lifted[0], again)
    names = [[str(n.target) for n in c.nodes if n.op == "call_function"] for c in (first, again.capture)]
    if names[0] != names[1] and any(n.op == "get_attr" and n.meta["fqn"] in left for n in again.capture.nodes):
        raise Refused(
            "what a call leaves in an attribute changes the next call",
            culprits=tuple(left),
            source=str(next(iter(left.values())).meta["source"]),
        )


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
    below = max(math.prod(sizes.values()) for sizes in prover.sizes)
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

    for tokens in _LEAK_SIZES:
        if tokens <= below:
            continue
        try:
            other_lines, other_numbers = differs(tokens)
        except CaptureError:
            return  # its lines are those of the smaller sizes
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


def _force(prover: Prover, source: Source, flips: Flips, what: str) -> None:
    """Have the program go the other way; from here on that is one of the captures that must agree."""
    try:
        forced = prover.lift(Routing("diverse", 0), prover.sizes[0], flips)
        same_form(prover.lifted[0], forced)
    except Refused as why:
        raise _changes(source, what) from why
    except Exception:
        return  # the other way ends in an error (a check for NaN), as it would in the original
    prover.add(forced, prover.sizes[0])


def _changes(source: Source, what: str) -> Refused:
    return Refused(
        f"{what} changes what is computed: {source.text}",
        source=str(source),
        remedy="moefx needs one formula for all tokens",
    )


def _first(differs: Callable[[int], bool], low: int, high: int) -> int:
    """The least size that differs, between one that does not and one that does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return high


def _random(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # not the user's
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _lines(taken: Capture) -> set[tuple[str, str]]:
    """Which lines of the user's ran, which ops they came to, and what the call changed."""
    ran = {(str(n.meta["source"]), str(n.target)) for n in taken.nodes if n.op == "call_function"}
    return ran | {(effect.kind, str(effect.target)) for effect in taken.effects}


def _all_numbers(taken: Capture) -> dict[Any, int | float | None]:
    """Those that ops are called with, and those that are returned."""
    returned = enumerate(pytree.tree_leaves(taken.out))
    return {**numbers(taken.nodes), **{i: plain(v) for i, v in returned if isinstance(v, (int, float))}}
