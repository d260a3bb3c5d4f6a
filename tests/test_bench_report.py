from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefx import cli
from moefx.bench import CEILING, report

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "moe_h200.jsonl"


def row(shape: str, peer: str, ms: float) -> dict[str, object]:
    return dict(shape=shape, peer=peer, step_ms=ms, forward_ms=ms / 3)


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = [
        {"environment": {"versions": {"torch": "2.11"}, "devices": {"accelerator": "a GPU"}}},
        row("a", "moefx", 9.0),
        row("a", "moefx", 4.0),
        row("a", CEILING, 3.0),
        row("b", "moefx", 1.0),
        dict(shape="b", peer="another", error="out of memory"),
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_table(results, capsys):
    assert cli.main(["bench", "report", str(results)]) == 0
    head, a, b, failed = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["moefx", "another", "BMM", "ceiling"]
    assert a.split() == ["a", "4.000", "(0.75)", "-", "3.000"]  # the last measurement counts
    assert b.split() == ["b", "1.000", "-", "-"]  # without a ceiling no part of it
    assert failed == "b, another: out of memory"


def test_plot(results, tmp_path):
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "report", str(results), "--plot", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_read_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "report", str(tmp_path / "nothing.jsonl")])
    assert ended.value.code == 2 and "nothing.jsonl" in capsys.readouterr().err


def test_the_committed_results_name_their_environment():
    environment, results = report.read(RESULTS)
    assert "H200" in environment["devices"]["accelerator"] and environment["versions"]["triton"]
    assert len(results) == 10 and all(report.fraction(rows, "moefx") for rows in results.values())
