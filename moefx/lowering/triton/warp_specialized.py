"""Launch the kernels of `hopper`, `hopper_outer` and `hopper_pointwise` for a `KernelCall` with tensors they support.

They support 16-bit operands that TMA can describe: the last dimension a multiple of 8 elements, all other strides
multiples of 16 bytes. They do not support separate parameters at arbitrary addresses.

The kernels are experimental Gluon. They are imported at their launch, after `config` has chosen them (see
`tile_configs.HAS_ROLES`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .launch import cdiv
from .launch_replay import launch
from .tile_configs import GemmConfig
from .weight_operands import Weights, is_describable

if TYPE_CHECKING:
    from .expert_mlp_call import KernelCall

# Tiles that fit into registers and shared memory. GEMMs with a pointwise part may be half as wide (`GemmConfig.bn`),
# with twice as many warps for that part.
_BM, _BN, _BK, _WARPS = 128, 256, 64, 8
_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # Gluon's names


def try_project_up(
    kernel_call: KernelCall, hidden: Sequence[Tensor] | None, act: Tensor | None, tiles: GemmConfig
) -> bool:
    """Compute H, if it is kept, and the activation. Returns False if the kernel does not support the tensors."""
    from .hopper_pointwise import hopper_up_kernel

    pointwise, call = kernel_call.pointwise, kernel_call.call
    parts, width = kernel_call.part_weights(), kernel_call.act_width
    paired = pointwise.num_parts == 2 and not pointwise.joined
    w = _describe_weights(parts[: 2 if paired else 1], backward=False, columns=tiles.bn // 2 if paired else tiles.bn)
    if (
        width % 8
        or w is None
        or not _can_describe(kernel_call.x, *(t for t in (*(hidden or ()), act) if t is not None))
    ):
        return False
    bias0, bias1 = kernel_call.part_biases()
    h0, h1 = kernel_call.parts(hidden) if hidden else (kernel_call.x, kernel_call.x)
    schedule, max_tiles = kernel_call.schedule(_BM)
    x = kernel_call.gather(kernel_call.x) if tiles.gather_first else kernel_call.x
    args = (
        *(x, _describe(x, _BM, _BK) if tiles.gather_first else None, x.stride(0), call.token_ids, schedule, max_tiles),
        *(w[0], w[1] if paired else None),
        *(bias0, bias1, *((0, 0) if bias0 is None else bias0.stride()), kernel_call.w, h0, h1, h0.stride(0)),
        *(kernel_call.x if act is None else act, width, kernel_call.x.shape[1]),
    )
    constants = pointwise.act_constants | dict(
        GATHER=not tiles.gather_first,
        COLUMNS_FIRST=parts[0].columns_first(backward=False),
        HAS_BIAS=bias0 is not None,
        STORE_H=hidden is not None,
        STORE_ACT=act is not None,
    )
    num_tiles = max_tiles * cdiv(width, tiles.bn // pointwise.num_parts)
    warps = _count_pointwise_warps(tiles)
    options = dict(ROWS=4 * warps if pointwise.joined else 32, POINTWISE_WARPS=warps)
    _launch(kernel_call, hopper_up_kernel, num_tiles, args, constants, tiles, tiles.bn, **options)
    return True


def try_multiply_rows(
    kernel_call: KernelCall,
    terms: Sequence[Tensor],
    weights: Sequence[Weights],
    out: Tensor,
    *,
    backward: bool,
    bias: Tensor | None,
    scale: Any,
    gather: bool,
    tiles: GemmConfig,
) -> bool:
    """See `KernelCall.multiply_rows`. Returns False if the kernel does not support the tensors."""
    from .hopper import hopper_rows_kernel

    w = _describe_weights(weights, backward=backward, columns=_BN)
    if w is None or not _can_describe(*terms, out):
        return False
    call, (width, inner) = kernel_call.call, (out.shape[1], terms[0].shape[1])
    schedule, max_tiles = kernel_call.schedule(_BM)
    descriptors = [None if gather else _describe(t, _BM, _BK) for t in terms] + [None]
    args = (
        *(terms[0], descriptors[0], descriptors[1], terms[0].stride(0), call.token_ids),
        *(schedule, max_tiles, *(*w, None)[:2], bias, *((0, 0) if bias is None else bias.stride()), kernel_call.w),
        *(out, _describe(out, _BM, 64), width, inner),
    )
    constants = dict(
        SCALE=scale,
        TERMS=len(terms),
        GATHER=gather,
        COLUMNS_FIRST=weights[0].columns_first(backward=backward),
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
    )
    _launch(kernel_call, hopper_rows_kernel, max_tiles * cdiv(width, _BN), args, constants, tiles)
    return True


def supports_act_backward(kernel_call: KernelCall, grad: Tensor, hidden: Sequence[Tensor], tiles: GemmConfig) -> bool:
    fit = kernel_call.act_width % 8 == 0 and _can_describe(grad, *hidden)
    return fit and _describe_weights([kernel_call.down], backward=True, columns=tiles.bn) is not None


def act_backward(
    kernel_call: KernelCall,
    grad: Tensor,
    gather: bool,
    hidden: Sequence[Tensor],
    grad_hidden: Sequence[Tensor],
    scaled_act: Tensor | None,
    dots: Tensor | None,
    constants: dict[str, Any],
    tiles: GemmConfig,
) -> None:
    """See `BackwardCall.act_backward`; `hidden` and `grad_hidden` are the parts."""
    from .hopper_pointwise import hopper_act_backward_kernel

    call = kernel_call.call
    width, inner = kernel_call.act_width, kernel_call.out_width
    w = _describe_weights([kernel_call.down], backward=True, columns=tiles.bn)
    assert w is not None
    schedule, max_tiles = kernel_call.schedule(_BM)
    args = (
        *(grad, None if gather else _describe(grad, _BM, _BK), grad.stride(0), call.token_ids),
        *(schedule, max_tiles, w[0], kernel_call.w, *hidden, *grad_hidden, hidden[0].stride(0), scaled_act, dots),
        *(call.num_rows, width, inner),
    )
    constants = constants | dict(GATHER=gather, COLUMNS_FIRST=kernel_call.down.columns_first(backward=True))
    num_tiles = max_tiles * cdiv(width, tiles.bn)
    warps = _count_pointwise_warps(tiles)
    options = dict(ROWS=4 * warps, POINTWISE_WARPS=warps)  # registers have no room for more rows in flight
    _launch(kernel_call, hopper_act_backward_kernel, num_tiles, args, constants, tiles, tiles.bn, **options)


def try_outer(
    kernel_call: KernelCall, left: tuple[Tensor, bool], right: tuple[Tensor, bool], out: Tensor, tiles: GemmConfig
) -> bool:
    """See `BackwardCall.outer`. Returns False if the kernel does not support the tensors."""
    from .hopper_outer import hopper_outer_kernel

    (a, gather_left), (b, gather_right) = left, right
    if not _can_describe(a, b, out):
        return False
    num_experts, height, width = out.shape
    args = (
        *(a, None if gather_left else _describe(a, _BK, _BM), a.stride(0)),
        *(b, None if gather_right else _describe(b, _BK, _BN), b.stride(0)),
        *(
            kernel_call.call.token_ids,
            kernel_call.call.expert_offsets,
            _describe(out, 1, _BM, 64),
            height,
            width,
            num_experts,
        ),
    )
    constants = dict(GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right)
    num_tiles = num_experts * cdiv(height, _BM) * cdiv(width, _BN)
    _launch(kernel_call, hopper_outer_kernel, num_tiles, args, constants, tiles)
    return True


def _launch(
    kernel_call: KernelCall,
    kernel: Any,
    num_tiles: int,
    args: Sequence[Any],
    constants: dict[str, Any],
    tiles: GemmConfig,
    bn: int = _BN,
    **extra: int,
) -> None:
    constants |= dict(BM=_BM, BN=bn, BK=_BK, STAGES=tiles.stages, GROUP=tiles.group, **extra)
    launch(kernel, kernel_call.grid(tiles, num_tiles), args, constants, warps=_WARPS)


def _count_pointwise_warps(tiles: GemmConfig) -> int:
    return 4 if tiles.bn == _BN else 8


def _can_describe(*tensors: Tensor) -> bool:
    """Return whether TMA can describe the tensors: 16 bit, rows of a multiple of 8 elements, each row aligned."""
    return all(t.dtype in _TYPES and t.shape[-1] % 8 == 0 and is_describable(t) for t in tensors)


def _describe_weights(weights: Sequence[Weights], *, backward: bool, columns: int) -> list[Any] | None:
    """Tensor descriptors of the weights for boxes of `columns` columns, or None if TMA cannot describe them."""
    descriptors = []
    for w in weights:
        if w.addresses is not None or not _can_describe(w.tensor):
            return None
        block = (columns, _BK) if w.columns_first(backward=backward) else (_BK, columns)
        descriptors.append(_describe(w.tensor, 1, *block))
    return descriptors


def _describe(tensor: Tensor, *block: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _shared_layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


@functools.cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    dtype_of_gluon = getattr(gl, _TYPES[dtype])
    return gl.NVMMASharedLayout.get_default_for(list(block), dtype_of_gluon)  # pyright: ignore[reportCallIssue]
