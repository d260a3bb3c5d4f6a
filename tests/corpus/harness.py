"""Run the corpus through `moefx.compile` and print one line per case.

    python -m tests.corpus.harness [NAME|SUITE|PATTERN ...] [--quick] [--trace] [--fullgraph] [--stop]

Without names: the plain, hf and pypi suites. A pattern is a shell pattern (`i1*`). `--quick` checks only the shape of
the example. The exit status is the number of failed cases.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import fnmatch
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from unittest import mock

import torch

import moefx
from moefx.compiler.survey import survey_model
from moefx.compiler.survey_result import Survey
from tests import models
from tests.models.case import Case

from . import checks, engine


@dataclasses.dataclass
class Result:
    name: str
    verdict: str
    outcome: str = ""  # "rewritten" | "refused" | "" if an earlier check failed
    stage: str = ""  # the check that failed
    error: BaseException | None = None
    seconds: float = 0.0
    compile_seconds: float = 0.0
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.error is None

    def __str__(self) -> str:
        head = f"{self.name:30s} {self.verdict:7s}"
        times = f"{self.seconds:5.1f}s"
        if self.ok:
            notes = "; ".join([f"compile {self.compile_seconds:.1f}s", *filter(None, self.notes)])
            return f"{head} ok   {self.outcome:9s} {times}  {notes}"
        message = " ".join(str(self.error).split())
        if isinstance(self.error, moefx.NoMoEBlockFound):  # print the reasons
            message = message.partition("were refused:")[2] or message
        return f"{head} FAIL {self.stage:9s} {times}  {type(self.error).__name__}: {message[:300]}"


def pick_dtype(name: str) -> Case:
    """Build the case in float64, or in float32 if its forward needs it.

    A model that converts its parameters in a call is returned after one call.
    """
    case = models.build(name, dtype=torch.float64)
    called = copy.deepcopy(case.model)
    try:
        with torch.no_grad():
            case.call(called, copy.deepcopy(case.inputs))
    except RuntimeError:
        return models.build(name, dtype=torch.float32)
    if [p.dtype for p in called.parameters()] != [p.dtype for p in case.model.parameters()]:
        case.model = called
    return case


def run_case(name: str, *, quick: bool = False, fullgraph: bool = False) -> Result:
    """Run every check of the corpus on one case. Never raises: the result contains the error."""
    start, result = time.perf_counter(), Result(name, "?")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = pick_dtype(name)
            result.verdict = case.verdict
            if case.verdict == "refuse":
                _check_refused(case, result)
            else:
                _check_rewritten(case, result, quick, fullgraph)
    except (Exception, AssertionError) as error:
        result.error = error
    result.seconds = time.perf_counter() - start
    return result


def _check_rewritten(case: Case, result: Result, quick: bool, fullgraph: bool) -> None:
    reference = copy.deepcopy(case.model)
    before, hooks, modes = (
        checks.State.of(case.model),
        checks.count_hooks(case.model),
        checks.read_modes(case.model),
    )
    tol = checks.choose_tolerance(case, reference, case.inputs)
    inputs = copy.deepcopy(case.inputs)

    result.stage = "compile"
    start = time.perf_counter()
    torch.manual_seed(0)
    rng = torch.get_rng_state()
    compiled = moefx.compile(case.model, example_inputs=inputs, strict=case.verdict == "match")
    result.compile_seconds = time.perf_counter() - start

    result.stage = "argument"
    assert torch.equal(rng, torch.get_rng_state()), "compile() moved the global random state"
    checks.assert_trees_close("example_inputs after compile", case.inputs, inputs, 0.0)
    checks.check_argument_untouched(case.model, before, hooks, modes)
    if case.verdict == "either" and not checks.list_rewritten(compiled):
        return _check_unchanged(case, result, reference, compiled)
    result.outcome = "rewritten"
    result.stage = "blocks"
    result.notes.append(checks.check_rewritten(case, compiled))
    result.stage = "shell"
    checks.check_shared(case.model, compiled)
    checks.check_same_shell(reference, compiled)

    result.stage = "numbers"
    engine.reset()
    for skewed in (False, True):
        start_state = checks.State.of(reference)
        if skewed:
            changed = case.skew_(reference), case.skew_(compiled)  # checks that later changes of weights are used
            assert changed[0] == changed[1]
            start_state = checks.State.of(reference)
        for i, (batch, seq) in enumerate(checks.SHAPES[:1] if quick else checks.SHAPES):
            start_state.restore(reference), start_state.restore(compiled)
            label = f"{'skewed' if skewed else 'given'} {batch}x{seq}"
            checks.compare_steps(case, reference, compiled, case.fresh(batch, seq, 10 + i), tol, label)
        start_state.restore(reference), start_state.restore(compiled)
        if skewed:
            before.restore(reference), before.restore(compiled)

    result.stage = "ran"
    engine.check_rewritten_path_ran(compiled, case)

    if fullgraph:  # before the hooks: transformers leaves hooks that Dynamo cannot trace
        result.stage = "fullgraph"
        checks.check_fullgraph(case, reference, compiled, case.inputs, tol)
        before.restore(reference), before.restore(compiled)

    result.stage = "hooks"
    checks.check_router_hooks(case, reference, compiled, case.inputs, tol)
    checks.check_router_logits(case, reference, compiled, case.inputs, tol)
    before.restore(reference), before.restore(compiled)

    result.stage = "eval"
    reference.eval(), compiled.eval()
    for grad in (False, True):
        torch.manual_seed(7)
        with torch.set_grad_enabled(grad):
            expected = case.call(reference, copy.deepcopy(case.inputs))
        torch.manual_seed(7)
        with torch.set_grad_enabled(grad):
            actual = case.call(compiled, copy.deepcopy(case.inputs))
        checks.assert_trees_close(f"eval, grad mode {grad}", expected, actual, tol)
    reference.train(), compiled.train()
    if engine.count_fallbacks(compiled):
        result.notes.append(f"{engine.count_fallbacks(compiled)} fallbacks in eval mode")
    result.stage = ""


def _check_refused(case: Case, result: Result) -> None:
    reference = copy.deepcopy(case.model)
    before, hooks, modes = (
        checks.State.of(case.model),
        checks.count_hooks(case.model),
        checks.read_modes(case.model),
    )
    result.stage = "strict"
    with _reuse_survey():
        try:
            moefx.compile(case.model, example_inputs=copy.deepcopy(case.inputs))
        except moefx.NoMoEBlockFound as error:
            result.notes.append(str(error).splitlines()[0][:80])
        else:
            raise AssertionError("compile(strict=True) did not raise NoMoEBlockFound")
        result.stage = "lenient"
        compiled = moefx.compile(case.model, example_inputs=copy.deepcopy(case.inputs), strict=False)
    checks.check_argument_untouched(case.model, before, hooks, modes)
    assert not checks.list_rewritten(compiled), f"rewritten: {checks.list_rewritten(compiled)}"
    _check_unchanged(case, result, reference, compiled)


@contextlib.contextmanager
def _reuse_survey() -> Iterator[None]:
    """Reuse one survey in strict and other modes: it takes most of the time and has the same result."""
    found: list[Survey] = []

    def once(*args) -> Survey:
        if not found:
            found.append(survey_model(*args))
        return found[0]

    with mock.patch("moefx.driver.compile_pipeline.survey_model", once):
        yield


def _check_unchanged(case: Case, result: Result, reference, compiled) -> None:
    """Check that a refused model works as before, and that `explain` prints the reason with a source line."""
    result.outcome = "refused"
    result.stage = "works"
    checks.compare_steps(case, reference, compiled, case.fresh(3, 7, 4), 0.0, "refused model")
    if case.no_candidate:
        result.stage = ""
        return
    result.stage = "explain"
    explanation = moefx.explain(compiled)
    refusals = engine.list_refusals(explanation)
    assert refusals, "explain() lists no refusal"
    reasons = [r for r in refusals if r.reason]
    assert reasons, f"explain() gives no reason: {refusals}"
    assert any(r.source for r in reasons), f"no source line: {reasons[0].reason}"
    result.notes.append(f"{reasons[0].reason} ({reasons[0].source})"[:150])
    result.stage = ""


def select(patterns: list[str]) -> Iterator[str]:
    """Yield case names that match names, suites and shell patterns."""
    for pattern in patterns or ["plain", "hf", "pypi"]:
        if pattern in models.SUITES:
            yield from models.names(pattern)
            continue
        found = [n for s in models.SUITES for n in models.names(s) if fnmatch.fnmatch(n, pattern)]
        if not found:
            raise SystemExit(f"no case matches {pattern!r}")
        yield from found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true", help="only the example's shape")
    parser.add_argument("--trace", action="store_true", help="full tracebacks")
    parser.add_argument("--fullgraph", action="store_true", help="also torch.compile the rewritten blocks")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    failed = total = 0
    for name in select(options.names):
        result = run_case(name, quick=options.quick, fullgraph=options.fullgraph)
        total, failed = total + 1, failed + (not result.ok)
        print(result, flush=True)
        if result.error is not None and options.trace:
            traceback.print_exception(result.error)
        if failed and options.stop:
            break
    print(f"{total - failed}/{total} cases pass; torch {torch.__version__}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
