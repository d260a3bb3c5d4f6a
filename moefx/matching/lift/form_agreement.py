"""Whether two captures were lifted to one form."""

from __future__ import annotations

import dataclasses

from ...errors import Refused
from .canonical_form import Lifted


def same_form(a: Lifted, b: Lifted) -> None:
    """Raise unless two lifts have one template. `b` may have met fewer kinds of experts and only some of the experts;
    its groups are put into the order of `a`'s."""
    where = str(a.cut.meta["source"])
    if a.slots != b.slots:
        raise Refused(
            f"the number of slots per token depends on routing or size: {a.slots} and {b.slots}", source=where
        )
    if a.index.form != b.index.form or len(a.shared) != len(b.shared):
        raise Refused("which experts are chosen, or what is added for all tokens, depends on the routing", source=where)
    if a.missed and b.missed and a.missed.form != b.missed.form:
        raise Refused("what tokens without an expert get depends on the routing", source=where)
    by_form = {(g.body, tuple(v.form for v in g.values)): g for g in b.groups}
    ordered = [by_form.pop((g.body, tuple(v.form for v in g.values)), None) for g in a.groups]
    if by_form:
        raise Refused("experts compute different functions under different routings", source=where)
    b.groups[:] = [
        h if h is not None else dataclasses.replace(g, ids=[], tables=[{} for _ in g.tables], values=[])
        for g, h in zip(a.groups, ordered, strict=True)
    ]
