"""`load_pretrained`: read a checkpoint of the Hugging Face layout into the part of a model that this rank holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InvalidCheckpoint
from ..runtime.ranks.overwrite_detection import AcceptLoadedExperts
from ..util.model_wrappers import unwrap_model
from .derived_buffers import find_meta_buffers, list_derived_names, recompute_buffers
from .key_conversion import KeyGroup, check_keys, find_transformers_model, group_checkpoint_keys
from .model_tensors import LocalPart, choose_device, collect_tensors, list_models, materialize
from .safetensors_files import CheckpointFiles
from .tensor_regions import RecordedConversion


def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> nn.Module:
    """Load a checkpoint in the Hugging Face layout, in place. Each rank reads the bytes of its own parts only, whether
    `compile` spread experts, `parallelize` or `fully_shard` sharded parameters, or `pipeline` made stages.

    Names and layouts are converted as transformers does: a stack of experts may come from the matrices of single
    experts. Values are cast to the dtype of the model's parameters. Not collective: a rank sends and receives nothing.

    A model on the meta device is allocated first, and its non-persistent buffers are computed again. Build optimizers
    afterwards: the parameters are new. Memory beside the rank's own parts: mapped pages of the files, and one tensor of
    the checkpoint if its dtype or device differs.

    Args:
        model: any module, or a `Pipeline`.
        folder: has model.safetensors, or several files with model.safetensors.index.json.
        device: where to allocate tensors that are on the meta device. Default: the mesh's device, or that of the
            model's other tensors, or the CPU.

    Returns:
        The model.

    Raises:
        InvalidInput: `model` is no module.
        InvalidCheckpoint: the folder has no such files; keys are missing or unexpected; shapes differ; names of one
            parameter have different values; or a non-persistent buffer cannot be computed.
    """
    root = unwrap_model(model)
    models = list_models(root)
    transformers_model = find_transformers_model(models)
    tensors = collect_tensors(root)
    tied = set(tensors.tied) | set(tensors.tied.values())
    with CheckpointFiles(os.fspath(folder)) as files:
        groups, used = group_checkpoint_keys(transformers_model, files.keys, tensors.names)
        _check_keys(root, transformers_model, groups, tensors.names, tensors.tied, files)
        plan = [(group, names) for group in groups if (names := group.find_results(tensors.parts))]
        shapes = {name: part.shape for name, part in tensors.parts.items()}
        recorded = [_record(group, names, transformers_model, tensors.parts, shapes, files) for group, names in plan]
        meta_buffers = [buffers for stage in models for buffers in find_meta_buffers(stage)]
        if any(part.tensor.is_meta for part in tensors.parts.values()) or meta_buffers:
            materialize(root, torch.device(device) if device is not None else choose_device(root))
            recompute_buffers(meta_buffers)
            tensors = collect_tensors(root)
        loaded: dict[str, str] = {}  # for a parameter with several names, the one that was read
        with torch.no_grad():
            for (_, names), conversion in zip(plan, recorded, strict=True):
                for name in names:
                    part = tensors.parts[name]
                    if name in tied and (other := loaded.setdefault(tensors.tied.get(name, name), name)) != name:
                        _check_equal(part, name, other, conversion, files)
                    else:
                        conversion.fill(part.tensor, name, part.region, files.read)
    for module in dict.fromkeys(module for stage in models for module in stage.modules()):
        AcceptLoadedExperts()(module, None)
    if transformers_model is not None:
        for stage in models:  # as `from_pretrained` does: saving writes this layout again
            vars(stage)["_weight_conversions"] = used
    return model


def _check_keys(
    root: nn.Module,
    transformers_model: Any,
    groups: Sequence[KeyGroup],
    names: Sequence[str],
    tied: dict[str, str],
    files: CheckpointFiles,
) -> None:
    """Check the keys of all ranks' parts.

    Raises:
        InvalidCheckpoint: keys are missing or unexpected.
    """
    known, computed = dict.fromkeys(names), set[str]()
    for group in groups:
        computed.update(group.find_results(known))
    by_parameter: dict[str, set[str]] = {}
    for name, first in tied.items():
        by_parameter.setdefault(first, {first}).add(name)
    may_be_missing = {name for group_names in by_parameter.values() if group_names & computed for name in group_names}
    derived = {name for stage in list_models(root) for name in list_derived_names(stage)}
    check_keys(transformers_model, groups, names, may_be_missing, derived, files.folder)


def _record(
    group: KeyGroup,
    names: Sequence[str],
    transformers_model: Any,
    parts: dict[str, LocalPart],
    shapes: dict[str, tuple[int, ...]],
    files: CheckpointFiles,
) -> RecordedConversion:
    """Record the conversion of a group, and compare the shapes of its results with the model's.

    Raises:
        InvalidCheckpoint: the shapes differ.
    """
    dtype = parts[names[0]].tensor.dtype
    sources = {name: (files.describe(name).shape, dtype) for name in group.source_names}
    conversion = group.record(sources, transformers_model, shapes)
    for name in names:
        result = conversion.results.get(name)
        if result is None or tuple(result.shape) != shapes[name]:
            made = f"{list(result.shape)}" if result is not None else "no tensor of this name"
            number = f" from {len(sources)} tensors" if len(sources) > 1 else ""
            raise InvalidCheckpoint(
                f"{name} has the shape {list(shapes[name])} in the model, and the checkpoint {files.folder} has "
                f"{made}{number}: the model's config is not that of the checkpoint"
            )
    return conversion


def _check_equal(
    part: LocalPart, name: str, other: str, conversion: RecordedConversion, files: CheckpointFiles
) -> None:
    """Compare a parameter with the values that a checkpoint has under another of its names.

    Raises:
        InvalidCheckpoint: the values differ.
    """
    again = torch.empty_like(part.tensor)
    conversion.fill(again, name, part.region, files.read)
    if not torch.equal(again, part.tensor):
        raise InvalidCheckpoint(
            f"{name} and {other} are one parameter of the model, and the checkpoint {files.folder} has different "
            "values for them: build the model untied (transformers: tie_word_embeddings=False)"
        )
