"""The public functions on models: `compile` and `explain`. `compiled_blocks` has those on compiled models."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from ._plan import Plan
from .compiled_blocks import (
    RECORD,
    UNCHANGED,
    Record,
    find_forwards,
    find_graph_regions,
    is_compiled_function,
)
from .compiler.survey_result import Refusal, Survey
from .driver.compile_pipeline import install_programs, preview_programs, prove_model
from .driver.plan_check import check_plan, resolve_plan
from .errors import InvalidInput, MoefxError, NoMoEBlockFound
from .inspection.explain import Explanation, merge_refusals
from .ir.argument_binding import ExampleInputs
from .runtime.block_forward import BlockForward
from .runtime.ranks.staged_models import refuse_pipeline
from .util.model_copy import copy_model
from .util.model_wrappers import unwrap_model
from .util.progress import report_progress
from .verification.verify_report import VerifyReport, verify

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    mesh: DeviceMesh | None = None,
    plan: Plan | str | None = None,
    strict: bool = True,
) -> nn.Module:
    """Find the MoE blocks of a plain PyTorch model, prove the function of each, and rewrite them into padding-free ops.

    Args:
        model: any `nn.Module`, also on the meta device. It stays as it is and serves as the reference.
        example_inputs: one tensor, a tuple of positional or a dict of keyword arguments that `model` accepts. Without
            them: the model's own `dummy_inputs`, else token ids if its first layer is an embedding, else hidden states.
        mesh: a DeviceMesh. The experts are spread over its axis `plan.expert_axis`, and each rank keeps its own tokens.
            A parameter that holds all experts becomes a DTensor; if each expert has parameters of its own, each rank
            keeps those of its experts. An expert's gradient is the sum of its gradients over the ranks' losses.
        plan: a `Plan`, or None for the defaults. `"auto"`: `Plan(expert_axis="auto", checkpoint="auto")`, the fastest
            layout that fits the memory with the tokens of the example inputs, by the planner's formulas
            (docs/how_to/automatic_plans.md). All ranks of the mesh decide together; `explain` prints the decision and
            its reasons.
        strict: raise if no block was rewritten, and warn about blocks that were refused. False: a model without a
            rewritten block is returned as it is, without a warning; `explain` says why.

    Returns:
        A new model of the same class around the same parameters and buffers, in which each rewritten block keeps its
        class and submodules and only its `forward` runs the rewritten graph.

    Raises:
        NoMoEBlockFound: `strict`, and no block was rewritten; the message lists the refused ones and why.
        InvalidInput: the example inputs do not fit. CaptureError: the model does not run on them.
        InvalidPlan: a plan field has an invalid value, does not fit the mesh, or names an unknown pass; or the ranks of
            the mesh have different plans or models.
        Refused: with a mesh, a block whose experts cannot be spread over ranks.
        MoefxError: the model is sharded by FSDP already, or an attribute of a module cannot be copied
            (raised only with `strict` or a mesh).
        UnknownPlatform: the plan is `"auto"`, and MOEFX_PLATFORM names no platform.
    """
    plan, original = resolve_plan(plan), model
    check_plan(plan, mesh)
    model = unwrap_model(model)
    refuse_pipeline(model, "compile")
    if mesh is not None:
        from .distribution.expert_layouts import find_expert_layouts  # torch.distributed takes a while

        if find_expert_layouts(model):
            raise InvalidInput("this model is spread over a mesh already: compile the original again")
    with report_progress("moefx.compile"):
        proven = prove_model(model, example_inputs, plan, mesh)  # steps 1 to 7 of `COMPILE_STEPS`
    survey = proven.survey
    if proven.decision and proven.decision.warning:
        warnings.warn(f"moefx: {proven.decision.warning}", stacklevel=2)
    if not survey.matched:
        if strict:
            raise NoMoEBlockFound(_describe_refusals(model, survey))
        UNCHANGED[model] = Record((), survey.refused, survey.seconds)
        return original
    for warning in _list_warnings(survey, strict):
        warnings.warn(warning, stacklevel=2)
    try:
        compiled, copies = (survey.twin, survey.copies) if survey.copies else copy_model(model)
    except MoefxError as error:
        if strict or mesh is not None:
            raise
        UNCHANGED[model] = Record((), (*survey.refused, Refusal("", str(error))), survey.seconds)
        return original
    installed = install_programs(model, proven, compiled, copies)  # steps 8 to 12
    for name, guard in installed.failed_guards.items() if strict else ():
        warnings.warn(
            f"moefx rewrote {name or 'the model'}, but not for calls like the example's, which run the original: "
            f"{guard}",
            stacklevel=2,
        )
    vars(compiled)[RECORD] = Record(
        installed.reports, survey.refused, survey.seconds, proven.decision, installed.gradients
    )
    return compiled


def _list_warnings(survey: Survey, strict: bool) -> list[str]:
    """Return the warnings about blocks that were refused, or rewritten without a numeric check."""
    texts = []
    likely = [r for r in survey.refused if r.likely]
    if strict and likely:
        texts.append("moefx left these blocks as they were:\n  " + "\n  ".join(map(str, merge_refusals(likely))))
    if survey.unchecked:
        texts.append(
            "moefx rewrote these blocks without a numeric check, on the strength of the symbolic proof alone; "
            "moefx.verify(compiled, model, inputs) compares the whole model:\n  " + "\n  ".join(survey.unchecked)
        )
    return texts


def explain(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    mesh: DeviceMesh | None = None,
    plan: Plan | str | None = None,
    trace: bool = False,
    verbose: bool = False,
) -> Explanation:
    """Explain which blocks `compile` rewrites in a model, or rewrote in a compiled one, with the numeric check.

    Args:
        model: a plain model, a compiled one, or a function of `torch.compile`. It stays as it is.
        example_inputs: as for `compile`.
        plan: as for `compile`. A compiled model shows its own plan instead.
        mesh: show how `compile(mesh=mesh)` would spread the experts. Blocks for which it would raise are listed as
            refused. The model keeps its parameters. Collective over the expert axis, as `compile` is: its ranks agree
            on the blocks, make process groups, and measure bandwidths for `Plan(dispatch="auto")`; collective over the
            whole mesh if the planner decides. A compiled model says how it was spread, without communication.
        trace: also print the steps of each proof: its attempts and probes. For a refused block, also print the nodes
            that were tried as the routed sum or as its expert index, and why each failed.
        verbose: print the counters of this process, too: the providers that ran, and how their GEMMs read weights.

    Raises:
        InvalidPlan: as in `compile`. CaptureError, InvalidInput: the model does not run on the example.
        MoefxError: the model is sharded by FSDP already.
    """
    target: Any = model
    if is_compiled_function(target):
        record, forwards = find_graph_regions(target)
        return _explain_record(target.__name__, record or Record((), (), 0.0), forwards, trace, verbose)
    model = unwrap_model(target)
    refuse_pipeline(model, "explain")
    record = vars(model).get(RECORD)
    if record is None and example_inputs is None and plan is None and mesh is None:
        record = UNCHANGED.get(model) or find_graph_regions(target)[0]
    if record is not None:
        if record.gradients:  # torch.distributed is loaded
            from .distribution.training_wiring import SPREAD_MESH

            record = dataclasses.replace(record, gradients=vars(model)[SPREAD_MESH].parallelized or record.gradients)
        return _explain_record(type(model).__name__, record, find_forwards(target), trace, verbose)
    plan = resolve_plan(plan)
    check_plan(plan, mesh)
    with report_progress("moefx.explain"):
        proven = prove_model(model, example_inputs, plan, mesh)  # steps 1 to 7 of `COMPILE_STEPS`
    preview = preview_programs(model, proven)
    return Explanation(
        type(model).__name__,
        preview.reports,
        preview.survey.refused,
        preview.survey.seconds,
        planned=proven.decision,
        gradients=preview.gradients,
        trace=trace,
        verbose=verbose,
        is_compiled=False,
    )


def _explain_record(
    name: str, record: Record, forwards: dict[str, BlockForward], trace: bool, verbose: bool
) -> Explanation:
    """Return the explanation of a compiled model: its record, with the calls and the later programs of its blocks."""
    reports = []
    for report in record.matched:
        block_forwards = [forwards[n] for n in report.names if n in forwards]
        counts = [forward.counts for forward in block_forwards]
        calls = (
            sum(c.rewritten for c in counts),
            sum(c.original for c in counts),
            sum(c.guard_failures for c in counts),
        )
        notes = {f"guard failed: {c.last_failed_guard}" for c in counts if c.last_failed_guard}
        for forward in block_forwards:
            notes |= {reason for reason in (*forward.refusals.values(), *forward.fallback_reasons) if reason}
        also = dict.fromkeys(
            program.describe_difference(forward.compiled_program)
            for forward in block_forwards
            for program in forward.programs
            if program is not forward.compiled_program
        )
        notes = (*report.notes, *sorted(notes))
        reports.append(dataclasses.replace(report, calls=calls, notes=notes, also_for=tuple(also)))
    options = {"planned": record.planned, "gradients": record.gradients, "trace": trace, "verbose": verbose}
    return Explanation(name, tuple(reports), record.refused, record.seconds, _count_providers(), **options)


def _describe_refusals(model: nn.Module, survey: Survey) -> str:
    """Return the message of `NoMoEBlockFound`."""
    head = f"no MoE block was found in {type(model).__name__}"
    if not survey.refused:
        return f"{head}: no list of equal submodules and no stacked parameter is applied to only some of the tokens"
    return head + ". These look like one and were refused:\n  " + "\n  ".join(map(str, merge_refusals(survey.refused)))


def _count_providers() -> tuple[tuple[str, str, int], ...]:
    """List each (op, provider) that ran in this process, with the number of its calls."""
    from .ir import op_providers

    return tuple((op, provider, n) for (op, provider), n in sorted(op_providers.counters().items()))


__all__ = [
    "Explanation",
    "VerifyReport",
    "compile",
    "explain",
    "verify",
]
