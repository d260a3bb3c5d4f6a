"""One capture, lifted to `out[t] = shared(x_t) + sum_k F(x_t, c[t,k]; theta[idx[t,k]])` (design section 3.3).

There is no template of any idiom here. The rows of the node where all routed paths meet are terms; each is a sum;
its summands are assigned to the slots of an integer tensor that explains which experts were used; and the summands
of all tokens and slots are anti-unified: where they differ they must differ as an input row, a routing weight or an
expert parameter does. Anything else is a refusal with its reason.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.concolic import Capture
from ...errors import Refused
from .nodes import is_routed
from .paths import Place, expert_indices, is_parameter, parameter_of, sibling_names
from .semantics import Semantics
from .terms import Term, TooLarge, is_const, number, show

_MOST_SLOTS = 64
_MOST_ROWS = 1 << 14
_MOST_EXPERTS_OF_A_MASK = 128
_MOST_NODES_BACK = 60


@dataclasses.dataclass(frozen=True)
class Ref:
    """A kept node that supplies a value of each (token, slot): which node, and how it is indexed.

    `axes` says what the node's leading axes are: `t` the tokens (one axis or several), `k` the slots, `e` the experts;
    `tk` and `kt` flattened pairs; `m` the experts where the node is a mask of the chosen ones. The remaining axes are
    the value's. Where no single node holds all slots there is one for each: `columns`.
    """

    node: fx.Node
    axes: tuple[str, ...]
    columns: tuple[Ref, ...] = ()
    inverted: bool = False  # a mask that is true where a slot does not count

    @property
    def form(self) -> tuple:
        """What two captures must agree on."""
        return self.axes, tuple(c.form for c in self.columns), self.inverted

    @property
    def nodes(self) -> list[fx.Node]:
        return [n for c in self.columns for n in c.nodes] if self.columns else [self.node]


@dataclasses.dataclass(frozen=True)
class Body:
    """The template of a routed summand: `op` with static `args` and bodies, or a leaf.

    Leaves: `value` (Ref), `expert` (table of `Place` by expert id), `shared` (Place), `const` (number).
    """

    op: str
    args: tuple
    shape: tuple[int, ...]


@dataclasses.dataclass
class Group:
    """Experts of one form: their ids and the body they share."""

    ids: list[int]
    body: Body
    tables: list[dict[int, Place]]
    values: list[Ref]

    @property
    def has_matrices(self) -> bool:
        """Whether some contraction of the body has an expert's matrix as an operand."""
        return any(
            b.op == "ein"
            and any(isinstance(a, Body) and a.op == "expert" and len(a.shape) >= 2 for a in b.args)
            for b in walk(self.body)
        )


@dataclasses.dataclass
class Lifted:
    """The canonical form of one capture."""

    capture: Capture
    cut: fx.Node
    tokens: tuple[int, ...]
    slots: int
    index: Ref
    ids: torch.Tensor  # int64 [T, K]
    groups: list[Group]
    shared: list[Ref]
    missed: Ref | None  # what tokens get of which no slot counts, where that is not zero
    kept: torch.Tensor  # bool [T, K]: False where the slot contributes nothing
    absorbed: set[fx.Node]
    optional: bool = False  # at sizes at which the program may go another way: the proof can do without


class Lifter:
    def __init__(self, block: nn.Module, capture: Capture, like: Lifted | None = None):
        """`like`: the form of another capture of the block; what chose the experts there is looked at first here."""
        self.block, self.capture, self.like = block, capture, like
        self.S = Semantics(capture.nodes, capture.shadow)
        self.T = self.S.T
        self.children = sibling_names(block)
        self.leaves_memo: dict[Term, frozenset[Term]] = {}
        self.skeletons: dict[Term, int] = {}
        self.numbers: dict[Place, list[int]] = {}
        self.owners: dict[Term, frozenset[int]] = {}
        self.given: set[Term] = set()  # rows of kept nodes
        self.outputs = [n for n in pytree.tree_leaves(capture.out) if isinstance(n, fx.Node)]
        self.outputs += [e.node for e in capture.effects if isinstance(e.node, fx.Node)]

    # ------------------------------------------------------------------ which parameters are the experts'
    def rows(self, node: fx.Node, lead: int | None = None) -> list[Term]:
        """The resolved rows of a node; its last axis (or all but `lead`) belongs to the row."""
        term = self.S.term(node)
        shape = term.shape[: len(term.shape) - 1 if lead is None else lead]
        if math.prod(shape) > _MOST_ROWS:
            raise Refused(f"{math.prod(shape)} rows are too many to look at", source=str(node.meta["source"]))
        return [self.T.resolve(self.T.picks(term, dict(enumerate(ix)))) for ix in itertools.product(*map(range, shape))]

    def leaves(self, t: Term) -> frozenset[Term]:
        """The parameter parts that reach a term as vectors (a scalar is a routing weight, not an expert)."""
        found = self.leaves_memo.get(t)
        if found is None:
            if is_parameter(t):
                found = frozenset([t])
            else:
                parts = [self.leaves(a) for a in t.terms if math.prod(a.shape) > 1 or is_parameter(a)]
                found = frozenset().union(*parts)
            self.leaves_memo[t] = found
        return found

    def expert_parameters(self) -> set[str]:
        """FQNs of the parameters that only some tokens meet, seen at the outputs or, behind something that mixes
        tokens, at the last node before it."""
        live = self._live()
        inner = [
            n
            for n in reversed(self.capture.nodes)
            if n in live and n not in self.outputs and n.op == "call_function"
        ]
        tried = 0
        for out in [*self.outputs, *inner]:
            val = out.meta.get("val")
            if (
                not isinstance(val, FakeTensor)
                or val.dim() < 2
                or not val.is_floating_point()
                or math.prod(val.shape[:-1]) > _MOST_ROWS
            ):
                continue
            tried += out not in self.outputs
            if tried > _MOST_NODES_BACK:
                break
            per_row = [self.leaves(r) for r in self.rows(out)]
            if not per_row:
                continue
            common = frozenset.intersection(*per_row)
            varying = frozenset().union(*per_row) - common
            if varying:
                return {parameter_of(t).args[0] for t in varying}
        return set()

    def _live(self) -> set[fx.Node]:
        """What the outputs and effects are computed from."""
        live: set[fx.Node] = set()
        stack = list(self.outputs)
        while stack:
            n = stack.pop()
            if n not in live:
                live.add(n)
                stack.extend(n.all_input_nodes)
        return live

    def _family(self, experts: set[str]) -> set[str]:
        """With parameters of some experts those of their siblings that no token met."""
        names = {n for n, _ in self.block.named_parameters(remove_duplicate=False)}
        out = set(experts)
        split = [fqn.split(".") for fqn in experts]
        for parts in split:
            for depth, part in enumerate(parts):
                siblings = self.children.get(".".join(parts[:depth]), [])
                if part not in siblings:
                    continue
                alike = [
                    p
                    for p in split
                    if len(p) == len(parts)
                    and p[:depth] == parts[:depth]
                    and p[depth + 1 :] == parts[depth + 1 :]
                ]
                if len(alike) > 1:
                    out |= {".".join([*parts[:depth], other, *parts[depth + 1 :]]) for other in siblings}
        return out & names

    def cuts(self, experts: set[str]) -> tuple[set[fx.Node], list[fx.Node]]:
        """(nodes computed from expert parameters, those among them that every routed path runs through)."""
        live = self._live()
        routed: set[fx.Node] = set()
        for n in self.capture.nodes:
            if (n.op == "get_attr" and n.meta["fqn"] in experts) or any(
                a in routed for a in n.all_input_nodes
            ):
                routed.add(n)
        order = [n for n in self.capture.nodes if n in routed and n in live]
        cuts, reach, final = [], -1, set(self.outputs)
        for n in order:
            here = n.meta["index"]
            if reach <= here and n.op != "get_attr":
                cuts.append(n)
            ends = [u.meta["index"] for u in n.users if u in live and u in routed]
            reach = max([reach, *ends] + ([len(self.capture.nodes)] if n in final else []))
        return routed, cuts

    def _inside_calls(self) -> set[fx.Node]:
        """Nodes that a submodule call without experts computes and keeps to itself: to use one would take the call
        apart, and its hooks would not fire."""
        routed = sorted(n.meta["index"] for n in self.routed if n.op != "get_attr")
        inside: set[fx.Node] = set()
        for call in self.capture.calls:
            at = bisect.bisect_left(routed, call.start)
            if at < len(routed) and routed[at] < call.stop:
                continue
            results = {n for n in pytree.tree_leaves(call.out) if isinstance(n, fx.Node)}
            inside |= {n for n in self.capture.nodes[call.start : call.stop] if n not in results}
        return inside

    # ------------------------------------------------------------------ the canonical form
    def lift(self, experts: set[str] | None = None) -> Lifted:
        try:
            try:
                return self._lift(experts)
            except Refused as refusal:
                alike = self._alike_everywhere() if experts is None and self._chooses() else None
                if not alike:
                    raise
                with contextlib.suppress(Refused):
                    return self._lift(alike)
                raise refusal from None
        except TooLarge:
            raise Refused(
                "its rows depend on too much else to be followed: rows are mixed, as in attention"
            ) from None

    def _lift(self, experts: set[str] | None) -> Lifted:
        experts = self._family(experts or self.expert_parameters())
        if not experts:
            raise Refused("no parameter is used for some tokens only: nothing is routed")
        self.experts = experts
        self.owners.clear()
        routed, cuts = self.cuts(experts)
        self.routed = routed
        self.inside = self._inside_calls()
        candidates = []
        for n in cuts:
            val = n.meta.get("val")
            if isinstance(val, FakeTensor) and val.dim() >= 2 and val.is_floating_point():
                candidates.append((math.prod(val.shape[:-1]), len(candidates), n))
        if not candidates:
            raise Refused(
                "the experts' results do not come together in one tensor",
                culprits=tuple(sorted(experts)[:3]),
                source=self._source_of(experts),
                remedy="the routed sum must be one tensor before it is used further",
            )
        first: Refused | None = None
        candidates.sort(key=lambda c: c[:2])
        at = _line(self.like.cut if self.like is not None else candidates[0][2])
        # of one line in a loop the last turn: where the last experts have no tokens, theirs may add nothing
        candidates.sort(key=lambda c: (c[0], _line(c[2]) != at, -c[1] if _line(c[2]) == at else c[1]))
        for _, _, cut in candidates[:12]:
            try:
                return self._canonical(cut)
            except Refused as refusal:
                if not refusal.source:
                    refusal = Refused(
                        refusal.reason,
                        culprits=refusal.culprits,
                        source=str(cut.meta["source"]),
                        remedy=refusal.remedy,
                    )
                first = first or refusal
        assert first is not None
        raise first

    def _chooses(self) -> bool:
        """Whether some integers with several entries per token follow from floats."""
        shapes = (n.meta["val"].shape for n in self.outputs if isinstance(n.meta.get("val"), FakeTensor))
        tokens = math.prod(next(shapes, ())[:-1])
        return any(
            isinstance(val := n.meta.get("val"), torch.Tensor)
            and not isinstance(val, FakeTensor)
            and val.dtype != torch.bool
            and val.numel() > tokens > 1
            and is_routed(n)
            for n in self.capture.nodes
        )

    def _alike_everywhere(self) -> set[str]:
        """FQNs of parameters that come in several of a kind, each of which every token meets: where every token chooses
        all experts (k = E) no parameter varies, but what was chosen is there to be found."""
        for out in self.outputs:
            val = out.meta.get("val")
            if not isinstance(val, FakeTensor) or val.dim() < 2 or math.prod(val.shape[:-1]) > _MOST_ROWS:
                continue
            met = frozenset.intersection(*[self.leaves(r) for r in self.rows(out)])
            kinds: dict[tuple, set[Place]] = defaultdict(set)
            for place in map(Place.of, met):
                if expert_indices(place, self.children):
                    kinds[re.sub(r"\d+", "#", place.fqn), place.steps and place.steps[0][0]].add(place)
            found = {p.fqn for places in kinds.values() if len(places) > 1 for p in places}
            if found:
                return found
        return set()

    def _source_of(self, experts: set[str]) -> str:
        for n in self.capture.nodes:
            if n.op == "get_attr" and n.meta["fqn"] in experts:
                for user in n.users:
                    return str(user.meta["source"])
        return ""

    def _canonical(self, cut: fx.Node) -> Lifted:
        rows = self.rows(cut)
        tokens = tuple(cut.meta["val"].shape[:-1])
        summands = [self._flatten(r) for r in rows]
        for t, parts in enumerate(summands):
            for part in parts:
                if is_const(part, "nan"):  # type: ignore[arg-type]
                    raise Refused(f"output row {t} is never written", source=str(cut.meta["source"]))
        routed = [
            [p for p in parts if any(parameter_of(x).args[0] in self.experts for x in self.leaves(p))]
            for parts in summands
        ]
        rest = [
            [p for p in parts if p not in mine]
            for parts, mine in zip(summands, map(set, routed), strict=True)
        ]

        if not any(routed):
            raise Refused("no expert's result reaches this sum", source=str(cut.meta["source"]))
        index, ids, where = self._explain(cut, tokens, routed)
        self.slot_ids = ids
        K = ids.shape[1]
        feeding = self._feeding(cut)
        self.lookup = _Lookup(self, feeding, tokens, K, int(ids.max()) + 1)
        self.given = self.lookup.rows()
        self.skeletons.clear()
        shared, rest = self._shared(rest)
        missed, rest = self._missed(rest, routed)
        chosen = ids.tolist()
        taken = [[False] * K for _ in chosen]
        instances: dict[int, list[tuple[int, int, Term]]] = defaultdict(list)
        for t, (parts, slots) in enumerate(zip(routed, where, strict=True)):
            for part, k in zip(parts, slots, strict=True):
                taken[t][k] = True
                instances[self._skeleton(part)].append((t, k, part))
        self._place_keyless(rest, chosen, taken, instances)
        kept = torch.tensor(taken)
        self.lookup.dropped = [(t, k, chosen[t][k]) for t, k in (~kept).nonzero().tolist()]
        groups = [self._group(members, chosen) for members in instances.values()]
        if not any(g.has_matrices for g in groups):
            raise Refused(
                "experts are single vectors looked up per token (retrieval), not functions with a matrix product",
                culprits=tuple(sorted(self.experts)[:3]),
            )
        owners = Counter(e for g in groups for e in g.ids)
        clash = [e for e, n in owners.items() if n > 1]
        if clash:
            raise Refused(
                f"expert {clash[0]} does not always compute the same function", source=str(cut.meta["source"])
            )
        absorbed = {n for n in self.routed if n.meta["index"] <= cut.meta["index"]}
        return Lifted(self.capture, cut, tokens, K, index, ids, groups, shared, missed, kept, absorbed)

    def _flatten(self, t: Term) -> list[Term]:
        """The summands of a row, one per expert: what one expert adds up (a bias, a residual) stays together, and
        scalar factors are distributed over sums of several experts."""
        if t.op == "pw":
            name, kwargs, *items = t.args
            if name in ("add", "sub") and all(i.shape == t.shape for i in items):
                mine = [self._experts_in(i) for i in items]
                if len(mine[0]) == 1 and mine[0] == mine[1]:
                    return [t]
                parts = self._flatten(items[1])
                if name == "sub":
                    parts = [self.T.pw("mul", p, self.T.const(-1)) for p in parts]
                return self._flatten(items[0]) + parts
            if name in ("mul", "div", "cast", "detach") and len(self._experts_in(t)) > 1:
                wide = [k for k, a in enumerate(items) if math.prod(a.shape) > 1]
                if len(wide) == 1 and not (name == "div" and wide[0] == 1):
                    inner = self._flatten(items[wide[0]])
                    return [
                        self.T.pw(
                            name, *[p if k == wide[0] else a for k, a in enumerate(items)], **dict(kwargs)
                        )
                        for p in inner
                    ]
        return [] if is_const(t, 0) else [t]

    def _experts_in(self, t: Term) -> frozenset[int]:
        """The experts (by natural index) whose parameters reach a term."""
        found = self.owners.get(t)
        if found is None:
            found = self.owners[t] = frozenset(self._natural(self._key(t), several=True))
        return found

    def _natural(self, places: tuple[Place, ...], several: bool = False) -> list[int]:
        """The expert numbers that fit all the places of a key; with `several`, of each place on its own the likeliest:
        the one that most of the other places could have too."""
        options = [self._options(p) for p in places]
        common = [i for i in (options[0] if options else []) if all(i in o for o in options)]
        if several and not common and len(places) > 1:
            votes = Counter(i for o in options for i in o)
            return sorted({min(o, key=lambda i: -votes[i]) for o in options if o})
        return common[:1]

    def _options(self, place: Place) -> list[int]:
        if place not in self.numbers:
            self.numbers[place] = expert_indices(place, self.children)
        return self.numbers[place]

    def _skeleton(self, t: Term) -> int:
        """A hash of the form of a term: which ops, not which rows, weights or parameters."""
        found = self.skeletons.get(t)
        if found is None:
            if t in self.given:
                form: Any = ("given", t.shape)
            elif is_parameter(t):
                form = ("parameter", t.shape)
            elif math.prod(t.shape) == 1 and t.op != "const":
                form = ("scalar",)
            elif t.op in ("node", "at"):
                form = (t.op, t.shape)
            else:
                form = (t.op, t.shape, *[self._skeleton(a) if isinstance(a, Term) else a for a in t.args])
            found = self.skeletons[t] = hash(form)
        return found

    # ------------------------------------------------------------------ routing
    def _key(self, t: Term) -> tuple[Place, ...]:
        mine = {Place.of(x) for x in self.leaves(t) if parameter_of(x).args[0] in self.experts}
        return tuple(sorted(mine, key=str))

    def _explain(
        self, cut: fx.Node, tokens: tuple[int, ...], routed: list[list[Term]]
    ) -> tuple[Ref, torch.Tensor, list[list[int]]]:
        """The integer node that says which experts each token used, and the slot of each summand."""
        keys = [[self._key(p) for p in parts] for parts in routed]
        natural: dict[tuple[Place, ...], int] = {}
        for key in {k for row in keys for k in row}:
            natural[key] = next(iter(self._natural(key)), -1)
        widest = max(len(row) for row in keys)
        if (
            self.like is not None
            and -1 not in natural.values()
            and (same := self._as_before(keys, natural, tokens)) is not None
        ):
            return same
        candidates = []
        for n in self.capture.nodes:
            val = n.meta.get("val")
            if (
                n in self.routed
                or not isinstance(val, torch.Tensor)
                or isinstance(val, FakeTensor)
                or val.dtype in (torch.bool, torch.uint8)
            ):
                continue
            for axes, flat in _aligned(val, tokens):
                width = flat.shape[1]
                if width <= _MOST_SLOTS:
                    candidates.append(
                        ((width != widest, n in self.inside), n.meta["index"], Ref(n, axes), flat)
                    )
        first = None
        for by_name in (True, False):
            for _, _, ref, flat in sorted(candidates, key=lambda c: c[:2]):
                if flat.shape[1] < widest:
                    continue
                names = (
                    natural
                    if by_name and -1 not in natural.values()
                    else None
                    if by_name
                    else _consistent(keys, flat)
                )
                slots = _slots(keys, flat, names) if names else None
                if slots is None:
                    continue
                owned = torch.tensor(list(names.values()))  # type: ignore[union-attr]
                unused = flat.numel() - sum(map(len, slots))
                outside = flat.numel() - int(torch.isin(flat, owned).sum())
                if unused == outside:  # ids that are nobody's say themselves which slots do not count
                    self.names = names
                    return ref, flat, slots
                first = first or (ref, flat, slots, names)
        if first is not None:
            self.names = first[3]
            return first[:3]
        combined = self._columns(keys, natural, widest, candidates) or self._mask(keys, natural, tokens)
        if combined is not None:
            return combined
        every = {k for row in keys for k in row}
        if all(len(set(row)) == len(every) for row in keys):
            raise Refused(
                "every expert is applied to every token: gates without a selection leave nothing to skip",
                source=str(cut.meta["source"]),
                remedy="select experts per token, for example with topk",
            )
        raise Refused(
            "no integer tensor with one entry per token and slot explains which experts were used",
            source=str(cut.meta["source"]),
            remedy="the experts of a token must follow from that token's own choice (token choice), "
            "not from the other tokens",
        )

    def _as_before(
        self, keys: list[list[Any]], natural: dict[Any, int], tokens: tuple[int, ...]
    ) -> tuple[Ref, torch.Tensor, list[list[int]]] | None:
        """The nodes that chose the experts in the other capture, at the same places of this one."""
        assert self.like is not None
        T = math.prod(tokens)

        def twin(ref: Ref) -> tuple[Ref, torch.Tensor] | None:
            if ref.columns:
                parts = [twin(c) for c in ref.columns]
                if any(p is None for p in parts):
                    return None
                columns = tuple(p[0] for p in parts)  # type: ignore[index]
                return Ref(columns[0].node, ref.axes, columns), torch.cat([p[1] for p in parts], dim=1)  # type: ignore[index]
            at = ref.node.meta["index"]
            node = self.capture.nodes[at] if at < len(self.capture.nodes) else None
            val = node.meta.get("val") if node is not None else None
            if (
                node is None
                or node.target != ref.node.target
                or not isinstance(val, torch.Tensor)
                or isinstance(val, FakeTensor)
            ):
                return None
            if "m" in ref.axes:
                return Ref(node, ref.axes), torch.arange(val.shape[-1]).expand(T, -1)
            found = [flat for axes, flat in _aligned(val, tokens) if axes == ref.axes]
            return (Ref(node, ref.axes), found[0]) if found else None

        found = twin(self.like.index)
        slots = _slots(keys, found[1], natural) if found is not None else None
        if found is None or slots is None:
            return None
        self.names = natural
        return found[0], found[1], slots

    def _columns(
        self, keys: list[list[Any]], natural: dict[Any, int], widest: int, candidates: list
    ) -> tuple[Ref, torch.Tensor, list[list[int]]] | None:
        """Several integer nodes with one choice each, such as a first and a second argmax."""
        if -1 in natural.values() or widest < 2:
            return None
        wanted = [{natural[k] for k in row} for row in keys]
        single = [
            (ref, flat)
            for _, _, ref, flat in sorted(candidates, key=lambda c: c[1])
            if flat.shape[1] == 1
        ]
        covering = []
        for ref, ids in single:
            hits = sum(i in w for i, w in zip(ids[:, 0].tolist(), wanted, strict=True))
            if hits * 2 > len(keys) and not any(torch.equal(ids, other) for _, other in covering):
                covering.append((ref, ids))
        for chosen in itertools.combinations(covering[:12], widest):
            ids = torch.cat([i for _, i in chosen], dim=1)
            slots = _slots(keys, ids, natural)
            if slots is not None:
                self.names = natural
                columns = tuple(r for r, _ in chosen)
                return Ref(columns[0].node, ("t", "k"), columns), ids, slots
        return None

    def _mask(
        self, keys: list[list[Any]], natural: dict[Any, int], tokens: tuple[int, ...]
    ) -> tuple[Ref, torch.Tensor, list[list[int]]] | None:
        """A mask of the chosen experts (a threshold, say): every expert is a slot, and most are dropped."""
        if -1 in natural.values():
            return None
        T, lowest = math.prod(tokens), max(natural.values()) + 1
        for n in self.capture.nodes:
            val = n.meta.get("val")
            if (
                n in self.routed
                or not isinstance(val, torch.Tensor)
                or isinstance(val, FakeTensor)
                or val.dtype != torch.bool
            ):
                continue
            if (
                tuple(val.shape[:-1]) not in (tokens, (T,))
                or not lowest <= val.shape[-1] <= _MOST_EXPERTS_OF_A_MASK
            ):
                continue
            mask = val.reshape(T, -1).tolist()
            if any(
                all(
                    {e for e, set_ in enumerate(chosen) if set_ is truth} == {natural[k] for k in row}
                    for chosen, row in zip(mask, keys, strict=True)
                )
                for truth in (True, False)
            ):
                self.names = natural
                ids = torch.arange(val.shape[-1]).expand(T, -1)
                return (
                    Ref(n, ("t",) * (val.dim() - 1) + ("m",)),
                    ids,
                    [[natural[k] for k in row] for row in keys],
                )
        return None

    def _feeding(self, cut: fx.Node) -> list[fx.Node]:
        """Float nodes that are computed without expert parameters and feed the cut."""
        seen: set[fx.Node] = set()
        stack = [cut]
        while stack:
            n = stack.pop()
            if n not in seen:
                seen.add(n)
                stack.extend(n.all_input_nodes)
        return [
            n
            for n in self.capture.nodes
            if n in seen
            and n not in self.routed
            and isinstance(n.meta.get("val"), FakeTensor)
            and n.op != "get_attr"
            and not n.meta.get("known")
        ]

    def _shared(self, rest: list[list[Term]]) -> tuple[list[Ref], list[list[Term]]]:
        """Summands that are the rows of a node which is computed without the experts, the same node for all tokens.
        Where its row is zero under this routing (a gated part that is not chosen) there is no summand."""
        refs: list[Ref] = []
        rest = [list(parts) for parts in rest]
        tried: set[Term] = set()
        for t, parts in enumerate(rest):
            for term in [p for p in parts if p not in tried]:
                tried.add(term)
                column = self.lookup.find_rows(t, term, rest)
                if column is not None:
                    refs.append(column[0])
                    for mine, found in zip(rest, column[1], strict=True):
                        if not is_const(found, 0):
                            mine.remove(found)
        return refs, rest

    def _missed(
        self, rest: list[list[Term]], routed: list[list[Term]]
    ) -> tuple[Ref | None, list[list[Term]]]:
        """What the tokens that no expert took have instead: their own row, say, which the others do not have."""
        alone = [t for t, parts in enumerate(routed) if not parts]
        if not alone or any(len(rest[t]) != 1 for t in alone) or any(rest[t] for t in range(len(rest)) if routed[t]):
            return None, rest
        ref = self.lookup.find([(t, 0, 0) for t in alone], [rest[t][0] for t in alone], slots=False)
        return (ref, [[] for _ in rest]) if ref is not None else (None, rest)

    def _place_keyless(
        self, rest: list[list[Term]], ids: list[list[int]], taken: list[list[bool]], instances: dict
    ) -> None:
        """Summands without parameters (identity experts): the slots that are left, told apart by their weights."""
        for t, parts in enumerate(rest):
            for part in [summand for whole in parts for summand in self._by_weight(whole)]:
                free = [k for k, used in enumerate(taken[t]) if not used]
                scalars = {a for a in part.terms if math.prod(a.shape) == 1}
                fits = [
                    k for k in free if any(self.lookup.value_at(t, k, ids[t][k], s) for s in scalars)
                ] or (free if len(free) == 1 else [])
                if not fits:
                    raise Refused(
                        f"a part of the output is neither an expert's nor the same for all tokens: {show(part, 3)}"
                    )
                taken[t][fits[0]] = True
                instances[self._skeleton(part)].append((t, fits[0], part))

    def _by_weight(self, t: Term) -> list[Term]:
        """`x * (w1 + w2)` as two summands: one token may choose two experts that do the same."""
        if t.op == "pw" and t.args[0] == "mul":
            a, b = t.args[2:]
            wide, scalar = (a, b) if math.prod(b.shape) == 1 else (b, a)
            if scalar.op == "pw" and scalar.args[0] == "add" and not any(self.lookup.holds(scalar)):
                return [
                    p
                    for s in scalar.args[2:]
                    for p in self._by_weight(
                        self.T.pw("mul", wide, s) if wide is a else self.T.pw("mul", s, wide)
                    )
                ]
        return [t]

    # ------------------------------------------------------------------ anti-unification
    def _group(self, members: list[tuple[int, int, Term]], ids: list[list[int]]) -> Group:
        where = [(t, k, ids[t][k]) for t, k, _ in members]
        self.tables: list[dict[int, Place]] = []
        self.values: list[Ref] = []
        self.bodies: dict[tuple[Term, ...], Body] = {}
        body = self._unify(where, [m for _, _, m in members])
        return Group(sorted({e for _, _, e in where}), body, self.tables, self.values)

    def _unify(self, where: list[tuple[int, int, int]], terms: list[Term]) -> Body:
        first = terms[0]
        key = tuple(terms)
        if key in self.bodies:
            return self.bodies[key]
        same = all(t is first for t in terms)
        if first.op == "const" and same:
            return Body("const", (number(first),), first.shape)
        if all(is_parameter(t) for t in terms) and (
            any(parameter_of(t).args[0] in self.experts for t in terms) or same
        ):
            body = self._table(where, terms, same)
        elif (ref := self.lookup.find(where, terms)) is not None:
            body = self._value(ref, first)
        else:
            try:
                body = self._decompose(where, terms)
            except Refused:
                # a value per slot that is wider than a scalar is a last resort: it exists for all slots at once
                if first.op == "const" or (ref := self.lookup.find(where, terms, wide=True)) is None:
                    raise
                body = self._value(ref, first)
        self.bodies[key] = body
        return body

    def _value(self, ref: Ref, term: Term) -> Body:
        if ref not in self.values:
            self.values.append(ref)
        return Body("value", (self.values.index(ref),), term.shape)

    def _decompose(self, where: list[tuple[int, int, int]], terms: list[Term]) -> Body:
        first = terms[0]
        for t in terms:
            if t.op != first.op or t.shape != first.shape or len(t.args) != len(first.args):
                raise Refused(
                    "experts do not compute the same function",
                    culprits=tuple(str(p) for p in {*self._key(first), *self._key(t)})[:4],
                    remedy=f"{show(first, 2)} differs from {show(t, 2)}",
                )
        if first.op in ("node", "at", "put", "index", "array"):
            raise self._foreign(first)
        args: list[Any] = []
        for position, a in enumerate(first.args):
            column = [t.args[position] for t in terms]
            if isinstance(a, Term):
                args.append(self._unify(where, column))
            elif all(c == a for c in column):
                args.append(a)
            else:
                other = next(c for c in column if c != a)
                raise Refused(f"a constant inside the experts depends on the routing: {a!r} and {other!r}")
        return Body(first.op, tuple(args), first.shape)

    def _table(self, where: list[tuple[int, int, int]], terms: list[Term], same: bool) -> Body:
        shape = terms[0].shape
        if same and parameter_of(terms[0]).args[0] not in self.experts:
            return Body("shared", (Place.of(terms[0]),), shape)
        table: dict[int, Place] = {}
        for (_, _, e), t in zip(where, terms, strict=True):
            place = Place.of(t)
            if table.setdefault(e, place) != place:
                raise Refused(
                    f"expert {e} uses {place} for one token and {table[e]} for another", culprits=(place.fqn,)
                )
            if t.shape != shape:
                raise Refused(
                    "experts have parameters of different shapes",
                    culprits=(str(place), str(next(iter(table.values())))),
                )
        if table not in self.tables:
            self.tables.append(table)
        return Body("expert", (self.tables.index(table),), shape)

    def _foreign(self, t: Term) -> Refused:
        """Something reached the routed sum that no token's own row explains."""
        node = t
        while node.terms:
            node = node.terms[0]
        if node.op == "node":
            fx_node = node.args[0]
            name = getattr(fx_node.target, "__name__", str(fx_node.target))
            if fx_node in self.routed or torch.Tag.nondeterministic_seeded in getattr(
                fx_node.target, "tags", ()
            ):
                return Refused(
                    f"the experts' computation goes through {name}, which is not row by row",
                    culprits=(name,),
                    source=str(fx_node.meta["source"]),
                )
        return Refused(f"an output row depends on something else than its own input row: {show(t, 3)}")


# ---------------------------------------------------------------------- helpers
def _line(n: fx.Node) -> tuple[Any, Any]:
    return n.target, n.meta["source"]


def walk(body: Body) -> list[Body]:
    """A body and all the bodies in it."""
    out, stack = [], [body]
    while stack:
        b = stack.pop()
        out.append(b)
        stack.extend(a for a in b.args if isinstance(a, Body))
    return out


def _aligned(val: torch.Tensor, tokens: tuple[int, ...]) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Ways to read an integer tensor as [T, K]."""
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
    return out


def _slots(keys: list[list[Any]], ids: torch.Tensor, names: dict[Any, int]) -> list[list[int]] | None:
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


def _consistent(keys: list[list[Any]], ids: torch.Tensor) -> dict[Any, int] | None:
    """A one-to-one naming of keys by ids that fits every token, if there is exactly one."""
    options: dict[Any, set[int]] = {}
    for row, chosen in zip(keys, ids.tolist(), strict=True):
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


class _Lookup:
    """Finds the node whose elements are given terms: weights and input rows are recognised by what they are."""

    def __init__(
        self, lifter: Lifter, nodes: list[fx.Node], tokens: tuple[int, ...], slots: int, experts: int
    ):
        self.lifter, self.tokens, self.slots, self.experts = lifter, tokens, slots, experts
        self.T = math.prod(tokens)
        self.positions = list(itertools.product(*map(range, tokens)))
        self.dropped: list[tuple[int, int, int]] = []
        self.readings: list[tuple[tuple[bool, bool, int], int, Ref]] = []
        before = {  # at a single token several readings fit: as in the other capture is best
            (ref.node.meta["index"], ref.axes)
            for group in (lifter.like.groups if lifter.like is not None else ())
            for value in group.values
            for ref in (value.columns or (value,))
        }
        for n in nodes:
            for rank, axes in self._axes(tuple(n.meta["val"].shape)):
                index = n.meta["index"]
                self.readings.append((((index, axes) not in before, n in lifter.inside, rank), index, Ref(n, axes)))
        self.readings.sort(key=lambda r: r[:2])
        self._tables: dict[tuple, dict[Term, list[Ref]]] = {}

    def _axes(self, shape: tuple[int, ...]) -> list[tuple[int, tuple[str, ...]]]:
        T, K, out = self.T, self.slots, []
        for lead in dict.fromkeys([(T,), self.tokens]):
            n = len(lead)
            t = ("t",) * n
            extra = 0 if n == 1 else 1
            if shape[:n] == lead:
                out.append((extra, t))
                if shape[n : n + 1] == (K,):
                    out.append((extra, (*t, "k")))
                if len(shape) > n and shape[n] >= self.experts:
                    out.append((4 + extra, (*t, "e")))
            if shape[:1] == (K,) and shape[1 : n + 1] == lead:
                out.append((2 + extra, ("k", *t)))
            if len(shape) > n and shape[0] >= self.experts and shape[1 : n + 1] == lead:
                out.append((6 + extra, ("e", *t)))
        if shape[:1] == (T * K,) and K > 1:
            out += [(3, ("tk",)), (3, ("kt",))]
        if shape and shape[0] >= self.experts and shape[0] != T:
            out.append((8, ("e",)))
        if math.prod(shape) == 1:
            out.append((9, ()))
        return out

    def element(self, ref: Ref, t: int, k: int, e: int) -> Term | None:
        if ref.columns:
            ref = ref.columns[k]
        term = self.lifter.S.term(ref.node)
        position = self.positions[t]
        where: dict[int, int] = {}
        seen = 0
        many = ref.axes.count("t") > 1
        for axis, kind in enumerate(ref.axes):
            i = {"k": k, "e": e, "tk": t * self.slots + k, "kt": k * self.T + t}.get(kind)
            if i is None:
                i = position[seen] if many else t
                seen += 1
            if not 0 <= i < term.shape[axis]:
                return None
            where[axis] = i
        return self.lifter.T.resolve(self.lifter.T.picks(term, where))

    def rows(self) -> set[Term]:
        """The rows, one per token, of all readings that have one."""
        out = set()
        for _, _, ref in self.readings:
            if set(ref.axes) == {"t"} and len(ref.node.meta["val"].shape) > len(ref.axes):
                out |= {r for t in range(self.T) if (r := self.element(ref, t, 0, 0)) is not None}
        return out

    def find(
        self, where: list[tuple[int, int, int]], terms: list[Term], slots: bool = True, wide: bool = False
    ) -> Ref | None:
        """The node (and reading) whose element at every place is the given term. A value that is not a scalar must
        be one per token, unless `wide`."""
        at = where[0]
        if (at, slots) not in self._tables:
            table: dict[Term, list[Ref]] = defaultdict(list)
            for _, _, ref in self.readings:
                if slots or set(ref.axes) == {"t"}:
                    found = self.element(ref, *at)
                    if found is not None:
                        table[found].append(ref)
            self._tables[at, slots] = table
        scalar = math.prod(terms[0].shape) == 1
        first: Ref | None = None
        for ref in self._tables[at, slots].get(terms[0], ()):
            if not (scalar or wide or set(ref.axes) <= {"t"}):
                continue
            if all(self.element(ref, *place) is term for place, term in zip(where, terms, strict=True)):
                if not (scalar and self.dropped) or self._zero_where_dropped(ref):
                    return ref
                first = first or ref
        if first is None and scalar and slots and self.slots > 1:
            return self._columns(where, terms)
        return first

    def find_rows(self, t: int, term: Term, rest: list[list[Term]]) -> tuple[Ref, list[Term]] | None:
        """The node whose row `t` is `term`, and whose other rows are among what is left of the sums, or zero."""
        for _, _, ref in self.readings:
            if set(ref.axes) != {"t"} or self.element(ref, t, 0, 0) is not term:
                continue
            column = [self.element(ref, i, 0, 0) for i in range(self.T)]
            if all(r is not None and (is_const(r, 0) or r in parts) for r, parts in zip(column, rest, strict=True)):
                return ref, column  # type: ignore[return-value]
        return None

    def _zero_where_dropped(self, ref: Ref) -> bool:
        """Whether a weight says itself which slots count."""
        return all(
            (found := self.element(ref, *place)) is None or is_const(found, 0) for place in self.dropped
        )

    def _columns(self, where: list[tuple[int, int, int]], terms: list[Term]) -> Ref | None:
        """One node for each slot."""
        columns = []
        for k in range(self.slots):
            mine = [(place, term) for place, term in zip(where, terms, strict=True) if place[1] == k]
            if not mine or len(mine) == len(where):
                return None
            first, wanted = mine[0]
            found = None
            for _, _, ref in self.readings:
                if (
                    {"k", "tk", "kt"} & set(ref.axes)
                    or "t" not in ref.axes
                    or self.element(ref, *first) is not wanted
                ):
                    continue
                if all(self.element(ref, *place) is term for place, term in mine):
                    found = ref
                    break
            if found is None:
                return None
            columns.append(found)
        return Ref(columns[0].node, ("t", "k"), tuple(columns))

    def holds(self, term: Term) -> list[Ref]:
        """Readings that have this term somewhere (looked for at the first places only)."""
        return [ref for table in self._tables.values() for ref in table.get(term, ())]

    def value_at(self, t: int, k: int, e: int, term: Term) -> bool:
        return any(
            self.element(ref, t, k, e) is term
            for _, _, ref in self.readings
            if "k" in ref.axes or "e" in ref.axes
        )
