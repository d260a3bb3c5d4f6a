"""Full state dicts of a model whose experts are spread over a mesh, and loading them.

`state_dict()` of a rank holds DTensors for parameters that stack all experts, and the parameters of the rank's own
experts under their original names. The union over the ranks is the original state dict. `torch.distributed.checkpoint`
saves the union and loads the keys of each rank, so it reshards between any two meshes and the plain model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import InvalidInput, MoefxError
from ...ir.expert_placement import ExchangeRoutes, Placement
from ...ir.ops.uneven_all_to_all import get_group
from .replaced_parameters import reshard
from .sharding import ExpertParameters


def full_state_dict(
    model: nn.Module,
    spread: dict[str, tuple[ExpertParameters, Placement, ExchangeRoutes]],
    *,
    cpu: bool = False,
    rank: int | None = None,
) -> dict[str, Any]:
    """See `moefx.full_state_dict`.

    Args:
        spread: for each block by name, its expert parameters, their placement and the routes between ranks.
    """
    local_state, merged = model.state_dict(), {}
    here = rank is None or dist.get_rank() == rank

    def keep(name: str, value: Any) -> None:
        if here:
            merged[name] = value.cpu() if cpu and isinstance(value, Tensor) else value

    separate = {
        join_name(block, name)
        for block, (parameters, *_) in spread.items()
        for names in parameters.separate
        for name in names
    }
    for name, value in local_state.items():
        if name not in separate:
            keep(name, _unshard(value))
    for block, (parameters, placement, routes) in spread.items():
        for name, value in _gather_separate_experts(local_state, block, parameters, placement, routes):
            keep(name, value)
    order = [name for name in iterate_names(model) if name in merged]
    return {name: merged[name] for name in dict.fromkeys([*order, *merged])}


def _gather_separate_experts(
    local_state: dict[str, Any], block: str, parameters: ExpertParameters, placement: Placement, routes: ExchangeRoutes
) -> Iterator[tuple[str, Tensor]]:
    """Gather the parameters of separate experts: one collective per name and local expert."""
    if not parameters.separate:
        return
    group, expert_by_physical_id = (
        get_group(placement.group),
        {physical_id: expert for expert, physical_id in enumerate(placement.physical_ids)},
    )
    for local_id, expert in enumerate(placement.local_experts):
        for i, name in enumerate(parameters.separate[expert]):
            if join_name(block, name) not in local_state:  # a buffer that is in no state dict, on all ranks alike
                continue
            value = _unshard(local_state[join_name(block, name)]).contiguous()
            parts = [torch.empty_like(value) for _ in range(placement.num_ranks)]
            dist.all_gather(parts, value, group=group)
            for position, part in enumerate(parts):
                other = expert_by_physical_id[routes.order[position] * placement.experts_per_rank + local_id]
                yield join_name(block, parameters.separate[other][i]), part


def _unshard(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def iterate_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Return the names in the original state dict, including experts on other ranks."""
    names = [*module._parameters, *(b for b in module._buffers if b not in module._non_persistent_buffers_set)]
    for name in [*names, "_extra_state"]:
        yield prefix + name
    for name, child in module._modules.items():
        if child is not None:
            yield from iterate_names(child, f"{prefix}{name}.")


def join_name(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


class KeepLocalExperts:
    """A pre-hook of `load_state_dict`: reduce full parameters to this rank's part."""

    def __init__(self, parameters: ExpertParameters, placement: Placement):
        here = parameters.of_experts(placement.local_experts)
        self.elsewhere = [name for expert_names in parameters.separate for name in expert_names if name not in here]
        self.stacked = tuple(parameters.stacked)

    def __call__(self, block: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in self.elsewhere:
            state_dict.pop(prefix + name, None)
        for name in self.stacked:
            _shard_entry(state_dict, prefix + name, _find_parameter(block, name))


class ShardOnLoad:
    """A pre-hook of `load_state_dict` of a model that FSDP has sharded: reduce full parameters to this rank's part."""

    def __call__(self, model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        reshard(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            _shard_entry(state_dict, prefix + name, parameter)


def _shard_entry(state_dict: dict[str, Any], name: str, parameter: Any) -> None:
    """Replace a full tensor in a state dict by this rank's part of it, if the parameter is sharded.

    Raises:
        InvalidInput: the tensor is a part of another mesh.
    """
    value: Any = state_dict.get(name)
    if isinstance(value, DTensor) and isinstance(parameter, DTensor) and value.device_mesh != parameter.device_mesh:
        raise InvalidInput(
            f"load_state_dict: {name} is sharded over {value.device_mesh}, and the model over {parameter.device_mesh}. "
            "Load moefx.full_state_dict(other_model), or save and load with torch.distributed.checkpoint"
        )
    if type(value) in (Tensor, nn.Parameter) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        full = value.detach() if value.is_meta or parameter.is_meta else value.detach().to(parameter.device)
        state_dict[name] = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


class RefuseTorchFullStateDict:
    """A pre-hook of `state_dict`: refuse torch's full state dict, which would omit experts on other ranks."""

    def __call__(self, block: nn.Module, prefix: str, keep_vars: bool) -> None:
        if _is_gathering_full_state_dict():
            raise MoefxError(
                f"get_model_state_dict(full_state_dict=True) cannot gather {prefix[:-1] or 'the model'}, whose experts "
                "are parameters of their own on other ranks: use moefx.full_state_dict(model)"
            )


class RefuseOwnGroups:
    """Refuses torch's `get_state_dict(model, optimizer)` and `get_optimizer_state_dict` if a group of the optimizer has
    parameters of this rank only.

    torch.distributed.checkpoint saves the groups of one rank, with the names of its parameters. A rank that finds none
    of its own names in a group would load it without learning rate.

    Args:
        list_own: returns the names of a model's parameters that other ranks do not have.
    """

    def __init__(self, list_own: Callable[[nn.Module], Iterable[str]]):
        self.list_own = list_own

    def install(self, model: nn.Module) -> None:
        """Check when the state dict of the model is made, and when `get_optimizer_state_dict` lists its modules."""
        model.register_state_dict_pre_hook(self)
        vars(model)["_fqn_modifiers"] = CheckedNames(model, self)  # torch asks each module for changed names

    def __call__(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.check(model, "get_state_dict", "info")

    def check(self, model: nn.Module, function: str, options_name: str) -> None:
        """Raise `MoefxError` if a function of torch is saving groups with parameters of this rank only.

        Args:
            function, options_name: the name of the function, and of its variable with the options.
        """
        variables = _find_caller_variables(function, options_name, "optimizers")
        if not variables or getattr(variables[options_name], "flatten_optimizer_state_dict", False):
            return
        own_names = set(self.list_own(model))
        own = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in own_names}
        for optimizer in variables["optimizers"]:
            for number, group in enumerate(optimizer.param_groups):
                if group["params"] and all(id(p) in own for p in group["params"]):
                    raise MoefxError(
                        f"{function}(model, optimizer): group {number} of {type(optimizer).__name__} has "
                        "parameters of this rank only, and torch.distributed.checkpoint saves the groups of one rank. "
                        "Pass options=StateDictOptions(flatten_optimizer_state_dict=True) when you get and when you "
                        "set the state dict: it saves learning rates and other options for each parameter"
                    )


class CheckedNames:
    """The names that torch.distributed.checkpoint changes in a module: those of its class, mostly none. Asking for them
    is the only call of a model from `get_optimizer_state_dict` that can be checked."""

    def __init__(self, model: nn.Module, refusal: RefuseOwnGroups):
        self.model, self.refusal = model, refusal

    def __call__(self) -> dict[str, str]:
        self.refusal.check(self.model, "get_optimizer_state_dict", "options")
        of_class = getattr(type(self.model), "_fqn_modifiers", None)
        return {} if of_class is None else of_class(self.model)


class SavePretrainedRefusal:
    """Replaces the method `save_pretrained` of a module of a spread model, which would write this rank's part only.

    A call with the state dict of all experts runs the method.
    """

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        if state_dict is None:
            name = type(self.module).__name__
            raise MoefxError(
                f"{name}.save_pretrained({str(save_directory)!r}) would write this rank's part of a model that is "
                "spread over ranks: call moefx.save_pretrained(model, folder) on every rank. It writes the same files"
            )
        cls: Any = type(self.module)
        return cls.save_pretrained(self.module, save_directory, *args, state_dict=state_dict, **kwargs)


def refuse_save_pretrained(model: nn.Module) -> None:
    """Let the method `save_pretrained` of a spread model, and of the models in it, raise with the call that works."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained"):
            vars(module)["save_pretrained"] = SavePretrainedRefusal(module)


def _is_gathering_full_state_dict() -> bool:
    """Return whether `torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)` is
    running."""
    variables = _find_caller_variables("_get_model_state_dict", "info")
    return bool(getattr(variables.get("info"), "full_state_dict", False))


def _find_caller_variables(function: str, *names: str) -> dict[str, Any]:
    """Return the local variables of the nearest caller of this name that has such variables; {} without one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_locals.keys() >= {*names}:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def _find_parameter(block: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(block.get_submodule(path), last, None)
