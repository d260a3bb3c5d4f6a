"""Run a copy of a module on real tensors, if it does not run on abstract ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ...errors import CaptureError
from ...ir.argument_binding import find_device
from ...util.model_copy import copy_model
from ...util.tensor_trees import has_values, is_float
from ..state.side_effects import keep_random_state


def run_for_layouts(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the results of a call as meta tensors. Random numbers replace abstract floats.

    Raises:
        CaptureError: its weights have no values, or its results are not tensors and plain numbers.
    """
    out = run_copy(module, args, kwargs)
    if not all(_is_supported(leaf) for leaf in pytree.tree_leaves(out)):
        raise CaptureError(f"{type(module).__name__} returns more than floats and plain numbers")
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), out)


def run_copy(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a copy of a module with copied buffers, so that the module does not change.

    Raises:
        CaptureError: its weights have no values.
        Exception: an error of the module.
    """
    if not all(map(has_values, (*module.parameters(), *module.buffers()))):
        raise CaptureError("a module without values cannot run")
    copy, _ = copy_model(module)
    for part in copy.modules():
        part._buffers.update({name: b.clone() for name, b in part._buffers.items() if b is not None})
    device, generator = find_device(module), torch.Generator().manual_seed(0)

    def fill(t: torch.Tensor) -> torch.Tensor:
        return (t.clone() if has_values(t) else torch.randn(t.shape, generator=generator).to(t.dtype)).to(device)

    with torch.no_grad(), torch.random.fork_rng(), keep_random_state():
        args, kwargs = pytree.tree_map_only(torch.Tensor, fill, (args, kwargs))
        return copy(*args, **kwargs)


def _is_supported(leaf: Any) -> bool:
    return is_float(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, (int, float, bool, type(None)))
