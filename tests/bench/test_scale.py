"""`benchmarks/scale.py`: rows, resuming, failures, targets, and a dry run of a row of each kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scaling import launcher, page, rows, targets
from benchmarks.scaling.results_file import DONE, FAILED, TIMED_OUT, Record, ResultsFile, read_records
from benchmarks.scaling.rows import ScalingRow, build_rows
from benchmarks.scaling.stragglers import compute_percentile
from moefx.bench.train_systems import TrainingSize, parse_system

from .scale_row import make_row

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake_rows(monkeypatch) -> list[ScalingRow]:
    found: list[ScalingRow] = []
    monkeypatch.setattr(scale, "build_rows", lambda is_dry: found)
    monkeypatch.setattr(scale, "read_environment", lambda: {"commit": "abc"})
    return found


def run(out: Path, *options: str, gpus: int = 1) -> int:
    return scale.main(["--dry-run", "--gpus", str(gpus), "--out", str(out), "--logs", str(out.parent), *options])


def test_a_failed_and_a_hanging_row_are_recorded_and_the_others_go_on(fake_rows, tmp_path, capsys):
    fake_rows += [make_row("a", "fails"), make_row("b", "hangs"), make_row("c", "works"), make_row("d", "works", 8)]
    out = tmp_path / "out.jsonl"
    assert run(out, "--limit", "6") == 1
    a, b, c = read_records(out)
    assert (a.status, b.status, c.status) == (FAILED, TIMED_OUT, DONE)
    assert a.error == "ValueError: out of luck" and "not done after 6 s" in b.error and "waiting" in b.error
    assert all(record.results == ({"ms": 1.5},) and record.environment == {"commit": "abc"} for record in (a, b, c))
    assert "for more than the 1 GPUs here: d" in capsys.readouterr().out
    assert run(out) == 1 and len(read_records(out)) == 3  # all are in the file
    fake_rows[:2] = [make_row("a", "works"), make_row("b", "works")]
    assert run(out, "--retry") == 0
    assert [record.row for record in read_records(out)] == ["a", "b", "c", "a", "b"]
    assert len(out.read_text().splitlines()) == 1 + 5  # one environment


def wait_until(is_reached: Callable[[], bool], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not is_reached():
        assert time.monotonic() < end, f"not reached after {seconds} s"
        time.sleep(0.1)


RESUMED = """
import sys
from benchmarks import scale
from tests.bench.scale_row import make_row
scale.build_rows = lambda is_dry: [make_row("a", "works"), make_row("b", "hangs"), make_row("c", "works")]
scale.read_environment = lambda: {}
scale.main(["--dry-run", "--gpus", "1", "--out", sys.argv[1], "--logs", sys.argv[2]])
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_goes_on_with_the_row_in_progress(fake_rows, tmp_path, how):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", RESUMED, str(out), str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    log = tmp_path / "b.txt"
    wait_until(lambda: log.exists() and "waiting" in log.read_text())
    below = launcher.list_descendants(process.pid)
    assert len(below) == 1
    if how is signal.SIGKILL:  # nobody ends the row
        for pid in below:
            os.kill(pid, signal.SIGKILL)
    process.send_signal(how)
    process.wait(60)
    wait_until(lambda: not any(map(launcher.is_running, below.items())))  # the system takes a moment to end a process
    assert [record.row for record in read_records(out)] == ["a"]
    with out.open("a") as lines:
        lines.write('{"row": "b", "par')  # as if the run had been killed while it wrote
    fake_rows += [make_row(name, "works") for name in "abc"]
    assert run(out) == 0
    assert [record.row for record in read_records(out)] == ["a", "b", "c"]


def test_a_run_without_time_records_no_row(fake_rows, tmp_path, capsys):
    fake_rows += [make_row("a", "works")]
    assert run(tmp_path / "out.jsonl", "--minutes", "0.1") == 1
    assert "a and all later rows: no time left" in capsys.readouterr().out and not (tmp_path / "out.jsonl").exists()


def test_dry_and_real_rows_do_not_mix(tmp_path):
    path = tmp_path / "out.jsonl"
    dry = Record("layer/x/1", 1, 1, True, DONE, 1.0, "", ({"ms": 1.0, "shape": "x", "way": "one"},))
    ResultsFile(path, True).append(dry)
    with pytest.raises(SystemExit, match="has rows of dry runs"):
        ResultsFile(path, False)
    from benchmarks.scaling.plots import plot_all

    with pytest.raises(ValueError, match="figures mean nothing"):
        plot_all([dry], path)
    assert page.write_page(path) == 0 and not path.with_suffix(".md").exists()


def test_rows_fit_their_gpus():
    size = TrainingSize(layers=12, sequences=16, length=4096, most=2)
    for is_dry in (False, True):
        built = build_rows(is_dry)
        assert {row.part for row in built} == set(rows.PARTS)
        assert {row.gpus for row in built} == {1, 2, 4, 8}
        assert all(("--device" in row.arguments) == is_dry for row in built)
    for gpus in (1, 2, 4, 8):
        for text in rows.list_systems(gpus):
            system = parse_system(text, gpus)
            number, sequences = system.split_sequences(size)
            assert number * sequences * system.data_ranks == 16 and number >= system.pp
    assert {"halo,node_size=2", "halo,node_size=4"} <= set(rows.list_variants(8, 64))
    assert "halo,node_size=4" not in rows.list_variants(4, 64)
    selected = [row.name for row in build_rows(False) if row.is_selected(["layer/qwen3*", "7"])]
    assert "layer/qwen3_30b/8" in selected and "failures/pull/8" in selected and "skew/qwen3_30b/8" not in selected


@pytest.mark.parametrize(
    "text, why", [("pp3", "is for 3 ranks, there are 8"), ("tp2", "expected axes"), ("ep:1f1b", "'1f1b' is no")]
)
def test_invalid_systems_raise(text, why):
    with pytest.raises(ValueError, match=why):
        parse_system(text, 8)


def test_errors_are_found_in_the_output_of_ranks():
    text = "[rank1]: Traceback\n[rank1]: moefx.errors.InvalidPlan: no\n...\ntorch.X.ChildFailedError: \n"
    assert launcher.find_error(text) == "moefx.errors.InvalidPlan: no"
    assert launcher.find_error("nothing to see\n") == "nothing to see"


def test_percentiles():
    ascending = [float(i) for i in range(1, 1001)]
    found = [compute_percentile(ascending, share) for share in (0, 0.01, 0.5, 0.999, 1)]
    assert found == [1, 10, 500, 999, 1000]


def make_layer(gpus: int, **milliseconds: float) -> Record:
    results = [dict(shape="qwen3_30b", way=variant, ms=ms, dispatch="dedup") for variant, ms in milliseconds.items()]
    one = min(milliseconds["one"], milliseconds["one+graph"])
    results = [result | {"strict_efficiency": one / result["ms"]} for result in results]
    return Record(f"layer/qwen3_30b/{gpus}", 1, gpus, False, DONE, 1.0, "", tuple(results))


def test_targets_take_the_faster_single_gpu_and_the_best_variant():
    times = {"one": 4.0, "one+graph": 3.6, "dedup": 5.0, "gather": 4.6, "gather+graph": 4.0, "auto": 5.0}
    found = {target.name: target for target in targets.judge([make_layer(4, **times), make_layer(8, **times)])}
    best, auto = found["qwen3_30b over 4, best variant"], found["qwen3_30b over 4, auto"]
    assert best.is_met and best.found == "0.900 by gather+graph"
    assert not auto.is_met and auto.found.startswith("+8.7% behind gather ")
    assert found["qwen3_30b over 8, best variant"].is_met
    assert not targets.judge([make_layer(4, **times | {"gather+graph": 4.5})])[0].is_met


def test_strong_scaling_and_predictions():
    def model(system: str, gpus: int, tokens: float, **fields: float) -> Record:
        result = dict(system=system, tokens_per_s=tokens, gradients_ms=100.0, **fields)
        return Record(f"model/{system}/{gpus}", 3, gpus, False, DONE, 1.0, "", (result,))

    records = [
        model("fsdp", 1, 10.0),
        model("fsdp", 4, 30.0, predicted_ms=81.0),
        model("ep", 4, 36.0, predicted_ms=79.0),
    ]
    scaling = targets.find_strong_scaling(targets.collect_results(records, "model/"))
    assert scaling == {("fsdp", 1): 1.0, ("fsdp", 4): 0.75, ("ep", 4): 0.9}
    assert [(target.found, target.is_met) for target in targets.judge(records)] == [("-19.0%", True), ("-21.0%", False)]


def test_the_last_record_of_a_row_counts():
    records = [make_layer(4, **{"one": 4.0, "one+graph": 4.0, "dedup": ms}) for ms in (9.0, 4.0)]
    assert targets.judge(records)[0].found == "1.000 by dedup"
    assert "| qwen3_30b over 4, best variant | >= 0.88 | 1.000 by dedup | met |" in page.format_page(records)


def test_plots_and_page_are_written_beside_the_results(tmp_path):
    """Draw made-up numbers of every part."""
    pytest.importorskip("matplotlib")
    layer = dict(shape="qwen3_30b", exchange_ms=1.0, hidden_ms=0.5, imbalance=1.5)
    variants = [layer | dict(way=variant, ms=2.0, strict_efficiency=1.0) for variant in ("one", "dedup")]
    model = dict(system="fsdp", tokens_per_s=9.0, ms=11.0, gradients_ms=10.0, predicted_ms=9.0)
    shared = dict(shape="x", tensor_parallel=2, way="SSMB", ms=1.0, kept_mib=5.0)
    spread = dict(kind="p2p", num_bytes=1024, repeats=9, ms=1.0, percentiles_ms=[1.0] * 101, p999_ms=1.0)
    end = dict(way="pull", moment="forward", is_clean=True, worst_seconds=1.0, ends=[dict(outcome="RanksLost")])
    results = {"layer/q/4": variants, "skew/q/4": variants, "model/fsdp/1": [model], "ssmb/x/4": [shared]}
    results |= {"failures/pull/4": [end]}
    results |= {"stragglers/exchanges/4": [spread | dict(late_share=0.0)], "peers/q/4": [layer | dict(failure="none")]}
    path = tmp_path / "x.jsonl"
    file = ResultsFile(path, False)
    for name, found in results.items():
        gpus = int(name.rpartition("/")[2])
        file.append(Record(name, 1, gpus, False, DONE, 1.0, "", tuple(found), {"commit": "abc"}))
    assert page.write_page(path) == 0
    pictures = sorted(tmp_path.glob("*.png"))
    assert [p.stem for p in pictures] == ["x_layer", "x_model", "x_skew", "x_ssmb", "x_stragglers", "x_variants"]
    assert all(picture.stat().st_size > 5000 for picture in pictures)
    text = path.with_suffix(".md").read_text()
    assert all(f"({picture.name})" in text for picture in pictures) and "| pull | 4 | forward | True |" in text


DRY = """
import multiprocessing, runpy, sys
import torch
import moefx
from benchmarks.scaling import rows
from benchmarks.scaling.forked_ranks import run_module
from moefx.bench.ep_layers import Layer
from moefx.bench.shapes import parse_shape
from tests.proof_memory import share_proofs

def run_alone(row, out):
    sys.argv = [row.module, *row.arguments, "--out", out]
    runpy.run_module(row.module, run_name="__main__", alter_sys=True)

torch.set_num_threads(1)
share_proofs().start()  # the forks have the proof of this process
example = (torch.zeros(64, 32, dtype=torch.bfloat16),)
layer = Layer(parse_shape(rows._DRY_SHAPE), device="cpu")
assert moefx.explain(layer, plan=moefx.Plan(validation="symbolic"), example_inputs=example).matched
for row in rows.build_rows(True):
    if row.name in sys.argv[2:]:
        out = f"{sys.argv[1]}/{row.name.replace('/', '_')}.jsonl"
        if row.starts_ranks:
            process = multiprocessing.get_context("fork").Process(target=run_alone, args=(row, out))
            process.start()
            process.join()
            codes = [process.exitcode] if process.exitcode else []
        else:
            codes = run_module(row.gpus, row.module, [*row.arguments, "--out", out])
        print(row.name, codes, flush=True)
"""


@pytest.mark.slow
def test_a_dry_run_of_rows_of_each_kind(tmp_path):
    """Run rows over two ranks in forks of one process: a start of Python for each rank takes longer than a row."""
    shape = rows._DRY_SHAPE
    names = [f"ssmb/{shape}/tp=2/2", "model/pp:1f1b/2", "stragglers/exchanges/2", "failures/gather/2"]
    done = subprocess.run(
        [sys.executable, "-c", DRY, str(tmp_path), *names, f"skew/{shape}/2"],
        cwd=ROOT, env=launcher.build_environment(is_dry=True), capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert sorted(line for line in done.stdout.splitlines() if line.endswith(" []")) == sorted(
        f"{name} []" for name in (*names, f"skew/{shape}/2")
    ), done.stdout + done.stderr
    found = {
        path.name.partition("_")[0]: [json.loads(line) for line in path.read_text().splitlines()[1:]]
        for path in tmp_path.iterdir()
    }
    variants = {result["way"]: result for result in found["skew"]}
    assert set(variants) == set(rows.list_variants(2, rows._DRY_TOKENS)) and not any(
        "failure" in variant for variant in variants.values()
    )
    for variant, result in variants.items():
        assert result["error"] < 0.02 and result["imbalance"] > 1.2
        assert result["strict_efficiency"] == min(variants["one"]["ms"], variants["one+graph"]["ms"]) / result["ms"]
        if not variant.startswith("one"):
            assert result["sent_bytes"] == result["formula_bytes"] > 0, variant
    assert variants["auto"]["dispatch"] == "dedup" and variants["pull,max_tokens=64"]["dispatch"] == "pull"
    shared = {result["way"]: result for result in found["ssmb"]}
    assert shared["SSMB"]["gather_bytes"] == shared["SSMB"]["gather_formula_bytes"] > 0
    (model,) = found["model"]
    assert model["microbatches"] == 8 and model["tokens_per_s"] == pytest.approx(8 * 8 / model["ms"] * 1e3)
    assert "bubble_ms" in model and model["predicted_ms"] > model["predicted_bubble_ms"] > 0
    assert all(len(result["percentiles_ms"]) == 101 for result in found["stragglers"])
    assert [(result["moment"], result["is_clean"]) for result in found["failures"]] == [
        ("forward", True), ("backward", True),
    ]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_whole_dry_run_over_four_ranks(tmp_path):
    assert scale.main(["--dry-run", "--gpus", "4", "--out", str(tmp_path / "out.jsonl")]) == 0
