"""Refuse programs that decide in Python by which experts have no tokens, beyond skipping these experts.

Protects from a number of idle experts that Python counts::

    idle = 0
    for e in range(num_experts):
        rows = (ids == e).nonzero()[:, 0]
        if len(rows) == 0:
            idle += 1
            continue
        ...
    return out * 0.5 if idle == 5 else out

`capture.emptiness.idle_tests` reads the code of the block after all captures have logged their tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...capture.emptiness.idle_tests import check_emptiness_tests

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView


def refuse_emptiness_decisions(proof: ProofView) -> None:
    """Follow the outcomes of the emptiness tests of all captures through the user's functions.

    Raises:
        Refused: the program decides more by them than to skip an expert.
    """
    check_emptiness_tests(proof.evidence.emptiness_tests)
