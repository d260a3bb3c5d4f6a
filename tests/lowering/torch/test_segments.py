"""Provider "segments": groups of rows, threads, casts and products of oneDNN."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.ir import op_providers
from moefx.ir.ops import dialect
from moefx.ir.ops.mlp_arguments import ExpertMlpCall
from moefx.lowering.torch import cpu_gemm, expert_mlp_algebra, segments, thread_pool
from moefx.lowering.torch.segments import SegmentGemms
from tests.ir.routings import LAYERS, draw_routing, routings, swiglu_list


@settings(max_examples=60, deadline=None)
@given(routings(max_tokens=20), st.integers(1, 9))
def test_groups_cover_the_valid_rows_once(routing, group_rows):
    offsets = routing.build()[2]
    before = segments._GROUP_ROWS
    segments._GROUP_ROWS = (group_rows, group_rows)
    try:
        gemms = SegmentGemms(offsets, torch.float64)
    finally:
        segments._GROUP_ROWS = before
    sizes = offsets.diff().tolist()
    assert [e for g in gemms.groups for e in g.experts] == [e for e, n in enumerate(sizes) if n]
    assert [n for g in gemms.groups for n in g.sizes] == [n for n in sizes if n]
    rows = torch.arange(len(routing.build()[0]))
    assert torch.cat([*gemms.result_slices(rows), rows[:0]]).tolist() == list(range(offsets[-1]))
    assert torch.cat([*gemms.input_slices(rows), rows[:0]]).tolist() == list(range(offsets[-1]))
    assert all(g.num_rows <= group_rows or len(g.experts) == 1 for g in gemms.groups)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_several_groups_and_threads_change_no_bit(make, monkeypatch):
    layer, routing = make(6, 8, 4), draw_routing(40, 3, 6)
    x, weights = (
        torch.randn(40, 8, dtype=torch.float64, requires_grad=True),
        routing.topk_weights.requires_grad_(),
    )
    leaves = [x, weights, *layer.parameters]

    def run():
        out = layer.fused(x, routing, weights, reduce=True)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    monkeypatch.setattr(segments, "_GROUP_ROWS", (1, 1))  # one group per expert
    expected = run()
    before = torch.get_num_threads()
    monkeypatch.setattr(segments, "_PARALLEL", 0)
    torch.set_num_threads(3)
    try:
        parallel = run()
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, expected, parallel))
    monkeypatch.setattr(segments, "_GROUP_ROWS", (10**6, 10**6))
    torch.testing.assert_close(run(), expected)


def test_counts_the_provider_and_the_path_of_the_weights():
    layer, routing = swiglu_list(4, 8, 6), draw_routing(9, 2, 4)
    op_providers.reset_counters()
    layer.fused(torch.randn(9, 8).double(), routing, routing.topk_weights).sum().backward()
    assert op_providers.counters()["expert_mlp", "segments"] == 1
    assert op_providers.counters()["expert_mlp_backward", "segments"] == 1
    assert not any(provider == "reference" for op, provider in op_providers.counters() if op.startswith("expert_mlp"))
    assert op_providers.weight_paths() == {"separate": 6}  # gate, up and down, in forward and backward: no copies


def test_the_linear_output_needs_no_second_down_projection(monkeypatch):
    """Compute <dO, y> from <dA', A>, and recompute y only if the output is not linear in it."""
    calls = []
    original = expert_mlp_algebra.Parameters.project_down
    monkeypatch.setattr(
        expert_mlp_algebra.Parameters, "project_down", lambda self, *args: calls.append(1) or original(self, *args)
    )
    for name, expected in (("swiglu_list", 0), ("interleaved_clamped", 0), ("nonlinear_out", 1)):
        layer, routing = LAYERS[name](3, 4, 2), draw_routing(5, 2, 3)
        out = layer.fused(torch.randn(5, 4).double(), routing, routing.topk_weights.requires_grad_())
        calls.clear()
        out.sum().backward()
        assert len(calls) == expected


def test_under_autocast_only_hit_experts_are_cast(monkeypatch):
    layer = swiglu_list(8, 8, 6, torch.float32)
    routing = draw_routing(1, 2, 8, torch.float32)
    looked_up = []
    original = segments.WeightMatrices.__getitem__
    monkeypatch.setattr(
        segments.WeightMatrices, "__getitem__", lambda self, e: looked_up.append(e) or original(self, e)
    )
    with torch.autocast("cpu", torch.bfloat16):
        layer.fused(torch.randn(1, 8), routing, routing.topk_weights)
    assert set(looked_up) == set(routing.topk_ids.flatten().tolist())


# -- the GEMM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64, 64), (70, 1100, 65), (200, 130, 96), (3, 5, 7), (64, 0, 64)])
@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_a_product_is_written_into_a_slice(shape, onednn, add, monkeypatch):
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("a torch without oneDNN")
    monkeypatch.setattr(cpu_gemm, "is_onednn_faster", lambda: onednn)
    monkeypatch.setattr(cpu_gemm, "_MIN_SIZE", 64)
    m, k, n = shape
    buffer = torch.randn(m, 2 * n)
    out = buffer[:, :n]  # a slice
    left, w = torch.randn(k, m).t(), torch.randn(k, n).t()
    expected = left.double() @ w.double().t() + (out.double() if add else 0)
    assert cpu_gemm.linear_into(out, left, w, add=add) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    if not add:
        torch.testing.assert_close(cpu_gemm.linear(left, w).double(), expected, rtol=1e-5, atol=1e-4)


def test_onednn_rounds_about_as_blas_does(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("a torch without oneDNN")
    torch.manual_seed(0)
    for k in (256, 1024, 4096):
        left, w = torch.randn(128, k), torch.randn(128, k)
        exact = left.double() @ w.double().t()
        errors = []
        for onednn in (True, False):
            monkeypatch.setattr(cpu_gemm, "is_onednn_faster", lambda onednn=onednn: onednn)
            out = cpu_gemm.linear_into(torch.empty(128, 128), left, w)
            errors.append((out - exact).square().mean().sqrt())
        assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize("k", [512, 1024])
def test_no_weight_takes_onednns_plain_loops(k, monkeypatch):
    """Avoid oneDNN's plain loops, which take 500 times as long, for stacks of gate and up and for blocks of k."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("a torch without oneDNN")
    monkeypatch.setattr(cpu_gemm, "is_onednn_faster", lambda: True)
    left, both = torch.randn(64, k), torch.randn(1024, 2 * k)

    def seconds(w, product=cpu_gemm.linear):
        found = []
        for _ in range(5):
            begin = time.perf_counter()
            product(left, w)
            found.append(time.perf_counter() - begin)
        return min(found)

    usual = seconds(torch.randn(512, k), torch.nn.functional.linear)
    side_by_side, in_turns = both[:512, :k], both.view(2048, k)[::4]
    for w in (torch.randn(512, k), side_by_side, in_turns, both.t()[:k, :512].t(), in_turns.t().contiguous().t()):
        assert w.shape == (512, k) and seconds(w) < 30 * usual


def test_linear_into_another_dtype():
    left, w = torch.randn(4, 3).bfloat16(), torch.randn(5, 3).bfloat16()
    out = torch.ones(4, 5)
    cpu_gemm.linear_into(out, left, w, add=True)
    assert torch.equal(out, (left @ w.t()).float() + 1)


def test_row_counts_are_rounded_up_a_little_and_to_few_numbers(monkeypatch):
    monkeypatch.setattr(cpu_gemm, "is_onednn_faster", lambda: True)
    padded = {n: n + cpu_gemm.choose_padding(n, cpu_gemm._MIN_SIZE, torch.float32) for n in range(1, 5000)}
    assert all(n <= m < n + max(8, n / 15) for n, m in padded.items())
    assert len(set(padded.values())) < 110
    assert all(padded.get(m, m) == m for m in padded.values())
    assert cpu_gemm.choose_padding(63, cpu_gemm._MIN_SIZE // 64, torch.float32) is None
    assert cpu_gemm.choose_padding(64, cpu_gemm._MIN_SIZE // 64, torch.float32) == 0
    assert cpu_gemm.choose_padding(64, cpu_gemm._MIN_SIZE, torch.float64) is None


def test_onednn_choice_is_a_fact_about_the_machine():
    cpu_gemm.is_onednn_faster.cache_clear()
    assert cpu_gemm.is_onednn_faster() in (True, False)
    assert cpu_gemm.is_onednn_faster() == cpu_gemm.is_onednn_faster()


# -- the pool ----------------------------------------------------------------------------------------------


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_workers_use_their_own_threads(three_threads):
    seen = []
    thread_pool.for_each(range(20), lambda i: seen.append((i, torch.get_num_threads(), torch.is_grad_enabled())))
    assert sorted(i for i, *_ in seen) == list(range(20))
    assert {t for _, t, _ in seen} == {1}
    assert not any(grad for *_, grad in seen)
    assert torch.get_num_threads() == 3


def test_results_are_handed_on_in_order(three_threads):
    import time

    seen = []

    def work(i: int) -> int:
        time.sleep(0.002 * (i % 3 == 0))  # some are late
        return i * i

    thread_pool.for_each(range(30), work, lambda i, result: seen.append((i, result)))
    assert seen == [(i, i * i) for i in range(30)]
    thread_pool.for_each(range(3), work, lambda i, result: seen.append((i, result)), parallel=False)
    assert seen[30:] == [(0, 0), (1, 1), (2, 4)]


def test_an_error_in_a_worker_arrives(three_threads):
    def work(i: int) -> None:
        if i == 5:
            raise ValueError("expert 5")

    with pytest.raises(ValueError, match="expert 5"):
        thread_pool.for_each(range(8), work)
    thread_pool.for_each(range(8), lambda i: None)  # the pool still works


def test_few_items_or_one_thread_run_here(three_threads):
    import threading

    names = []
    thread_pool.for_each([1], lambda i: names.append(threading.current_thread().name))
    thread_pool.for_each([1, 2], lambda i: names.append(threading.current_thread().name), parallel=False)
    assert set(names) == {threading.current_thread().name}


def test_call_unpacks_arguments():
    layer, routing = LAYERS["interleaved_clamped"](3, 4, 2), draw_routing(5, 2, 3)
    token_ids, _, offsets, inverse, weights = routing.build()
    arguments = (torch.randn(5, 4).double(), token_ids, offsets, inverse, weights)
    parameters = (layer.up, layer.up_bias, layer.down, layer.down_bias)
    call = ExpertMlpCall.of((*arguments, *parameters), layer.text, "h", None)
    assert call.widths == ([4], 2, 4)
    assert call.count_multiplications() == 4 * 4 + 2 * 4
    hidden = torch.arange(8.0).view(2, 4)
    assert [t.tolist() for t in call.slice_hidden([hidden]).values()] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_grouped_mm_op_runs_in_segments():
    op_providers.reset_counters()
    _, _, offsets, _, _ = draw_routing(6, 2, 4).build()
    w = [torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    dialect.grouped_mm(torch.randn(12, 3).double(), w, offsets, transposed=True).sum().backward()
    assert op_providers.counters()["grouped_mm", "segments"] == 1
    assert op_providers.counters()["grouped_mm_backward", "segments"] == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_padding_of_single_products(transposed, monkeypatch):
    routing = draw_routing(7, 2, 3)
    offsets, rows = routing.build()[2], torch.randn(14, 4, dtype=torch.float64, requires_grad=True)
    shape = (3, 5, 4) if transposed else (3, 4, 5)
    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def run():
        out = dialect.grouped_mm(rows, [w], offsets, transposed=transposed)
        return [out, *torch.autograd.grad(out.square().sum(), [rows, w])]

    expected = run()
    monkeypatch.setattr(segments, "choose_padding", lambda num_rows, *_: 1 + num_rows % 3)
    torch.testing.assert_close(run(), expected)
