"""Given integers for which what the program asks about them comes out otherwise than for the example's.

Padding, special tokens, the end of a range: the program names the numbers, or others that these follow from. They take
part in all captures, among the example's own, as far as the program runs on them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.node import map_arg

from ...capture.captured import Capture
from ...capture.inputs import Arguments
from ...capture.routing import Routing
from .given import Seen, is_given, is_one, operands, seen
from .nodes import op_name
from .ranges import NARROW

if TYPE_CHECKING:
    from .prove import Prover

_INDEXED = {
    "embedding", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select", "scatter",
    "scatter_add",
}  # fmt: skip
Turn = tuple[int, int]  # of the tensor arguments which, and a number for it
_LARGE = 1 << 30
_MOST_OF_A_TENSOR = 6
_MOST = 100


def with_turns(prover: Prover, sizes: dict[str, int]) -> tuple[Arguments, Capture | None]:
    """The arguments of a prover, with such numbers where there are any; and the first capture, if it was made."""
    arguments, tried = prover.arguments, set[Turn]()
    if not any(leaf.takes_turns for leaf in arguments.tensors):
        return arguments, None
    while (taken := _capture(prover, arguments, sizes)) is not None:
        doubtful = [one for one in seen(taken).values() if one.is_doubtful or _is_one_truth(one)]
        found = {turn for one in doubtful if (turn := _turning(taken, one, arguments)) is not None} - tried
        if not found:
            break
        tried |= found
        if _capture(prover, every := arguments.turned(found), sizes) is not None:
            arguments = every
            continue
        for turn in sorted(found):
            if _capture(prover, alone := arguments.turned({turn}), sizes) is not None:
                arguments = alone
    return arguments, taken


def _capture(prover: Prover, arguments: Arguments, sizes: dict[str, int]) -> Capture | None:
    """A capture with these arguments; None where the program does not run on them."""
    before, prover.arguments = prover.arguments, arguments
    try:
        taken = prover.capture(Routing("diverse", 0), sizes)
        return taken if all(map(_is_within, taken.nodes)) else None
    except Exception:  # the program's own
        return None
    finally:
        prover.arguments = before


def _is_within(n: fx.Node) -> bool:
    """Whether the indices of an op are: abstract tensors do not look."""
    name, base = op_name(n), n.args[0] if n.args else None
    if name not in _INDEXED or not isinstance(base, fx.Node):
        return True
    if name in ("embedding", "index", "index_put"):
        dims = list(enumerate(n.args[1] if name != "embedding" else [n.args[1]]))  # type: ignore[arg-type]
    else:
        dims = [(n.args[1], n.args[2])]
    for dim, i in dims:
        size = base.meta["val"].shape[dim] if base.meta["val"].dim() else 1
        low = -size if name.startswith("index") else 0
        if isinstance(i, fx.Node) and (seen := i.meta["val"]).numel() and not low <= seen.min() <= seen.max() < size:
            return False
    return True


def _is_one_truth(one: Seen) -> bool:
    """Also of a single integer, a step say, which is one in each capture."""
    return one.node.meta["val"].dtype is torch.bool and len(one.values) == 1


def _turning(taken: Capture, one: Seen, arguments: Arguments) -> Turn | None:
    """A number that turns what came out one way, if it stands here and there in one argument."""
    way = _way(one.node)
    for leaf in (n for n in way if n.op == "placeholder" and arguments.tensors[n.meta["position"]].takes_turns):
        given, position = leaf.meta["val"], leaf.meta["position"]
        here = (torch.arange(given.numel()) % 3 == 0).view(given.shape)
        for number in filter(arguments.tensors[position].takes, itertools.islice(_numbers(taken, one, way), _MOST)):
            with contextlib.suppress(Exception):  # no such entry in a table
                if _turns(taken, one, way, {leaf: torch.where(here, number, given)}):
                    return position, number
    return None


def _way(node: fx.Node) -> list[fx.Node]:
    """From the arguments to a node, what is computed from them on the way."""
    found, stack = {node}, [node]
    while stack:
        for a in stack.pop().all_input_nodes:
            if a not in found and is_given(a):
                found.add(a)
                stack.append(a)
    return sorted(found, key=lambda n: n.meta["index"])


def _turns(taken: Capture, one: Seen, way: list[fx.Node], values: dict[fx.Node, torch.Tensor]) -> bool:
    """Whether a node comes out otherwise where the arguments have these values."""

    def value(n: fx.Node) -> Any:
        return values[n] if n in values else n.meta["shadow"] if "shadow" in n.meta else taken.shadow(n)

    for n in way:
        if n.op == "call_function":
            args, kwargs = map_arg((n.args, {k: v for k, v in n.kwargs.items() if k != "device"}), value)
            values[n] = n.target(*args, **kwargs)  # type: ignore[operator]
    out = values[one.node]
    if one.is_same:
        return not any(is_one(value(a), out) for a in operands(one.node))
    return set(out.unique().tolist()) != one.values


def _numbers(taken: Capture, one: Seen, way: list[fx.Node]) -> Iterator[int]:
    """Those that the program names, what is next to them, their sums, products and differences; of a table the places
    at which it has something else."""
    named = {v: None for n in way for v in pytree.tree_leaves((n.args, n.kwargs)) if type(v) in (int, float)}
    for a in {a: None for n in way for a in operands(n) if not is_given(a)}:
        known = taken.shadow(a).flatten()
        named |= dict.fromkeys(known.unique()[:_MOST_OF_A_TENSOR].tolist())
        others = (known != next(iter(one.values))).nonzero().flatten()
        named |= dict.fromkeys(others[:_MOST_OF_A_TENSOR].tolist())
    narrow = {n.meta["val"].dtype for n in way if n.meta.get("val") is not None} & NARROW
    named |= dict.fromkeys(torch.iinfo(dtype).max + 1 for dtype in narrow)
    own = [int(v) for v in [*named, 0] if abs(v) < _LARGE]
    near = [v + d for d in (0, 1, -1) for v in own]
    pairs = [n for a, b in itertools.product(own, repeat=2) for n in (a * b, a + b, a - b, b - a)]
    yield from dict.fromkeys([*near, *pairs, *(n + d for d in (1, -1) for n in pairs)])
