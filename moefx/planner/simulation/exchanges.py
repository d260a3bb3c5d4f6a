"""Random exchanges of an expert group, drawn token by token: their seconds, and the load of each rank."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..architecture import Architecture
from ..layout import Layout, PlannedDispatch
from ..platforms import Network, Platform
from ..step_formulas import compute_row_widths
from .network import build_fabric, draw_slowdowns
from .routing_skew import compute_zipf_weights, count_choices, count_traffic, draw_choices

_MAX_TOKENS = 2**19  # drawn tokens in all, about a second on one core
_AT_ONCE = 2**15  # tokens of a chunk that fits the cache
_MAX_EXCHANGES, _REPEATS = 64, 4  # drawn exchanges, and consecutive ones with the same popular experts


@dataclasses.dataclass(frozen=True)
class Exchanges:
    """N exchanges between W ranks.

    Attributes:
        load: [N, W], routed rows of a rank's experts over the mean of all ranks.
        hops: [N, H] seconds of the hops, one after the other.
        networks: the coarsest network of each hop.
        beside: [N] seconds of the exchange beside all hops but the last, or None.
        handling: [N] seconds to pack and unpack rows.
        repeats: number of consecutive exchanges with the same popular experts.
        counts: seconds to exchange the numbers of rows before dispatch.
    """

    load: Tensor
    hops: Tensor
    networks: tuple[Network, ...]
    beside: Tensor | None
    handling: Tensor
    repeats: int
    counts: float = 0.0

    def __len__(self) -> int:
        return len(self.load)

    def seconds(self, exchange_ids: Tensor, stragglers: torch.Generator | None) -> Tensor:
        """Return the seconds [4, *P] of dispatch and combine, forward and backward, of exchanges `exchange_ids` [*P].

        Args:
            stragglers: generator of random slowdowns; None for no slowdowns.
        """

        def took(seconds: Tensor, network: Network) -> Tensor:
            per_exchange = seconds[exchange_ids].expand(4, *exchange_ids.shape)
            return (
                per_exchange
                if stragglers is None
                else per_exchange * draw_slowdowns(network, per_exchange.shape, stragglers)
            )

        *before, last = (took(self.hops[:, i], network) for i, network in enumerate(self.networks))
        first = sum(before, torch.zeros((), dtype=torch.float32))
        if self.beside is not None:
            first = torch.maximum(first, took(self.beside, self.networks[-1]))
        seconds_of_passes = first + last + self.handling[exchange_ids]
        seconds_of_passes[0] += self.counts
        return seconds_of_passes


def draw_exchanges(
    model: Architecture, layout: Layout, platform: Platform, groups: Tensor, skew: float, generator: torch.Generator
) -> Exchanges:
    """Draw up to 64 exchanges, of one expert group after the other. Layouts with many tokens get fewer.

    Args:
        groups: [G, W], the ranks of each group in a stage.
        skew: Zipf's exponent of the experts' popularity.
    """
    if layout.ep == 1:
        zeros = torch.zeros(1, 1, dtype=torch.float64)
        return Exchanges(zeros + 1, zeros, platform.networks[:1], None, zeros[0], 1)
    sizes, networks = platform.list_levels(layout.ep, int(groups[0, 1] - groups[0, 0]))
    by_level = layout.dispatch in ("rbd", "halo")
    width = compute_row_widths(model, layout)[{"flat": "w1", "gather": "w_all"}.get(layout.dispatch, "w")]
    latencies = [n.latency for n in networks] if by_level else [max(n.latency for n in networks)]
    tokens = max(layout.sequences * layout.tokens // (layout.tp if layout.ssmb else 1), 1)
    number = max(min(_MAX_EXCHANGES, _MAX_TOKENS // (layout.ep * tokens)), 1)
    repeats = min(_REPEATS, number)
    loads, hops, node_seconds, handling = [], [], [], []
    for i in range(number - number % repeats):
        if i % repeats == 0:
            order = torch.randperm(model.num_experts, generator=generator)
            weights = compute_zipf_weights(model.num_experts, skew)[order]
        group = groups[i % len(groups)]
        # tensor ranks have the same tokens, unless the sequence is spread over them
        _, sequence = torch.unique(group if layout.ssmb else group // layout.tp, return_inverse=True)
        rows_by_hop, load = _draw_rows(weights, sequence, tokens, model.top_k, sizes, layout.dispatch, generator)
        links = build_fabric(platform, group.tolist())
        took = [links.compute_busiest_link_seconds(rows * width) for rows in rows_by_hop]
        if layout.dispatch == "halo":
            node_seconds.append(took.pop() + latencies[-1])
        hops.append(torch.stack([seconds + latency for seconds, latency in zip(took, latencies, strict=True)]))
        loads.append(load.double() / (tokens * model.top_k))
        handling.append((rows_by_hop.sum(1) + rows_by_hop.sum(2)).sum(0).amax() * width * platform.handling / 2)
    levels = networks if by_level else networks[:1]
    of_nodes = torch.stack(node_seconds) if node_seconds else None
    counts = 0.0 if layout.dispatch == "gather" else max(n.latency for n in networks)
    return Exchanges(torch.stack(loads), torch.stack(hops), levels, of_nodes, torch.stack(handling), repeats, counts)


def _draw_rows(
    weights: Tensor, sequence: Tensor, tokens: int, top_k: int, sizes: tuple[int, ...], dispatch: PlannedDispatch,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw the routing of one exchange.

    Args:
        sequence: [W], ranks with the same number have the same tokens.

    Returns:
        Rows from rank to rank [hops, W, W], the exchange beside the hops last; routed rows of each rank [W].
    """
    ranks, number = len(sequence), int(sequence.max()) + 1
    rows_by_hop, load = torch.zeros((), dtype=torch.float32), torch.zeros((), dtype=torch.float32)
    for begin in range(0, tokens, at_once := max(_AT_ONCE // ranks, 1)):
        count = min(at_once, tokens - begin)
        choices = (
            draw_choices(weights, number * count, top_k, generator).view(top_k, number, count)[:, sequence].flatten(1)
        )
        traffic = count_traffic(choices, torch.arange(ranks).repeat_interleave(count), len(weights), sizes, dispatch)
        rows_by_hop = rows_by_hop + torch.stack([*traffic.hops, *([] if traffic.beside is None else [traffic.beside])])
        load = load + count_choices(choices, len(weights), ranks)
    return rows_by_hop, load
