"""Prove that the slots of a token hold different experts for all scores.

One `topk` returns K different positions, and a program may compute expert ids from these (see `integer_derivations`).
This module evaluates such a computation at every possible position. Two slots are distinct if no positions that they
can have together give both the same expert.

For example, with eight experts in two groups of four::

    best = scores.view(T, 2, 4).argmax(-1)   # two selections of a position in 0 to 3
    ids = best + torch.tensor([0, 4])        # slots 0 and 1 hold 0 to 3, and 4 to 7: distinct
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .canonical_form import Axis, CanonicalForm
from .expert_index import enumerate_slot_views
from .integer_derivations import IntegerDerivations
from .score_masks import Derivation


def has_distinct_slots(
    form: CanonicalForm, experts: set[int], others: Sequence[CanonicalForm] = (), follows_masks: bool = True
) -> bool:
    """Return whether no two slots of a token can hold the same expert.

    Args:
        experts: expert numbers that matter.
        others: forms of captures at other sizes.
        follows_masks: whether to assume that a selection never returns an entry that was masked before it.
    """
    if form.slots < 2 or "m" in form.expert_index.axes:
        return True
    known = IntegerDerivations(form.capture, [other.capture for other in others], follows_masks)
    slots: list[list[Derivation]] = []
    for ref in form.expert_index.columns or (form.expert_index,):
        derivations = known.derive(ref.node)
        if derivations is None:
            return False
        read = [
            [view_as_slots(x, form.tokens, ref.axes) for x in (derivation.variable, *derivation.values)]
            for derivation in derivations
        ]
        for k in range(read[0][0].shape[1]):
            slots.append(
                [Derivation(variable[:, k], torch.stack([v[:, k] for v in values])) for variable, *values in read]
            )
    among = torch.tensor(sorted(experts))
    return not any(
        known.may_coincide(*derivations, among)
        for pair in itertools.combinations(slots, 2)
        for derivations in itertools.product(*pair)
    )


def view_as_slots(x: torch.Tensor, tokens: tuple[int, ...], axes: tuple[Axis, ...]) -> torch.Tensor:
    """View a tensor as [T, K], by the axes of a `NodeRef`."""
    sequences = len(x) if "s" in axes else 0
    return next(flat for view_axes, flat in enumerate_slot_views(x, tokens, sequences) if view_axes == axes)
