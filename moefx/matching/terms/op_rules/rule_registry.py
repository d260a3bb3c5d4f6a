"""The registry of rules, and the interface that rules use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import fx

from ..normal_form import Terms
from ..term import Term


class TermBuilder(Protocol):
    """Translates nodes of a captured graph to terms (`Semantics`)."""

    terms: Terms

    def value(self, a: Any) -> Any:
        """Convert an argument of a node: nodes become terms."""

    def numbers(self, node: Any) -> torch.Tensor:
        """Return an integer argument under the routing of the capture."""
        ...


Rule = Callable[..., "Term | None"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the ops of these names.

    A rule is a function of the builder, the node and its arguments, with terms for nodes. It returns the node's term,
    or None if the node is opaque.
    """

    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def cast_to_result(builder: TermBuilder, node: fx.Node, *operands: Term | None) -> list[Term | None]:
    """Cast operands to the dtype of the result, as an op does first because of its `dtype` or of autocast.

    Args:
        operands: the terms of the node's tensor arguments, in their order; None for an optional one.
    """
    new = node.meta["val"].dtype
    arguments = [a for a in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(a, fx.Node)]
    dtypes = itertools.chain((a.meta["val"].dtype for a in arguments), itertools.repeat(new))
    return [
        builder.terms.pointwise("cast", term, dtype=str(new).removeprefix("torch."))
        if term is not None and old != new and (old.is_floating_point or new.is_floating_point)
        else term
        for term, old in zip(operands, dtypes, strict=False)
    ]


def as_term(builder: TermBuilder, a: Any) -> Term:
    """Convert a number to a constant; a term stays as it is."""
    return a if isinstance(a, Term) else builder.terms.const(a)
