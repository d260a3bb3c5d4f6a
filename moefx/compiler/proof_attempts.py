"""Prove a block and rewrite it, with one interpretation of its arguments, sizes and program after the other.

A refusal names the cause in the program, and keeps the trace of its proof.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import nn

from ..capture.argument_interpretations import interpret_arguments, interpret_batch_of_one
from ..capture.block_arguments import Arguments
from ..capture.code_locations import is_internal_error, is_raised_by_program, suppress_program_errors
from ..capture.size_collisions import ModelNumbers
from ..capture.size_guards import SizeGuard
from ..errors import CaptureError, Cause, MoefxError, Refused
from ..inspection.proof_trace import CutAttempt, ProofTrace
from ..matching.drop_rules import explain_drops
from ..matching.match_result import Match
from ..matching.proof_state import ProofState
from ..matching.prove import prove
from ..matching.refusal_causes import explain_branch, explain_limit, explain_refusal
from ..passes.rewrite import Placeholders, RewriteResult, rewrite

# Refusals that report where the lift stopped: the cause may be elsewhere in the program.
_STOPPED_AT_ROWS = {Cause.UNEXPLAINED_INDEX, Cause.FOREIGN_ROW, Cause.SINGLE_ELEMENTS}
_STOPPED = _STOPPED_AT_ROWS | {Cause.REPEATED_CHOICE, Cause.UNEXPLAINED_DROPS, Cause.NOT_ROUTED}


def prove_and_rewrite(
    block: nn.Module, args: tuple, kwargs: dict[str, Any], names: Placeholders
) -> tuple[Match, RewriteResult]:
    """Prove and rewrite with the most likely interpretation of the arguments. If the block does not run at other sizes
    with that, try the other interpretations. If it is refused, try first axes of 1 as the batch axis of one sequence.

    Raises:
        Refused: no interpretation was proven; the first refusal is raised, else the error of the first interpretation.
    """
    first: Exception | None = None
    refusal: Refused | None = None
    for arguments in interpret_arguments(args, kwargs, ModelNumbers.of(block)):
        try:
            return _prove_arguments(block, arguments, names)
        except (Refused, CaptureError) as error:
            if first is None:
                if as_batch := interpret_batch_of_one(arguments, args, kwargs):
                    with suppress_program_errors(MoefxError):
                        return _prove_arguments(block, as_batch, names)
                raise
            if isinstance(error, Refused) and error.cause is Cause.CONVOLUTIONS:
                raise  # fixing the sizes of images cannot help
            if isinstance(error, Refused) and (refusal is None or error.cause is Cause.MIXED_POSITIONS):
                refusal = _explain_images(error) if arguments.feature < len(arguments.lead) else error
        except Exception as error:  # the user's code at unsupported sizes
            if is_internal_error(error):
                raise
            first = first or error
    assert first is not None
    raise refusal or first from None


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


def _prove_arguments(block: nn.Module, arguments: Arguments, names: Placeholders) -> tuple[Match, RewriteResult]:
    """Prove with the most likely reading of the program. If that is refused, try the other readings, then other
    sizes."""
    state = ProofState(block, arguments, _guess_num_experts(block))
    try:
        return _prove_sizes(state, names)
    except Refused as refusal:
        for options in state.other_options():
            with contextlib.suppress(Refused):
                return _prove_sizes(ProofState(block, arguments, state.hint, options=options), names)
        raise refusal from None


def _explain_refusal(refusal: Refused, state: ProofState) -> Refused:
    """Return a refusal that names the cause in the program, if the match only reports where it stopped."""
    if state.first is None:
        return refusal
    if of_branch := explain_branch(state):
        return of_branch
    if refusal.cause is Cause.NOT_TOGETHER:
        return explain_limit(state.first) or refusal
    if refusal.cause not in _STOPPED:
        return refusal
    sizes, fixed = state.first.sizes.dims, state.arguments.fixed
    series = [dim for dim in state.arguments.lead[1:] if dim in sizes or dim in fixed]
    positions = {**sizes, **fixed}[series[-1]] if series else None
    return explain_refusal(state.first, positions) or refusal


def _prove_sizes(state: ProofState, names: Placeholders) -> tuple[Match, RewriteResult]:
    """Prove for all sizes. If that fails, prove for the sizes that take the example's branches, and guard on them.

    Raises:
        Refused: no proof holds for the example's sizes.
    """
    arguments = state.arguments

    def prove_side(side: tuple[SizeGuard, ...]) -> tuple[Match, RewriteResult]:
        return _rewrite_or_explain(ProofState(state.block, arguments, state.hint, side, state.options), names)

    try:
        match, rewritten = _rewrite_or_explain(state, names)
    except Exception as error:  # also the user's own, such as an assertion on sizes
        side = state.side_guards()
        if not side or not (isinstance(error, Refused) or is_raised_by_program(error)):
            raise
        try:
            return _check_example(prove_side(side))
        except Refused as side_refusal:
            # the captures of the first proof may have taken branches that the example does not
            is_telling = side_refusal.cause not in (Cause.NOT_ROUTED, Cause.NO_SIZES)
            raise (side_refusal if is_telling or not isinstance(error, Refused) else error) from None
        except Exception as other_error:
            raise (other_error if is_internal_error(other_error) else error) from None
    failed = _failed_guards(match)
    if not failed:
        return match, rewritten
    side = tuple(dataclasses.replace(g, value=not g.value) for g in failed)
    with contextlib.suppress(Refused):
        return _check_example(prove_side(side))
    with contextlib.suppress(Refused):
        options = dataclasses.replace(state.options, cut_preference="")
        again = ProofState(state.block, arguments.at_other_sizes(), state.hint, options=options)
        return _check_example(_rewrite_or_explain(again, names))
    return _check_example((match, rewritten))


def _failed_guards(match: Match) -> list[SizeGuard]:
    """The size guards of a match that its own example fails."""
    return [g for g in match.guards if not g.holds(match.arguments.sizes)]


def _check_example(found: tuple[Match, RewriteResult]) -> tuple[Match, RewriteResult]:
    """Return a proof if it holds for the example's own sizes.

    Raises:
        Refused: it does not, so every call like the example's would run the original.
    """
    match = found[0]
    failed = _failed_guards(match)
    if failed:

        def text(sizes: dict[str, int]) -> str:
            return ", ".join(f"{dim} = {n}" for dim, n in sizes.items())

        own, guards = text(match.arguments.sizes), match.guards
        others = [f", such as {text(sizes)}" for sizes in match.sizes if all(g.holds(sizes) for g in guards)]
        refusal = Refused(
            f"the proof does not hold for the example's own sizes ({own}): it requires {failed[0]}",
            source=failed[0].source or str(match.evidence[0].cut.meta["source"]),
            remedy=f"pass example_inputs of sizes for which it holds{(*others, '')[0]}; "
            "calls like this one then run the original",
        )
        refusal.trace = ProofTrace(match.probe_runs)
        raise refusal
    return found


def _rewrite_or_explain(state: ProofState, names: Placeholders) -> tuple[Match, RewriteResult]:
    """As `_match_and_rewrite`, with the cause of a refusal."""
    try:
        return _match_and_rewrite(state, names)
    except Refused as refusal:
        refusal.trace = ProofTrace(state.probe_runs, _find_failed_cuts(refusal))
        explained = _explain_refusal(refusal, state)
        explained.trace = refusal.trace
        raise explained from refusal


def _find_failed_cuts(refusal: BaseException | None) -> tuple[CutAttempt, ...]:
    """Return the cuts that a lifter tried, if a refusal stems from a capture without a canonical form."""
    while refusal is not None:
        if isinstance(refusal, Refused) and refusal.trace is not None:
            return refusal.trace.cuts
        refusal = refusal.__cause__
    return ()


def _match_and_rewrite(state: ProofState, names: Placeholders) -> tuple[Match, RewriteResult]:
    """Capture and match, explain dropped slots, and rewrite into the dialect."""
    # 1. capture and match: captures under different routings agree on one canonical form
    match = prove(state)
    # 2. drops: the slots that a rule or the program's own mask removes
    explain_drops(match)
    # 3. the dialect, with the user's own modules around it
    return match, rewrite(match, names)


def _guess_num_experts(block: nn.Module) -> int:
    """Guess an upper bound on the number of experts. It determines the token count of captures."""
    stacks = [p.shape[0] for p in block.parameters() if p.dim() >= 3]
    lists = [len(m) for m in block.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    return min(1024, max([8, *stacks, *lists]))
