"""The operations that are legal at each level. The pass manager checks the graph after every pass.

A level allows all torch ops, including ops that read values on the host as some routers do, and its own dialect ops.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch.fx import Node

from ..ops.op_definition import NAMESPACE
from ..passed_objects import CHECKS
from .block_graph import BlockGraph

_ROUTED = frozenset({"build_pft", "dispatch", "grouped_mm", "expert_rows", "combine", "pick_choices"})
_ROUTES = frozenset(
    {"place_choices", "chunk_choices", "near_and_far", "plan_dispatch", "exchange_counts", "pack_rows", "read_counts"}
)
_SEQUENCE = frozenset({"shard_tokens", "unshard_tokens"})
_EXCHANGES = frozenset(
    {
        "all_to_all_rows", "wait_rows", "all_to_all_back", "wait_sums",
        "agree_length", "gather_tokens", "wait_gathered", "scatter_sums", "wait_scattered", "pull_tokens", "pull_sums",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GraphLevel:
    """A stage of compilation and its legal ops.

    Attributes:
        name: passes declare it with `graph_pass(level=...)`.
        dialect: the legal dialect ops; None allows every registered one.
    """

    name: str
    dialect: frozenset[str] | None


LEVELS = {
    level.name: level
    for level in (
        # A graph that capture recorded under one concrete routing.
        GraphLevel("captured", frozenset()),
        # One dialect op per step; the pointwise part between the GEMMs is plain torch.
        GraphLevel("dialect", _ROUTED),
        # Steps may be fused to expert_mlp; experts of another form stay in the dialect.
        GraphLevel("fused", _ROUTED | {"expert_mlp"}),
        # Rows travel between the ranks of a mesh.
        GraphLevel("distributed", _ROUTED | _ROUTES | _EXCHANGES | _SEQUENCE | {"expert_mlp", "weights_later"}),
        # Any op of a provider.
        GraphLevel("lowered", None),
    )
}


class Violation(NamedTuple):
    """A node that is not legal at a level, and the reason."""

    node: Node
    reason: str

    def __str__(self) -> str:
        source = self.node.meta.get("source")
        return f"{self.node.name}: {self.reason}" + (f" ({source})" if source else "")


def find_violations(block: BlockGraph, level: GraphLevel) -> list[Violation]:
    """Return the nodes that are not legal at `level`."""
    violations = []
    for node in block.graph.nodes:
        reason = _find_illegality(node, level) or (is_dead(node) and "nothing uses its result and it has no effect")
        if reason:
            violations.append(Violation(node, reason))
    return violations


def is_dead(node: Node) -> bool:
    """Return whether a node has no users and no effect on tensors, modules or random state."""
    return not node.users and not has_effect(node)


def has_effect(node: Node) -> bool:
    """Return whether a node has a side effect. A submodule call has one, because its hooks may do anything."""
    if node.op in ("placeholder", "output", "call_module") or node.target is setattr:
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
    name = getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and (in_place or not _is_torch_function(target))


def eliminate_dead_code(block: BlockGraph) -> BlockGraph:
    """Return a copy without nodes that are dead (`is_dead`)."""
    block = block.copy()
    for node in reversed(block.nodes):
        if is_dead(node):
            block.graph.erase_node(node)
    return block


def _find_illegality(node: Node, level: GraphLevel) -> str:
    """Return why a node is illegal at a level, or ""."""
    target = node.target
    if node.op in ("placeholder", "output", "get_attr", "call_module", "call_method"):
        return ""
    if not isinstance(target, torch._ops.OpOverload):
        name = getattr(target, "__qualname__", repr(target))
        is_legal = _is_torch_function(target) or target in CHECKS
        return "" if is_legal else f"{name} is a Python function; define an op (moefx.ir.ops.op_definition)"
    if target.namespace == NAMESPACE:
        name = target._schema.name.partition("::")[2]
        if level.dialect is not None and name not in level.dialect:
            return f"{NAMESPACE}::{name} does not exist at level {level.name!r}"
    return ""


def _is_torch_function(target: object) -> bool:
    """Return whether a function belongs to torch, `operator`, `math` or builtins, or is `apply` of an
    autograd.Function."""
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return True
    module = getattr(target, "__module__", None) or getattr(type(target), "__module__", "")
    return module.partition(".")[0] in ("torch", "_operator", "operator", "math", "builtins")
