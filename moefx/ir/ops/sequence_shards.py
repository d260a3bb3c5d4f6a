"""Shard the tokens that every rank of a tensor-parallel axis holds, and gather them again (X-MoE section 4.3, SSMB).

Letters: S tokens, s = ceil(S / ranks) tokens of a shard; the last shards may be shorter or empty.

Tokens, and values computed from them outside of the experts, are replicated. So all ranks need the gradient of each
shard, and the backward of `shard_tokens` gathers. For `unshard_tokens`, the incoming gradient is "replicated" (each
rank takes its shard) or "partial" (each rank has a summand: a reduce-scatter adds them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .op_definition import op
from .row_packing import pad_rows
from .token_gather import start_gather, start_scatter
from .uneven_all_to_all import wait_for_collective

GRADIENTS = ("replicated", "partial")


@op("shard_tokens(Tensor x, *, int rank, int size, str group) -> Tensor", contract="x[S,D] -> part[_,D]")
def shard_tokens(x: Tensor, *, rank: int, size: int, group: str) -> Tensor:
    """Return the rank's shard of the tokens, [s,D]. Differentiable."""
    length = _shard_length(x.shape[0], size)
    return x[rank * length : (rank + 1) * length].clone()


@op(
    "unshard_tokens(Tensor part, *, SymInt num_tokens, int rank, int size, str group, str gradients) -> Tensor",
    contract="part[_,D] -> x[_,D]",
)
def unshard_tokens(part: Tensor, *, num_tokens: int, rank: int, size: int, group: str, gradients: str) -> Tensor:
    """Gather the shards of all ranks, [S,D]. Differentiable; the module describes `gradients`."""
    padded = pad_rows(part, _shard_length(num_tokens, size))
    tokens = wait_for_collective(*start_gather([padded], size, group))
    return tokens[:num_tokens].clone() if tokens.shape[0] > num_tokens else tokens


@op("sum_shards(Tensor x, *, int rank, int size, str group) -> Tensor", contract="x[S,D] -> part[_,D]")
def sum_shards(x: Tensor, *, rank: int, size: int, group: str) -> Tensor:
    """Sum the tensors of all ranks, and return the rank's shard, [s,D]."""
    length, num_tokens = _shard_length(x.shape[0], size), x.shape[0]
    padded = pad_rows(x, size * length)
    part = wait_for_collective(*start_scatter([padded], size, group), in_backward=True)
    own_length = max(min(num_tokens - rank * length, length), 0)
    return part[:own_length].clone() if own_length < length else part


def _shard_length(num_tokens: Any, size: int) -> Any:
    return -(-num_tokens // size)


# -- registration


def _empty_shard(x: Tensor, rank: int, size: int) -> Tensor:
    length = _shard_length(x.shape[0], size)
    tokens_left = x.shape[0] - rank * length
    own_length: Any = torch.sym_max(torch.sym_min(tokens_left, length), 0)
    return x.new_empty((own_length, x.shape[1]))


shard_tokens.fake(lambda x, *, rank, size, group: _empty_shard(x, rank, size))
sum_shards.fake(lambda x, *, rank, size, group: _empty_shard(x, rank, size))
unshard_tokens.fake(lambda part, *, num_tokens, **_: part.new_empty((num_tokens, part.shape[1])))


def _save_shard(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Tensor) -> None:
    ctx.kwargs = {**kwargs, "num_tokens": args[0].shape[0], "gradients": GRADIENTS[0]}


shard_tokens.autograd(save=_save_shard, backward=lambda ctx, grads: (unshard_tokens(grads[0], **ctx.kwargs),))


def _save_unshard(ctx: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Tensor) -> None:
    ctx.op = shard_tokens if kwargs["gradients"] == GRADIENTS[0] else sum_shards
    ctx.kwargs = {name: kwargs[name] for name in ("rank", "size", "group")}


unshard_tokens.autograd(save=_save_unshard, backward=lambda ctx, grads: (ctx.op(grads[0], **ctx.kwargs),))
sum_shards.once_differentiable("unshard_tokens")
