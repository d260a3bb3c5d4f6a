"""Providers "triton": routing and expert MLPs as Triton kernels, for CUDA and ROCm.

Kernels and Triton are imported on the first call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.expressions.expert_body import ExpertBody
from ...ir.op_providers import KernelReport, register_compiler, register_kernels
from ...ir.ops import exchange_routes as ir_routes
from ...ir.ops import expert_mlp as ir_mlp  # not by the names of this package's modules
from ...ir.ops import peer_rows as ir_peers
from ...ir.ops import row_packing as ir_packing
from ...ir.ops import token_routing as ir_routing

_GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _on_gpu(tensor: Tensor, *_: Any, **__: Any) -> bool:
    return tensor.device.type == "cuda"


def _supports_routing(topk_ids: Tensor, topk_weights: Tensor | None, *_: Any, drop: str = "none", **__: Any) -> bool:
    # Dropping by weight sorts the weights' bits, and the kernel reads 32 of them.
    has_narrow_weights = drop != "weight" or topk_weights is None or topk_weights.dtype is not torch.float64
    return topk_ids.device.type == "cuda" and has_narrow_weights


def _supports_experts(x: Tensor, *args: Any, body: str, dtype: torch.dtype | None = None, **_: Any) -> bool:
    if x.device.type != "cuda" or (dtype or x.dtype) not in _GEMM_DTYPES:
        return False
    return explain_unsupported(body, ExpertBody.from_json(body).up_widths(args[4])) is None


@functools.lru_cache(maxsize=1024)
def explain_unsupported(body: str, widths: tuple[int, ...] | None = None) -> str | None:
    """Return the reason why the kernels do not support a body, or None if they do.

    Args:
        body: JSON text of the `ExpertBody`.
        widths: widths of the up-projections.
    """
    from .pointwise import Underivable, derive_formulas

    try:
        derive_formulas(body, widths)
    except Underivable as reason:
        return str(reason)
    return None


def list_configurations() -> tuple[str, ...]:
    """Return the tile configurations that this process used so far and their reasons, a line for each kernel and
    shape."""
    tuning = sys.modules.get(f"{__name__}.tuning")  # do not import Triton if no kernel ran
    return tuple(tuning.list_used_configs()) if tuning else ()


def _build_pft(*args: Any, **kwargs: Any) -> Any:
    from .build_pft import build_pft

    return build_pft(*args, **kwargs)


def _build_pft_backward(*args: Any) -> Any:
    from .build_pft import build_pft_backward

    return build_pft_backward(*args)


def _expert_mlp(*args: Any, **kwargs: Any) -> Any:
    from .expert_mlp_steps import expert_mlp

    return expert_mlp(*args, **kwargs)


def _expert_mlp_backward(*args: Any, **kwargs: Any) -> Any:
    from .expert_mlp_steps import expert_mlp_backward

    return expert_mlp_backward(*args, **kwargs)


def _lazy_exchange_op(name: str) -> Any:
    """Return a function of `exchange_ops`, which is imported on the first call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from . import exchange_ops

        return getattr(exchange_ops, name)(*args, **kwargs)

    return run


def _read_rows(*args: Any, **kwargs: Any) -> Any:
    from .peer_ops import read_rows

    return read_rows(*args, **kwargs)


def _add_rows(*args: Any, **kwargs: Any) -> Any:
    from .peer_ops import add_rows

    return add_rows(*args, **kwargs)


def _compile_ahead() -> contextlib.AbstractContextManager[None]:
    from .compile_ahead import compile_ahead

    return compile_ahead()


def _supports_sums(rows: Tensor, combine_weights: Tensor | None, *_: Tensor) -> bool:
    # Sums are in float32.
    dtypes = [t.dtype for t in (rows, combine_weights) if t is not None]
    return rows.device.type == "cuda" and all(dtype in _GEMM_DTYPES for dtype in dtypes)


def _all_on_gpu(tensors: Sequence[Tensor], *_: Any, **__: Any) -> bool:
    return _on_gpu(tensors[0])


def _supports_peer_sums(peers: Sequence[Tensor], *_: Any, **__: Any) -> bool:
    return _on_gpu(peers[0]) and peers[0].dtype in _GEMM_DTYPES  # sums are in float32


def _supports_backward(grad: Tensor, *args: Any, **kwargs: Any) -> bool:
    return _supports_experts(*args, **kwargs)


# Also without Triton: `explain` may run on a machine without GPUs.
register_kernels(KernelReport(explain_unsupported, list_configurations))
if importlib.util.find_spec("triton") is not None:
    register_compiler("triton", _compile_ahead)
    ir_routing.build_pft.provider("triton", supports=_supports_routing, rank=1)(_build_pft)
    ir_routing.build_pft_backward.provider("triton", supports=_on_gpu, rank=1)(_build_pft_backward)
    ir_routing.combine.provider("triton", supports=_supports_sums, rank=1)(_lazy_exchange_op("combine"))
    for _op in (ir_packing.pack_rows, ir_packing.join_columns, ir_packing.split_columns):
        _op.provider("triton", supports=_all_on_gpu, rank=1)(_lazy_exchange_op(_op.name))
    for _op in (ir_routes.place_choices, ir_routes.plan_dispatch, ir_routes.count_rows):
        _op.provider("triton", supports=_on_gpu, rank=1)(_lazy_exchange_op(_op.name))
    ir_mlp.expert_mlp.provider("triton", supports=_supports_experts, rank=1)(_expert_mlp)
    ir_mlp.expert_mlp_backward.provider("triton", supports=_supports_backward, rank=1)(_expert_mlp_backward)
    ir_peers.read_rows.provider("triton", supports=_all_on_gpu, rank=1)(_read_rows)
    ir_peers.add_rows.provider("triton", supports=_supports_peer_sums, rank=1)(_add_rows)
