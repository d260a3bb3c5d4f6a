"""`bench report`: the table and the plot of measured results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefx import cli
from moefx.bench import CEILING, report
from moefx.bench.shapes import SHAPES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "moe_h200.jsonl"


def make_row(shape: str, peer: str, ms: float) -> dict[str, object]:
    return dict(shape=shape, peer=peer, step_ms=ms, forward_ms=ms / 3)


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = [
        {"environment": {"versions": {"torch": "2.11"}, "devices": {"accelerator": "a GPU"}}},
        make_row("a", "moefx", 9.0),  # three rounds
        make_row("a", "moefx", 4.0),
        make_row("a", CEILING, 3.0),
        make_row("a", "moefx", 3.0),
        make_row("a", "moefx", 5.0) | dict(routing="zipf"),
        make_row("a", "moefx", 4.4) | dict(routing="hot"),
        make_row("b", "moefx", 1.0),
        dict(shape="b", peer="another", error="out of memory"),
        make_row("c", "another", 2.0),
        dict(shape="c", peer="another", error="failed in the second round"),
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_the_table_shows_medians_and_parts_of_the_ceiling(results, capsys):
    assert cli.main(["bench", "report", str(results)]) == 0
    steps, forwards, end = capsys.readouterr().out.split("\n\n")
    title, head, a, zipf, hot, b, c = steps.splitlines()
    assert title.startswith("ms forward+backward")
    assert head.split() == ["moefx", "another", "BMM", "ceiling"]
    assert a.split() == ["a", "4.000", "(0.75)", "-", "3.000"]  # the median
    assert zipf.split() == ["a", "zipf", "5.000", "(0.60)", "-", "3.000"]  # the ceiling of the shape
    assert hot.split()[:3] == ["a", "hot", "4.400"]
    assert b.split() == ["b", "1.000", "-", "-"]  # no ceiling, no ratio
    assert c.split() == ["c", "-", "2.000", "-"]  # omitted, since one run failed
    assert forwards.splitlines()[0] == "ms forward" and forwards.splitlines()[2].split() == ["a", "1.333", "-", "1.000"]
    assert end.splitlines() == ["b, another: out of memory", "slowest routing, moefx: 1.25 times uniform (a zipf)"]


def test_saved_bytes_have_no_ceiling(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = (make_row("a", peer, 1.0) | dict(saved_bytes_per_token=100.0, peak_mib=5.0) for peer in ("moefx", CEILING))
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    *_, saved, peak = report.format_tables(report.read_results(path)[1]).strip().split("\n\n")
    assert saved.splitlines()[1:] == [f" {'moefx':>20}", f"a{'100':>20}"]
    assert peak.splitlines()[-1].split() == ["a", "5"]


def test_the_plot_is_a_png(results, tmp_path):
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "report", str(results), "--plot", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_unreadable_results_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "report", str(tmp_path / "nothing.jsonl")])
    assert ended.value.code == 2 and "nothing.jsonl" in capsys.readouterr().err


def test_the_committed_results_name_their_environment():
    environment, results = report.read_results(RESULTS)
    assert "H200" in environment["devices"]["accelerator"] and environment["versions"]["triton"]
    assert {shape for shape, _ in results} == {shape.name for shape in SHAPES}
    assert len(results) == 30 and all(report.compute_ceiling_fraction(rows, "moefx") for rows in results.values())
