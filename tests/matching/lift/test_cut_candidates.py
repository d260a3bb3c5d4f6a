"""The node that sums the rows of all experts, and its inputs."""

from __future__ import annotations

from torch import nn

from moefx.ir.ancestors import collect_ancestors
from moefx.matching.lift.cut_candidates import find_call_internals, find_cut_inputs, find_cuts

from .small_blocks import EXPERTS, TOKENS, D, E, Small, find_nodes, find_uses


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
    inputs = find_cut_inputs(used.capture, used.capture.out, collect_ancestors(used.capture.out), routed, None)
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
