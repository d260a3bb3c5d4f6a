"""Compile every mutant and compare it with its original: rewritten and refused are correct outcomes, WRONG is not.

    python -m tests.mutants.run [PATTERN ...] [--sample N] [--full] [--check] [--list] [--trace] [--show] [--record]

A pattern is a shell pattern over `Base/mutation`. Without patterns every mutation runs in two of the bases that have
its hook, with `--full` in all. `--check` only checks that every mutant differs from its base or is documented as
equivalent. `--show` prints one line per mutant, with the reason of each refusal. `--record` writes the outcomes to
`outcomes.txt`, which tests compare: "+" is rewritten, "-" refused.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import fnmatch
import functools
import multiprocessing
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import moefx
from tests.corpus import checks, engine
from tests.models.case import Case

from .mutant import Mutant, list_mutants

SHAPES = ((2, 5), (1, 12), (1, 12), (3, 7), (1, 1))  # a repeated shape shows state from the previous call
PROOF_ALONE = moefx.Plan(validation="symbolic")  # the numeric check would refuse a wrong rewrite
TOLERANCE = 1e-9
OUTCOMES = Path(__file__).with_name("outcomes.txt")
SIGNS = {"rewritten": "+", "refused": "-"}
ROUNDING = {"single_precision": 1e-6, "half_precision": 1e-2}  # a reordered sum may round differently


def choose_tolerance(mutant: Mutant) -> float:
    return next((tol for kind, tol in ROUNDING.items() if kind in mutant.mutation.name), TOLERANCE)


@dataclasses.dataclass
class Verdict:
    mutant: Mutant
    outcome: str  # "rewritten" | "refused" | "WRONG" | "crash"
    detail: str = ""
    trace: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.outcome:9s} {self.mutant.name:55s} {self.seconds:4.1f}s  {self.detail[:200]}"


def _attributes(model: torch.nn.Module) -> dict[str, object]:
    return {k: v for k, v in vars(model.moe).items() if k == "calls"}


def compare(case: Case, reference: torch.nn.Module, compiled: torch.nn.Module, tol: float) -> None:
    """Run both models on given and skewed inputs. Raise AssertionError at the first difference."""
    start, attributes = checks.State.of(reference), _attributes(reference)
    for skewed in (False, True):
        for i, (batch, seq) in enumerate(SHAPES):
            inputs = case.fresh(batch, seq, 20 + i)
            if i != 2:  # the second of two equal shapes starts from the state after the first
                for model in (reference, compiled):
                    start.restore(model)
                    vars(model.moe).update(attributes)
                    if skewed:
                        case.skew_(model)
            state, left_behind = checks.State.of(reference), _attributes(reference)
            try:
                checks.train_step(case, reference, inputs)
            except (RuntimeError, IndexError, ValueError):
                continue  # the mutant itself fails for this shape
            finally:
                state.restore(reference)
                vars(reference.moe).update(left_behind)
            label = f"{'skewed' if skewed else 'given'} {batch}x{seq}"
            checks.compare_steps(case, reference, compiled, inputs, tol, label)
            assert _attributes(reference) == _attributes(compiled), f"{label}: python attributes differ"


def try_mutant(mutant: Mutant, reasons: bool = False, plan: moefx.Plan = PROOF_ALONE) -> Verdict:
    """Try a mutant; never raises. `reasons`: also explain a refusal, which takes as long as compiling."""
    start = time.perf_counter()
    verdict = Verdict(mutant, "crash")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = mutant.build()
            reference = copy.deepcopy(case.model)
            before = checks.State.of(reference)
            compiled = moefx.compile(case.model, example_inputs=copy.deepcopy(case.inputs), plan=plan, strict=False)
            names = checks.list_rewritten(compiled)
            verdict.outcome = "rewritten" if names else "refused"
            if reasons and not names:
                refused = engine.list_refusals(moefx.explain(case.model, example_inputs=case.inputs))
                verdict.detail = "; ".join(f"{r.reason} ({r.source})" for r in refused)
            before.check(case.model, "compile() changed its argument")
            compare(case, reference, compiled, choose_tolerance(mutant))
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        wrong = isinstance(error, AssertionError)
        verdict.outcome = "WRONG" if wrong else "crash"
        verdict.detail = message if wrong else f"{type(error).__name__}: {message}"
        verdict.trace = traceback.format_exc()
    verdict.seconds = time.perf_counter() - start
    return verdict


def try_all(chosen: list[Mutant], jobs: int = 1, **options: Any) -> Iterator[Verdict]:
    """Yield verdicts in the order of `chosen`."""
    attempt = functools.partial(try_mutant, **options)
    if jobs == 1:
        yield from map(attempt, chosen)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(attempt, chosen, chunksize=8)


def read_outcomes() -> dict[str, str]:
    """Return the recorded outcome of each mutant, by name."""
    outcomes = {sign: outcome for outcome, sign in SIGNS.items()}
    return {line[2:]: outcomes[line[0]] for line in OUTCOMES.read_text().splitlines()}


def record_outcomes(found: dict[str, str]) -> None:
    """Merge outcomes into the recorded ones, without mutants that do not exist any more."""
    recorded = read_outcomes() | found
    names = sorted(m.name for m in list_mutants(None) if m.name in recorded)
    OUTCOMES.write_text("".join(f"{SIGNS[recorded[name]]} {name}\n" for name in names))


def differs_from_base(mutant: Mutant) -> bool:
    """Return whether outputs or gradients of the mutant differ from its base, over several calls."""
    case, base = mutant.build(), mutant.build_base()
    shared = dict(base.model.named_parameters())
    with torch.no_grad():
        for name, p in case.model.named_parameters():
            if name in shared:
                p.copy_(shared[name])
    for model in (case.model, base.model):
        for p in model.parameters():
            p.grad = None
    for skewed in (False, True):
        if skewed:
            case.skew_(case.model), case.skew_(base.model)
        for i, (batch, seq) in enumerate(SHAPES):
            inputs = case.fresh(batch, seq, 20 + i)
            expected = checks.train_step(case, base.model, inputs, lr=0.0)
            try:
                actual = checks.train_step(case, case.model, inputs, lr=0.0)
            except (RuntimeError, IndexError, ValueError):
                if i != 2:  # the second of two equal shapes starts from the state after the first
                    raise
                continue  # the mutant fails for this shape, which `compare` skips too
            for what in ("output", "input gradient"):
                for a, b in zip(expected[what], actual[what], strict=True):
                    if checks.compute_distance(a, b) > 1e-12:
                        return True
            if any(checks.compute_distance(expected["gradient"][n], actual["gradient"][n]) > 1e-12 for n in shared):
                return True
    return False


def check_all(chosen: list[Mutant]) -> list[str]:
    """List faults of the suite: mutants that fail, or equal their base."""
    problems = []
    for mutant in chosen:
        try:
            changed = differs_from_base(mutant)
        except Exception as error:
            problems.append(f"{mutant.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if not changed and not mutant.mutation.same:
            problems.append(f"{mutant.name}: computes the same as its base")
        if changed and mutant.mutation.same and "but for rounding" not in mutant.mutation.same:
            problems.append(f"{mutant.name}: documented as equivalent ({mutant.mutation.same}) and is not")
    return problems


def select(patterns: list[str], sample: int = 0, full: bool = False) -> list[Mutant]:
    everything = list_mutants(None) if full or patterns else list_mutants()
    chosen = [m for m in everything if not patterns or any(fnmatch.fnmatch(m.name, p) for p in patterns)]
    return chosen[:sample] if sample else chosen


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--sample", type=int, default=0, help="only so many, always the same ones")
    parser.add_argument("--check", action="store_true", help="check the suite, not moefx")
    parser.add_argument("--full", action="store_true", help="every mutation in every base, not in two")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument(
        "--checked", action="store_true", help="with the numeric check of compile, which refuses faults"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--trace", action="store_true", help="full tracebacks of what is wrong")
    parser.add_argument("--record", action="store_true", help=f"write the outcomes to {OUTCOMES.name}")
    parser.add_argument("--show", action="store_true", help="a line for every mutant")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = select(options.patterns, options.sample, options.full)
    if options.list:
        print(*(m.name for m in chosen), f"{len(chosen)} mutants", sep="\n")
        return 0
    if options.check:
        problems = check_all(chosen)
        print(*problems, f"{len(chosen)} mutants, {len(problems)} problems", sep="\n")
        return len(problems)
    plan = moefx.Plan() if options.checked else PROOF_ALONE
    start, outcomes, found = time.perf_counter(), Counter(), dict[str, str]()
    for verdict in try_all(chosen, options.jobs, reasons=options.show, plan=plan):
        outcomes[verdict.outcome] += 1
        if verdict.outcome in SIGNS:
            found[verdict.mutant.name] = verdict.outcome
            if options.record and len(found) % 20 == 0:
                record_outcomes(found)
        if options.show or verdict.trace:
            print(verdict, flush=True)
        if verdict.trace and options.trace:
            print(verdict.trace)
    if options.record:
        record_outcomes(found)
    parts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
    print(f"{len(chosen)} mutants in {time.perf_counter() - start:.0f} s: {parts}")
    return outcomes["WRONG"] + outcomes["crash"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
