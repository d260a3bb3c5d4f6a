"""Shipped platforms, and files."""

from __future__ import annotations

import dataclasses

import pytest

from moefx.errors import UnknownPlatform
from moefx.planner.communication import combine_links
from moefx.planner.platforms import PLATFORMS, Network, Platform, find_platform

ALL = pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda p: p.name)


@ALL
def test_every_figure_has_a_source(platform):
    known = {field.name: field.default for field in dataclasses.fields(platform)}
    figures = {"memory_bytes", "peak", "memory_bandwidth", "matmul_efficiency", "attention_efficiency", "fast_domain"}
    figures |= {"expert_gemm", "expert_rows", "expert_weights", "expert_launch", "overhead"}
    stated = {name for name in figures if getattr(platform, name) != known[name]}
    assert stated <= platform.sources.keys() and all(network.source for network in platform.networks)


@ALL
def test_a_platform_is_read_back_from_its_file(platform, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(platform.to_json())
    assert find_platform(str(path)) == platform


def test_platforms_are_found_by_name_and_close_names_are_proposed():
    assert find_platform("Frontier").memory_bytes == 64 * 2**30
    with pytest.raises(UnknownPlatform, match="no platform 'frontiere'; did you mean frontier"):
        find_platform("frontiere")
    with pytest.raises(UnknownPlatform, match=r"no platform file no\.json: No such file"):
        find_platform("no.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"networks": [], "colour": 1}', '{"networks": [{"size": 2}]}'])
def test_other_files_raise(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UnknownPlatform, match=r"other\.json is no platform file: .*Its fields are name, device"):
        find_platform(str(path))


@pytest.mark.parametrize(
    ("group", "stride", "sizes", "names"),
    [
        (8, 1, (8,), ["node"]),
        (16, 1, (2, 8), ["switch group", "node"]),
        (64, 1, (8, 8), ["rack", "node"]),
        (512, 1, (64, 8), ["machine", "node"]),
        (8, 8, (8,), ["rack"]),
        (4, 2, (4,), ["node"]),
        (8, 2, (2, 4), ["switch group", "node"]),
    ],
)
def test_a_group_on_frontier_crosses_the_levels_of_its_ranks(group, stride, sizes, names):
    found, networks = find_platform("frontier").list_levels(group, stride)
    assert (found, [network.name for network in networks]) == (sizes, names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(peak=0), "peak is 0, expected above 0"),
        (dict(networks=()), "no networks; the first one is the node"),
        (dict(networks=(Network("node", 8, 1e9), Network("rack", 8, 1e9))), r"units of \[8, 8\] ranks do not grow"),
        (dict(networks=(Network("node", 8, 0),)), "network 'node': bandwidth is 0, expected above 0"),
        (dict(networks=(Network("node", 8, 1e9, p2p=-1.0),)), r"p2p is -1\.0, expected 0 or more"),
        (dict(networks=(Network("node", 2.5, 1e9),)), r"ranks is 2\.5, expected a whole number"),
        (dict(networks=(Network("node", 8, 1e9, spread=(2.0, 1.0)),)), r"spread of \(2\.0, 1\.0\)"),
        (dict(handling=float("nan")), "handling is nan, expected a number"),
        (dict(expert_gemm=-1.0), r"expert_gemm is -1\.0, expected 0 or more"),
        (dict(matmul_efficiency=1.5), r"matmul_efficiency is 1\.5, expected above 0, at most 1"),
        (dict(overhead="x"), "overhead is 'x', expected a number"),
        (dict(peak=True), "peak is True, expected a number"),
        (dict(device=None), "device is None, expected a text"),
    ],
)
def test_impossible_platforms_raise(change, message):
    with pytest.raises(UnknownPlatform, match=message):
        dataclasses.replace(find_platform("h200"), **change)


def test_units_without_a_limit_are_the_largest():
    with pytest.raises(UnknownPlatform, match="do not grow"):
        Platform(name="x", device="x", memory_bytes=1, peak=1, memory_bandwidth=1,
                 networks=(Network("all", 0, 1e9), Network("node", 8, 1e9)))  # fmt: skip


def test_as_many_levels_as_links_differ():
    """Build nodes of 4, switches of 16, and all. A switch with the links of the level above is no level."""
    networks = Network("node", 4, 8e9), Network("switch", 16, 4e9), Network("all", 0, 1e9)
    tree = dataclasses.replace(find_platform("h200"), networks=networks)
    assert [n.name for n in tree.list_levels(64)[1]] == ["all", "switch", "node"]
    assert [tree.list_levels(*group)[0] for group in ((64, 1), (16, 1), (16, 4), (4, 16), (1, 1), (24, 1))] == [
        (4, 4, 4), (4, 4), (4, 4), (4,), (1,), (6, 4),
    ]  # fmt: skip
    alike = dataclasses.replace(tree, networks=(networks[0], Network("switch", 16, 1e9), networks[2]))
    assert alike.list_levels(64)[0] == (16, 4)


def test_the_slowest_level_of_an_even_exchange():
    """Exchange 8 of 15 bytes of 16 ranks in 2 nodes between the nodes, whose slower links take all the time."""
    assert combine_links((2, 8), ((1e-3, 10e-9), (1e-6, 1e-9))) == pytest.approx((1e-3, 10e-9 * 8 / 15))
    assert combine_links((8,), ((0.0, 1e-9),)) == pytest.approx((0.0, 1e-9))
