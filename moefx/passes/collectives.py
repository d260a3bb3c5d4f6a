"""Expert parallelism: send rows to the ranks that hold their experts, and return their sums.

    destinations = place_choices(topk_ids)
    send   = plan_dispatch(destinations)                 rows for each rank
    packed = pack_rows(x, topk_weights, send)            while the ranks exchange row counts
    sent   = all_to_all_rows(packed, send)               starts the exchange
    rows, local_ids, weights = wait_rows(sent)
    pft    = build_pft(local_ids, weights)               as for this rank's own tokens
    y      = expert_mlp(rows, pft, own weights)
    back   = all_to_all_back(y)
    out    = wait_sums(back, send)                       sums by token

With `dedup`, a token travels once to each rank that holds one of its experts, because experts gather by index. With
`flat` (X-MoE) it travels once for each slot. The sender drops slots by capacity or mask.

Over several levels of a topology there is one hop at each level (X-MoE section 4.2, RBD). A pilot of the token goes to
each node, to the rank with the sender's number in its own node, which forwards it to the node's ranks. The sums return
the same way, and a node adds up its sums before they leave it. With `splits_intra_node`, rows that stay in the node do
not wait for rows from other nodes (Piper section V, HALO: phase I is the exchange in the node, phase II the exchange
between nodes, phase III the exchange of the received rows in the node).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import Refused
from ..ir.expert_placement import ExchangeRoutes, Placement
from ..ir.graphs.block_graph import BlockGraph
from ..ir.graphs.display_names import get_attribute_name
from ..ir.graphs.graph_levels import eliminate_dead_code
from ..ir.node_values import get_argument
from .exchange.exchange_emission import UnevenExchange, add_label
from .exchange.gathered_experts import GatheredTokens
from .exchange.local_experts import move_experts, read_local_parts
from .exchange.routed_region import RoutedRegion
from .pass_manager import graph_pass

aten = torch.ops.aten
ops = torch.ops.moefx


@graph_pass(level="distributed", name="collectives")
def insert_collectives(
    block: BlockGraph,
    plan: Any,
    *,
    placement: Placement,
    routes: ExchangeRoutes,
    stacked: Collection[str],
    trained: Collection[str] = (),
    sampler_number: int = 0,
) -> BlockGraph:
    """Distribute the routed sum over the ranks of the expert axis.

    Args:
        stacked: names of the parameters that hold all experts in one tensor, a DTensor. Of separate parameters, a rank
            holds those of its own experts only.
        trained: names of the parameters with gradients.
        sampler_number: the number of the block's sampler, see `ir.ops.parameter_samples`.
    """
    block = block.copy()
    routed = RoutedRegion.of(block)
    if shared_values := routed.find_shared_values(trained):
        names = (get_attribute_name(n) if n.op == "get_attr" else n.name for n in shared_values)
        raise Refused(
            "the experts share a value: its gradient would include tokens of other ranks",
            culprits=tuple(dict.fromkeys(names))[:3],
            source=str(shared_values[0].meta.get("source", "")),
            remedy="apply it before the experts, or after their sum",
        )
    exchanges = _insert_exchanges(routed, placement, routes, sampler_number)
    for exchange in exchanges:
        move_experts(exchange.routed, exchange.received, placement)
    _return_sums(routed, exchanges)
    read_local_parts(block.graph, stacked, placement)
    return eliminate_dead_code(block)


def _insert_exchanges(
    routed: RoutedRegion, placement: Placement, routes: ExchangeRoutes, sampler_number: int
) -> Sequence[UnevenExchange | GatheredTokens]:
    """Emit the rows that travel to their experts.

    Returns:
        The exchange of each chunk of tokens, in the order of their starts.
    """
    token_values, slot_values = (
        list(dict.fromkeys(map(routed.get_source, gathers))) for gathers in (routed.token_gathers, routed.slot_gathers)
    )
    weights = get_argument(routed.pft, "topk_weights")
    if routed.has_weights and weights not in slot_values:
        slot_values = [*slot_values, weights]
    fingerprint = _hash_exchange(routed, [*token_values, *slot_values], placement, routes)
    if routes.gathers:
        gathered_tokens = GatheredTokens(routed, placement, routes)
        with routed.graph.inserting_before(routed.region[0]):
            gathered_tokens.insert_gather(
                _insert_destinations(routed, placement, routes), token_values, slot_values, fingerprint
            )
            gathered_tokens.keep_rows_in_stash()
        return [gathered_tokens]
    chunks = [
        UnevenExchange(part, placement, routes) for part in (*(routed.copy() for _ in range(routes.chunks - 1)), routed)
    ]
    with routed.graph.inserting_before(routed.region[0]):
        destinations = _insert_destinations(routed, placement, routes)
        destinations_by_chunk = (
            [destinations] if len(chunks) == 1 else _insert_chunks(routed, destinations, len(chunks))
        )
        for chunk, part in zip(chunks, destinations_by_chunk, strict=True):
            chunk.insert_plans(part)
        kwargs = {
            "levels": routes.sizes,
            "near": routes.splits_intra_node,
            "fingerprint": fingerprint,
            "group": placement.group,
        }
        counts = _insert_counts(routed, destinations_by_chunk, placement, routes, {**kwargs, "samples": sampler_number})
        if len(chunks) == 1:  # the buffers of chunks would be mostly empty
            chunks[0].insert_packs(token_values, slot_values)
        splits = iter(_insert_splits(routed, counts, placement, routes, kwargs, len(chunks)))
        for chunk in chunks:
            chunk.insert_rows(token_values, slot_values, splits)
    return chunks


def _return_sums(routed: RoutedRegion, exchanges: Sequence[UnevenExchange | GatheredTokens]) -> None:
    """Emit the return of each routed sum to the ranks of the tokens, and add the sums of all chunks."""
    for number, node in enumerate(routed.sums):
        users = list(node.users)
        with routed.graph.inserting_before(exchanges[0].routed.sums[number].next):  # after all other chunks
            out, *other_chunks = [exchange.insert_return(exchange.routed.sums[number]) for exchange in exchanges]
            for other in other_chunks:  # 0 for tokens of other chunks
                out = routed.call(aten.add.Tensor, (out, other), {}, ("S", "D"), "out")
        for user in users:
            user.replace_input_with(node, out)


def _hash_exchange(routed: RoutedRegion, sent: list[fx.Node], placement: Placement, routes: ExchangeRoutes) -> int:
    """Hash the exchanged values, their destinations, and the operations on them, which must be equal on all ranks.
    Leave out the names and values of parameters."""
    numbers: dict[fx.Node, int] = {}

    def describe(node: Any) -> str:
        return "parameter" if node.op == "get_attr" else f"%{numbers.setdefault(node, len(numbers))}"

    lines = [
        f"{placement.physical_ids} {dataclasses.replace(routes, levels=(), position=0, timeout=None)} {routes.sizes}"
    ]
    for node in sent:
        value = node.meta.get("val")
        lines.append(f"{describe(node)} {getattr(value, 'dtype', None)} {node.meta.get('letters')} {_get_width(value)}")
    for node in routed.region:
        lines.append(f"{describe(node)} = {node.target} {fx.map_arg((node.args, node.kwargs), describe)}")
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def _insert_destinations(routed: RoutedRegion, placement: Placement, routes: ExchangeRoutes) -> fx.Node:
    """Emit the destination of each slot."""
    topk_ids, keep = get_argument(routed.pft, "topk_ids"), get_argument(routed.pft, "keep")
    if routed.pft.kwargs.get("capacity") is not None:
        keep = routed.emit_keep_mask()  # dropped slots are not sent
    per_rank = placement.experts_per_rank
    expert_destinations = [
        routes.position_of(physical_id // per_rank) * per_rank + physical_id % per_rank
        for physical_id in placement.physical_ids
    ]
    letters = topk_ids.meta.get("letters", ("S", "K"))
    return routed.call(ops.place_choices.default, (topk_ids, keep), {"places": expert_destinations}, letters)


def _insert_chunks(routed: RoutedRegion, destinations: fx.Node, chunks: int) -> list[fx.Node]:
    """Emit the destinations of each chunk of tokens."""
    parts = routed.call(ops.chunk_choices.default, (destinations,), {"chunks": chunks})
    return routed.unpack(parts, (destinations.meta["letters"],) * chunks)


def _insert_counts(
    routed: RoutedRegion,
    destinations_by_chunk: list[fx.Node],
    placement: Placement,
    routes: ExchangeRoutes,
    kwargs: dict[str, Any],
) -> list[fx.Node]:
    """Emit the exchange of row counts of all hops."""
    kwargs = {**kwargs, "num_slots": placement.experts_per_rank, "dedup": routes.dedup}
    counts = routed.call(ops.exchange_counts.default, (destinations_by_chunk,), kwargs, axis=placement.axis)
    return routed.unpack(counts, ((), ()))


def _insert_splits(
    routed: RoutedRegion,
    counts: list[fx.Node],
    placement: Placement,
    routes: ExchangeRoutes,
    kwargs: dict[str, Any],
    chunks: int,
) -> list[fx.Node]:
    """Emit the numbers of rows of each hop, and of rows for the local experts, chunk by chunk."""
    splits = routed.call(ops.read_counts.default, tuple(counts), {**kwargs, "timeout": routes.timeout})
    labels = [routes.label(index) for index in range(len(routes.levels))] + ["near"] * routes.splits_intra_node
    names = (*(add_label("splits", label) for label in labels), "num_rows") * chunks
    letters = (*(("2", "W") for _ in labels), ("1",)) * chunks
    return routed.unpack(splits, letters, names)


def _get_width(value: Any) -> int | None:
    """Return the width of a tensor with rows, if it is a number."""
    return value.shape[-1] if getattr(value, "ndim", 0) > 1 and isinstance(value.shape[-1], int) else None


__all__ = ["insert_collectives"]
