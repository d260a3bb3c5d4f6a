"""Ops of the dialect equal naive loops, with NaN in the rows after the last expert."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from moefx.errors import DoubleBackward, InvalidInput
from moefx.ir.ops import dialect

from .routings import Routing, compute_pft, draw_routing, routings

HALF = [torch.bfloat16, torch.float16]
FAST = settings(max_examples=60, deadline=None)


def make_leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def poison(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Copy rows and fill the tail with NaN."""
    tail = torch.arange(rows.shape[0]) >= offsets[-1]
    return rows.detach().masked_fill(tail.view(-1, *[1] * (rows.dim() - 1)), float("nan"))


# -- build_pft -----------------------------------------------------------------------------------------------


@FAST
@given(routings(), st.booleans())
def test_build_pft_is_the_naive_one(routing: Routing, weighted: bool):
    weights = routing.topk_weights if weighted or routing.drop == "weight" else None
    token_ids, slot_ids, offsets, inverse, combine_weights = dialect.build_pft(
        routing.topk_ids,
        weights,
        routing.keep,
        num_experts=routing.num_experts,
        capacity=routing.capacity,
        drop=routing.drop,
    )
    rows, naive_offsets, naive_inverse = compute_pft(routing)
    assert {t.dtype for t in (token_ids, slot_ids, offsets, inverse)} == {torch.int32}
    assert offsets.tolist() == naive_offsets
    assert inverse.tolist() == naive_inverse
    assert token_ids.shape == slot_ids.shape == (routing.topk_ids.numel(),)
    num_valid = naive_offsets[-1]
    assert list(zip(token_ids.tolist(), slot_ids.tolist(), strict=True))[:num_valid] == rows
    assert not token_ids[num_valid:].any()
    assert not slot_ids[num_valid:].any()
    if weights is None:
        assert combine_weights.shape == (0,)
    else:
        assert combine_weights[:num_valid].tolist() == [float(weights[s, k]) for s, k in rows]
        assert not combine_weights[num_valid:].any()


@FAST
@given(routings(max_tokens=40))
def test_build_pft_allocates_the_valid_rows(routing: Routing):
    ids, weights, keep = routing.topk_ids, routing.topk_weights, routing.keep
    whole = dialect.build_pft(ids, weights, keep, num_experts=routing.num_experts)
    num_valid = int(whole[2][-1])
    found = dialect.build_pft(ids, weights, keep, num_experts=routing.num_experts, num_rows=torch.tensor([num_valid]))
    rows = found[0].shape[0]
    assert num_valid <= rows <= min(ids.numel(), num_valid * 65 / 64)
    for i, (got, want) in enumerate(zip(found, whole, strict=True)):
        assert torch.equal(got, want[:rows] if i in (0, 1, 4) else want)  # compare one value per row


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_build_pft_takes_any_integer_ids(dtype):
    ids = torch.tensor([[0, 3], [1, 4], [3, 0]])  # 4 == E means dropped
    expected = dialect.build_pft(ids, None, None, num_experts=4)
    for got, want in zip(dialect.build_pft(ids.to(dtype), None, None, num_experts=4), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("sentinel", [2**40, -(2**40), 256, -1])
def test_ids_far_out_of_range_are_dropped(sentinel):
    offsets = dialect.build_pft(torch.tensor([[sentinel, 1]]), None, None, num_experts=256)[2]
    assert offsets[-1] == 1


def test_uint8_ids_with_256_experts():
    ids = torch.tensor([[255, 0]], dtype=torch.uint8)
    offsets = dialect.build_pft(ids, None, None, num_experts=256)[2]
    assert offsets.tolist() == [0] + [1] * 255 + [2]


def test_a_nan_among_dropped_weights_is_ignored():
    ids, weights = torch.tensor([[0, -1]]), torch.tensor([[0.5, float("nan")]], requires_grad=True)
    *_, combine_weights = dialect.build_pft(ids, weights, None, num_experts=1)
    assert combine_weights.tolist() == [0.5, 0.0]
    (grad,) = torch.autograd.grad(combine_weights, weights, torch.tensor([2.0, float("nan")]))
    assert grad.tolist() == [[2.0, 0.0]]


@FAST
@given(routings())
def test_gradient_of_the_weights_goes_to_the_kept_ones(routing: Routing):
    weights = routing.topk_weights.clone().requires_grad_()
    *_, offsets, _, combine_weights = routing.build(weights)
    grad = poison(torch.randn(combine_weights.shape, dtype=torch.float64), offsets)
    (got,) = torch.autograd.grad(combine_weights, weights, grad)
    rows, _, _ = compute_pft(routing)
    expected = torch.zeros_like(got)
    for row, (s, k) in enumerate(rows):
        expected[s, k] = grad[row]
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(2, 2), None, None), {}, "topk_ids are torch.float32"),
        ((torch.zeros(2, dtype=torch.int64), None, None), {}, r"topk_ids has shape \[2\], expected \[S,K\]"),
        ((torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 3), None), {}, "K is 2 elsewhere"),
        (
            (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2).int(), None),
            {},
            "topk_weights are torch.int32",
        ),
        ((torch.zeros(2, 2, dtype=torch.int64), None, torch.ones(2, 2)), {}, "keep is torch.float32"),
        ((torch.zeros(2, 2, dtype=torch.int64), None, None), {"num_experts": 0}, "num_experts=0"),
        (
            (torch.zeros(2, 2, dtype=torch.int64), None, None),
            {"drop": "random"},
            "drop='random', expected one of",
        ),
        ((torch.zeros(2, 2, dtype=torch.int64), None, None), {"capacity": 2}, "capacity=2 does not go with"),
        (
            (torch.zeros(2, 2, dtype=torch.int64), None, None),
            {"capacity": 2, "drop": "position_token", "num_rows": torch.tensor([3])},
            "capacity=2 would leave fewer",
        ),
        (
            (torch.zeros(2, 2, dtype=torch.int64), None, None),
            {"drop": "position_slot"},
            "capacity=None does not",
        ),
        (
            (torch.zeros(2, 2, dtype=torch.int64), None, None),
            {"drop": "weight", "capacity": 1},
            "orders by topk_weights",
        ),
    ],
)
def test_build_pft_refuses_arguments_that_do_not_fit(arguments, options, message):
    with pytest.raises(InvalidInput, match=message):
        dialect.build_pft(*arguments, **{"num_experts": 4, **options})


# -- dispatch and combine ------------------------------------------------------------------------------------


@FAST
@given(routings())
def test_dispatch_and_combine_are_the_naive_ones(routing: Routing):
    x = torch.randn(routing.topk_ids.shape[0], 3, dtype=torch.float64)
    token_ids, _, offsets, inverse, weights = routing.build()
    pairs, _, _ = compute_pft(routing)
    rows = dialect.dispatch(x, token_ids, offsets, inverse)
    assert torch.equal(rows[: len(pairs)], x[[s for s, _ in pairs]])
    rows = poison(rows, offsets)
    weighted, plain = torch.zeros_like(x), torch.zeros_like(x)
    for row, (s, _) in sorted(enumerate(pairs), key=lambda r: r[1]):
        weighted[s] += rows[row] * weights[row]
        plain[s] += rows[row]
    nan_weights = poison(weights, offsets)
    torch.testing.assert_close(dialect.combine(rows, nan_weights, token_ids, offsets, inverse), weighted)
    torch.testing.assert_close(dialect.combine(rows, None, token_ids, offsets, inverse), plain)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ids", [[[0, 2], [2, 1], [0, 1]], [[0, 0], [0, 0], [0, -1]], [[3, -1], [9, 3], [-5, 7]]])
def test_gradients_of_dispatch_and_combine_are_numerically_right(ids, weighted):
    routing = Routing(torch.tensor(ids), torch.rand(3, 2, dtype=torch.float64), 3)
    valid = routing.build()[2][-1]

    def f(x, topk_weights):
        token_ids, _, offsets, inverse, weights = routing.build(topk_weights)
        rows = dialect.dispatch(x, token_ids, offsets, inverse)
        rows = torch.where((torch.arange(6) < valid)[:, None], rows.tanh(), float("nan"))
        return dialect.combine(rows, weights if weighted else None, token_ids, offsets, inverse)

    assert torch.autograd.gradcheck(f, (make_leaf(3, 4), make_leaf(3, 2)))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.float64, torch.bfloat16])
def test_combine_adds_up_in_float32_at_least(dtype, weight_dtype):
    torch.manual_seed(0)
    routing = draw_routing(5, 4, 4)
    token_ids, _, offsets, inverse, weights = routing.build()
    rows = torch.randn(20, 8).to(dtype).requires_grad_()
    weights = None if weight_dtype is None else weights.to(weight_dtype)
    out = dialect.combine(rows, weights, token_ids, offsets, inverse)
    assert out.dtype is dtype
    gathered = rows.detach().double()[inverse.long()]
    exact = (gathered if weights is None else gathered * weights.double()[inverse.long()][..., None]).sum(1)
    # One rounding to the result's dtype, and float32 sums.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if weight_dtype != torch.float64 else 0)
    torch.testing.assert_close(out.double(), exact, rtol=2 * eps, atol=4 * eps)
    out.sum().backward()
    assert rows.grad.dtype is dtype


def test_gradients_of_a_weighted_combine_keep_the_tail_clean():
    token_ids, _, offsets, inverse, weights = Routing(torch.tensor([[0, -1], [1, 0]]), torch.rand(2, 2), 2).build()
    rows = poison(torch.randn(4, 3), offsets).requires_grad_()
    weights = weights.detach().requires_grad_()
    dialect.combine(rows, weights, token_ids, offsets, inverse).sum().backward()
    # The user's graph may sum over all weights, so that the tail must not contain NaN.
    assert torch.isfinite(weights.grad).all()
    assert weights.grad[-1] == 0
    assert torch.isfinite(rows.grad[:3]).all()


def test_dispatch_and_combine_are_differentiable_twice():
    token_ids, _, offsets, inverse, weights = draw_routing(4, 2, 3).build()
    x, w = make_leaf(4, 3), weights.detach().requires_grad_()
    rows = dialect.dispatch(x, token_ids, offsets, inverse)
    out = dialect.combine(rows**2, None, token_ids, offsets, inverse)
    # Gathers and sums are derivatives of each other, of any order.
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.sum(), x)[0].shape == x.shape
    out = dialect.combine(rows, w, token_ids, offsets, inverse)
    (grad,) = torch.autograd.grad(out.square().sum(), w, create_graph=True)
    with pytest.raises(DoubleBackward, match="moefx::combine"):
        grad.sum().backward()


# -- expert parameters ---------------------------------------------------------------------------------------


@FAST
@given(routings(), st.booleans(), st.booleans(), st.booleans())
def test_grouped_mm_is_the_naive_one(routing: Routing, transposed: bool, stacked: bool, contiguous: bool):
    pairs, _, _ = compute_pft(routing)
    token_ids, _, offsets, _, _ = routing.build()
    num_experts = routing.num_experts
    rows = poison(torch.randn(token_ids.shape[0], 3, dtype=torch.float64), offsets).requires_grad_()
    w = torch.randn(num_experts, *((4, 3) if transposed else (3, 4)), dtype=torch.float64)
    if not contiguous:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    weights = [w.requires_grad_()] if stacked else [m.clone().requires_grad_() for m in w]
    out = dialect.grouped_mm(rows, weights, offsets, transposed=transposed)
    experts = [int(routing.topk_ids[sk]) for sk in pairs]
    matrices = (w.transpose(1, 2) if transposed else w).detach()
    n = len(pairs)
    torch.testing.assert_close(out[:n], torch.einsum("bi,bio->bo", rows[:n], matrices[experts]))

    grad = poison(torch.randn_like(out), offsets)
    grad_rows, *grad_w = torch.autograd.grad(out, [rows, *weights], grad)
    torch.testing.assert_close(grad_rows[:n], torch.einsum("bo,bio->bi", grad[:n], matrices[experts]))
    expected = torch.zeros(num_experts, 3, 4, dtype=torch.float64)
    for row, e in enumerate(experts):
        expected[e] += torch.outer(rows[row].detach(), grad[row])
    got = grad_w[0] if stacked else torch.stack(grad_w)
    torch.testing.assert_close(got, expected.transpose(1, 2) if transposed else expected)


def test_gradients_of_separate_weights_are_slices_of_one_buffer():
    _, _, offsets, _, _ = draw_routing(6, 2, 4).build()
    w = [make_leaf(5, 3) for _ in range(4)]
    dialect.grouped_mm(make_leaf(12, 3), w, offsets, transposed=True).sum().backward()
    pointers = [p.grad.data_ptr() for p in w]
    assert len({p.grad.untyped_storage().data_ptr() for p in w}) == 1
    assert [p - pointers[0] for p in pointers] == [i * 5 * 3 * 8 for i in range(4)]


@FAST
@given(routings(), st.booleans())
def test_expert_rows_is_the_naive_one(routing: Routing, stacked: bool):
    pairs, _, _ = compute_pft(routing)
    token_ids, _, offsets, _, _ = routing.build()
    v = torch.randn(routing.num_experts, 3, dtype=torch.float64)
    vectors = [v.requires_grad_()] if stacked else [u.clone().requires_grad_() for u in v]
    out = dialect.expert_rows(vectors, offsets, token_ids.shape[0])
    experts = [int(routing.topk_ids[sk]) for sk in pairs]
    assert out.shape == (token_ids.shape[0], 3)
    assert torch.equal(out[: len(pairs)], v.detach()[experts])
    grad = poison(torch.randn_like(out), offsets)
    got = torch.autograd.grad(out, vectors, grad)
    expected = torch.zeros_like(v.detach())
    expected.index_add_(0, torch.tensor(experts, dtype=torch.int64), grad[: len(pairs)])
    torch.testing.assert_close(got[0] if stacked else torch.stack(got), expected)


def test_mixed_dtypes_are_an_error_outside_autocast():
    _, _, offsets, _, _ = draw_routing(4, 2, 2).build()
    rows, w = torch.randn(8, 3, dtype=torch.bfloat16), torch.randn(2, 3, 4)
    with pytest.raises(InvalidInput, match=r"rows are torch.bfloat16, expert parameters are torch.float32.*autocast"):
        dialect.grouped_mm(rows, [w], offsets, transposed=False)


@pytest.mark.parametrize("inside", [False, True], ids=["backward_outside", "backward_inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_as_linear_does(dtype, inside):
    _, _, offsets, _, _ = Routing(torch.tensor([[0], [0], [1]]), torch.rand(3, 1), 2).build()
    rows = torch.randn(3, 4).to(dtype).requires_grad_()
    w = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        out = dialect.grouped_mm(rows, w, offsets, transposed=True)
        linear = torch.cat([torch.nn.functional.linear(rows[:2], w[0]), torch.nn.functional.linear(rows[2:], w[1])])
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, linear)
    grad = torch.randn(3, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        got, expected = (torch.autograd.grad(o, [rows, *w], grad) for o in (out, linear))
    assert [g.dtype for g in got] == [dtype, torch.float32, torch.float32]
    torch.testing.assert_close(got, expected)


def test_autocast_does_not_change_float64():
    _, _, offsets, _, _ = draw_routing(4, 2, 2).build()
    with torch.autocast("cpu", torch.bfloat16):
        out = dialect.grouped_mm(make_leaf(8, 3), [make_leaf(2, 3, 4)], offsets, transposed=False)
    assert out.dtype is torch.float64


@pytest.mark.parametrize(
    ("w", "message"),
    [
        ([torch.randn(3, 3, 4)], "parameters of 3 experts, routing over 2"),
        ([torch.randn(3, 4)], "parameters of 1 experts, routing over 2"),
        ([torch.randn(2, 5, 4)], "rows are 3 wide, the experts' weights take 5"),
        ([torch.randn(3, 4), torch.randn(3, 5)], "different shapes"),
        ([torch.randn(3), torch.randn(3)], "expected two dimensions"),
    ],
)
def test_wrong_weights_are_named(w, message):
    _, _, offsets, _, _ = draw_routing(4, 2, 2).build()
    with pytest.raises((InvalidInput, RuntimeError), match=message):
        dialect.grouped_mm(torch.randn(8, 3), w, offsets, transposed=False)


def test_double_backward_of_grouped_mm_and_expert_rows():
    _, _, offsets, _, _ = draw_routing(4, 2, 2).build()
    rows, w, v = make_leaf(8, 3), make_leaf(2, 3, 4), make_leaf(2, 4)
    out = dialect.grouped_mm(rows, [w], offsets, transposed=False) * dialect.expert_rows([v], offsets, 8)
    grad_w, grad_v = torch.autograd.grad(out.square().sum(), [w, v], create_graph=True)
    with pytest.raises(DoubleBackward, match="moefx::grouped_mm"):
        grad_w.sum().backward(retain_graph=True)
    with pytest.raises(DoubleBackward, match="moefx::expert_rows"):
        grad_v.sum().backward()


# -- around torch --------------------------------------------------------------------------------------------


def run_steps(x, topk_ids, topk_weights, w, v):
    """Run all unfused ops in the order of a rewritten block."""
    token_ids, _, offsets, inverse, weights = dialect.build_pft(topk_ids, topk_weights, None, num_experts=4)
    rows = dialect.dispatch(x, token_ids, offsets, inverse)
    rows = dialect.grouped_mm(rows, w, offsets, transposed=True)
    rows = torch.relu(rows + dialect.expert_rows(v, offsets, rows.shape[0]))
    return dialect.combine(rows, weights, token_ids, offsets, inverse)


def draw_inputs(num_tokens: int, dtype: torch.dtype = torch.float32):
    routing = draw_routing(num_tokens, 2, 4, dtype)
    w, v = [make_leaf(5, 3, dtype=dtype) for _ in range(4)], [make_leaf(5, dtype=dtype) for _ in range(4)]
    return make_leaf(num_tokens, 3, dtype=dtype), routing.topk_ids, routing.topk_weights.requires_grad_(), w, v


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiles_as_one_graph_for_any_routing_and_size(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(run_steps, fullgraph=True, dynamic=True, backend=counter)
    for num_tokens in (6, 9, 17):
        args = draw_inputs(num_tokens)
        leaves = [args[0], args[2], *args[3], *args[4]]
        expected, got = run_steps(*args), compiled(*args)
        grad = torch.randn_like(expected)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(
            torch.autograd.grad(got, leaves, grad),
            torch.autograd.grad(expected, leaves, grad),
            atol=1e-5,
            rtol=1e-5,
        )
    assert counter.frame_count == 1


def test_the_ops_are_the_nodes_of_the_graph():
    args = draw_inputs(6)
    exported = torch.export.export(_Steps(), args[:3] + (args[3], args[4]))
    targets = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    for op in ("build_pft", "dispatch", "grouped_mm", "expert_rows", "combine"):
        assert targets.count(getattr(torch.ops.moefx, op).default) == 1


class _Steps(torch.nn.Module):
    def forward(self, x, topk_ids, topk_weights, w, v):
        return run_steps(x, topk_ids, topk_weights, w, v)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_all_dtypes_and_sizes(dtype, num_tokens):
    args = draw_inputs(num_tokens, dtype)
    leaves = [args[0], args[2], *args[3], *args[4]]
    out = run_steps(*args)
    assert out.shape == (num_tokens, 5)
    assert out.dtype is dtype
    exact = draw_inputs(num_tokens, torch.float64)
    exact = (
        args[0].double(),
        args[1],
        args[2].double(),
        [m.double() for m in args[3]],
        [b.double() for b in args[4]],
    )
    torch.testing.assert_close(
        out.double(), run_steps(*exact), rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
    )
    for leaf_, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf_.shape
        assert grad.dtype is dtype
        assert torch.isfinite(grad).all()


def test_strided_inputs_give_the_same_results():
    x, ids, weights, w, v = draw_inputs(6)
    expected = run_steps(x, ids, weights, w, v)
    strided = [t.detach().repeat_interleave(2, -1)[..., ::2] for t in (x, ids, weights)]
    got = run_steps(*strided, [m.detach().t().contiguous().t() for m in w], [u.detach().repeat(2)[:5] for u in v])
    torch.testing.assert_close(got, expected)
    transposed = x.detach().t().contiguous().t()
    torch.testing.assert_close(run_steps(transposed, ids, weights, w, v), expected)


def test_checkpoint_inference_mode_and_no_grad():
    args = draw_inputs(6)
    leaves = [args[0], args[2], *args[3], *args[4]]
    expected = run_steps(*args)
    grads = torch.autograd.grad(expected.sum(), leaves)
    for reentrant in (False, True):
        again = checkpoint(run_steps, *args, use_reentrant=reentrant)
        got = torch.autograd.grad(again.sum(), leaves) if not reentrant else None
        if got is None:
            again.sum().backward()  # the reentrant implementation does not support autograd.grad
            got = [args[0].grad, args[2].grad]
            grads = grads[:2]
        torch.testing.assert_close(list(got), list(grads))
    with torch.inference_mode():
        assert torch.equal(run_steps(*args), expected)
    with torch.no_grad():
        assert torch.equal(run_steps(*args), expected)


def test_steps_run_on_the_meta_device():
    args = draw_inputs(6)
    meta = [t.to("meta") for t in args[:3]]
    out = run_steps(*meta, [m.to("meta") for m in args[3]], [u.to("meta") for u in args[4]])
    assert out.device.type == "meta"
    assert out.shape == (6, 5)


ROUTING = Routing(torch.tensor([[0, 2], [2, 1], [0, 1]]), torch.rand(3, 2), 3)


def _list_opcheck_cases():
    token_ids, _, offsets, inverse, weights = ROUTING.build()
    index = (token_ids, offsets, inverse)
    f32 = {"dtype": torch.float32}
    ids, topk_weights = ROUTING.topk_ids, ROUTING.topk_weights
    w = weights.requires_grad_()
    yield "build_pft", (ids, topk_weights, None), {"num_experts": 3}
    yield "build_pft", (ids, topk_weights, ids > 0), {"num_experts": 3, "capacity": 1, "drop": "weight"}
    yield "build_pft", (ids, None, None), {"num_experts": 3}
    yield "build_pft_backward", (torch.randn(6), inverse), {}
    yield "dispatch", (make_leaf(3, 4, **f32), *index), {}
    yield "combine", (make_leaf(6, 4, **f32), None, *index), {}
    yield "combine", (make_leaf(6, 4, **f32), w, *index), {}
    yield "combine_backward", (torch.randn(3, 4), torch.randn(6, 4), w.detach(), token_ids, offsets), {}
    yield (
        "grouped_mm",
        (make_leaf(6, 4, **f32), [make_leaf(5, 4, **f32) for _ in range(3)], offsets),
        {"transposed": True},
    )
    yield "grouped_mm", (make_leaf(6, 4, **f32), [make_leaf(3, 4, 5, **f32)], offsets), {"transposed": False}
    yield (
        "grouped_mm",
        (make_leaf(6, 4, **f32), [make_leaf(3, 4, 5, **f32)], offsets, make_leaf(6, 5, **f32)),
        {"transposed": False},
    )
    backward = {"transposed": True, "dtype": torch.float32}
    yield "grouped_mm_backward", (torch.randn(6, 5), torch.randn(6, 4), offsets), backward
    yield "expert_rows", ([make_leaf(3, 4, **f32)], offsets, 6), {}
    yield "expert_rows", ([make_leaf(4, **f32) for _ in range(3)], offsets, 6), {}
    yield "expert_rows_backward", (torch.randn(6, 4), offsets), {"dtype": torch.float32}


@pytest.mark.parametrize(("name", "args", "kwargs"), list(_list_opcheck_cases()))
def test_ops_pass_opcheck(name, args, kwargs):
    opcheck(getattr(dialect, name).overload, args, kwargs)


def test_build_pft_with_gradient_survives_aot():
    # opcheck's own gradient helper fails if the first result is an integer.
    def f(weights):
        return dialect.build_pft(ROUTING.topk_ids, weights, None, num_experts=3)[4] ** 2

    weights = ROUTING.topk_weights.clone().requires_grad_()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(f(weights).sum(), weights)
    torch.testing.assert_close(torch.autograd.grad(compiled(weights).sum(), weights), expected)
