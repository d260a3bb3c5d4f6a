"""When a rewrite is checked numerically, and what follows."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from moefx import Plan
from moefx.compiler import check_policy
from moefx.compiler.check_policy import CheckPolicy
from moefx.compiler.numeric_check import NumericCheck, Outcome
from moefx.errors import Refused

from .. import blocks
from ..blocks import Loop, Mlp

AGREES = NumericCheck(Outcome.AGREES, "agrees in 3 comparisons")
DIFFERS = NumericCheck(Outcome.DIFFERS, "the rewritten block does not agree with the original")
IMPOSSIBLE = NumericCheck(Outcome.NOT_COMPARED, "could not run: no kernel")


@pytest.fixture(scope="module")
def block():
    return Loop(Mlp)


@pytest.fixture(scope="module")
def result(block):
    return blocks.rewritten(block, torch.zeros(24, 6))


@pytest.fixture
def checked(monkeypatch):
    """The names of the blocks that are checked; each check returns the next of `checked.results`."""

    class Checked(list):
        results = (AGREES,)

    names = Checked()

    def check(block, result, name, seconds):
        names.append(name)
        return names.results[len(names) - 1]

    monkeypatch.setattr(check_policy, "check_numerically", check)
    return names


@pytest.mark.parametrize(
    "plan, obstacle, verdict",
    [
        (Plan(validation="symbolic"), "", "off (plan.validation)"),
        (Plan(), "the call is only being traced", "skipped, the call is only being traced"),
        (Plan(validation_seconds=0), "", "skipped, the time budget is spent"),
    ],
)
def test_no_check_is_due(plan, obstacle, verdict, block, result, checked):
    found = CheckPolicy(plan).check(lambda: {"moe": block}, result, obstacle=obstacle)
    assert (found.text, found.could_not_run, checked) == (verdict, False, [])


def test_weights_without_values_are_not_checked(block, result, checked):
    on_meta = copy.deepcopy(block).to("meta")
    verdict = CheckPolicy(Plan(validation="numeric")).check(lambda: {"moe": on_meta}, result)
    assert verdict.text == "skipped, the weights are on the meta device" and not checked


def test_a_check_that_the_plan_demands_runs_without_a_budget(block, result, checked):
    plan = Plan(validation="numeric", validation_seconds=0)
    assert CheckPolicy(plan).check(lambda: {"moe": block}, result).text == AGREES.text
    assert checked == ["moe"]


def test_a_rewrite_that_differs_is_refused(block, result, checked):
    checked.results = (DIFFERS,)
    with pytest.raises(Refused, match=r"does not agree .* \(model.py:3\)\. please report") as refused:
        CheckPolicy(Plan()).check(lambda: {"moe": block}, result, source="model.py:3")
    assert refused.value.source == "model.py:3"


def make_nonfinite(block):
    block = copy.deepcopy(block)
    next(block.parameters()).data.fill_(float("nan"))
    return block


def test_an_equal_block_with_finite_weights_is_checked_instead(block, result, checked):
    checked.results = (DIFFERS, AGREES)
    assert CheckPolicy(Plan()).check(lambda: {"a": make_nonfinite(block), "b": block}, result).text == AGREES.text
    assert checked == ["a", "b"]


def test_blocks_with_nonfinite_weights_are_refused(block, result, checked):
    checked.results = (DIFFERS,)
    with pytest.raises(Refused, match=r"are NaN or infinite.*load finite weights"):
        CheckPolicy(Plan()).check(lambda: {"a": make_nonfinite(block)}, result)


def test_a_check_that_cannot_run_is_reported_once(block, result, checked):
    checked.results = (IMPOSSIBLE, AGREES)
    policy = CheckPolicy(Plan())
    with pytest.warns(UserWarning, match="moefx rewrote the model without a numeric check, .*: could not run: no kern"):
        policy.check(lambda: {"": block}, result).warn_if_unchecked("the model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.check(lambda: {"": block}, result).warn_if_unchecked("the model")
