"""Find modules that hold experts under names of their own.

Products with different parameters each take some tokens, by masks or indices, and one op merges their rows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Set

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .op_sets import CONTRACTIONS

# Ops that merge rows of two tensors, and the positions of these.
_MERGES = {
    "index_add": (0, 3),
    "index_copy": (0, 3),
    "index_put": (0, 2),
    "masked_scatter": (0, 2),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "where": (1, 2),
}
_MAX_NODES_BACK = 64
_MAX_PAIRS = 8


def modules_apart(nodes: list[fx.Node], made_by: Mapping[fx.Node, str], known: Set[str]) -> list[str]:
    """Find modules in which products with different parameters work side by side on rows of common tokens, and one op
    merges their results.

    Args:
        nodes: of one capture.
        made_by: names of modules that were not run again, by the nodes that they return.
        known: names of modules that are not looked for.
    """
    products = _Products(made_by)
    found: list[str] = []
    pairs = Counter[str]()
    for n in nodes:
        for a, b in products.merged(n):
            name = _common_module(products.owners[a], products.owners[b])
            if name in known or name in found or pairs[name] == _MAX_PAIRS:
                continue
            pairs[name] += 1
            if _are_side_by_side(a, b):
                found.append(name)
    return found


class _Products:
    """The products that values come from.

    Attributes:
        owners: the FQN of the first parameter of each product that was met, or of the module that was not run again.
    """

    def __init__(self, made_by: Mapping[fx.Node, str]):
        self.owners = dict(made_by)

    def merged(self, n: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs of products with different owners whose rows an op merges."""
        base, source = _merged_by(n)
        if base is None or source is None:
            return []
        pairs = [(a, b) for b in self._nearest(source) for a in self._nearest(base)]
        return [(a, b) for a, b in pairs if self.owners[a] != self.owners[b]]

    def _nearest(self, node: fx.Node) -> list[fx.Node]:
        """The last products before a node; before a merge those of the rows that it wrote."""
        found, stack, seen = [], [node], set[fx.Node]()
        while stack and len(seen) < _MAX_NODES_BACK:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if n in self.owners or n.target in CONTRACTIONS:
                if owner := self.owners.get(n) or _weight_of(n):
                    self.owners[n] = owner
                    found.append(n)
                continue
            _, source = _merged_by(n)
            stack += n.all_input_nodes if source is None else [source]
        return found


def _merged_by(n: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    packet = getattr(n.target, "overloadpacket", None)
    positions = _MERGES.get(packet.__name__.rstrip("_")) if packet is not None else None
    if positions is None or len(n.args) <= positions[1]:
        return None, None
    base, source = (n.args[i] for i in positions)
    return (base, source) if isinstance(base, fx.Node) and isinstance(source, fx.Node) else (None, None)


def _weight_of(product: fx.Node) -> str:
    """The FQN of the first parameter among the operands of a product, moved or cast; "" if there is none."""
    for n in product.all_input_nodes:
        while n.op == "call_function" and len(n.all_input_nodes) == 1:
            n = n.all_input_nodes[0]
        if n.op == "get_attr" and n.meta.get("kind") == "param":
            return str(n.meta["fqn"])
    return ""


def _common_module(a: str, b: str) -> str:
    pairs = zip(a.split("."), b.split("."), strict=False)
    return ".".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _are_side_by_side(a: fx.Node, b: fx.Node) -> bool:
    """Whether neither value is computed from the other, and both are from a common one."""
    before_a, before_b = _float_ancestors(a), _float_ancestors(b)
    return a not in before_b and b not in before_a and bool(before_a & before_b)


def _float_ancestors(node: fx.Node) -> set[fx.Node]:
    """Abstract values of the call that a value is computed from, with itself."""
    found, stack = set[fx.Node](), [node]
    while stack:
        n = stack.pop()
        val = n.meta.get("val")
        if n not in found and n.op != "get_attr" and (val is None or isinstance(val, FakeTensor)):
            found.add(n)
            stack += [*n.all_input_nodes, *n.meta.get("again", ())]
    return found
