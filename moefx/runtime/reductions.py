"""Which gradients of a spread model are left to reduce, and a warning if an optimizer steps on them as they are.

After `backward` a rank has the gradients of its own loss. Experts are the exception: their gradients are sums over the
ranks of the expert axis. `Reduction` says what else makes them gradients of the mean loss of all ranks.
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

from ..util.user_code import is_user_file

STAGES, SHARED = "pp", "tp"  # mesh axes: stages of a pipeline, and ranks with the same tokens
GRADIENT_WATCH = "_moefx_gradients"  # the attribute of a spread model that holds its `GradientWatch`


@dataclasses.dataclass(frozen=True)
class Reduction:
    """What makes the gradients of one group of parameters those of the mean loss.

    Attributes:
        of: the group, "experts" or "others".
        axes: mesh axes over which gradients are to be summed. ranks: along these axes, with this one.
        divisor: what to divide the sum by, the number of ranks with tokens of their own.
        summed: mesh axes over which they are summed already.
    """

    of: str
    axes: tuple[str, ...]
    ranks: frozenset[int]
    divisor: int
    summed: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = f"summed over {_quoted(self.summed)} already" if self.summed else ""
        over = f"sum over {_quoted(self.axes)} ({len(self.ranks)} ranks)" if self.axes else ""
        divide = f"divide by {self.divisor}" if self.divisor > 1 else ""
        return ", ".join(filter(None, (done, over, divide))) or "nothing to do"


def build_reductions(
    mesh: DeviceMesh, expert_axes: tuple[str, ...], sequence_axis: str | None = None
) -> dict[str, Reduction]:
    """The reductions for the experts' parameters and for all others.

    Ranks along "pp" have other parameters. Those along the sequence axis have the same tokens, and so do those along
    "tp" if experts are not spread over it.
    """
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    alike = {STAGES, sequence_axis} | ({SHARED} - set(expert_axes))
    data = tuple(name for name in names if name not in alike and sizes[name] > 1)
    divisor = math.prod(sizes[name] for name in data)
    left = tuple(name for name in data if name not in expert_axes)
    summed = tuple(name for name in data if name in expert_axes)
    return {
        "experts": Reduction("experts", left, _ranks_along(mesh, left), divisor, summed),
        "others": Reduction("others", data, _ranks_along(mesh, data), divisor),
    }


def _ranks_along(mesh: DeviceMesh, axes: tuple[str, ...]) -> frozenset[int]:
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    names = mesh.mesh_dim_names or ()
    at = tuple(slice(None) if name in axes else own for name, own in zip(names, coordinate, strict=True))
    return frozenset(mesh.mesh[at].flatten().tolist())


def format_reductions(found: Mapping[str, Reduction], counts: Mapping[str, int], outside: int) -> list[str]:
    """One line for each group of parameters.

    Args:
        counts: parameters of each group. outside: ranks of the job that are not in the mesh.
    """
    lines = [f"{of:<12}{counts[of]} parameter(s): {found[of]}" for of in found if counts.get(of)]
    beyond = f"{outside} rank(s) are not in the mesh: if they hold replicas, reduce over them too"
    return [*lines, *([f"{'outside':<12}{beyond}"] if lines and outside else [])]


class GradientWatch:
    """Warns once if an optimizer steps on gradients of a spread model that nothing has reduced.

    Args:
        experts: names of the experts' parameters.
        manual: the user reduces gradients by hand, which leaves no trace.
    """

    def __init__(self, model: nn.Module, experts: Iterable[str], found: Mapping[str, Reduction], manual: bool):
        self.model, self.experts, self.found, self.manual = model, frozenset(experts), dict(found), manual
        self.seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.has_warned = self.is_up_to_date = False
        self.reduced: list[tuple[set[int], frozenset[int]]] = []
        _watches.add(self)
        weakref.finalize(self, _remove_if_unused).atexit = False
        if not _installed:
            _installed.append(register_optimizer_step_pre_hook(_before_step))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.manual or self.has_warned or optimizer in self.seen:
            return
        self.seen.add(optimizer)
        self.is_up_to_date = False
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        own = {name: p for name, p in self.model.named_parameters() if id(p) in stepped}
        if own and (unreduced := self._unreduced(own)):
            self.has_warned = True
            warnings.warn(self._warning(unreduced), stacklevel=_level_of_user())

    def _unreduced(self, parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """Names of parameters, by group, whose replicas on other ranks have gradients of their own."""
        left: dict[str, list[str]] = {}
        for name, parameter in parameters.items():
            of = "experts" if name in self.experts else "others"
            needed = self.found[of].ranks
            is_sharded = isinstance(parameter, DTensor) and needed <= set(_mesh_ranks(parameter))
            if len(needed) > 1 and not is_sharded and not self._is_in_ddp(parameter, needed):
                left.setdefault(of, []).append(name)
        return left

    def _is_in_ddp(self, parameter: Tensor, needed: frozenset[int]) -> bool:
        """Whether a DistributedDataParallel reduces a parameter over these ranks. Looks for new ones once a step."""
        while not any(id(parameter) in own and needed <= ranks for own, ranks in self.reduced):
            if self.is_up_to_date:
                return False
            self.reduced, self.is_up_to_date = list(_reduced_by_ddp()), True
        return True

    def _warning(self, unreduced: Mapping[str, list[str]]) -> str:
        what = "; ".join(
            f"{len(names)} parameter(s) of {'its experts' if of == 'experts' else 'the rest'} ({', '.join(names[:2])}"
            f"{', ...' if len(names) > 2 else ''}): {self.found[of]}"
            for of, names in unreduced.items()
        )
        return (
            f"moefx: this step of the optimizer uses gradients of {type(self.model).__name__} that nothing has reduced "
            f"over the ranks, so its replicas drift apart. Left to do before step(): {what}. moefx.explain(model) says "
            "it for all parameters. Wrap what is left in fully_shard or DistributedDataParallel, or reduce by hand and "
            "say Plan(gradients='manual')"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientWatch:
        model = memo.get(id(self.model), self.model)
        memo[id(self)] = duplicate = GradientWatch(model, self.experts, self.found, self.manual)
        return duplicate


def _level_of_user() -> int:
    """The `stacklevel` that shows the user's line: torch wraps `step`, and schedulers wrap it again."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _mesh_ranks(parameter: DTensor) -> list[int]:
    return parameter.device_mesh.mesh.flatten().tolist()


def _reduced_by_ddp() -> Iterator[tuple[set[int], frozenset[int]]]:
    """Parameters that a DistributedDataParallel reduces, by `id`, and the ranks that it reduces them over."""
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and "module" in found._modules:
            ignored = set(found.parameters_to_ignore)
            own = {id(p) for name, p in found.module.named_parameters() if name not in ignored}
            yield own, frozenset(dist.get_process_group_ranks(found.process_group))


_watches: weakref.WeakSet[GradientWatch] = weakref.WeakSet()
_installed: list[Any] = []  # the handle of the hook, while a spread model lives
_stepping = threading.local()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _stepping.now = True
    try:
        for watch in list(_watches):
            watch.before_step(optimizer)
    finally:
        _stepping.now = False


def _remove_if_unused() -> None:
    """Remove the hook with the last spread model, but not while torch iterates over the hooks."""
    if _installed and not any(True for _ in _watches) and not getattr(_stepping, "now", False):
        _installed.pop().remove()


def _quoted(names: tuple[str, ...]) -> str:
    return " and ".join(map(repr, names))
