"""Refuse blocks that something observes from outside: hooks on experts, sharded parameters."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ..runtime.change_detection import find_absorbed_names, find_hook_kind
from ..util.user_code import forward_line
from .block_compiler import BlockRewrite
from .survey_result import MatchedBlock, Refusal


def drop_observed_blocks(model: nn.Module, blocks: list[MatchedBlock]) -> tuple[list[MatchedBlock], list[Refusal]]:
    """Refuse blocks whose experts have hooks, which would not fire, or shards, which would not be gathered."""
    modules, remaining, refusals = dict(model.named_modules()), [], []
    for m in blocks:
        observers = {name: _find_observer(modules[name], m.result) for name in m.names}
        refusals += [
            Refusal(name, why[0], forward_line(modules[name]), remedy=why[1]) for name, why in observers.items() if why
        ]
        if names := tuple(name for name, why in observers.items() if not why):
            remaining.append(dataclasses.replace(m, names=names))
    return remaining, refusals


def _find_observer(block: nn.Module, result: BlockRewrite) -> tuple[str, str] | None:
    """Return the first hook on an absorbed module, or sharded parameter, of a block: reason and remedy."""
    for part in find_absorbed_names(block, result.graph, result.dialect_graph.recomputed_modules):
        if hook := find_hook_kind(block.get_submodule(part)):
            return (
                f"{part} has a {hook}, which the rewritten block would not call",
                "remove it; hooks on the block itself, its router and its shared experts stay",
            )
    for name, parameter in block.named_parameters():
        if _is_sharded(parameter):
            return f"{name} is a DTensor", "compile first, then shard the compiled model"
    return None


def _is_sharded(tensor: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether FSDP has sharded a part of the model."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in model.modules())
