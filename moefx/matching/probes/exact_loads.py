"""Give every expert exactly the load that Python compares loads with. A part of `load_comparisons`.

Protects from a rule for one expert with few tokens, if other experts show both outcomes of the comparison::

    for e, n in enumerate(counts.tolist()):
        rows = expert(x[order[start : start + n]])
        if n == 1 and e == num_experts - 1:
            rows = rows / 2

Forcing the outcome would contradict the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...capture.tracing.concrete_routing import Routing
from ..facts.op_classes import ORDERED

_MAX_LOADS = 6
_SMALL_LOADS = (1, 2, 3, 4)
_SEED = 23


def choose_exact_loads(comparisons: Iterable[tuple[str, object]], has_computed_numbers: bool) -> list[int]:
    """Choose the least loads at which comparisons change their outcome.

    Args:
        comparisons: the name of each comparison, such as "gt", and the number that a load is compared with.
        has_computed_numbers: some comparison is of a number that is computed from a load: `n % 2 == 1`.
    """
    loads = {*_SMALL_LOADS} if has_computed_numbers else set[int]()
    for op, number in comparisons:
        if type(number) is int:
            loads |= {number - 1, number, number + 1} if op in ORDERED else {number}
    return sorted(load for load in loads if load > 0)[:_MAX_LOADS]


def list_exact_routings(load: int, slots: int, experts: int, tokens: int) -> Iterator[Routing]:
    """Yield routings of `tokens` tokens in which each expert gets exactly `load` choices, except for a crowd.

    `slots` experts are the crowd: they take all other choices. They are others in the second routing, if there are
    enough experts. With too few tokens, yield nothing.
    """
    for crowd in (range(slots), range(experts - slots, experts)):
        others = [e for e in range(experts) if e not in crowd]
        per_token = min(slots, len(others))
        if not others or len(others) * load > tokens * per_token:
            continue
        choices = others * load
        rows = [tuple(choices[i : i + per_token]) for i in range(0, len(choices), per_token)]
        selections = [(*row, *crowd[: slots - len(row)]) for row in rows]
        selections += [tuple(crowd)] * (tokens - len(selections))
        yield Routing("diverse", _SEED, selections=tuple(selections))


__all__ = ["choose_exact_loads", "list_exact_routings"]
