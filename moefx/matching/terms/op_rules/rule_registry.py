"""Where the rules stand, and what a rule is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..normal_form import Terms
from ..term import Term


class TermBuilder(Protocol):
    """What reads a captured graph as terms."""

    T: Terms

    def value(self, a: Any) -> Any:
        """An argument of a node, with terms for nodes."""

    def numbers(self, node: Any) -> torch.Tensor:
        """A concrete integer argument."""
        ...


Rule = Callable[..., "Term | None"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what the ops of these names mean: a function of the reader, the node and its arguments as terms. Where
    it returns None the node is taken as it is."""

    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def as_term(S: TermBuilder, a: Any) -> Term:
    return a if isinstance(a, Term) else S.T.const(a)
