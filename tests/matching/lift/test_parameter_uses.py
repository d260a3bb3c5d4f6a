"""Parameters that each row of a capture uses."""

from __future__ import annotations

import torch
from torch import nn

from .small_blocks import D, E, Small, find_nodes, find_uses


def test_each_row_uses_the_experts_of_its_token():
    used = find_uses(Small())
    (topk,) = find_nodes(used.capture, "topk")
    ids = next(u for u in topk.users if u.args[1] == 1).meta["val"].tolist()
    parameters = [{str(leaf.args[0]) for leaf in leaves} for leaves in used.find_slices_by_row(used.capture.out)]
    assert parameters == [{f"experts.{e}.weight" for e in row} for row in ids]


def test_a_routing_weight_does_not_add_the_router():
    used = find_uses(Small())
    assert used.choice_parameters == {"router.weight"}
    (router, *_) = find_nodes(used.capture, "linear")
    assert all(used.find_slices(row) for row in used.list_rows(router))  # logits depend on the router's vectors
    slices = frozenset().union(*used.find_slices_by_row(used.capture.out))
    assert not any("router" in str(leaf.args[0]) for leaf in slices)


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
    before = used.find_slices_by_row(used.capture.out)
    assert {str(leaf) for leaf in before[0]} == {"router.weight", "stack"}
    assert used.find_slices_by_row(used.capture.out) == before  # a query changes nothing
    used.expand_sums(used.capture.out)
    after = used.find_slices_by_row(used.capture.out)
    assert {str(leaf) for leaf in after[0]} == {f"select(stack, ((0, {e}),))" for e in range(E)} and after[
        1:
    ] == before[1:]


def test_nodes_that_no_output_needs_are_not_live():
    class Unused(Small):
        def forward(self, x):
            torch.exp(x)
            return super().forward(x)

    used = find_uses(Unused())
    assert not used.find_live_nodes() & set(find_nodes(used.capture, "exp"))
