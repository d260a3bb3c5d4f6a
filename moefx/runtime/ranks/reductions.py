"""Reductions that the gradients of a spread model still need, and a warning if an optimizer steps without them.

After `backward` a rank has the gradients of its own loss. Gradients of experts are already sums over the ranks of the
expert axis. A `Reduction` lists the remaining sums, and the divisor for the mean loss of all ranks.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import InvalidInput
from ...util.user_code import is_user_file
from .replaced_parameters import ReplacedParameters
from .sharding import PIPELINE_AXIS, TENSOR_AXIS

GRADIENT_WATCH = "_moefx_gradients"  # the attribute of a spread model that holds its `GradientWatch`


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The reduction that turns the gradients of a group of parameters into gradients of the mean loss.

    Attributes:
        group: "experts" or "others".
        axes: mesh axes over which to sum the gradients.
        ranks: the ranks along these axes, including this one.
        divisor: divisor of the sum: the number of ranks with different tokens.
        summed: mesh axes over which the gradients are already summed.
    """

    group: str
    axes: tuple[str, ...]
    ranks: frozenset[int]
    divisor: int
    summed: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = f"summed over {_quote_names(self.summed)} already" if self.summed else ""
        over = f"sum over {_quote_names(self.axes)} ({len(self.ranks)} ranks)" if self.axes else ""
        divide = f"divide by {self.divisor}" if self.divisor > 1 else ""
        return ", ".join(filter(None, (done, over, divide))) or "nothing to do"


def build_reductions(
    mesh: DeviceMesh, expert_axes: tuple[str, ...], sequence_axis: str | None = None
) -> dict[str, Reduction]:
    """Return the reductions of the experts' parameters and of all others.

    Ranks along "pp" hold different parameters. Ranks along the sequence axis have the same tokens, and so do ranks
    along "tp" unless experts are spread over it.
    """
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    unsummed = {PIPELINE_AXIS, sequence_axis} | ({TENSOR_AXIS} - set(expert_axes))
    data = tuple(name for name in names if name not in unsummed and sizes[name] > 1)
    divisor = math.prod(sizes[name] for name in data)
    expert_data = tuple(name for name in data if name not in expert_axes)
    summed = tuple(name for name in data if name in expert_axes)
    return {
        "experts": Reduction("experts", expert_data, _find_ranks_along(mesh, expert_data), divisor, summed),
        "others": Reduction("others", data, _find_ranks_along(mesh, data), divisor),
    }


def _find_ranks_along(mesh: DeviceMesh, axes: tuple[str, ...]) -> frozenset[int]:
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    names = mesh.mesh_dim_names or ()
    at = tuple(slice(None) if name in axes else position for name, position in zip(names, coordinate, strict=True))
    return frozenset(mesh.mesh[at].flatten().tolist())


def format_reductions(reductions: Mapping[str, Reduction], counts: Mapping[str, int], outside: int) -> list[str]:
    """Format one line per group of parameters.

    Args:
        counts: number of parameters in each group.
        outside: number of the job's ranks that are not in the mesh.
    """
    lines = [
        f"{group:<12}{counts[group]} parameter(s): {reductions[group]}" for group in reductions if counts.get(group)
    ]
    beyond = f"{outside} rank(s) are not in the mesh: if they hold replicas, reduce over them too"
    return [*lines, *([f"{'outside':<12}{beyond}"] if lines and outside else [])]


class GradientWatch:
    """Warns once if an optimizer steps on unreduced gradients of a spread model. Refuses one of replaced parameters.

    Args:
        experts: names of the experts' parameters.
        reductions: the reductions of each group of parameters.
        manual: the user reduces gradients by hand, which cannot be detected: do not warn.
    """

    def __init__(self, model: nn.Module, experts: Iterable[str], reductions: Mapping[str, Reduction], manual: bool):
        self.model, self.experts, self.reductions, self.manual = model, frozenset(experts), dict(reductions), manual
        self.seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.has_warned = self.is_up_to_date = False
        self.replaced = ReplacedParameters()
        self.reduced: list[tuple[set[int], frozenset[int]]] = []
        _watches.add(self)
        weakref.finalize(self, _remove_unused_hook).atexit = False
        if not _hook_handles:
            _hook_handles.append(register_optimizer_step_pre_hook(_check_watches))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the first step of an optimizer.

        Raises:
            InvalidInput: it belongs to a `GradScaler` that decides for each rank alone, or it has parameters that the
                model had before.
        """
        if optimizer in self.seen:
            return
        self.replaced.check(optimizer, self.model)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        parameters = {name: p for name, p in self.model.named_parameters() if id(p) in stepped}
        if parameters and _has_plain_scaler():
            raise InvalidInput(
                f"GradScaler decides on each rank alone whether to skip a step, and the ranks of "
                f"{type(self.model).__name__} have different experts: they would drift apart. Use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, which has the same arguments"
            )
        self.seen.add(optimizer)
        self.is_up_to_date = False
        if self.manual or self.has_warned or not parameters:
            return
        if unreduced := self._find_unreduced(parameters):
            self.has_warned = True
            warnings.warn(self._format_warning(unreduced), stacklevel=_find_user_stacklevel())

    def _find_unreduced(self, parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """Find the names of unreduced parameters, by group."""
        unreduced: dict[str, list[str]] = {}
        for name, parameter in parameters.items():
            group = "experts" if name in self.experts else "others"
            needed = self.reductions[group].ranks
            is_sharded = isinstance(parameter, DTensor) and needed <= set(_list_mesh_ranks(parameter))
            if len(needed) > 1 and not is_sharded and not self._is_in_ddp(parameter, needed):
                unreduced.setdefault(group, []).append(name)
        return unreduced

    def _is_in_ddp(self, parameter: Tensor, needed: frozenset[int]) -> bool:
        """Return whether a DistributedDataParallel reduces a parameter over these ranks. Searches for wrappers once a
        step."""
        while not any(id(parameter) in reduced and needed <= ranks for reduced, ranks in self.reduced):
            if self.is_up_to_date:
                return False
            self.reduced, self.is_up_to_date = list(_find_ddp_reductions()), True
        return True

    def _format_warning(self, unreduced: Mapping[str, list[str]]) -> str:
        owners = {"experts": "its experts", "others": "the rest"}
        missing = "; ".join(
            f"{len(names)} parameter(s) of {owners[group]} ({', '.join(names[:2])}"
            f"{', ...' if len(names) > 2 else ''}): {self.reductions[group]}"
            for group, names in unreduced.items()
        )
        return (
            f"moefx: this step of the optimizer uses gradients of {type(self.model).__name__} that are not reduced "
            f"over the ranks, so its replicas drift apart. Missing before step(): {missing}. moefx.explain(model) "
            "lists all parameters. Call moefx.parallelize(model, mesh) before you build the optimizer, wrap these "
            "parameters in fully_shard or DistributedDataParallel, or reduce them by hand and set "
            "Plan(gradients='manual')"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientWatch:
        model = memo.get(id(self.model), self.model)
        memo[id(self)] = duplicate = GradientWatch(model, self.experts, self.reductions, self.manual)
        return duplicate


def _find_user_stacklevel() -> int:
    """Return the `stacklevel` of the user's line. torch and schedulers wrap `step`, so it varies."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _has_plain_scaler() -> bool:
    """Return whether a `GradScaler` calls the optimizer, and does not reduce its decision over the ranks.

    torch's `GradScaler` reduces it over the mesh of the optimizer's first gradient, which may be that of an expert.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # takes a while

            return caller.is_enabled() and not isinstance(caller, ShardedGradScaler)
        frame = frame.f_back
    return False


def _list_mesh_ranks(parameter: DTensor) -> list[int]:
    return parameter.device_mesh.mesh.flatten().tolist()


def _find_ddp_reductions() -> Iterator[tuple[set[int], frozenset[int]]]:
    """Find, for each DistributedDataParallel, the parameters that it reduces, by `id`, and the ranks that it reduces
    over."""
    for ddp in gc.get_objects():
        if issubclass(type(ddp), DistributedDataParallel) and "module" in ddp._modules:
            ignored = set(ddp.parameters_to_ignore)
            reduced = {id(p) for name, p in ddp.module.named_parameters() if name not in ignored}
            yield reduced, frozenset(dist.get_process_group_ranks(ddp.process_group))


_watches: weakref.WeakSet[GradientWatch] = weakref.WeakSet()
_hook_handles: list[Any] = []  # the handle of the hook, while a spread model lives
_stepping = threading.local()


def _check_watches(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _stepping.now = True
    try:
        for watch in list(_watches):
            watch.before_step(optimizer)
    finally:
        _stepping.now = False


def _remove_unused_hook() -> None:
    """Remove the hook after the last spread model is freed, unless torch is iterating over the hooks."""
    if _hook_handles and not any(True for _ in _watches) and not getattr(_stepping, "now", False):
        _hook_handles.pop().remove()


def _quote_names(names: tuple[str, ...]) -> str:
    return " and ".join(map(repr, names))
