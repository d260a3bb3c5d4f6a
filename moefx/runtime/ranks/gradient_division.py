"""Divide the gradients of a block's experts, which are sums over ranks, so that they are of the mean loss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .sharding import find_owner_and_tensor


def divide_gradients(block: nn.Module, parameters: Collection[nn.Parameter], divisor: int) -> None:
    """Divide the gradients of these parameters of a block by `divisor` in each backward."""
    if divisor > 1:
        names = [name for name, parameter in block.named_parameters() if parameter in parameters]
        divide = GradientDivision(names, divisor)
        divide.install(block)
        block.register_forward_pre_hook(divide)


class GradientDivision:
    """Hooks that divide the gradients of parameters, and the hook of their block that keeps them in place.

    torch drops the hooks of a parameter without a word where another tensor takes its place: in `to_empty`, in
    `load_state_dict(assign=True)`, and in a copy of the block. So each forward installs those that are missing.

    Args:
        names: the parameters' names in the block.
    """

    def __init__(self, names: Collection[str], divisor: int):
        self.names, self.divisor = tuple(names), divisor

    def __call__(self, block: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():  # a trace comes after `parallelize`, which has installed them
            self.install(block)

    def install(self, block: nn.Module) -> None:
        for name in self.names:
            _, parameter = find_owner_and_tensor(block, name)
            if not parameter.requires_grad:
                continue
            hooks: Any = parameter._backward_hooks
            if not hooks or self.divide not in hooks.values():
                parameter.register_hook(self.divide)
            # `to_empty` of a DTensor leaves a dictionary of hooks that autograd does not run: set it again
            parameter._backward_hooks = parameter._backward_hooks

    def divide(self, gradient: Any) -> Tensor:
        if type(gradient) is not DTensor or gradient.requires_grad:
            return gradient / self.divisor
        # an op on a DTensor takes the host 50 us. Its memory may be another tensor's gradient, too
        make: Any = DTensor
        return make(gradient._local_tensor / self.divisor, gradient._spec, requires_grad=False)
