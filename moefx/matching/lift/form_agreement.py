"""Whether two captures were lifted to one form."""

from __future__ import annotations

import dataclasses

from ...errors import Refused
from .canonical_form import CanonicalForm


def require_same_form(a: CanonicalForm, b: CanonicalForm) -> None:
    """Raise unless two lifts have one template. `b` may have met fewer kinds of experts and only some of the experts;
    its groups are put into the order of `a`'s."""
    where = str(a.cut.meta["source"])
    if a.slots != b.slots:
        raise Refused(
            f"the number of slots per token depends on routing or size: {a.slots} and {b.slots}", source=where
        )
    if a.expert_index.form != b.expert_index.form or len(a.shared) != len(b.shared):
        raise Refused("which experts are chosen, or what is added for all tokens, depends on the routing", source=where)
    if a.unrouted_value and b.unrouted_value and a.unrouted_value.form != b.unrouted_value.form:
        raise Refused("what tokens without an expert get depends on the routing", source=where)
    by_form = {(g.body, tuple(v.form for v in g.values)): g for g in b.groups}
    ordered = [by_form.pop((g.body, tuple(v.form for v in g.values)), None) for g in a.groups]
    if by_form:
        raise Refused("experts compute different functions under different routings", source=where)
    b.groups[:] = [
        h if h is not None else dataclasses.replace(g, ids=[], tables=[{} for _ in g.tables], values=[])
        for g, h in zip(a.groups, ordered, strict=True)
    ]
