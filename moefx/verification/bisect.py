"""Find the pass that broke a block: run the snapshots of its history until one differs from the original."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..comparison.compare import Subject, compare
from ..comparison.sandbox import Call, Casts, Inputs, RunOptions, call_forward
from ..inspection.history import Snapshot
from ..ir.argument_binding import flatten_arguments, make_binder, make_signature_binder, specialize_call
from ..ir.graphs.block_graph import BlockGraph
from ..runtime.block_forward import BlockForward
from ..runtime.program import Program


def wrap_graph(graph: BlockGraph) -> Call:
    """Return a function `(block, *args, **kwargs)` that runs `graph` on the arguments of the block's forward."""
    run = graph.compile()

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = make_signature_binder(block)(*args, **kwargs)
        leaves = dict(flatten_arguments(named, graph.binding.objects))
        return run(block, *(leaves[path] for path in graph.binding.paths))

    return call


def find_program(forward: BlockForward, inputs: Inputs, options: RunOptions) -> Program | None:
    """Return the program that runs a call; None if the original forward runs."""
    args, kwargs = inputs
    leaves = flatten_arguments(make_binder(inspect.signature(forward))(*args, **kwargs), forward.objects)
    with torch.set_grad_enabled(options.grads):
        call = specialize_call(forward.block, leaves, forward.objects)
    return next((p for p in forward.programs if p.key.admits(call)), None)


def find_first_bad_snapshot(
    original: nn.Module, program: Program, inputs: Inputs, options: RunOptions, working: Casts, exact: Casts
) -> Snapshot | None:
    """Return the first snapshot of a program's history that differs from the original block on `inputs`.

    Returns a snapshot with collectives, which cannot run on the whole block, if all earlier ones are correct. Returns
    None if all are correct: then the block does not run the last graph.
    """
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
