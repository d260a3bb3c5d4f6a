"""Every expert is to be seen at work: how many there are, and captures in which those are chosen that were not yet."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...capture.captured import Capture
from ...capture.routing import Routing, takes
from ...errors import Refused
from ..graph_nodes import is_of_call, op_name
from ..integer_ranges import UNBOUNDED, Ranges
from ..terms.parameter_places import Place, Siblings, expert_indices, tensor_at
from .turning_integers import Turn, evaluate, integer_ancestors, path_from, runs

if TYPE_CHECKING:
    from ..prove import Prover

_MOST_EXTRA = 8
_CHANCE = 1e-3
_MOST_NUMBERS = 4096


def every_expert(prover: Prover) -> None:
    """More captures, until every expert was seen at work: one that differs must not hide.

    Raises:
        Refused: some cannot be made to work.
    """
    extra = 0
    prover.num_experts = _total(prover)
    if missing := set(range(prover.num_experts)) - prover.seen - _zeros(prover):
        _choose_by_numbers(prover, missing)
    while missing := sorted(set(range(prover.num_experts)) - prover.seen - _zeros(prover)):
        if extra == _MOST_EXTRA:
            raise Refused(
                f"{len(missing)} of {prover.num_experts} experts were never chosen under any routing tried, "
                f"the first is expert {missing[0]}"
            )
        extra += 1
        sizes = prover.choose(max(17, min(len(missing), 4 * prover.hint)), extra)
        before = set(missing)
        prefer = tuple(missing) * max(1, 16 // len(missing))
        prover.add(prover.lift(Routing("diverse", 10 + extra, prefer=prefer), sizes), sizes)
        if before == set(range(prover.num_experts)) - prover.seen - _zeros(prover) and extra > 2:
            extra = _MOST_EXTRA


def _choose_by_numbers(prover: Prover, missing: set[int]) -> None:
    """Lift all captures again with integers that choose the missing experts, if arguments or buffers decide it: the
    example may have no such tokens, and a table of experts that is loaded later is all zeros."""
    first = prover.lifted[0]
    if not all(map(is_of_call, first.index.nodes)):
        return
    found: set[Turn] = set()
    for node in first.index.nodes:
        ancestors = integer_ancestors(node)
        for leaf in (n for n in ancestors if n.op == "placeholder"):
            argument = prover.arguments.tensors[leaf.meta["position"]]
            numbers = _numbers_choosing(first.capture, node, leaf, missing) if argument.takes_turns else {}
            found |= {(leaf.meta["position"], n) for n in numbers.values() if argument.takes(n)}
            missing = missing - numbers.keys()
        for leaf in (n for n in ancestors if n.op == "get_attr" and not n.meta["val"].is_floating_point()):
            found |= {(leaf.meta["fqn"], e) for e in missing if takes(leaf.meta["val"], e)}
    arguments = prover.arguments.turned(found)
    if found and runs(prover, arguments, prover.sizes[0]):
        prover.arguments = arguments
        routings = [one.capture.tracer.routing.again() for one in prover.lifted]
        prover.lifted = [prover.lift(*of) for of in zip(routings, prover.sizes, strict=True)]


def _numbers_choosing(taken: Capture, node: fx.Node, leaf: fx.Node, experts: set[int]) -> dict[int, int]:
    """For experts the first number of an argument that chooses them, among the small ones."""
    value, found = leaf.meta["val"], dict[int, int]()
    path = path_from(leaf, integer_ancestors(node))
    for start in range(0, _MOST_NUMBERS if value.numel() else 0, max(1, value.numel())):
        tried = (torch.arange(value.numel()) + start).to(value.dtype)
        try:
            chosen = evaluate(taken, path, {leaf: tried.view(value.shape)})[node].reshape(value.numel(), -1)
        except Exception:  # no such entry in a table
            break
        for e in experts - found.keys():
            hits = (chosen == e).any(1).nonzero()
            if len(hits):
                found[e] = int(tried[hits[0, 0]])
    return found


def _zeros(prover: Prover) -> set[int]:
    """Ids that are chosen now and then and never contribute: experts that do nothing. So often that it is not by
    chance, as it may be where a mask or a capacity drops many slots, or where a buffer allows some experts only:
    it allows others in another capture."""
    chosen = [(one, one.ids.flatten().tolist()) for one in prover.lifted]
    slots = [seen for one, ids in chosen for seen in zip(ids, one.kept.flatten().tolist(), strict=True)]
    captures = [(e, bool(one.kept[one.ids == e].any())) for one, ids in chosen for e in set(ids)]
    by_slots, by_captures = _never(slots), _never(captures)
    return {e for e, n in Counter(e for e, _ in captures).items() if e in by_slots & by_captures and n > 1}


def _total(prover: Prover) -> int:
    """How many experts there are: as many as the stacks are long, the siblings many, or the ids high."""
    first = prover.lifted[0]
    total = max(prover.seen) + 1
    for group in first.groups:
        for table in group.tables:
            total = max(total, _siblings(prover, table), _stack(prover, table, group.tables))
    for node in first.index.nodes:
        if op_name(node) in ("masked_fill", "where"):  # a number that is put may be nobody's
            continue
        ids = Ranges(first.capture.nodes).of(node)
        if ids is not None and (ids[0] >= 0).all() and ids[1].numel() and ids[1].max() < UNBOUNDED:
            total = max(total, int(ids[1].max()) + 1)
    return total


def _stack(prover: Prover, table: dict[int, Place], tables: list[dict[int, Place]]) -> int:
    """How many parts a tensor has, if the experts count them; as many for each of the tables that share it."""
    if any(expert_indices(place, prover.children)[:1] != [e] for e, place in table.items()):
        return 0
    tensor, length = _stack_of(prover, next(iter(table.values())))
    taken = set(table.values())
    others = [set(t.values()) for t in tables if _stack_of(prover, next(iter(t.values()))) == (tensor, length)]
    apart = [places for places in others if not places & taken]
    return length // (1 + len(apart))


def _stack_of(prover: Prover, place: Place) -> tuple[Any, int]:
    """What a place is a part of, and how many parts that has."""
    shape = tensor_at(prover.block, place.fqn).shape
    for i, (op, *rest) in enumerate(place.steps):
        if op == "at":
            return (place.fqn, place.steps[:i]), shape[rest[1][0][0]]
        if op == "slice":
            _, dim, start, stop, _ = rest
            return (place.fqn, place.steps[:i]), shape[dim] // (stop - start)
        if op in ("reshape", "permute", "expand"):
            shape = rest[0]
    return place.fqn, 0


def _siblings(prover: Prover, table: dict[int, Place]) -> int:
    """How many modules stand beside each other where the experts' places differ, if they count the experts. A shared
    expert in their list does not count."""
    names = {e: place.fqn.split(".") for e, place in table.items()}
    for depth, _ in enumerate(min(names.values(), key=len)):
        before = next(iter(names.values()))[:depth]
        siblings = prover.children.get(".".join(before), Siblings())
        if all(siblings.numbers.get(parts[depth]) == e for e, parts in names.items()):
            heads = {tuple(fqn.split(".")[: depth + 1]) for fqn in prover.experts or ()}
            return sum((*before, name) in heads for name in siblings)
    return 0


def _never(seen: list[tuple[int, bool]]) -> set[int]:
    """What never came true, and so often not that this is not by chance."""
    tried, came = Counter(e for e, _ in seen), Counter(e for e, is_true in seen if is_true)
    missed = 1 - came.total() / max(1, sum(n for e, n in tried.items() if e in came))
    return {e for e, n in tried.items() if e not in came and missed**n < _CHANCE}
