"""Compare modules by their structure: which have equal captures, and which hold parts that look like experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ...ir.guards.code_closure import FUNCTION_TYPES
from ...util.tensor_trees import has_values, is_float

_MAX_COMPARED = 1 << 16


def compute_signature(module: nn.Module) -> tuple:
    """Return a key of a module's classes, shapes and integers. Modules with equal keys have equal captures."""
    return (
        tuple((n, _list_code(m), m.training) for n, m in module.named_modules()),
        tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in module.named_parameters()),
        tuple((n, tuple(t.shape), t.dtype, _read_integers(t)) for n, t in module.named_buffers()),
    )


def _list_code(module: nn.Module) -> tuple:
    """Return the class, without that of a parametrization, and the methods of the instance."""
    cls = type(module)
    cls = cls.__mro__[1] if is_parametrized(module) else cls
    methods = [(k, getattr(v, "__func__", v)) for k, v in vars(module).items() if isinstance(v, FUNCTION_TYPES)]
    return (cls, *((k, id(fn)) for k, fn in methods))


def _read_integers(t: torch.Tensor) -> tuple[int, ...] | int | None:
    """Return the values of integers and booleans, which captures read; the id of large tensors, None for floats.

    No hash of them: those of -1 and -2 are equal.
    """
    if is_float(t) or not has_values(t):
        return None
    return tuple(t.detach().cpu().flatten().tolist()) if t.numel() <= _MAX_COMPARED else id(t)


def _list_shapes(module: nn.Module) -> tuple:
    return tuple((n, tuple(p.shape)) for n, p in module.named_parameters())


def find_expert_like(model: nn.Module) -> dict[str, list[str]]:
    """Find the innermost modules with several equal children that hold matrices, or with a stack of matrices.

    Returns:
        The paths of the equal children, by the path of the module.
    """
    parts_by_name: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        children = list(module.children())
        is_uniform = (
            len(children) > 1
            and len({_list_shapes(c) for c in children}) == 1
            and any(p.dim() >= 2 for p in children[0].parameters())
        )
        if is_uniform and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            parts_by_name.setdefault(name.rpartition(".")[0], [f"{name}.{part}" for part, _ in module.named_children()])
        holds = isinstance(module, (nn.ParameterList, nn.ParameterDict))  # a container for its parent, never called
        layer = type(module).__module__.startswith("torch.nn.modules.") and not holds  # such as a convolution
        if not layer and any(p.dim() >= 3 and p.shape[0] > 1 for p in module._parameters.values() if p is not None):
            parts_by_name.setdefault(name.rpartition(".")[0] if holds else name, [])
    return {
        n: parts
        for n, parts in parts_by_name.items()
        if not any(o != n and (o.startswith(n + ".") if n else True) for o in parts_by_name)
    }
