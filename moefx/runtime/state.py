"""State of a model whose experts are spread over a mesh: whole state dicts, and loading them.

`state_dict()` of a rank has its part: DTensors of the parameters that hold all experts, and the parameters of its own
experts under their names in the original. The union over the ranks is the original's, and so
`torch.distributed.checkpoint`, which saves unions and reads what each rank asks for, reshards between any two meshes
and the plain model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import MoefxError
from ..ir.expert_placement import Placement, Ways
from ..ir.ops.uneven_all_to_all import group_of
from .sharding import ExpertParameters


def full_state_dict(
    model: nn.Module,
    spread: dict[str, tuple[ExpertParameters, Placement, Ways]],
    *,
    cpu: bool = False,
    rank: int | None = None,
) -> dict[str, Any]:
    """See `moefx.full_state_dict`.

    Args:
        spread: of each block by name, what of it is spread, and how.
    """
    own, found = model.state_dict(), {}
    here = rank is None or dist.get_rank() == rank

    def keep(name: str, value: Any) -> None:
        if here:
            found[name] = value.cpu() if cpu and isinstance(value, Tensor) else value

    separate = {joined(block, name) for block, (of, *_) in spread.items() for each in of.separate for name in each}
    for name, value in own.items():
        if name not in separate:
            keep(name, _whole(value))
    for block, (of, placement, ways) in spread.items():
        for name, value in _gathered(own, block, of, placement, ways):
            keep(name, value)
    order = [name for name in _names(model) if name in found]
    return {name: found[name] for name in dict.fromkeys([*order, *found])}


def _gathered(
    own: dict[str, Any], block: str, of: ExpertParameters, placement: Placement, ways: Ways
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of separate experts: in one collective those that have the same name and slot on each rank."""
    if not of.separate:
        return
    group, at = group_of(placement.group), {place: expert for expert, place in enumerate(placement.places)}
    for slot, expert in enumerate(placement.own):
        for i, name in enumerate(of.separate[expert]):
            value = _whole(own[joined(block, name)]).contiguous()
            parts = [torch.empty_like(value) for _ in range(placement.num_ranks)]
            dist.all_gather(parts, value, group=group)
            for position, part in enumerate(parts):
                other = at[ways.order[position] * placement.num_slots + slot]
                yield joined(block, of.separate[other][i]), part


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """As in the original's state dict, those of experts elsewhere too."""
    own = [*module._parameters, *(b for b in module._buffers if b not in module._non_persistent_buffers_set)]
    for name in [*own, "_extra_state"]:
        yield prefix + name
    for name, child in module._modules.items():
        if child is not None:
            yield from _names(child, f"{prefix}{name}.")


def joined(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


class OnLoad:
    """Before a state dict is loaded into a block: of whole ones, this rank's part."""

    def __init__(self, parameters: ExpertParameters, placement: Placement):
        here = parameters.of_experts(placement.own)
        self.elsewhere = [name for each in parameters.separate for name in each if name not in here]
        self.stacked = tuple(parameters.stacked)

    def __call__(self, block: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in self.elsewhere:
            state_dict.pop(prefix + name, None)
        for name in self.stacked:
            value: Any = state_dict.get(prefix + name)
            held = _parameter(block, name)
            if type(value) in (Tensor, nn.Parameter) and isinstance(held, DTensor) and value.shape == held.shape:
                part = value.detach() if value.is_meta or held.is_meta else value.detach().to(held.device)
                state_dict[prefix + name] = distribute_tensor(
                    part, held.device_mesh, held.placements, src_data_rank=None
                )


class OnSave:
    """Before a block gives its state dict: torch's own way to a whole one knows nothing of experts elsewhere."""

    def __call__(self, block: nn.Module, prefix: str, keep_vars: bool) -> None:
        if _wants_full_state_dict():
            raise MoefxError(
                f"get_model_state_dict(full_state_dict=True) cannot gather {prefix[:-1] or 'the model'}, whose experts "
                "are parameters of their own on other ranks: use moefx.full_state_dict(model)"
            )


def _wants_full_state_dict() -> bool:
    """Whether `torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)` asks."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_get_model_state_dict" and "info" in frame.f_locals:
            return bool(getattr(frame.f_locals["info"], "full_state_dict", False))
        frame = frame.f_back
    return False


def _parameter(block: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(block.get_submodule(path), last, None)
