"""Translate names and layouts between a checkpoint and a model, by transformers' own conversions.

transformers 5 has a list of conversions for each kind of model: renamings, and converters that compute tensors of the
model from those of a checkpoint, such as one stack from the matrices of all experts. Models of transformers 4 have the
names and shapes of their checkpoints, and so have models that are not of transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidCheckpoint, MoefxError
from .safetensors_files import list_some
from .tensor_regions import RecordedConversion


@dataclasses.dataclass(frozen=True)
class KeyGroup:
    """The tensors of one conversion.

    Attributes:
        result: the name of the result; of the first one if there are several.
        sources: the names of the sources by transformers' pattern, in the order in which they are converted.
        converter: transformers' converter, None to copy the only source.
        renamings: transformers' renamings of a converter's results.
    """

    result: str
    sources: dict[str, list[str]]
    converter: Any = None
    renamings: Sequence[Any] = ()

    @property
    def source_names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def find_results(self, names: Iterable[str]) -> list[str]:
        """Return those of the model's names that the group computes."""
        if self.converter is None:
            return [self.result] if self.result in names else []
        first, *others = self.converter.target_patterns
        results = [self.result, *(self.result.replace(first, other) for other in others)]
        if any("*" in name for name in results):
            pattern = re.compile("|".join(re.escape(name).replace(r"\*", r"[^.]+") for name in results))
            return [name for name in names if pattern.fullmatch(name)]
        return [name for name in results if name in names]

    def record(
        self,
        sources: Mapping[str, tuple[Sequence[int], torch.dtype]],
        model: nn.Module | None,
        shapes: Mapping[str, Sequence[int]],
    ) -> RecordedConversion:
        """Record the conversion for sources of these shapes and dtypes.

        Args:
            model: the model of transformers.
            shapes: the shapes of the model's tensors, as far as this rank knows them.

        Raises:
            InvalidCheckpoint: the sources do not fit together, or the conversion depends on their values.
        """
        try:
            return RecordedConversion(lambda tensors: self._convert(tensors, model, shapes), sources)
        except Exception as error:
            shown = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in list(sources.items())[:4])
            raise InvalidCheckpoint(
                f"transformers' conversion of {shown}{', ...' if len(sources) > 4 else ''} for {self.result} "
                f"({', '.join(map(repr, self.converter.operations))}) failed: {error}. Either the checkpoint is not of "
                "this model, or the conversion depends on values, and then only from_pretrained can do it"
            ) from error

    def _convert(
        self, tensors: dict[str, Tensor], model: Any, shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, Tensor]:
        if self.converter is None:
            return {self.result: tensors[self.source_names[0]]}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.result, name, pattern, tensors[name])
        realized = converter.convert(self.result, model=_WholeModel(model, shapes), config=model.config)
        converted = {name: value[0] if isinstance(value, list) else value for name, value in realized.items()}
        return {_rename(name, self.renamings): value for name, value in converted.items()}


class _WholeModel:
    """A model of transformers for its converters: `get_parameter` returns meta tensors of the whole shapes."""

    def __init__(self, model: Any, shapes: Mapping[str, Sequence[int]]):
        self._model, self._shapes = model, shapes

    def get_parameter(self, name: str) -> Tensor:
        if name not in self._shapes:
            raise AttributeError(f"the model has no parameter {name}")
        return torch.empty(tuple(self._shapes[name]), device="meta")

    get_parameter_or_buffer = get_parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def find_transformers_model(models: Iterable[nn.Module]) -> Any:
    """Return the first model that is of transformers, None if there is none."""
    transformers = sys.modules.get("transformers")  # a model of transformers has imported it
    if transformers is None:
        return None
    return next((model for model in models if isinstance(model, transformers.PreTrainedModel)), None)


def group_checkpoint_keys(model: Any, keys: Iterable[str], names: Sequence[str]) -> tuple[list[KeyGroup], list[Any]]:
    """Find which tensors of a checkpoint make which tensors of the model.

    Args:
        model: the model of transformers, None for others.
        keys: the names in the checkpoint.
        names: the names of the model's whole state dict.

    Returns:
        The groups, and the conversions of transformers that were used.
    """
    library = _import_conversions(model)
    if library is None:
        return [KeyGroup(key, {key: [key]}) for key in keys], []
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    renamings, converters = _separate(transforms, library)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = dict.fromkeys(names, True)
    groups: dict[str, KeyGroup] = {}
    for key in sorted(keys, key=library.dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = library.rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:  # a name that a renaming took for another's
            name, pattern = library.rename_source_key(key, [], [], prefix, known)
        group = groups.setdefault(name, KeyGroup(name, {}, None if pattern is None else by_pattern[pattern]))
        group.sources.setdefault(key if pattern is None else pattern, []).append(key)
    for group in groups.values():
        if group.converter is None and len(group.sources) > 1:
            raise InvalidCheckpoint(
                f"the checkpoint has {' and '.join(group.sources)}, which are both {group.result} of the model"
            )
    return list(groups.values()), [transform for transform in transforms if transform.was_used()]


def group_model_names(model: Any, names: Iterable[str]) -> list[KeyGroup]:
    """Find which tensors of the model make which tensors of a checkpoint.

    The layout is that of the checkpoint that was loaded. For other models it is the one that transformers writes.

    Args:
        model: the model of transformers, None for others.
        names: the names of the model's whole state dict.
    """
    library = _import_conversions(model)
    if library is None:
        return [KeyGroup(name, {name: [name]}) for name in names]
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # as transformers' `revert_weight_conversion`
        from transformers.conversion_mapping import get_model_conversion_mapping

        transforms = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [transform for transform in transforms if not isinstance(transform, library.PrefixChange)]
    renamings, converters = _separate([transform.reverse_transform() for transform in reversed(transforms)], library)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, KeyGroup] = {}
    for name in sorted(names, key=library.dot_natural_key):
        key, pattern = name, None
        for converter in converters:
            key, pattern = converter.rename_source_key(key)
            if pattern is not None:
                break
        if pattern is None:
            key = _rename(key, renamings)
            groups[key] = KeyGroup(key, {name: [name]})
        else:
            group = groups.setdefault(key, KeyGroup(key, {}, by_pattern[pattern], renamings))
            group.sources.setdefault(pattern, []).append(name)
    return list(groups.values())


def check_keys(
    model: Any, groups: Iterable[KeyGroup], names: Sequence[str], tied: set[str], buffers: set[str], folder: Any
) -> None:
    """Check that a checkpoint has all tensors of the model and no others.

    Args:
        model: the model of transformers, whose own list of keys to ignore counts; None for others.
        tied: names that may be missing, because another name is the same parameter.
        buffers: names of buffers outside of the state dict. Older checkpoints have them, some for each layer.

    Raises:
        InvalidCheckpoint: keys are missing or unexpected.
    """
    unexpected, known, computed = list[str](), dict.fromkeys(names, True), set[str]()
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    derived = {_get_last_parts(name) for name in buffers}
    for group in groups:
        results = group.find_results(known)
        computed.update(results)
        if results or _get_last_parts(group.result) in derived or any(re.search(p, group.result) for p in patterns):
            continue
        unexpected += group.source_names
    missing = [name for name in names if name not in computed and name not in tied]
    if missing or unexpected:
        parts = [f"{len(missing)} keys are missing: {list_some(missing)}"] if missing else []
        parts += [f"{len(unexpected)} keys are unexpected: {list_some(unexpected)}"] if unexpected else []
        raise InvalidCheckpoint(f"the checkpoint {folder} does not fit the model. {'. '.join(parts)}")


def _get_last_parts(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _import_conversions(model: Any) -> Any:
    """Return transformers' module of conversions, None if the model needs none.

    Raises:
        MoefxError: this release of transformers converts keys in a way that moefx does not know.
    """
    if model is None:
        return None
    try:
        from transformers import core_model_loading
    except ImportError:  # transformers 4
        if getattr(model, "_checkpoint_conversion_mapping", None):
            raise MoefxError(
                f"{type(model).__name__} has names that differ from its checkpoint's, and this release of transformers "
                "has no conversions that moefx can use: install transformers 5"
            ) from None
        return None
    return core_model_loading


def _separate(transforms: Iterable[Any], library: Any) -> tuple[list[Any], list[Any]]:
    transforms = list(transforms)
    renamings = [transform for transform in transforms if isinstance(transform, library.WeightRenaming)]
    return renamings, [transform for transform in transforms if isinstance(transform, library.WeightConverter)]


def _rename(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
