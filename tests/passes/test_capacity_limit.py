"""Capacities that the plan sets."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import fx

import moefx
from moefx.errors import InvalidPlan
from moefx.ir.ops.token_routing import build_pft

from ..blocks import D, Dropping, E, Gated, K, Loop


class Kept(Loop):
    """Reference that runs only kept slots."""

    def kept(self, x, w, ids, factor, drop):
        capacity = math.ceil(factor * ids.numel() / len(self.experts))
        inverse = build_pft(ids, w, None, num_experts=len(self.experts), capacity=capacity, drop=drop)[3]
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where((ids == e) & (inverse >= 0))
            assert len(t) <= capacity
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("drop", ["weight", "position_token", "position_slot"])
@pytest.mark.parametrize("factor", [2**-20, 0.5, 1.25])
def test_slots_over_the_capacity_are_dropped(drop, factor):
    torch.manual_seed(0)
    block = Kept(Gated).double()
    plan = moefx.Plan(capacity_factor=factor, drop=drop)
    compiled = moefx.compile(block, plan=plan, example_inputs=(torch.zeros(9, D, dtype=torch.float64),))
    for tokens in (9, 32, 1, 0):
        inputs = [torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        out, want = compiled(inputs[0]), block.kept(inputs[1], *block.route(inputs[1]), factor, drop)
        torch.testing.assert_close(out, want)
        leaves = list(block.parameters())
        grad = torch.randn_like(want)
        for a, b in zip(
            torch.autograd.grad(out, [inputs[0], *leaves], grad, allow_unused=True),
            torch.autograd.grad(want, [inputs[1], *leaves], grad, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(torch.zeros(1) if a is None else a, torch.zeros(1) if b is None else b)
    assert all(b.fallbacks == 0 for b in moefx.blocks(compiled))
    for shown in (
        moefx.explain(compiled),
        moefx.explain(block, plan=plan, example_inputs=(torch.zeros(9, D).double(),)),
    ):
        assert f"over the plan's capacity, by {drop}" in str(shown)


def test_verify_names_the_pass_and_a_capacity_for_all_changes_nothing():
    torch.manual_seed(0)
    block, x = Loop(Gated), torch.randn(40, D)
    roomy = moefx.compile(block, plan=moefx.Plan(capacity_factor=E), example_inputs=(x,))
    moefx.verify(roomy, block, (x,)).raise_if_failed()
    tight = moefx.compile(block, plan=moefx.Plan(capacity_factor=0.25), example_inputs=(x,))
    report = moefx.verify(tight, block, (x,))
    assert not report.ok and "first pass that differs: limit" in str(report)


def test_the_formula_is_exact_for_every_size():
    compiled = moefx.compile(Loop(Gated), plan=moefx.Plan(capacity_factor=1.1), example_inputs=(torch.zeros(9, D),))
    graph = moefx.graph(compiled, "")
    (pft,) = graph.find(torch.ops.moefx.build_pft.default)
    assert pft.kwargs["drop"] == "weight" and pft.kwargs["capacity"].name == "capacity"
    text = str(graph)
    assert "capacity" in text and 'drop="weight"' in text
    share = Fraction(1.1).limit_denominator(1 << 20) * K / E
    for tokens in range(1, 50):
        assert evaluate_node(pft.kwargs["capacity"], tokens) == math.ceil(tokens * share)


def evaluate_node(node, tokens: int) -> int:
    """Compute a node of integer arithmetic over the number of tokens."""
    if not isinstance(node, fx.Node):
        return node
    if node.target is torch.ops.aten.sym_size.int:
        return tokens
    return node.target(*(evaluate_node(argument, tokens) for argument in node.args))


class TwoKinds(Loop):
    """Half of the experts use another activation."""

    def expert(self, e, x, w):
        y = self.experts[e](x)
        return (y.tanh() if e < E // 2 else y.sigmoid()) * w


def test_each_kind_of_expert_has_the_capacity():
    torch.manual_seed(0)
    block, x = TwoKinds(Gated), torch.randn(40, D)
    compiled = moefx.compile(block, plan=moefx.Plan(capacity_factor=E), example_inputs=(x,))
    torch.testing.assert_close(compiled(x), block(x))
    tight = moefx.compile(block, plan=moefx.Plan(capacity_factor=1.0), example_inputs=(x,))
    capacities = [n.kwargs["capacity"] for n in moefx.graph(tight, "").find(torch.ops.moefx.build_pft.default)]
    assert len(capacities) == 2 and all(evaluate_node(node, 40) == math.ceil(40 * K / E) for node in capacities)


class Unweighted(Loop):
    def expert(self, e, x, w):
        return self.experts[e](x)


@pytest.mark.parametrize(
    "block, text", [(Dropping, "drops choices by a rule of its own"), (Unweighted, "no routing w")]
)
def test_capacity_factor_that_cannot_apply_raises(block, text):
    with pytest.raises(InvalidPlan, match=text):
        moefx.compile(block(), plan=moefx.Plan(capacity_factor=1.0), example_inputs=(torch.zeros(9, D),))


@pytest.mark.parametrize("wrong", [{"capacity_factor": 0}, {"capacity_factor": "1"}, {"drop": "random"}, {"chunks": 0}])
def test_a_plan_with_a_wrong_field_is_refused(wrong):
    with pytest.raises(InvalidPlan, match=next(iter(wrong))):
        moefx.Plan(**wrong)


def test_the_smallest_capacity_factor_is_named():
    with pytest.raises(InvalidPlan, match=r"capacity_factor=9\.5367431640625e-07 keeps one"):
        moefx.Plan(capacity_factor=4e-7)
    assert moefx.Plan(capacity_factor=9.5367431640625e-07)
