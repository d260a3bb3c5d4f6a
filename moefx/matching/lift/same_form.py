"""Agreement: the canonical forms of two captures are equal."""

from __future__ import annotations

import dataclasses

from ...errors import Refused
from .canonical_form import CanonicalForm

ONE_FUNCTION = "select the function of an expert by its number or by the values of a token, not by the routing"


def require_same_form(a: CanonicalForm, b: CanonicalForm) -> CanonicalForm:
    """Check that two captures have one form, and return `b` with its groups in the order of `a`.

    `b` may use a part of the experts, and of the groups. The result has an empty group for each that `b` lacks.

    Raises:
        Refused: slots, expert index, shared summands or expert functions differ.
    """
    source = str(a.cut.meta["source"])
    if a.slots != b.slots:
        raise Refused(
            f"the number of slots per token depends on routing or size: {a.slots} and {b.slots}",
            source=source,
            remedy="select equally many experts for each token, as topk with a fixed k does",
        )
    if a.expert_index.signature != b.expert_index.signature or len(a.shared) != len(b.shared):
        raise Refused(
            "the node that selects the experts, or a summand of all tokens, depends on the routing",
            source=source,
            remedy="run the same operations in every call, and choose between their results by torch.where",
        )
    if a.unrouted_value and b.unrouted_value and a.unrouted_value.signature != b.unrouted_value.signature:
        raise Refused(
            "the output of tokens without an expert depends on the routing",
            source=source,
            remedy="give these tokens the same output in every call, such as zeros",
        )
    by_signature = {(g.body, tuple(v.signature for v in g.values)): g for g in b.groups}
    ordered = [by_signature.pop((g.body, tuple(v.signature for v in g.values)), None) for g in a.groups]
    if by_signature:
        raise Refused(
            "experts compute different functions under different routings", source=source, remedy=ONE_FUNCTION
        )
    groups = [
        h if h is not None else dataclasses.replace(g, ids=[], tables=[{} for _ in g.tables], values=[])
        for g, h in zip(a.groups, ordered, strict=True)
    ]
    return dataclasses.replace(b, groups=groups)
