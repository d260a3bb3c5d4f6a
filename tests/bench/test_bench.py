"""Benchmarks on the CPU: each installed peer equals the original, and saved bytes are counted."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType

from moefx import cli
from moefx.bench import kernel_overlap, layers, moe, peers, results, routing, stages, tune
from moefx.bench.peers import ABLATION, PEERS, Inputs
from moefx.bench.shapes import SHAPES, Shape, draw_tensors, parse_shape, random_routing

ROOT = Path(__file__).parents[2]
SMALL = Shape("small", T=96, d=32, h=16, E=8, K=2)
UNGATED = dataclasses.replace(SMALL, gated=False)


def make_inputs(shape: Shape) -> Inputs:
    x, w1, w2, grad = draw_tensors(shape, device="cpu")
    return Inputs(shape, x, w1, w2, grad, *random_routing(shape, device="cpu"))


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(SMALL)


ON_A_CPU = ["moefx", "torch grouped_mm", "transformers", "transformers eager"]


@pytest.mark.parametrize("name", ON_A_CPU)
def test_every_peer_computes_the_same_outputs_and_gradients(inputs, name):
    if name.startswith("transformers"):
        pytest.importorskip("transformers.models.qwen3_moe")
    errors = moe.compute_result_errors(inputs, PEERS[name](inputs).step())
    assert set(errors) == {"out", "grad_x", "grad_weights", "grad_w1", "grad_w2"}
    assert all(0 < error < 0.02 for error in errors.values()), errors


@pytest.mark.parametrize("name", ["moefx", "torch grouped_mm", "torch loop"])
def test_experts_without_a_gate(name):
    inputs = make_inputs(UNGATED)
    assert UNGATED.matrices == 2 and inputs.w1.shape == (8, 16, 32)
    errors = moe.compute_result_errors(inputs, (PEERS | ABLATION)[name](inputs).step())
    assert len(errors) == 5 and all(0 < error < 0.02 for error in errors.values()), errors


@pytest.mark.parametrize("name", ["transformers", "liger-kernel", "sonic-moe"])
def test_peers_that_need_a_gate_refuse_ungated_experts(name):
    with pytest.raises(NotImplementedError, match=f"{name} is measured with SwiGLU alone"):
        PEERS[name](make_inputs(UNGATED))


@pytest.mark.parametrize("name", ABLATION)
def test_outputs_and_gradients_of_the_ablation(inputs, name):
    errors = moe.compute_result_errors(inputs, ABLATION[name](inputs).step())
    assert len(errors) == 5 and all(0 < error < 0.02 for error in errors.values()), errors


def test_each_step_of_the_ablation_keeps_less(inputs):
    saved = [moe.saved_bytes(inputs, make(inputs)) for make in ABLATION.values()]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == len(saved)


def test_configurations_of_a_peer_are_shared_out(inputs, monkeypatch):
    """Split the configurations over four workers; all workers compile kernels with fewer configurations."""
    ran: list[list[int]] = []

    def peer(_: Inputs) -> peers.Work:
        def step():
            ran.append(module.many.configs + module.one.configs)

        return peers.Work(step, step)

    module = types.SimpleNamespace(many=types.SimpleNamespace(configs=[]), one=types.SimpleNamespace(configs=[]))
    monkeypatch.setitem(sys.modules, "a_peer", module)
    monkeypatch.setitem(peers.TUNED_IN, "peer", "a_peer")
    monkeypatch.setitem(PEERS, "peer", peer)
    for share in range(4):
        module.many.configs, module.one.configs = list(range(10)), [100]
        peers.compile_share("peer", inputs, share, num_shares=4)
    assert sorted(c for configs in ran for c in configs if c < 100) == list(range(10))
    assert all(configs[-1] == 100 for configs in ran)


def test_an_error_is_reported(inputs):
    out, *gradients = PEERS["moefx"](inputs).step()
    for i in range(5):
        results = [out, *gradients]
        results[i] = results[i] * 1.1
        assert sum(error > 0.05 for error in moe.compute_result_errors(inputs, tuple(results)).values()) == 1


@pytest.mark.parametrize("keep, columns", [("h", 2 * SMALL.K * SMALL.h), ("x", 0)])
def test_saved_bytes(inputs, keep, columns):
    """Save x and H in bfloat16, at most 24 bytes of routing per choice, and the offsets of the experts."""
    saved = moe.saved_bytes(inputs, peers.build_moefx(inputs, keep=keep))
    routing_bytes = saved - SMALL.T * 2 * (SMALL.d + columns)
    assert 0 < routing_bytes <= 24 * SMALL.T * SMALL.K + 4 * (SMALL.E + 1)
    assert moe.saved_bytes(inputs, PEERS["torch grouped_mm"](inputs)) > saved


@pytest.mark.parametrize("kind", ["uniform", "zipf", "hot"])
def test_routings_have_the_loads_of_their_kind(kind):
    ids, weights = random_routing(SMALL, device="cpu", kind=kind)
    loads = torch.bincount(ids.reshape(-1), minlength=SMALL.E)
    assert loads.sum() == SMALL.T * SMALL.K and (kind == "hot") == (int(loads.max()) == SMALL.T)
    found, expected = (make(ids, weights, SMALL.E) for make in (routing.build_pft, routing.sort_by_expert))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_shapes_by_their_names():
    assert parse_shape("olmoe") == SHAPES[1]
    assert parse_shape("olmoe@512") == Shape("olmoe@512", 512, 2048, 1024, 64, 8)
    assert parse_shape("96x32x16x8x2") == Shape("96x32x16x8x2", 96, 32, 16, 8, 2)
    assert parse_shape("blaze_c1/silu") == Shape("blaze_c1/silu", 65536, 512, 2048, 4, 1, gated=False)
    assert parse_shape("96x32x16x8x2/silu") == Shape("96x32x16x8x2/silu", 96, 32, 16, 8, 2, gated=False)
    for text in ("olmo", "olmoe@many", "1x2x3x4", "1x2x3x4x5x6", "axbxcxdxe", "olmoe/relu", "1x2x3x4x5/silu/silu"):
        with pytest.raises(ValueError, match=r"expected one of qwen3_30b, .*, NAME@T or TxdxhxExK"):
            parse_shape(text)


@pytest.mark.parametrize(
    "arguments, why", [(["--shapes", "olmo"], "no shape 'olmo'"), (["--peers", "moefx,nobody"], "no peer nobody")]
)
def test_invalid_options_raise(arguments, why, capsys):
    with pytest.raises(SystemExit) as ended:
        moe.main(arguments)
    assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("module", [moe, layers, tune, routing, stages])
def test_help_names_the_command_and_its_output(module, capsys):
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"python -m moefx bench {module.__name__.rpartition('.')[2]}" in text and "--out" in text


def test_kernels_of_a_profile():
    def event(key: str, us: float, kind: str):
        device = getattr(DeviceType, kind)
        is_range = key.startswith("Optimizer.step")
        return types.SimpleNamespace(
            key=key, self_device_time_total=us, count=2, device_type=device, is_user_annotation=is_range
        )

    events = [event("aten::mm", 9.0, "CPU"), event("short", 1500.0, "CUDA"), event("long", 4000.0, "CUDA")]
    events += [event("nothing", 0.0, "CUDA"), event("Optimizer.step#AdamW.step", 9000.0, "CUDA")]
    assert layers.list_kernels(events) == [
        dict(kernel="long", ms=4.0, calls=2),
        dict(kernel="short", ms=1.5, calls=2),
    ]
    with torch.profiler.profile() as profile, torch.profiler.record_function("Optimizer.step"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert {e.is_user_annotation for e in profile.key_averages()} == {False, True}
    assert layers.list_kernels(profile.key_averages()) == []  # the attributes are there


def test_every_benchmark_is_a_command():
    assert {module.__name__.rpartition(".")[2] for module in (moe, layers, tune, routing, stages)} <= set(
        cli.BENCHMARKS
    )


def test_lines_follow_their_environment(tmp_path):
    path = tmp_path / "out.jsonl"
    for ms in (1.0, 2.0):
        results.append_row({"ms": ms}, str(path))
    environment, *rows = map(json.loads, path.read_text().splitlines())
    assert environment["environment"]["versions"]["torch"] == torch.__version__
    assert rows == [{"ms": 1.0}, {"ms": 2.0}]


def test_exchange_time_hidden_behind_compute(tmp_path):
    spans = [
        ("gemm", 0.0, 3.0),
        ("ncclDevKernel_SendRecv", 2.0, 4.0),
        ("gemm", 2.5, 3.5),
        ("mirrored_exchange", 5.0, 6.0),
    ]
    assert kernel_overlap.compute_overlap(spans) == {"exchange_ms": 3.0, "compute_ms": 3.5, "hidden_ms": 1.5}
    pytest.importorskip("matplotlib")
    kernel_overlap.plot_timeline({"dedup": spans, "flat": spans[1:]}, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 5000


MIRRORED = """
import torch
from torch.distributed.device_mesh import init_device_mesh
import moefx
from moefx.bench import mirror_group as mirror
from tests.blocks import D, Gated, Loop

mirror.init_mirror_group(4, lambda leaving: 0.0)
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
block, x = Loop(Gated, num_experts=8), torch.randn(50, D, requires_grad=True)
for dispatch in ("dedup", "rbd"):
    plan = moefx.Plan(dispatch=dispatch, node_size=2, validation="symbolic")
    out = moefx.compile(block, mesh=mesh, plan=plan, example_inputs=(x.detach(),))(x)
    out.sum().backward()
    print(tuple(out.shape), bool(x.grad.isfinite().all()))
"""


@pytest.mark.exhaustive
def test_mirror_group_runs_one_rank_of_four():
    ran = subprocess.run([sys.executable, "-c", MIRRORED], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert ran.stdout.split("\n")[:2] == ["(50, 6) True"] * 2, ran.stderr
