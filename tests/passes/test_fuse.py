"""Fusing returns the fused body, or the reason why an expert is not fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx import Plan
from moefx.ir.expressions.expert_body import ExpertBody
from moefx.passes.fuse import fuse

from ..blocks import D, E, Gated, H, Loop, Mlp, Stacked, WithBias, rewritten

ops = torch.ops.moefx


def fuse_body(block: nn.Module, **tolerance: float) -> ExpertBody:
    graph = rewritten(block).graph
    (mlp,) = graph.find(ops.expert_mlp.default)
    check_equal(block, graph, **tolerance)
    return ExpertBody.from_json(mlp.kwargs["body"])


def explain_unfused(block: nn.Module) -> str:
    graph = rewritten(block).graph
    assert not graph.find(ops.expert_mlp.default)
    check_equal(block, graph)
    (combine,) = graph.find(ops.combine.default)
    return combine.meta["unfused"]


def check_equal(block: nn.Module, graph, **tolerance: float) -> None:
    """Check that outputs and gradients of the rewritten block equal the original."""
    block = block.double()
    x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
    wanted, found = block(x), graph.compile()(block, x)
    leaves = [x, *block.parameters()]
    assert torch.allclose(found, wanted, **tolerance)
    cotangent = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(found, leaves, cotangent, allow_unused=True),
        torch.autograd.grad(wanted, leaves, cotangent, allow_unused=True),
        strict=True,
    ):
        if b is not None or a is not None:
            a, b = torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b
            assert torch.allclose(a, b, **tolerance)


class TestBodies:
    def test_gate_and_up_of_separate_experts_are_two_products(self):
        body = fuse_body(Loop(Gated))
        assert len(body.up) == 2 and body.parts == ((0, None, None, 1), (1, None, None, 1))
        assert body.pretty() == "silu(g)*u | y*w" and body.up[0].num == E and body.up[0].transposed

    def test_biases_of_all_products_are_fused(self):
        body = fuse_body(Loop(lambda: Gated(bias=True)))
        assert all(g.bias for g in (*body.up, body.down))

    def test_an_expert_without_a_gate_has_one_product(self):
        body = fuse_body(Loop(lambda: Mlp(F.relu)))
        assert body.pretty() == "relu(h) | y*w" and len(body.up) == 1

    def test_keyword_arguments_of_the_activation_are_kept(self):
        assert "tanh" in fuse_body(Loop(lambda: Mlp(lambda x: F.gelu(x, approximate="tanh")))).pretty()

    def test_concatenated_gate_and_up_are_one_product(self):
        def experts(self, x):
            gate, up = torch.bmm(x, self.gate_up).chunk(2, -1)
            return torch.bmm(F.silu(gate) * up, self.down)

        body = fuse_body(Stacked(experts, gate_up=(D, 2 * H), down=(H, D)))
        assert len(body.up) == 1 and body.up[0].num == 1 and not body.up[0].transposed
        assert sorted((p[1] or 0, p[3]) for p in body.parts) == [(0, 1), (H, 1)]

    def test_interleaved_gate_and_up_are_one_product(self):
        def experts(self, x):
            h = torch.bmm(x, self.gate_up)
            return torch.bmm(F.silu(h[..., ::2]) * (h[..., 1::2] + 1), self.down)

        body = fuse_body(Stacked(experts, gate_up=(D, 2 * H), down=(H, D)))
        assert sorted((p[1] or 0, p[3]) for p in body.parts) == [(0, 2), (1, 2)]

    def test_biases_of_stacked_experts_are_fused(self):
        def experts(self, x):
            h = torch.baddbmm(self.b1[:, None], x, self.w1)
            return torch.baddbmm(self.b2[:, None], h.clamp(max=7.0).relu(), self.w2)

        body = fuse_body(Stacked(experts, w1=(D, H), b1=(H,), w2=(H, D), b2=(D,)))
        assert body.up[0].bias and body.down.bias and "clamp" in body.pretty()

    def test_a_weight_before_the_experts_moves_into_the_body(self):
        class Before(Loop):
            def expert(self, e, x, w):
                return self.experts[e](x * w)

        body = fuse_body(Before(Gated))
        assert body.out == "y" and "w" in body.pretty() and body.uses_row_weight

    def test_a_weight_inside_of_the_experts_stays_in_the_body(self):
        class Inside(Loop):
            def expert(self, e, x, w):
                expert = self.experts[e]
                return expert.down(F.silu(expert.gate(x)) * expert.up(x) * w)

        body = fuse_body(Inside(Gated))
        assert body.out == "y" and "w" in body.pretty()

    @pytest.mark.parametrize("before", [False, True])
    def test_weight_cast_before_it_is_a_column(self, before):
        class Cast(Loop):
            def forward(self, x):
                w, ids = self.gate(x).softmax(-1).topk(self.k, -1)
                out = torch.zeros_like(x)
                for e in range(len(self.experts)):
                    t, k = torch.where(ids == e)
                    scale = w[t, k, None].float().exp().to(x.dtype)
                    y = self.experts[e](x[t] * scale) if before else self.experts[e](x[t]) * scale
                    out = out.index_add(0, t, y)
                return out

        body = fuse_body(Cast(Gated), rtol=1e-5, atol=1e-5)  # partly in float32
        assert "exp(w" in body.pretty() and (body.out == "y") is before

    def test_experts_without_weights_use_none(self):
        class Hard(Loop):
            def expert(self, e, x, w):
                return self.experts[e](x)

        assert not fuse_body(Hard(Gated)).uses_row_weight


class TestUnfused:
    def test_an_expert_of_one_matrix_is_not_fused(self):
        assert explain_unfused(Loop(lambda: nn.Linear(D, D))) == "dispatch is not pointwise"

    def test_a_norm_between_the_products_is_not_fused(self):
        class Normed(Mlp):
            def forward(self, x):
                return self.down(F.layer_norm(self.up(x), (H,)))

        assert "is not pointwise" in explain_unfused(Loop(Normed))

    def test_a_reduction_of_hidden_units_is_not_fused(self):
        class Reduced(Mlp):
            def forward(self, x):
                h = self.up(x)
                return self.down(h * h.max(-1).values[:, None])

        assert explain_unfused(Loop(Reduced)) == "max is not pointwise"

    def test_a_softmax_after_the_last_product_is_not_fused(self):
        class After(Mlp):
            def forward(self, x):
                return self.down(self.up(x).relu()).softmax(-1)

        assert "stands after the last matrix product" in explain_unfused(Loop(After))

    def test_an_expert_of_three_matrices_is_not_fused(self):
        class Deep(Mlp):
            def __init__(self):
                super().__init__()
                self.mid = nn.Linear(H, H)

            def forward(self, x):
                return self.down(self.mid(self.up(x).relu()).relu())

        assert "stands between the gather and the up-projection" in explain_unfused(Loop(Deep))

    def test_biased_product_of_a_scaled_input(self):
        class Before(Loop):
            def expert(self, e, x, w):
                return self.experts[e](x * w)

        assert explain_unfused(Before(Mlp)) == "the routing weight scales the input of a biased product"

    def test_products_of_two_dtypes(self):
        """Cast the tokens before the gather in the fused op only."""

        class Halves(Loop):
            def expert(self, e, x, w):
                with torch.autocast("cpu", torch.bfloat16):
                    h = F.silu(self.experts[e].up(x))
                return F.linear(h.to(x.dtype), self.experts[e].down.weight) * w

        graph = rewritten(Halves(Mlp)).graph
        (combine,) = graph.find(ops.combine.default)
        assert combine.meta["unfused"] == "the matrix products are in torch.bfloat16 and torch.float32"

    def test_a_detached_part_is_not_fused(self):
        class Detached(Gated):
            def forward(self, x):
                return self.down(F.silu(self.gate(x)).detach() * self.up(x))

        assert explain_unfused(Loop(Detached)) == "a part of the experts is detached from the gradient"


@pytest.mark.parametrize("stacked", [False, True])
def test_autocast_keeps_the_parameters_themselves(stacked):
    def experts(self, x):
        return torch.bmm(F.silu(torch.bmm(x, self.up)), self.down)

    block = Stacked(experts, up=(D, H), down=(H, D)) if stacked else Loop(Gated)
    x = torch.randn(9, D, requires_grad=True)
    kept = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = rewritten(block).graph
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = graph.compile()(block, x)
    (mlp,) = graph.find(ops.expert_mlp.default)
    assert mlp.kwargs["dtype"] is torch.bfloat16
    assert all(n.op == "get_attr" for n in [*mlp.args[5], *mlp.args[7]])
    assert not [t for t in kept if t.dim() == 2 and t.dtype is torch.bfloat16 and t.shape in {(H, D), (D, H)}]
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in block.parameters())


class TestBiasInAnotherDtype:
    """Biases in another dtype promote the sum: so does the op, without rounding it."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("scale", [1.0, 100.0])
    def test_a_bias_is_added_as_under_autocast(self, dtype, scale):
        torch.manual_seed(0)
        block, x = WithBias(scale), torch.randn(33, D, requires_grad=True)
        with torch.autocast("cpu", dtype):
            graph = rewritten(block).graph
            self.equal(block, graph, x, dtype)
        (mlp,) = graph.find(ops.expert_mlp.default)
        assert all(n.op == "get_attr" for group in mlp.args[5:] for n in group)

    def test_a_bias_in_another_dtype_than_the_weights_is_added_as_before(self):
        torch.manual_seed(0)
        block = WithBias().to(torch.bfloat16)
        block.b1, block.b2 = (nn.Parameter(b.float()) for b in (block.b1, block.b2))
        x = torch.randn(33, D, dtype=torch.bfloat16, requires_grad=True)
        graph = rewritten(block, torch.zeros(5, D, dtype=torch.bfloat16)).graph
        self.equal(block, graph, x, torch.bfloat16)

    def equal(self, block, graph, x, dtype):
        (mlp,) = graph.find(ops.expert_mlp.default)
        body = ExpertBody.from_json(mlp.kwargs["body"])
        assert body.up[0].bias_dtype == body.down.bias_dtype == "float32" and mlp.kwargs["dtype"] is dtype
        wanted, found = block(x), graph.compile()(block, x)
        leaves, cotangent = [x, *block.parameters()], torch.randn_like(wanted)
        gradients = [torch.autograd.grad(out, leaves, cotangent) for out in (wanted, found)]
        for a, b in zip((wanted, *gradients[0]), (found, *gradients[1]), strict=True):
            assert a.dtype is b.dtype
            size = a.abs().max().item()
            assert torch.allclose(a, b, rtol=0, atol=2 * torch.finfo(dtype).eps * size)

    def test_products_in_two_dtypes(self):
        class Two(Mlp):
            def forward(self, x):
                return self.down.double()(self.up(x).relu().double()).to(x.dtype)

        block = Loop(Two)
        block.experts.requires_grad_(False)
        for expert in block.experts:
            expert.down.double()
        (combine,) = rewritten(block).graph.find(ops.combine.default)
        assert combine.meta["unfused"] == "the matrix products are in torch.float32 and torch.float64"


class TestReduce:
    """The op sums the rows of each token if nothing else reads the rows."""

    def test_rows_that_are_only_summed_are_reduced(self):
        block = Loop(Gated)
        graph = rewritten(block).graph
        (mlp,) = graph.find(ops.expert_mlp.default)
        assert mlp.kwargs["reduce"] and not graph.find(ops.combine.default)
        check_equal(block, graph)

    def test_rows_that_are_weighted_later_are_kept(self):
        block, graph = self.plain()
        (combine,) = graph.find(ops.combine.default)
        (w,) = [n for n in combine.args[3].args[0].users if n.args[1] == 4]
        combine.update_arg(1, w)
        self.keeps_the_rows(block, graph)

    def test_rows_with_other_readers(self):
        block, graph = self.plain()
        (combine,) = graph.find(ops.combine.default)
        with graph.graph.inserting_before(combine.next):
            total = graph.graph.call_function(torch.ops.aten.sum.default, (combine.args[0],))
            both = graph.graph.call_function(torch.ops.aten.add.Tensor, (combine, total))
        combine.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
        self.keeps_the_rows(block, graph)

    def plain(self):
        block = Loop(Gated)
        return block, rewritten(block, plan=Plan(disable=("fuse",))).graph.copy()

    def keeps_the_rows(self, block, graph):
        fused = fuse(graph, Plan())
        (mlp,) = fused.find(ops.expert_mlp.default)
        assert not mlp.kwargs.get("reduce") and fused.find(ops.combine.default)
        assert not fused.find(ops.grouped_mm.default)
        x = torch.randn(9, D)
        assert torch.allclose(fused.compile()(block, x), graph.compile()(block, x), atol=1e-6)


def test_a_plan_without_fusion_keeps_grouped_products():
    result = rewritten(Loop(), plan=Plan(fuse=False))
    assert result.history.passes == ("rewrite_block", "checkpoint")
    assert not result.graph.find(ops.expert_mlp.default) and len(result.graph.find(ops.grouped_mm.default)) == 3


@pytest.mark.parametrize("keep", ["h", "x", "all"])
def test_checkpoint_policy_is_set(keep):
    (mlp,) = rewritten(Loop(), plan=Plan(checkpoint=keep)).graph.find(ops.expert_mlp.default)
    assert mlp.kwargs["keep"] == keep


def test_auto_checkpoint_keeps_h_and_passes_copy_their_inputs():
    history = rewritten(Loop(), plan=Plan(checkpoint="auto")).history
    (mlp,) = history.graph.find(ops.expert_mlp.default)
    assert mlp.kwargs["keep"] == "h"
    assert not history.snapshots[0].graph.find(ops.expert_mlp.default)
