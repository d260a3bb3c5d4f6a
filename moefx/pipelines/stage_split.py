"""Cut a decoder into stages: find its layers, share them out, and build the model of each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from ..capture.search.example_calls import find_example_calls
from ..distribution.layer_container import CONTAINERS, find_layer_container
from ..errors import InvalidInput, InvalidPlan
from ..util.model_copy import copy_model
from .stage_dry_run import FIRST, DryRun, replace_submodule
from .stage_modules import AbsentModule, EndLayer, EntryLayer, SkippedLayer, StageForward, StagePort

Split = Literal["auto"] | Mapping[str, list[int]]


@dataclasses.dataclass(frozen=True)
class StageSplit:
    """The stages of a model.

    Attributes:
        layers: name of the container of the layers.
        keys: the names of the layers in it.
        counts: number of layers of each stage.
        owners: for each module with parameters outside of the layers, the stage that it belongs to.
        shared: modules without parameters outside of the layers, which every stage has.
        dry_run: the model's skeleton.
        basis: the reason for these numbers of layers, for readers.
    """

    layers: str
    keys: tuple[str, ...]
    counts: tuple[int, ...]
    owners: dict[str, int]
    shared: tuple[str, ...]
    dry_run: DryRun
    basis: str

    @property
    def num_stages(self) -> int:
        return len(self.counts)

    def find_range(self, stage: int) -> tuple[int, int]:
        """Return the first layer of a stage, and the first one of the next stage."""
        begin = sum(self.counts[:stage])
        return begin, begin + self.counts[stage]

    def list_layers(self, stage: int) -> list[str]:
        """Return the names of the layers of a stage."""
        begin, end = self.find_range(stage)
        return [f"{self.layers}.{key}" for key in self.keys[begin:end]]

    def list_units(self, stage: int) -> list[str]:
        """Return the names of the layers and other modules whose parameters belong to a stage."""
        return [*self.list_layers(stage), *(name for name, owner in self.owners.items() if owner == stage)]


def count_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Share out layers evenly over stages, if no times are predicted. The embedding and the head count as a layer each.

    Raises:
        InvalidPlan: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise InvalidPlan(
            f"the model has {num_layers} layers, fewer than the {num_stages} stages of this schedule: use a shorter "
            "pipeline axis, or a schedule with one stage a rank"
        )
    counts = [1] * num_stages
    load = list(counts)
    load[0], load[-1] = load[0] + 1, load[-1] + 1
    for _ in range(num_layers - num_stages):
        stage = load.index(min(load))
        counts[stage], load[stage] = counts[stage] + 1, load[stage] + 1
    return tuple(counts)


def read_split(split: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """Return the name of the layers and the number of layers of each stage; None for each that `split` leaves open.

    Raises:
        InvalidPlan: `split` is neither "auto" nor {name: [layers of each stage]}.
    """
    if split == "auto":
        return None, None
    if isinstance(split, Mapping) and len(split) == 1:
        ((name, counts),) = split.items()
        numbers = counts if isinstance(counts, (list, tuple)) else ()
        if isinstance(name, str) and numbers and all(type(number) is int and number > 0 for number in numbers):
            return name, tuple(numbers)
    raise InvalidPlan(
        f"split={split!r}: expected 'auto', or the name of the list of layers and the number of layers of each stage, "
        "such as {'model.layers': [3, 5]}"
    )


def find_layer_keys(model: nn.Module, name: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the name of the container of a decoder's layers, and the names of the layers in it.

    Args:
        name: the container's name according to `split`; None: find it.

    Raises:
        InvalidPlan: the model has no container of this name.
        InvalidInput: no container is found.
    """
    layers = find_layer_container(model) if name is None else name
    container = dict(model.named_modules(remove_duplicate=False)).get(layers)
    if not layers or not isinstance(container, CONTAINERS):
        start = f"split={{{layers!r}: ...}}: {type(model).__name__} has no list of modules of that name"
        try:
            remedy = f"Its layers seem to be {find_layer_container(model)!r}"
        except InvalidInput as error:
            remedy = str(error)
        raise InvalidPlan(f"{start}. {remedy}")
    return layers, tuple(key for key, _ in container.named_children())


def split_model(
    model: nn.Module, layers: str, keys: tuple[str, ...], counts: tuple[int, ...], basis: str, example_inputs: Any
) -> StageSplit:
    """Cut a model into stages of some numbers of layers.

    Args:
        layers, keys, counts, basis: see `StageSplit`.

    Raises:
        InvalidPlan: `counts` do not fit the model.
        InvalidInput: the model cannot be cut into stages.
    """
    if sum(counts) != len(keys):
        raise InvalidPlan(f"split={{{layers!r}: {list(counts)}}} has {sum(counts)} layers, the model {len(keys)}")
    outer = _list_outer_modules(model, layers)
    with_parameters = [name for name in outer if next(model.get_submodule(name).parameters(), None) is not None]
    dry_run = DryRun(model, layers, with_parameters)
    end_by_module = _run_examples(dry_run, model, example_inputs)
    stage_by_parameter: dict[nn.Parameter, int] = {}
    for stage, count in enumerate(counts):
        begin = sum(counts[:stage])
        for key in keys[begin : begin + count]:
            stage_by_parameter |= dict.fromkeys(model.get_submodule(f"{layers}.{key}").parameters(), stage)
    owners = {name: 0 if end == FIRST else len(counts) - 1 for name, end in end_by_module.items()}
    for name, stage in owners.items():
        stage_by_parameter |= dict.fromkeys(model.get_submodule(name).parameters(), stage)
    for name in with_parameters:  # a second name of a module, or a module that the forward does not call
        parameter = next(model.get_submodule(name).parameters())
        owners.setdefault(name, stage_by_parameter.get(parameter, 0))
    shared_names = tuple(outer_name for outer_name in outer if outer_name not in owners)
    split = StageSplit(layers, keys, counts, owners, shared_names, dry_run, basis)
    _check_parameters(model, split)
    return split


def _list_outer_modules(model: nn.Module, layers: str) -> list[str]:
    """Return the names of the outermost modules that do not contain the layers. A module may have several names.

    Raises:
        InvalidInput: a module around the layers has parameters or saved buffers of its own.
    """
    outer: list[tuple[str, nn.Module]] = []
    around: list[nn.Module] = []
    path = ""
    for step in layers.split("."):
        module = model.get_submodule(path)
        for name, _ in module.named_parameters(recurse=False):
            raise InvalidInput(
                f"{path + '.' if path else ''}{name} is a parameter of {type(module).__name__}, which would be in "
                "every stage of a pipeline: put it into a module that runs before or after the layers"
            )
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                raise InvalidInput(
                    f"{path + '.' if path else ''}{name} is a buffer of {type(module).__name__}, which would be in "
                    "every stage of a pipeline, and in no state dict: put it into a module that runs before or after "
                    "the layers, or register it with persistent=False"
                )
        around.append(module)
        children = ((key, child) for key, child in module._modules.items() if child is not None and key != step)
        outer += [(f"{path}.{key}" if path else key, child) for key, child in children]
        path = f"{path}.{step}" if path else step
    around.append(model.get_submodule(layers))
    return [name for name, child in outer if child not in around]


def _run_examples(dry_run: DryRun, model: nn.Module, example_inputs: Any) -> dict[str, str]:
    """Run the skeleton on the first example that it takes, and return the ends of the modules around the layers."""
    error: InvalidInput | None = None
    for args, kwargs in find_example_calls(model, example_inputs):
        try:
            return dry_run.run(args, kwargs)[1]
        except InvalidInput as found:
            error = error or found
    assert error is not None
    if example_inputs is None:
        raise InvalidInput(f"{error}. The inputs were guessed: pass example_inputs=(...) if they do not fit") from error
    raise error


def _check_parameters(model: nn.Module, split: StageSplit) -> None:
    """Check that each stage has parameters, and that no parameter is in two stages.

    Raises:
        InvalidInput: such as for tied embeddings.
    """
    first: dict[int, tuple[int, str]] = {}
    units = [(stage, unit) for stage in range(split.num_stages) for unit in split.list_units(stage)]
    for stage in range(split.num_stages):
        if not any(next(model.get_submodule(unit).parameters(), None) is not None for unit in split.list_units(stage)):
            raise InvalidInput(f"stage {stage} would have no parameters: name other numbers of layers by split=")
    for stage, unit in units:
        for name, parameter in model.get_submodule(unit).named_parameters(remove_duplicate=False):
            other, other_name = first.setdefault(id(parameter), (stage, f"{unit}.{name}"))
            if other != stage:
                raise InvalidInput(
                    f"{other_name} and {unit}.{name} are the same parameter, in stages {other} and {stage}: their "
                    "gradients would have to be summed over stages. Untie them (transformers: "
                    "tie_word_embeddings=False, then copy the weights)"
                )


def reduce_to_stage(model: nn.Module, split: StageSplit, stage: int) -> nn.Module:
    """Return a copy of a model without the layers of other stages. It shares the parameters, and still runs on the
    model's inputs: `install_stage` follows after `compile`."""
    stage_model, _ = copy_model(model)
    container = stage_model.get_submodule(split.layers)
    begin, end = split.find_range(stage)
    for index, (key, layer) in enumerate(list(container.named_children())):
        if not begin <= index < end:
            setattr(container, key, SkippedLayer(layer, f"{split.layers}.{key}"))
    return stage_model


def install_stage(model: nn.Module, split: StageSplit, stage: int, port: StagePort) -> None:
    """Turn a reduced model into a stage, in place: remove modules of other stages, and set its forward."""
    container, (begin, end) = model.get_submodule(split.layers), split.find_range(stage)
    for index, make in ((begin - 1, EntryLayer), (end, EndLayer)):
        if 0 <= index < len(split.keys):
            key = split.keys[index]
            setattr(container, key, make(container.get_submodule(key), f"{split.layers}.{key}", port))
    for name, owner in split.owners.items():
        if owner != stage:
            replace_submodule(model, name, AbsentModule(model.get_submodule(name), name, port))
    forward: Any = StageForward(model, port)
    model.forward = forward


def check_boundary(split: StageSplit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states between stages for the inputs of a micro-batch, a meta tensor.

    Raises:
        InvalidInput: the model cannot be cut for these inputs, or uses other modules than for the example inputs.
    """
    hidden, end_by_module = split.dry_run.run(args, kwargs)
    last = split.num_stages - 1
    for name, end in end_by_module.items():
        if split.owners[name] != (0 if end == FIRST else last):
            raise InvalidInput(
                f"{name} is in stage {split.owners[name]}, because the example inputs use it there or not at all, and "
                f"these inputs use it in the {end} stage: pass pipeline(..., example_inputs=) of this kind"
            )
    return hidden
