"""The expert index: the integer tensor of the program that holds the selected experts of each token.

`find_expert_index` compares integer nodes with the experts whose parameters each summand uses, and also returns the
slot of each summand::

    [[0], [2, 1]]       # experts of the summands, of two tokens
    [[0, 3], [1, 2]]    # fits: the summand of token 0 is in slot 0, those of token 1 are in slots 1 and 0
    [[3, 1], [1, 2]]    # does not fit: token 0 uses expert 0
"""

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
from ..facts.graph_nodes import describe_node
from ..terms.parameter_slices import ParameterSlice
from ..terms.term import Term
from .canonical_form import Axis, CanonicalForm, NodeRef, count_sequences
from .expert_owners import ExpertOwners, OwnerKey

_MAX_SLOTS = 64
_MAX_COLUMNS = 12
_MAX_MASK_EXPERTS = 128
_MAX_ATTEMPTS = 12  # that a refusal reports


class ExpertIndex(NamedTuple):
    """A node that holds the selected experts.

    Attributes:
        ref: the node, and its axes.
        ids: its values.
        slots: the slot of each summand, by token.
    """

    ref: NodeRef
    ids: torch.Tensor  # int64 [T, K]
    slots: list[list[int]]


def find_expert_index(
    owners: ExpertOwners,
    tokens: tuple[int, ...],
    summands: list[list[Term]],
    nodes: list[fx.Node],
    call_internals: set[fx.Node],
    hint: CanonicalForm | None,
) -> ExpertIndex | None:
    """Find the expert index that explains the summands of every token, or return None.

    The nodes of the hint are tried first, then one node with all slots, one node per slot, and a mask of experts.

    Args:
        summands: the summands with expert parameters, by token.
        nodes: nodes to search, the likeliest first.
        call_internals: nodes that a submodule keeps to itself; they are tried last.
        hint: the form of another capture of the block.
    """
    search = _IndexSearch(owners, tokens, summands, nodes)
    hinted_index = search.find_as_in(hint) if hint is not None else None
    if hinted_index is not None:
        return hinted_index
    candidates = search.list_candidates(call_internals)
    return search.find_node(candidates) or search.find_columns(candidates) or search.find_mask()


def find_near_misses(
    owners: ExpertOwners,
    tokens: tuple[int, ...],
    summands: list[list[Term]],
    nodes: list[fx.Node],
    call_internals: set[fx.Node],
) -> tuple[IndexAttempt, ...]:
    """Report how far the candidates for the expert index came if `find_expert_index` found none, the closest first."""
    search = _IndexSearch(owners, tokens, summands, nodes)
    attempts = [search.explain_miss(*candidate) for candidate in search.list_candidates(call_internals)[:_MAX_ATTEMPTS]]
    return tuple(sorted(attempts, key=lambda attempt: -attempt.explained))


class _IndexSearch:
    """The state of one search.

    Attributes:
        keys: the expert parameters of each summand, by token.
        widest: the most summands of a token.
        own_numbers: expert numbers by key, from names and stacks of parameters; None if some expert has none.
    """

    def __init__(self, owners: ExpertOwners, tokens: tuple[int, ...], summands: list[list[Term]], nodes: list[fx.Node]):
        self.tokens, self.nodes = tokens, nodes
        self.sequences = count_sequences(owners.uses.capture, tokens)
        self.num_tokens = math.prod(tokens)
        self.keys = [[owners.find_key(p) for p in parts] for parts in summands]
        self.widest = max(map(len, self.keys))
        numbers = {key: next(iter(owners.guess_numbers(key)), None) for key in {k for row in self.keys for k in row}}
        # usable if each expert has a number of its own; the first experts of two lists would share one
        are_own = None not in numbers.values() and len(set(numbers.values())) == len(numbers)
        self.own_numbers: dict[OwnerKey, int] | None = numbers if are_own else None  # type: ignore[assignment]

    def _list_integers(self) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        for n in self.nodes:
            val = n.meta.get("val")
            if isinstance(val, torch.Tensor) and not isinstance(val, FakeTensor):
                yield n, val

    def list_candidates(self, call_internals: set[fx.Node]) -> list[tuple[NodeRef, torch.Tensor]]:
        """List views of integer nodes as [T, K], the likeliest first. A boolean selects one of two experts."""
        candidates = []
        for position, (n, val) in enumerate(self._list_integers()):
            if val.dtype is not torch.uint8:
                is_boolean = val.dtype is torch.bool
                for axes, flat in enumerate_slot_views(val, self.tokens, self.sequences):
                    if flat.shape[1] <= (1 if is_boolean else _MAX_SLOTS):
                        order = ("s" in axes, is_boolean, flat.shape[1] != self.widest, n in call_internals, position)
                        candidates.append((order, NodeRef(n, axes), flat))
        return [(ref, flat) for _, ref, flat in sorted(candidates, key=lambda c: c[0])]

    def find_node(self, candidates: list[tuple[NodeRef, torch.Tensor]]) -> ExpertIndex | None:
        """Find a node with the ids of all slots: the experts' own numbers, else any consistent numbers."""
        first = None
        for uses_own in (True, False) if self.own_numbers is not None else (False,):
            for ref, ids in candidates:
                if ids.shape[1] < self.widest:
                    continue
                numbers = self.own_numbers if uses_own else _infer_numbers(self.keys, ids.tolist())
                slots = _assign_slots(self.keys, ids, numbers) if numbers else None
                if numbers is None or slots is None:
                    continue
                unused = ids.numel() - sum(map(len, slots))
                outside = ids.numel() - int(torch.isin(ids, torch.tensor(list(numbers.values()))).sum())
                if unused == outside:  # ids of no expert mark exactly the dropped slots
                    return ExpertIndex(ref, ids, slots)
                if ref.node.meta["val"].dtype is not torch.bool:  # a boolean drops no slot
                    first = first or ExpertIndex(ref, ids, slots)
        return first

    def explain_miss(self, ref: NodeRef, ids: torch.Tensor) -> IndexAttempt:
        """Report for how many tokens a candidate names all experts that they use."""
        node, source = describe_node(ref.node)
        names, entries = self.own_numbers, ids.shape[1]
        if names is None:
            return IndexAttempt(node, source, 0, "no numbering of the experts fits it")
        rows = zip(self.keys, ids.tolist(), strict=True)
        explained = sum({names[key] for key in row} <= set(chosen) for row, chosen in rows)
        reason = f"names the experts of {explained} of {len(self.keys)} tokens"
        if entries < self.widest:
            reason += f", and has {entries} of up to {self.widest} slots"
        return IndexAttempt(node, source, explained, reason)

    def find_as_in(self, hint: CanonicalForm) -> ExpertIndex | None:
        """Use the nodes of the hint's expert index, if they explain the summands of this capture."""
        numbers = self._numbers_in(hint) or self.own_numbers
        counterpart = self._find_counterpart(hint.expert_index) if numbers is not None else None
        slots = _assign_slots(self.keys, counterpart[1], numbers) if counterpart is not None else None  # type: ignore[arg-type]
        return None if counterpart is None or slots is None else ExpertIndex(*counterpart, slots)

    def _numbers_in(self, hint: CanonicalForm) -> dict[OwnerKey, int] | None:
        """Return the hint's expert numbers by key, or None if it lacks some expert."""
        owners: dict[ParameterSlice, set[int]] = defaultdict(set)
        for table in (table for group in hint.groups for table in group.tables):
            for e, part in table.items():
                owners[part].add(e)
        numbers: dict[OwnerKey, int] = {}
        for key in {k for row in self.keys for k in row}:
            owners_of_key = [owners[part] for part in key if part in owners]
            number = set.intersection(*owners_of_key) if owners_of_key else set()
            if len(number) != 1:
                return None
            numbers[key] = number.pop()
        return numbers

    def _find_counterpart(self, ref: NodeRef) -> tuple[NodeRef, torch.Tensor] | None:
        """Find the node of this capture at the position of another capture's node, with its values [T, K]."""
        if ref.columns:
            parts = [part for c in ref.columns if (part := self._find_counterpart(c)) is not None]
            if len(parts) < len(ref.columns):
                return None
            columns = tuple(c for c, _ in parts)
            return NodeRef(columns[0].node, ref.axes, columns), torch.cat([ids for _, ids in parts], dim=1)
        for n, val in self._list_integers():
            if n.meta["index"] == ref.node.meta["index"] and n.target == ref.node.target:
                if "m" in ref.axes:
                    return NodeRef(n, ref.axes), torch.arange(val.shape[-1]).expand(self.num_tokens, -1)
                views = [
                    flat for axes, flat in enumerate_slot_views(val, self.tokens, self.sequences) if axes == ref.axes
                ]
                return (NodeRef(n, ref.axes), views[0]) if views else None
        return None

    def find_columns(self, candidates: list[tuple[NodeRef, torch.Tensor]]) -> ExpertIndex | None:
        """Find one node per slot, such as a first and a second argmax."""
        if self.own_numbers is None or self.widest < 2:
            return None
        expected_numbers = [{self.own_numbers[k] for k in row} for row in self.keys]
        position = {n: i for i, n in enumerate(self.nodes)}
        single = [c for c in candidates if c[1].shape[1] == 1 and c[0].node.meta["val"].dtype is not torch.bool]
        single.sort(key=lambda c: position[c[0].node])
        hits: dict[int, int] = {}  # for each distinct column, the number of tokens that use its expert
        for at, (_, ids) in enumerate(single):
            if not any(torch.equal(ids, single[other][1]) for other in hits):
                hits[at] = sum(i in w for i, w in zip(ids[:, 0].tolist(), expected_numbers, strict=True))
        likely = sorted(sorted(hits, key=lambda at: -hits[at])[:_MAX_COLUMNS])
        covering = [single[at] for at in likely]
        for chosen in itertools.combinations(covering, self.widest):
            ids = torch.cat([i for _, i in chosen], dim=1)
            slots = _assign_slots(self.keys, ids, self.own_numbers)
            if slots is not None:
                columns = tuple(r for r, _ in chosen)
                return ExpertIndex(NodeRef(columns[0].node, ("t", "k"), columns), ids, slots)
        return None

    def find_mask(self) -> ExpertIndex | None:
        """Find a mask of the selected experts, such as a threshold. Every expert is a slot then; most are dropped."""
        lowest = max(self.own_numbers.values()) + 1 if self.own_numbers is not None else self.widest
        for n, val in self._list_integers():
            if (
                val.dtype != torch.bool
                or tuple(val.shape[:-1]) not in (self.tokens, (self.num_tokens,))
                or not lowest <= val.shape[-1] <= _MAX_MASK_EXPERTS
            ):
                continue
            rows = val.reshape(self.num_tokens, -1).tolist()
            for truth in (True, False):
                chosen = [[e for e, on in enumerate(row) if on is truth] for row in rows]
                if any(len(e) != len(set(keys)) for e, keys in zip(chosen, self.keys, strict=True)):
                    continue
                numbers = self.own_numbers if self.own_numbers is not None else _infer_numbers(self.keys, chosen)
                if numbers is None:
                    continue
                slots = [[numbers[k] for k in row] for row in self.keys]
                if [set(row) for row in slots] == [set(row) for row in chosen]:
                    ids = torch.arange(val.shape[-1]).expand(self.num_tokens, -1)
                    return ExpertIndex(NodeRef(n, ("t",) * (val.dim() - 1) + ("m",)), ids, slots)
        return None


def enumerate_slot_views(
    val: torch.Tensor, tokens: tuple[int, ...], sequences: int = 0
) -> list[tuple[tuple[Axis, ...], torch.Tensor]]:
    """List the views of a tensor as [T, K], each with the axes of a `NodeRef`.

    Args:
        tokens: the token axes.
        sequences: number of sequences, if one entry may hold for all tokens of a sequence; else 0.
    """
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


def _assign_slots(keys: list[list[Any]], ids: torch.Tensor, numbers: dict[Any, int]) -> list[list[int]] | None:
    """Return the slot of each key, by token, or None if some key's expert is not among the token's ids."""
    out = []
    for row, chosen in zip(keys, ids.tolist(), strict=True):
        left: dict[int, list[int]] = defaultdict(list)
        for k, e in enumerate(chosen):
            left[e].append(k)
        slots = []
        for key in row:
            at = left.get(numbers[key])
            if not at:
                return None
            slots.append(at.pop(0))
        out.append(slots)
    return out


def _infer_numbers(keys: list[list[Any]], ids: list[list[int]]) -> dict[Any, int] | None:
    """Return the one-to-one map from keys to ids that fits every token, or None unless there is exactly one."""
    options: dict[Any, set[int]] = {}
    for row, chosen in zip(keys, ids, strict=True):
        for key in row:
            options[key] = options.get(key, set(chosen)) & set(chosen)
    changed = True
    while changed:
        changed = False
        for key, numbers in options.items():
            if len(numbers) == 1:
                for other, candidates in options.items():
                    if other is not key and len(candidates) > 1 and numbers <= candidates:
                        options[other] = candidates - numbers
                        changed = True
    if any(len(o) != 1 for o in options.values()):
        return None
    numbers = {key: next(iter(o)) for key, o in options.items()}
    return numbers if len(set(numbers.values())) == len(numbers) else None


def uses_all_experts(owners: ExpertOwners, summands: list[list[Term]]) -> bool:
    """Return whether every token uses every expert."""
    keys = [{owners.find_key(p) for p in parts} for parts in summands]
    all_experts = set().union(*keys)
    return all(row == all_experts for row in keys)


def is_all_or_none(owners: ExpertOwners, summands: list[list[Term]]) -> bool:
    """Return whether some tokens use all experts, and the others none."""
    keys = [{owners.find_key(p) for p in parts} for parts in summands]
    all_experts = set().union(*keys)
    return bool(all_experts) and not all(keys) and all(row in (set(), all_experts) for row in keys)
