"""Terms of ATen ops in captured graphs evaluate to torch's results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.capture.concolic import capture_block
from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.terms.node_semantics import Semantics
from moefx.matching.terms.term import is_const

from ...blocks import Loop, Mlp
from ..numeric import check, get_dtype

T, D, E, K = 5, 4, 3, 2
I = torch.tensor  # noqa: E741


class Fn(nn.Module):
    def __init__(self, fn, **params: torch.Tensor):
        super().__init__()
        self.fn = fn
        for name, value in params.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, *args):
        return self.fn(self, *args)


def build_terms(block: nn.Module, *args: torch.Tensor, seed: int = 0):
    metas = tuple(a.to("meta") if a.is_floating_point() else a for a in args)
    captured = capture_block(block, metas, {}, Routing("diverse", seed))
    S = Semantics(captured.nodes, captured.concrete_value)
    return captured, S


def check_terms(block: nn.Module, *args: torch.Tensor) -> None:
    """Check each element of the output's term against the block's result."""
    block = block.double()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    captured, S = build_terms(block, *args)
    values: dict = dict(block.named_parameters())
    values |= {n: args[n.meta["position"]] for n in captured.nodes if n.op == "placeholder"}
    values |= {n: S.concrete_value(n) for n in captured.nodes if n.op == "get_attr" and n.meta["kind"] == "constant"}
    with torch.no_grad():
        expected = block(*args)
        term = S.get_term(captured.out)
        assert term.op != "node", "taken as it is"
        check(S.terms, term, expected, values)


X = torch.randn(T, D, generator=torch.Generator().manual_seed(0))
IDS = I([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])

STATELESS = {
    "add_alpha": lambda s, x: torch.add(x, x.flip(0), alpha=2.0),
    "sub_alpha": lambda s, x: torch.sub(x, x.roll(1, 0), alpha=-3.0),
    "rsub": lambda s, x: 1.0 - x,
    "div": lambda s, x: x / (x * x + 1),
    "reciprocal": lambda s, x: 2.0 / (x * x + 1),
    "scalars": lambda s, x: (x * 3 + 1) / 2 - 0.5,
    "where": lambda s, x: torch.where(I([True, False, True, True, False])[:, None], x, -x),
    "where_scalar": lambda s, x: torch.where(I([True, False, True, False]), x, 0.25),
    "masked_fill": lambda s, x: x.masked_fill(I([True, False, True, False]), 7.0),
    "masked_fill_inf": lambda s, x: x.masked_fill(I([True, False, True, False]), float("-inf")).softmax(-1),
    "glu": lambda s, x: F.glu(x, -1),
    "silu_mul": lambda s, x: F.silu(x[:, :2]) * x[:, 2:],
    "gelu": lambda s, x: F.gelu(x, approximate="tanh"),
    "clamp": lambda s, x: x.clamp(-0.5, 0.5) + x.clamp(min=0),
    "view": lambda s, x: x.view(T, 2, 2).transpose(1, 2).reshape(T * 2, 2),
    "unflatten": lambda s, x: x.unflatten(-1, (2, 2)).flatten(0, 1).unsqueeze(1).squeeze(),
    "expand": lambda s, x: x[:, None].expand(T, K, D).reshape(-1, D),
    "repeat": lambda s, x: x.repeat(2, 1) + x.repeat_interleave(2, 0),
    "repeat_axis": lambda s, x: x.repeat(1, 3, 2),
    "repeat_interleave_tensor": lambda s, x: x.repeat_interleave(I([0, 2, 1, 3, 1]), 0),
    "slice": lambda s, x: x[1::2, -3:] + x[:2, :3],
    "interleaved": lambda s, x: x[..., ::2] * x[..., 1::2],
    "select": lambda s, x: x[-1] + x[:, 1][0],
    "split": lambda s, x: torch.cat([c * i for i, c in enumerate(x.split([1, 3], -1))], -1),
    "stack": lambda s, x: torch.stack([x, x * 2, -x], 1),
    "stack_last": lambda s, x: torch.stack([x, x * 2], -1),
    "pad": lambda s, x: F.pad(x, (1, 2, 0, 1), value=3.0),
    "pad_zero": lambda s, x: F.pad(x, (0, 1)),
    "flip_roll": lambda s, x: x.flip(0, 1).roll((1, -1), (0, 1)),
    "index": lambda s, x: x[I([3, 0, 0, -1])],
    "index_2": lambda s, x: x[I([3, 0, 0]), I([1, -1, 2])],
    "index_inner": lambda s, x: x[:, I([[3, 0], [0, 1]])],
    "index_apart": lambda s, x: x.view(T, 2, 2)[I([1, 4]), :, I([0, 1])],
    "index_broadcast": lambda s, x: x[I([[0], [2]]), I([1, 3])],
    "index_select": lambda s, x: x.index_select(1, I([2, 2, 0])),
    "bool_index": lambda s, x: x[I([True, False, True, True, False])],
    "gather": lambda s, x: x.gather(1, I([[0, 3], [1, 1], [2, 0], [3, 2], [0, 0]])),
    "gather_rows": lambda s, x: x.gather(0, I([[4, 0, 1, 1]])),
    "take": lambda s, x: x.take(I([[0, 19], [7, 7]])),
    "take_along_dim": lambda s, x: torch.take_along_dim(x, I([[1], [0], [2], [3], [1]]), 1),
    "embedding": lambda s, x: F.embedding(I([[1, 4], [0, 0]]), x),
    "scatter": lambda s, x: torch.zeros(T, 6, dtype=x.dtype).scatter(1, I([[5, 0, 1, 3]]).expand(T, 4), x),
    "scatter_value": lambda s, x: x.scatter(1, I([[1], [0]]), 9.0),
    "scatter_add": lambda s, x: x.scatter_add(0, I([[0, 0, 1, 4], [0, 3, 1, 2]]), x[1:3]),
    "scatter_reduce_sum": lambda s, x: x.scatter_reduce(0, I([[0, 0, 1, 4]]), x[1:2], "sum"),
    "index_add": lambda s, x: torch.zeros_like(x).index_add(0, I([1, 1, 4]), x[:3]),
    "index_add_alpha": lambda s, x: x.index_add(1, I([0, 0]), x[:, 1:3], alpha=-2.0),
    "index_copy": lambda s, x: x.index_copy(0, I([2, 0]), x[3:]),
    "index_fill": lambda s, x: x.index_fill(1, I([2, 0]), 5.0),
    "index_put": lambda s, x: x.index_put((I([2, 0]), I([1, 1])), x[0, :2]),
    "index_put_accumulate": lambda s, x: x.index_put((I([2, 2]),), x[:2], accumulate=True),
    "index_put_inner": lambda s, x: _put_inner(x),
    "masked_scatter": lambda s, x: x.masked_scatter(I([True, False, False, True, False])[:, None], x[1:3] * 2),
    "assign_row": lambda s, x: _assign_rows(x),
    "assign_mask": lambda s, x: _assign_mask(x),
    "linear": lambda s, x: F.linear(x, x[:3], x[0, :3]),
    "mm": lambda s, x: torch.mm(x, x.t()),
    "matmul_batched": lambda s, x: x.view(T, 1, D) @ x.view(T, D, 1),
    "matmul_vectors": lambda s, x: (x @ x[0]).reshape(T, 1) * (x[0] @ x.t()),
    "matmul_broadcast": lambda s, x: x.view(T, 2, 2) @ x[:2, :3],
    "bmm": lambda s, x: torch.bmm(x.view(T, 2, 2), x.view(T, 2, 2).transpose(1, 2)),
    "addmm": lambda s, x: torch.addmm(x[0, :3], x, x.t()[:, :3], alpha=2.0, beta=0.5),
    "baddbmm": lambda s, x: torch.baddbmm(x.view(T, 2, 2), x.view(T, 2, 2), x.view(T, 2, 2)),
    "einsum": lambda s, x: torch.einsum("td,sd->ts", x, x),
    "einsum_outer": lambda s, x: torch.einsum("td,te->ted", x, x[:, :3]),
    "einsum_ellipsis": lambda s, x: torch.einsum("...d,fd->...f", x.view(1, T, D), x[:3]),
    "einsum_three": lambda s, x: torch.einsum("td,te,ed->t", x, x[:, :2], x[:2]),
    "einsum_diagonal_free": lambda s, x: torch.einsum("td->d", x),
    "one_hot_einsum": lambda s, x: torch.einsum("tke,ed->tkd", F.one_hot(IDS, E).to(x.dtype), x[:E]),
    "conv1d": lambda s, x: F.conv1d(x[None], x[:T, :, None][:, :D].transpose(0, 1)[:4, :T].reshape(4, T, 1)),
    "sum": lambda s, x: x.sum(0) + x.sum(-1, keepdim=True).sum() + x.view(T, 2, 2).sum((1, 2)).mean(),
    "mean": lambda s, x: x.mean(-1, keepdim=True) * x.mean(0),
    "softmax": lambda s, x: x.softmax(-1) + x.log_softmax(0),
    "cumsum": lambda s, x: x.cumsum(0),
    "amax": lambda s, x: x.amax(-1, keepdim=True) - x.amin(0) + x.logsumexp(-1, keepdim=True),
    "prod": lambda s, x: x.prod(1),
    "norm": lambda s, x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) + F.normalize(x, dim=0),
    "var": lambda s, x: x.var(-1, keepdim=True) + x.var(0, unbiased=False),
    "layer_norm": lambda s, x: F.layer_norm(x, (D,), x[0], x[1]),
    "rms_norm": lambda s, x: F.rms_norm(x, (D,), x[0], 1e-5),
    "topk_values": lambda s, x: x.softmax(-1)[:, :3] * 1.0,
    "dropout_off": lambda s, x: F.dropout(x, 0.5, training=False) * 2,
    "detach": lambda s, x: x * x.detach(),
    "leaky": lambda s, x: F.leaky_relu(x, 0.1) + F.prelu(x, x[0, :1]),
    "in_place": lambda s, x: _add_in_place(x),
    "loop_of_index_add": lambda s, x: _add_in_a_loop(x),
    "fill": lambda s, x: torch.full_like(x, 2.0) * x + torch.ones(D, dtype=x.dtype) + torch.zeros(T, 1),
    "no_grad": lambda s, x: _scale_without_grad(x),
}


def _assign_rows(x):
    y = x.clone()
    y[I([4, 1])] = x[:2]
    y[0, 1:3] = 5.0
    return y


def _put_inner(x):
    y = x.clone()
    y[:, I([2, 0])] = x[:, :2] * 3
    return y


def _assign_mask(x):
    y = torch.zeros_like(x)
    y[I([True, False, True, False, False])] = x[:2]
    return y


def _add_in_place(x):
    y = x.clone()
    y[:, 1] += x[:, 0]
    y.mul_(2.0).transpose(0, 1)[0].add_(1.0)
    return y


def _add_in_a_loop(x):
    out = torch.zeros_like(x)
    for e in range(E):
        rows, slot = torch.where(e == IDS)
        out.index_add_(0, rows, x[rows] * (slot + 1.0)[:, None] * (e + 1))
    return out


def _scale_without_grad(x):
    with torch.no_grad():
        a = x * 2
    return a + x


@pytest.mark.parametrize("name", STATELESS)
def test_terms_of_stateless_ops_evaluate_to_their_results(name):
    check_terms(Fn(STATELESS[name]), X)


TYPED = {
    "sum": lambda s, x: x.sum(-1, dtype=torch.float32),
    "mean": lambda s, x: x.mean(-1, dtype=torch.float32),
    "cumsum": lambda s, x: x.cumsum(-1, dtype=torch.float32),
    "cumprod": lambda s, x: x.cumprod(-1, dtype=torch.float32),
    "softmax": lambda s, x: x.softmax(-1, dtype=torch.float32),
    "log_softmax": lambda s, x: F.log_softmax(x, -1, dtype=torch.float32),
    "prod": lambda s, x: x.prod(-1, dtype=torch.float32),
    "norm": lambda s, x: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32),
    "cat": lambda s, x: torch.cat([x, torch.ones_like(x, dtype=torch.float32)], -1),
    "cast": lambda s, x: x.to(torch.float32).var(-1),
}
AUTOCAST = {
    "linear": lambda s, x: F.linear(x, s.w, s.b),
    "matmul": lambda s, x: x @ s.w.t(),
    "addmm": lambda s, x: torch.addmm(s.b, x, s.w.t()),
    "baddbmm": lambda s, x: torch.baddbmm(s.b, x.view(1, T, D), s.w.t()[None]),
    "einsum": lambda s, x: torch.einsum("td,fd->tf", x, s.w),
    "prod": lambda s, x: F.linear(x, s.w).prod(-1),
    "softmax": lambda s, x: F.linear(x, s.w).softmax(-1),
    "cumsum": lambda s, x: F.linear(x, s.w).cumsum(-1),
    "layer_norm": lambda s, x: F.layer_norm(F.linear(x, s.w), (3,)),
}


class TestDtypes:
    """Terms have the dtype that torch gives the result: the types in the graph come from `cast` terms alone."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", TYPED)
    def test_dtype_arguments(self, name, dtype):
        captured, S = build_terms(Fn(TYPED[name]), X.to(dtype))
        assert get_dtype(S.get_term(captured.out)) == TYPED[name](None, X.to(dtype)).dtype

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", AUTOCAST)
    def test_autocast(self, name, dtype):
        block = Fn(AUTOCAST[name], w=torch.randn(3, D), b=torch.randn(3))
        with torch.autocast("cpu", torch.bfloat16):
            captured, S = build_terms(block, X.to(dtype))
            expected = block(X.to(dtype)).dtype
        assert get_dtype(S.get_term(captured.out)) == expected


class TestParameters:
    def test_terms_of_gathered_weights_evaluate_to_the_result(self):
        block = Fn(lambda s, x: torch.einsum("td,tkdf->tkf", x, s.w[IDS]), w=torch.randn(E, D, 3))
        check_terms(block, X)

    def test_baddbmm_of_stacked_experts(self):
        block = Fn(lambda s, x: torch.bmm(x.expand(E, T, D), s.w).permute(1, 0, 2), w=torch.randn(E, D, 3))
        check_terms(block, X)

    def test_linear_of_a_slice(self):
        block = Fn(lambda s, x: F.linear(x, s.w[2:4], s.b[2:4]), w=torch.randn(6, D), b=torch.randn(6))
        check_terms(block, X)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_terms_of_grouped_products_evaluate_to_the_result(self, transposed):
        if not hasattr(F, "grouped_mm"):
            pytest.skip("no grouped_mm in this torch")
        w = torch.randn(E, 8, 16) if transposed else torch.randn(E, 16, 8)

        def fn(s, x):
            return F.grouped_mm(x, s.w.mT if transposed else s.w, offs=I([2, 2, 5], dtype=torch.int32))

        block = Fn(fn, w=w).bfloat16()
        captured, S = build_terms(block, torch.randn(5, 16).bfloat16())
        rows = [S.terms.resolve(S.terms.pick(S.get_term(captured.out), 0, t)) for t in range(5)]
        picks = [{a for a in _list_parameters(r)} for r in rows]
        assert picks == [{0}, {0}, {2}, {2}, {2}]


def _list_parameters(t) -> list[int]:
    """List the expert indices of the parameter slices in a term."""
    if t.op == "select" and t.args[0].op == "param":
        return [t.args[1][0][1]]
    return [i for a in t.operands for i in _list_parameters(a)]


class TestSelections:
    """Represent values of a selection as gathers by the selected indices."""

    @pytest.mark.parametrize(
        "select",
        [
            lambda p: p.topk(2, -1),
            lambda p: p.topk(2, 0),
            lambda p: p.sort(-1, descending=True),
            lambda p: p.max(-1),
            lambda p: p.max(0, keepdim=True),
            lambda p: p.min(1),
            lambda p: p.sort(0),
        ],
    )
    def test_selected_values_are_picks_of_the_scores(self, select):
        block = Fn(lambda s, x: select(x @ s.w), w=torch.randn(D, E))
        captured, S = build_terms(block, X)
        values, ids = captured.out
        scores = captured.concrete_value(next(n for n in captured.nodes if n.target is torch.matmul))
        expected, expected_ids = select(scores)
        assert torch.equal(ids.meta["val"], expected_ids)
        env = {"w": block.w} | {n: scores for n in captured.nodes if n.op == "placeholder"}
        term = S.terms.resolve(S.get_term(values))
        assert term.shape == tuple(expected.shape) and term.op != "node"
        del env

    def test_one_hot_mask_folds(self):
        def forward(s, x):
            p, i = (x @ s.w).softmax(-1).topk(1, -1)
            return F.one_hot(i, E)[:, 0] * p

        captured, S = build_terms(Fn(forward, w=torch.randn(D, E)), X)
        term = S.get_term(captured.out)
        zeros = sum(
            is_const(S.terms.resolve(S.terms.pick_axes(term, {0: t, 1: e})), 0) for t in range(T) for e in range(E)
        )
        assert zeros == T * (E - 1)


class TestTakenAsItIs:
    def test_an_unknown_op_is_taken_as_a_node(self):
        captured, S = build_terms(Fn(lambda s, x: torch.linalg.inv(x[:4])), X)
        assert S.get_term(captured.out).op == "node"

    def test_an_autograd_function_is_taken_as_a_node(self):
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

        captured, S = build_terms(Fn(lambda s, x: Own.apply(x)), X)
        assert S.get_term(captured.out).op == "node"

    def test_a_view_of_the_bits_is_taken_as_a_node(self):
        captured, S = build_terms(Fn(lambda s, x: x.view(torch.int32).view(torch.float32)), X)
        term = S.get_term(captured.out)
        assert all(t.op == "node" for t in (term, *term.operands) if t.op != "pointwise")

    def test_uninitialised_is_nan(self):
        captured, S = build_terms(Fn(lambda s, x: torch.empty_like(x)), X)
        assert is_const(S.get_term(captured.out), "nan")


def test_ops_on_the_rows_of_idle_experts_are_not_explained():
    block = Loop(Mlp, num_experts=8)
    captured, S = build_terms(block, torch.randn(1, block.gate.in_features))
    S.get_term(captured.out)
    products = [n for n in captured.nodes if n.target is F.linear and n.meta["val"].shape[0] == 0]
    assert products and all(S.get_term(n).op == "node" for n in products)
