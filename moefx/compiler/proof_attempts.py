"""Prove a block and rewrite it: the attempts, their order, and the error that is raised if all fail.

An attempt is one interpretation of the arguments, the program and the sizes. A proof that does not hold for the
example's own sizes counts as a refusal. The attempts are in stages, from the innermost to the outermost:

| stage | first attempt | failure of the first | what follows |
|---|---|---|---|
| sizes | all sizes | refused, or the program raises | the example's outcomes of size comparisons with both |
| sizes | all sizes | does not hold for the example | restrictions to the other outcomes of failed guards; other sizes |
| options | the default options | refused | each of `list_other_options` |
| arguments | the likeliest | refused, `CaptureError` | first axes of 1 as a batch of one |
| arguments | the likeliest | any other error of the program | the next interpretations, until convolutions refuse one |

If the first attempt fails in another way, the stage ends. A bug of moefx ends all stages. If all attempts of a stage
fail, its error is:

| stage | error |
|---|---|
| sizes, restrictions | the refusal under them, unless its cause is `NOT_ROUTED` or `NO_SIZES` |
| sizes, does not hold for the example | a later error that is no refusal, which also ends the stage |
| options | a later error that is no refusal, which also ends the stage |
| arguments, a batch of one | none |
| arguments, the next interpretations | the first refusal, or a later one for mixed positions or convolutions |

If the table names no error, the error is that of the first attempt. A refusal under restrictions with the cause
`NOT_ROUTED` or `NO_SIZES` replaces a first error that is no refusal. A refusal names the cause in the program, and
keeps the trace of its proof.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator
from typing import Any

from torch import nn

from ..capture.arguments.argument_interpretations import interpret_arguments, interpret_batch_of_one
from ..capture.arguments.block_arguments import Arguments
from ..capture.arguments.size_collisions import ModelNumbers
from ..capture.environment.code_locations import is_internal_error, is_raised_by_program
from ..capture.sizes.size_guards import SizeGuard
from ..errors import CaptureError, Cause, Refused, summarize_error
from ..inspection.proof_trace import AttemptRun, CutAttempt, ProofTrace, locate_raises
from ..matching.lift.lift_options import LiftOptions
from ..matching.lift.padded_rows import find_padding_lines, has_rows_of_padding
from ..matching.proof.proof_state import ProofState
from ..matching.prove import prove
from ..matching.refusal_causes import explain_branch, explain_limit, explain_refusal, explain_table
from ..matching.results.drop_rules import explain_drops
from ..matching.results.match_result import Match
from ..matching.results.size_samples import SizeSamples
from ..passes.rewrite import DialectGraph, Placeholders, rewrite

# Refusals that report where the lift stopped: the cause may be elsewhere in the program.
_STOPPED_AT_ROWS = {Cause.UNEXPLAINED_INDEX, Cause.FOREIGN_ROW, Cause.SINGLE_ELEMENTS}
_STOPPED = _STOPPED_AT_ROWS | {Cause.REPEATED_CHOICE, Cause.UNEXPLAINED_DROPS, Cause.NOT_ROUTED}


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One interpretation of a block.

    Attributes:
        name: what differs from the first attempt, for the trace.
        arguments: which axes are token axes.
        options: how to read the program.
        size_restrictions: comparisons of sizes whose outcome the attempt fixes in all captures.
    """

    name: str
    arguments: Arguments
    options: LiftOptions = dataclasses.field(default_factory=LiftOptions)
    size_restrictions: tuple[SizeGuard, ...] = ()

    def vary(self, name: str, **changes: Any) -> Attempt:
        return dataclasses.replace(self, name=f"{self.name}, {name}", **changes)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of an attempt, or of a stage of attempts.

    Attributes:
        proof: the proof of the first attempt.
        failed_guards: the guards of a proof that its example fails, if there is a proof.
    """

    error: Exception
    proof: ProofState
    failed_guards: tuple[SizeGuard, ...] = ()

    @property
    def refusal(self) -> Refused | None:
        """The error, if it is a refusal."""
        return self.error if isinstance(self.error, Refused) else None


Attempts = Generator[Attempt, Failure, Failure]  # yields attempts, is sent their failures, returns that of the stage


def prove_and_rewrite(
    block: nn.Module, args: tuple, kwargs: dict[str, Any], names: Placeholders, log: list[AttemptRun]
) -> tuple[Match, DialectGraph]:
    """Run attempts until one succeeds, and return its proof and its rewrite.

    Args:
        log: receives each attempt.

    Raises:
        Refused: all attempts failed. Errors of the program pass through if no attempt was refused.
    """
    attempts = list_attempts(args, kwargs, ModelNumbers.of(block), "stand-ins for objects, " * bool(names.objects))
    max_experts, failure, attempt = _guess_num_experts(block), None, next(attempts)
    while failure is None:
        start = time.perf_counter()
        result = run_attempt(block, attempt, max_experts, names)
        reason = _summarize(result.error) if isinstance(result, Failure) else ""
        log.append(AttemptRun(attempt.name, (time.perf_counter() - start) * 1e3, reason))
        if not isinstance(result, Failure):
            return result
        if is_internal_error(result.error):  # no other attempt may hide it
            raise result.error from None
        try:
            attempt = attempts.send(result)
        except StopIteration as end:
            failure = end.value
    raise failure.error from None


def _summarize(error: Exception) -> str:
    return error.reason if isinstance(error, Refused) else summarize_error(error)


# ------------------------------------------------------------------ which attempts follow a failed one
def list_attempts(args: tuple, kwargs: dict[str, Any], numbers: ModelNumbers, prefix: str = "") -> Attempts:
    """List the attempts for a call: the most likely interpretation of its arguments, then the others."""
    program_failure: Failure | None = None
    best_failure: Failure | None = None
    for arguments in interpret_arguments(args, kwargs, numbers):
        failure = yield from _vary_options(Attempt(f"{prefix}{arguments}", arguments))
        refusal = failure.refusal
        if refusal is None and not isinstance(failure.error, CaptureError):  # the user's code at unsupported sizes
            program_failure = program_failure or failure
        elif program_failure is None:
            if as_batch := interpret_batch_of_one(arguments, args, kwargs):
                yield from _vary_options(Attempt(f"{prefix}{as_batch}", as_batch))
            return failure
        elif refusal and refusal.cause is Cause.CONVOLUTIONS:
            return failure
        elif refusal and (best_failure is None or refusal.cause is Cause.MIXED_POSITIONS):
            is_image = arguments.feature < len(arguments.token_dims)
            best_failure = dataclasses.replace(failure, error=_explain_images(refusal)) if is_image else failure
    assert program_failure is not None
    return best_failure or program_failure


def _vary_options(attempt: Attempt) -> Attempts:
    """List the attempts with some arguments: the most likely interpretation of the program, then the others."""
    first = yield from _vary_sizes(attempt)
    for name, options in list_other_options(first.proof) if first.refusal else ():
        other = yield from _vary_sizes(attempt.vary(name, options=options))
        if other.refusal is None:
            return other
    return first


def list_other_options(proof: ProofState) -> Iterator[tuple[str, LiftOptions]]:
    """List other interpretations of the program with their names, to try if that of a proof is refused."""
    if proof.evidence.compares_floats and not proof.options.keeps_comparisons:
        yield "comparisons as parts of activations", LiftOptions(keeps_comparisons=True)
    if proof.evidence.drops_slots:
        yield "the routed sum after all writes to it", LiftOptions(cut_preference="last_write")
        yield "the routed sum at any last node", LiftOptions(cut_preference="last_node")
    is_masked = any(t.example is not None and not t.is_single for t in proof.arguments.tensors)
    capture, width = proof.evidence.diagnosed_capture, proof.arguments.width
    if capture is None or not (is_masked or has_rows_of_padding(capture, width)):
        return
    if lines := find_padding_lines(proof.block, capture, width):
        yield "opaque lines that pad hidden states", LiftOptions(opaque_lines=lines)


def _vary_sizes(attempt: Attempt) -> Attempts:
    """List the attempts with some arguments and options: for all sizes, then for those that are like the example's."""
    first = yield attempt
    if first.failed_guards:
        restrictions = tuple(dataclasses.replace(g, value=not g.value) for g in first.failed_guards)
        options = dataclasses.replace(attempt.options, cut_preference="first")
        for other in (
            attempt.vary(_name_restrictions(restrictions), size_restrictions=restrictions),
            attempt.vary("other sizes", arguments=attempt.arguments.at_other_sizes(), options=options),
        ):
            failure = yield other
            if failure.refusal is None:
                return failure
        return first
    restrictions = first.proof.evidence.list_comparisons_unlike(first.proof.arguments.sizes)
    # an assertion on sizes is raised by the program
    if not restrictions or not (first.refusal or is_raised_by_program(first.error)):
        return first
    refusal = (yield attempt.vary(_name_restrictions(restrictions), size_restrictions=restrictions)).refusal
    # Without restrictions, captures may have taken branches that the example does not take.
    explains_more = refusal and (refusal.cause not in (Cause.NOT_ROUTED, Cause.NO_SIZES) or not first.refusal)
    return dataclasses.replace(first, error=refusal) if refusal and explains_more else first


def _name_restrictions(restrictions: tuple[SizeGuard, ...]) -> str:
    return " and ".join(map(str, restrictions))


# ------------------------------------------------------------------ one attempt
def run_attempt(
    block: nn.Module, attempt: Attempt, max_experts: int, names: Placeholders
) -> tuple[Match, DialectGraph] | Failure:
    """Capture and match, explain dropped slots, and rewrite into the dialect.

    Args:
        max_experts: an upper bound on the number of experts.
    """
    proof = ProofState(block, attempt.arguments, max_experts, attempt.size_restrictions, attempt.options)
    try:
        try:
            match = prove(proof)  # steps 2 and 3 of `COMPILE_STEPS`: capture, match
            samples = SizeSamples(match, proof)
            match = explain_drops(match, samples)
            match, result = rewrite(match, samples, names)  # step 4
            if match.excludes_calls_without_tokens:
                match = dataclasses.replace(match, is_empty_without_tokens=samples.is_empty_without_tokens())
        except Refused as refusal:
            trace = ProofTrace(proof.probe_runs, _find_failed_cuts(refusal), raised_at=locate_raises(refusal))
            explained = _explain_refusal(refusal, proof)
            explained.trace = trace
            return Failure(explained, proof)
        failed_guards = tuple(g for g in match.guards if not g.holds(match.arguments.sizes))
        return (
            Failure(_refuse_example(match, failed_guards[0]), proof, failed_guards)
            if failed_guards
            else (match, result)
        )
    except Exception as error:  # also the user's own, such as an assertion on sizes
        return Failure(error, proof)


def _refuse_example(match: Match, guard: SizeGuard) -> Refused:
    """Return the refusal of a proof that does not hold for the example's own sizes: calls like it would run the
    original."""

    def format_sizes(sizes: dict[str, int]) -> str:
        return ", ".join(f"{dim} = {n}" for dim, n in sizes.items())

    example_sizes, guards = format_sizes(match.arguments.sizes), match.guards
    examples = [f", such as {format_sizes(sizes)}" for sizes in match.sizes if all(g.holds(sizes) for g in guards)]
    refusal = Refused(
        f"the proof does not hold for the example's own sizes ({example_sizes}): it requires {guard}",
        source=guard.source or str(match.forms[0].cut.meta["source"]),
        remedy=f"pass example_inputs of sizes for which it holds{(*examples, '')[0]}; "
        "calls like this one then run the original",
    )
    refusal.trace = ProofTrace(match.probe_runs)
    return refusal


def _explain_refusal(refusal: Refused, proof: ProofState) -> Refused:
    """Return a refusal that names the cause in the program, if the match only reports where it stopped."""
    if (capture := proof.evidence.diagnosed_capture) is None:
        return refusal
    if of_buffer := explain_branch(proof) or explain_table(proof):
        return of_buffer
    if refusal.cause is Cause.NOT_TOGETHER:
        return explain_limit(capture) or refusal
    if refusal.cause not in _STOPPED:
        return refusal
    sizes, fixed_sizes = capture.sizes.dims, proof.arguments.fixed
    series = [dim for dim in proof.arguments.token_dims[1:] if dim in sizes or dim in fixed_sizes]
    positions = {**sizes, **fixed_sizes}[series[-1]] if series else None
    return explain_refusal(capture, positions) or refusal


def _explain_images(refusal: Refused) -> Refused:
    """Explain the refusal of a block whose features are not the last axis, if the refusal names no specific reason."""
    if refusal.cause not in _STOPPED_AT_ROWS:
        return refusal
    explained = Refused(
        "experts receive whole images or series with channels in the second axis, but only experts on rows can be "
        "matched",
        source=refusal.source,
        remedy="make rows of the pixels, x.movedim(1, -1).flatten(0, -2), and give each expert its rows: to nn.Conv1d "
        "as rows[t][:, :, None], to nn.Conv2d as rows[t][:, :, None, None]",
    )
    explained.trace = refusal.trace
    return explained


def _find_failed_cuts(refusal: BaseException | None) -> tuple[CutAttempt, ...]:
    """Return the cuts that a lifter tried, if a refusal stems from a capture without a canonical form."""
    while refusal is not None:
        if isinstance(refusal, Refused) and refusal.trace is not None:
            return refusal.trace.cuts
        refusal = refusal.__cause__
    return ()


def _guess_num_experts(block: nn.Module) -> int:
    """Guess an upper bound on the number of experts. It determines the token count of captures."""
    stacks = [p.shape[0] for p in block.parameters() if p.dim() >= 3]
    lists = [len(m) for m in block.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    return min(1024, max([8, *stacks, *lists]))
