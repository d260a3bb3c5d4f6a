"""Numeric check of one block inside `compile`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from moefx.capture.environment import code_locations
from moefx.comparison import compare, sandbox
from moefx.comparison.block_check import BlockCheck, check_block
from moefx.comparison.routing_tape import RecordingMode, Scope, Tape
from moefx.comparison.work_count import WorkCount
from moefx.errors import InvalidInput
from tests.verification.models import FAULTS, Plain, Rewritten

from ..pace import limit_time
from .compared_models import tokens


def make_program(fault: str = ""):
    def run(block, x):
        block.__class__, block.fault = Rewritten, fault
        return Rewritten.forward(block, x)

    return run


def make_block(dtype=torch.float32, **kwargs) -> Plain:
    torch.manual_seed(0)
    plain = Plain(**kwargs).to(dtype)
    plain.aux_loss = torch.zeros(())
    return plain


def check(plain, fault="", x=None, **kwargs) -> BlockCheck:
    x = tokens(2, 9).to(plain.router.weight.dtype) if x is None else x
    return check_block(plain, make_program(fault), (x,), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_an_equal_program_passes(dtype, top_k):
    result = check(make_block(dtype, top_k=top_k))
    assert result.ok and not result.notes, result.reason
    cases = {row.case for row in result.rows}
    states = {"the given inputs", "inputs that starve experts", "unrelated inputs"}
    expected = {f"{state}, float64" for state in states}
    if dtype != torch.float64:
        expected.add("the given inputs, its own precision")
    assert cases == expected
    assert {"output", "grad_input", "grad_param", "buffer", "state"} <= {row.kind for row in result.rows}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mistake_is_seen_in_any_precision(fault, dtype):
    """Report faults that bfloat16 would round away: the algebra is compared in float64."""
    result = check(make_block(dtype), fault)
    assert not result.ok
    assert "differs from the original on" in result.reason and "and" in result.reason


def test_zero_parameters_get_other_values():
    """Fill zero biases with other values: a program without them agrees only until they are learned."""
    plain = make_block()
    zeros = [e.down.bias for e in plain.experts]
    for bias in zeros:
        torch.nn.init.zeros_(bias)
    result = check(plain, "missing bias")
    assert {row.case for row in result.rows if row.kind == "output" and not row.ok} == {"unrelated inputs, float64"}
    assert all(bias.eq(0).all() and e.down.bias is bias for e, bias in zip(plain.experts, zeros, strict=True))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_cast_of_the_program_alone_is_seen_in_the_blocks_own_precision(narrow):
    """Run in the block's own precision: the float64 run promotes explicit casts and cannot show the fault."""

    def rounds(block, x):
        out, scores = make_program()(block, x)
        return out.to(narrow).float(), scores

    result = check_block(make_block(dropout=0.0), rounds, (tokens(2, 9),))
    assert {row.case for row in result.rows if not row.ok} == {"the given inputs, its own precision"}


def test_a_fault_that_only_a_skewed_router_shows():
    """Report a program that is wrong only if an expert gets more than half of the rows."""

    def capped(block, x):
        out, scores = make_program()(block, x)
        load = torch.bincount(scores.topk(2).indices.flatten(), minlength=8)
        return out * (0 if int(load.max()) > 14 else 1), scores

    plain = make_block(dropout=0.0)
    result = check_block(plain, capped, (tokens(2, 9),))
    assert {row.case for row in result.rows if not row.ok} == {"inputs that starve experts, float64"}


@pytest.mark.parametrize("fault", ["scaled weight gradient", "activation constant", "one NaN", "missing bias"])
def test_under_autocast_the_algebra_is_still_compared_in_float64(fault):
    with torch.autocast("cpu", torch.bfloat16):
        result = check(make_block())
        assert result.ok, result.reason
        failed = {row.case for row in check(make_block(), fault).rows if not row.ok}
    assert "the given inputs, float64" in failed


def test_nothing_is_touched():
    plain = make_block()
    for p in plain.parameters():
        p.grad = torch.ones_like(p)
    x = tokens(2, 9).requires_grad_()
    before = {k: v.clone() for k, v in plain.state_dict().items()}, torch.get_rng_state(), dict(vars(plain))
    assert check(plain, x=x).ok
    assert all(torch.equal(v, before[0][k]) for k, v in plain.state_dict().items())
    assert torch.equal(before[1], torch.get_rng_state()) and before[2] == vars(plain)
    assert x.grad is None and all(torch.equal(p.grad, torch.ones_like(p)) for p in plain.parameters())


def test_a_memory_limit_leaves_out_large_gradients():
    plain = make_block()
    total = sum(p.numel() for p in plain.parameters())
    # Memory for the gradients of small parameters only.
    result = check(plain, max_bytes=8 * total + 16 * 3000 + 64 * 2 * 9 * 16 * 4)
    names = {row.name for row in result.rows if row.kind == "grad_param"}
    assert result.ok and "router.weight" in names and "experts.0.up.weight" not in names
    assert any("for lack of memory" in note for note in result.notes)
    # Too little memory for float64 weights.
    result = check(plain, max_bytes=4 * total)
    assert result.ok and {row.case.split(", ")[1] for row in result.rows} == {"its own precision"}
    assert any("float64 weights need" in note for note in result.notes)
    for fault in FAULTS:
        if "gradient of one" not in fault and "weight gradient" not in fault:
            assert not check(plain, fault, max_bytes=4 * total).ok, fault


def test_a_time_limit_leaves_out_later_cases():
    result = check(make_block(), seconds=0)
    assert {row.case for row in result.rows} == {"the given inputs, float64"}
    assert len(result.notes) == 3 and "limit of 0 s is reached" in result.notes[0]
    with limit_time(10):
        check(make_block())


def test_a_program_that_raises_is_a_mismatch_and_an_original_that_raises_is_an_error():
    def broken(block, x):
        raise IndexError("out of range")

    result = check_block(make_block(), broken, (tokens(2, 9),))
    assert not result.ok and "IndexError: out of range" in result.reason
    with pytest.raises(InvalidInput, match=r"the reference does not run on .*RuntimeError"):
        check_block(make_block(), make_program(), (torch.randn(3, 5),))


class Picky(Plain):
    """Accept no negative inputs. Other router states have some."""

    def forward(self, x):
        assert not (x < 0).any(), "an input is negative"
        return super().forward(x)


def test_an_original_that_raises_on_other_inputs_is_noted():
    result = check(plain := make_block(), x=tokens(2, 9).abs())
    assert result.ok and not result.notes
    plain.__class__ = Picky
    result = check(plain, x=tokens(2, 9).abs())
    assert result.ok and result.rows
    assert result.notes and all(
        "the original raises AssertionError: an input is negative" in note for note in result.notes
    )


@pytest.mark.parametrize("part", ["build_rows", "make_sandbox", "_copy_inputs"])
def test_an_error_of_the_check_itself_is_raised(part, monkeypatch):
    """A bug in comparing, casting or collecting results, after the first comparison, is no error of the original."""
    module, compared = sandbox if part == "_copy_inputs" else compare, []
    real, run = getattr(module, part), compare.CallChain.compare

    def fail(*args, **kwargs):
        if compared:
            raise KeyError("a bug")
        return real(*args, **kwargs)

    def record(self, *args, **kwargs):
        comparison = run(self, *args, **kwargs)
        compared.append(comparison)
        return comparison

    monkeypatch.setattr(compare.CallChain, "compare", record)
    monkeypatch.setattr(module, part, fail)
    monkeypatch.setattr(code_locations, "PACKAGE_DIR", str(Path(__file__).parent))  # `fail` counts as ours
    with pytest.raises(KeyError, match="a bug"):
        check(make_block())


def test_keyword_arguments_and_no_floating_point_inputs():
    class Embedded(Plain):
        def forward(self, ids, *, scale=1.0):
            return Plain.forward(self, self.router.weight[ids] * scale)

    plain = make_block()
    plain.__class__ = Embedded

    def embedded(block, ids, *, scale):
        return make_program()(block, block.router.weight[ids] * scale)

    result = check_block(plain, embedded, (torch.arange(8),), {"scale": 2.0})
    assert result.ok and {row.case.split(", ")[0] for row in result.rows} == {"the given inputs"}


class Rows(nn.Module):
    """Sleep per call, as on a busy machine, or loop over rows."""

    def __init__(self, seconds: float = 0.0, is_loop: bool = False):
        super().__init__()
        self.seconds, self.is_loop, self.inner = seconds, is_loop, nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(self.seconds)
        return torch.cat([self.inner(row[None]) for row in x]) if self.is_loop else self.inner(x)


def _check_crowd(rows: Rows, tokens: int) -> BlockCheck:
    few, many = torch.randn(2, 8), torch.randn(tokens, 8)
    return check_block(rows, lambda block, x: block.inner(x), (few,), crowd=((many,), {}))


def test_a_busy_machine_checks_many_tokens_too():
    result = _check_crowd(Rows(seconds=0.02), 1000)
    assert result.ok
    assert "a crowd of tokens, float64" in {row.case for row in result.rows}, result.notes


def test_a_check_of_many_tokens_with_too_many_ops_is_skipped():
    result = _check_crowd(Rows(is_loop=True), 200_000)
    assert any("too slow" in note for note in result.notes), result.notes
    assert "unrelated inputs, float64" in {row.case for row in result.rows}


def test_work_is_counted():
    a, b = torch.randn(200, 300), torch.randn(300, 200)
    counts = [WorkCount(), WorkCount(), WorkCount()]
    for work, times in zip(counts, (1, 1, 3), strict=True):
        with RecordingMode(Tape(), Scope(), work=work):
            for _ in range(times):
                (a @ b).relu()
    first, again, larger = (work.seconds for work in counts)
    assert first == again and larger == pytest.approx(3 * first)
    assert first > 300e-12 * 2 * 200 * 300 * 200
