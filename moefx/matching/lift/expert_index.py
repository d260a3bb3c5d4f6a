"""Which integer tensor of the program says which experts each token used, and in which slot each summand is."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...inspection.proof_trace import IndexAttempt
from ..graph_nodes import describe_node
from ..terms.parameter_places import ParameterSlice
from ..terms.term import Term
from .canonical_form import CanonicalForm, NodeRef, count_sequences
from .expert_owners import ExpertOwners, OwnerKey

_MOST_SLOTS = 64
_MOST_COLUMNS = 12
_MOST_EXPERTS_OF_A_MASK = 128
_MAX_ATTEMPTS = 12  # that a refusal reports


class ExpertIndex(NamedTuple):
    """What says which experts were used: the node, what it holds, and the slot of each summand of each token."""

    index: NodeRef
    ids: torch.Tensor  # int64 [T, K]
    slots: list[list[int]]


def find_expert_index(
    owners: ExpertOwners,
    tokens: tuple[int, ...],
    summands: list[list[Term]],
    nodes: list[fx.Node],
    inside: set[fx.Node],
    like: CanonicalForm | None,
) -> ExpertIndex | None:
    """The choice that explains the routed summands of every token, if there is one.

    Args:
        nodes: to look among, the likeliest first.
        inside: those of them that are a submodule's own, to be taken only where no other fits.
        like: the form of another capture of the block; what chose the experts there is looked at first.
    """
    search = _IndexSearch(owners, tokens, summands, nodes)
    found = search.as_before(like) if like is not None else None
    if found is not None:
        return found
    candidates = search.candidates(inside)
    return search.one_node(candidates) or search.columns(candidates) or search.mask()


def find_near_misses(
    owners: ExpertOwners,
    tokens: tuple[int, ...],
    summands: list[list[Term]],
    nodes: list[fx.Node],
    inside: set[fx.Node],
) -> tuple[IndexAttempt, ...]:
    """Report how far the candidates for the expert index came if `choice` found none, the closest first."""
    search = _IndexSearch(owners, tokens, summands, nodes)
    attempts = [search.explain_miss(*candidate) for candidate in search.candidates(inside)[:_MAX_ATTEMPTS]]
    return tuple(sorted(attempts, key=lambda attempt: -attempt.explained))


class _IndexSearch:
    def __init__(self, owners: ExpertOwners, tokens: tuple[int, ...], summands: list[list[Term]], nodes: list[fx.Node]):
        self.tokens, self.nodes = tokens, nodes
        self.sequences = count_sequences(owners.reach.capture, tokens)
        self.T = math.prod(tokens)
        self.keys = [[owners.find_key(p) for p in parts] for parts in summands]
        self.widest = max(map(len, self.keys))
        names = {key: next(iter(owners.guess_numbers(key)), None) for key in {k for row in self.keys for k in row}}
        # the experts' own numbers, where all have one, and not the first of two lists the same as the first of another
        own = None not in names.values() and len(set(names.values())) == len(names)
        self.natural: dict[OwnerKey, int] | None = names if own else None  # type: ignore[assignment]

    def _integers(self) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        for n in self.nodes:
            val = n.meta.get("val")
            if isinstance(val, torch.Tensor) and not isinstance(val, FakeTensor):
                yield n, val

    def candidates(self, inside: set[fx.Node]) -> list[tuple[NodeRef, torch.Tensor]]:
        """Readings of integer nodes as [T, K], the likeliest first; also of truths, which choose one of two experts."""
        found = []
        for place, (n, val) in enumerate(self._integers()):
            if val.dtype is not torch.uint8:
                is_truth = val.dtype is torch.bool
                for axes, flat in enumerate_slot_views(val, self.tokens, self.sequences):
                    if flat.shape[1] <= (1 if is_truth else _MOST_SLOTS):
                        order = ("s" in axes, is_truth, flat.shape[1] != self.widest, n in inside, place)
                        found.append((order, NodeRef(n, axes), flat))
        return [(ref, flat) for _, ref, flat in sorted(found, key=lambda c: c[0])]

    def one_node(self, candidates: list[tuple[NodeRef, torch.Tensor]]) -> ExpertIndex | None:
        """A node that holds the ids of all slots, by the experts' own numbers or by any others."""
        first = None
        for by_name in (True, False) if self.natural is not None else (False,):
            for ref, ids in candidates:
                if ids.shape[1] < self.widest:
                    continue
                names = self.natural if by_name else _infer_numbers(self.keys, ids.tolist())
                slots = _assign_slots(self.keys, ids, names) if names else None
                if names is None or slots is None:
                    continue
                unused = ids.numel() - sum(map(len, slots))
                outside = ids.numel() - int(torch.isin(ids, torch.tensor(list(names.values()))).sum())
                if unused == outside:  # ids that are nobody's say themselves which slots do not count
                    return ExpertIndex(ref, ids, slots)
                if ref.node.meta["val"].dtype is not torch.bool:  # a truth leaves nothing out
                    first = first or ExpertIndex(ref, ids, slots)
        return first

    def explain_miss(self, ref: NodeRef, ids: torch.Tensor) -> IndexAttempt:
        """Report for how many tokens a candidate names all experts that they use."""
        node, source = describe_node(ref.node)
        names, entries = self.natural, ids.shape[1]
        if names is None:
            return IndexAttempt(node, source, 0, "no numbering of the experts fits it")
        rows = zip(self.keys, ids.tolist(), strict=True)
        explained = sum({names[key] for key in row} <= set(chosen) for row, chosen in rows)
        reason = f"names the experts of {explained} of {self.T} tokens"
        if entries < self.widest:
            reason += f", and has {entries} of up to {self.widest} slots"
        return IndexAttempt(node, source, explained, reason)

    def as_before(self, like: CanonicalForm) -> ExpertIndex | None:
        """The nodes that chose the experts in the other capture, at the same places of this one."""
        names = self._names_in(like) or self.natural
        found = self._find_twin(like.expert_index) if names is not None else None
        slots = _assign_slots(self.keys, found[1], names) if found is not None else None  # type: ignore[arg-type]
        return None if found is None or slots is None else ExpertIndex(*found, slots)

    def _names_in(self, like: CanonicalForm) -> dict[OwnerKey, int] | None:
        """The experts' numbers in the other capture, by their parameters, if it met them all."""
        owners: dict[ParameterSlice, set[int]] = defaultdict(set)
        for table in (table for group in like.groups for table in group.tables):
            for e, place in table.items():
                owners[place].add(e)
        names: dict[OwnerKey, int] = {}
        for key in {k for row in self.keys for k in row}:
            mine = [owners[p] for p in key if p in owners]
            number = set.intersection(*mine) if mine else set()
            if len(number) != 1:
                return None
            names[key] = number.pop()
        return names

    def _find_twin(self, ref: NodeRef) -> tuple[NodeRef, torch.Tensor] | None:
        if ref.columns:
            parts = [part for c in ref.columns if (part := self._find_twin(c)) is not None]
            if len(parts) < len(ref.columns):
                return None
            columns = tuple(c for c, _ in parts)
            return NodeRef(columns[0].node, ref.axes, columns), torch.cat([ids for _, ids in parts], dim=1)
        for n, val in self._integers():
            if n.meta["index"] == ref.node.meta["index"] and n.target == ref.node.target:
                if "m" in ref.axes:
                    return NodeRef(n, ref.axes), torch.arange(val.shape[-1]).expand(self.T, -1)
                found = [
                    flat for axes, flat in enumerate_slot_views(val, self.tokens, self.sequences) if axes == ref.axes
                ]
                return (NodeRef(n, ref.axes), found[0]) if found else None
        return None

    def columns(self, candidates: list[tuple[NodeRef, torch.Tensor]]) -> ExpertIndex | None:
        """Several integer nodes with one choice each, such as a first and a second argmax."""
        if self.natural is None or self.widest < 2:
            return None
        wanted = [{self.natural[k] for k in row} for row in self.keys]
        place = {n: i for i, n in enumerate(self.nodes)}
        single = [c for c in candidates if c[1].shape[1] == 1 and c[0].node.meta["val"].dtype is not torch.bool]
        single.sort(key=lambda c: place[c[0].node])
        hits: dict[int, int] = {}  # of the columns that say something of their own, how many ids are of experts used
        for at, (_, ids) in enumerate(single):
            if not any(torch.equal(ids, single[other][1]) for other in hits):
                hits[at] = sum(i in w for i, w in zip(ids[:, 0].tolist(), wanted, strict=True))
        likely = sorted(sorted(hits, key=lambda at: -hits[at])[:_MOST_COLUMNS])
        covering = [single[at] for at in likely]
        for chosen in itertools.combinations(covering, self.widest):
            ids = torch.cat([i for _, i in chosen], dim=1)
            slots = _assign_slots(self.keys, ids, self.natural)
            if slots is not None:
                columns = tuple(r for r, _ in chosen)
                return ExpertIndex(NodeRef(columns[0].node, ("t", "k"), columns), ids, slots)
        return None

    def mask(self) -> ExpertIndex | None:
        """A mask of the chosen experts (a threshold, say): every expert is a slot, and most are dropped."""
        lowest = max(self.natural.values()) + 1 if self.natural is not None else self.widest
        for n, val in self._integers():
            if (
                val.dtype != torch.bool
                or tuple(val.shape[:-1]) not in (self.tokens, (self.T,))
                or not lowest <= val.shape[-1] <= _MOST_EXPERTS_OF_A_MASK
            ):
                continue
            rows = val.reshape(self.T, -1).tolist()
            for truth in (True, False):
                chosen = [[e for e, on in enumerate(row) if on is truth] for row in rows]
                if any(len(e) != len(set(keys)) for e, keys in zip(chosen, self.keys, strict=True)):
                    continue
                names = self.natural if self.natural is not None else _infer_numbers(self.keys, chosen)
                if names is None:
                    continue
                slots = [[names[k] for k in row] for row in self.keys]
                if [set(row) for row in slots] == [set(row) for row in chosen]:
                    ids = torch.arange(val.shape[-1]).expand(self.T, -1)
                    return ExpertIndex(NodeRef(n, ("t",) * (val.dim() - 1) + ("m",)), ids, slots)
        return None


def enumerate_slot_views(
    val: torch.Tensor, tokens: tuple[int, ...], sequences: int = 0
) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Ways to read an integer tensor as [T, K]. `sequences`: how many there are, if one entry may be for all tokens of
    a sequence."""
    T, shape, out = math.prod(tokens), tuple(val.shape), []
    flat = val.to(torch.int64)
    for lead in {tokens, (T,)}:
        n = len(lead)
        if shape[:n] == lead and len(shape) <= n + 1:
            out.append((("t",) * n + ("k",) * (len(shape) - n), flat.reshape(T, -1)))
        elif len(shape) == n + 1 and shape[1:] == lead:
            out.append((("k", *("t",) * n), flat.reshape(shape[0], T).t()))
    if len(shape) == 1 and shape[0] > T and shape[0] % T == 0:
        out.append((("tk",), flat.reshape(T, -1)))
        out.append((("kt",), flat.reshape(-1, T).t()))
    if sequences and shape[:1] == (sequences,) and len(shape) <= 2:
        axes = ("s", *("k",) * (len(shape) - 1))
        out.append((axes, flat.reshape(sequences, -1).repeat_interleave(T // sequences, 0)))
    return out


def _assign_slots(keys: list[list[Any]], ids: torch.Tensor, names: dict[Any, int]) -> list[list[int]] | None:
    """For each token, the slot of each key; None if some key's expert is not among the token's ids."""
    out = []
    for row, chosen in zip(keys, ids.tolist(), strict=True):
        left: dict[int, list[int]] = defaultdict(list)
        for k, e in enumerate(chosen):
            left[e].append(k)
        slots = []
        for key in row:
            at = left.get(names[key])
            if not at:
                return None
            slots.append(at.pop(0))
        out.append(slots)
    return out


def _infer_numbers(keys: list[list[Any]], ids: list[list[int]]) -> dict[Any, int] | None:
    """A one-to-one naming of keys by ids that fits every token, if there is exactly one."""
    options: dict[Any, set[int]] = {}
    for row, chosen in zip(keys, ids, strict=True):
        for key in row:
            options[key] = options.get(key, set(chosen)) & set(chosen)
    changed = True
    while changed:
        changed = False
        for key, mine in options.items():
            if len(mine) == 1:
                for other, theirs in options.items():
                    if other is not key and len(theirs) > 1 and mine <= theirs:
                        options[other] = theirs - mine
                        changed = True
    if any(len(o) != 1 for o in options.values()):
        return None
    names = {key: next(iter(o)) for key, o in options.items()}
    return names if len(set(names.values())) == len(names) else None


def uses_all_experts(owners: ExpertOwners, summands: list[list[Term]]) -> bool:
    keys = [{owners.find_key(p) for p in parts} for parts in summands]
    every = set().union(*keys)
    return all(row == every for row in keys)


def is_all_or_none(owners: ExpertOwners, summands: list[list[Term]]) -> bool:
    """Whether some tokens use all experts and the others none."""
    keys = [{owners.find_key(p) for p in parts} for parts in summands]
    every = set().union(*keys)
    return bool(every) and not all(keys) and all(row in (set(), every) for row in keys)
