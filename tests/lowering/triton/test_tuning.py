"""Tile configurations: the nearest tuned shape, defaults, tables of the user, and trials."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from moefx.errors import InvalidPlan
from moefx.ir import op_providers
from moefx.ir.ops import expert_gemms as experts
from moefx.lowering import triton
from moefx.lowering.triton import autotune, expert_mlp_steps, launch_replay, tile_configs, tuning
from moefx.lowering.triton import expert_mlp_call as run_module
from moefx.lowering.triton.tile_configs import KERNELS, GemmConfig

from ...covering import sample_product
from ...ir.routings import Routing, interleaved_clamped, swiglu_list, weight_before
from .layers import move_layer, run_and_differentiate

CPU, SHAPE = torch.device("cpu"), (768, 2048, 1024)
FAR = (768, 2048, 60)  # a shape without table entries nearby


@pytest.fixture(autouse=True)
def table(monkeypatch, tmp_path):
    """Start without tuned configurations, as in a new process."""
    monkeypatch.setenv("MOEFX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_used", {})
    monkeypatch.setattr(autotune, "_spent", 0.0)
    tuning._load_entries.cache_clear()
    yield
    tuning._load_entries.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(tile_configs, "get_target", lambda device: "sm90")


def test_the_nearest_tuned_shape_and_why(hopper):
    chosen, why, distance = tuning.find_nearest_config("down", CPU, torch.bfloat16, (2048, 700, 1000))
    assert why == "tuned for [768 -> 2048], 1024 rows an expert" and distance < 0.1
    assert chosen == tuning.choose_config("down", CPU, torch.bfloat16, (2048, 700, 1000))
    (line,) = triton.list_configurations()
    assert line == f"down bfloat16 [700 -> 2048], 1000 rows an expert: {chosen.text}; {why}"


def test_untuned_targets_get_defaults(hopper, monkeypatch):
    chosen, why, _ = tuning.find_nearest_config("up", CPU, torch.float32, SHAPE)
    assert not chosen.roles and why.startswith("the default: nothing is tuned for sm90")
    monkeypatch.setattr(tuning, "_load_entries", functools.cache(lambda device: {}))
    assert tuning.find_nearest_config("up", CPU, torch.float16, SHAPE)[0].roles
    monkeypatch.setattr(tile_configs, "get_target", lambda device: "gfx942")
    assert not tuning.find_nearest_config("up", CPU, torch.bfloat16, SHAPE)[0].roles


def test_float16_is_cut_as_bfloat16(hopper, monkeypatch):
    for kernel in KERNELS:
        (wanted, why, _), (chosen, reason, _) = (
            tuning.find_nearest_config(kernel, CPU, dtype, SHAPE) for dtype in (torch.bfloat16, torch.float16)
        )
        assert chosen == wanted and reason == f"{why}, bfloat16"
    float16_config = GemmConfig(64, 64, 64, warps=4, stages=2)  # one of two equally near entries
    tuning._load_entries(CPU).setdefault(("sm90", "float16", "up"), []).append((SHAPE, float16_config, "here for"))
    assert tuning.find_nearest_config("up", CPU, torch.float16, SHAPE)[:2] == (
        float16_config,
        f"tuned here for {tuning._format_shape(SHAPE)}",
    )


def test_unknown_gluon_versions_get_other_kernels(hopper, monkeypatch):
    kernels = [kernel for kernel in KERNELS if tuning.find_nearest_config(kernel, CPU, torch.float16, SHAPE)[0].roles]
    assert len(kernels) > 3
    monkeypatch.setattr(tile_configs, "HAS_ROLES", False)
    for kernel in kernels:
        chosen, why, _ = tuning.find_nearest_config(kernel, CPU, torch.float16, SHAPE)
        assert not chosen.roles and "without Gluon's kernels" in why
        assert not any(tiles.roles for tiles in tile_configs.list_candidates(kernel, CPU, torch.float16))


def test_text_names_settings_that_differ_from_the_default():
    plain = GemmConfig(128, 256, 64, warps=8, stages=4)
    assert plain.text == "128x256x64 warps=8 stages=4"
    assert dataclasses.replace(plain, group=4, roles=True).text == "128x256x64 warps=8 stages=4 group=4 roles"


def test_the_interpreter_leaves_no_trace():
    tuning.choose_config("up", CPU, torch.float32, SHAPE)
    assert not triton.list_configurations()


def test_gluon_is_not_imported_before_it_is_chosen():
    program = "import sys, moefx.lowering.triton.expert_mlp_steps; print(*(n for n in sys.modules if 'hopper' in n))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith("moefx")]


def test_tables_of_the_user_s(hopper, monkeypatch, tmp_path):
    tiles = tile_configs.portable_config("down")
    (tmp_path / "good").write_text(tuning.format_line("sm90", "bfloat16", "down", (256, 128, 64), tiles) + "\n")
    monkeypatch.setattr(tuning, "TABLE", tmp_path / "good")
    assert tuning.find_nearest_config("down", CPU, torch.bfloat16, SHAPE)[:2] == (
        tiles,
        "tuned for [128 -> 256], 64 rows an expert",
    )
    fields = '"target": "sm90", "dtype": "bfloat16", "kernel": "down"'
    for text in ("{", f"{{{fields}}}", f'{{{fields}, "shape": [1], "config": {{}}}}', "[]"):
        tuning._load_entries.cache_clear()
        (tmp_path / "bad").write_text((tmp_path / "good").read_text() + text)
        monkeypatch.setattr(tuning, "TABLE", tmp_path / "bad")
        with pytest.raises(InvalidPlan, match=r"bad:2 is not a line of a tuning table"):
            tuning.find_nearest_config("down", CPU, torch.bfloat16, SHAPE)
    monkeypatch.setattr(tuning, "TABLE", tmp_path / "none")
    with pytest.raises(InvalidPlan, match=r"MOEFX_TUNING=.*none: No such file"):
        tuning.find_nearest_config("down", CPU, torch.bfloat16, SHAPE)


class Gpu:
    """Simulate a GPU on which one configuration is fastest and some do not fit."""

    def __init__(self, monkeypatch):
        self.fast, self.too_large, self.tried, self.seconds = None, [], [], 0.0
        monkeypatch.setenv("MOEFX_AUTOTUNE", "600")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(autotune, "measure_milliseconds", self.milliseconds)
        monkeypatch.setattr(autotune.time, "perf_counter", lambda: self.seconds)

    def trial(self, tiles):
        self.seconds += 1.0
        if tiles in self.too_large:
            raise OutOfResources(300000, 227000, "shared memory")
        self.tried.append(tiles)

    def milliseconds(self, work, **_):
        work()
        return 1.0 if self.tried[-1] == self.fast else 2.0

    def config(self, shape=FAR, kernel="up", experts=128):
        return tuning.choose_config(kernel, CPU, torch.bfloat16, shape, experts, self.trial)


@pytest.fixture
def gpu(hopper, monkeypatch):
    return Gpu(monkeypatch)


class TestTuning:
    def test_the_fastest_is_found_once_and_kept(self, gpu):
        candidates = tile_configs.list_candidates("up", CPU, torch.bfloat16)
        for fast in (candidates[3], candidates[-1]):
            gpu.fast = fast
            shape = (FAR[0], FAR[1] * (1 if fast is candidates[3] else 8), FAR[2])
            assert gpu.config(shape) == fast and set(gpu.tried) == set(candidates)
            assert triton.list_configurations()[0 if fast is candidates[-1] else -1].endswith("60 rows an expert")
            gpu.tried.clear()
            near = (shape[0], shape[1], 100)
            assert gpu.config(shape) == gpu.config(near) == fast and not gpu.tried
            tuning._load_entries.cache_clear()  # another process
            assert gpu.config(shape) == fast and not gpu.tried
            assert tuning.find_nearest_config("up", CPU, torch.bfloat16, near)[1].startswith("tuned here for")
        assert len(autotune.read_cached_lines(tuning.gpu_name(CPU))) == 2

    def test_threads_wait_for_the_one_that_tunes(self, gpu):
        candidates, found = tile_configs.list_candidates("up", CPU, torch.bfloat16), []
        gpu.fast = candidates[3]
        threads = [threading.Thread(target=lambda: found.append(gpu.config())) for _ in range(3)]
        with autotune.tuning_lock:
            for thread in threads:
                thread.start()
            time.sleep(0.2)
            assert not gpu.tried and not found
        for thread in threads:
            thread.join(60)
        assert found == [gpu.fast] * 3
        assert len(gpu.tried) == len(candidates) * (1 + autotune._ROUNDS)

    def test_tuning_is_logged_once(self, gpu, caplog):
        for columns in (768, 6144):
            gpu.config((columns, *FAR[1:]))
        assert caplog.messages == [
            "timing GPU kernels for shapes that are not in the tuning table, for up to 600 s (MOEFX_AUTOTUNE)"
        ]

    def test_shapes_in_the_table_are_not_timed(self, gpu):
        gpu.config(SHAPE)
        assert not gpu.tried

    def test_small_shapes_are_not_timed(self, gpu):
        gpu.config((16, 16, 2), experts=2)
        assert not gpu.tried

    def test_nothing_is_timed_while_a_graph_is_captured(self, gpu, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert gpu.config() == tuning.find_nearest_config("up", CPU, torch.bfloat16, FAR)[0] and not gpu.tried

    @pytest.mark.parametrize("setting, seconds", [("", 0), ("5", 5), ("0", 0)])
    def test_the_environment_limits_the_seconds_of_tuning(self, gpu, monkeypatch, setting, seconds):
        monkeypatch.setenv("MOEFX_AUTOTUNE", setting)
        assert autotune.seconds_left() == seconds
        gpu.config()
        assert bool(gpu.tried) == bool(seconds)

    def test_a_gpu_without_any_tuned_configuration_is_named_once(self, gpu, monkeypatch, caplog, tmp_path):
        monkeypatch.setenv("MOEFX_AUTOTUNE", "0")
        (tmp_path / "empty").write_text("")
        monkeypatch.setattr(tuning, "TABLE", tmp_path / "empty")
        tuning._log_untuned.cache_clear()
        caplog.set_level(logging.INFO)
        for _ in range(2):
            gpu.config()
        (message,) = caplog.messages
        assert "MOEFX_AUTOTUNE=60 tunes" in message and not gpu.tried

    def test_a_setting_that_is_no_number(self, gpu, monkeypatch):
        for setting in ("on", "nan"):
            monkeypatch.setenv("MOEFX_AUTOTUNE", setting)
            with pytest.raises(InvalidPlan, match=f"MOEFX_AUTOTUNE={setting}: expected seconds"):
                gpu.config()

    def test_tuning_stops_when_time_runs_out(self, gpu, monkeypatch):
        monkeypatch.setenv("MOEFX_AUTOTUNE", "2.5")
        first = tuning.find_nearest_config("up", CPU, torch.bfloat16, FAR)[0]
        assert gpu.config() == first and 1 < len(set(gpu.tried)) < len(
            tile_configs.list_candidates("up", CPU, torch.bfloat16)
        )
        assert triton.list_configurations()[0].endswith("until the seconds of MOEFX_AUTOTUNE were used up")
        assert autotune.seconds_left() <= 0 and not autotune.read_cached_lines(tuning.gpu_name(CPU))
        gpu.tried.clear()
        gpu.config(kernel="grad_up")
        assert not gpu.tried

    def test_candidates_that_do_not_fit_are_skipped(self, gpu):
        candidates = tile_configs.list_candidates("up", CPU, torch.bfloat16)
        gpu.too_large, gpu.fast = candidates[:-1], candidates[0]
        assert gpu.config() == candidates[-1]
        assert len(autotune.read_cached_lines(tuning.gpu_name(CPU))) == 1

    def test_default_if_no_candidate_fits(self, gpu):
        gpu.too_large = tile_configs.list_candidates("up", CPU, torch.bfloat16)
        assert gpu.config() == tuning.find_nearest_config("up", CPU, torch.bfloat16, FAR)[0]
        assert triton.list_configurations()[0].endswith("none fit when tuned here")

    def test_other_errors_are_errors(self, gpu):
        def trial(tiles):
            raise RuntimeError("an illegal memory access was encountered")

        with pytest.raises(RuntimeError, match="illegal"):
            tuning.choose_config("up", CPU, torch.bfloat16, FAR, 128, trial)

    @pytest.mark.parametrize("source", ["lowering/formula.py", "lowering/epilogue.py", "lowering/triton/tiles.py"])
    def test_another_source_of_the_kernels_has_another_file(self, source, monkeypatch):
        real, found = Path.read_bytes, autotune._source_hash.__wrapped__()
        monkeypatch.setattr(Path, "read_bytes", lambda p: real(p) + b"#" * p.as_posix().endswith(source))
        assert autotune._source_hash.__wrapped__() != found

    def test_half_a_line_on_disk(self, gpu, caplog):
        first = gpu.config()
        file = autotune.cache_file(tuning.gpu_name(CPU))
        line = file.read_text().strip()
        bad = [line[:40], "[1]", "[" * 10**5, line.replace("2048", "Infinity"), line.replace('"up"', "[1]")]
        bad += [
            line.replace('"bm": ', '"bm": -'),
            line.replace('"bk": ', '"bk": 1'),
            line.replace('"flatten"', '"flat"'),
        ]
        bad += [
            line.replace('"stages": ', '"stages": "more", "x": '),
            line.replace('"warps": ', '"warps": null, "x": '),
        ]
        file.write_text("\n".join([line, *bad, ""]))
        tuning._load_entries.cache_clear()
        gpu.tried.clear()
        assert gpu.config() == first and not gpu.tried
        assert caplog.text.count("skipped a line that is not a configuration") == len(bad)
        second = (8 * FAR[0], *FAR[1:])
        file.write_bytes(file.read_bytes() + b"\xff{")  # half a line of another process
        tuning._load_entries.cache_clear()
        gpu.config(second)
        tuning._load_entries.cache_clear()
        gpu.tried.clear()
        gpu.config(second)
        assert not gpu.tried

    def test_a_user_without_a_home(self, gpu, monkeypatch):
        for name in ("MOEFX_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
        assert gpu.config() == gpu.config() and autotune.cache_directory() is None

    def test_candidates_that_the_driver_rejects_are_skipped(self, gpu, monkeypatch):
        candidates = tile_configs.list_candidates("up", CPU, torch.bfloat16)

        def trial(tiles):
            if tiles != candidates[-1]:
                raise RuntimeError("Triton Error [CUDA]: too many resources requested for launch")
            gpu.trial(tiles)

        assert tuning.choose_config("up", CPU, torch.bfloat16, FAR, 128, trial) == candidates[-1]

    def test_no_memory_left_for_timing(self, gpu, monkeypatch):
        def milliseconds(work, **_):
            raise torch.cuda.OutOfMemoryError("out of memory")

        monkeypatch.setattr(autotune, "measure_milliseconds", milliseconds)
        assert gpu.config() == tuning.find_nearest_config("up", CPU, torch.bfloat16, FAR)[0]
        assert autotune.seconds_left() < 600

    @pytest.mark.skipif(os.name != "posix", reason="a directory in the place of a file's")
    def test_a_directory_that_cannot_be_written(self, gpu, monkeypatch, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MOEFX_CACHE", str(tmp_path / "file"))
        gpu.fast = tile_configs.list_candidates("up", CPU, torch.bfloat16)[2]
        assert gpu.config() == gpu.fast and gpu.config() == gpu.fast
        assert "set MOEFX_CACHE to a writable directory" in caplog.text


@pytest.mark.parametrize(
    "case, keep",
    sample_product(
        {case.__name__: case for case in (interleaved_clamped, swiglu_list, weight_before)},
        {"h": "h", "x": "x"},
        order=1,
    ),
)
def test_trials_change_nothing(monkeypatch, device, case, keep):
    """Run every kernel with other configurations first, which changes no bit, and replay the next call."""
    monkeypatch.setattr(experts, "has_separate_gradients", lambda *_: False)  # as on a GPU
    torch.manual_seed(0)
    layer = move_layer(device, case(3, 16, 24, torch.float32), torch.float32)
    x = torch.randn(12, 16).to(device)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(12)]).to(device)
    token_ids, _, offsets, inverse, weights = Routing(ids, torch.rand(12, 2).to(device), 3).build()
    args = (x, token_ids, offsets, inverse, weights, layer.up, layer.up_bias, layer.down, layer.down_bias)
    options = dict(body=layer.text, keep=keep, reduce=True)
    grad = torch.randn(12, 16).to(device)
    tried = []

    def config(kernel, device, dtype, shape, num_experts, trial, with_trials=False):
        first = tuning.choose_config(kernel, device, dtype, shape)
        with autotune.pause_recording():
            for tiles in tile_configs.list_candidates(kernel, device, dtype)[1:3] if with_trials else ():
                trial(tiles)
        tried.append(kernel)
        return first

    def run():
        out, *kept = expert_mlp_steps.expert_mlp(*args, **options)
        return [out, *expert_mlp_steps.expert_mlp_backward(grad, *args, kept, **options, needs=[True] * 6)]

    monkeypatch.setattr(run_module, "choose_config", config)
    launch_replay._tapes.clear()
    expected = run()
    launch_replay._tapes.clear()
    tried.clear()
    monkeypatch.setattr(run_module, "choose_config", functools.partial(config, with_trials=True))
    first = run()
    assert set(tried) == set(KERNELS)
    tried.clear()
    again = run()
    assert not tried
    for result, other, want in zip(first, again, expected, strict=True):
        assert torch.equal(result, want) and torch.equal(other, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU")
def test_on_a_gpu(monkeypatch):
    """Tune every kernel in the first call of a new shape in float32, and none in the second."""
    monkeypatch.setenv("MOEFX_AUTOTUNE", "400")
    torch.manual_seed(0)
    layer = move_layer("cuda", swiglu_list(8, 512, 384, torch.float32), torch.float32)
    x, grad = torch.randn(2, 4096, 512, device="cuda")
    routing = Routing(torch.rand(4096, 8, device="cuda").argsort(1)[:, :2], torch.rand(4096, 2, device="cuda"), 8)
    results, calls = [], []
    stock = autotune.find_fastest
    monkeypatch.setattr(autotune, "find_fastest", lambda name, *args: calls.append(name) or stock(name, *args))
    for _ in range(2):
        results.append(run_and_differentiate(layer, routing, x, routing.topk_weights, grad, reduce=True))
        assert len(calls) == len(KERNELS)
    assert all(map(torch.equal, *results))
    assert all("tuned here for" in line for line in triton.list_configurations())
    assert len(autotune.read_cached_lines(tuning.gpu_name(x.device))) == len(KERNELS)
    with op_providers.force("expert_mlp", "segments"), op_providers.force("expert_mlp_backward", "segments"):
        expected = run_and_differentiate(layer, routing, x, routing.topk_weights, grad, reduce=True)
    for result, want in zip(results[0], expected, strict=True):
        assert (result - want).norm() < 1e-5 * want.norm()
