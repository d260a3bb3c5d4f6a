"""The registry of rules, and the interface that rules use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

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


def as_term(builder: TermBuilder, a: Any) -> Term:
    """Convert a number to a constant; a term stays as it is."""
    return a if isinstance(a, Term) else builder.terms.const(a)
