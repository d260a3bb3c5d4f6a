"""Comparisons of two models: correct rewrites pass in all precisions, every fault is reported, no state changes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from moefx.comparison.compare import Comparison
from moefx.comparison.numeric_precision import find_working_precision
from moefx.errors import InvalidInput
from tests.verification.models import FAULTS, Plain, build_pair

from .compared_models import check, tokens

DTYPES = [None, torch.float64, torch.bfloat16, torch.float16]


def list_failed(comparison: Comparison) -> set[tuple[str, str]]:
    return {(row.kind, row.name) for row in comparison.rows if not row.ok}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", [(2, 20), (1, 1), (3, 7)])
def test_a_correct_rewrite_passes(dtype, train, shape):
    original, compiled = build_pair()
    comparison = check(original.train(train), compiled.train(train), tokens(*shape), dtype=dtype)
    assert comparison.ok, list_failed(comparison)
    assert not comparison.notes
    kinds = [row.kind for row in comparison.rows]
    assert kinds.count("output") == 2 and kinds.count("grad_input") == 1
    assert kinds.count("grad_param") == len(list(original.parameters()))
    assert ("buffer" in kinds) is train and "state" in kinds
    assert {row.block for row in comparison.rows} == {"mlp"} and {row.case for row in comparison.rows} == {"case 1"}


@pytest.mark.parametrize("seed", range(8))
def test_a_correct_rewrite_passes_for_any_weights(seed):
    for top_k, dtype in ((1, None), (1, torch.float64), (2, torch.float64), (8, None), (3, torch.bfloat16)):
        original, compiled = build_pair(seed, top_k=top_k, num_experts=8)
        comparison = check(original, compiled, tokens(2, 9, seed=seed), dtype=dtype, seed=seed)
        assert comparison.ok, (top_k, dtype, [row for row in comparison.rows if not row.ok])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_every_mistake_is_seen(fault, dtype):
    original, compiled = build_pair(fault=fault)
    assert not check(original, compiled, tokens(2, 20), dtype=dtype).ok


COARSE = {  # below the rounding of half precision
    "scaled weight gradient", "scaled gradient of one expert", "activation constant",
}  # fmt: skip


@pytest.mark.parametrize("fault", [*(f for f in FAULTS if f not in COARSE), "overflow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mistakes_are_seen_in_half_precision(fault, dtype):
    if fault == "overflow" and dtype == torch.bfloat16:
        pytest.skip("bfloat16 has float32's range")
    original, compiled = build_pair(fault=fault)
    assert not check(original, compiled, tokens(2, 20), dtype=dtype).ok


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("stale buffer", ("buffer", "load")),
        ("stale attribute", ("state", "aux_loss")),
        ("missing router gradient", ("grad_param", "router.weight")),
        ("missing input gradient", ("grad_input", "0")),
        ("lost gradient of one expert", ("grad_param", "experts.7.down.weight")),
        ("missing bias", ("grad_param", "experts.0.down.bias")),
    ],
)
def test_the_wrong_tensor_is_named(fault, where):
    original, compiled = build_pair(fault=fault)
    assert where in list_failed(check(original, compiled, tokens(2, 20)))


def test_only_the_wrong_tensor_is_named():
    original, compiled = build_pair(fault="lost gradient of one expert")
    assert list_failed(check(original, compiled, tokens(2, 20))) == {("grad_param", "experts.7.down.weight")}


def test_nothing_is_touched():
    original, compiled = build_pair()
    for model in (original, compiled):
        model.get_submodule("experts.3").eval()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    x = tokens(2, 20).requires_grad_()
    x.grad = torch.ones_like(x)

    def everything():
        state = [
            (m.training, {k: id(v) for k, v in vars(m).items()}) for m in (*original.modules(), *compiled.modules())
        ]
        tensors = [
            *original.state_dict().values(),
            *compiled.state_dict().values(),
            x,
            x.grad,
            torch.get_rng_state(),
        ]
        tensors += [p.grad for m in (original, compiled) for p in m.parameters()]
        versions = [t._version for t in (*original.parameters(), *original.buffers(), *compiled.buffers(), x)]
        return state, [t.clone() for t in tensors], versions, random.getstate()

    before = everything()
    assert check(original, compiled, x).ok
    after = everything()
    assert before[0] == after[0] and before[2:] == after[2:]
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def test_runs_inside_no_grad_and_inference_mode():
    original, compiled = build_pair()
    with torch.no_grad():
        assert any(row.kind == "grad_param" for row in check(original, compiled, tokens(2, 5)).rows)
    with torch.inference_mode():
        assert check(original, compiled, tokens(2, 5), grads=False).ok


def test_without_gradients_only_the_forward_is_compared():
    original, compiled = build_pair(fault="missing router gradient")
    comparison = check(original, compiled, tokens(2, 20), grads=False)
    assert comparison.ok and not {"grad_param", "grad_input"} & {row.kind for row in comparison.rows}


def test_a_loss_of_the_users():
    original, compiled = build_pair()
    comparison = check(original, compiled, tokens(2, 20), loss=lambda out: out[0].square().mean())
    assert comparison.ok and ("output", "loss") in {(row.kind, row.name) for row in comparison.rows}
    original, compiled = build_pair(fault="missing router gradient")
    assert not check(original, compiled, tokens(2, 20), loss=lambda out: out[0].square().mean()).ok
    # A loss that does not depend on the fault does not show it.
    assert check(original, compiled, tokens(2, 20), loss=lambda out: out[1].square().mean()).ok


def test_faults_are_found_under_autocast():
    original, compiled = build_pair()
    with torch.autocast("cpu", torch.bfloat16):
        assert check(original, compiled, tokens(2, 20)).ok
        assert find_working_precision(original, ((tokens(1, 1),), {}), None)[0] is torch.bfloat16
        original, compiled = build_pair(fault="swapped experts")
        assert not check(original, compiled, tokens(2, 20)).ok


def test_frozen_and_tied_parameters():
    original, compiled = build_pair()
    original.experts[0].requires_grad_(False)
    comparison = check(original, compiled, tokens(2, 20))
    assert comparison.ok and not any(row.name.startswith("experts.0.") for row in comparison.rows)


def test_an_expert_that_no_token_hit_may_have_no_gradient():
    original, compiled = build_pair()
    with torch.no_grad():
        original.router.bias[0] = -100.0

    class Loop(Plain):  # skips empty experts, so autograd does not reach them
        def forward(self, x):
            x_SD = x.reshape(-1, x.shape[-1])
            scores, weights, ids = self.route(x_SD)
            out = torch.zeros_like(x_SD)
            for e in ids.unique().tolist():
                token, slot = torch.where(ids == e)
                out = out.index_add(0, token, self.experts[e](x_SD[token]) * weights[token, slot, None])
            return self.dropout(out.view_as(x)), scores

    original.__class__ = Loop
    assert check(original, compiled, tokens(2, 20)).ok
    assert check(compiled, original, tokens(2, 20)).ok


def test_outputs_in_dataclasses_dicts_and_objects():
    class Cache:
        def __init__(self, t):
            self.keys = [t]

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, *, mask=None):
            out, scores = self.inner(x)
            return {
                "out": out,
                "cache": Cache(scores),
                "none": None,
                "count": 3,
                "loss": float(scores.numel()),
            }

    original, compiled = build_pair()
    comparison = check(Wrapped(original), Wrapped(compiled), tokens(2, 3), mask=torch.ones(2, 3))
    names = {row.name for row in comparison.rows if row.kind == "output"}
    assert comparison.ok and names == {"out", "cache.keys.0", "count", "loss"}


def test_different_outputs_fail():
    class One(Plain):
        def forward(self, x):
            return super().forward(x)[:1]

    original, compiled = build_pair()
    compiled.__class__ = One
    comparison = check(original, compiled, tokens(2, 3))
    assert ("output", "1") in list_failed(comparison)
    compiled.__class__ = type("Raises", (Plain,), {"forward": lambda self, x: x @ x})
    comparison = check(original, compiled, tokens(2, 3))
    assert list_failed(comparison) == {("output", "forward and backward")} and "RuntimeError" in comparison.rows[0].note
    with pytest.raises(InvalidInput, match="the reference does not run on case 1: RuntimeError"):
        check(compiled, original, tokens(2, 3))


class Skipping(nn.Module):
    """Return zeros without running a layer, or cut the gradient."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.up = way, nn.Linear(16, 16, bias=False)
        nn.init.ones_(self.up.weight)

    def forward(self, x):
        if self.way == "skips":
            return torch.zeros(x.shape)
        y = self.up(x)
        return {"detached": y.detach(), "constant": 0 * y, "right": y}[self.way]


def test_an_output_that_zeros_alone_reach_may_require_grad():
    assert check(Skipping("skips"), Skipping("constant"), tokens(2, 3)).ok
    lost = {("output", "output.requires_grad")}
    assert list_failed(check(Skipping("constant"), Skipping("skips"), tokens(2, 3))) == lost
    assert list_failed(check(Skipping("detached"), Skipping("right"), tokens(2, 3))) == {
        ("grad_input", "0"), ("grad_param", "up.weight")
    }  # fmt: skip


def test_an_update_of_the_input_in_place_is_compared():
    class InPlace(nn.Module):
        def __init__(self, right):
            super().__init__()
            self.right = right

        def forward(self, x):
            return x.mul_(2) if self.right else x * 2

    assert check(InPlace(True), InPlace(True), tokens(2, 3)).ok
    assert list_failed(check(InPlace(True), InPlace(False), tokens(2, 3))) == {("state", "input 0")}
    assert list_failed(check(InPlace(False), InPlace(True), tokens(2, 3))) == {("state", "input 0")}


def test_a_model_without_float64_is_judged_in_its_own_precision():
    class Fixed(Plain):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise NotImplementedError("no kernel for Double")
            return super().forward(x)

    original, compiled = build_pair()
    original.__class__ = Fixed
    comparison = check(original, compiled, tokens(2, 20))
    assert comparison.ok and "no kernel for Double" in comparison.notes[0]
    for fault in FAULTS:
        original, compiled = build_pair(fault=fault)
        original.__class__ = Fixed
        assert not check(original, compiled, tokens(2, 20)).ok, fault


@pytest.mark.parametrize("source", [torch.rand, lambda n: random.random()])
def test_an_unused_random_draw_is_not_dropped(source):
    """Keep the draw: without it all later draws would differ."""

    class Draws(Plain):
        def forward(self, x):
            result = super().forward(x)
            source(1)
            return result

    original, compiled = build_pair()
    original.__class__ = Draws
    assert list_failed(check(original, compiled, tokens(2, 3))) == {("state", "random numbers drawn")}
    compiled.__class__ = Draws
    assert check(original, compiled, tokens(2, 3)).ok
