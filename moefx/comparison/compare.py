"""Compare the original, its float64 truth and the compiled program on the same inputs, under the original's routing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..capture.environment.code_locations import is_internal_error
from ..errors import InvalidInput, summarize_error
from .casts import NoCopies
from .decisions import largest_magnitude
from .numeric_precision import Perturbation, disable_autocast, find_common_dtype, find_working_precision
from .policy import Row, Tolerance, tolerance
from .result_rows import build_rows
from .routing_tape import AlignMode, CannotReplay, RecordingMode, ReplayMode, RoutingRow, Scope, Tape
from .sandbox import (
    Call,
    Casts,
    Inputs,
    Parameters,
    Run,
    RunOptions,
    call_module,
    execute,
    make_sandbox,
)
from .work_count import WorkCount

if TYPE_CHECKING:
    from .rank_shares import Shares

MAX_NOISE_RUNS = 8
MAX_NOISE_RATIO = 8.0  # an error of this many bounds cannot be rounding: stop sampling the noise
NO_TRUTH = "no float64 truth"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model or a block to verify.

    Attributes:
        original, compiled: the modules; only sandboxes run. `compiled` is the original too if
            `call_compiled` runs another program.
        working, exact: casts of parameters to the precision under test, and to float64 for the truth. If `exact` is
            None, the original in its own precision is the truth; see `policy` for the bound.
        promote: run everything in float64, whatever dtypes the code or a captured graph names. Compares the algebra
            only.
        slack: see `tolerance`.
        block: name of the block, for the rows.
        call_original, call_compiled: functions that call a sandbox; by default `module(*args, **kwargs)`.
        is_opaque: the compiled program bypasses torch's dispatcher, so its routing cannot be recorded.
        prepare: called on each sandbox before it runs, with "original", "truth", "compiled" or "noise".
        shares: this rank's part of the results, under expert parallelism.
    """

    original: nn.Module
    compiled: nn.Module
    working: Casts
    exact: Casts | None
    promote: bool = False
    slack: float = 1.0
    block: str = ""
    call_original: Call = call_module
    call_compiled: Call = call_module
    prepare: Callable[[nn.Module, str, Scope], None] = lambda module, which, scope: None
    shares: Shares | None = None
    is_opaque: bool = False


@dataclasses.dataclass
class Comparison:
    """The rows of one call. `notes` list deviations from the rule."""

    rows: list[Row]
    routing: list[RoutingRow] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def compare(subject: Subject, inputs: Inputs, options: RunOptions, case: str = "") -> Comparison:
    """Apply the rule (see `policy`) to all results of one call. An error of the compiled program is a failed row.

    Raises:
        InvalidInput: the original does not run.
    """
    return CallChain(subject).compare(inputs, options, case)


@dataclasses.dataclass
class _Call:
    """One call of a chain, with the tape and the cotangents that its runs share."""

    inputs: Inputs
    options: RunOptions
    case: str
    tol: Tolerance
    work: WorkCount | None = None
    tape: Tape = dataclasses.field(default_factory=Tape)
    cotangents: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class CallChain:
    """Compares consecutive calls in the same sandboxes, to expose state that a program keeps between calls.

    Attributes:
        calls: the calls so far, the current one last.
    """

    def __init__(self, subject: Subject):
        self.subject, self.scope, self.dtype = subject, Scope(), subject.working.dtype
        self.calls: list[_Call] = []
        self._boxes: dict[str, tuple[nn.Module, int]] = {}  # sandboxes with their numbers of calls
        self._original_error: Exception | None = None  # of the last run of the original that failed
        self._align: AlignMode | None = None

    @property
    def call(self) -> _Call:
        return self.calls[-1]

    def compare(
        self,
        inputs: Inputs,
        options: RunOptions,
        case: str = "",
        *,
        is_brief: bool = False,
        work: WorkCount | None = None,
    ) -> Comparison:
        """Compare the next call.

        Args:
            work: counts the ops of original and compiled, if given.
            is_brief: skip the float64 truth if original and compiled differ by no more than the rule allows an exact
                program. This implies the rule.

        Raises:
            InvalidInput: the original does not run. The chain can go on with other calls.
        """
        with torch.inference_mode(False):  # inference tensors of a sandbox could not be updated
            tol = tolerance(*find_working_precision(self.subject.original, inputs, self.dtype), self.subject.slack)
            self.calls.append(_Call(inputs, options, case, tol, work))
            notes: list[str] = []
            original = self._run_original_or_raise(notes)
            self.call.cotangents = original.cotangents
            original = self._select_shares(original, self.dtype)
            if is_brief and not tol.is_half:  # in 16 bits correct results rarely agree closely enough
                compiled = self._run_compiled()
                if isinstance(compiled, Run):
                    rows = self._build_rows(original, compiled, original)
                    if self._find_worst_ratio(rows) <= 1:
                        return Comparison(rows, self.routing, notes)
                # run it again after the truth has measured the rounding of the routers
                self._boxes.pop("compiled", None)
            return self._apply_rule(original, notes)

    def is_original_error(self, error: Exception) -> bool:
        """Return whether `compare` raised an error because the original's code or ops failed, and by no bug of ours."""
        failed = self._original_error
        return failed is not None and failed in (error, error.__cause__) and not is_internal_error(failed)

    def _apply_rule(self, original: Run, notes: list[str]) -> Comparison:
        """Judge the compiled run by the float64 truth, and by noise runs while rows fail."""
        truth = self._run_truth(original)
        if isinstance(truth, str):
            notes.append(
                f"{self.subject.block or 'the model'}: {NO_TRUTH} ({truth}); "
                "compared with the original in its own precision and with its own seed"
            )
            truth = original
        compiled = self._run_compiled()
        if isinstance(compiled, Row):
            return Comparison([compiled], self.routing, notes)
        rows = self._build_rows(original, compiled, truth)
        noise: list[Run] = []
        while (ratio := self._find_worst_ratio(rows)) > 1 and len(noise) < MAX_NOISE_RUNS:
            if noise and ratio > MAX_NOISE_RATIO:
                break
            run = self._run_noise(seed=len(noise))
            if self._is_true_on_any_rank(run is None):
                break
            assert run is not None
            noise.append(self._select_shares(run, self.dtype))
            rows = self._build_rows(original, compiled, truth, noise)
        return Comparison(rows, self.routing, notes)

    @property
    def routing(self) -> list[RoutingRow]:
        return self._align.rows if self._align is not None else []

    def count_close_choices(self) -> int:
        """Return the number of tokens in the current call whose selection of experts may depend on rounding."""
        return sum(
            d.count_close(2 * (self.call.tol.factor * d.noise + self.call.tol.floor * largest_magnitude(d.scores)))
            for several in self.call.tape.decisions.values()
            for d in several
            if d.scores is not None
        )

    def _run_original_or_raise(self, notes: list[str]) -> Run:
        """Run the original. If it fails on any rank, raise on all of them, and drop the call from the chain.

        Raises:
            InvalidInput: it raises an error that inputs may cause. Other errors pass through.
        """
        failed, original = None, None
        try:
            original = self._run_original(notes)
        except Exception as error:
            failed = error
        if self._is_true_on_any_rank(failed is not None):
            case = self.calls.pop().case
            if failed is not None and not isinstance(failed, (RuntimeError, TypeError, ValueError, IndexError)):
                raise failed
            cause = f": {type(failed).__name__}: {failed}" if failed else ", on another rank"
            raise InvalidInput(f"the reference does not run on {case or 'these inputs'}{cause}") from failed
        assert original is not None
        return original

    def _run_original(self, notes: list[str]) -> Run:
        """Run the original in its own precision, without the second backward if it supports none."""

        def record(call: _Call) -> RecordingMode:
            return RecordingMode(call.tape, self.scope, promote=self.subject.promote, work=call.work)

        try:
            return self._run_sandbox("original", record)
        except Exception as error:
            if not self.call.options.has_second_backward:
                raise
            refused = error
        self.call.options = dataclasses.replace(self.call.options, has_second_backward=False)
        self.call.tape = Tape()
        run = self._run_sandbox("original", record)
        notes.append(
            f"{self.subject.block or 'the model'}: no second backward compared, the original raises "
            f"{type(refused).__name__}: {summarize_error(refused)[:160]}"
        )
        return run

    def _run_compiled(self) -> Run | Row:
        """Run the compiled program under the original's routing. Returns a failed row if it raises."""

        def align(call: _Call) -> AlignMode | None:
            self._align = None
            if self.subject.is_opaque:
                return None
            promote = self.subject.promote
            self._align = AlignMode(call.tape, self.scope, call.tol, call.case, promote=promote, work=call.work)
            return self._align

        error, compiled, shares = None, None, self.subject.shares
        try:
            compiled = self._run_sandbox("compiled", align)
        except Exception as raised:
            error = raised
        if self._is_true_on_any_rank(error is not None):
            note = f"raised {type(error).__name__}: {error}" if error else "raised an error on another rank"
            row = Row(self.subject.block, "forward and backward", "output", ok=False, case=self.call.case)
            return dataclasses.replace(row, error=math.inf, note=note)
        assert compiled is not None
        return compiled if shares is None else shares.localize_compiled(compiled)

    def _run_truth(self, original: Run) -> Run | str:
        """Run the original in float64, or return the reason why it does not run."""
        if self.subject.exact is None or self.subject.promote:
            return original
        run, why = None, "it does not run on another rank"
        try:
            with disable_autocast():  # autocast would round the truth
                run = self._run_sandbox("truth", self._replay_promoted, self.subject.exact)
        except Exception as error:  # the user's code: no float64 kernel, a fixed dtype, out of memory, ...
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if self._is_true_on_any_rank(run is None):
            return why
        assert run is not None
        return self._select_shares(run, torch.float64)

    def _replay_promoted(self, call: _Call) -> ReplayMode:
        return ReplayMode(call.tape, self.scope, promote=True)

    def _is_true_on_any_rank(self, value: bool) -> bool:
        """Decide together with all ranks if the decision changes the number of collectives."""
        return value if self.subject.shares is None else self.subject.shares.is_true_on_any_rank(value)

    def _find_worst_ratio(self, rows: list[Row]) -> float:
        ratio = max((row.ratio for row in rows), default=0.0)
        return ratio if self.subject.shares is None else self.subject.shares.max_over_ranks(ratio)

    def _run_noise(self, seed: int) -> Run | None:
        """Run the original on weights and inputs perturbed by the allowed rounding; None if it cannot be replayed."""
        moved = Perturbation(self.subject.working, 2 * self.call.tol.floor, seed)
        self._boxes.pop("noise", None)
        try:
            return self._run_sandbox(
                "noise",
                lambda call: ReplayMode(call.tape, self.scope, promote=self.subject.promote),
                moved,
                moved.perturb,
            )
        except CannotReplay:
            return None

    def _select_shares(self, run: Run, dtype: torch.dtype | None) -> Run:
        """Reduce the reference's results to this rank's part."""
        shares = self.subject.shares
        return run if shares is None else shares.reduce_reference(run, self.subject.original, dtype)

    def _run_sandbox(
        self,
        which: str,
        make_mode: Callable[[_Call], Any],
        parameters: Parameters | None = None,
        change: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> Run:
        """Run the current call in the sandbox of the earlier ones. A new sandbox first runs the earlier calls.

        Args:
            which: "original", "truth", "compiled" or "noise".
            make_mode: makes the dispatch mode of a call.
            parameters: the cast of the parameters in a new sandbox; None: to the precision under test.
            change: applied to floating-point inputs.
        """
        dtype = torch.float64 if which == "truth" else self.dtype
        is_compiled = which == "compiled"
        if which in self._boxes:
            box, num_done = self._boxes.pop(which)  # a sandbox whose call raises is not reused
        else:
            module = self.subject.compiled if is_compiled else self.subject.original
            box, num_done = make_sandbox(module, parameters or self.subject.working, dtype), 0
            self.subject.prepare(box, which, self.scope)
        run = None
        for call in self.calls[num_done:]:
            mode = make_mode(call)
            with contextlib.ExitStack() as stack:
                if mode is not None and mode.promote:
                    stack.enter_context(NoCopies(find_common_dtype(self.subject.original, call.inputs)))
                try:
                    run = execute(
                        box, call.inputs, call.options, mode=mode, cotangents=call.cotangents,
                        call=self.subject.call_compiled if is_compiled else self.subject.call_original,
                        cast=lambda t: change(t.to(dtype) if dtype else t),
                    )  # fmt: skip
                except Exception as error:
                    self._original_error = self._original_error if is_compiled else error
                    raise
        assert run is not None
        self._boxes[which] = box, len(self.calls)
        return run

    def _build_rows(self, original: Run, compiled: Run, truth: Run, noise: Sequence[Run] = ()) -> list[Row]:
        named = Row(self.subject.block, "", "", ok=False, case=self.call.case)
        is_shared = self.subject.shares is not None
        return build_rows(named, self.call.tol, original, compiled, truth, noise, is_shared=is_shared)
