"""Tests that share proofs reuse the proof of an equal block, and never of a different one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import moefx
import moefx.compiler.equal_modules

from . import proof_memory
from .blocks import D, Gated, Loop, Mlp

SCALE = 2.0
_route = Loop.route


class Scaled(Loop):
    def expert(self, e, x, w):
        return super().expert(e, x, w) * SCALE


@pytest.fixture(autouse=True)
def _proofs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield a list that collects the names of proven blocks."""
    found: list[str] = []
    stock = proof_memory._rewrite_as_called
    monkeypatch.setattr(proof_memory, "_rewrite_as_called", lambda *args: (found.append(args[1].name), stock(*args))[1])
    proof_memory.forget_proofs()
    with proof_memory.share_proofs(), proof_memory.share_checks():
        yield found
    proof_memory.forget_proofs()


def compile_model(model: nn.Module, dtype: torch.dtype = torch.float32, **plan) -> nn.Module:
    return moefx.compile(model.to(dtype), example_inputs=(torch.zeros(9, D, dtype=dtype),), plan=moefx.Plan(**plan))


def read_program_attributes(model: nn.Module) -> dict:
    return moefx.blocks(model)[0].forward.programs[0].attributes


def test_an_equal_block_is_proven_once(_proofs):
    x = torch.randn(7, D)
    models = [Loop(Gated) for _ in range(2)]
    results = [compile_model(model) for model in models]
    assert _proofs == [""]
    for model, result in zip(models, results, strict=True):
        torch.testing.assert_close(result(x), model(x))
        assert moefx.blocks(result)[0].fallbacks == 0
    first, second = map(read_program_attributes, results)
    assert first.keys() == second.keys()  # comparing blocks adds no attributes to the result


class Logging(nn.Module):
    def forward(self, x, log):
        log.append(x)
        return x * 2


class WithLog(nn.Module):
    """Pass a list to a module beside the block."""

    def __init__(self):
        super().__init__()
        self.first, self.moe = Logging(), Loop(Gated)

    def forward(self, x):
        return self.moe(self.first(x, []))


def test_objects_of_other_modules_do_not_prevent_a_reuse(_proofs):
    for model in (WithLog(), WithLog()):
        compile_model(model)
    assert _proofs == ["moe"]


def test_a_block_that_differs_is_proven(_proofs, monkeypatch):
    def frozen() -> nn.Module:
        model = Loop(Gated)
        model.experts[0].up.weight.requires_grad_(False)
        return model

    compile_model(Loop(Gated))
    others = [lambda: Loop(Gated, k=1), lambda: Loop(Mlp), lambda: Loop(Gated, num_experts=5), frozen, Scaled]
    for number, make in enumerate(others, 2):
        compile_model(make())
        assert len(_proofs) == number, make
    compile_model(Loop(Gated).eval())
    compile_model(Loop(Gated), torch.float64)
    compile_model(Loop(Gated), checkpoint="x")
    assert len(_proofs) == 9
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    model, x = Scaled(), torch.randn(7, D)
    torch.testing.assert_close(compile_model(model)(x), model(x))
    monkeypatch.setattr(Loop, "route", lambda self, x: _route(self, -x))
    compile_model(Loop(Gated))
    assert len(_proofs) == 11
