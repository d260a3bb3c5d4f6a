"""The chosen dispatch: exact counts of rows on known links, else the dominating cost."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch.distributed")

from moefx.errors import InvalidPlan
from moefx.runtime.link_costs import Link, Links, choose_fastest, compute_expected_parts, predict_seconds
from moefx.runtime.topology import Topology, resolve_node_size


def picked(*per_byte: float, sizes: tuple[int, ...] = (4, 8), latency: float = 0.0, top_k: int = 8) -> str:
    """By seconds for a byte, level by level."""
    links = Links(Link(latency, 0.0), tuple(Link(latency, seconds) for seconds in per_byte))
    return choose_fastest(predict_seconds(links, sizes, 256, top_k, row_bytes=4096.0))


@pytest.mark.parametrize(
    "seconds, way",  # as predicted over emulated nodes; the way that took the least, or as long as that, is picked
    [
        ({"flat": 3343, "dedup": 1511, "rbd": 869, "halo": 856}, "rbd"),
        ({"flat": 1983, "dedup": 1738, "rbd": 1498, "halo": 1490}, "dedup"),
        ({"flat": 425, "dedup": 425, "rbd": 446, "halo": 441}, "flat"),
        ({"flat": 119.6, "dedup": 54.9, "rbd": 68.3, "halo": 49.5}, "dedup"),
    ],
)
def test_choose_fastest_agrees_with_measurements(seconds, way):
    assert choose_fastest(seconds) == way


def test_expected_parts():
    """X-MoE's redundancy for 256 experts, 8 of them a token, 8 ranks a node: 75.1 % and 54.8 %."""
    for nodes, redundancy in ((2, 0.751), (4, 0.548), (8, 0.338), (16, 0.185), (32, 0.092)):
        assert 1 - compute_expected_parts(256, 8, nodes) / 8 == pytest.approx(redundancy, abs=5e-4)
    assert compute_expected_parts(8, 8, 4) == 4
    assert compute_expected_parts(128, 8, 4) == pytest.approx(3.6, abs=0.06)
    assert compute_expected_parts(16, 1, 8) == pytest.approx(1)


@pytest.mark.parametrize(
    "sizes, seconds",  # every token goes to every rank; seconds for a byte: 3, 5 and 7, coarse to fine
    [
        ((4,), {"flat": 3 * 3, "dedup": 3 * 3}),
        ((2, 2), {"flat": 3 * 2, "dedup": 3 * 2, "rbd": 3 * 1 + 5 * 2, "halo": max(3 * 1, 5 * 1) + 5 * 1}),
        ((2, 2, 2), {"flat": 3 * 4, "dedup": 3 * 4, "rbd": 3 + 5 * 2 + 7 * 4, "halo": max(3 + 5 * 2, 7) + 7 * 3}),
    ],
)
def test_seconds_of_each_hop(sizes, seconds):
    links = Links(Link(0.0, 0.0), tuple(Link(0.0, float(n)) for n in (3, 5, 7)[: len(sizes)]))
    experts = math.prod(sizes)
    assert predict_seconds(links, sizes, experts, experts, 1.0, tokens=1) == pytest.approx(seconds)


def test_handling_is_counted_at_each_hop():
    """Every token goes to every rank of 2 x 2: 4 rows to pack, of two hops 2 and 4; 1 less where 2 stay aside."""
    links = Links(Link(0.0, 0.0), (Link(0.0, 0.0),) * 2, handling=1.0)
    want = {"flat": 4, "dedup": 4, "rbd": 2 + 4, "halo": 1 + 4}
    assert predict_seconds(links, (2, 2), 4, 4, 1.0, tokens=1) == pytest.approx(want)
    assert choose_fastest(predict_seconds(links, (2, 2), 4, 4, 1.0, tokens=1)) == "flat"


def test_each_dispatch_is_chosen_on_its_links():
    assert picked(1e-10, 1e-10, top_k=1) == "flat"  # nothing is sent twice
    assert picked(1e-10, 1e-10) == "dedup"  # a node's own links are not faster
    assert picked(1e-9, 1e-12) == "rbd"  # what happens in the node costs nothing
    assert picked(2e-9, 1e-9, sizes=(2, 2)) == "halo"  # phase I is hidden behind II
    assert picked(1e-9, 1e-12, latency=1.0) in ("flat", "dedup")  # one collective is all one can wait for


def test_each_dispatch_is_chosen_over_racks():
    assert picked(1e-10, 1e-10, 1e-10, sizes=(2, 4, 8), top_k=1) == "flat"
    assert picked(1e-10, 1e-10, 1e-10, sizes=(2, 4, 8)) == "dedup"
    assert picked(1e-9, 1e-10, 1e-12, sizes=(2, 4, 8)) == "rbd"  # links between racks are what counts
    assert picked(2e-9, 1e-11, 1e-9, sizes=(2, 2, 2)) == "halo"
    assert picked(1e-9, 1e-10, 1e-12, sizes=(2, 4, 8), latency=1.0) in ("flat", "dedup")


def test_topologies():
    assert Topology.from_ranks(range(8), [4]) == Topology((2, 4), tuple(range(8)))
    assert Topology.from_ranks(range(8), [8]).sizes == Topology.from_ranks(range(8), [1]).sizes == (8,)
    assert Topology.from_ranks([0, 2, 4, 6], [4]) == Topology((2, 2), (0, 1, 2, 3))
    assert Topology.from_ranks([5, 4, 1, 0], [2]) == Topology((2, 2), (3, 2, 1, 0))
    deep = Topology.from_ranks(range(16), [2, 8])
    assert deep.sizes == (2, 4, 2) and deep.names == ["level1", "inter", "intra"]
    assert Topology.from_ranks([3], [2]).sizes == (1,)


@pytest.mark.parametrize(
    ("ranks", "units", "message"),
    [
        (range(8), [3, 4], "units of 4 ranks do not consist of several whole units of 3, the level below"),
        (range(6), [4], r"mesh axis 'ep' \(ranks 0, 1, 2, 3, 4, 5\) has 2 to 4 parts in units of 4 ranks"),
        ([0, 1, 2, 4], [4], "has 1 to 3 parts in units of 4"),
    ],
)
def test_topologies_that_are_uneven(ranks, units, message):
    with pytest.raises(InvalidPlan, match=message):
        Topology.from_ranks(ranks, units)


def test_node_size(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert resolve_node_size(None, 8) == 8 and resolve_node_size(2, 8) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resolve_node_size(None, 8) == 4 and resolve_node_size(2, 8) == 2
    with pytest.raises(InvalidPlan, match="LOCAL_WORLD_SIZE is 4, but the 6 ranks are not whole nodes"):
        resolve_node_size(None, 6)
