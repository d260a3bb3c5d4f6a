"""Run the corpus through `torch.compile(model, backend="moefx")` and print one line per case.

    python -m tests.frontends.dynamo.corpus [NAME|SUITE|PATTERN ...] [--experts eager|grouped_mm|batched_mm] [--trace]

Outcomes are `rewritten` (one region per block), `partly`, and `left` (no region); `broken` if Dynamo breaks its graph
inside the blocks; `torch's` if the case fails without moefx too. Outputs and gradients are checked for all outcomes.
The exit status is the number of failures.
"""

from __future__ import annotations

import argparse
import collections
import copy
import logging
import sys
import time
import traceback
import warnings

import torch

import moefx
from moefx.frontends.dynamo import backend, registry
from moefx.frontends.fx import proof_cache
from tests import models
from tests.corpus import checks
from tests.corpus.harness import select
from tests.models.case import Case

SHAPES = ((2, 9), (3, 7))


class MessageHandler(logging.Handler):
    """Collect logged reasons for unchanged regions, and graph breaks of Dynamo."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def build_case(name: str, experts: str) -> Case:
    """Build the case in float64, or in float32 if its forward needs it."""
    for dtype in (torch.float64, torch.float32):
        case = models.build(name, dtype=dtype)
        if experts != "eager":
            case.model.set_experts_implementation(experts)
        try:
            with torch.no_grad():
                case.call(copy.deepcopy(case.model), copy.deepcopy(case.inputs))
            return case
        except RuntimeError:
            if dtype == torch.float32:
                raise
    raise AssertionError("unreachable")


def run(name: str, experts: str = "eager", with_moefx: bool = True) -> tuple[str, list[str]]:
    """Run a case. Return its outcome and notes.

    Raises:
        Exception: any error of the case.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for kept in (proof_cache._proofs, backend._logged, registry.COMPILED_GRAPHS, registry.GRAPHS_WITHOUT_MOE):
        kept.clear()
    messages = MessageHandler()
    logging.getLogger("moefx").addHandler(messages)
    try:
        case = build_case(name, experts)
        reference, start = copy.deepcopy(case.model), checks.State.of(case.model)
        tol = checks.choose_tolerance(case, reference, case.inputs)
        options = {"backend": "aot_eager", "validation": "symbolic"}
        # a graph break in a loop may compile one graph per iteration
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256):
            if with_moefx:
                case.model.compile(backend=backend.backend, options=options)
            else:
                case.model.compile(backend="aot_eager")
            for i, (batch, seq) in enumerate(SHAPES):
                inputs = case.fresh(batch, seq, 10 + i)
                checks.compare_steps(case, reference, case.model, inputs, tol, f"{batch}x{seq}")
                start.restore(reference), start.restore(case.model)
        regions = len({block.name for block in moefx.blocks(case.model)}) if with_moefx else 0
    finally:
        logging.getLogger("moefx").removeHandler(messages)
    num_blocks = len(case.block_names)
    broken = any("Dynamo" in text for text in messages.texts) or bool(torch._dynamo.utils.counters["graph_break"])
    state = "rewritten" if regions >= num_blocks > 0 else "partly" if regions else "broken" if broken else "left"
    return state, [f"{regions} of {num_blocks}", case.verdict, *dict.fromkeys(messages.texts)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--experts", default="eager", choices=["eager", "grouped_mm", "batched_mm"])
    parser.add_argument("--trace", action="store_true", help="full tracebacks")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("moefx").propagate = False
    counts: collections.Counter[str] = collections.Counter()
    for name in select(options.names):
        begin = time.perf_counter()
        try:
            state, notes = run(name, options.experts)
        except Exception as error:
            state, notes = "FAIL", [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]
            if options.trace:
                traceback.print_exception(error)
            try:
                run(name, options.experts, with_moefx=False)
            except Exception:
                state = "torch's"
        counts[state] += 1
        shown = "; ".join(" ".join(note.split())[:200] for note in notes)
        print(f"{name:30s} {state:9s} {time.perf_counter() - begin:5.1f}s  {shown}", flush=True)
    print(", ".join(f"{number} {state}" for state, number in counts.items()), f"({options.experts})")
    return counts["FAIL"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
