"""`explain(trace=True)`: the probes of each proof, and the closest match of a refused block."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import moefx
from moefx.matching.probes.probe_list import PROBES

from ..blocks import D, E, Loop, Mlp


class Neighbour(Loop):
    """Give every fifth token to the expert of the previous token."""

    def __init__(self):
        super().__init__(Mlp, 1)

    def forward(self, x):
        w, ids = self.route(x)
        chosen = ids[:, 0].tolist()
        out = []
        for t, e in enumerate(chosen):
            out.append(self.experts[chosen[t - 1] if t % 5 == 4 else e](x[t]) * w[t])
        return torch.stack(out)


class Gives(Loop):
    """Branch on scores and skip all experts."""

    def forward(self, x):
        return super().forward(x) if self.gate(x).max() < 100 else torch.zeros_like(x)


@pytest.fixture(scope="module")
def explanation():
    torch.manual_seed(0)
    model = nn.Sequential(Loop(Mlp), Neighbour(), Gives(Mlp))
    return moefx.explain(model, example_inputs=(torch.randn(20, D),), trace=True)


def test_a_rewritten_block_lists_all_probes(explanation):
    (block,) = explanation.matched
    assert [run.name for run in block.trace.probes] == [probe.name for probe in PROBES]
    assert not any(run.refused for run in block.trace.probes)
    assert sum(run.added_forms for run in block.trace.probes) > 0
    assert len(block.guards) >= sum(run.guards for run in block.trace.probes)
    assert "    flip_branches " in str(explanation)


def test_the_attempts_of_a_block_are_listed(explanation):
    (block,) = explanation.matched
    assert [(run.name, run.failure) for run in block.trace.attempts] == [(f"[S, {D}]", "")]
    refused = next(r for r in explanation.refused if r.name == "2")
    first = refused.trace.attempts[0]
    assert first.name == f"[S, {D}]" and first.failure == refused.reason and first.ms > 0
    lines = [line.split() for line in str(explanation).splitlines()]
    assert ["attempt", "ms", "result"] in lines
    assert any(line[:2] == ["[S,", f"{D}]"] and line[-1] == "proven" for line in lines)
    assert any(line[:2] == ["[S,", f"{D}]"] and line[3:] == refused.reason.split() for line in lines)


class EvenLength(Loop):
    """Assert an even length, which captures do not choose, though the example has one."""

    def forward(self, x):
        assert x.shape[0] % 2 == 0
        return super().forward(x)


def test_an_attempt_that_follows_a_failed_one_is_listed():
    explanation = moefx.explain(EvenLength(Mlp), example_inputs=(torch.randn(20, D),), trace=True)
    attempts = explanation.matched[0].trace.attempts
    assert [bool(run.failure) for run in attempts] == [True, False]
    assert attempts[0].failure.startswith("AssertionError") and attempts[1].name == f"[S, {D}], (S%2) == 0"


def test_a_refused_block_names_the_probe(explanation):
    refused = next(r for r in explanation.refused if r.name == "2")
    *before, last = refused.trace.probes
    assert last.name == "flip_branches" and last.refused
    assert not any(run.refused for run in before)
    assert any(line.endswith("refused") for line in str(explanation).splitlines())


def test_a_refused_capture_names_its_near_miss(explanation):
    refused = next(r for r in explanation.refused if r.name == "1")
    cut = max(refused.trace.cuts, key=lambda cut: cut.reached)
    assert cut.node.startswith("stack") and cut.source.startswith("test_proof_trace.py")
    assert cut.reason == refused.reason
    index = cut.indices[0]
    tokens = int(cut.node.partition("[")[2].partition(",")[0])
    assert tokens > index.explained >= tokens - tokens // 5
    assert f"names the experts of {index.explained} of {tokens} tokens" in str(explanation)
    assert len(Neighbour().experts) == E


def test_a_refusal_tells_a_maintainer_where_it_was_raised(explanation):
    by_name = {refused.name: refused.trace.raised_at for refused in explanation.refused}
    assert [place.split(" in ")[1] for place in by_name["1"]] == ["_find_index"]
    assert by_name["1"][0].startswith("moefx/matching/lift/cut_lifter.py:")
    assert by_name["2"][0].startswith("moefx/matching/interventions/forced_outcome.py:") and len(by_name["2"]) == 2
    assert f"refused at {by_name['2'][0]}" in str(explanation) and f"because of {by_name['2'][1]}" in str(explanation)


def test_the_trace_is_printed_on_request():
    compiled = moefx.compile(nn.Sequential(Loop(Mlp)), example_inputs=(torch.randn(20, D),))
    quiet, full = moefx.explain(compiled), moefx.explain(compiled, trace=True)
    assert "flip_branches" not in str(quiet) and "flip_branches" in str(full)
    assert "trace" not in json.loads(quiet.to_json())["matched"][0]
    names = [run["name"] for run in json.loads(full.to_json())["matched"][0]["trace"]["probes"]]
    assert names == [probe.name for probe in PROBES]
