"""Model whose blocks run dialect graphs built by hand. Tests insert faults into passes and providers."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moefx.inspection.history import History, Snapshot
from moefx.ir.argument_binding import flatten_arguments, make_binder, specialize_call
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.ops.op_definition import registry
from moefx.runtime.block_forward import install_forward
from moefx.runtime.change_detection import find_absorbed_names
from moefx.runtime.program import Program
from moefx.util.model_copy import copy_model

from ..ir.graphs import Block, D, E, build_block_graph


class Model(nn.Module):
    """Embedding, residual MoE layers with a norm, head."""

    def __init__(self, num_layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(num_layers))
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(D, 32)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        logits = self.head(x)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        return {**loss, "logits": logits}


def build_history(name: str = "", spoil: dict[str, Callable[[BlockGraph], BlockGraph]] | None = None) -> History:
    """Build graphs of rewrite, fuse and checkpoint. `spoil` breaks a pass and all later ones."""
    snapshots: list[Snapshot] = []
    graphs = {
        "rewrite": build_block_graph(E, fused=False),
        "fuse": build_block_graph(E),
        "checkpoint": build_block_graph(E),
    }
    broken = None
    for i, (pass_name, graph) in enumerate(graphs.items()):
        broken = (spoil or {}).get(pass_name, broken)
        graph = broken(graph.copy()) if broken else graph
        snapshots.append(Snapshot(i + 1, len(graphs), pass_name, 1.0, 1, 0, f"passes/{pass_name}.py:1", graph))
    return History(name, tuple(snapshots))


def build_compiled_pair(
    spoil: Any = None, layer: int = 1, *, last_pass: str = "checkpoint", num_layers: int = 2, **key: Any
) -> tuple[Model, Model]:
    """Return the original and a rewritten copy. `spoil` breaks a pass of one layer."""
    torch.manual_seed(0)
    original = Model(num_layers)
    compiled = copy_model(original)[0]
    for i, block in enumerate(compiled.layers):
        name = f"layers.{i}"
        programs = build_history(name, spoil if i == layer else None)
        programs = History(name, programs.snapshots[: programs.passes.index(last_pass) + 1])
        leaves = flatten_arguments(make_binder(inspect.signature(block.forward))(torch.zeros(1, 1, D)))
        specialization = specialize_call(block, leaves)._replace(training=None, grad=None, **key)
        program = Program(specialization, programs, find_absorbed_names(block, programs.graph))
        install_forward(block, [program], name=name)
    return original, compiled


@contextlib.contextmanager
def break_op(op: str, corrupt: Callable[..., Any], *, provider: str | None = None) -> Iterator[None]:
    """Replace the result of an op by `corrupt(result, *args, **kwargs)`, in one provider or in all."""
    before = dict(registry[op].providers)
    try:
        for name, p in before.items():
            if provider in (None, name):
                registry[op].providers[name] = dataclasses.replace(p, run=_corrupt_result(p.run, corrupt))
        yield
    finally:
        registry[op].providers.update(before)


def _corrupt_result(run: Callable[..., Any], corrupt: Callable[..., Any]) -> Callable[..., Any]:
    def corrupted(*args: Any, **kwargs: Any) -> Any:
        return corrupt(run(*args, **kwargs), *args, **kwargs)

    return corrupted
