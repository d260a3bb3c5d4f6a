"""One proof for all equal regions, kept for the process: the same graph, also at other sizes, is not lifted again."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections import OrderedDict
from typing import Any

import torch

from ..._plan import Plan
from ...capture.autocast import under
from ...capture.defaults import neutral_device
from ...capture.find import Seen
from ...capture.sizes import SizeGuard
from ...compiler.block_report import build_report
from ...compiler.numeric_check import numeric_check
from ...compiler.pipeline import BlockRewrite, apply_capacity, rewrite_block
from ...compiler.specialization import build_program
from ...compiler.survey import MatchedBlock
from ...errors import CaptureError, MoefxError, Refused, summarize_error
from ...inspection.explain import BlockReport
from ...runtime.module import suspend_observers
from ...runtime.program import Program
from ...util.compile_lock import compile_lock
from .graph_analysis import GraphAnalysis
from .node_queries import target_name
from .region_module import ExtractedRegion

_log = logging.getLogger(__name__)
_MAX_KEYS = 256


@dataclasses.dataclass
class CachedProof:
    """A region that was proven and rewritten: no more than is needed of it later, as it is kept.

    Attributes:
        report: of a region by the name of the first one; others may have this proof, too.
        guards: comparisons of its token dims that must come out so.
        experts: the names of the experts' weights.
    """

    report: BlockReport
    program: Program
    guards: tuple[SizeGuard, ...]
    experts: frozenset[str]

    def holds(self, dims: dict[str, int]) -> bool:
        return all(g.holds(dims) for g in self.guards)


_Outcome = CachedProof | Refused
_proofs: OrderedDict[tuple[Any, Plan, str, torch.dtype | None], list[_Outcome]] = OrderedDict()
num_proofs_tried = 0  # proofs tried in this process


def prove_region(analysis: GraphAnalysis, region: ExtractedRegion, plan: Plan) -> CachedProof:
    """The proof of a region, an earlier one if there is.

    Raises:
        Refused: it is not (provably) a token-choice mixture of experts, or not at these sizes.
    """
    key = region.key, plan, region.device, _autocast_dtype(region)
    outcomes = _proofs.setdefault(key, [])
    _proofs.move_to_end(key)
    while len(_proofs) > _MAX_KEYS:
        _proofs.popitem(last=False)
    for outcome in outcomes:
        if isinstance(outcome, CachedProof) and outcome.holds(region.dims):
            return outcome
        if isinstance(outcome, Refused):
            raise outcome
    try:
        outcome = _prove(analysis, region, plan)
        if not outcome.holds(region.dims):
            failed = next(g for g in outcome.guards if not g.holds(region.dims))
            raise Refused(f"it is proven for other sizes than the graph's only: {failed}")
    except Refused as refusal:
        outcomes.append(refusal.with_traceback(None))
        raise
    outcomes.append(outcome)
    return outcome


def explain_outside_use(analysis: GraphAnalysis, region: ExtractedRegion, plan: Plan) -> Refused | None:
    """Why a region is refused that would not be if all of its results but the exit were its own: by name, what of the
    experts is used outside of it."""
    exit_ = region.bounds.exit
    if len(region.outputs) == 1 or exit_ not in region.outputs:
        return None
    alone = dataclasses.replace(region.code, outputs=(region.code.outputs[region.outputs.index(exit_)],))
    try:
        key = f"{alone.outputs} of {region.key[0]}", region.key[1]
        proof = prove_region(analysis, dataclasses.replace(region, outputs=(exit_,), code=alone, key=key), plan)
    except Refused:
        return None
    weights = {n for n, name in zip(region.weights, region.names, strict=True) if name in proof.experts}
    follows = set(weights)
    for n in region.bounds.inside:
        if follows.intersection(analysis.deps[n]):
            follows.add(n)
    for n in region.outputs:
        if n is not exit_ and n in follows:
            user = next(u for u in analysis.users[n] if u not in region.bounds.inside)
            by, at = (target_name(user), user) if user.op != "output" else ("what the graph returns", n)
            return Refused(
                f"{n.name}, which the experts compute, is used outside of the mixture, by {by}: it would be there only "
                "for the tokens that chose an expert",
                culprits=(target_name(n),),
                source=analysis.source_line(at),
                remedy="use, or check, what goes into the mixture or comes out of it",
            )
    return None


def _prove(analysis: GraphAnalysis, region: ExtractedRegion, plan: Plan) -> CachedProof:
    global num_proofs_tried
    num_proofs_tried += 1
    start = time.perf_counter()
    _log.info("moefx: looking at %s (%s), once for all equal ones", region.name, region.source)
    args = region.example_arguments(analysis)
    block = region.build_module(analysis)
    dtype = _autocast_dtype(region)
    with compile_lock(), neutral_device(), suspend_observers(), torch.enable_grad(), under(region.device, dtype):
        try:
            result = rewrite_block(block, region.name, args, {}, plan)
        except Refused as why:
            raise Refused(
                why.reason, culprits=why.culprits, source=why.source or region.source, remedy=why.remedy
            ) from None
        except (CaptureError, MoefxError) as error:
            raise Refused(f"it does not run on abstract tensors: {error}", source=region.source) from None
        except Exception as error:  # torch's, at sizes that the graph was not made for
            numbers = "make the graph for dynamic sizes of its token dims: numbers do not show what they were made of"
            is_dynamic = any(isinstance(n, torch.SymInt) for n in analysis.value[region.bounds.entry].shape)
            raise Refused(
                f"it does not run at other sizes than the graph's ({summarize_error(error)})",
                source=region.source,
                remedy="make the first call with other sizes, or compile with dynamic=False" if is_dynamic else numbers,
            ) from error
        if len({e for group in result.match.groups for e in group.ids}) == 1:
            # Whatever explains when one alone is used may do so by chance.
            what = "it is the part of one expert, and the others do not close to a mixture with it"
            raise Refused(what, source=region.source)
        verdict = _check_numerically(analysis, region, result, plan)
        result = apply_capacity(block, result, plan)
        program = build_program(block, result, args, {}, dtype)
    seconds = time.perf_counter() - start
    matched = MatchedBlock([region.name], Seen(region.name, args, {}), result, seconds, set())
    report = dataclasses.replace(build_report(matched, program, block, verdict), kind="region of a graph")
    tables = [places for group in result.match.groups for places in group.tables]
    fixed = [SizeGuard(dim, "eq", str(n), True) for dim, n in result.match.arguments.fixed.items()]
    guards = (*result.match.guards, *fixed)
    return CachedProof(report, program, guards, frozenset(p.fqn for places in tables for p in places))


def _autocast_dtype(region: ExtractedRegion) -> torch.dtype | None:
    """What autocast casts to around the region."""
    for one in reversed(region.autocast):
        if one.device == region.device:
            return (one.dtype or torch.get_autocast_dtype(one.device)) if one.enabled else None
    if region.device == "meta" or not torch.is_autocast_enabled(region.device):
        return None
    return torch.get_autocast_dtype(region.device)


def _check_numerically(analysis: GraphAnalysis, region: ExtractedRegion, result: BlockRewrite, plan: Plan) -> str:
    """What the numeric check says.

    Raises:
        Refused: it found a difference.
    """
    if plan.validation == "symbolic":
        return "off (plan.validation)"
    tensors = [analysis.weights[n] for n in region.weights]
    if any(t.is_meta or type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return "skipped, the weights are on the meta device or abstract"
    check = numeric_check(
        region.build_module(analysis, real=True), result, region.name, max(plan.validation_seconds, 1.0)
    )
    if not check.ok:
        raise Refused(check.text, source=region.source, remedy="please report this model")
    if not check.was_possible:
        warnings.warn(f"moefx: {region.name} was rewritten without a numeric check: {check.text}", stacklevel=2)
    return check.text


def forget() -> None:
    """Drop all proofs."""
    _proofs.clear()
