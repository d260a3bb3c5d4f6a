"""Save and load the state of a training run with `torch.distributed.checkpoint`: each rank writes its own parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..errors import InvalidCheckpoint
from ..runtime.ranks.replaced_parameters import reshard
from ..util.rank_group import RankGroup
from ..util.save_folder import find_checkpoint, replace_checkpoint

# Key the state by parameter name: another mesh, or another release of transformers, groups parameters differently.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_ENTRY_FILES = (".metadata",)  # of torch.distributed.checkpoint
_Optimizers = Sequence[torch.optim.Optimizer]


def save_optimizers(model: nn.Module, optimizers: _Optimizers, folder: str | os.PathLike[str]) -> None:
    """Save the states of optimizers of a model in a folder of their own. Collective."""
    _save(_collect_optimizers(model, optimizers), folder)


def load_optimizers(model: nn.Module, optimizers: _Optimizers, folder: str | os.PathLike[str]) -> None:
    """Load what `save_optimizers` saved, over this mesh or another one. Collective."""
    state = _collect_optimizers(model, optimizers)
    _load(state, folder)
    with _without_empty_groups(optimizers):
        set_optimizer_state_dict(model, _unwrap_single(optimizers), state["optimizer"], options=_OPTIONS)


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save the parameters and buffers of a model in a folder of their own. Collective."""
    reshard(model)
    _save({"model": get_model_state_dict(model)}, folder)


def load_model(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load what `save_model` saved, over this mesh or another one. Collective."""
    reshard(model)
    state = {"model": get_model_state_dict(model)}
    _load(state, folder)
    set_model_state_dict(model, state["model"])


def _save(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Save into a new folder, then put its files in the place of earlier ones: a save that fails or is killed keeps
    these, or leaves the new ones where `_load` finds them."""
    with replace_checkpoint(Path(folder), RankGroup(dist.group.WORLD), _ENTRY_FILES, lambda name: True) as new:
        state_dict_saver.save(state, checkpoint_id=new)


def _load(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    found = find_checkpoint(Path(folder), _ENTRY_FILES)
    if not any((found / name).is_file() for name in _ENTRY_FILES):
        raise InvalidCheckpoint(f"{folder} has no complete state, its save may have been killed: load an earlier one")
    state_dict_loader.load(state, checkpoint_id=found)


def _collect_optimizers(model: nn.Module, optimizers: _Optimizers) -> dict[str, Any]:
    reshard(model)
    with _without_empty_groups(optimizers):
        return {"optimizer": get_optimizer_state_dict(model, _unwrap_single(optimizers), options=_OPTIONS)}


@contextlib.contextmanager
def _without_empty_groups(optimizers: _Optimizers) -> Iterator[None]:
    """Leave out groups without parameters, such as one without weight decay: torch reads a group's first parameter."""
    before = [list(optimizer.param_groups) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield
    finally:
        for optimizer, groups in zip(optimizers, before, strict=True):
            loaded = iter(optimizer.param_groups)
            optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]


def _unwrap_single(optimizers: _Optimizers) -> Any:
    return optimizers[0] if len(optimizers) == 1 else tuple(optimizers)
