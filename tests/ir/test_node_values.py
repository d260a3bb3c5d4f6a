"""Arguments of an op's node by the names of its schema."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph

from moefx.ir.node_values import get_argument, get_op_name, read_item, set_argument
from moefx.ir.ops import dialect

_ = dialect
aten, ops = torch.ops.aten, torch.ops.moefx


@pytest.fixture
def pft():
    g = Graph()
    return g.call_function(ops.build_pft.default, (g.placeholder("ids"), g.placeholder("w"), None), {"num_experts": 4})


def test_arguments_have_their_names(pft):
    assert get_argument(pft, "topk_weights").name == "w" and get_argument(pft, "num_experts") == 4
    assert get_argument(pft, "drop") == "none"  # the default
    with pytest.raises(KeyError, match="moefx::build_pft has no argument top_k"):
        get_argument(pft, "top_k")


@pytest.mark.parametrize("name, args, kwargs", [("keep", 3, {}), ("capacity", 3, {"capacity": 7})])
def test_arguments_are_set_where_the_schema_has_them(pft, name, args, kwargs):
    set_argument(pft, name, 7)
    assert get_argument(pft, name) == 7 and len(pft.args) == args and pft.kwargs == {"num_experts": 4, **kwargs}
    with pytest.raises(KeyError, match="moefx::build_pft has no argument top_k"):
        set_argument(pft, "top_k", 2)


def test_an_argument_behind_the_last_one_is_appended(pft):
    part = pft.graph.call_function(aten.slice.Tensor, (pft, 0))
    set_argument(part, "start", 2)
    assert part.args == (pft, 0, 2)
    set_argument(part, "step", 3)  # behind a gap
    assert part.args == (pft, 0, 2) and part.kwargs == {"step": 3} and get_argument(part, "step") == 3


def test_an_item_has_a_source_and_a_number(pft):
    assert read_item(pft.graph.call_function(operator.getitem, (pft, 3))) == (pft, 3)


def test_overloads_that_do_something_else_have_names_of_their_own():
    ids = torch.zeros(3, dtype=torch.long)
    for overload, value in ((aten.scatter.value, 1), (aten.scatter.src, ids), (aten.scatter.value_reduce, 1)):
        node = Graph().call_function(overload, (ids, 0, ids, value))
        expected = "scatter_with_reduce" if overload is aten.scatter.value_reduce else "scatter"
        assert get_op_name(node) == expected
