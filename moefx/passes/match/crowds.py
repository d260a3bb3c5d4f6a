"""Capacities, numbers and lines that only more tokens show than a capture has.

Each function takes a prover with its captures and goes on to where the program may change. What holds there too is
one more capture that must agree; else the form is guarded to hold below it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.captured import MIXED, SHAPE_ONLY
from ...capture.routing import Routing
from ...capture.sizes import SizeGuard
from ...capture.source import Source
from ...errors import Refused
from .doubts import force
from .form import Lifted
from .limits import UNKNOWN, limits, not_reached
from .nodes import is_known, is_routed, op_name, values
from .ranges import Ranges, token_sizes

if TYPE_CHECKING:
    from .prove import Prover

MOST_TOKENS = 600  # of a capture that overflows a capacity, or at which a number changed
_LOOKUPS = {"index", "index_select", "gather", "embedding", "bucketize", "searchsorted"}
_CUTS = {"clamp", "clamp_max", "minimum", "remainder", "fmod", "bitwise_and", "__and__"}
_MOVES = {"_to_copy", "_unsafe_view", "clone", "contiguous", "detach", "flatten", "reshape", "view"}
_COPIES = {"_to_copy", "clone", "where", "zeros_like", "ones_like", "full_like"}


def overflow(prover: Prover) -> None:
    """Limits that the captures did not come to are gone beyond, with as many tokens as that takes; else the form is
    guarded to hold only where there are too few to."""
    slots, seen = prover.lifted[0].slots, [limits(lifted.capture, prover.lengths) for lifted in prover.lifted]
    for turn in range(4):
        places = not_reached(seen)
        most = [_most_of_one(lifted) for lifted in prover.lifted]
        left: set[int] = set()
        for place, found in places.items():
            # of a capacity that grows with the tokens and has room for all of them there is nothing behind
            pairs = [(s.get(place), n) for s, n in zip(seen, most, strict=True)]
            if len(found) == 1:
                left |= found
            elif short := {limit for limit, n in pairs if limit and limit < n}:
                left |= short | found & {UNKNOWN}
        if not left:
            return
        lowest = min(left)
        if lowest == UNKNOWN:
            place = next(place for place, found in places.items() if UNKNOWN in found)
            raise Refused(
                "a number made of counts or positions is compared with another, and came out the same in all that was "
                "tried: it is no count itself, so at how many tokens that changes cannot be told",
                source=str(place[0]), culprits=(place[1],),
            )  # fmt: skip
        tokens = prover.arguments.tokens_near(int(lowest / 0.85) + 10)
        sizes = prover.arguments.sequence(tokens)
        if tokens > MOST_TOKENS or not prover.is_within(sizes):
            break
        try:  # some limits are those of all choices, some of the first ones
            lifted = prover.lift(Routing("contested" if slots > 1 and turn % 2 == 0 else "flooded", 3 + turn), sizes)
            prover.agree(lifted)
        except Exception:  # the program's own too, at sizes that it is not made for
            break
        prover.add(lifted, sizes)
        seen.append(limits(lifted.capture, prover.lengths))
    prover.extra_guards.append(SizeGuard(f"{prover.arguments.tokens}*{slots}", "le", str(lowest), True))


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
        sizes = token_sizes(lifted.capture)
        for n in filter(is_known, lifted.capture.nodes):
            if not _levels_off(n) and not _asks_positions(n, sizes):
                continue
            key = (n.meta["source"], str(n.target))
            seen = made.setdefault(key, set())
            if len(seen) > 1:
                continue
            seen |= values(lifted.capture, n)
            of.setdefault(key, set()).update(*[values(lifted.capture, a) for a in n.all_input_nodes])
            if len(seen) == 1 and (is_routed(n) or n.meta["val"].dtype is torch.bool):
                ranges = ranges or Ranges.with_more_tokens(lifted.capture)
                if ranges.decided(n):
                    seen |= {0, 1}
    same = {key: seen for key, seen in made.items() if len(seen) == 1 and len(of[key]) > 1}
    return {key: f"a number that is {next(iter(seen)):g} for few tokens" for key, seen in same.items()}


def _never_cut(prover: Prover) -> dict[tuple[Source, str], str]:
    """Fixed limits that nothing came to: `positions % 700`, `counts.clamp(max=300)`."""
    limits_at: dict[tuple[Source, str], set[str]] = {}
    for lifted in prover.lifted:
        for n in lifted.capture.nodes:
            if op_name(n) not in _CUTS or not is_known(n) or n.meta["val"].dtype is torch.bool:
                continue
            if isinstance(before := n.args[0], fx.Node):
                uncut = is_known(before) and torch.equal(lifted.capture.shadow(n), lifted.capture.shadow(before))
                limit = str((n.args[1:], n.kwargs)) if uncut else "reached"
                limits_at.setdefault((n.meta["source"], str(n.target)), set()).add(limit)
    # not those that grow with the sizes
    fixed = [key for key, found in limits_at.items() if len(found) == 1 and "reached" not in found]
    return dict.fromkeys(fixed, "a number that is cut off for many tokens")


def _asks_positions(n: fx.Node, sizes: set[int]) -> bool:
    """Whether an op asks something of positions among all tokens and is no plain limit: `700 - p < 0`."""
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype != torch.bool or is_routed(n) or n.target in SHAPE_ONLY:
        return False
    of = [(a, v) for a in n.all_input_nodes if isinstance(v := a.meta.get("val"), torch.Tensor)]
    asked = [(a, v) for a, v in of if not sizes.isdisjoint(v.shape)]
    return bool(asked) and all(v.dtype != torch.bool and a.all_input_nodes for a, v in asked)


def _levels_off(n: fx.Node) -> bool:
    """Whether an op makes one number of each: not all that do have the tag of a pointwise op."""
    val: Any = n.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype == torch.bool or not val.numel() or op_name(n) in _COPIES:
        return False
    return op_name(n) in _LOOKUPS or any(
        isinstance(v := a.meta.get("val"), torch.Tensor) and v.shape == val.shape for a in n.all_input_nodes
    )
