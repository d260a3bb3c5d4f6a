"""Find the experts' parameters, and number the experts.

Expert parameters are those that only some tokens use, with the parameters of sibling modules::

    out[0] = x[0] @ experts.0.weight * softmax(x[0] @ router.weight)[0]
    out[1] = x[1] @ experts.2.weight * softmax(x[1] @ router.weight)[2]

All rows use `router.weight`. `experts.0.weight` and `experts.2.weight` vary, and `experts.1.weight` is their sibling.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.node_origins import find_float_decisions
from ...ir.ancestors import collect_ancestors
from ..facts.graph_nodes import follows_from_state
from ..terms.parameter_slices import ParameterSlice, get_fqn, guess_experts
from ..terms.term import Term
from .parameter_uses import MAX_ROWS, ParameterUses

_MAX_INNER_NODES = 60


def propose_expert_parameters(uses: ParameterUses) -> Iterator[list[set[str]]]:
    """Propose sets of FQNs that may be the experts' parameters, the likeliest first.

    A proposal holds the parameters that only some tokens use, with their siblings. They are seen at the outputs, or
    at the last node before an op that mixes tokens. Later proposals are seen further back and share no parameter with
    earlier ones: channels of an image use parts of a norm's weight, which must not hide the experts.
    """
    live = uses.find_live_nodes()
    inner = [n for n in reversed(uses.capture.nodes) if n in live and n not in uses.outputs and n.op == "call_function"]
    num_tried, earlier_experts = 0, set()
    for out in [*uses.outputs, *inner]:
        val = out.meta.get("val")
        if (
            not isinstance(val, FakeTensor)
            or val.dim() < 2
            or not val.is_floating_point()
            or math.prod(val.shape[:-1]) > MAX_ROWS
            or follows_from_state(out)  # its rows are not tokens
        ):
            continue
        num_tried += out not in uses.outputs
        if num_tried > _MAX_INNER_NODES:
            break
        uses.expand_sums(out)
        used_by_row = uses.find_slices_by_row(out)
        if not used_by_row:
            continue
        common = frozenset.intersection(*used_by_row)
        # without padding rows, more parameters are common
        partial_uses = [used for used in used_by_row if used != common]
        if partial_uses and (of_all := frozenset.intersection(*partial_uses)) != frozenset().union(*partial_uses):
            common = of_all
        varying = frozenset().union(*used_by_row) - common
        if varying:
            varying_names = {get_fqn(t) for t in varying}
            experts = add_siblings(uses, varying_names)
            if not experts & earlier_experts:
                earlier_experts |= experts
                # shared experts in the list of experts
                shared_experts = experts & ({get_fqn(t) for t in common} - varying_names)
                rest = experts - _find_tables(uses, varying)
                yield _drop_repeated(
                    [rest, experts, experts - shared_experts, rest - _find_choice_parameters(uses, experts)]
                )


def _drop_repeated(sets: list[set[str]]) -> list[set[str]]:
    return [s for i, s in enumerate(sets) if s and s not in sets[:i]]


def _find_tables(uses: ParameterUses, varying: frozenset[Term]) -> set[str]:
    """Find the FQNs of tables, from which tokens look up single vectors, such as embeddings.

    A parameter with one vector per expert is not a table: it is as long as a stack of matrices or a list of modules.
    """
    lengths: dict[str, set[int]] = defaultdict(set)  # of possible tables
    experts: set[int] = set()
    for t in varying:
        fqn, length = get_fqn(t), _count_parts(t)
        if len(t.shape) == 1 and length > 1:
            lengths[fqn].add(length)
        elif length > 1:
            experts.add(length)
        experts |= {len(uses.children.get(fqn[:i], ())) for i, c in enumerate(fqn) if c == "."}
    return {fqn for fqn, table_lengths in lengths.items() if not table_lengths & experts}


def _count_parts(t: Term) -> int:
    """Count the parts of this size in the parameter."""
    count = 1
    while t.op != "param":
        if t.op == "select":
            count = math.prod(t.operands[0].shape[axis] for axis, _ in t.args[1])
        elif t.op == "slice":
            count = t.operands[0].shape[t.args[1]] // max(1, t.shape[t.args[1]])
        t = t.operands[0]
    return count


def _find_choice_parameters(uses: ParameterUses, parameters: set[str]) -> set[str]:
    """Find the parameters on which integers depend: those of an earlier layer, a router or an embedding."""
    decided = [n for n in uses.capture.nodes if n.op == "call_function" and find_float_decisions(n)]
    return {
        str(n.meta["fqn"]) for n in collect_ancestors(*decided) if n.op == "get_attr" and n.meta["fqn"] in parameters
    }


def add_siblings(uses: ParameterUses, experts: set[str]) -> set[str]:
    """Add the parameters of sibling modules, which no token used in this capture."""
    names = {n for n, _ in uses.block.named_parameters(remove_duplicate=False)}
    out = set(experts)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)  # parts by the names before and after them
    for fqn in experts:
        parts = fqn.split(".")
        for depth, part in enumerate(parts):
            alike[".".join(parts[:depth]), ".".join(parts[depth + 1 :])].append(part)
    for (before, behind), parts in alike.items():
        siblings = uses.children.get(before)
        if siblings is not None and len(parts) > 1 and any(part in siblings.numbers for part in parts):
            out |= {".".join(filter(None, (before, other, behind))) for other in siblings}
    return out & names


def number_by_tokens(
    uses: ParameterUses, cut: fx.Node, experts: set[str], known: dict[str, int]
) -> dict[str, int] | None:
    """Number experts that no list holds: parameters that the same tokens use belong to one expert.

    Args:
        cut: the node whose rows use the parameters.
        experts: FQNs of the parameters.
        known: numbers by FQN from another capture.

    Returns:
        Numbers by FQN, or None if the same tokens use all parameters and no numbers are known.
    """
    tokens: dict[str, set[int]] = defaultdict(set)
    uses.expand_sums(cut, experts)
    for token, used in enumerate(uses.find_slices_by_row(cut)):
        for fqn in {get_fqn(t) for t in used} & experts:
            tokens[fqn].add(token)
    kinds: dict[frozenset[int], list[str]] = defaultdict(list)
    for fqn in [name for name, _ in uses.block.named_parameters(remove_duplicate=False) if name in tokens]:
        kinds[frozenset(tokens[fqn])].append(fqn)
    numbers, highest = dict(known), max(known.values(), default=-1)
    for names in kinds.values():
        before = {known[name] for name in names if name in known}
        if len(before) > 1:  # these tokens chose several experts
            continue
        highest += not before
        numbers |= dict.fromkeys(names, before.pop() if before else highest)
    return numbers if len(kinds) > 1 or known else None


def find_experts_used_by_all_tokens(uses: ParameterUses) -> set[str]:
    """Find the FQNs of numbered parameters that every token uses.

    They may be experts that every token selects (K = E): no parameter varies then.
    """
    for out in uses.outputs:
        val = out.meta.get("val")
        if not isinstance(val, FakeTensor) or val.dim() < 2 or math.prod(val.shape[:-1]) > MAX_ROWS:
            continue
        used = frozenset.intersection(*[uses.find_slices(r) for r in uses.list_rows(out)])
        kinds: dict[tuple, set[ParameterSlice]] = defaultdict(set)
        for part in map(ParameterSlice.from_term, used):
            if guess_experts(part, uses.children):
                kinds[re.sub(r"\d+", "#", part.fqn), part.steps and part.steps[0][0]].add(part)
        numbered_names = {p.fqn for parts in kinds.values() if len(parts) > 1 for p in parts}
        if numbered_names:
            return add_siblings(uses, numbered_names)
    return set()
