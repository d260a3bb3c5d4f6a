"""Read this rank's part of a DTensor, as `DTensor.to_local` does, in less of the host's time.

Each call of a block over ranks reads its stacks of experts. With `to_local`, reading one and making its gradient a
DTensor again takes the host as long as several ops of the dialect.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.spec, local = tensor._spec, tensor._local_tensor
        ctx.stride = local.stride()
        ctx.set_materialize_grads(False)
        return local.view_as(local)  # an object of its own, which gets this node

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None
        if type(grad) is Tensor and not grad.requires_grad and grad.stride() == ctx.stride:
            make: Any = DTensor
            return make(grad, copy.copy(ctx.spec), requires_grad=False)
        return DTensor.from_local(grad, ctx.spec.mesh, ctx.spec.placements, run_check=False)


def read_local(tensor: Any) -> Tensor:
    """Return `tensor.to_local()`, for a tensor whose ranks have equally large parts."""
    is_plain = type(tensor) is DTensor and type(tensor._local_tensor) is Tensor
    if is_plain and torch.is_grad_enabled() and tensor.requires_grad and not torch._C._len_torch_dispatch_stack():
        return _LocalPart.apply(tensor)  # type: ignore[no-any-return]
    return tensor.to_local()
