"""Find tests whether an expert's rows or weights sum to zero. A part of `branch_outcomes`.

Protects from an expert that is left out although it has tokens::

    token, slot = torch.where(chosen == e)
    if weights[token, slot].sum() == 0:  # no tokens, or tokens with weights of zero
        continue
    out[token] += experts[e](x[token]) * weights[token, slot, None]

Leaving the expert out changes nothing only if everything that it adds is multiplied by the zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ...capture.tracing.capture_result import HostRead
from ...capture.tracing.node_origins import find_float_decisions, hash_computation, is_abstract
from ...ir.node_values import get_op_name
from .op_classes import NOT_NEGATIVE, PICKS, PRODUCTS, SIZE_REDUCTIONS, VIEWS

_WRITES = {"index_add": 3, "index_put": 2, "scatter_add": 3}  # op: index of the argument that is written


def is_zero_test(read: HostRead) -> bool:
    """Return whether Python reads only a test whether floats of an expert's rows are zero."""
    if read.node is None or read.comparison is not None or read.node.meta["val"].dtype is not torch.bool:
        return False
    weighed = [n for n in find_float_decisions(read.node) if n.meta["ragged"] or _is_reduced_from_rows(n)]
    return bool(weighed) and all(get_op_name(n) in ("eq", "ne") and n.args[1] == 0 for n in weighed)


def adds_nothing(read: HostRead) -> bool | None:
    """Return whether an expert adds nothing and changes no gradient if the tested floats are all zero.

    The floats must not be negative: their sum is then zero only if all are, and zero is their minimum.

    Returns:
        None if the capture left the expert out.
    """
    assert read.node is not None
    verdicts = [_adds_nothing(n) for n in find_float_decisions(read.node)]
    return False if False in verdicts else None if None in verdicts else True


def _is_reduced_from_rows(n: fx.Node) -> bool:
    """Return whether a number was reduced from rows of an expert."""
    while n.all_input_nodes and get_op_name(n) in SIZE_REDUCTIONS | VIEWS | NOT_NEGATIVE | {"eq", "ne", "mul", "pow"}:
        n = n.all_input_nodes[0]
    return bool(n.meta["ragged"])


def _adds_nothing(compared: fx.Node) -> bool | None:
    node: Any = compared.args[0]
    while get_op_name(node) in SIZE_REDUCTIONS | VIEWS:
        node = node.args[0]
    if get_op_name(node) not in ("index", "index_select", "gather") or not _is_not_below_zero(node):
        return False
    leaving = [*_find_leaving(node)]
    return None if not leaving else all(_leaves_as_it_was(n, node) for n in leaving)


def _find_leaving(weights: fx.Node) -> Iterator[fx.Node]:
    """Yield the ops that turn floats of the expert's rows into floats of all tokens, except for mere tests."""
    seen = {a for a in weights.all_input_nodes[1:] if a.meta["ragged"]}
    stack = [*seen]
    while stack:
        for user in stack.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.meta["ragged"] and get_op_name(user) not in _WRITES:
                stack.append(user)
            elif is_abstract(user) and (get_op_name(user) in _WRITES or user.users) and not _is_asked(user):
                yield user


def _is_asked(n: fx.Node) -> bool:
    """Return whether all results are booleans without axes, which Python reads."""
    return all(not u.meta["val"].dim() and (_is_truth(u) or _is_asked(u)) for u in n.users)


def _is_truth(n: fx.Node) -> bool:
    return n.meta["val"].dtype is torch.bool


def _leaves_as_it_was(n: fx.Node, weights: fx.Node) -> bool:
    """Return whether a write changes nothing, or a value is zero, if the weights are zero."""
    name = get_op_name(n)
    if name not in _WRITES:
        return _is_zero(n, weights)
    written: Any = n.args[_WRITES[name]]
    if name != "index_put" or n.args[3:4] == (True,):
        return _is_zero(written, weights)
    if get_op_name(written) not in ("add",):  # `out[t] += y`
        return False
    before, added = written.args[:2]
    is_same = get_op_name(before) == "index" and before.args[:2] == n.args[:2]
    return is_same and _is_zero(added, weights)


def _is_zero(n: Any, weights: fx.Node) -> bool:
    """Return whether a value is zero wherever the weights are."""
    if not isinstance(n, fx.Node) or n.op != "call_function":
        return False
    name = get_op_name(n)
    if n is weights or (name == get_op_name(weights) and _identify_pick(n) == _identify_pick(weights)):
        return True
    if name in PRODUCTS:
        return any(_is_zero(a, weights) for a in n.args[:2])
    return name in {*VIEWS, "div", "neg", "sum"} and _is_zero(n.args[0], weights)


def _identify_pick(n: fx.Node) -> int:
    """Hash the elements that an op picks: `w[t, k, None]` has the hash of `w[t, k]`."""
    picked: Any = n.args[0]
    while get_op_name(picked) == "unsqueeze":
        picked = picked.args[0]
    return hash_computation(n.target, (picked, *n.args[1:]), n.kwargs)


def _is_not_below_zero(n: Any) -> bool:
    if not isinstance(n, fx.Node):
        return isinstance(n, (int, float)) and n >= 0
    name = get_op_name(n)
    if name in NOT_NEGATIVE or (isinstance(n.meta.get("val"), torch.Tensor) and _is_truth(n)):
        return True
    if name in ("mul", "div", "add"):
        return all(_is_not_below_zero(a) for a in n.args[:2])
    return name in VIEWS | PICKS | {"amax", "sum"} and _is_not_below_zero(n.args[0])


__all__ = ["adds_nothing", "is_zero_test"]
