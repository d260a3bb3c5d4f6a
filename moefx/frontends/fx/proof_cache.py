"""Cache proofs of regions for the process: equal regions, also at other sizes, are proven once."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict, deque
from typing import Any

import torch

from ..._plan import Plan
from ...capture.environment.device_autocast import use_device_autocast
from ...capture.environment.worker_thread import run_in_worker
from ...capture.search.block_search import SurveyedCall
from ...capture.sizes.size_guards import SizeGuard
from ...compiler.block_compiler import BlockRewrite, finish_block, rewrite_block
from ...compiler.block_report import build_report
from ...compiler.check_policy import CheckPolicy
from ...compiler.program_builder import build_program
from ...compiler.survey_result import MatchedBlock
from ...errors import CaptureError, Cause, MoefxError, Refused, summarize_error
from ...inspection.explain import BlockReport
from ...inspection.proof_trace import ProofTrace
from ...ir.node_values import get_op_name
from ...runtime.program import Program
from ...runtime.surrounding_modes import suspend_observers
from ...util.compile_lock import compile_lock
from ...util.default_device import neutral_device
from .graph_analysis import GraphAnalysis
from .region_module import ExtractedRegion

_log = logging.getLogger(__name__)
_MAX_KEYS = 256
_MAX_OUTCOMES = 16  # of one key: a graph compiled at ever new sizes may need a proof for each


@dataclasses.dataclass
class CachedProof:
    """The proof of a region, reduced to its reusable parts.

    Attributes:
        report: the report, with the name of the first region that has this proof.
        program: the rewritten program.
        guards: conditions on the token dims.
        experts: the names of the experts' weights.
    """

    report: BlockReport
    program: Program
    guards: tuple[SizeGuard, ...]
    experts: frozenset[str]

    def holds(self, dims: dict[str, int]) -> bool:
        """Return whether the proof holds for these sizes of the token dims."""
        return all(g.holds(dims) for g in self.guards)


@dataclasses.dataclass(frozen=True)
class CachedRefusal:
    """The words of a refusal. The exception itself has a traceback, whose frames hold the graph and its weights.

    Attributes:
        dims: the only sizes of the token dims that are refused; None: all sizes.
    """

    reason: str
    culprits: tuple[str, ...]
    source: str
    remedy: str
    cause: Cause
    trace: ProofTrace | None
    dims: dict[str, int] | None = None

    @classmethod
    def copy_from(cls, refusal: Refused, dims: dict[str, int] | None = None) -> CachedRefusal:
        return cls(refusal.reason, refusal.culprits, refusal.source, refusal.remedy, refusal.cause, refusal.trace, dims)

    def concerns(self, dims: dict[str, int]) -> bool:
        """Return whether these sizes of the token dims are refused."""
        return self.dims is None or self.dims == dims

    def build_error(self) -> Refused:
        """Return a new exception: raising one instance again would extend its traceback each time."""
        error = Refused(self.reason, culprits=self.culprits, source=self.source, remedy=self.remedy, cause=self.cause)
        error.trace = self.trace
        return error


_Outcome = CachedProof | CachedRefusal
_proofs: OrderedDict[tuple[Any, Plan, str, torch.dtype | None], deque[_Outcome]] = OrderedDict()
num_proofs_tried = 0  # in this process


def prove_region(analysis: GraphAnalysis, region: ExtractedRegion, plan: Plan) -> CachedProof:
    """Return the proof of a region, from the cache if possible.

    Raises:
        Refused: it is not (provably) a token-choice mixture of experts, or not at these sizes.
    """
    key = region.key, plan, region.device, _find_autocast_dtype(region)
    with compile_lock():  # guards the cache, too
        outcomes = _proofs.setdefault(key, deque(maxlen=_MAX_OUTCOMES))
        _proofs.move_to_end(key)
        while len(_proofs) > _MAX_KEYS:
            _proofs.popitem(last=False)
        for outcome in outcomes:
            if isinstance(outcome, CachedRefusal):
                if outcome.concerns(region.dims):
                    raise outcome.build_error()
            elif outcome.holds(region.dims):
                return outcome
        try:
            proof = _prove(analysis, region, plan)
        except Refused as refusal:
            outcomes.append(CachedRefusal.copy_from(refusal))
            raise
        failed_guard = next((g for g in proof.guards if not g.holds(region.dims)), None)
        if failed_guard is not None:  # the key has no sizes: other sizes may hold
            reason = f"the proof does not hold for the graph's own sizes: it requires {failed_guard}"
            outcomes.append(CachedRefusal.copy_from(Refused(reason), dict(region.dims)))
            raise Refused(reason)
        outcomes.append(proof)
        return proof


def explain_outside_use(analysis: GraphAnalysis, region: ExtractedRegion, plan: Plan) -> Refused | None:
    """Return the refusal of a region that matches if its exit is its only result: names the expert value that is used
    outside."""
    exit_ = region.bounds.exit
    if len(region.outputs) == 1 or exit_ not in region.outputs:
        return None
    exit_code = dataclasses.replace(region.code, outputs=(region.code.outputs[region.outputs.index(exit_)],))
    try:
        key = f"{exit_code.outputs} of {region.key[0]}", region.key[1]
        proof = prove_region(analysis, dataclasses.replace(region, outputs=(exit_,), code=exit_code, key=key), plan)
    except Refused:
        return None
    weights = {n for n, name in zip(region.weights, region.names, strict=True) if name in proof.experts}
    dependent = set(weights)
    for n in region.bounds.inside:
        if dependent.intersection(analysis.deps[n]):
            dependent.add(n)
    for n in region.outputs:
        if n is not exit_ and n in dependent:
            user = next(u for u in analysis.users[n] if u not in region.bounds.inside)
            by, at = (get_op_name(user), user) if user.op != "output" else ("the graph's output", n)
            return Refused(
                f"{n.name}, which the experts compute, is used outside the mixture, by {by}: it would exist only for "
                "the tokens that selected an expert",
                culprits=(get_op_name(n),),
                source=analysis.find_source_line(at),
                remedy="use or check the inputs or the outputs of the mixture instead",
            )
    return None


def _prove(analysis: GraphAnalysis, region: ExtractedRegion, plan: Plan) -> CachedProof:
    """Prove and rewrite a region, and check the rewrite numerically.

    Raises:
        Refused: as `prove_region`.
    """
    global num_proofs_tried
    num_proofs_tried += 1
    start = time.perf_counter()
    _log.info("moefx: proving %s (%s), once for all equal regions", region.name, region.source)
    args = region.make_example_arguments(analysis)
    block = region.build_module(analysis)
    dtype = _find_autocast_dtype(region)
    with (
        compile_lock(),
        neutral_device(),
        suspend_observers(),
        torch.enable_grad(),
        use_device_autocast(region.device, dtype),
    ):
        try:
            result = run_in_worker(lambda: rewrite_block(block, region.name, args, {}, plan))  # steps 2 to 6
        except Refused as why:
            cached_refusal = CachedRefusal.copy_from(why)
            raise dataclasses.replace(cached_refusal, source=why.source or region.source).build_error() from None
        except (CaptureError, MoefxError) as error:
            raise Refused(f"it does not run on abstract tensors: {error}", source=region.source) from None
        except Exception as error:  # torch's error, at sizes that the graph does not support
            numbers = "make the graph with dynamic token dims: constant sizes do not show how they were computed"
            is_dynamic = any(isinstance(n, torch.SymInt) for n in analysis.value[region.bounds.entry].shape)
            raise Refused(
                f"it does not run at other sizes than the graph's ({summarize_error(error)})",
                source=region.source,
                remedy="make the first call with other sizes, or compile with dynamic=False" if is_dynamic else numbers,
            ) from error
        if len({e for group in result.match.groups for e in group.ids}) == 1:
            # A selection of one expert is usually a mask, not a routing.
            reason = "it contains one expert only, and does not form a mixture with the others"
            raise Refused(reason, source=region.source)
        verdict = _check_numerically(analysis, region, result, plan)  # step 7
        result = finish_block(block, result, plan)  # step 8
        program = build_program(block, result, args, {}, dtype)
    seconds = time.perf_counter() - start
    call = SurveyedCall(region.name, args, {})
    matched_block = MatchedBlock((region.name,), call, result, seconds, frozenset(), verdict)
    report = dataclasses.replace(build_report(matched_block, program, block), kind="region of a graph")
    tables = [slices for group in result.match.groups for slices in group.tables]
    fixed_sizes = [SizeGuard(dim, "eq", str(n), True) for dim, n in result.match.arguments.fixed.items()]
    guards = (*result.match.guards, *fixed_sizes)
    return CachedProof(report, program, guards, frozenset(p.fqn for places in tables for p in places))


def _find_autocast_dtype(region: ExtractedRegion) -> torch.dtype | None:
    """Return the dtype of autocast around the region, None if it is off."""
    for one in reversed(region.autocast):
        if one.device == region.device:
            return (one.dtype or torch.get_autocast_dtype(one.device)) if one.enabled else None
    if region.device == "meta" or not torch.is_autocast_enabled(region.device):
        return None
    return torch.get_autocast_dtype(region.device)


def _check_numerically(analysis: GraphAnalysis, region: ExtractedRegion, result: BlockRewrite, plan: Plan) -> str:
    """Run the numeric check, if one is due. Returns the verdict.

    Raises:
        Refused: the rewrite differs from the region.
    """
    tensors = [analysis.weights[n] for n in region.weights]
    is_abstract = any(t.is_meta or type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    verdict = CheckPolicy(plan).check(
        lambda: {region.name: region.build_module(analysis, real=True)},
        result,
        obstacle="the weights are on the meta device or abstract" if is_abstract else "",
        source=region.source,
    )
    verdict.warn_if_unchecked(region.name)
    return verdict.text


def forget() -> None:
    """Drop all proofs."""
    with compile_lock():
        _proofs.clear()
