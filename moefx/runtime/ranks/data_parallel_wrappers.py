"""Keep wrappers for data parallelism from overwriting the experts of a model that is spread over a mesh.

DistributedDataParallel ignores parameters that the wrapped module lists in an attribute. DeepSpeed has no equivalent,
so it is refused. accelerate would wrap a spread model in DistributedDataParallel, or train it unwrapped: it is refused,
with the call that trains. All refusals are `WrapperRefusal`s.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...errors import ExpertsOverwritten, InvalidInput, MoefxError
from ...ir.ops.uneven_all_to_all import get_group

DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute that DistributedDataParallel reads
DEEPSPEED_HOOK = "set_deepspeed_parallelism"  # DeepSpeed's engine calls it on modules, before it broadcasts
ACCELERATE_FLAG = "_is_accelerate_prepared"  # accelerate reads it before it wraps a model


class IgnoredByDDP:
    """Names of the experts' parameters and buffers, for `DistributedDataParallel(model)`.

    DistributedDataParallel iterates over the names in its constructor. They are computed then, because modules may have
    been renamed or wrapped since `compile`. Empty if all ranks of its process group hold the same experts: experts are
    replicas there, like all other parameters.

    Args:
        ignored_names: names that the user's model lists already.
        warning: a warning about reductions that are left to the user, given once; "" for none.
    """

    def __init__(self, model: nn.Module, ignored_names: Sequence[str] = (), warning: str = ""):
        self.model, self.ignored_names, self.warning = model, tuple(ignored_names), warning

    def __iter__(self) -> Iterator[str]:
        yield from self.ignored_names
        wrapper = _find_ddp_under_construction(sys._getframe(1))
        root = self.model if wrapper is None else wrapper[0]
        tensors = _collect_expert_tensors(root, None if wrapper is None else wrapper[1])
        names = _collect_names(root, tensors)
        for tensor in tensors.values() if wrapper is not None else ():
            tensor._ddp_ignored = True  # type: ignore[attr-defined]  # read by DDP's mixed precision
        if names and wrapper is not None and self.warning:
            warnings.warn(f"moefx: {self.warning}", stacklevel=3)
            self.warning = ""
        yield from names

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __len__(self) -> int:
        return len(list(self))


class WrapperRefusal:
    """An attribute of a module that a wrapper reads before it wraps the module: reading it raises an error.

    DistributedDataParallel iterates over its attribute, accelerate (and transformers' `Trainer` by it) tests it, and
    DeepSpeed's engine calls it.
    """

    def __init__(self, attribute: str, error: type[MoefxError], message: str):
        self.attribute, self.error, self.message = attribute, error, message

    def install(self, module: nn.Module) -> None:
        """Let the wrapper refuse a module."""
        vars(module)[self.attribute] = self

    def build_error(self) -> MoefxError:
        return self.error(self.message)

    def __iter__(self) -> NoReturn:
        raise self.build_error()

    def __bool__(self) -> NoReturn:
        raise self.build_error()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise self.build_error()


# For a model that `parallelize` has sharded, and for a Pipeline. It replaces `IgnoredByDDP`.
DDP_REFUSAL = WrapperRefusal(
    DDP_IGNORED,
    InvalidInput,
    "DistributedDataParallel around a model that moefx.parallelize has sharded would reduce its gradients twice. "
    "Train the model as it is. For replicas instead of shards: moefx.parallelize(model, mesh, data='ddp')",
)
# For a block whose experts are spread over ranks.
DEEPSPEED_REFUSAL = WrapperRefusal(
    DEEPSPEED_HOOK,
    ExpertsOverwritten,
    "DeepSpeed's engine broadcasts all parameters from one rank, but moefx.compile(mesh=...) gave each rank different "
    "experts, which would be overwritten. Compile without a mesh for DeepSpeed, or train the spread model with torch's "
    "fully_shard or DistributedDataParallel (docs/expert_parallelism.md)",
)
# For a Pipeline.
ACCELERATED_PIPELINE_REFUSAL = WrapperRefusal(
    ACCELERATE_FLAG,
    InvalidInput,
    "Trainer and accelerate run the forward and the backward of a model, and a Pipeline runs a schedule of "
    "micro-batches: call pipe.step in a loop (docs/how_to/pipelines.md), or train over a mesh without an axis 'pp'",
)


def refuse_accelerate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let accelerate refuse a model that is spread over several ranks, with the call that trains it."""
    if mesh.size() > 1:
        WrapperRefusal(
            ACCELERATE_FLAG,
            InvalidInput,
            f"accelerate does not know how {type(model).__name__}, which moefx.compile(mesh=...) has spread over "
            "ranks, reduces its gradients. Use moefx.integrations.SpreadTrainer instead of transformers' Trainer, and "
            "moefx.integrations.SpreadAccelerator instead of accelerate's Accelerator (docs/how_to/trainer.md)",
        ).install(model)


@contextlib.contextmanager
def allow_accelerate(model: nn.Module) -> Iterator[None]:
    """Let accelerate prepare a spread model inside the context, for callers that reduce its gradients."""
    refusals = [(module, vars(module).get(ACCELERATE_FLAG)) for module in model.modules()]
    refusals = [(module, refusal) for module, refusal in refusals if isinstance(refusal, WrapperRefusal)]
    for module, _ in refusals:
        del vars(module)[ACCELERATE_FLAG]
    try:
        yield
    finally:
        for module, refusal in refusals:
            vars(module).setdefault(ACCELERATE_FLAG, refusal)


def _find_ddp_under_construction(frame: Any) -> tuple[nn.Module, Any] | None:
    """Return the module and the process group of a DistributedDataParallel whose constructor is running in `frame`."""
    ddp = frame.f_locals.get("self")
    if not isinstance(ddp, DistributedDataParallel):
        return None
    module, group = frame.f_locals.get("module"), getattr(ddp, "process_group", None)
    return (module, group) if isinstance(module, nn.Module) else None


def _collect_expert_tensors(root: nn.Module, wrapped_over: Any) -> dict[int, Tensor]:
    """Collect the expert tensors by `id` that differ between the ranks of a process group; without a group, between any
    ranks."""
    tensors = []
    for forward in _find_spread_forwards(root):
        parameters, placement = forward.watch.parameters, forward.watch.placement
        if wrapped_over is None or shares_other_experts(wrapped_over, placement.group):
            tensors += parameters.tensors(forward.block, placement.local_experts)
    return {id(tensor): tensor for tensor in tensors}


def _collect_names(root: nn.Module, tensors: Mapping[int, Tensor]) -> list[str]:
    """Return all names of the tensors in a module, as DistributedDataParallel spells them."""
    names = []
    for path, module in root.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in tensors:
                names += [f"{path}.{name}"] if path else [name, f".{name}"]
    return names


def _find_spread_forwards(root: nn.Module) -> list[Any]:
    forwards = [vars(module).get("forward") for module in root.modules()]
    return [f for f in forwards if getattr(f, "watch", None) is not None]


def shares_other_experts(wrapped_over: dist.ProcessGroup, group: str) -> bool:
    """Return whether another rank of a process group holds different experts than this rank.

    Args:
        group: the name of the expert axis' process group.
    """
    experts = dist.get_process_group_ranks(get_group(group))
    return len(set(experts) & set(dist.get_process_group_ranks(wrapped_over))) > 1


def list_broadcast_parameters(ddp: Any, experts: Sequence[Tensor], group: str) -> list[str]:
    """Return the names of expert tensors that a DistributedDataParallel wrongly treats as replicas."""
    if not shares_other_experts(ddp.process_group, group):
        return []
    ignored, expert_ids = set(ddp.parameters_to_ignore), set(map(id, experts))
    tensors = (*ddp.module.named_parameters(), *ddp.module.named_buffers())
    return [name for name, tensor in tensors if id(tensor) in expert_ids and name not in ignored]


def is_deepspeed(module: nn.Module) -> bool:
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(module).__mro__)


def find_outermost_wrapper(block: nn.Module) -> nn.Module | None:
    """Return the outermost wrapper around a block's model, such as DistributedDataParallel; None if none is found."""
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and any(m is block for m in o.modules())]
    wrappers: list[nn.Module] = [
        m for m in modules if issubclass(type(m), FSDPModule) or (m is not block and "module" in m._modules)
    ]
    inside = {id(m) for wrapper in wrappers for m in wrapper.modules() if m is not wrapper}
    return next((wrapper for wrapper in wrappers if id(wrapper) not in inside), None)


def describe_overwriting(wrapper: nn.Module | None, block: str, seen: str) -> str:
    """Return an error message: how a wrapper overwrote the experts of a block, and the remedy."""
    lost = "Then load the weights again (load_state_dict): the experts now hold another rank's values"
    if isinstance(wrapper, DistributedDataParallel):
        around, over = type(wrapper.module).__name__, f"overwrites the experts of {block}"
        return (
            f"DistributedDataParallel around {around} {over}: {seen}. Each rank holds different experts. Wrap the "
            "model that moefx.compile returned. To wrap a module around it, first call "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, "
            f"moefx.expert_parameter_names(module, buffers=True)). {lost}"
        )
    if wrapper is not None and is_deepspeed(wrapper):
        return f"{DEEPSPEED_REFUSAL.message}. Seen in {block}: {seen}. {lost}"
    by = "A broadcast of parameters, or an initialisation with the same random numbers on every rank,"
    leave = "Exclude moefx.expert_parameter_names(model) from it"
    if isinstance(wrapper, FSDPModule):
        by, leave = (
            "fully_shard over ranks of the expert axis",
            "Call moefx.parallelize(model, mesh) instead: it shards the experts over the other axes of the mesh",
        )
    elif wrapper is not None:
        by, leave = type(wrapper).__name__, f"Train without {type(wrapper).__name__}"
    return (
        f"{by} has overwritten the experts of {block}: {seen}. Each rank holds different experts, and a broadcast or "
        f"sharding over these ranks mixes them. {leave}; docs/expert_parallelism.md explains the reduction of "
        f"gradients. {lost}"
    )
