"""Backwards that compute a part of the gradients, and leave the rest to a later one.

A pipeline schedule that delays gradients of weights runs the nodes of a stage twice: `torch.autograd.grad` by the
stage's input with `retain_graph=True`, and later by its weights, from the same gradients of the nodes. An op may leave
its weights to the second run, which then repeats nothing::

    grad(out, x, retain_graph=True)  # ctx.needs is true for x alone; the op sets ctx.delayed
    grad(out, weights)               # ctx.delayed.compute(...)

`BackwardRuns` decides, for nodes of single ops and of joined ops, whether a run only needs the gradients that an
earlier one has left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_engine = getattr(torch._C, "_autograd", None)
keeps_graph = getattr(_engine, "_get_current_graph_task_keep_graph", lambda: True)  # True costs time and memory only


@dataclasses.dataclass(frozen=True)
class DelayedGradients:
    """Gradients that a backward has left to a later one.

    Attributes:
        arguments: positions of the op's arguments that they belong to.
        compute: `compute(needs) -> gradients`, both as for the backward of `Op.autograd`.
    """

    arguments: range
    compute: Callable[[Sequence[bool]], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class _PartialRun:
    """A run that has left gradients to a later one.

    Attributes:
        grads: the incoming gradients, with their versions.
        inputs: positions of the node's inputs whose gradients were left.
    """

    grads: tuple[Any, ...]
    versions: tuple[int, ...]
    inputs: frozenset[int]


class BackwardRuns:
    """The runs of one node's backward. Each may leave gradients to the next one.

    A run calls `find_needs` first, then `has_left_all`, and `end` last.

    Args:
        are_tensors: whether each input of the node is a tensor.
    """

    def __init__(self, are_tensors: Sequence[bool]):
        self.are_tensors = are_tensors
        self._partial: _PartialRun | None = None

    def find_needs(self, node: Any) -> Sequence[bool]:
        """Return which inputs of the node need a gradient in the running backward.

        Only a backward that keeps the graph may need a part of them. For any other, the result is
        `node.needs_input_grad` itself, at no cost.
        """
        needs = node.needs_input_grad
        if torch.compiler.is_compiling() or not (self._partial is not None or keeps_graph()):
            return needs
        functions = iter(node.next_functions)
        makers = [next(functions)[0] if is_tensor else None for is_tensor in self.are_tensors]
        return [need and _will_run(maker) for need, maker in zip(needs, makers, strict=True)]

    def has_left_all(self, needs: Sequence[bool], grads: tuple[Any, ...]) -> bool:
        """Return whether the previous run had the same incoming gradients, and left all needed ones to this run.

        Args:
            needs: whether each input needs a gradient, numbered as for `end`.
        """
        before = self._partial
        return (
            before is not None
            and not any(need and i not in before.inputs for i, need in enumerate(needs))
            and all(a is b for a, b in zip(before.grads, grads, strict=True))
            and before.versions == _read_versions(grads)
        )

    def end(
        self, grads: tuple[Any, ...], calls: Sequence[Any], find_inputs: Callable[[Any], Sequence[Iterable[int]]]
    ) -> None:
        """Record the gradients that a run has left to the next one. A freed graph has no next run: drop them.

        Args:
            calls: the `ctx` of each op of the node, whose `delayed` is set if it has left gradients.
            find_inputs: returns the positions of the node's inputs in each argument of such an op.
        """
        delaying = [call for call in calls if call.delayed is not None]
        if delaying and not keeps_graph():
            for call in delaying:
                call.delayed = None
            delaying = []
        if not delaying:
            self._partial = None
            return
        inputs: set[int] = set()
        for call in delaying:
            positions = find_inputs(call)
            inputs.update(*[positions[argument] for argument in call.delayed.arguments])
        self._partial = _PartialRun(grads, _read_versions(grads), frozenset(inputs))


def _read_versions(grads: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple([grad._version for grad in grads if isinstance(grad, Tensor)])


def _will_run(node: Any) -> bool:
    """Return whether the running backward runs a node, or returns its gradient."""
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # a leaf by which `torch.autograd.grad` differentiates
        return True
