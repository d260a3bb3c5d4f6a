"""Divide the gradients of a block's experts, sums over all data ranks, by the number of ranks, for the mean loss."""

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
        division = GradientDivision(block, names, divisor)
        division.install()
        block.register_forward_pre_hook(division.before_forward)
        block.register_load_state_dict_post_hook(division.after_load)


class GradientDivision:
    """Hooks that divide the gradients of parameters, and the hooks of their block that keep them in place.

    torch drops the hooks of a parameter without a word if another tensor takes its place: in `to_empty`, in
    `load_state_dict(assign=True)`, and in a copy of the block. So each forward, trace and load installs missing ones.

    Args:
        names: the parameters' names in the block.
    """

    def __init__(self, block: nn.Module, names: Collection[str], divisor: int):
        self.block, self.names, self.divisor = block, tuple(names), divisor

    def before_forward(self, block: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            self._prepare_trace()
        else:
            self.install()

    def after_load(self, block: nn.Module, incompatible_keys: Any) -> None:
        self.install()

    @torch.compiler.assume_constant_result
    def _prepare_trace(self) -> bool:
        self.install()
        return True

    def install(self) -> None:
        for name in self.names:
            _, parameter = find_owner_and_tensor(self.block, name)
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
