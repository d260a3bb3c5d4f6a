"""The padding-free (PFT) dialect of X-MoE section 4: routing, gather, grouped GEMM and gather-sum as torch ops.

Letters: S tokens, K slots, E experts, B routed rows, D model dimension, F hidden dimension of an expert.

B is S*K, or the number of rows plus up to 1/64 if the host knows that number. Rows are sorted by expert and valid up to
expert_offsets[E]. The tail behind it (dropped rows) may hold any values, even NaN; it never reaches a valid row, a
token or a gradient. Indices are int32; buffers may exceed 2^31 elements.

Expert weights are `Tensor[]`: one stacked [E,...] tensor of any strides, or E separate ones (the user's Parameters).
Their gradients are slices of one stacked buffer.

These functions are the readable semantics; `moefx.lowering` registers faster providers for the same ops.
"""

from __future__ import annotations

from .exchange_routes import (
    chunk_choices,
    count_rows,
    exchange_counts,
    near_and_far,
    place_choices,
    plan_dispatch,
    read_counts,
)
from .expert_gemms import expert_rows, expert_rows_backward, grouped_mm, grouped_mm_backward
from .expert_mlp import expert_mlp, expert_mlp_backward
from .peer_rows import (
    add_rows,
    pull_sums,
    pull_sums_backward,
    pull_tokens,
    pull_tokens_backward,
    read_rows,
)
from .row_exchange import (
    all_to_all_back,
    all_to_all_rows,
    all_to_all_rows_backward,
    wait_rows,
    wait_rows_backward,
    wait_sums,
    wait_sums_backward,
)
from .row_packing import join_columns, pack_rows, split_columns
from .sequence_shards import shard_tokens, sum_shards, unshard_tokens
from .token_gather import (
    agree_length,
    gather_tokens,
    gather_tokens_backward,
    scatter_sums,
    wait_gathered,
    wait_gathered_backward,
    wait_scattered,
    wait_scattered_backward,
)
from .token_routing import (
    DROP_RULES,
    build_pft,
    build_pft_backward,
    combine,
    combine_backward,
    dispatch,
    pick_choices,
    pick_choices_backward,
)
from .weights_later import weights_later

__all__ = [
    "DROP_RULES", "add_rows", "agree_length", "all_to_all_back", "all_to_all_rows", "all_to_all_rows_backward",
    "build_pft", "build_pft_backward", "chunk_choices", "combine", "combine_backward", "count_rows", "dispatch",
    "exchange_counts", "expert_mlp", "expert_mlp_backward", "expert_rows", "expert_rows_backward", "gather_tokens",
    "gather_tokens_backward", "grouped_mm", "grouped_mm_backward", "join_columns", "near_and_far", "pack_rows",
    "pick_choices", "pick_choices_backward", "place_choices", "plan_dispatch", "pull_sums", "pull_sums_backward",
    "pull_tokens", "pull_tokens_backward", "read_counts", "read_rows", "scatter_sums", "shard_tokens", "split_columns",
    "sum_shards", "unshard_tokens", "wait_gathered", "wait_gathered_backward", "wait_rows", "wait_rows_backward",
    "wait_scattered", "wait_scattered_backward", "wait_sums", "wait_sums_backward", "weights_later",
]  # fmt: skip
