"""Wrappers for data parallelism around a model that is spread over a mesh: which leave its experts alone, which do not.

DistributedDataParallel leaves alone what the wrapped module names in an attribute. DeepSpeed has nothing like that.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..errors import ExpertsOverwritten
from ..ir.ops.uneven_all_to_all import group_of

DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute that DistributedDataParallel reads
DEEPSPEED_HOOK = "set_deepspeed_parallelism"  # DeepSpeed's engine calls it on modules, before it broadcasts


class IgnoredByDDP:
    """Names of the experts' parameters and buffers, for `DistributedDataParallel(model)`.

    DistributedDataParallel reads them while it is constructed. They are made then: modules may have been renamed or
    wrapped since `compile`. If all ranks of its process group hold the same experts, there are none: experts are
    replicas there, like all other parameters.

    Args:
        more: names that the user's model lists already.
        told: a warning that says what is left to the user, given once; "" for none.
    """

    def __init__(self, model: nn.Module, more: Sequence[str] = (), told: str = ""):
        self.model, self.more, self.told = model, tuple(more), told

    def __iter__(self) -> Iterator[str]:
        yield from self.more
        wrapper = _constructed(sys._getframe(1))
        root = self.model if wrapper is None else wrapper[0]
        tensors = _tensors_of_experts(root, None if wrapper is None else wrapper[1])
        names = _names_below(root, tensors)
        for tensor in tensors.values() if wrapper is not None else ():
            tensor._ddp_ignored = True  # type: ignore[attr-defined]  # asked of mixed precision
        if names and wrapper is not None and self.told:
            warnings.warn(f"moefx: {self.told}", stacklevel=3)
            self.told = ""
        yield from names

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __len__(self) -> int:
        return len(list(self))


def _constructed(frame: Any) -> tuple[nn.Module, Any] | None:
    """The module that a DistributedDataParallel is being made of, and its process group."""
    made = frame.f_locals.get("self")
    if not isinstance(made, DistributedDataParallel):
        return None
    module, group = frame.f_locals.get("module"), getattr(made, "process_group", None)
    return (module, group) if isinstance(module, nn.Module) else None


def _tensors_of_experts(root: nn.Module, wrapped_over: Any) -> dict[int, Tensor]:
    """Tensors by `id` that differ between the ranks of a process group; without a group, between any ranks."""
    found = []
    for forward in _spread_forwards(root):
        parameters, placement = forward.watch.parameters, forward.watch.placement
        if wrapped_over is None or shares_other_experts(wrapped_over, placement.group):
            found += parameters.tensors(forward.block, placement.own)
    return {id(tensor): tensor for tensor in found}


def _names_below(root: nn.Module, tensors: Mapping[int, Tensor]) -> list[str]:
    """All names of tensors below a module, as DistributedDataParallel spells them in its code."""
    names = []
    for path, module in root.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in tensors:
                names += [f"{path}.{name}"] if path else [name, f".{name}"]
    return names


def _spread_forwards(root: nn.Module) -> list[Any]:
    forwards = [vars(module).get("forward") for module in root.modules()]
    return [f for f in forwards if getattr(f, "watch", None) is not None]


def shares_other_experts(wrapped_over: dist.ProcessGroup, group: str) -> bool:
    """Whether other ranks of a process group hold other experts than this rank.

    Args:
        group: the name of the expert axis' process group.
    """
    experts = dist.get_process_group_ranks(group_of(group))
    return len(set(experts) & set(dist.get_process_group_ranks(wrapped_over))) > 1


def broadcasting_ddp(ddp: Any, experts: Sequence[Tensor], group: str) -> list[str]:
    """The names of expert tensors that a DistributedDataParallel takes for replicas, though they are not."""
    if not shares_other_experts(ddp.process_group, group):
        return []
    ignored, own = set(ddp.parameters_to_ignore), set(map(id, experts))
    tensors = (*ddp.module.named_parameters(), *ddp.module.named_buffers())
    return [name for name, tensor in tensors if id(tensor) in own and name not in ignored]


def is_deepspeed(module: nn.Module) -> bool:
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(module).__mro__)


class RefuseDeepSpeed:
    """Stands on a block under the name that DeepSpeed's engine calls before it broadcasts parameters."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        refuse_deepspeed()


def refuse_deepspeed() -> NoReturn:
    raise ExpertsOverwritten(_NO_DEEPSPEED)


_NO_DEEPSPEED = (
    "DeepSpeed's engine takes all parameters for replicas, and the experts of this model are spread over ranks by "
    "moefx.compile(mesh=...): it copies those of one rank to all others. Compile without a mesh for DeepSpeed, or "
    "train the spread model with torch's fully_shard or DistributedDataParallel (docs/expert_parallelism.md)"
)


def outermost_wrapper(block: nn.Module) -> nn.Module | None:
    """The wrapper of the model that a block is in, such as DistributedDataParallel; None if none is found."""
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and any(m is block for m in o.modules())]
    wrappers: list[nn.Module] = [
        m for m in modules if issubclass(type(m), FSDPModule) or (m is not block and "module" in m._modules)
    ]
    inside = {id(m) for wrapper in wrappers for m in wrapper.modules() if m is not wrapper}
    return next((wrapper for wrapper in wrappers if id(wrapper) not in inside), None)


def describe_overwriting(wrapper: nn.Module | None, block: str, seen: str) -> str:
    """What happened to the experts of a block, and the way out."""
    lost = "Then load the weights again (load_state_dict): what was broadcast over these experts is not theirs"
    if isinstance(wrapper, DistributedDataParallel):
        around, over = type(wrapper.module).__name__, f"overwrites the experts of {block}"
        return (
            f"DistributedDataParallel around {around} {over}: {seen}. Each rank holds other experts. Wrap the model "
            "that moefx.compile returned. To wrap a module around it, first call "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, "
            f"moefx.expert_parameter_names(module, buffers=True)). {lost}"
        )
    if wrapper is not None and is_deepspeed(wrapper):
        return f"{_NO_DEEPSPEED}. Seen in {block}: {seen}. {lost}"
    by = "A broadcast of parameters, or an initialisation with the same random numbers on every rank,"
    leave = "Leave moefx.expert_parameter_names(model) out of it"
    if isinstance(wrapper, FSDPModule):
        by, leave = "fully_shard over ranks of the expert axis", "Give the experts' blocks mesh=mesh['dp'] or the like"
    elif wrapper is not None:
        by, leave = type(wrapper).__name__, f"Train without {type(wrapper).__name__}"
    return (
        f"{by} has overwritten the experts of {block}: {seen}. Each rank holds other experts, and whatever broadcasts "
        f"or shards parameters over those ranks mixes them. {leave}; docs/expert_parallelism.md says how gradients "
        f"are reduced then. {lost}"
    )
