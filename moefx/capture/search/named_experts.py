"""Find modules that hold each expert under its own attribute, not in a list.

Products with different parameters each take some tokens, by masks or indices, and one op merges their rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Set

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..tracing.op_sets import CONTRACTIONS

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


def find_named_experts(nodes: list[fx.Node], made_by: Mapping[fx.Node, str], known_names: Set[str]) -> list[str]:
    """Find modules in which one op merges the rows of parallel products with different parameters.

    Args:
        nodes: nodes of one capture.
        made_by: paths of modules that did not run again, by the nodes that they return.
        known_names: paths of modules to leave out.
    """
    products = _Products(made_by)
    names: list[str] = []
    pairs = Counter[str]()
    for n in nodes:
        for a, b in products.find_merged(n):
            name = _find_common_module(products.owners[a], products.owners[b])
            if name in known_names or name in names or pairs[name] == _MAX_PAIRS:
                continue
            pairs[name] += 1
            if _are_parallel(a, b):
                names.append(name)
    return names


class _Products:
    """The products that values come from.

    Attributes:
        owners: for each product, the FQN of its first parameter, or the path of a module that did not run again.
    """

    def __init__(self, made_by: Mapping[fx.Node, str]):
        self.owners = dict(made_by)

    def find_merged(self, n: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Return pairs of products with different owners whose rows an op merges."""
        base, source = _split_merge(n)
        if base is None or source is None:
            return []
        pairs = [(a, b) for b in self._find_nearest(source) for a in self._find_nearest(base)]
        return [(a, b) for a, b in pairs if self.owners[a] != self.owners[b]]

    def _find_nearest(self, node: fx.Node) -> list[fx.Node]:
        """Return the last products before a node; before a merge, those of the rows that it writes."""
        products, stack, seen = [], [node], set[fx.Node]()
        while stack and len(seen) < _MAX_NODES_BACK:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if n in self.owners or n.target in CONTRACTIONS:
                if owner := self.owners.get(n) or _find_weight(n):
                    self.owners[n] = owner
                    products.append(n)
                continue
            _, source = _split_merge(n)
            stack += n.all_input_nodes if source is None else [source]
        return products


def _split_merge(n: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    packet = getattr(n.target, "overloadpacket", None)
    positions = _MERGES.get(packet.__name__.rstrip("_")) if packet is not None else None
    if positions is None or len(n.args) <= positions[1]:
        return None, None
    base, source = (n.args[i] for i in positions)
    return (base, source) if isinstance(base, fx.Node) and isinstance(source, fx.Node) else (None, None)


def _find_weight(product: fx.Node) -> str:
    """Return the FQN of the first parameter among the operands of a product, moved or cast; "" if there is none."""
    for n in product.all_input_nodes:
        while n.op == "call_function" and len(n.all_input_nodes) == 1:
            n = n.all_input_nodes[0]
        if n.op == "get_attr" and n.meta.get("kind") == "param":
            return str(n.meta["fqn"])
    return ""


def _find_common_module(a: str, b: str) -> str:
    pairs = zip(a.split("."), b.split("."), strict=False)
    return ".".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _are_parallel(a: fx.Node, b: fx.Node) -> bool:
    """Return whether neither value is computed from the other, and both from a common one."""
    before_a, before_b = _list_float_ancestors(a), _list_float_ancestors(b)
    return a not in before_b and b not in before_a and bool(before_a & before_b)


def _list_float_ancestors(node: fx.Node) -> set[fx.Node]:
    """Return a value and the abstract values that it is computed from."""
    ancestors, stack = set[fx.Node](), [node]
    while stack:
        n = stack.pop()
        val = n.meta.get("val")
        if n not in ancestors and n.op != "get_attr" and (val is None or isinstance(val, FakeTensor)):
            ancestors.add(n)
            stack += [*n.all_input_nodes, *n.meta.get("again", ())]
    return ancestors
