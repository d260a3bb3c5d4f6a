"""Orders of hosts that keep groups within switch groups and racks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefx import order_hosts
from moefx.errors import InvalidPlan


def test_groups_are_within_a_switch_group_then_a_rack():
    places = {  # in the order of a scheduler
        "n1": ("s1", "r1"), "n7": ("s3", "r2"), "n2": ("s1", "r1"), "n4": ("s2", "r1"), "n8": ("s3", "r2"),
        "n3": ("s1", "r1"), "n9": ("s4", "r2"), "n5": ("s4", "r2"),
    }  # fmt: skip
    order = order_hosts(places, group=2)
    assert str(order) == "n1,n2,n7,n8,n9,n5,n3,n4"
    assert order.inside == (3, 1, 0)  # n3 and n4 are in two switch groups of one rack


def test_hosts_of_a_switch_are_neighbours():
    order = order_hosts({"a": "x", "b": "y", "c": "x", "d": "y", "e": "x", "f": "y"}, group=3)
    assert order.hosts == ("a", "c", "e", "b", "d", "f") and order.inside == (2, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), max_size=24), st.integers(1, 4))
def test_every_host_once_and_no_group_more_could_be_inside(places, group):
    places = places[: len(places) // group * group]
    hosts = {f"n{i}": place for i, place in enumerate(places)}
    order = order_hosts(hosts, group)
    assert sorted(order.hosts) == sorted(hosts) and sum(order.inside) == len(hosts) // group
    groups = [order.hosts[i : i + group] for i in range(0, len(hosts), group)]
    for depth in range(len(order.inside)):
        units = [{hosts[h][depth:] for h in these} for these in groups]
        assert sum(len(unit) == 1 for unit in units) == sum(order.inside[: depth + 1])
    if hosts:
        assert order.inside[0] == sum(n // group for n in Counter(hosts.values()).values())


def test_uneven_hosts_raise():
    with pytest.raises(InvalidPlan, match="3 hosts are not whole groups of 2"):
        order_hosts({"a": "x", "b": "x", "c": "y"}, group=2)
    with pytest.raises(InvalidPlan, match="1 to 2 levels"):
        order_hosts({"a": "x", "b": ("x", "y")}, group=1)
