"""Routed region: the parameters that each row uses, and the node that sums the rows of all experts."""

from __future__ import annotations

import torch
from torch import nn

from moefx.matching.lift.routed_nodes import (
    find_call_internals,
    find_cut_inputs,
    find_cuts,
    has_integer_choices,
    has_sequence_choices,
)

from .small_blocks import EXPERTS, TOKENS, D, E, Small, capture, find_nodes, find_uses


def test_each_row_uses_the_experts_of_its_token():
    used = find_uses(Small())
    (topk,) = find_nodes(used.capture, "topk")
    ids = next(u for u in topk.users if u.args[1] == 1).meta["val"].tolist()
    parameters = [{str(leaf.args[0]) for leaf in leaves} for leaves in used.parameters_by_row(used.capture.out)]
    assert parameters == [{f"experts.{e}.weight" for e in row} for row in ids]


def test_a_routing_weight_does_not_add_the_router():
    used = find_uses(Small())
    assert used.choice_parameters == {"router.weight"}
    (router, *_) = find_nodes(used.capture, "linear")
    assert all(used.leaves(row) for row in used.rows(router))  # logits depend on the router's vectors
    assert not any("router" in str(leaf.args[0]) for row in used.rows(used.capture.out) for leaf in used.leaves(row))


class Stacked(Small):
    """Sum over a stack of experts, with a mask that keeps all experts of the first token."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(E, D, D))

    def mix(self, x, weights, ids):
        mask = torch.zeros(len(x), E, dtype=torch.long).scatter(1, ids, 1)
        mask[:1] = 1
        return torch.einsum("td,edf,te->tf", x, self.stack, self.router(x).softmax(-1) * mask)


def test_a_sum_over_all_experts_is_expanded_on_demand_only():
    used = find_uses(Stacked())
    before = used.parameters_by_row(used.capture.out)
    assert {str(leaf) for leaf in before[0]} == {"router.weight", "stack"}
    assert used.parameters_by_row(used.capture.out) == before  # a query changes nothing
    used.expand_sums(used.capture.out)
    after = used.parameters_by_row(used.capture.out)
    assert {str(leaf) for leaf in after[0]} == {f"select(stack, ((0, {e}),))" for e in range(E)} and after[
        1:
    ] == before[1:]


def test_the_cut_is_behind_all_experts():
    class Activated(Small):
        def forward(self, x):
            return super().forward(x).tanh()

    used = find_uses(Activated())
    routed, cuts = find_cuts(used, EXPERTS)
    _, *products = find_nodes(used.capture, "linear")
    assert routed.issuperset(products) and not set(cuts) & set(products)
    assert cuts == [*find_nodes(used.capture, "index_add")[-1:], *find_nodes(used.capture, "tanh")]


def test_inputs_of_the_cut_are_no_rows_of_a_loop_over_experts():
    used = find_uses(Small())
    routed, _ = find_cuts(used, EXPERTS)
    inputs = find_cut_inputs(used, used.capture.out, routed, None)
    assert not set(inputs) & routed and all(len(n.meta["val"]) == TOKENS for n in inputs)


def test_a_submodule_keeps_values_that_it_does_not_return():
    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    block = Small()
    block.router = Router(D, E, bias=False)
    used = find_uses(block)
    inside = find_call_internals(used.capture, find_cuts(used, EXPERTS)[0])
    router, *products = find_nodes(used.capture, "linear")
    assert router in inside and find_nodes(used.capture, "_softmax")[0] not in inside
    assert not inside & set(products)


def test_blocks_that_choose_by_integers_are_recognised():
    assert has_integer_choices(find_uses(Small())) and not has_integer_choices(find_uses(nn.Linear(4, 4)))


def test_a_selection_per_token_is_not_per_sequence():
    assert not has_sequence_choices(capture(Small()))


def test_nodes_that_no_output_needs_are_not_live():
    class Unused(Small):
        def forward(self, x):
            torch.exp(x)
            return super().forward(x)

    used = find_uses(Unused())
    assert not used.live_nodes() & set(find_nodes(used.capture, "exp"))
