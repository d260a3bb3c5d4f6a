"""Mutants of the idioms that Dynamo captures in one graph: the backend rewrites them correctly or not at all."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch

import moefx
from moefx.frontends.dynamo import backend
from moefx.frontends.fx import proof_cache
from tests.models.case import run_and_differentiate
from tests.mutants import bases, run
from tests.mutants.mutant import Mutant

WHOLE = ("DenseMasked", "StackGather", "WeightGather", "CapacityEinsum", "WeightBefore")
PARTS = 16  # per base, so that workers share the mutants
NAMED = ("WeightBefore/routed_ids_by_batch_parity", "DenseMasked/rows_scaled_by_parity")


@pytest.fixture(autouse=True)
def module_of_mutants(monkeypatch):
    """Register a module for the mutants: Dynamo imports the module that a function names."""
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
    run.compare(case, reference, case.model, run.choose_tolerance(mutant))


def check_graph(mutant: Mutant, is_decomposed: bool) -> bool:
    """Return whether the exported program is rewritten. Check its results in a sequence of calls with state."""
    proof_cache.forget()
    case = mutant.build()
    args = case.fresh(2, 9, 3)
    try:
        program = torch.export.export(case.model, args)
        gm = (program.run_decompositions() if is_decomposed else program).module()
    except Exception:
        return False  # torch.export fails: the program branches on values of tensors
    out = moefx.rewrite_graph(gm, args, moefx.Plan(validation="symbolic"))
    if out is gm:
        return False
    state = {k: t.clone() for k, t in gm.state_dict().items()}
    for skewed in (False, True):
        if skewed:
            case.skew_(case.model)
            state |= {k: t.detach().clone() for k, t in case.model.state_dict().items() if k in state}
        for seed in (3, 4):
            results = []
            for call in (gm, out):
                gm.load_state_dict(state)
                for buffer in gm.buffers():  # export drops `no_grad` in decompositions
                    buffer.detach_()
                torch.manual_seed(seed)
                try:
                    results.append(run_and_differentiate(gm, call, *case.fresh(2, 9, seed)))
                except RuntimeError:
                    if call is out and results[0] is not None:
                        raise
                    results.append(None)
            if results[0] is not None:
                tol = run.choose_tolerance(mutant)
                torch.testing.assert_close(results[1], results[0], rtol=tol, atol=tol, equal_nan=True)
    return True


SAMPLE = [m for base in WHOLE for m in run.select([f"{base}/*"], sample=2)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mutant", [*SAMPLE, *run.select(list(NAMED))], ids=lambda m: m.name)
def test_a_mutant_of_a_graph_is_refused_or_equal(mutant):
    check(mutant)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("base", WHOLE)
def test_all_mutants_of_a_graph_are_refused_or_equal(base, part):
    for mutant in run.select([f"{base}/*"])[part::PARTS]:
        check(mutant)


LEFT_ALONE = ("DenseMasked/straight_through_gates", "WeightGather/routed_first_id_scales")
GRAPHS = [m for base in WHOLE for m in run.select([f"{base}/*"], sample=1)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["whole", "decomposed"])
@pytest.mark.parametrize("mutant", GRAPHS, ids=lambda m: m.name)
def test_mutant_of_a_graph(mutant, is_decomposed):
    assert check_graph(mutant, is_decomposed) == (mutant.name not in LEFT_ALONE)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["whole", "decomposed"])
@pytest.mark.parametrize("base", WHOLE)
def test_all_mutants_of_graphs(base, is_decomposed, part):
    for mutant in run.select([f"{base}/*"])[part::PARTS]:
        check_graph(mutant, is_decomposed)
