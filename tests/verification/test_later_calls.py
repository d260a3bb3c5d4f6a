"""Faults that a call on the given inputs does not show: other token counts, later calls, layouts, modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefx
from moefx.comparison.sandbox import Casts, RunOptions
from moefx.errors import InvalidInput
from moefx.verification.later_calls import MODULI, CallPlanner
from moefx.verification.verify_report import verify

from .compiled import break_op
from .faulty_models import IDS, Model, build_models

Forward = Callable[[Tensor], Tensor]


def make_wrong_if(is_wrong: Callable[[nn.Module, Tensor], bool]) -> Callable[[nn.Module, Forward, Tensor], Tensor]:
    return lambda model, forward, ids: forward(ids) * (1.5 if is_wrong(model, ids) else 1)


def spoil_second_call(model: nn.Module, forward: Forward, ids: Tensor) -> Tensor:
    model.kept["calls"] = model.kept.get("calls", 0) + 1
    return forward(ids) * (1.5 if model.kept["calls"] == 2 else 1)


def reuse_stale(model: nn.Module, forward: Forward, ids: Tensor) -> Tensor:
    """Reuse the first input of this shape."""
    if ids.shape not in model.kept:
        model.kept[ids.shape] = ids
    return forward(model.kept[ids.shape])


def ignore_strides(model: nn.Module, forward: Forward, ids: Tensor) -> Tensor:
    return forward(ids.as_strided(ids.shape, (ids.shape[1], 1)))


def spoil_gradient(is_wrong: Callable[[Tensor], bool]) -> Callable[[nn.Module, Forward, Tensor], Tensor]:
    def spoiled(model: nn.Module, forward: Forward, ids: Tensor) -> Tensor:
        out = forward(ids)
        return out * 2 - out.detach() if is_wrong(ids) else out

    return spoiled


CALLS: dict[str, tuple[Any, str]] = {
    **{f"T % 7 == {r}": (make_wrong_if(lambda model, ids, r=r: ids.numel() % 7 == r), "") for r in range(7)},
    "T % 5 == 3": (make_wrong_if(lambda model, ids: ids.numel() % 5 == 3), ""),
    "above 1024 tokens": (
        make_wrong_if(lambda model, ids: ids.numel() > 1024),
        "so the token count or the values matter",
    ),
    "gradient above 1024 tokens": (spoil_gradient(lambda ids: ids.numel() > 1024), ""),
    "gradient below the given count": (spoil_gradient(lambda ids: ids.numel() < 18), ""),
    "second call": (spoil_second_call, "the calls before it left something behind"),
    "stale values": (reuse_stale, "the calls before it left something behind"),
    "strides ignored": (ignore_strides, "correct for contiguous inputs, wrong for inputs with layout 'rows apart'"),
}
MODES: dict[str, tuple[Any, str]] = {
    "eval": (make_wrong_if(lambda model, ids: not model.training), "eval"),
    "no_grad": (make_wrong_if(lambda model, ids: not torch.is_grad_enabled()), "no_grad"),
    "inference": (make_wrong_if(lambda model, ids: torch.is_inference_mode_enabled()), "inference_mode"),
    "eval without gradients": (
        make_wrong_if(lambda model, ids: not (model.training or torch.is_grad_enabled())), "eval+no_grad",
    ),
}  # fmt: skip


def build_spoiled(fault: Any) -> tuple[nn.Module, nn.Module]:
    """Return the original, and a compiled model whose forward has the fault."""
    original, compiled = build_models(True)
    compiled = copy.deepcopy(compiled)
    forward = compiled.forward
    compiled.kept = {}
    compiled.forward = lambda ids: fault(compiled, forward, ids)
    return original, compiled


def list_wrong(report: Any) -> list[str]:
    return [row.name for row in report.failed if row.kind in ("output", "grad_param")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CALLS)
def test_faults_of_later_calls_are_flagged(name):
    fault, cause = CALLS[name]
    original, compiled = build_spoiled(fault)
    report = verify(compiled, original, (IDS,), routings=False)
    assert list_wrong(report) and (not cause or cause in str(report)), str(report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODES)
def test_faults_of_other_modes_are_flagged_on_request(name):
    fault, mode = MODES[name]
    original, compiled = build_spoiled(fault)
    assert verify(compiled, original, (IDS,), routings=False, token_counts=()).ok
    report = verify(compiled, original, (IDS,), routings=False, token_counts=(), modes=(mode,))
    assert list_wrong(report) and all(mode in row.case for row in report.failed), str(report)
    assert f"mode {mode}" in report.covered


def test_a_block_that_is_wrong_for_a_token_count_is_named():
    original, compiled = build_models(True)

    def corrupt(result: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        return [result[0] * (2 if result[0].numel() > 1024 * 8 else 1), *result[1:]]

    with break_op("expert_mlp", corrupt):
        report = verify(compiled, original, (IDS,), routings=False)
    assert report.first_block == "layer" and report.first_pass, str(report)


def test_the_report_lists_the_calls_and_the_modes():
    original, compiled = build_models(True)
    modes = ("eval", "inference_mode", "eval+no_grad")
    report = verify(compiled, original, (IDS,), routings=False, modes=modes)
    assert report.ok and not report.not_covered, str(report)
    assert report.covered[0] == "call 2: 36 tokens, in another order, rows apart, forward alone"
    assert "transposed" in report.covered[1] and report.covered[-3:] == tuple(f"mode {mode}" for mode in modes)
    cases = " ".join(row.case for row in report.rows)
    assert all(label.partition(";")[0].removeprefix("mode ") in cases for label in report.covered)
    assert all(f"also compared: {label}" in str(report) for label in report.covered)
    assert "a second backward" in str(report)
    report = verify(compiled, original, (IDS,), routings=False, token_counts=(50,))
    assert [label.split(", ")[0] for label in report.covered] == ["call 2: 36 tokens", "call 3: 50 tokens"]


def test_the_counts_have_all_remainders_up_to_seven():
    original, _ = build_models(True)
    for rows in (torch.zeros(2, 18, dtype=torch.int64), torch.zeros(4, 25, dtype=torch.int64)):
        for seed in range(3):
            plan = CallPlanner(original, ((rows,), {}), RunOptions(seed), Casts(None), None, None).plan_calls()
            counts = [rows.numel(), *(call.num_tokens for call in plan.calls)]
            assert min(counts) < rows.numel() and max(counts) > 1024
            assert all({n % m for n in counts} == set(range(m)) for m in MODULI if m in (2, 3, 7)), counts


class FixedLength(Model):
    """Model with positions for sequences of one length."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(18, 8))

    def forward(self, ids):
        return super().forward(ids) + self.head(self.positions)


class OneSize(Model):
    def forward(self, ids):
        if ids.shape != IDS.shape or not ids.is_contiguous():
            raise ValueError("made for one size")
        return super().forward(ids)


def test_sizes_that_the_model_fixes_do_not_vary():
    torch.manual_seed(0)
    original = FixedLength()
    report = verify(moefx.compile(original, example_inputs=(IDS,)), original, (IDS,), routings=False)
    counts = [int(label.split()[2]) for label in report.covered]
    assert report.ok and len(set(counts)) > 3 and all(n % 18 == 0 for n in counts), str(report)


def test_sizes_that_the_original_rejects_are_reported():
    torch.manual_seed(0)
    original = OneSize()
    compiled = moefx.compile(original, example_inputs=(IDS,))
    report = verify(compiled, original, (IDS,), routings=False)
    assert report.ok and report.covered == ("call 2: 36 tokens, in another order, forward alone",), str(report)
    why = " ".join(report.not_covered)
    assert "other token counts" in why and "rows apart" in why and "made for one size" in why


def test_unknown_modes_raise():
    original, compiled = build_models(True)
    for mode in ("evaluation", "eval+train", "no_grad+inference_mode"):
        with pytest.raises(InvalidInput, match="expected train, eval, no_grad, inference_mode"):
            verify(compiled, original, (IDS,), modes=(mode,))


# -- models that torch.compile has compiled ------------------------------------------------------------------


def spoil_many(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return tuple(t * 1.001 if isinstance(t, Tensor) and t.is_floating_point() else t for t in gm(*args))

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", spoil_many])
def test_a_compiled_model_runs_as_torch_compiles_it(in_place, backend):
    original, compiled = build_models(True)
    compiled = copy.deepcopy(compiled)
    if in_place:
        compiled.compile(backend=backend)
    else:
        compiled = torch.compile(compiled, backend=backend)
    report = verify(compiled, original, (IDS,), routings=False, token_counts=())
    name = backend if backend == "aot_eager" else backend.__name__
    assert f"compiled by {name}, as a whole" in report.covered, str(report)
    assert report.ok == (backend == "aot_eager"), str(report)
    assert all(f"compiled by {name}" in row.case for row in report.failed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_later_calls_of_an_inductor_model_agree(dtype):
    original, _ = build_models(True)
    original = copy.deepcopy(original).to(dtype)
    compiled = torch.compile(moefx.compile(original, example_inputs=(IDS,)))
    report = verify(compiled, original, (IDS,), routings=False)
    assert report.ok and "compiled by inductor" in str(report), str(report)
