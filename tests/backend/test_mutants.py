"""Mutants of the idioms that Dynamo takes whole, through the backend: rewritten equal, or left alone."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch

from moefx import backend
from tests.mutants import bases, run
from tests.mutants.mutant import Mutant

WHOLE = ("DenseMasked", "StackGather", "WeightGather", "CapacityEinsum", "WeightBefore")
NAMED = ("WeightBefore/routed_ids_by_batch_parity", "DenseMasked/rows_scaled_by_parity")


@pytest.fixture(autouse=True)
def module_of_mutants(monkeypatch):
    """Dynamo imports the module that a function says it is of."""
    module = types.ModuleType("tests.mutants.generated")
    vars(module).update({k: v for k, v in vars(bases).items() if not k.startswith("__")})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def check(mutant: Mutant) -> None:
    torch._dynamo.reset()
    case = mutant.build()
    reference, call = copy.deepcopy(case.model), case.call
    options = {"backend": "eager", "validation": "symbolic"}
    compiled = torch.compile(case.model, backend=backend.backend, options=options)
    case.call = lambda model, inputs: call(compiled if model is case.model else model, inputs)
    run.compare(case, reference, case.model, run.tolerance(mutant))


SAMPLE = [m for base in WHOLE for m in run.select([f"{base}/*"], sample=2)]


@pytest.mark.parametrize("mutant", [*SAMPLE, *run.select(list(NAMED))], ids=lambda m: m.name)
def test_mutant(mutant):
    check(mutant)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("base", WHOLE)
def test_all_mutants(base):
    for mutant in run.select([f"{base}/*"]):
        check(mutant)
