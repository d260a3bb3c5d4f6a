"""The numeric check of `compile` runs joined ops, as calls of the compiled model do."""

from __future__ import annotations

import pytest
import torch

import moefx
from moefx.comparison.block_check import BlockCheck
from moefx.compiler import numeric_check
from moefx.compiler.numeric_check import Outcome, check_numerically
from moefx.ir.graphs import joined_ops, op_joining
from moefx.ir.graphs.joined_ops import JoinedOps

from .. import blocks
from ..ir.joined_block import Block, D, T

SINGLE_OPS = "differs from the same ops one by one on the given inputs, with ops joined"


@pytest.fixture(scope="module")
def rewritten():
    torch.manual_seed(0)
    block = Block()
    return block, blocks.rewritten(block, torch.zeros(T, D))


def check(rewritten):
    return check_numerically(*rewritten, "moe", seconds=30.0)


def test_joined_ops_run_with_gradients_and_without(rewritten, monkeypatch):
    ways = []
    for name in ("_RecordedOps", "_OpsWithoutGradient", "_DispatchedOps"):
        way = getattr(joined_ops, name)
        monkeypatch.setattr(
            way, "run", lambda *args, run=way.run, name=name, **kwargs: ways.append(name) or run(*args, **kwargs)
        )
    assert check(rewritten).outcome is Outcome.AGREES and set(ways) == {"_RecordedOps", "_OpsWithoutGradient"}


def scale_gradients(monkeypatch):
    run = joined_ops._run_backward

    def run_scaled(ctx, call, wiring, saved, by_value):
        run(ctx, call, wiring, saved, by_value)
        if call.index == 0:
            by_value[: wiring.num_inputs] = [g if g is None else 1.001 * g for g in by_value[: wiring.num_inputs]]

    monkeypatch.setattr(joined_ops, "_run_backward", run_scaled)


def lose_gradients(monkeypatch):
    run = joined_ops._run_backward

    def run_without_sum(ctx, call, wiring, saved, by_value):
        run(ctx, call, wiring, saved, by_value)
        by_value[wiring.num_inputs - 1] = None  # gradient of the last weights

    monkeypatch.setattr(joined_ops, "_run_backward", run_without_sum)


def exchange_inputs(monkeypatch):
    wire = op_joining._wire

    def wire_exchanged(inputs, calls, outputs):
        right = wire(inputs, calls, outputs)
        last = right.arguments[-1]
        return right._replace(arguments=(*right.arguments[:-1], (last[1], last[0], *last[2:])))

    monkeypatch.setattr(op_joining, "_wire", wire_exchanged)


def scale_outputs_without_gradient(monkeypatch):
    run = joined_ops._OpsWithoutGradient.run

    def run_scaled(self, op, index, *args, **kwargs):
        outputs = run(self, op, index, *args, **kwargs)
        return [1.001 * t for t in outputs] if op.name == "expert_mlp" else outputs

    monkeypatch.setattr(joined_ops._OpsWithoutGradient, "run", run_scaled)


@pytest.mark.parametrize("fault", [scale_gradients, lose_gradients, exchange_inputs, scale_outputs_without_gradient])
def test_a_fault_of_the_joining_is_seen(rewritten, monkeypatch, fault):
    op_joining._compiled.clear()
    fault(monkeypatch)
    verdict = check(rewritten)
    op_joining._compiled.clear()
    assert verdict.outcome is Outcome.DIFFERS and SINGLE_OPS in verdict.text, verdict


def test_compile_refuses_a_faulty_joining(monkeypatch):
    scale_gradients(monkeypatch)
    explanation = moefx.explain(Block(), example_inputs=(torch.randn(T, D),))
    assert not explanation.matched and SINGLE_OPS in str(explanation)


def test_a_joining_that_raises_is_refused(rewritten, monkeypatch):
    def raise_error(*args):
        raise RuntimeError("no joining")

    monkeypatch.setattr(JoinedOps, "__call__", raise_error)
    verdict = check(rewritten)
    assert verdict.outcome is Outcome.DIFFERS and "raised RuntimeError: no joining" in verdict.text


def test_a_check_that_compares_nothing_does_not_agree(rewritten, monkeypatch):
    monkeypatch.setattr(numeric_check, "check_block", lambda *_, **__: BlockCheck(notes=["moe: too large"]))
    verdict = check(rewritten)
    assert verdict.outcome is Outcome.NOT_COMPARED and verdict.text == "compared no value; moe: too large"


@pytest.mark.parametrize(("limit", "threads"), [(1 << 14, 1), (0, 2)])
def test_small_parameters_are_compared_on_one_thread(rewritten, monkeypatch, limit, threads):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(numeric_check, "_SMALL_PARAMETER", limit)
    monkeypatch.setattr(
        numeric_check, "check_block", lambda *_, **__: seen.append(torch.get_num_threads()) or BlockCheck()
    )
    torch.set_num_threads(2)
    try:
        check(rewritten)
        assert seen == [threads] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
