"""Measure the cost of a step: time, and the bytes that autograd keeps between forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def saved_bytes(forward: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Count the bytes of the distinct storages that autograd saves while `forward` runs, those of `exclude` left out.

    A storage counts in full however small the saved view is: that is what stays allocated.
    """
    excluded = {t.untyped_storage().data_ptr() for t in exclude}
    saved: dict[int, Tensor] = {}  # holding the tensors keeps their addresses from being handed out again

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in excluded:
            saved.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def side_by_side(
    runs: dict[str, Callable[[], Any]], *, repeats: int, progress: Callable[[int], None] = lambda _: None
) -> dict[str, float]:
    """Measure the median seconds of each run; the runs take turns, so that a busy machine slows all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for number in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            synchronize()
            seconds[name].append(time.perf_counter() - started)
        progress(number + 1)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def block_inputs(model: nn.Module, names: Iterable[str], *args: Any) -> dict[str, tuple[tuple, dict]]:
    """Return the (args, kwargs) that each named submodule receives in one forward of the model, detached."""
    seen: dict[str, tuple[tuple, dict]] = {}
    handles = []
    for name in names:

        def record(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
            seen.setdefault(name, (detach(args), detach(kwargs)))

        handles.append(model.get_submodule(name).register_forward_pre_hook(record, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def detach(value: Any) -> Any:
    """Detach tensors: they become leaves, and floating-point tensors require a gradient."""
    return tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), value)


def parameters_and_buffers(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
