"""Proofs find one form under all routings, or refuse with a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import Refused

from ..blocks import D, E, K, Loop, Mlp, rewritten


class TestForms:
    def test_a_plain_loop_is_proven_without_guards(self):
        match = rewritten(Loop()).match
        assert match.num_experts == E and match.slots == K and match.keep_masks is None and not match.guards
        assert len(match.forms) >= 3 and [g.ids for g in match.groups] == [list(range(E))]

    def test_tables_name_every_expert(self):
        (group,) = rewritten(Loop()).match.groups
        assert sorted(str(p) for table in group.tables for p in table) == sorted(
            f"experts.{e}.{part}.weight" for e in range(E) for part in ("gate", "up", "down")
        )

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("k", [1, 3, E])
    def test_the_match_has_k_slots(self, k):
        assert rewritten(Loop(k=k)).match.slots == k

    def test_axes_of_a_batch_are_sizes_of_the_match(self):
        class Batched(Loop):
            def forward(self, x):
                return super().forward(x.flatten(0, 1)).view_as(x)

        assert rewritten(Batched(), torch.zeros(2, 5, D)).match.arguments.dims == ("B", "S")

    def test_one_expert_that_does_nothing(self):
        class Zero(Loop):
            def expert(self, e, x, w):
                return self.experts[e](x) * w if e else torch.zeros_like(x)

        match = rewritten(Zero()).match
        assert [g.ids for g in match.groups] == [[1, 2, 3]]


class TestVerdicts:
    def test_nothing_is_routed(self):
        with pytest.raises(Refused, match="nothing is routed"):
            rewritten(Mlp())

    def test_one_expert_differs(self):
        """Put an expert with another function into its own group, though few routings select it."""

        class Odd(Loop):
            def expert(self, e, x, w):
                y = self.experts[e](x) * w
                return y.tanh() if e == E - 1 else y

        assert sorted(g.ids for g in rewritten(Odd()).match.groups) == [[0, 1, 2], [3]]

    def test_unused_experts_of_a_stack_are_refused(self):
        class Half(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.w = nn.Linear(D, 3, bias=False), nn.Parameter(torch.randn(6, D, D))

            def forward(self, x):
                w, ids = self.gate(x).softmax(-1).max(-1)
                return torch.einsum("td,tdf->tf", x, self.w[ids]) * w[:, None]

        with pytest.raises(
            Refused, match="3 of 6 experts were never chosen under any routing tried, the first is expert 3"
        ):
            rewritten(Half())

    def test_outputs_mixed_across_tokens_behind_the_sum(self):
        class Mixed(Loop):
            def forward(self, x):
                out = super().forward(x)
                return out + out.mean(0)

        block, x = Mixed(), torch.randn(7, D)
        assert torch.allclose(rewritten(block).graph.compile()(block, x), block(x), atol=1e-6)

    def test_a_constant_capacity_is_found(self):
        class Dropping(Loop):
            def forward(self, x):
                w, ids = self.route(x)
                out = torch.zeros_like(x)
                for e in range(E):
                    t, k = torch.where(ids == e)
                    t, k = t[:3], k[:3]
                    out = out.index_add(0, t, self.experts[e](x[t]) * w[t, k, None])
                return out

        block = Dropping().double()
        result = rewritten(block, torch.zeros(5, D).double())
        assert str(result.match.drop_rule) == "capacity of 3 rows per expert, earlier tokens first"
        for n in (2, 5, 40):
            x = torch.randn(n, D).double()
            assert torch.allclose(result.graph.compile()(block, x), block(x))

    def test_order_within_an_expert_matters(self):
        class Positional(Loop):
            def expert(self, e, x, w):
                return self.experts[e](x) * w * torch.arange(len(x))[:, None]

        with pytest.raises(Refused):
            rewritten(Positional())

    def test_vectors_that_are_looked_up_are_no_experts(self):
        class Retrieval(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.table = nn.Linear(D, E, bias=False), nn.Parameter(torch.randn(E, D))

            def forward(self, x):
                w, ids = self.gate(x).softmax(-1).topk(K, -1)
                return (self.table[ids] * w[..., None]).sum(1)

        with pytest.raises(Refused, match="single vectors looked up per token"):
            rewritten(Retrieval())


class TestBranches:
    def test_skip_of_empty_experts_does_not_matter(self):
        class Skip(Loop):
            def forward(self, x):
                w, ids = self.route(x)
                out = torch.zeros_like(x)
                for e in range(E):
                    mask = ids == e
                    if mask.any():
                        t, k = torch.where(mask)
                        out = out.index_add(0, t, self.experts[e](x[t]) * w[t, k, None])
                return out

        assert rewritten(Skip()).match.slots == K

    def test_a_rare_branch_matters(self):
        class Rare(Loop):
            def forward(self, x):
                out = super().forward(x)
                if self.gate(x).amax() > 50.0:
                    out = out * 2
                return out

        with pytest.raises(
            Refused, match=r"a value that Python reads from a tensor: if self\.gate\(x\)\.amax\(\) > 50"
        ):
            rewritten(Rare())

    def test_a_check_that_raises(self):
        class Checked(Loop):
            def forward(self, x):
                if torch.isnan(self.gate(x)).any():
                    raise ValueError("nan")
                return super().forward(x)

        assert rewritten(Checked()).match.slots == K

    def test_a_branch_on_a_float(self):
        class Peak(Loop):
            def forward(self, x):
                scale = 2.0 if float(self.gate(x).amax()) > 1e4 else 1.0
                return super().forward(x) * scale

        with pytest.raises(Refused, match=r"depends on a value that Python reads|a constant depends on the routing"):
            rewritten(Peak())

    def test_a_branch_on_the_size_is_a_guard(self):
        class Sized(Loop):
            def forward(self, x):
                out = super().forward(x)
                return out * 2 if x.shape[0] > 200 else out

        assert [str(g) for g in rewritten(Sized()).match.guards] == ["S <= 200"]


def test_two_gates_over_the_same_experts():
    """Refuse the block with a remedy, which works."""

    class Together(Loop):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(D, E)

        def forward(self, x):
            return super().forward(x), self.mixed(x, *self.second(x).softmax(-1).topk(2, -1))

    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Loop(), Loop()
            self.second.experts = self.first.experts

        def forward(self, x):
            return self.first(x), self.second(x)

    with pytest.raises(moefx.NoMoEBlockFound, match="if several gates share the experts"):
        moefx.compile(Together(), example_inputs=(torch.randn(9, D),))
    model, x = Apart().double(), torch.randn(7, D, dtype=torch.float64)
    compiled = moefx.compile(model, example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x))
    assert [block.name for block in moefx.blocks(compiled)] == ["first", "second"]
