"""Notice an optimizer that steps on parameters which a spread model no longer has, and so trains nothing.

`compile` cuts stacks of experts, `parallelize` shards all parameters, and FSDP gathers whole ones for a forward. torch
skips a parameter without a gradient, so an optimizer of earlier parameters would step without a word.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...errors import InvalidInput

_MARKS = "_moefx_replaced"  # the attribute of a replaced parameter: (number of the model, name, reason) for each model
_GATHERED = (
    "FSDP had gathered them for a forward when the optimizer was built. Build it before that forward, or run a forward "
    "without a backward under torch.no_grad()"
)
_numbers = itertools.count()


class ReplacedParameters:
    """Recognizes the parameters that a model had before. They are marked, because `Module.to` of a DTensor fails if a
    weak reference to it exists."""

    def __init__(self) -> None:
        self.number = next(_numbers)

    def mark(self, parameter: Tensor, name: str, reason: str) -> None:
        """Mark a parameter that is about to be replaced.

        Args:
            name: its name in the model.
            reason: what replaces it, and the remedy, for a message.
        """
        setattr(parameter, _MARKS, (*getattr(parameter, _MARKS, ()), (self.number, name, reason)))

    def check(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Check that an optimizer trains the parameters of a model.

        Raises:
            InvalidInput: it has earlier ones without gradients, and their replacements have gradients.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        marks = [(p, mark) for p in parameters for mark in getattr(p, _MARKS, ()) if mark[0] == self.number]
        if not marks:
            return
        current = dict(model.named_parameters(remove_duplicate=False))
        stale = [(p, name, reason) for p, (_, name, reason) in marks if current.get(name) is not p]
        if any(p.grad is not None for p, _, _ in stale):  # the original model is trained, too
            return
        for _, name, reason in reversed(stale):
            if name in current and current[name].grad is not None:
                number = len({id(p) for p, _, _ in stale})
                raise InvalidInput(
                    f"{type(optimizer).__name__} has {number} parameter(s) that {type(model).__name__} does not train: "
                    f"{reason}"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedParameters:
        return ReplacedParameters()


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP keeps gathered after a forward without a backward, such as that of an evaluation.

    `model.parameters()` would return them in place of the shards that an optimizer trains.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class GatheredParameters:
    """A forward hook of a model that FSDP has sharded. FSDP keeps the outermost module gathered after a forward.

    Without gradients no backward will shard it again, so the hook does.

    Args:
        replaced: marks the parameters that stay gathered after a forward with gradients.
        reshards: whether to shard after a forward without gradients.
    """

    def __init__(self, replaced: ReplacedParameters, reshards: bool):
        self.replaced, self.reshards, self.has_marked = replaced, reshards, False

    @torch.compiler.disable
    def __call__(self, model: Any, inputs: Any, output: Any) -> None:
        if self.reshards and not torch.is_grad_enabled():
            model.reshard()  # the others are sharded already, and a walk over hundreds of experts takes long
        elif not self.has_marked:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if not isinstance(parameter, DTensor):
                    self.replaced.mark(parameter, name, _GATHERED)
            self.has_marked = True
