"""Demo of a small model from start to end, and its report."""

from __future__ import annotations

import re

import pytest

from moefx import cli
from moefx.demo import main, report_page
from moefx.demo.model import Config

SMALL = Config(dim=32, layers=2, heads=2, dense_hidden=32, num_experts=8, expert_hidden=16, top_k=3, context=16)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "report.html"
    return main.run(config=SMALL, steps=5, repeats=1, out=out), out.read_text(encoding="utf-8")


def test_the_demo_verifies_and_trains_alike(outcome):
    result, _ = outcome
    assert result.ok
    assert result.verified
    assert len(result.curves.original) == 5
    assert result.curves.largest_difference < 1e-9
    assert list(result.graphs) == ["layers.1.mlp"]
    assert "expert_mlp" in result.graphs["layers.1.mlp"]


def test_the_compiled_blocks_keep_less(outcome):
    result, _ = outcome
    assert result.costs.block_bytes["compiled"] < result.costs.block_bytes["original"]
    original, *policies = result.policy_bytes.values()
    assert original > policies[0] > policies[1] > policies[2]


def test_the_report_is_self_contained(outcome):
    _, page = outcome
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", page)
    assert "$" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.S), "a placeholder was left"
    assert page.count("<svg") >= 3  # bytes, loss, and at least one drawn graph
    for words in ("What was found", "Pass by pass", "Verification", "build_pft", "class MoE(nn.Module)"):
        assert words in page


def test_different_curves_are_not_equal():
    assert not main.Curves([1.0, 2.0], [1.0, 2.1]).equal
    assert not main.Curves([1.0, float("nan")], [1.0, float("nan")]).equal
    assert "Not equivalent" in report_page.verdict(False)


def test_explain_and_verify_from_the_command_line(capsys):
    target = "moefx.demo.model:LanguageModel"
    assert cli.main(["explain", target, "--meta", "--graphs"]) == 0
    printed = capsys.readouterr().out
    assert "layers.1.mlp" in printed and 'keep="h"' in printed
    assert cli.main(["verify", target]) == 0
    assert "layers.1.mlp" in capsys.readouterr().out


def test_explain_fails_for_a_model_without_experts(capsys, tmp_path, monkeypatch):
    (tmp_path / "dense_model.py").write_text("from torch import nn\nmodel = nn.Linear(4, 4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["explain", "dense_model:model"]) == 1
    assert cli.main(["verify", "dense_model:model"]) == 1
    assert "NoMoEBlockFound" in capsys.readouterr().err
