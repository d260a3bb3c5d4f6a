"""Hand-made rewritten blocks for tests of the runtime."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moefx.inspection.history import History, Snapshot
from moefx.ir.argument_binding import Guard, Specialization, flatten_arguments, make_binder, specialize_call
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.runtime.block_forward import BlockForward, install_forward
from moefx.runtime.change_detection import find_absorbed_names
from moefx.runtime.program import Program

from ..ir.graphs import Block, build_block_graph


def make_key(block: nn.Module, *args: Any, **kwargs: Any) -> Specialization:
    leaves = flatten_arguments(make_binder(inspect.signature(block.forward))(*args, **kwargs))
    return specialize_call(block, leaves)._replace(training=None, grad=None)


def make_history(*graphs: BlockGraph) -> History:
    names = ("rewrite", "fuse")
    snapshots = (Snapshot(i + 1, len(graphs), names[i], 1.0, 1, 0, "", g) for i, g in enumerate(graphs))
    return History(graphs[0].name, tuple(snapshots))


def build_program(block: Block, x: torch.Tensor, guards: Sequence[Guard] = (), **changes: Any) -> Program:
    num_experts = len(block.experts)
    history = make_history(build_block_graph(num_experts, fused=False), build_block_graph(num_experts))
    key = make_key(block, x)._replace(**changes)
    return Program(key, history, find_absorbed_names(block, history.graph), guards)


class Model(nn.Module):
    def __init__(self, layers: int = 2, num_experts: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(num_experts) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def rewrite(model: nn.Module, x: torch.Tensor, **options: Any) -> list[BlockForward]:
    """Rewrite every `Block` of a model in place."""
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, Block)}
    program = build_program(next(iter(blocks.values())), x)
    return [install_forward(m, [program.renamed(name)], name=name, **options) for name, m in blocks.items()]
