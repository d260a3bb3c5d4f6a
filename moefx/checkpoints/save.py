"""`save_pretrained`: write a model that ranks hold in parts as a checkpoint in the Hugging Face layout."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..errors import InvalidCheckpoint, MoefxError
from ..util.model_wrappers import unwrap_model
from ..util.rank_group import RankGroup
from ..util.save_folder import replace_checkpoint
from .key_conversion import KeyGroup, find_transformers_model, group_model_names
from .model_tensors import ModelTensors, collect_tensors, find_group, list_models
from .part_exchange import PartExchange
from .safetensors_files import (
    ENTRY_FILES,
    SINGLE_FILE,
    ShardFile,
    TensorEntry,
    find_dtype_name,
    is_weights_file,
    parse_size,
    split_into_shards,
    write_index,
)
from .tensor_regions import RecordedConversion, whole_region


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Write a checkpoint in the Hugging Face layout that transformers' `from_pretrained` and `load_pretrained` load.
    Collective for a model that ranks hold in parts: every rank calls it with the same folder, which all ranks see.

    Files have the original's names and the layout of the checkpoint that was loaded; for a model that was not loaded,
    the layout that transformers writes. Models that are not of transformers have the names of their state dict. Ranks
    take turns in writing files. Memory beside a rank's own parts: one tensor of the checkpoint, on the CPU.

    An earlier checkpoint in the folder stays complete until the new one is: the disk holds both for a while. A save
    that raises keeps the earlier one. A save that is killed leaves one of two folders in `folder`:

    - `incomplete-save`: the earlier checkpoint is as it was. The next save removes this folder.
    - `complete-save`: the new checkpoint, some of whose files are not in place yet. `load_pretrained(folder)` reads it;
      for transformers, pass this folder to `from_pretrained`. The next save puts the rest in place. On a file system
      without hard links it may hold the rest only: then save again, or move its files into `folder`.

    Args:
        model: any module, or a `Pipeline`.
        folder: is created if it does not exist. Files that are not of an earlier checkpoint stay.
        max_shard_size: the size of a file in bytes, or text such as "5GB". A larger tensor has a file of its own.

    Raises:
        InvalidCheckpoint: a tensor cannot be stored in such files.
        InvalidInput: the folder is a file.
        MoefxError: the model is quantized, or another rank failed. An error while a rank sends or receives a tensor is
            not told to other ranks, which wait for the timeout of their process group.
    """
    root = unwrap_model(model)
    group, device = find_group(root)
    ranks = RankGroup(group)
    with ranks.raise_together():
        max_bytes = parse_size(max_shard_size)
        transformers_model = find_transformers_model(list_models(root))
        tensors = _collect_parts(root, transformers_model)
    exchange = PartExchange(tensors.parts, ranks, device)
    tied = exchange.merge_tied(tensors.tied)
    with ranks.raise_together():
        names = _choose_names(transformers_model, tensors, tied)
        outputs = _plan_outputs(transformers_model, exchange, names)
        shards = split_into_shards([output.entry for output in outputs.values()], max_bytes)
    exchange.check_same_plan(shards)
    with replace_checkpoint(Path(folder), ranks, ENTRY_FILES, is_weights_file) as path:
        with ranks.raise_together():
            if ranks.is_first:
                _write_configs(transformers_model, path)
                if list(shards) != [SINGLE_FILE]:
                    write_index(path, shards)
        errors = [
            _write_shard(path / name, [outputs[entry.key] for entry in entries], exchange, number)
            for number, (name, entries) in enumerate(shards.items())
        ]
        with ranks.raise_together():
            for error in filter(None, errors):
                raise error


@dataclasses.dataclass(frozen=True)
class _Output:
    """A tensor of the checkpoint, and the conversion that computes it."""

    entry: TensorEntry
    conversion: RecordedConversion


def _collect_parts(root: nn.Module, transformers_model: Any) -> ModelTensors:
    """Return this rank's parts, which have values to save. Not collective."""
    if getattr(transformers_model, "hf_quantizer", None) is not None:
        raise MoefxError("save_pretrained writes models that are not quantized: call the model's own save_pretrained")
    tensors = collect_tensors(root)
    meta = [name for name, part in tensors.parts.items() if part.tensor.is_meta]
    if meta:
        raise InvalidCheckpoint(f"{meta[0]} is on the meta device, without values: call moefx.load_pretrained first")
    return tensors


def _choose_names(transformers_model: Any, tensors: ModelTensors, tied: dict[str, str]) -> list[str]:
    """Return the names to save: one for each parameter, and none that transformers leaves out.

    Args:
        tied: the second names of parameters on all ranks.
    """
    left_out: set[str] = set(getattr(transformers_model, "_keys_to_ignore_on_save", None) or ())
    declared = getattr(transformers_model, "all_tied_weights_keys", None)  # transformers 5
    declared = declared or getattr(transformers_model, "_tied_weights_keys", None) or ()
    by_first: dict[str, list[str]] = {}
    for name, first in tied.items():
        by_first.setdefault(first, [first]).append(name)
    for names in by_first.values():
        kept = next((n for n in names if not any(re.search(pattern, n) for pattern in declared)), names[0])
        left_out.update(name for name in names if name != kept)
    return [name for name in tensors.names if name not in left_out]


def _plan_outputs(transformers_model: Any, exchange: PartExchange, names: Iterable[str]) -> dict[str, _Output]:
    """Find the tensors of the checkpoint, by key. All ranks return the same ones in the same order."""
    described = exchange.described
    shapes = {name: shape for name, (shape, _) in described.items()}
    outputs: dict[str, _Output] = {}
    for group in group_model_names(transformers_model, names):
        for output in _list_outputs(group, described, transformers_model, shapes):
            if output.entry.key in outputs:
                raise InvalidCheckpoint(f"two tensors of the model would be {output.entry.key} in the checkpoint")
            find_dtype_name(output.entry)  # raises before files are written
            outputs[output.entry.key] = output
    return outputs


def _list_outputs(
    group: KeyGroup, described: Any, transformers_model: Any, shapes: dict[str, tuple[int, ...]]
) -> Iterator[_Output]:
    conversion = group.record({name: described[name] for name in group.source_names}, transformers_model, shapes)
    for key, value in conversion.results.items():
        yield _Output(TensorEntry(key, tuple(value.shape), value.dtype), conversion)


def _write_shard(path: Path, outputs: list[_Output], exchange: PartExchange, number: int) -> OSError | None:
    """Write a file on one rank, from the parts of all. Ranks that hold no part of a tensor go on to the next one.

    Returns:
        The error of writing the file, after this rank has received what the others send it.
    """
    writer = exchange.ranks.ranks[number % len(exchange.ranks.ranks)]
    tensors = _gather_tensors(outputs, exchange, writer)
    error: OSError | None = None
    if exchange.ranks.rank == writer:
        try:
            with ShardFile(path, [output.entry for output in outputs]) as file:
                for tensor in tensors:
                    file.append(tensor)
        except OSError as found:
            error = found
    for _ in tensors:  # sends this rank's parts, or receives what a file that failed does not take
        pass
    return error


def _gather_tensors(outputs: list[_Output], exchange: PartExchange, writer: int) -> Iterator[Tensor]:
    """Yield the tensors of a file on the rank that writes it, and meta tensors on ranks that send their parts."""
    device = "cpu" if exchange.ranks.rank == writer else "meta"

    def read(name: str, region: Any, out: Tensor) -> None:
        exchange.gather(name, region, out, writer)

    for output in outputs:
        whole = torch.empty(output.entry.shape, dtype=output.entry.dtype, device=device)
        output.conversion.fill(whole, output.entry.key, whole_region(output.entry.shape), read)
        yield whole


def _write_configs(model: Any, folder: Path) -> None:
    """Write the configs of a model of transformers, as its own `save_pretrained` does."""
    if model is None:
        return
    config = copy.deepcopy(model.config)
    cls = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    config.architectures = [cls.__name__]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
