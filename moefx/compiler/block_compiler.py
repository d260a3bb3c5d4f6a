"""Compile one block: from the user's module to its rewritten graph.

| function | steps of `compile_steps.COMPILE_STEPS` |
|---|---|
| `prove_and_rewrite`, of `proof_attempts` | capture, match, rewrite, for each attempt |
| `rewrite_block` | these, then the passes before the numeric check |
| `check_numerically`, of `numeric_check` | numeric check |
| `finish_block` | the passes after the numeric check |
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from .._plan import Plan
from ..capture.captured_graph import build_captured_graph
from ..capture.search.skipped_calls import SkippedCall, SkipPlan, patch_skipped_calls
from ..capture.state.identity_tests import refuse_identity_tests
from ..capture.state.opaque_state import refuse_opaque_state
from ..capture.state.outside_state import ARGUMENT
from ..capture.state.side_effects import silence_hooks
from ..errors import Cause, Refused
from ..inspection.history import History
from ..inspection.proof_trace import AttemptRun
from ..ir.argument_binding import Binding, Path, flatten_arguments, format_path, make_signature_binder, placeholder_name
from ..ir.graphs.block_graph import BlockGraph
from ..ir.guards.attribute_reads import AttributeLocation
from ..ir.passed_objects import PassedObject, is_passed, set_name
from ..ir.shared_memory import find_overlap, find_written_inputs
from ..matching.results.match_result import Match
from ..passes.pass_manager import PassManager
from ..passes.rewrite import DialectGraph, Placeholders
from .compile_steps import CHECKPOINT, NUMERIC_CHECK, REWRITE, PassContext, find_level_after, list_passes
from .proof_attempts import prove_and_rewrite

if TYPE_CHECKING:
    from ..runtime.ranks.expert_layout import ExpertLayout


class StandIns(enum.Enum):
    """Which objects among the arguments of a block get stand-ins, in the order of trial."""

    HOLDING_TENSORS = enum.auto()
    NONE = enum.auto()
    ALL = enum.auto()


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BlockRewrite:
    """A rewritten block: its proof with all attempts at it, and the history of its graphs. A later step returns a new
    one with a longer history."""

    match: Match
    dialect_graph: DialectGraph
    history: History
    skipped: Mapping[str, SkippedCall] = dataclasses.field(default_factory=dict)  # see `capture.search.skipped_calls`
    attempts: tuple[AttemptRun, ...] = ()

    @property
    def graph(self) -> BlockGraph:
        return self.history.snapshots[-1].graph


def rewrite_block(
    block: nn.Module,
    name: str,
    args: tuple,
    kwargs: dict[str, Any],
    plan: Plan,
    skipped: Mapping[str, SkippedCall] | None = None,
    log: list[AttemptRun] | None = None,
) -> BlockRewrite:
    """Prove the function of `block` and rewrite it into the PFT dialect. Call it in a worker (see `run_in_worker`).

    Args:
        args, kwargs: the arguments of one call; the values of floats do not matter.
        skipped: submodules that do not run, with their results. `args` and `kwargs` then hold stand-ins.
        log: receives the attempts of the proof, also those of a refused block.

    Raises:
        Refused: the block is not (provably) a token-choice mixture of experts; the message gives reason and source
            line.
        CaptureError: the block does not run on abstract tensors.
    """
    log, skipped = [] if log is None else log, skipped or {}
    paths, objects = find_argument_paths(block, args, kwargs), find_object_paths(block, args, kwargs)
    for path, stand_in in objects:
        set_name(stand_in, format_path(path))
    if objects:
        refuse_identity_tests(block)
    refuse_opaque_state(block)
    start = time.perf_counter()
    # prove and rewrite into the dialect
    with silence_hooks(block), patch_skipped_calls(block, skipped) as forbidden_reads:
        names = Placeholders([placeholder_name(p) for p in paths], {id(o): placeholder_name(p) for p, o in objects})
        match, dialect_graph = prove_and_rewrite(block, args, kwargs, names, log)
    if forbidden_reads:
        raise forbidden_reads[0]
    ms = (time.perf_counter() - start) * 1e3
    _refuse_shared_memory(dialect_graph, paths, args, kwargs)
    object_paths = tuple(path for path, _ in objects)
    graph = BlockGraph(
        name, dialect_graph.graph, Binding((*paths, *object_paths), object_paths), dialect_graph.out_spec
    )
    # run the passes before the numeric check; every snapshot runs
    passes = list_passes(PassContext(block, plan), first=REWRITE, until=NUMERIC_CHECK)
    level = find_level_after(REWRITE)
    history = PassManager(block).run(graph, passes, plan, made_by=rewrite_block, ms=ms, level=level)
    return BlockRewrite(match, dialect_graph, history, skipped, tuple(log))


def _refuse_shared_memory(dialect_graph: DialectGraph, paths: list[Path], args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse an example in which an argument shares memory with one that the block writes to: every call may be so."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    arguments = list(zip(paths, tensors, strict=True))
    if found := find_overlap([arguments[i] for i in find_written_inputs(dialect_graph.graph)], arguments):
        written, other = found
        raise Refused(
            f"the block writes to its argument {written}, which shares memory with {other}: whether {other} "
            "changes, too, differs between calls",
            culprits=(written, other),
            remedy=f"pass a copy, {other}.clone(), or compute out of place: {written} = {written} + ...",
        )


def rewrite_with_objects(
    rewrite: Callable[..., T],
    args: tuple,
    kwargs: dict[str, Any],
    find_skipping: Callable[[bool], SkipPlan | None],
    attributes_read: Iterable[AttributeLocation],
    refusing_errors: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> T:
    """Rewrite a block that may pass objects, such as a key-value cache, to submodules that write to them. Such
    submodules are not captured.

    Try stand-ins for the objects that hold tensors, then the objects themselves. If no object holds tensors and the
    refusal names an argument, try stand-ins for all objects.

    Args:
        rewrite: rewrites the block, from its arguments and the calls to skip (`skipped`), if there are any.
        find_skipping: finds the stand-ins, for objects that hold tensors or for all; None if the block passes no
            objects.
        attributes_read: attributes of the block that captures read, filled by `rewrite`.
        refusing_errors: makes a context that turns errors of `rewrite` into refusals.

    Raises:
        Refused: no way was proven. The refusal is that with stand-ins, unless nothing is routed with them: the experts
            themselves may receive the object.
    """
    refusals: dict[StandIns, Refused] = {}
    for stand_ins in StandIns:
        if stand_ins is StandIns.ALL and (len(refusals) > 1 or ARGUMENT not in refusals[StandIns.NONE].culprits):
            break
        try:
            skipping = None if stand_ins is StandIns.NONE else find_skipping(stand_ins is StandIns.ALL)
            if skipping is None and stand_ins is not StandIns.NONE:
                continue
            with refusing_errors():
                if skipping is None:
                    return rewrite(args, kwargs)
                result = rewrite(skipping.args, skipping.kwargs, skipped=skipping.calls)
            skipping.check_reads(attributes_read)
            return result
        except Refused as why:
            refusals[stand_ins] = why
    without_stand_ins = refusals.pop(StandIns.NONE)
    with_stand_ins = next(iter(refusals.values()), None)
    if with_stand_ins is None or with_stand_ins.cause is Cause.NOT_ROUTED:
        raise without_stand_ins
    raise with_stand_ins from None


def rerun_from_checkpoint(block: nn.Module, result: BlockRewrite, plan: Plan) -> BlockRewrite:
    """Run the checkpoint pass and the later ones again, with the policy that the planner has decided."""
    pass_names = result.history.passes
    if CHECKPOINT not in pass_names:  # `plan.disable`
        return result
    before = dataclasses.replace(result.history, snapshots=result.history.snapshots[: pass_names.index(CHECKPOINT)])
    passes = list_passes(PassContext(block, plan), first=CHECKPOINT, until=NUMERIC_CHECK)
    history = PassManager(block).extend(before, passes, plan, level=find_level_after(REWRITE))
    return dataclasses.replace(result, history=history)


def finish_block(
    block: nn.Module,
    result: BlockRewrite,
    plan: Plan,
    expert_layout: ExpertLayout | None = None,
    keeps_captured: bool = True,
) -> BlockRewrite:
    """Run the passes after the numeric check.

    Args:
        expert_layout: the layout of the experts over a mesh.
        keeps_captured: add the captured graph to the history, which outlives the proof's captures. Takes about as long
            as a capture.

    Raises:
        InvalidPlan: the plan has a capacity, and the block has one of its own, or no routing weights to rank slots by.
        Refused: the block cannot be spread over the mesh.
    """
    if keeps_captured:
        result = _keep_captured_graph(result)
    history, passes = result.history, list_passes(PassContext(block, plan, expert_layout), first=NUMERIC_CHECK)
    if passes:
        history = PassManager(block).extend(history, passes, plan, level=find_level_after(NUMERIC_CHECK))
    match = dataclasses.replace(result.match, without_tokens=expert_layout is not None)
    return dataclasses.replace(result, match=match, history=history)


def _keep_captured_graph(result: BlockRewrite) -> BlockRewrite:
    names = [placeholder_name(path) for path in result.graph.binding.paths]
    captured_graph = build_captured_graph(result.history.name, result.match.forms[0].capture, names)
    return dataclasses.replace(result, history=dataclasses.replace(result.history, captured=captured_graph))


def find_argument_paths(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[Path]:
    """Find the path of each tensor argument of a call in the block's own signature."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    named = make_signature_binder(block)(*args, **kwargs)
    by_id: dict[int, list[Path]] = {}
    for path, value in flatten_arguments(named):
        if isinstance(value, torch.Tensor):
            by_id.setdefault(id(value), []).append(path)
    return [by_id[id(t)].pop(0) if len(by_id[id(t)]) > 1 else by_id[id(t)][0] for t in tensors]


def find_object_paths(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[tuple[Path, PassedObject]]:
    """Find the path of each stand-in for an object among the arguments of a call.

    Raises:
        Refused: the same object is passed twice.
    """
    named = make_signature_binder(block)(*args, **kwargs)
    stand_ins_by_id: dict[int, tuple[Path, PassedObject]] = {}
    for path, value in flatten_arguments(named):
        if is_passed(value) and id(value) in stand_ins_by_id:
            raise Refused(
                f"{format_path(stand_ins_by_id[id(value)][0])} and {format_path(path)} are the same object, and may "
                "differ at other calls",
                remedy="pass it once",
            )
        if is_passed(value):
            stand_ins_by_id[id(value)] = path, value
    return list(stand_ins_by_id.values())


__all__ = [
    "BlockRewrite",
    "find_argument_paths",
    "finish_block",
    "rerun_from_checkpoint",
    "rewrite_block",
]
