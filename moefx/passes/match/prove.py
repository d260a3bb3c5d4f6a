"""From a block to a proven canonical form: several captures under unlike routings must lift to one template."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.concolic import Capture, Source, capture
from ...capture.inputs import Arguments
from ...capture.routing import Routing
from ...capture.sizes import SizeGuard
from ...errors import Refused
from .lift import Body, Lifted, Lifter, Ref, _aligned
from .paths import Place
from .ranges import Ranges
from .semantics import Semantics

_MOST_EXTRA = 8


@dataclasses.dataclass
class Expert:
    """One group of experts in the final form.

    Attributes:
        ids: the expert ids that belong to it, ascending.
        body: what one expert computes; `expert` leaves index `tables`, `value` leaves index `Match.values`.
        tables: for each expert leaf, the place of the parameter of each id, in the order of `ids`.
    """

    ids: list[int]
    body: Body
    tables: list[list[Place]]


@dataclasses.dataclass
class Match:
    """The proof: one canonical form, and the captures that all agree on it (the first one is shown to users)."""

    block: nn.Module
    arguments: Arguments
    lifted: list[Lifted]
    sizes: list[dict[str, int]]
    groups: list[Expert]
    num_experts: int
    keep: list[Ref] | None
    guards: list[SizeGuard]
    modes_read: set[str]

    @property
    def slots(self) -> int:
        return self.lifted[0].slots


class Prover:
    def __init__(self, block: nn.Module, arguments: Arguments, num_experts_hint: int = 8):
        self.block, self.arguments, self.hint = block, arguments, num_experts_hint
        self.lifted: list[Lifted] = []
        self.sizes: list[dict[str, int]] = []
        self.experts: set[str] | None = None

    def capture(self, routing: Routing, sizes: dict[str, int], flips: frozenset[Source] = frozenset()) -> Capture:
        args, kwargs = self.arguments.at(sizes, seed=routing.seed)
        return capture(self.block, args, kwargs, routing, flips=flips, dims=sizes)

    def lift(self, routing: Routing, sizes: dict[str, int], flips: frozenset[Source] = frozenset()) -> Lifted:
        taken = self.capture(routing, sizes, flips)
        lifter = Lifter(self.block, taken)
        lifted = lifter.lift(self.experts)
        self.experts = self.experts or lifter.experts
        lifted.groups.sort(key=lambda g: g.ids[0])
        return lifted

    def prove(self) -> Match:
        tokens = max(29, self.hint // 4)
        plans = [("diverse", tokens), ("skewed", max(25, tokens * 3 // 4)), ("flooded", 13)]
        for variant, (kind, n) in enumerate(plans):
            sizes = self.arguments.choose(n, variant)
            self._add(self.lift(Routing(kind, variant), sizes), sizes)
        self._cover()
        groups = self._merged()
        self._flip_branches()
        keep = self._keep_mask()
        guards: list[SizeGuard] = []
        for lifted in self.lifted:
            guards += [g for g in lifted.capture.sizes.guards if g not in guards]
        modes = set().union(*[lifted.capture.modes_read for lifted in self.lifted])
        return Match(self.block, self.arguments, self.lifted, self.sizes, groups, self.num_experts, keep, guards, modes)

    def _add(self, lifted: Lifted, sizes: dict[str, int]) -> None:
        if self.lifted:
            _same_form(self.lifted[0], lifted)
        self.lifted.append(lifted)
        self.sizes.append(sizes)

    # ------------------------------------------------------------------ every expert is seen
    def _seen(self) -> set[int]:
        return {e for lifted in self.lifted for g in lifted.groups for e in g.ids}

    def _total(self) -> int:
        """How many experts there are: as many as the stacks are long, the siblings many, or the ids high."""
        total = max(self._seen()) + 1
        for lifted in self.lifted[:1]:
            for group in lifted.groups:
                for table in group.tables:
                    total = max([total, *[self._family(place) for place in list(table.values())[:1]]])
        return total

    def _family(self, place: Place) -> int:
        for op, *rest in place.steps:
            if op == "at":
                return self.block.get_parameter(place.fqn).shape[rest[1][0][0]]
            if op == "slice":
                _, dim, start, stop, _ = rest
                return self.block.get_parameter(place.fqn).shape[dim] // (stop - start)
        return 0

    def _cover(self) -> None:
        """More captures, until every expert was seen at work: one that differs must not hide."""
        extra = 0
        self.num_experts = self._total()
        while missing := sorted(set(range(self.num_experts)) - self._seen()):
            if extra == _MOST_EXTRA:
                raise Refused(
                    f"{len(missing)} of {self.num_experts} experts were never chosen under any routing tried, the first is expert {missing[0]}"
                )
            extra += 1
            sizes = self.arguments.choose(max(17, min(len(missing), 4 * self.hint)), extra)
            before = len(missing)
            self._add(self.lift(Routing("diverse", 10 + extra, prefer=tuple(missing)), sizes), sizes)
            if len(set(range(self.num_experts)) - self._seen()) == before and extra > 2:
                extra = _MOST_EXTRA

    def _merged(self) -> list[Expert]:
        """Groups with complete tables."""
        out = []
        for g, first in enumerate(self.lifted[0].groups):
            ids = sorted({e for lifted in self.lifted for e in lifted.groups[g].ids})
            tables = []
            for j in range(len(first.tables)):
                merged: dict[int, Place] = {}
                for lifted in self.lifted:
                    for e, place in lifted.groups[g].tables[j].items():
                        if merged.setdefault(e, place) != place:
                            raise Refused(f"expert {e} uses {place} under one routing and {merged[e]} under another", culprits=(place.fqn,))
                tables.append([merged[e] for e in ids])
            out.append(Expert(ids, first.body, tables))
        owners = [e for group in out for e in group.ids]
        if len(set(owners)) != len(owners):
            raise Refused("an expert computes one function under one routing and another under another")
        return out

    # ------------------------------------------------------------------ branches on data
    def _flip_branches(self) -> None:
        """A branch that went one way in every capture is forced the other way once: it must not matter."""
        outcomes: dict[Source, set[bool]] = {}
        for lifted in self.lifted:
            ranges = Ranges(lifted.capture.nodes) if lifted.capture.reads else None
            for read in lifted.capture.reads:
                seen = outcomes.setdefault(read.source, set())
                seen |= {True, False} if ranges and ranges.decided(read.node) else {read.value}
        for source in [s for s, seen in outcomes.items() if len(seen) == 1]:
            try:
                flipped = self.lift(Routing("diverse", 0), self.sizes[0], frozenset([source]))
                _same_form(self.lifted[0], flipped, complete=True)
                same = _same_kept(self.lifted[0], flipped)
            except Refused as why:
                raise Refused(
                    f"a branch on data changes what is computed: {source.text}", source=str(source), remedy="moefx needs one formula for all tokens"
                ) from why
            except Exception:
                continue  # the other way ends in an error, as it would in the original
            if not same:
                raise Refused(f"a branch on data changes what is computed: {source.text}", source=str(source))

    # ------------------------------------------------------------------ drops
    def _keep_mask(self) -> list[Ref] | None:
        """Where some slots contribute nothing: the nodes that say so, or None if every slot counts (or its weight
        is zero, or its id is out of range)."""
        if all(lifted.kept.all() for lifted in self.lifted):
            return None
        if all(_explained_by_ids(lifted, self.num_experts) for lifted in self.lifted):
            return None
        found = [_mask_candidates(lifted) for lifted in self.lifted]
        for position, ref in enumerate(found[0]):
            refs = [ref]
            for other in found[1:]:
                twin = next((r for r in other if r.axes == ref.axes and _alike(r.node, ref.node)), None)
                if twin is None:
                    break
                refs.append(twin)
            if len(refs) == len(found):
                return refs
            del position
        if all(_explained_by_weights(lifted) for lifted in self.lifted):
            return None
        raise Refused(
            "some chosen experts are skipped (dropped) and no mask in the program says which",
            source=str(self.lifted[0].cut.meta["source"]),
        )


def _same_form(a: Lifted, b: Lifted, complete: bool = False) -> None:
    """Raise unless two lifts have one template (expert tables may cover different experts)."""
    where = str(a.cut.meta["source"])
    if a.slots != b.slots:
        raise Refused(f"the number of slots per token depends on routing or size: {a.slots} and {b.slots}", source=where)
    if a.index.axes != b.index.axes or [v.axes for v in a.values] != [v.axes for v in b.values] or len(a.shared) != len(b.shared):
        raise Refused("what the experts are given depends on the routing", source=where)
    if len(a.groups) != len(b.groups):
        bodies = {g.body: g for g in a.groups}
        if not all(g.body in bodies for g in b.groups) and not all(g.body in {h.body for h in b.groups} for g in a.groups):
            raise Refused("experts compute different functions under different routings", source=where)
        if len(b.groups) < len(a.groups):  # a routing that never met one of the groups
            b.groups[:] = [next((h for h in b.groups if h.body == g.body), dataclasses.replace(g, ids=[], tables=[{} for _ in g.tables])) for g in a.groups]
            return
        raise Refused("experts compute different functions under different routings", source=where)
    for g, h in zip(a.groups, b.groups, strict=True):
        if g.body != h.body:
            raise Refused("experts compute different functions under different routings", source=where)


def _same_kept(a: Lifted, b: Lifted) -> bool:
    """Whether everything beside the experts has the same form, too."""
    return len(a.capture.effects) == len(b.capture.effects) and len(a.capture.nodes) >= 0


def _explained_by_ids(lifted: Lifted, num_experts: int) -> bool:
    inside = (lifted.ids >= 0) & (lifted.ids < num_experts)
    return bool((inside == lifted.kept).all())


def _explained_by_weights(lifted: Lifted) -> bool:
    """Every dropped slot has a weight that is zero by construction."""
    from .terms import is_const

    S = Semantics(lifted.capture.nodes, lifted.capture.shadow)
    T = S.T
    for ref in lifted.values:
        if "k" not in ref.axes and "e" not in ref.axes:
            continue
        term = S.term(ref.node)
        zero = True
        for t, k in zip(*np.nonzero(~lifted.kept), strict=True):
            position = np.unravel_index(t, lifted.tokens) if ref.axes.count("t") > 1 else (t,)
            it = iter(position)
            where = {a: int(k) if x == "k" else int(lifted.ids[t, k]) if x == "e" else int(next(it)) for a, x in enumerate(ref.axes)}
            if not is_const(T.resolve(T.picks(term, where)), 0):
                zero = False
                break
        if zero:
            return True
    return False


def _mask_candidates(lifted: Lifted) -> list[Ref]:
    """Nodes before the cut whose truth, read per token and slot, is exactly which slots count."""
    out = []
    for n in lifted.capture.nodes:
        val = n.meta.get("val")
        if n in lifted.absorbed or n.meta["index"] >= lifted.cut.meta["index"] or not isinstance(val, torch.Tensor):
            continue
        if isinstance(val, FakeTensor):
            if not n.meta.get("known") or val.numel() > 1 << 20:
                continue
            val = lifted.capture.shadow(n)
        for axes, flat in _aligned((val != 0).to(torch.int64), lifted.tokens):
            if flat.shape == lifted.kept.shape and bool((flat.bool().numpy() == lifted.kept).all()):
                out.append(Ref(n, axes))
        lead = tuple(val.shape[:-1])
        if lead in (lifted.tokens, (lifted.kept.shape[0],)) and val.shape[-1] > lifted.ids.max() and lifted.ids.min() >= 0:
            flat = (val != 0).reshape(lifted.kept.shape[0], -1).numpy()
            if (np.take_along_axis(flat, lifted.ids, 1) == lifted.kept).all():
                out.append(Ref(n, ("t",) * len(lead) + ("e",)))
    return out


def _alike(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    return a.op == b.op and str(a.target) == str(b.target)


R = TypeVar("R")


def deep(fn: Callable[[], R]) -> R:
    """Run `fn` with room for the recursion that a chain of hundreds of experts needs."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((True, fn()))
        except BaseException as error:
            result.append((False, error))

    with _limits():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    ok, value = result[0]
    if not ok:
        raise value
    return value


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    recursion, stack = sys.getrecursionlimit(), threading.stack_size(512 << 20)
    sys.setrecursionlimit(max(recursion, 200_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(recursion)
        threading.stack_size(stack)
