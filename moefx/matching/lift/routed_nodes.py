"""What is routed: the parameters that only some tokens meet, and the nodes where all their results come together."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.captured import Capture, decided_by_floats, remembered
from ...errors import Refused
from ...ir.expression_check import is_pointwise
from ..graph_nodes import Line, follows_from_state, is_known, is_routed, line, op_name
from ..terms.node_semantics import Semantics
from ..terms.parameter_places import (
    ParameterSlice,
    find_siblings,
    guess_experts,
    is_parameter_slice,
    number_nested_modules,
    strip_moves,
)
from ..terms.term import Term, TooLarge, is_const
from .canonical_form import CanonicalForm

_MOST_ROWS = 1 << 14
_MOST_NODES_BACK = 60


class ParameterReach:
    """What reaches the rows of the nodes of one capture, as terms.

    Attributes:
        children: the numbered parts of every module of the block.
        nested: numbers of the modules in lists of lists.
        outputs: the nodes that the call returns or leaves behind.
        apart: the axes along which rows meet parts of a parameter, by FQN.
    """

    def __init__(
        self, block: nn.Module, capture: Capture, symbolic: bool = False, like: CanonicalForm | None = None,
        whole: frozenset[Line] = frozenset(),
    ):  # fmt: skip
        self.block, self.capture = block, capture
        tables = [table for group in like.groups for table in group.tables] if like is not None else []
        self.apart = {place.fqn: place.axes for table in tables for place in table.values()}
        self.S = Semantics(capture.nodes, capture.shadow, symbolic, whole)
        self.T = self.S.T
        self.children, self.nested = find_siblings(block), number_nested_modules(block)
        results = [capture.out, *[e.node for e in capture.effects if e.kind != "state"]]
        self.outputs = [n for n in pytree.tree_leaves(results) if isinstance(n, fx.Node)]
        self._leaves: dict[Term, frozenset[Term]] = {}

    def rows(self, node: fx.Node, lead: int | None = None) -> list[Term]:
        """The resolved rows of a node; its last axis (or all but `lead`) belongs to the row."""
        term = self.S.term(node)
        shape = term.shape[: len(term.shape) - 1 if lead is None else lead]
        if math.prod(shape) > _MOST_ROWS:
            raise Refused(f"{math.prod(shape)} rows are too many to look at", source=str(node.meta["source"]))
        return [
            self.T.resolve(self.T.pick_axes(term, dict(enumerate(ix)))) for ix in itertools.product(*map(range, shape))
        ]

    def leaves(self, t: Term) -> frozenset[Term]:
        """The parameter parts that reach a term as vectors (a scalar is a routing weight, not an expert)."""
        found = self._leaves.get(t)
        if found is None:
            if is_parameter_slice(t):
                found = frozenset([t])
            else:
                is_single = math.prod(t.shape) == 1
                parts = [
                    self.leaves(a) for a in t.terms if is_single or math.prod(a.shape) > 1 or is_parameter_slice(a)
                ]
                found = frozenset().union(*parts)
                if is_single:
                    found = frozenset(p for p in found if strip_moves(p).args[0] not in self.choice_parameters)
            self._leaves[t] = found
        return found

    @functools.cached_property
    def choice_parameters(self) -> set[str]:
        """FQNs of the parameters that choices are made with."""
        choices = [n for n in self.capture.nodes if decided_by_floats(n)]
        return {n.meta["fqn"] for n in collect_ancestors(*choices) if n.op == "get_attr"}

    def parameters_by_row(self, node: fx.Node, experts: Collection[str] | None = None) -> list[frozenset[Term]]:
        """The parameter parts that reach each row of a node. Where a mask lets all experts of a row pass, it is no mask
        there, and the sum over them one product: it is taken apart as in the other rows.

        Args:
            experts: FQNs of the experts' parameters, if they are known. Products with others stay whole: rows of an
                image's channels meet parts of a norm's weight, rows of its pixels the whole.
        """
        found = [self.leaves(r) for r in self.rows(node)]
        stacked = _find_stacked(found, self.apart)
        if stacked := {t: axes for t, axes in stacked.items() if experts is None or t.args[0] in experts}:
            self.T.mark_routed(stacked)
            self._leaves.clear()
            found = [self.leaves(r) for r in self.rows(node)]
        return found

    def live_nodes(self) -> set[fx.Node]:
        """What the outputs and effects are computed from."""
        return collect_ancestors(*self.outputs)


def find_padding_lines(block: nn.Module, capture: Capture, width: int) -> frozenset[Line]:
    """Lines at which some rows of hidden states are set to a constant, by a mask that is given, or appended: these rows
    do not show what is made of the others."""
    reach, behind, found = ParameterReach(block, capture), set[fx.Node](), set[Line]()
    for n in capture.nodes:
        val = n.meta.get("val")
        if not isinstance(val, FakeTensor) or val.dim() < 2 or not val.is_floating_point() or is_known(n):
            continue
        if not behind.isdisjoint(n.all_input_nodes):
            behind.add(n)
        elif val.shape[-1] == width and 0 < math.prod(val.shape[:-1]) <= _MOST_ROWS:
            with contextlib.suppress(Refused, TooLarge):
                if {is_const(row) for row in reach.rows(n)} == {True, False}:
                    behind.add(n)
                    found.add(line(n))
    return frozenset(found)


def has_rows_of_padding(capture: Capture, width: int) -> bool:
    """Whether some hidden states have more rows than tokens, but not K for each: padded to a multiple of 8, say."""
    tokens = max(1, capture.sizes.tokens)
    for n in capture.nodes:
        val = n.meta.get("val")
        if isinstance(val, FakeTensor) and val.dim() >= 2 and val.shape[-1] == width and not n.meta.get("ragged"):
            rows = math.prod(val.shape[:-1])
            if rows > tokens and rows % tokens:
                return True
    return False


def propose_expert_parameters(reach: ParameterReach) -> Iterator[list[set[str]]]:
    """Sets of FQNs that may be the experts' parameters, the likeliest first.

    They are the parameters that only some tokens meet, with their siblings, seen at the outputs or, behind something
    that mixes tokens, at the last node before it. Then what is seen further back and has none of these: rows of an
    image's channels, say, meet the parts of a norm's weight."""
    live = reach.live_nodes()
    inner = [
        n for n in reversed(reach.capture.nodes) if n in live and n not in reach.outputs and n.op == "call_function"
    ]
    tried, before = 0, set()
    for out in [*reach.outputs, *inner]:
        val = out.meta.get("val")
        if (
            not isinstance(val, FakeTensor)
            or val.dim() < 2
            or not val.is_floating_point()
            or math.prod(val.shape[:-1]) > _MOST_ROWS
            or follows_from_state(out)  # its rows are no tokens
        ):
            continue
        tried += out not in reach.outputs
        if tried > _MOST_NODES_BACK:
            break
        per_row = reach.parameters_by_row(out)
        if not per_row:
            continue
        common = frozenset.intersection(*per_row)
        more = [met for met in per_row if met != common]  # not padding, say: what all others meet is no expert's
        if more and (of_all := frozenset.intersection(*more)) != frozenset().union(*more):
            common = of_all
        varying = frozenset().union(*per_row) - common
        if varying:
            found = {strip_moves(t).args[0] for t in varying}
            experts = add_siblings(reach, found)
            if not experts & before:
                before |= experts
                every = experts & ({strip_moves(t).args[0] for t in common} - found)  # a shared one of the same list
                rest = experts - _find_tables(reach, varying)
                yield _distinct([rest, experts, experts - every, rest - _find_choice_parameters(reach, experts)])


def _distinct(sets: list[set[str]]) -> list[set[str]]:
    return [s for i, s in enumerate(sets) if s and s not in sets[:i]]


def _find_tables(reach: ParameterReach, varying: frozenset[Term]) -> set[str]:
    """FQNs of parameters from which tokens look up single vectors, as they do from embeddings. A parameter that has one
    vector for each expert is none: it is as long as a stack of matrices or a list of modules."""
    lengths: dict[str, set[int]] = defaultdict(set)  # of what may be a table
    experts: set[int] = set()
    for t in varying:
        fqn, length = strip_moves(t).args[0], _count_parts(t)
        if len(t.shape) == 1 and length > 1:
            lengths[fqn].add(length)
        elif length > 1:
            experts.add(length)
        experts |= {len(reach.children.get(fqn[:i], ())) for i, c in enumerate(fqn) if c == "."}
    return {fqn for fqn, found in lengths.items() if not found & experts}


def _count_parts(t: Term) -> int:
    """How many parts like this one its parameter has."""
    count = 1
    while t.op != "param":
        if t.op == "at":
            count = math.prod(t.terms[0].shape[axis] for axis, _ in t.args[1])
        elif t.op == "slice":
            count = t.terms[0].shape[t.args[1]] // max(1, t.shape[t.args[1]])
        t = t.terms[0]
    return count


def _find_choice_parameters(reach: ParameterReach, parameters: set[str]) -> set[str]:
    """Which of these parameters choices are computed from: those of an earlier layer, of a router, of an embedding."""
    decided = [n for n in reach.capture.nodes if n.op == "call_function" and decided_by_floats(n)]
    return {
        str(n.meta["fqn"]) for n in collect_ancestors(*decided) if n.op == "get_attr" and n.meta["fqn"] in parameters
    }


def _find_stacked(per_row: list[frozenset[Term]], apart: dict[str, frozenset[int]]) -> dict[Term, frozenset[int]]:
    """Parameters that a row meets as a whole, of which others meet parts, with the axes along which these are parts.

    Args:
        apart: what is known of these axes, to which is added.
    """
    whole: set[Term] = set()
    both: set[Term] = set()  # in one row: an expert's part, and something of all experts
    for met in per_row:
        axes = {t: _find_split_axes(t) for t in met}
        parts, all_of = ({strip_moves(t) for t, at in axes.items() if bool(at) is has} for has in (True, False))
        both |= parts & all_of
        whole |= all_of
        for t, at in axes.items():
            fqn = strip_moves(t).args[0]
            apart[fqn] = apart.get(fqn, frozenset()) | at
    return {t: apart[t.args[0]] for t in whole - both if apart[t.args[0]]}


def _find_split_axes(t: Term) -> frozenset[int]:
    """Of its parameter, those at which a part has one place."""
    found = frozenset()
    while t.op != "param":
        found = frozenset(axis for axis, _ in t.args[1]) if t.op == "at" else found
        t = t.terms[0]
    return found


def add_siblings(reach: ParameterReach, experts: set[str]) -> set[str]:
    """With parameters of some experts those of their siblings that no token met."""
    names = {n for n, _ in reach.block.named_parameters(remove_duplicate=False)}
    out = set(experts)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)  # by what stands before and behind the part's name
    for fqn in experts:
        parts = fqn.split(".")
        for depth, part in enumerate(parts):
            alike[".".join(parts[:depth]), ".".join(parts[depth + 1 :])].append(part)
    for (before, behind), parts in alike.items():
        siblings = reach.children.get(before)
        if siblings is not None and len(parts) > 1 and any(part in siblings.numbers for part in parts):
            out |= {".".join(filter(None, (before, other, behind))) for other in siblings}
    return out & names


def number_by_tokens(
    reach: ParameterReach, cut: fx.Node, experts: set[str], known: dict[str, int]
) -> dict[str, int] | None:
    """Number experts that are in no list by the tokens of which the rows of `cut` meet their parameters: parameters
    that the same tokens meet are one expert's.

    Args:
        experts: FQNs of their parameters.
        known: numbers by FQN that another capture has shown.

    Returns:
        The numbers by FQN; None if all parameters meet the same tokens, or a list numbers the experts.
    """
    tokens: dict[str, set[int]] = defaultdict(set)
    for token, met in enumerate(reach.parameters_by_row(cut, experts)):
        for fqn in {strip_moves(t).args[0] for t in met} & experts:
            tokens[fqn].add(token)
    kinds: dict[frozenset[int], list[str]] = defaultdict(list)
    for fqn in [name for name, _ in reach.block.named_parameters(remove_duplicate=False) if name in tokens]:
        kinds[frozenset(tokens[fqn])].append(fqn)
    numbers, highest = dict(known), max(known.values(), default=-1)
    for names in kinds.values():
        before = {known[name] for name in names if name in known}
        if len(before) > 1:  # these tokens chose several experts
            continue
        highest += not before
        numbers |= dict.fromkeys(names, before.pop() if before else highest)
    return numbers if len(kinds) > 1 or known else None


def find_families_met_by_all(reach: ParameterReach) -> set[str]:
    """FQNs of parameters that come in several of a kind, each of which every token meets: where every token chooses
    all experts (k = E) no parameter varies, but what was chosen is there to be found."""
    for out in reach.outputs:
        val = out.meta.get("val")
        if not isinstance(val, FakeTensor) or val.dim() < 2 or math.prod(val.shape[:-1]) > _MOST_ROWS:
            continue
        met = frozenset.intersection(*[reach.leaves(r) for r in reach.rows(out)])
        kinds: dict[tuple, set[ParameterSlice]] = defaultdict(set)
        for place in map(ParameterSlice.from_term, met):
            if guess_experts(place, reach.children):
                kinds[re.sub(r"\d+", "#", place.fqn), place.steps and place.steps[0][0]].add(place)
        found = {p.fqn for places in kinds.values() if len(places) > 1 for p in places}
        if found:
            return add_siblings(reach, found)
    return set()


def has_integer_choices(reach: ParameterReach) -> bool:
    """Whether some integers with several entries per token follow from floats."""
    shapes = (n.meta["val"].shape for n in reach.outputs if isinstance(n.meta.get("val"), FakeTensor))
    tokens = math.prod(next(shapes, ())[:-1])
    return any(
        isinstance(val := n.meta.get("val"), torch.Tensor)
        and not isinstance(val, FakeTensor)
        and val.dtype != torch.bool
        and val.numel() > tokens > 1
        and is_routed(n)
        for n in reach.capture.nodes
    )


def has_sequence_choices(capture: Capture) -> bool:
    """Whether some integers have one entry, or a few, for each sequence: few sequences may all choose the same."""
    dims = list(capture.sizes.dims.values())
    has_axis = len(dims) > 1 or (bool(dims) and capture.sizes.tokens > dims[0])
    return has_axis and any(
        isinstance(val := n.meta.get("val"), torch.Tensor)
        and not isinstance(val, FakeTensor)
        and val.dtype != torch.bool
        and val.shape[:1] == (dims[0],)
        and val.dim() <= 2
        and tuple(val.shape) != tuple(dims)
        for n in capture.nodes
    )


def find_cuts(reach: ParameterReach, experts: set[str]) -> tuple[set[fx.Node], list[fx.Node]]:
    """(nodes computed from expert parameters, those among them that every routed path runs through)."""
    live = reach.live_nodes()
    routed: set[fx.Node] = set()
    for n in reach.capture.nodes:
        if (n.op == "get_attr" and n.meta["fqn"] in experts) or any(a in routed for a in n.all_input_nodes):
            routed.add(n)
    order = [n for n in reach.capture.nodes if n in routed and n in live]
    found, last, final = [], -1, set(reach.outputs)
    for n in order:
        here = n.meta["index"]
        if last <= here and n.op != "get_attr":
            found.append(n)
        ends = [u.meta["index"] for u in n.users if u in live and u in routed]
        last = max([last, *ends] + ([len(reach.capture.nodes)] if n in final else []))
    return routed, found


def find_call_internals(capture: Capture, routed: set[fx.Node]) -> set[fx.Node]:
    """Nodes that a submodule call without experts computes and keeps to itself: to use one would take the call
    apart, and its hooks would not fire."""
    order = sorted(n.meta["index"] for n in routed if n.op != "get_attr")
    inside: set[fx.Node] = set()
    for call in capture.calls:
        at = bisect.bisect_left(order, call.start)
        if at < len(order) and order[at] < call.stop:
            continue
        results = {n for n in pytree.tree_leaves(call.out) if isinstance(n, fx.Node)}
        inside |= {n for n in capture.nodes[call.start : call.stop] if n not in results}
    return inside


def collect_ancestors(*nodes: fx.Node) -> set[fx.Node]:
    """Nodes, and all that they are computed from."""
    seen: set[fx.Node] = set()
    stack = [*nodes]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return seen


def find_cut_inputs(
    reach: ParameterReach, cut: fx.Node, routed: set[fx.Node], like: CanonicalForm | None
) -> list[fx.Node]:
    """Float nodes that are computed without expert parameters and feed the cut. Not those that a loop over the experts
    makes of their tokens, here or in another capture of the block: where one expert has all tokens, its rows look like
    everybody's, and one row looks like a number; nor what a loop that writes rows has written so far."""
    seen = collect_ancestors(cut)
    rows = [_count_rows_by_line(seen, cut)]
    if like is not None:
        nodes, sum_ = like.capture.nodes, like.cut
        rows.append(like.capture.once(("rows of lines", sum_), lambda: _count_rows_by_line(nodes, sum_)))
    loops = {at for at in set().union(*rows) if len(set().union(*[of.get(at, ()) for of in rows])) > 1}
    writes = {line(cut)} if not is_pointwise(cut.target) else set()
    return [
        n
        for n in reach.capture.nodes
        if n in seen
        and n not in routed
        and isinstance(n.meta.get("val"), FakeTensor)
        and n.op != "get_attr"
        and not n.meta.get("known")
        and not (_has_rows_of_routing(n) and (line(n), True) in loops)
        and not (_has_gathered_rows(n) and (line(n), False) in loops)
        and line(n) not in writes
    ]


def _count_rows_by_line(nodes: Iterable[fx.Node], cut: fx.Node) -> dict[tuple[Line, bool], set[Any]]:
    """By line of the program at which rows are made: how many per token. Where their number is the routing's (the key
    says so), in which turn, too: several turns of one length are a loop, as where tokens choose all experts, and each
    has all tokens."""
    tokens, turns = math.prod(cut.meta["val"].shape[:-1]), Counter[Line]()
    found: dict[tuple[Line, bool], set[Any]] = defaultdict(set)
    for n in nodes:
        if _has_rows_of_routing(n):
            at = line(n)
            found[at, True].add((_rows_per_token(n, tokens), turns[at]))
            turns[at] += 1
        elif _has_gathered_rows(n):
            found[line(n), False].add(_rows_per_token(n, tokens))
    return found


def _has_rows_of_routing(n: fx.Node) -> bool:
    return n.meta.get("ragged", False) and isinstance(n.meta.get("val"), FakeTensor) and n.meta["val"].dim() > 0


def _rows_per_token(n: fx.Node, tokens: int) -> Fraction:
    return Fraction(n.meta["val"].shape[0], max(1, tokens))


def _has_gathered_rows(node: fx.Node) -> bool:
    """Whether a float's rows were gathered by an index that follows from the routing. Their number may be the
    routing's without a sign of it, as when the program counts with NumPy."""

    def of(n: fx.Node, inputs: list[bool]) -> bool:
        val = n.meta.get("val")
        if not isinstance(val, FakeTensor) or not val.dim():
            return False
        if op_name(n) in _GATHERS:
            return any(is_routed(a) for a in pytree.tree_leaves(n.args[1:]))
        return any(inputs)

    return remembered(node, "gathered", of)


_GATHERS = {"index", "_unsafe_index", "index_select"}
