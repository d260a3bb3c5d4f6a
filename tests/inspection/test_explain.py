"""`explain` prints how expert weights are read."""

from __future__ import annotations

import dataclasses
import json

import pytest

from moefx.inspection.explain import BlockReport, Explanation


def make_explanation(**weights: int) -> Explanation:
    paths = (("expert_mlp", "segments", 2),)
    return Explanation("Model", (), (), 0.1, paths, tuple(weights.items()), verbose=True)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"separate": 6}, "one tensor per expert, in place x6, no copies"),
        ({"separate": 2, "stacked": 4},
         "one stacked tensor, in place x4, one tensor per expert, in place x2, no copies"),
        ({"view": 1}, "a strided view over the experts' tensors, in place x1, no copies"),
        ({"stacked": 2, "cast": 1}, "one stacked tensor, in place x2, CAST to the dtype of the GEMMs x1"),
        ({"stacked_copy": 3}, "COPIED into a stack x3"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_explain_shows_how_weights_are_read(weights, text):
    assert f"  weights     {text}" in str(make_explanation(**weights)).splitlines()
    assert json.loads(make_explanation(**weights).to_json())["weights"] == weights


def test_counters_of_the_process_are_printed_on_request():
    assert "weights" not in str(dataclasses.replace(make_explanation(separate=6), verbose=False))


def test_the_calls_are_summed_up_on_top():
    report = BlockReport(("a",), "Moe", 4, 2, "up", "", "any mode", 8, "agrees", 0.1, None, None, calls=(1200, 3, 1))
    found = Explanation("Model", (report, dataclasses.replace(report, names=("b",), calls=(5, 0, 0))), (), 0.1)
    assert str(found).splitlines()[1] == "  so far 1,205 of 1,208 calls of these blocks ran rewritten"


def test_explain_before_any_call():
    assert "weights" not in str(Explanation("Model", (), (), 0.1))
