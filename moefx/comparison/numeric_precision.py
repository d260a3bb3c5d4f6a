"""The precision of a model and its inputs, and perturbations of the size of its rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .sandbox import Casts, Inputs, leaves


class Perturbation:
    """Multiplies parameters and inputs by (1 + amplitude * u), with u uniform in [-1, 1], drawn on their device."""

    def __init__(self, casts: Casts, amplitude: float, seed: int):
        self.casts, self.amplitude, self.seed = casts, amplitude, seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def perturb(self, t: Tensor) -> Tensor:
        if t.device not in self.generators:
            self.generators[t.device] = torch.Generator(t.device).manual_seed(self.seed)
        wide = torch.float32 if t.element_size() <= 2 else torch.float64
        factor = torch.rand(t.shape, generator=self.generators[t.device], dtype=wide, device=t.device)
        return factor.mul_(2 * self.amplitude).add_(1 - self.amplitude).mul_(t.detach().to(wide)).to(t.dtype)

    def __call__(self, p: nn.Parameter) -> nn.Parameter:
        p = self.casts(p)
        return nn.Parameter(self.perturb(p), requires_grad=p.requires_grad) if p.is_floating_point() else p


def find_working_precision(module: nn.Module, inputs: Inputs, dtype: torch.dtype | None) -> tuple[torch.dtype, int]:
    """Return the lowest precision among parameters, inputs and autocast, and the length of the longest reduction.

    Reductions run over the widest dimension of a parameter or, in weight gradients, over the tokens.
    """
    tensors = [t for _, t in leaves(inputs) if isinstance(t, Tensor)]
    parameters = list(module.parameters())
    device = next((t.device.type for t in (*parameters, *tensors)), "cpu")
    dtypes = {t.dtype for t in (*parameters, *tensors) if t.is_floating_point()} if dtype is None else {dtype}
    if torch.is_autocast_enabled(device) and dtypes != {torch.float64}:  # autocast ignores float64
        dtypes.add(torch.get_autocast_dtype(device))
    num_tokens = [
        t.numel() // (t.shape[-1] if t.is_floating_point() and t.ndim > 1 else 1) for t in tensors if t.numel()
    ]
    length = max([n for p in parameters for n in p.shape] + num_tokens, default=1)
    return max(dtypes or {torch.float32}, key=lambda d: torch.finfo(d).eps), length


def find_common_dtype(module: nn.Module, inputs: Inputs) -> torch.dtype | None:
    """Return the dtype of all floating-point parameters, buffers and inputs; None if they have several."""
    tensors = (*module.parameters(), *module.buffers(), *(t for _, t in leaves(inputs) if isinstance(t, Tensor)))
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


@contextlib.contextmanager
def disable_autocast() -> Iterator[None]:
    """Turn autocast off on the CPU and the accelerator."""
    with contextlib.ExitStack() as stack:
        accelerator = torch.accelerator.current_accelerator()
        for kind in ("cpu", *([accelerator.type] if accelerator else [])):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
