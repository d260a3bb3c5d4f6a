"""Emit ops into the graph under construction, with their values on abstract tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.node import map_arg

from ...matching.lift.canonical_form import NodeRef, count_sequences
from ...matching.results.match_result import Match
from .residual_graph import ResidualGraph

aten = torch.ops.aten


def _copy_letters(operands: Any, val: Any) -> Any:
    """Return the letters of the first operand with the same shape, or None."""
    shape = getattr(val, "shape", ())
    metas = [n.meta for n in pytree.tree_leaves(operands) if isinstance(n, fx.Node)]
    letters = [m["letters"] for m in metas if isinstance(m.get("letters"), tuple) and m["val"].shape == shape]
    return letters[0] if letters else None


class OpEmitter:
    """Emits ops into a `ResidualGraph`."""

    def __init__(self, residual: ResidualGraph):
        self.residual = residual

    def call(
        self,
        target: Any,
        args: tuple,
        kwargs: dict[str, Any] | None = None,
        *,
        letters: Any = None,
        meta: dict | None = None,
        fake: torch.dtype | None = None,
        shape: tuple = (),
    ) -> fx.Node:
        """Emit a call.

        Args:
            letters: the shape in named letters; by default those of an operand with the same shape.
            fake, shape: dtype and shape of the result, if `target` cannot run on abstract tensors.
        """
        kwargs = kwargs or {}
        meta = dict(meta or {})
        if "val" not in meta:
            if fake is not None:
                with self.residual.fake_mode:
                    meta["val"] = torch.empty(shape, dtype=fake)
            else:
                meta["val"] = self._evaluate(target, args, kwargs)
        letters = letters or _copy_letters((args, kwargs), meta["val"])
        if letters is not None:
            meta["letters"] = letters
        return self.residual.call(target, args, kwargs, meta)

    def reshape(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        val = node.meta["val"]
        if val.dim() == len(shape) and all(a in (-1, b) for a, b in zip(shape, val.shape, strict=True)):
            return node
        letters = ("S", *map(self.residual.get_letter, [[n] for n in shape[1:]])) if shape[0] == -1 else None
        return self.call(aten.reshape.default, (node, list(shape)), letters=letters)

    def expand_to_tokens(self, ref: NodeRef, match: Match) -> tuple[fx.Node, tuple[str, ...]]:
        """Return a residual value and its axes. A value per sequence is repeated for the tokens of the sequence."""
        node, axes = self.residual.get_node(ref.node), ref.axes
        if "s" not in axes:
            return node, axes
        lengths = [math.prod(form.tokens) // count_sequences(form.capture, form.tokens) for form in match.forms]
        inner_shape = tuple(node.meta["val"].shape[1:])
        length = self.residual.sizes.emit_integer(lengths, str(ref.node.meta["source"]))
        node = self.call(aten.unsqueeze.default, (node, 1))
        node = self.call(aten.expand.default, (node, [-1, length, *(-1 for _ in inner_shape)]))
        return self.reshape(node, (-1, *inner_shape)), ("t", *axes[1:])

    def _evaluate(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"] if "val" in n.meta else self._evaluate_size(n))
        with self.residual.fake_mode, torch.no_grad():
            return target(*args, **kwargs)

    def _evaluate_size(self, n: fx.Node) -> Any:
        """Return the value of a size node in the first capture."""
        if n.target is aten.sym_size.int:
            return n.args[0].meta["val"].shape[n.args[1]]  # type: ignore[union-attr, index]
        if n.target is getattr:
            return torch.device("cpu")
        args = [self._evaluate_size(a) if isinstance(a, fx.Node) else a for a in n.args]
        return n.target(*args)  # type: ignore[operator]
