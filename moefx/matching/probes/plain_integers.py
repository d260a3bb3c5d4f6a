"""Integers of tensors that no routing computes, and that differ between captures.

    busy = torch.zeros((), dtype=torch.long)
    for e in range(num_experts):
        rows = (ids == e).nonzero()[:, 0]
        if len(rows):
            busy += 1
            ...
    return out * 0.5 if busy.item() == 3 else out

Python decides by a number that no op computes from the routing, and captures need not show each of its values. The same
holds for the length of a sequence that is read off a tensor, as in `torch.arange(n)[-1].item()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import Refused

if TYPE_CHECKING:
    from ...capture.code_locations import Source
    from ..proof_state import ProofState


def refuse_plain_integers(state: ProofState) -> None:
    """Compare what Python reads at one place in all captures that read as often there.

    Raises:
        Refused: the values differ.
    """
    seen: dict[tuple[tuple[Source, ...], int], Any] = {}
    for lifted in state.forms:
        for calls, values in lifted.capture.tracer.plain_reads.items():
            if seen.setdefault((calls, len(values)), values) != values:
                source = calls[0] if calls else None
                raise Refused(
                    "Python reads a number off a tensor that is not computed from the routing, and the number differs "
                    f"between calls: {source.text if source else ''}",
                    source=str(source or ""),
                    remedy="compute it in Python from the shape of an argument, or decide with torch operations on the "
                    "routing",
                )
