"""`bench platform`: rates fitted to measurements, and measurements on this machine and between ranks."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moefx
from moefx.bench import device_times, link_times, platform
from moefx.bench.device_times import AttentionTime
from moefx.bench.link_times import RepeatedExchange
from moefx.bench.platform_results import DeviceResults, PlatformResults
from moefx.bench.rate_fit import (
    ExpertTime,
    GemmTime,
    compute_gemm_errors,
    fit_dense_rates,
    fit_link,
    fit_shares,
    predict_experts,
)
from moefx.bench.shapes import parse_shape
from moefx.errors import InvalidInput
from moefx.planner.platforms import FITTED, find_platform
from tests.distributed.launch import torchrun

SHAPES = [(64, 512, 512), (4096, 512, 512), (64, 4096, 4096), (4096, 4096, 4096), (512, 2048, 1024)]
H200 = find_platform("h200")


def gemms(peak: float, bandwidth: float, launch: float) -> list[GemmTime]:
    made = [GemmTime(*shape, 1.0) for shape in SHAPES]
    return [g._replace(seconds=max(g.flop / peak, g.operands / bandwidth) + launch) for g in made]


def findings() -> PlatformResults:
    """Times of a machine of 500 TFLOP/s and 2 TB/s with nodes of 4 ranks, links of 100 and 10 GB/s."""
    experts = []
    for name in ("16384x2048x512x64x8", "4096x2048x768x128x8", "65536x512x2048x32x4", "2048x1024x1024x256x8"):
        result = predict_experts(parse_shape(name), H200)
        experts += [ExpertTime(parse_shape(name), result[f"T_experts{end}"], bool(end)) for end in ("", "_step")]
    attention = [AttentionTime(1, 1024, 8, 64, 3 * 2.0 * 8 * 1024**2 * 64 / 250e12)]
    exchanges = [
        RepeatedExchange(
            what, level, 4, unit, unit == 4, n, [(alpha + n / bandwidth) * factor for factor in (1.0, 0.9, 3.0)]
        )
        for unit, level, alpha, bandwidth in ((4, "ep/intra", 1e-5, 100e9), (16, "ep/inter", 5e-5, 10e9))
        for what in ("all_to_all", "p2p")
        for n in (1e3, 1e6, 1e9)
    ]
    device = DeviceResults("a machine", 2e12, 80 * 2.0**30, 2.0**29, gemms(500e12, 2e12, 5e-6), attention, experts)
    return PlatformResults("by hand", device, 1e-10, exchanges)


def test_fit_recovers_the_rates():
    made = findings().platform("mine", H200)
    assert made.peak == H200.peak and made.device == "a machine" and made.memory_bytes == 80 * 2**30
    assert made.matmul_efficiency * made.peak == pytest.approx(500e12)
    assert (made.dense_rows, made.dense_launch) == pytest.approx((2e12, 5e-6))
    assert made.attention_efficiency * made.peak == pytest.approx(250e12)
    assert made.expert_rates() == pytest.approx(H200.expert_rates(), rel=1e-6)
    node, cluster = made.networks
    assert (node.ranks, node.bandwidth, node.latency, node.p2p) == pytest.approx((8, 100e9, 1e-5, 100e9))
    assert (cluster.ranks, cluster.bandwidth, cluster.latency) == pytest.approx((0, 10e9, 5e-5))
    assert node.spread[0] == 0.9 and statistics.median(node.spread) == 1.0 and node.spread[-1] == 3.0
    assert made.handling == 1e-10
    measured = {name for name, source in made.sources.items() if source == "measured: by hand"}
    assert {"memory_bytes", "handling"} <= measured and not {"peak", "expert_gemm", "dense_rows"} & measured
    assert all(made.sources[name] == "fitted to measured times: by hand" for name in FITTED)


def test_a_platform_without_a_base_has_the_measured_figures():
    made = findings().platform("mine")
    assert [(n.name, n.ranks) for n in made.networks] == [("node", 4), ("nodes", 0)]
    assert made.peak == max(g.flop / g.seconds for g in findings().device.gemms)
    assert "fastest GEMM" in made.sources["peak"]
    alone = dataclasses.replace(findings(), exchanges=[]).platform("mine")
    assert [(n.name, n.ranks) for n in alone.networks] == [("node", 1)]


@pytest.mark.parametrize("base", [None, H200])
def test_measurements_that_ended_early_make_no_platform(base, tmp_path):
    rows, file = [json.dumps(row) for row in findings().rows()], tmp_path / "rows.jsonl"
    num_refused = 0
    for end in range(2, len(rows) + 1):
        file.write_text("\n".join(rows[:end]), encoding="utf-8")
        try:
            assert PlatformResults.read(file).platform("mine", base).networks
        except InvalidInput as error:
            assert re.search("measurements lack .* run `python -m moefx bench platform` again", str(error))
            num_refused += 1
    assert 15 < num_refused < len(rows) - 6
    results = findings()
    for kind, text in (("gemms", "times of GEMMs"), ("attention", "of attention"), ("experts", "of experts")):
        without = dataclasses.replace(results, device=dataclasses.replace(results.device, **{kind: []}))
        with pytest.raises(InvalidInput, match=f"the measurements lack .*{text}"):
            without.platform("mine", base)


def test_exchanges_alone_use_the_device_of_a_base():
    made = dataclasses.replace(findings(), device=None).platform("mine", H200)
    assert (made.device, made.expert_rates()) == (H200.device, H200.expert_rates())
    assert made.networks[0].bandwidth == pytest.approx(100e9)
    with pytest.raises(moefx.errors.InvalidInput, match="a base must say whose device"):
        dataclasses.replace(findings(), device=None).platform("mine")
    one = dataclasses.replace(H200, networks=H200.networks[:1])
    with pytest.raises(moefx.errors.InvalidInput, match="has 1 levels, and 2 were measured"):
        findings().platform("mine", one)


def test_rows_are_read_again(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in findings().rows()))
    assert PlatformResults.read(path) == findings()
    path.write_text("[1]\n")
    with pytest.raises(moefx.errors.InvalidInput, match=r"is not what one run of `bench platform --raw` wrote"):
        PlatformResults.read(path)
    with pytest.raises(moefx.errors.InvalidInput, match=r"no file .*: No such file"):
        PlatformResults.read(tmp_path / "none")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), st.integers(0, 99))
def test_fitted_shares_are_the_factors_and_not_negative(factors, seed):
    """Come back where they are there; none is below 0."""
    table = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1
    parts = table / (table @ torch.tensor(factors, dtype=torch.float64))[:, None]
    assert fit_shares(parts.tolist()) == pytest.approx(factors, rel=1e-6)
    assert min(fit_shares((table * torch.tensor([1.0, 1.0, -0.5])).tolist())) >= 0


def test_links_and_gemms_without_a_part():
    latency, bandwidth = fit_link([1e3, 1e6], [1e-3, 1e-3])
    assert latency == pytest.approx(1e-3) and bandwidth > 1e18
    rates = fit_dense_rates(gemms(500e12, 1e15, 0.0), 1e15)
    assert rates["dense_launch"] == pytest.approx(0.0, abs=1e-9) and rates["matmul_efficiency"] == pytest.approx(0.5)


@settings(max_examples=30, deadline=None)
@given(st.floats(50e12, 980e12), st.floats(0.5e12, 20e12), st.floats(1e-6, 1e-4))
def test_fit_reproduces_gemm_times(peak, bandwidth, launch):
    times = gemms(peak, bandwidth, launch)
    made = dataclasses.replace(H200, **fit_dense_rates(times, H200.peak))
    assert max(map(abs, compute_gemm_errors(times, made))) < 1e-3  # as times that the formula made must be


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(device_times, "_GEMMS", ((64, 64), (128, 64), (256, 512)))
    monkeypatch.setattr(device_times, "_ROWS", (64, 256))
    monkeypatch.setattr(device_times, "_EXPERTS", ((64, 32, 16, 4, 2), (128, 64, 32, 8, 2), (256, 32, 64, 4, 1)))
    monkeypatch.setattr(device_times, "_ATTENTION", ((1, 64, 2, 16),))


def test_this_machine_becomes_a_platform_file(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    out, raw = tmp_path / "here.json", tmp_path / "raw.jsonl"
    platform.main(["--device", "cpu", "--only", "device", "--out", str(out), "--raw", str(raw), "--name", "mine"])
    printed, told = capsys.readouterr()
    assert "GEMM" in printed and "128x64x32x8x2, and backward" in printed and f"wrote {out}, {raw}" in printed
    made = moefx.Platform.from_json(out.read_text())
    steps = re.findall(r"^bench platform: +\d+ s, step (\d+)( of 6)?: (.*)$", told, re.M)
    assert [number for number, _, _ in steps] == list("123456") and all(of for _, of, _ in steps[1:])
    assert [what for _, _, what in steps[1:4]] == ["GEMMs", "attention", "experts 64x32x16x4x2"]
    assert made.name == "mine" and made.peak > 0 and made.memory_bytes > 2**30
    assert len(moefx.plan("olmoe-1b-7b", str(out), 1, batch=1, tokens=128).table()) > 0
    again = tmp_path / "again.json"
    platform.main(["--read", str(raw), "--out", str(again), "--name", "mine"])
    assert again.read_text() == out.read_text()


def test_a_file_of_a_platform_is_found_by_name(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(findings().platform("mine").to_json())
    assert find_platform(str(path)) == findings().platform("mine")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_between_ranks(tmp_path):
    """Two nodes of two: levels of their own, each with sizes that grow and sends beside exchanges: two sizes at least,
    also where there is no time for them."""
    out, raw = tmp_path / "here.json", tmp_path / "raw.jsonl"
    options = ["--only", "exchanges", "--base", "dgx-h100", "--node-size", "2", "--repeats", "5", "--seconds", "0.001"]
    command = ["-m", "moefx", "bench", "platform", "--device", "cpu", "--out", str(out), "--raw", str(raw), *options]
    done = torchrun(*command)
    assert done.returncode == 0, done.stderr
    made, found = moefx.Platform.from_json(out.read_text()), PlatformResults.read(raw)
    assert [(n.name, n.ranks) for n in made.networks] == [("node", 8), ("cluster", 0)]
    for network in made.networks:
        assert network.source.startswith("measured") and network.bandwidth > 0 and network.p2p > 0, network
    assert made.peak == find_platform("dgx-h100").peak and 0 < made.handling < 1e-6
    for unit in (2, 4):
        for what in ("all_to_all", "p2p"):
            sizes = [r.num_bytes for r in found.exchanges if (r.unit, r.kind) == (unit, what)]
            assert len(sizes) > 1 and sizes == sorted(sizes)
    assert all(len(r.seconds) == 5 and min(r.seconds) > 0 for r in found.exchanges)
    first = next(r for r in found.exchanges if r.kind == "all_to_all")
    assert (first.num_bytes, first.ranks) == (link_times.SIZES[0] / 2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "exchanges"], "say whose it is with --base"),
        (["--raw", __file__], "a file holds one run"),
        (["--only", "everything"], "invalid choice"),
    ],
)
def test_invalid_options_raise(options, message, capsys):
    with pytest.raises(SystemExit):
        platform.main(options)
    assert message in capsys.readouterr().err


def test_unknown_base_raises():
    with pytest.raises(moefx.errors.UnknownPlatform, match="no platform 'h20'"):
        platform.main(["--base", "h20"])
