"""Backwards that need a part of the gradients, and the rest later.

A pipeline schedule that delays gradients of weights runs the nodes of a stage twice: `torch.autograd.grad` by the
stage's input with `retain_graph=True`, and later by its weights, from the same gradients of the nodes. An op may leave
its weights to the second run, which then repeats nothing::

    grad(out, x, retain_graph=True)  # ctx.needs is true for x alone; the op sets ctx.delayed
    grad(out, weights)               # ctx.delayed.compute(...)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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

    def cover(self, needs: Sequence[bool]) -> bool:
        """Return whether no other gradients are needed."""
        return not any(need for i, need in enumerate(needs) if i not in self.arguments)


@dataclasses.dataclass(frozen=True)
class FirstRun:
    """The gradients with which a node ran and left others to a later run."""

    grads: tuple[Any, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, grads: tuple[Any, ...]) -> FirstRun:
        return cls(grads, _read_versions(grads))

    def is_repeated(self, grads: tuple[Any, ...]) -> bool:
        """Return whether a run has the same gradients."""
        return all(a is b for a, b in zip(self.grads, grads, strict=True)) and _read_versions(grads) == self.versions


def _read_versions(grads: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple([grad._version for grad in grads if isinstance(grad, Tensor)])


def find_needs(ctx: Any, are_tensors: Sequence[bool]) -> Sequence[bool]:
    """Return which inputs of a node need a gradient in the running backward.

    A backward that keeps the graph may need some of them alone. Others are not examined: they pay nothing.

    Args:
        ctx: the node. `ctx.first_run` is set after a run that left gradients to a later one.
        are_tensors: whether each input is a tensor.
    """
    needs = ctx.needs_input_grad
    if torch.compiler.is_compiling() or not (ctx.first_run is not None or keeps_graph()):
        return needs
    functions = iter(ctx.next_functions)
    makers = [next(functions)[0] if is_tensor else None for is_tensor in are_tensors]
    return [need and _will_run(maker) for need, maker in zip(needs, makers, strict=True)]


def _will_run(node: Any) -> bool:
    """Return whether the running backward runs a node, or returns its gradient."""
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # a leaf by which `torch.autograd.grad` differentiates
        return True
