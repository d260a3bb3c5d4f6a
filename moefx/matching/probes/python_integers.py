"""Refuse programs that read integers which no op computes from the routing, but which differ between captures.

Protects from a count that Python keeps::

    busy = torch.zeros((), dtype=torch.long)
    for e in range(num_experts):
        rows = (ids == e).nonzero()[:, 0]
        if len(rows):
            busy += 1
            ...
    return out * 0.5 if busy.item() == 3 else out

Python branches on a number that no op computes from the routing, and captures need not show all its values. The same
holds for the length of a sequence that is read from a tensor, as in `torch.arange(n)[-1].item()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import Refused

if TYPE_CHECKING:
    from ...capture.environment.code_locations import Source
    from ..proof.proof_view import ProofView


def refuse_python_integers(proof: ProofView) -> None:
    """Compare the values that Python reads at one call site, in all captures with equally many reads there.

    Raises:
        Refused: the values differ.
    """
    seen: dict[tuple[tuple[Source, ...], int], Any] = {}
    for form in proof.evidence.forms:
        for calls, values in form.capture.plain_reads.items():
            if seen.setdefault((calls, len(values)), values) != values:
                source = calls[0] if calls else None
                raise Refused(
                    "Python reads a number that no op computes from the routing, and its value differs between "
                    f"captures: {source.text if source else ''}",
                    source=str(source or ""),
                    remedy="compute it in Python from the shape of an argument, or decide with torch operations on the "
                    "routing",
                )
