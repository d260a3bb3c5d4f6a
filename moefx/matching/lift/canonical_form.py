"""The canonical form of one capture, as data.

    out[t] = residual(t) + sum over k of F(x[t], weight[t,k]; parameters of expert index[t,k])

`Body` is F, `NodeRef` names the nodes that supply index, weights and shared summands, and `CapturedGroup` lists the
experts that compute one F. `Lifter` builds a `CanonicalForm`; `require_same_form` compares two.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import fx

from ...capture.environment.code_locations import Source
from ...capture.sizes.size_guards import SizeGuard
from ...capture.tracing.capture_result import Capture
from ..terms.parameter_slices import ParameterSlice
from .lift_options import LiftOptions

SlotPosition = tuple[int, int, int]  # token, slot, expert
Axis = Literal["t", "k", "e", "tk", "kt", "m", "s"]  # see `NodeRef`


@dataclasses.dataclass(frozen=True)
class NodeRef:
    """A node outside the routed region that supplies a value for each token and slot.

    Attributes:
        node: the node, or the first of `columns`.
        axes: the meaning of the node's leading axes; the other axes belong to the value. `t` is a token axis (one or
            several), `k` the slots, `e` the experts, `tk` and `kt` flattened pairs, `m` the experts of a mask, `s` the
            sequences, if all tokens of a sequence share a value.
        columns: one reference per slot, if no single node holds all slots.
        inverted: whether the node is a mask that is true for dropped slots.
    """

    node: fx.Node
    axes: tuple[Axis, ...]
    columns: tuple[NodeRef, ...] = ()
    inverted: bool = False

    @property
    def signature(self) -> tuple:
        """The part of the reference that two captures must agree on."""
        return self.axes, tuple(c.signature for c in self.columns), self.inverted

    @property
    def position(self) -> tuple:
        """The node's index and axes, which identify it in every capture that runs the same ops."""
        return self.node.meta["index"], self.axes

    @property
    def is_per_token(self) -> bool:
        """Whether it has one value for each token, the same for all slots."""
        return set(self.axes) == {"t"}

    @property
    def has_slots(self) -> bool:
        """Whether it has a value for each slot."""
        return not {"k", "tk", "kt"}.isdisjoint(self.axes)

    @property
    def has_experts(self) -> bool:
        """Whether it has a value for each expert."""
        return "e" in self.axes

    @property
    def is_same_for_slots(self) -> bool:
        """Whether its values depend at most on the token or its sequence."""
        return set(self.axes) <= {"t", "s"}

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of all columns, or the single node."""
        return [n for c in self.columns for n in c.nodes] if self.columns else [self.node]


@dataclasses.dataclass(frozen=True)
class Body:
    """The common part of routed summands: an `op` of a `Term` whose `args` are bodies and static values, or a leaf.

    | leaf | args |
    |---|---|
    | `value` | index into `CapturedGroup.values`: a value per token and slot |
    | `expert` | index into `CapturedGroup.tables`: a parameter slice per expert |
    | `shared` | a `ParameterSlice` that all experts use |
    | `const` | a number |

    A body without a `value` leaf is the same for all rows of an expert (see `is_weight`).
    """

    op: str
    args: tuple
    shape: tuple[int, ...]


@dataclasses.dataclass
class CapturedGroup:
    """The experts of one capture that share a body.

    Attributes:
        ids: expert ids.
        body: the function that each of them computes.
        tables: for each `expert` leaf, the parameter slice by expert id.
        values: for each `value` leaf, the node that supplies it.
    """

    ids: list[int]
    body: Body
    tables: list[dict[int, ParameterSlice]]
    values: list[NodeRef]


@dataclasses.dataclass(frozen=True)
class CanonicalForm:
    """The canonical form of one capture, with T tokens and K slots.

    Attributes:
        cut: the node at which all routed rows are summed.
        tokens: the leading axes of the cut; their product is T.
        slots: K.
        expert_index: the node that holds the selected experts.
        ids: the selected experts.
        groups: the experts, by body.
        shared: nodes whose rows are added for all tokens.
        unrouted_value: the output of tokens without a kept slot, if it is not zero.
        kept_slots: False if the slot contributes nothing.
        replaced_nodes: nodes that the form replaces, up to the cut.
        expert_parameters: FQNs of the experts' parameters.
        options: the interpretation of the program under which the capture was lifted.
        expert_numbers: expert number by FQN, for experts that no single list numbers.
        repeated_tokens: tokens that selected an expert more than once.
        optional_guard: set if the proof may drop this form and guard on the sizes instead.
        forced_read: the branch of Python code that this capture forced the other way.
    """

    capture: Capture
    cut: fx.Node
    tokens: tuple[int, ...]
    slots: int
    expert_index: NodeRef
    ids: torch.Tensor  # int64 [T, K]
    groups: list[CapturedGroup]
    shared: list[NodeRef]
    unrouted_value: NodeRef | None
    kept_slots: torch.Tensor  # bool [T, K]
    replaced_nodes: set[fx.Node]
    expert_parameters: frozenset[str] = frozenset()
    options: LiftOptions = dataclasses.field(default_factory=LiftOptions)
    expert_numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    repeated_tokens: set[int] = dataclasses.field(default_factory=set)
    optional_guard: SizeGuard | None = None
    forced_read: Source | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the capture, by dim."""
        return self.capture.sizes.dims

    def list_choices(self) -> torch.Tensor:
        """Return the choices of each token [T, K], also of a form whose rows are the slots of all tokens."""
        tokens = self.capture.sizes.tokens
        return self.ids.reshape(tokens, -1) if len(self.ids) % tokens == 0 else self.ids


def count_sequences(capture: Capture, tokens: tuple[int, ...]) -> int:
    """Count the sequences of the hidden states; 0 if these have no sequence axis. The model may fix the length."""
    sizes = capture.sizes
    dims = list(sizes.dims.values())
    has_axis = len(dims) > 1 or (bool(dims) and sizes.tokens > dims[0])
    return dims[0] if has_axis and math.prod(tokens) == sizes.tokens else 0


def merge_experts(forms: Sequence[CanonicalForm]) -> CanonicalForm:
    """Return the first form, with the experts of all forms in its groups."""
    groups = []
    for group in forms[0].groups:
        alike = [g for form in forms for g in form.groups if g.body == group.body]
        tables = [{e: p for g in alike for e, p in g.tables[j].items()} for j in range(len(group.tables))]
        groups.append(dataclasses.replace(group, ids=sorted({e for g in alike for e in g.ids}), tables=tables))
    return dataclasses.replace(forms[0], groups=groups)


def has_matrix_products(body: Body) -> bool:
    """Return whether the body contains a product with an expert's matrix."""
    return any(
        b.op == "einsum" and any(isinstance(a, Body) and len(a.shape) >= 2 and is_weight(a) for a in b.args)
        for b in walk_body(body)
    )


def is_weight(body: Body) -> bool:
    """Return whether the body depends only on an expert's parameters: a normalised, quantised or masked weight."""
    leaves = {b.op for b in walk_body(body)}
    return "expert" in leaves and "value" not in leaves


def walk_body(body: Body) -> list[Body]:
    """List the body and all bodies in it."""
    out, stack = [], [body]
    while stack:
        b = stack.pop()
        out.append(b)
        stack.extend(a for a in b.args if isinstance(a, Body))
    return out


def max_capture_tokens(forms: Sequence[CanonicalForm], times: int) -> float:
    """Limit the size of further captures, which are slow if the program loops over tokens.

    Returns:
        `times` the largest number of tokens of these captures if a line runs once per token; otherwise infinity.
    """
    return times * max(math.prod(form.tokens) for form in forms) if _loops_over_tokens(forms) else math.inf


def _loops_over_tokens(forms: Sequence[CanonicalForm]) -> bool:
    """Return whether the most frequent line runs at least once per token, and more often for more tokens."""
    counts: dict[int, list[int]] = {}  # runs of the most frequent line, by number of tokens
    for form in forms:
        lines = Counter((n.meta["source"], str(n.target)) for n in form.capture.nodes if n.op == "call_function")
        counts.setdefault(math.prod(form.tokens), []).append(max(lines.values(), default=0))
    by_tokens = [counts[tokens] for tokens in sorted(counts)]
    is_growing = all(max(few) < min(many) for few, many in itertools.pairwise(by_tokens))
    return len(counts) > 1 and is_growing and all(min(runs) >= tokens for tokens, runs in counts.items())
