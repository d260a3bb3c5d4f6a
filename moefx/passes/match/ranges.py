"""What integers can be under any routing, not only under those that were tried.

An expert index that `topk` took from E scores lies in [0, E), so a check for a sentinel index is decided, whatever
the routing: such a branch needs no second look. Ranges are kept per element, `lo <= value <= hi`; a tensor whose shape
depends on the routing has one range for all its elements.
"""

# fx types an argument as anything that a program can hold: the code knows better.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportReturnType=false, reportOperatorIssue=false, reportUnhashable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from .semantics import SELECTIONS

aten = torch.ops.aten
Range = tuple[np.ndarray, np.ndarray]

_MOVES = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "select",
    "slice", "clone", "alias", "detach", "_to_copy", "cat", "stack", "index_select", "flip", "repeat",
}  # fmt: skip
_MONOTONE = {
    "add",
    "sum",
    "mul",
    "clamp",
    "maximum",
    "minimum",
    "bitwise_or",
    "bitwise_and",
    "logical_and",
    "logical_or",
    "any",
    "cumsum",
    "amax",
    "max",
}
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "greater")


class Ranges:
    def __init__(self, nodes: list[fx.Node]):
        self._known: dict[fx.Node, Range | None] = {}
        for node in nodes:
            self._known[node] = self._range(node)

    def of(self, node: fx.Node) -> Range | None:
        return self._known.get(node)

    def decided(self, node: fx.Node) -> bool:
        """Whether a boolean is the same under every routing."""
        found = self.of(node)
        return found is not None and bool((found[0] == found[1]).all())

    def _range(self, node: fx.Node) -> Range | None:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.dtype.is_floating_point or val.dtype.is_complex:
            return None
        if node.op != "call_function":
            return None
        if not node.all_input_nodes:
            exact = val.numpy().astype(np.int64)
            return exact, exact
        name = _name(node)
        if name == "getitem":
            bundle, i = node.args
            source = bundle.args[0].meta.get("val") if isinstance(bundle, fx.Node) and bundle.args else None
            if i == 1 and _name(bundle) in SELECTIONS and source is not None and source.dim():
                dim, _ = SELECTIONS[_name(bundle)](bundle)
                return _uniform(0, source.shape[dim] - 1, val)
            return None
        if name in ("argmax", "argmin", "argsort"):
            source = node.args[0].meta["val"]
            dim = node.kwargs.get(
                "dim", next((a for a in node.args[1:] if type(a) is int), -1 if name == "argsort" else None)
            )
            return _uniform(0, (source.numel() if dim is None else source.shape[dim]) - 1, val)
        if name == "nonzero":
            return self._nonzero(node, val)
        if name in ("bincount", "histc"):
            return _uniform(0, node.args[0].meta["val"].numel(), val)
        if name == "scatter" and len(node.args) == 4:
            return self._scatter(node, val)
        inputs = [self._known.get(a) for a in node.all_input_nodes]
        if any(r is None for r in inputs):
            return _uniform(0, 1, val) if val.dtype == torch.bool else None
        return self._apply(node, name, val)

    def _apply(self, node: fx.Node, name: str, val: torch.Tensor) -> Range | None:
        def bound(side: int) -> Any:
            def value(n: fx.Node) -> torch.Tensor:
                array = self._known[n][side]
                return torch.from_numpy(np.array(np.broadcast_to(array, tuple(n.meta["val"].shape))))

            return fx.node.map_arg(
                (node.args, {k: v for k, v in node.kwargs.items() if k != "device"}), value
            )

        try:
            if name in _MOVES or (name in _MONOTONE and not _negative(node)):
                args, kwargs = bound(0)
                lo = node.target(*args, **kwargs)
                args, kwargs = bound(1)
                hi = node.target(*args, **kwargs)
                lo, hi = (x[0] if isinstance(x, tuple) else x for x in (lo, hi))
                return lo.numpy().astype(np.int64), hi.numpy().astype(np.int64)
            if name in _COMPARE:
                a, b = (self._pair(x) for x in node.args[:2])
                return _compare(name, a, b)
            if name == "index":
                return _uniform(
                    int(self._known[node.args[0]][0].min(initial=0)),
                    int(self._known[node.args[0]][1].max(initial=0)),
                    val,
                )
            if name in ("logical_not", "bitwise_not") and val.dtype == torch.bool:
                lo, hi = self._known[node.args[0]]
                return 1 - hi, 1 - lo
        except (RuntimeError, TypeError, ValueError):
            pass
        return _uniform(0, 1, val) if val.dtype == torch.bool else None

    def _pair(self, x: Any) -> Range:
        if isinstance(x, fx.Node):
            lo, hi = self._known[x]
            return lo, hi
        return np.asarray(x), np.asarray(x)

    def _nonzero(self, node: fx.Node, val: torch.Tensor) -> Range | None:
        """Coordinates of what may be true."""
        mask = node.args[0]
        found = self._known.get(mask)
        shape = mask.meta["val"].shape
        hi = [n - 1 for n in shape]
        if found is not None and found[1].shape == tuple(shape):
            possible = np.nonzero(found[1])
            hi = [int(p.max(initial=0)) for p in possible]
        return np.zeros((1, len(hi)), np.int64), np.asarray([hi], np.int64).reshape(1, -1)

    def _scatter(self, node: fx.Node, val: torch.Tensor) -> Range | None:
        """`one_hot`: a constant written at indices that have a range."""
        base, dim, index, value = node.args
        found, under = self._known.get(index), self._known.get(base)
        if found is None or under is None or not isinstance(value, (int, bool)):
            return None
        lo, hi = (np.broadcast_to(x, tuple(val.shape)).copy() for x in under)
        positions = np.arange(val.shape[dim]).reshape(
            [-1 if d == dim % val.dim() else 1 for d in range(val.dim())]
        )
        inside = (positions >= found[0].min(initial=0)) & (positions <= found[1].max(initial=0))
        inside = np.broadcast_to(inside, lo.shape)
        return np.where(inside, np.minimum(lo, value), lo), np.where(inside, np.maximum(hi, value), hi)


def _name(node: Any) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


def _uniform(lo: int, hi: int, val: torch.Tensor) -> Range:
    return np.full(tuple(val.shape), lo, np.int64), np.full(tuple(val.shape), hi, np.int64)


def _negative(node: fx.Node) -> bool:
    return any(isinstance(a, (int, float)) and a < 0 for a in node.args) or bool(
        node.kwargs.get("alpha", 1) != 1
    )


def _compare(name: str, a: Range, b: Range) -> Range:
    (alo, ahi), (blo, bhi) = a, b
    if name in ("eq", "ne"):
        may, must = (alo <= bhi) & (blo <= ahi), (alo == ahi) & (blo == bhi) & (alo == blo)
        return (must, may) if name == "eq" else (~may, ~must)
    if name in ("gt", "greater", "ge"):
        fn = operator.gt if name != "ge" else operator.ge
        return fn(alo, bhi), fn(ahi, blo)
    fn = operator.lt if name == "lt" else operator.le
    return fn(ahi, blo), fn(alo, bhi)
