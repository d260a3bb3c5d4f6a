"""The canonical form: `out[t] = shared(x_t) + sum_k F(x_t, c[t,k]; theta[idx[t,k]])`, as data (design section 3.3)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from ...capture.captured import Capture
from ...capture.sizes import SizeGuard
from ...capture.source import Source
from ..terms.parameter_places import ParameterSlice


@dataclasses.dataclass(frozen=True)
class NodeRef:
    """A kept node that supplies a value of each (token, slot): which node, and how it is indexed.

    `axes` says what the node's leading axes are: `t` the tokens (one axis or several), `k` the slots, `e` the experts;
    `tk` and `kt` flattened pairs; `m` the experts where the node is a mask of the chosen ones; `s` the sequences, if
    all tokens of a sequence have one value. The remaining axes are the value's. Where no single node holds all slots
    there is one for each: `columns`.
    """

    node: fx.Node
    axes: tuple[str, ...]
    columns: tuple[NodeRef, ...] = ()
    inverted: bool = False  # a mask that is true where a slot does not count

    @property
    def form(self) -> tuple:
        """What two captures must agree on."""
        return self.axes, tuple(c.form for c in self.columns), self.inverted

    @property
    def position(self) -> tuple:
        """Where it is in any capture that runs the same ops, and how it is read."""
        return self.node.meta["index"], self.axes

    @property
    def nodes(self) -> list[fx.Node]:
        return [n for c in self.columns for n in c.nodes] if self.columns else [self.node]


@dataclasses.dataclass(frozen=True)
class Body:
    """The template of a routed summand: `op` with static `args` and bodies, or a leaf.

    Leaves: `value` (Ref), `expert` (table of `Place` by expert id), `shared` (Place), `const` (number). What no
    `value` reaches is the same for all rows of an expert: see `is_weight`.
    """

    op: str
    args: tuple
    shape: tuple[int, ...]


@dataclasses.dataclass
class Group:
    """Experts of one form: their ids and the body they share."""

    ids: list[int]
    body: Body
    tables: list[dict[int, ParameterSlice]]
    values: list[NodeRef]


@dataclasses.dataclass
class CanonicalForm:
    """The canonical form of one capture."""

    capture: Capture
    cut: fx.Node
    tokens: tuple[int, ...]
    slots: int
    expert_index: NodeRef
    ids: torch.Tensor  # int64 [T, K]
    groups: list[Group]
    shared: list[NodeRef]
    unrouted_value: NodeRef | None  # what tokens get of which no slot counts, where that is not zero
    kept_slots: torch.Tensor  # bool [T, K]: False where the slot contributes nothing
    replaced_nodes: set[fx.Node]
    expert_numbers: dict[str, int] = dataclasses.field(default_factory=dict)  # of experts that no single list numbers
    repeated_tokens: set[int] = dataclasses.field(
        default_factory=set
    )  # tokens that have chosen an expert more than once
    optional_guard: SizeGuard | None = None  # the proof can do without it, where a form holds for these sizes only
    forced_read: Source | None = None  # the branch of Python's that was made to go the other way here


def count_sequences(lifted_from: Capture, tokens: tuple[int, ...]) -> int:
    """How many sequences the tokens are of, if the hidden states have an axis for them; else 0. The model may fix their
    length."""
    sizes = lifted_from.sizes
    dims = list(sizes.dims.values())
    has_axis = len(dims) > 1 or (bool(dims) and sizes.tokens > dims[0])
    return dims[0] if has_axis and math.prod(tokens) == sizes.tokens else 0


def merge_experts(several: Sequence[CanonicalForm]) -> CanonicalForm:
    """The form of the first capture, with all experts that any capture met."""
    groups = []
    for group in several[0].groups:
        met = [g for one in several for g in one.groups if g.body == group.body]
        tables = [{e: p for g in met for e, p in g.tables[j].items()} for j in range(len(group.tables))]
        groups.append(dataclasses.replace(group, ids=sorted({e for g in met for e in g.ids}), tables=tables))
    return dataclasses.replace(several[0], groups=groups)


def has_matrix_products(body: Body) -> bool:
    """Whether some contraction has an expert's matrix as an operand."""
    return any(
        b.op == "ein" and any(isinstance(a, Body) and len(a.shape) >= 2 and is_weight(a) for a in b.args)
        for b in walk_body(body)
    )


def is_weight(body: Body) -> bool:
    """Whether a body is computed from an expert's parameters alone: normalised, quantised, masked weights."""
    leaves = {b.op for b in walk_body(body)}
    return "expert" in leaves and "value" not in leaves


def walk_body(body: Body) -> list[Body]:
    """A body and all the bodies in it."""
    out, stack = [], [body]
    while stack:
        b = stack.pop()
        out.append(b)
        stack.extend(a for a in b.args if isinstance(a, Body))
    return out


def max_capture_tokens(lifted: Sequence[CanonicalForm], times: int) -> float:
    """Up to how many tokens captures are worth their time: `times` as many as there were if a line runs once for each
    token, any number if not."""
    return times * max(math.prod(one.tokens) for one in lifted) if _loops_over_tokens(lifted) else math.inf


def _loops_over_tokens(lifted: Sequence[CanonicalForm]) -> bool:
    counts: dict[int, list[int]] = {}
    for one in lifted:
        lines = Counter((n.meta["source"], str(n.target)) for n in one.capture.nodes if n.op == "call_function")
        counts.setdefault(math.prod(one.tokens), []).append(max(lines.values(), default=0))
    by_tokens = [counts[tokens] for tokens in sorted(counts)]
    grow = all(max(few) < min(many) for few, many in itertools.pairwise(by_tokens))
    return len(counts) > 1 and grow and all(min(found) >= tokens for tokens, found in counts.items())
