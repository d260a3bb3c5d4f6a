"""Attribute paths as ranges and as expressions that read them through any container."""

import pytest
import torch
from torch import nn

from moefx.ir.attribute_paths import attribute_expression, find_range, read_range, split_into_ranges


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["experts.0.w", "experts.1.w", "experts.2.w"], "experts[0..2].w"),
        (["e.w3_1", "e.w3_2"], "e.w3_[1..2]"),
        (["expert_4.up.weight", "expert_5.up.weight"], "expert_[4..5].up.weight"),
    ],
)
def test_a_run_of_numbers_is_one_range(paths, text):
    assert str(find_range(paths)) == text


@pytest.mark.parametrize(
    "paths",
    [
        ["a.0"],
        ["a.0", "a.2"],
        ["a.1", "a.0"],
        ["a.0.w", "b.1.w"],
        ["a.00", "a.01"],
        ["a.0.0", "a.1.1"],
        ["a.0", "a"],
    ],
)
def test_find_range_returns_none_without_a_run(paths):
    assert find_range(paths) is None


def test_lists_are_cut_into_runs_in_order():
    paths = ["a.0", "a.1", "b", "a.5", "a.6", "a.7"]
    assert [str(r) for r in split_into_ranges(paths)] == ["a[0..1]", "b", "a[5..7]"]


def test_expressions_read_through_any_container():
    owner = nn.Module()
    owner.experts = nn.ModuleDict({"0": nn.Linear(1, 1), "class": nn.Linear(1, 1)})
    owner.w = nn.ParameterList([nn.Parameter(owner.experts["0"].weight.detach())] * 2)
    owner.expert_0, owner.expert_1 = nn.Linear(1, 1), nn.Linear(1, 1)
    for path in ("experts.0.weight", "experts.class.weight", "w.1"):
        assert eval(attribute_expression("self", path), {"self": owner}) is owner.get_parameter(path)
    names = ["expert_0.weight", "expert_1.weight"]
    text = find_range(names).expression("self", "read_range")
    found = eval(text, {"self": owner, "read_range": read_range})
    assert all(a is owner.get_parameter(n) for a, n in zip(found, names, strict=True))


@pytest.mark.parametrize("part", ["a b", "class", 'a"b', "a'b", "a\\'b", "a\nb", "{a}", "\u00e9", '"], hit(), ["'])
def test_expressions_quote_any_name(part):
    owner = nn.ModuleDict({f"{part}{i}": nn.Linear(2, 2) for i in range(3)})
    paths = [f"{part}{i}.weight" for i in range(3)]
    for path in paths:
        assert eval(attribute_expression("self", path), {"self": owner}) is owner.get_parameter(path)
    run = find_range(paths)
    assert run is not None
    read = eval(run.expression("self", "read_range"), {"self": owner, "read_range": read_range})
    assert all(a is owner.get_parameter(path) for a, path in zip(read, paths, strict=True))


def test_ranges_are_read_wherever_the_attributes_are():
    owner = nn.Module()
    owner.w_0, owner.w_1 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    assert read_range(owner, "w_", 0, 2, "")[1] is owner.w_1
    del owner.w_1
    owner.w_1 = torch.ones(1)  # like FSDP1 and DataParallel
    assert read_range(owner, "w_", 0, 2, "")[1] is owner.w_1
    owner.experts = nn.ModuleList(nn.BatchNorm1d(1) for _ in range(2))
    assert read_range(owner.experts, "", 0, 2, ".running_mean")[0] is owner.experts[0].running_mean
    with pytest.raises(AttributeError, match="running_total"):
        read_range(owner.experts, "", 0, 2, ".running_total")
