"""Which pass broke a block? Every snapshot of its history is an executable graph: the first one that differs
names it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..comparison.compare import Subject, compare
from ..comparison.sandbox import Call, Casts, Inputs, Options, call_forward
from ..inspection.history import Snapshot
from ..ir.argument_binding import binder, call_specialisation, leaves_of
from ..ir.block_graph import BlockGraph
from ..runtime.module import BlockForward
from ..runtime.program import Program


def wrap_graph(graph: BlockGraph) -> Call:
    """`graph` as a function `(block, *args, **kwargs)` with the arguments of the block's own forward."""
    run = graph.compile()

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = binder(inspect.signature(block.forward))(*args, **kwargs)
        leaves = dict(leaves_of(named, graph.binding.objects))
        return run(block, *(leaves[path] for path in graph.binding.paths))

    return call


def find_program(forward: BlockForward, inputs: Inputs, options: Options) -> Program | None:
    """The program that runs a call; None when the original forward does."""
    args, kwargs = inputs
    leaves = leaves_of(binder(inspect.signature(forward))(*args, **kwargs), forward.objects)
    with torch.set_grad_enabled(options.grads):
        call = call_specialisation(forward.block, leaves, forward.objects)
    return next((p for p in forward.programs if p.key.admits(call)), None)


def find_first_bad_snapshot(
    original: nn.Module, program: Program, inputs: Inputs, options: Options, working: Casts, exact: Casts
) -> Snapshot | None:
    """The first snapshot of a program's history that does not compute what the original block does on `inputs`; None
    when all graphs are right, so that what runs is not the last graph. One with collectives is not run here, where
    the whole block is: it is to blame if those before it are right."""
    for snapshot in program.history:
        if snapshot.graph.find("moefx::exchange_counts"):
            return snapshot
        subject = Subject(
            original, original, working, exact,
            block=program.history.name, call_original=call_forward,
            call_compiled=wrap_graph(program.runnable(snapshot.graph)),
        )  # fmt: skip
        if not compare(subject, inputs, options).ok:
            return snapshot
    return None
