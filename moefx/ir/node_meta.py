"""The keys of `node.meta`: facts about the nodes of captures, of block graphs, and of users' flat graphs.

fx types `meta` as a plain dict, so a misspelt key reads as a missing one. `tests/ir/test_node_meta.py` compares these
classes with the keys in the code.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch


class CaptureMeta(TypedDict, total=False):
    """A node of a capture. `GraphRecorder.register` and `describe` write most keys.

    Attributes:
        val: a FakeTensor, or the values of integers; None for an op with several results.
        source: the user's line, a `Source`.
        index: the position in program order.
        grad: whether grad mode was on.
        autocast: the dtype of autocast, None if it was off.
        ragged: the first axis may be the rows of an expert.
        from_integers: the value follows from integers of the routing and constants only.
        of_sizes: sizes and routed numbers that the op, or the literal, was made of.
        concrete: the concrete value, if an op of the capture had it or `concrete_values` has computed it.
        calls: the lines of the user's calls that lead to a decision by floats, outermost first.
        opaque: an op that was recorded as a whole.
        forced: the key of the intervention that replaced the result, see `make_site`.
        position: of a placeholder: its number among the tensor arguments.
        fqn: of a `get_attr`: its name in the block.
        kind: of a `get_attr`. A constant is a tensor that the code makes.
        original: of a `get_attr`: the user's tensor, see `find_original`. Graphs live until Python collects cycles, and
            would keep the parameters of a model that FSDP has sharded.
        literal: of a `get_attr`: a number in the code.
        again: of an output of a module that did not run because an equal one had: its inputs.
    """

    val: Any
    source: Any
    index: int
    grad: bool
    autocast: torch.dtype | None
    ragged: bool
    from_integers: bool
    of_sizes: frozenset[int | float]
    concrete: Any
    calls: tuple[Any, ...]
    opaque: bool
    forced: tuple[Any, str, bool]
    position: int
    fqn: str
    kind: Literal["param", "buffer", "attribute", "constant"]
    original: weakref.ref[torch.Tensor]
    literal: bool
    again: Sequence[torch.fx.Node]


class CachedMeta(TypedDict, total=False):
    """Results of `fold_ancestors`: every function has its own key."""

    computation: int
    depends_on_floats: bool
    from_arguments: bool
    from_call: bool
    from_choices: bool
    from_floats: bool
    from_state: bool
    gathered: bool
    grows: bool
    has_gradients: bool
    leaves: frozenset[Any]
    narrow: bool
    of_rows: bool
    of_tokens: bool
    routed: bool
    weight: bool
    without_sizes: int


class BlockMeta(TypedDict, total=False):
    """A node of a block graph. Passes write these keys.

    Attributes:
        val: a FakeTensor or any object with shape and dtype, a SymInt, or a tuple of them; may be absent.
        letters: the shape in named letters, `("S", "D")`; a tuple of them for several results; `"S*K"` for a size.
        source: the user's line, `"model.py:41"`.
        autocast: as in a capture.
        save: the backward keeps the value.
        each: the step, the number and the count of experts of a step that is repeated for each expert.
        axis: the mesh axis of an exchange.
        unfused: why the experts before this sum are not fused.
        num_experts: of a `build_pft`, the number of experts of all kinds among which a token chooses.
    """

    val: Any
    letters: Any
    source: str
    autocast: torch.dtype | None
    save: bool
    each: tuple[str, int, int]
    axis: str
    unfused: str
    num_experts: int


class FlatGraphMeta(TypedDict, total=False):
    """A node of a user's flat graph. torch writes these keys."""

    val: Any
    example_value: Any
    grapharg: Any
    nn_module_stack: dict[str, Any]
    stack_trace: str


def find_original(node: torch.fx.Node) -> torch.Tensor | None:
    """Return the user's tensor that a `get_attr` of a capture stands for, or None if there is none, or no longer."""
    reference = node.meta.get("original")
    return None if reference is None else reference()


__all__ = ["BlockMeta", "CachedMeta", "CaptureMeta", "FlatGraphMeta", "find_original"]
