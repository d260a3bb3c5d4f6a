"""Exchanges over shared links: as the formulas for even traffic, fair for uneven traffic."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moefx.planner.communication import combine_links
from moefx.planner.platforms import PLATFORMS, Network, find_platform
from moefx.planner.simulation.network import build_fabric, draw_slowdowns, estimate_ring
from moefx.planner.simulation.routing_skew import compute_zipf_weights, count_traffic, draw_choices

FRONTIER = find_platform("frontier")
TREE = dataclasses.replace(
    FRONTIER, networks=(Network("node", 4, 8e9), Network("switch", 16, 4e9), Network("all", 0, 1e9))
)
ALL = pytest.mark.parametrize("platform", [*PLATFORMS.values(), TREE], ids=lambda p: f"{p.name}-{len(p.networks)}")


@ALL
@pytest.mark.parametrize(("group", "stride"), [(2, 1), (4, 2), (8, 1), (8, 8), (16, 1), (16, 4), (64, 1), (128, 2)])
def test_even_traffic_takes_the_time_of_the_formula(platform, group, stride):
    """A byte from each rank to each."""
    sizes, networks = platform.list_levels(group, stride)
    _, beta = combine_links(sizes, tuple((n.latency, 1 / n.bandwidth) for n in networks))
    links = build_fabric(platform, range(0, group * stride, stride))
    even = torch.ones(group, group)
    assert links.compute_busiest_link_seconds(even).item() == pytest.approx((group - 1) * beta)
    if group <= 16:
        assert links.simulate_fair_shares(even) == pytest.approx((group - 1) * beta)


def test_rows_that_leave_a_node_share_one_nic():
    """The formula takes the bytes of each level by themselves. Those to the farthest pass the NIC too: with a network
    above that is almost as fast it is too fast, by what they add."""
    near = dataclasses.replace(TREE, networks=(*TREE.networks[:2], Network("all", 0, 3.9e9)))
    sizes, networks = near.list_levels(64)
    _, beta = combine_links(sizes, tuple((n.latency, 1 / n.bandwidth) for n in networks))
    found = build_fabric(near, range(64)).compute_busiest_link_seconds(torch.ones(64, 64)).item()
    assert found == pytest.approx(60 / 4e9) and 63 * beta == pytest.approx(48 / 3.9e9)


def test_a_group_that_does_not_fill_its_nodes():
    """Twelve ranks in nodes of eight are eight and four: for the formula one level, at the rate of what is between."""
    sizes, networks = FRONTIER.list_levels(12)
    _, beta = combine_links(sizes, tuple((n.latency, 1 / n.bandwidth) for n in networks))
    assert sizes == (12,)
    assert build_fabric(FRONTIER, range(12)).compute_busiest_link_seconds(torch.ones(12, 12)).item() == pytest.approx(
        8 * beta
    )  # of eight ranks all but eight


def test_units_share_their_outgoing_links():
    """A rank may use what its neighbours leave of a switch's links, not of another's NIC."""
    one = torch.zeros(64, 64)
    one[0, 60] = 4e9
    links = build_fabric(TREE, range(64))
    assert links.compute_busiest_link_seconds(one).item() == links.simulate_fair_shares(one) == 1.0  # its NIC
    one[:16, 60] = 4e9  # sixteen to one: its NIC in has all of it
    assert links.compute_busiest_link_seconds(one).item() == pytest.approx(16)
    spread = torch.zeros(64, 64)
    spread[torch.arange(16), torch.arange(48, 64)] = 4e9  # a switch's worth: 16 x 1 GB/s
    assert links.compute_busiest_link_seconds(spread).item() == pytest.approx(4)


@pytest.mark.parametrize(("ranks", "skew"), [(8, 0.0), (16, 0.0), (16, 1.0), (16, 2.0)])
def test_drawn_exchanges_keep_their_busiest_link_busy(ranks, skew):
    """Fair sharing takes no longer than the busiest link alone."""
    generator = torch.Generator().manual_seed(0)
    weights = compute_zipf_weights(64, skew)[torch.randperm(64, generator=generator)]
    choices = draw_choices(weights, ranks * 256, 6, generator)
    for way in ("flat", "dedup"):
        (rows,) = count_traffic(choices, torch.arange(ranks).repeat_interleave(256), 64, (ranks,), way).hops
        links = build_fabric(FRONTIER, range(ranks))
        assert links.simulate_fair_shares(rows) == pytest.approx(links.compute_busiest_link_seconds(rows).item())


def test_fair_sharing_can_take_longer():
    """Rank 0 has three seconds to send, but at first both that it sends to hear two others as well: it has a third of
    each until these are done, after 0.3 seconds."""
    flows = torch.zeros(8, 8)
    flows[0, 1] = flows[0, 2] = 1.5
    flows[3, 1] = flows[4, 1] = flows[5, 2] = flows[6, 2] = 0.1
    links = build_fabric(FRONTIER, range(8))
    assert links.compute_busiest_link_seconds(flows * 50e9).item() == pytest.approx(3)
    assert links.simulate_fair_shares(flows * 50e9) == pytest.approx(0.3 + 2 * 1.4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        flows = torch.rand(6, 6, generator=generator) ** 8 * 1e9
        links = build_fabric(FRONTIER, range(6))
        assert 1 - 1e-9 <= links.simulate_fair_shares(flows) / links.compute_busiest_link_seconds(flows).item() < 1.1


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda p: p.name)
def test_a_ring_of_one_rank_a_node_is_the_formula(platform):
    size = platform.node_size
    ranks = range(0, 16 * size, size)
    assert estimate_ring(platform, ranks) == pytest.approx(1 / platform.find_network(16, size).bandwidth)
    assert estimate_ring(platform, range(size)) == pytest.approx(1 / platform.networks[0].bandwidth)
    assert estimate_ring(platform, [3]) == 0.0


def test_a_ring_gets_the_share_of_its_ranks():
    """Four ranks a switch, one a node: the ring leaves it once, by what the four have of its links: 4 x 1 GB/s."""
    assert estimate_ring(TREE, range(0, 64, 4)) == pytest.approx(1 / 4e9)
    assert 1 / TREE.find_network(16, 4).bandwidth == 1 / 1e9  # the formula


@pytest.mark.parametrize("members", [2, 4, 8])
def test_several_rings_use_several_nics(members):
    """Each of n ranks in a node carries 1 / n of the bytes that leave the node, unless the node itself is slower."""
    ranks = [node * 8 + i * 8 // members for node in range(16) for i in range(members)]
    wanted = max(1 / members / 12.5e9, (members - 1) / members / 50e9)
    assert estimate_ring(FRONTIER, ranks) == pytest.approx(wanted)
    assert estimate_ring(FRONTIER, ranks) < 1 / FRONTIER.find_network(len(ranks), 8 // members).bandwidth


def test_stragglers_are_as_measured():
    """A third of them as each says: the mean of (1, 1, 4) is 2, to five standard deviations."""
    generator = torch.Generator().manual_seed(0)
    found = draw_slowdowns(Network("node", 8, 1e9, spread=(1.0, 1.0, 4.0)), (100, 100), generator)
    assert found.shape == (100, 100) and found.min() >= 1 and found.max() <= 4
    assert found.mean().item() == pytest.approx(2, abs=5 * found.std().item() / 100)
    assert (draw_slowdowns(Network("node", 8, 1e9), (5,), generator) == 1).all()
    assert (draw_slowdowns(Network("node", 8, 1e9, spread=(1.5,)), (5,), generator) == 1.5).all()
    assert math.isclose(draw_slowdowns(Network("node", 8, 1e9, spread=(1.0, 1.0)), (5,), generator).sum(), 5)
