"""Compare two models, and their blocks, on several sets of inputs."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..comparison.compare import CallChain, Comparison, Subject
from ..comparison.policy import Row
from ..comparison.rank_shares import Shares, to_local
from ..comparison.router_states import GIVEN, router_states
from ..comparison.routing_tape import RoutingRow, Scope
from ..comparison.sandbox import Call, Casts, Inputs, RunOptions, call_forward, call_module
from ..errors import InvalidInput, summarize_error
from ..runtime.block_forward import BlockForward, CallCounts, find_rewritten_blocks
from .bisect import find_first_bad_snapshot, find_program
from .block_scopes import watch_compiled, watch_original
from .compiled_parts import CompiledCopies, CompiledPart
from .expert_shares import find_shares
from .later_calls import MANY_TOKENS, MAX_SECONDS, CallPlanner, LaterCall
from .modes import Mode
from .report_table import NOTHING_REWRITTEN, OTHER_VALUES

LATER_CALLS = "calls after the given one: the given call already differs"


class ModelVerifier:
    """Compares two models and collects the results.

    Args:
        watch: called with each sandbox of the compiled model and its scope; returns the sandbox's rewritten blocks.
        call: calls a sandbox of the compiled model.
        is_costly: each new size or layout recompiles.
        shares: this rank's part of the results, under expert parallelism.

    Attributes:
        first: the first block, in order of execution, that differs on the reference's inputs, and the pass at fault.
    """

    def __init__(
        self,
        compiled: nn.Module,
        reference: nn.Module,
        dtype: torch.dtype | None,
        shares: Shares | None = None,
        watch: Callable[[nn.Module, Scope], dict[str, BlockForward]] = watch_compiled,
        call: Call = call_module,
        is_costly: bool = False,
    ):
        self.compiled, self.reference, self.watch, self.call = compiled, reference, watch, call
        self.is_costly = is_costly
        self.working, self.exact = Casts(dtype), Casts(torch.float64)
        self.names = list(find_rewritten_blocks(compiled))
        self.shares = shares
        self.rows: list[Row] = _check_initial_state(compiled, reference, self.shares)
        self.routing: list[RoutingRow] = []
        self.notes: list[str] = []
        self.covered: list[str] = []
        self.not_covered: list[str] = []
        self.first: tuple[str, str] | None = None
        self.calls: dict[str, Inputs] = {}  # by block, in order of execution, for the current case
        self.forwards: dict[str, BlockForward] = {}  # in the current sandbox of the compiled model
        self.counts_before: dict[str, CallCounts] = {}  # of their calls, when the sandbox was made
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in self.names}  # calls by program

    def compare_models(
        self, sets: list[Inputs], seeds: Sequence[int], grads: bool, loss: Any, routings: bool,
        token_counts: Sequence[int] | None = (), modes: Sequence[Mode] = (),
    ) -> None:  # fmt: skip
        """Compare the models on all inputs and in all modes, and their blocks on the inputs of the reference's blocks.

        Later calls follow the first set of inputs.
        """
        for i, inputs in enumerate(sets):
            for seed in seeds:
                case = f"inputs {i}, seed {seed}"
                options = self.build_options(seed, grads, loss)
                chain, is_right = self.compare_model(inputs, options, case)
                self.compare_blocks(self.calls, dataclasses.replace(options, loss=None), case, routings)
                if i > 0 or seed != seeds[0]:
                    continue
                if is_right or self.shares is not None:  # with shares, all ranks must go on
                    later_options = dataclasses.replace(options, loss=None, has_second_backward=False)
                    self.compare_later_calls(chain, inputs, later_options, case, token_counts)
                else:
                    self.not_covered.append(LATER_CALLS)
            for mode in modes:
                options = mode.apply_to(self.build_options(seeds[0], grads, loss))
                self.compare_model(inputs, options, f"inputs {i}, seed {seeds[0]}, {mode}", is_counted=False)
                self.record_coverage(f"mode {mode}", self.count_original_calls())
                self.compare_blocks(
                    self.calls, dataclasses.replace(options, loss=None), f"inputs {i}, {mode}", routings=False
                )
        self.rows += build_path_rows(self.counts, NOTHING_REWRITTEN)

    def build_options(self, seed: int, grads: bool, loss: Any) -> RunOptions:
        """Build the options of a run. Leaves out a second backward over a mesh, because it would need more
        collectives."""
        return RunOptions(seed, grads, loss, has_second_backward=grads and self.shares is None)

    def compare_blocks(self, calls: Mapping[str, Inputs], options: RunOptions, case: str, routings: bool) -> None:
        for name, call in list(calls.items()):
            for state, inputs in self.iterate_block_inputs(name, call, options.seed, routings):
                self.compare_block(name, inputs, options, f"{case}{state}", is_brief=bool(state))

    def compare_model(
        self, inputs: Inputs, options: RunOptions, case: str, is_counted: bool = True
    ) -> tuple[CallChain, bool]:
        """Compare the two models in one call.

        Args:
            is_counted: count the call for the check that every block ran rewritten.

        Returns:
            The chain, which can go on with more calls, and whether this call agrees.
        """
        self.calls.clear()
        self.forwards.clear()

        def prepare(box: nn.Module, role: str, scope: Scope) -> None:
            if role == "compiled":
                self.forwards.update(self.watch(box, scope))
                self.counts_before = {name: copy.copy(forward.counts) for name, forward in self.forwards.items()}
            else:
                watch_original(box, self.names, scope, self.calls if role == "original" else None)

        chain = CallChain(
            Subject(
                self.reference, self.compiled, self.working, self.exact,
                call_compiled=self.call, prepare=prepare, shares=self.shares,
            )
        )  # fmt: skip
        comparison = self.record(chain.compare(inputs, options, case))
        for name, forward in self.forwards.items() if is_counted else ():
            add_calls(self.counts[name], forward.counts, self.counts_before[name])
        self.bisect_model(comparison, inputs, options)
        return chain, comparison.ok

    def bisect_model(self, comparison: Comparison, inputs: Inputs, options: RunOptions) -> None:
        """Find the pass at fault if the model itself is the block."""
        if "" in self.forwards and not comparison.ok and self.first is None:
            call = self.calls.get("", inputs)
            self.first = "", self.find_broken_pass(self.forwards[""], self.reference, call, options)

    def compare_later_calls(
        self, chain: CallChain, inputs: Inputs, options: RunOptions, case: str, token_counts: Sequence[int] | None
    ) -> None:
        """Compare calls that follow the given one in the same sandboxes."""
        if self.shares is not None and token_counts is None:
            self.not_covered.append("other token counts: the model is spread over a mesh")
            token_counts = ()
        plan = CallPlanner(
            self.reference, inputs, options, self.working, self.working.dtype, token_counts, self.is_costly
        ).plan_calls()
        self.not_covered += plan.reasons
        seconds_per_token = math.inf
        for number, call in enumerate(plan.calls, 2):
            tokens = call.num_tokens or 1
            if token_counts is None and tokens > MANY_TOKENS and MAX_SECONDS < seconds_per_token * tokens < math.inf:
                self.not_covered.append(f"{tokens} tokens: too slow by default; set token_counts=({tokens},)")
                continue
            before, started = self.count_original_calls(), time.process_time()
            comparison, call = self.compare_later_call(chain, call, options, f"{case}, call {number}")
            name = f"call {number}: {call}"
            seconds_per_token = min(seconds_per_token, (time.process_time() - started) / tokens)
            if comparison is None:
                continue
            self.record_coverage(name, self.count_original_calls() - before)
            if not comparison.ok and self.shares is None:  # with shares, ranks may disagree that it failed
                call_options = call.apply_to(options)
                self.bisect_model(comparison, call.inputs, call_options)
                self.compare_blocks(self.calls, call_options, f"{case}, {name}", routings=False)
                self.notes.append(f"{name}: {self.find_cause(chain.subject, call, call_options)}")
                return

    def compare_later_call(
        self, chain: CallChain, call: LaterCall, options: RunOptions, case: str
    ) -> tuple[Comparison | None, LaterCall]:
        """Compare one call, in its layout or else contiguous. The comparison is None if the original rejects both."""
        for trial in (call, dataclasses.replace(call, layout="")) if call.layout else (call,):
            self.calls.clear()
            try:
                named = f"{case}: {trial}"
                return self.record(chain.compare(trial.inputs, trial.apply_to(options), named, is_brief=True)), trial
            except InvalidInput as error:
                self.not_covered.append(summarize_error(error.__cause__ or error)[:160] + f" on {named}")
        return None, call

    def record_coverage(self, comparison: str, ran_original: Counter[str]) -> None:
        """Add a comparison to `covered`, with the blocks that ran their original forward."""
        names = ", ".join(name or "(model)" for name, count in ran_original.items() if count)
        self.covered.append(comparison + (f"; blocks that ran the original forward: {names}" if names else ""))

    def compare_compiled_copy(self, parts: Mapping[str, CompiledPart], sets: list[Inputs], options: RunOptions) -> None:
        """Compare a copy that torch compiles, as a whole, because its routing can be neither read nor imposed.

        If rounding decides which experts a token selects, a difference in the working precision proves nothing. Then
        compares in float64.
        """
        if not parts:
            return
        name = "compiled by " + ", ".join(sorted({part.name for part in parts.values()}))
        if self.shares is not None:
            self.not_covered.append(f"{name}: the model is spread over a mesh")
            return
        options = dataclasses.replace(options, has_second_backward=False)
        for working in (self.working, self.exact):
            subject = Subject(
                self.reference, self.compiled, working, self.exact, call_compiled=CompiledCopies(parts), is_opaque=True
            )
            chain, num_close, comparisons = CallChain(subject), 0, []
            precision = "" if working is self.working else ", in float64"
            for i, inputs in enumerate(sets):
                try:
                    comparisons.append(chain.compare(inputs, options, f"inputs {i}, {name}{precision}"))
                    num_close += chain.count_close_choices()
                except InvalidInput as error:
                    self.not_covered.append(f"{name}{precision}: {summarize_error(error)[:200]}")
            if all(comparison.ok for comparison in comparisons) or not num_close or working.dtype == torch.float64:
                break
            self.notes.append(
                f"{name}: differs, but rounding decides {num_close} choices of experts; compared in float64 instead"
            )
        for comparison in comparisons:
            self.record(comparison)
        self.covered += [f"{name}{precision}, as a whole"] if comparisons else []

    def count_original_calls(self) -> Counter[str]:
        """Return the number of calls of each block in the current sandbox that ran the original forward."""
        return Counter(
            {name: f.counts.original - self.counts_before[name].original for name, f in self.forwards.items()}
        )

    def find_cause(self, subject: Subject, call: LaterCall, options: RunOptions) -> str:
        """Find the property of a failed call that makes it fail, by leaving out one at a time."""

        def is_right(options: RunOptions) -> bool:
            return CallChain(dataclasses.replace(subject, prepare=_watch_nothing)).compare(call.inputs, options).ok

        if is_right(options):
            return "correct as the first call of fresh copies, so the calls before it left something behind"
        if options.layout and is_right(dataclasses.replace(options, layout="")):
            return f"correct for contiguous inputs, wrong for inputs with layout {options.layout!r}"
        return "also wrong as the first call of fresh copies, so the token count or the values matter"

    def iterate_block_inputs(self, name: str, call: Inputs, seed: int, routings: bool) -> Iterator[tuple[str, Inputs]]:
        """Yield inputs for a block, with a suffix for the case. Skips the given call of block "", the model."""
        for state, inputs in router_states(call, seed):
            if state == GIVEN and name:
                yield "", inputs
            elif state != GIVEN and routings:
                yield f", {state}", inputs

    def compare_block(self, name: str, call: Inputs, options: RunOptions, case: str, is_brief: bool = False) -> None:
        """Compare two blocks on the inputs of the reference's block, so that earlier errors do not count."""
        forwards: dict[str, BlockForward] = {}

        def prepare(box: nn.Module, role: str, scope: Scope) -> None:
            if role == "compiled":
                forwards.update(watch_compiled(box, Scope()))  # a single block needs no scope

        original, compiled = (model.get_submodule(name) for model in (self.reference, self.compiled))
        subject = Subject(
            original, compiled, self.working, self.exact, block=name,
            call_original=call_forward, call_compiled=call_forward, prepare=prepare, shares=find_shares(compiled),
        )  # fmt: skip
        comparison = self.record(CallChain(subject).compare(call, options, case, is_brief=is_brief))
        if not comparison.ok and self.first is None:
            self.first = name, self.find_broken_pass(forwards[""], original, call, options)

    def record(self, comparison: Comparison) -> Comparison:
        """Add a comparison to the results, and return it."""
        self.rows += comparison.rows
        self.routing += comparison.routing
        self.notes += comparison.notes
        return comparison

    def find_broken_pass(self, forward: BlockForward, original: nn.Module, call: Inputs, options: RunOptions) -> str:
        """Describe the first pass whose snapshot differs from the original block."""
        program = find_program(forward, call, options)
        if program is None:
            return ""
        snapshot = find_first_bad_snapshot(original, program, call, options, self.working, self.exact)
        if snapshot is None:
            return "none: the graphs after all passes are correct, so the block does not run the last one"
        return f"{snapshot.pass_name} ({snapshot.rule})" if snapshot.rule else snapshot.pass_name


def add_calls(total: Counter[str], after: CallCounts, before: CallCounts) -> None:
    """Add the calls between two counts to `total`."""
    total["rewritten"] += after.rewritten - before.rewritten
    total["original"] += after.original - before.original


def build_path_rows(counts: Mapping[str, Counter[str]], note_if_none: str) -> list[Row]:
    """Build rows that fail unless each block ran its rewritten code in every call.

    Args:
        counts: the calls of each block, by the code that they ran.
        note_if_none: the note of the failed row if no block is rewritten.
    """
    if not counts:
        return [Row("", "rewritten blocks", "path", ok=False, error=math.inf, note=note_if_none)]
    rows = []
    for name, calls in counts.items():
        note = f"{calls['rewritten']} calls ran rewritten, {calls['original']} ran the original"
        ok = calls["rewritten"] > 0 and not calls["original"]
        rows.append(Row(name, "rewritten path", "path", ok, float(calls["original"]), note=note))
    return rows


def _check_initial_state(compiled: nn.Module, reference: nn.Module, shares: Shares | None) -> list[Row]:
    """Return failed rows for differences before any run: names, weights, buffers or modes."""
    is_fx_graph = is_graph(compiled, reference)
    rows = _check_tensors(compiled, reference, shares, is_fx_graph)
    if not is_fx_graph:  # a graph keeps its mode of capture, whatever its flag says
        rows += _check_modes(compiled, reference)
    return sorted(rows, key=lambda row: row.name)


def _check_tensors(compiled: nn.Module, reference: nn.Module, shares: Shares | None, is_fx_graph: bool) -> list[Row]:
    """Return failed rows for parameters and buffers that one model lacks, or that differ."""
    rows = []
    stacked, other_names = (shares.stacked, shares.elsewhere) if shares else ({}, frozenset())
    for kind, list_tensors in (("grad_param", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers)):
        tensors, references = (dict(list_tensors(model, remove_duplicate=False)) for model in (compiled, reference))
        missing = tensors.keys() ^ references.keys() - other_names
        if is_fx_graph:  # a graph lacks unused parameters
            missing &= tensors.keys()
        for name in missing:
            note = f"only the {'compiled model' if name in tensors else 'reference'} has it"
            rows.append(Row("", name, kind, ok=False, error=math.inf, note=note))
        for name in tensors.keys() & references.keys():
            actual: Any = to_local(tensors[name])
            expected = stacked[name].select_local(references[name].detach()) if name in stacked else references[name]
            is_alike = actual.shape == expected.shape and actual.dtype == expected.dtype
            if actual is not expected and not (is_alike and torch.equal(actual, expected.to(actual.device))):
                rows.append(Row("", name, "state", ok=False, error=math.inf, note=OTHER_VALUES))
    return rows


def _check_modes(compiled: nn.Module, reference: nn.Module) -> list[Row]:
    """Return failed rows for modules in another mode than in the reference, without those inside of such a module."""
    rows, references = [], dict(reference.named_modules())
    differing = {
        name: module
        for name, module in compiled.named_modules()
        if name in references and references[name].training != module.training
    }
    for name, module in differing.items():
        if name and name.rpartition(".")[0] in differing:
            continue
        note = f"compiled is in {_format_mode(module)} mode, the reference in {_format_mode(references[name])} mode"
        rows.append(Row("", f"{name or 'model'}.training", "state", ok=False, error=1.0, note=note))
    return rows


def is_graph(compiled: nn.Module, reference: nn.Module) -> bool:
    """Return whether the compiled model is an FX graph of the reference."""
    return isinstance(compiled, fx.GraphModule) and not isinstance(reference, fx.GraphModule)


def _watch_nothing(box: nn.Module, role: str, scope: Scope) -> None:
    pass


def _format_mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def is_region(block: nn.Module) -> bool:
    """Return whether a block is a region of a flat graph: no module of the original, and called with its weights."""
    return getattr(type(block), "is_region", False)


def copy_with_original_regions(compiled: nn.Module) -> nn.Module:
    """Return a copy of a graph that shares its weights and whose regions run their original code."""
    shared_tensors = (*compiled.parameters(), *compiled.buffers())
    original_copy = copy.deepcopy(compiled, {id(t): t for t in shared_tensors})
    for name in find_rewritten_blocks(original_copy):
        block = original_copy.get_submodule(name)
        if is_region(block):
            vars(block).pop("forward")
    return original_copy
