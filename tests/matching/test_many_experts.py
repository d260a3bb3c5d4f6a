"""Loops over many experts: proofs find one that differs, and take time linear in the number of experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.errors import Refused
from moefx.matching.lift.value_lookup import ValueLookup

from ..blocks import D, H, Loop, Mlp, rewritten

ODD = 37
COUNTS = [40, pytest.param(512, marks=pytest.mark.exhaustive)]


class Scaled(Loop):
    """Double the output of one expert."""

    def expert(self, e, x, w):
        return self.experts[e](x) * (2 * w if e == ODD else w)


class Borrowed(Loop):
    """Run another expert instead of one."""

    def expert(self, e, x, w):
        return self.experts[e - 1 if e == ODD else e](x) * w


class NotForOneRow(Loop):
    """Use another function only if one expert has a single row."""

    def expert(self, e, x, w):
        y = self.experts[e](x) * w
        return y.abs() if e == ODD and len(x) == 1 else y


def replace_activation(block: Loop) -> None:
    block.experts[ODD].act = F.silu


def remove_bias(block: Loop) -> None:
    block.experts[ODD].down = nn.Linear(H, D, bias=False)


def share_weight(block: Loop) -> None:
    block.experts[ODD].up.weight = block.experts[3].up.weight


def is_equal(block: nn.Module, result) -> bool:
    """Compare the rewritten graph with the block, with every expert selected."""
    with torch.no_grad():
        block.gate.weight.copy_(F.normalize(block.gate.weight, dim=-1))
    x = torch.cat([3 * block.gate.weight.detach(), torch.randn(64, D, dtype=torch.float64)])  # one token per expert
    assert set(range(len(block.experts))) <= set(block.route(x)[1].flatten().tolist())
    return torch.allclose(result.graph.compile()(block, x), block(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scaled, "experts do not compute the same function"),
        (Borrowed, "explains which experts were used"),
        (NotForOneRow, "load of an expert"),
    ],
)
def test_a_different_call_of_one_expert_is_refused(kind, reason, count):
    torch.manual_seed(0)
    with pytest.raises(Refused, match=reason):
        rewritten(kind(Mlp, num_experts=count).double(), torch.zeros(5, D).double())


def test_the_first_captures_show_many_experts():
    torch.manual_seed(0)
    block = Loop(Mlp, num_experts=160).double()
    result = rewritten(block, torch.zeros(5, D).double())
    (coverage,) = [run for run in result.match.probe_runs if run.name == "show_all_experts"]
    assert coverage.added_forms == 0
    assert [g.ids for g in result.match.groups] == [[*range(160)]]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("change", [replace_activation, remove_bias, share_weight])
def test_a_different_expert_among_many_is_seen(change, count):
    torch.manual_seed(0)
    block = Loop(Mlp, num_experts=count)
    change(block)
    block.double()
    if change is share_weight:
        with pytest.raises(Refused, match="or they share a parameter"):
            rewritten(block, torch.zeros(5, D).double())
        return
    result = rewritten(block, torch.zeros(5, D).double())
    others = [e for e in range(count) if e != ODD]
    assert sorted(g.ids for g in result.match.groups) == [others, [ODD]]
    assert is_equal(block, result)


def test_a_value_that_each_iteration_recomputes_is_visited_once(monkeypatch):
    """Visit the axis that `weights[t, k, None]` inserts once, not once per expert."""
    most = 0
    rows = ValueLookup.list_rows

    def counted(self, shape):
        nonlocal most
        most = max(most, len(self.candidates))
        return rows(self, shape)

    monkeypatch.setattr(ValueLookup, "list_rows", counted)
    rewritten(Loop(Mlp, num_experts=24))
    assert 0 < most < 24


def test_rows_of_a_shape_that_no_expert_computes_with_are_not_followed(monkeypatch):
    """Ignore the scores of groups of experts: following each row of these long sums takes time."""
    asked, rows = set(), ValueLookup.list_rows

    def noted(self, shape):
        asked.add(shape)
        return rows(self, shape)

    monkeypatch.setattr(ValueLookup, "list_rows", noted)
    rewritten(Loop(Mlp, num_experts=24))
    assert (D,) in asked
    assert (24,) not in asked  # rows of scores


@pytest.mark.exhaustive
def test_all_experts_of_captures_without_the_odd_one_are_matched():
    """Read the graph from captures with both kinds of experts, and the parameters from all captures."""
    torch.manual_seed(0)
    block = Loop(Mlp, num_experts=128)
    remove_bias(block)
    result = rewritten(block.double(), torch.zeros(5, D).double())
    assert sorted(len(g.ids) for g in result.match.groups) == [1, 127]
    assert is_equal(block, result)
