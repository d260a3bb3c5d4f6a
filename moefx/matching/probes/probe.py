"""`Probe`: guards against one way in which captures agree although the form does not hold in general."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView


@dataclasses.dataclass(frozen=True)
class Probe:
    """One probe of the list.

    Attributes:
        run: finds the targets in the evidence, intervenes in a capture of each, and judges the result: one more
            capture that must agree, a guard, or `Refused`. `ProofView` lists the steps that it may take.
        protects_from: the property of a program that a rewrite would miss without it, or a refusal that it prevents.
        again: why it runs again, or "".
    """

    run: Callable[[ProofView], None]
    protects_from: str
    again: str = ""

    @property
    def name(self) -> str:
        return self.run.__name__

    def repeat(self, why: str) -> Probe:
        """Return the same probe, for a later place in the list."""
        return dataclasses.replace(self, again=why)


__all__ = ["Probe"]
