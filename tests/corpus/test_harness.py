"""Self-test of the harness: an identity compiler passes every numeric check, a faulty one fails."""

from __future__ import annotations

import copy
import types

import pytest
import torch

import moefx
from tests import models
from tests.corpus import checks, engine, harness


def copy_shared(model):
    entries = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in entries})


@pytest.fixture
def compiler(monkeypatch):
    """Return a function that replaces `moefx.compile` by `edit` of a copy with shared parameters."""

    def install(edit, names=("moe",)):
        def compile(model, *, example_inputs=None, strict=True):
            compiled = copy_shared(model)
            edit(compiled)
            return compiled

        # setitem: avoids the slow import by the facade
        monkeypatch.setitem(vars(moefx), "compile", compile)
        monkeypatch.setitem(vars(moefx), "blocks", lambda m: [types.SimpleNamespace(name=n) for n in names])
        monkeypatch.setattr(engine, "check_rewritten_path_ran", lambda compiled, case: None)

    return install


@pytest.mark.parametrize("name", ["i1_one_hot_index_add", "i6_sort_counts_slices", "x_in_place_jitter"])
def test_an_unchanged_model_passes(compiler, name):
    compiler(lambda model: None)
    result = harness.run_case(name)
    assert result.ok, result.error


def scale_output(model):
    original = model.moe.forward
    model.moe.forward = lambda x: original(x) * (1 + 1e-6)


def cut_gradient(model):
    original = model.moe.forward
    model.moe.forward = lambda x: original(x.detach())


def skip_counter(model):
    original, block = model.moe.forward, model.moe

    def forward(x):
        seen = block.seen.clone()
        out = original(x)
        block.seen.copy_(seen)
        return out

    block.forward = forward


def rewrite_training_only(model):
    original = model.moe.forward
    model.moe.forward = lambda x: original(x) * (1 if model.moe.training else 2)


def spoil_one_token(model):
    original = model.moe.forward
    model.moe.forward = lambda x: original(x) * (2 if x.shape[:2] == (1, 1) else 1)


FAULTS = [
    (scale_output, "numbers"),
    (cut_gradient, "numbers"),
    (skip_counter, "numbers"),
    (rewrite_training_only, "eval"),
    (spoil_one_token, "numbers"),
    (lambda model: setattr(model, "moe", copy.deepcopy(model.moe)), "shell"),
    (lambda model: model.eval(), "shell"),
]


@pytest.mark.parametrize(("edit", "stage"), FAULTS)
def test_faults_are_caught(compiler, edit, stage):
    compiler(edit)
    result = harness.run_case("i6_sort_counts_slices")
    assert not result.ok and result.stage == stage, result


def test_unrewritten_block_is_a_failure(compiler):
    compiler(lambda model: None, names=())
    assert harness.run_case("i1_one_hot_index_add").stage == "blocks"


@pytest.mark.parametrize("suite", ["plain", "unseen"])
def test_every_case_runs_and_can_be_skewed(suite):
    for name in models.names(suite):
        case = models.build(name)
        for i, (batch, seq) in enumerate(checks.SHAPES):
            torch.manual_seed(0)
            loss = case.loss_of(case.call(case.model, case.fresh(batch, seq, i)))
            loss.backward()
            assert torch.isfinite(loss), name
        assert all(p.grad is None or p.grad.isfinite().all() for p in case.model.parameters()), name
        assert case.verdict == "refuse" or case.skew_(case.model), f"{name}: no router found to skew"
