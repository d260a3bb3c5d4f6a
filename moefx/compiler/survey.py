"""Survey a model: find its MoE blocks, prove each, and refuse modules that look like one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from .._plan import Plan
from ..capture.concolic import capture_block
from ..capture.environment.code_locations import is_internal_error, suppress_program_errors
from ..capture.search.block_search import BlockCandidates, SurveyedCall, search_blocks
from ..capture.search.example_calls import find_example_calls
from ..capture.search.isolated_run import run_copy
from ..capture.search.module_structure import compute_signature
from ..capture.tracing.concrete_routing import Routing
from ..errors import CaptureError, Cause, InvalidInput, MoefxError, Refused, refuse_own_bug, summarize_error
from ..inspection.proof_trace import AttemptRun, ProofTrace
from ..ir.guards.attribute_reads import (
    BLOCK_MODE,
    AttributeLocation,
    find_attributes,
    has_custom_train,
    read_value,
    record_reads,
)
from ..ir.guards.stored_values import is_same
from ..matching.unsupported_effects import NO_CACHE
from ..runtime.block_forward import find_rewritten_blocks
from ..runtime.change_detection import find_absorbed_names, find_hook_kind
from ..util.model_copy import copy_model
from ..util.progress import announce
from ..util.tensor_trees import has_values
from ..util.user_code import forward_line, user_line
from .block_compiler import BlockRewrite, rewrite_block, rewrite_with_objects
from .survey_result import MatchedBlock, Refusal, Survey

_FLAT = "moefx.rewrite_graph(graph, example_inputs) looks into graphs"


def survey_model(model: nn.Module, example_inputs: Any, plan: Plan) -> Survey:
    """Find, prove and rewrite the MoE blocks of a model. The model itself does not change. Call it in a worker (see
    `run_in_worker`).

    Raises:
        InvalidInput: the example inputs do not fit.
        CaptureError: the model does not run on them.
        MoefxError: the model is sharded by FSDP.
    """
    start = time.perf_counter()
    announce(f"running {type(model).__name__} on abstract tensors")
    if _is_fully_sharded(model):
        raise MoefxError(
            f"{type(model).__name__} is sharded already, and FSDP modules cannot be copied: "
            "call moefx.compile first, then fully_shard on the compiled model"
        )
    twin, copies = _try_copy(model)
    with _run_originals(twin), torch.compiler.set_stance("force_eager"):  # torch may have compiled some modules
        try:
            candidates = _run_examples(twin, example_inputs)
        except Refused as why:
            refusal = Refusal("", why.reason, why.source, remedy=why.remedy, cause=why.cause)
            return Survey((), (refusal,), time.perf_counter() - start, False, twin, copies)
        blocks, refusals = _try_chains(twin, candidates, plan)
    blocks, others = _drop_observed_blocks(model, blocks)
    seconds, traffic = time.perf_counter() - start, candidates.traffic
    return Survey(tuple(blocks), (*refusals, *others), seconds, candidates.has_attention, twin, copies, traffic=traffic)


def _try_copy(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Copy a model. If that fails, return the model itself and no copies."""
    try:
        return copy_model(model)
    except Exception:  # `compile` says so when it needs the copy
        return model, {}


def _run_examples(model: nn.Module, example_inputs: Any) -> BlockCandidates:
    """Run the model on the first of the examples that it accepts, and record the calls of its modules.

    Raises:
        CaptureError: the model runs on no example.
        Refused: it runs, but not on abstract tensors.
    """
    calls, failures = find_example_calls(model, example_inputs), []
    for call in calls:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _with_values, call)
        try:
            return search_blocks(model, args, kwargs)
        except InvalidInput:
            raise
        except Exception as error:
            failures.append((args, kwargs, error))
    errors: list[Exception] = []
    for args, kwargs, error in failures:
        try:
            run_copy(model, args, kwargs)
        except Exception as own_error:
            if all(map(has_values, (*model.parameters(), *model.buffers()))):
                errors.append(own_error)
                continue
            # Without values a real run may fail. Then the error of the abstract run decides.
            if not (isinstance(error, (CaptureError, Refused)) or is_internal_error(error)):
                errors.append(error)
                continue
        raise _refuse_uncaptured(error, model) from error
    name, advice = type(model).__name__, "Pass example_inputs=(...) or example_inputs={...} that it accepts"
    first = errors[0]
    if len(calls) > 1:
        shapes_text = ", ".join(str(list(args[0].shape)) for args, _ in calls)
        raise CaptureError(
            f"no example_inputs were given, and {name} runs on hidden states of none of the shapes {shapes_text}. "
            + advice
        ) from first
    raise CaptureError(
        f"{name} does not run on the example inputs: {type(first).__name__}: {first}. {advice}"
    ) from first


def _refuse_uncaptured(error: Exception, model: nn.Module) -> Refused:
    """Return the refusal of a model that runs on real tensors only."""
    if isinstance(error, Refused):
        return error
    if is_internal_error(error):
        return refuse_own_bug(error, user_line(error) or forward_line(model))
    return Refused(
        f"the model runs, but not on abstract tensors ({summarize_error(error)})",
        source=user_line(error),
        remedy="compile the other blocks one by one, each with its own example_inputs",
    )


def _with_values(t: torch.Tensor) -> torch.Tensor:
    """Give integers and masks on the meta device values, which captures need: the first token, nothing masked."""
    if not t.is_meta or t.is_floating_point() or t.is_complex():
        return t
    return torch.full(t.shape, t.dtype is torch.bool, dtype=t.dtype, device="cpu")


@contextlib.contextmanager
def _run_originals(model: nn.Module) -> Iterator[None]:
    """Run the original code of blocks that were rewritten before."""
    with contextlib.ExitStack() as stack:
        for forward in find_rewritten_blocks(model).values():
            stack.enter_context(forward.force_graph("original"))
        yield


def _try_chains(model: nn.Module, candidates: BlockCandidates, plan: Plan) -> tuple[list[MatchedBlock], list[Refusal]]:
    """Prove the candidates of each chain: those with expert-like parameters and the smaller ones first, at most two
    per chain. Modules that receive an expert index come last, because a block should contain its router.
    """
    modules = dict(model.named_modules())
    chains_of: dict[str, list[int]] = {}
    for i, chain in enumerate(candidates.chains):
        for name in chain:
            chains_of.setdefault(name, []).append(i)
    blocks: list[MatchedBlock] = []
    rewritten_names: set[str] = set()
    refusals: dict[int, list[Refusal]] = {i: [] for i in range(len(candidates.chains))}
    for name in sorted(chains_of, key=lambda n: _priority(n, modules, candidates)):
        open_chains = [i for i in chains_of[name] if len(refusals[i]) < 2 or _receives_expert_index(name, candidates)]
        if not open_chains or _overlaps(name, rewritten_names):
            continue
        try:
            proven = _prove_equal_modules(name, modules, candidates, plan)
        except Refused as why:
            refusal = Refusal(name, why.reason, why.source, why.culprits, why.remedy, trace=why.trace, cause=why.cause)
            if why.cause is Cause.NOT_ROUTED:
                if name not in candidates.branches:
                    continue
                refusal = _refuse_dense(name, modules, candidates)
            for i in open_chains:
                refusals[i].append(refusal)
        else:
            blocks += proven
            rewritten_names |= {n for m in proven for n in m.names}
    for i, chain in enumerate(candidates.chains):
        if not refusals[i] and not any(_overlaps(name, rewritten_names) for name in chain):
            refusals[i].append(_refuse_unused_choice(chain, modules, candidates))
    by_name = {r[0].name: r[0] for r in refusals.values() if r and not _is_token_embedding(r[0], modules, candidates)}
    return blocks, [r for r in by_name.values() if not _overlaps(r.name, rewritten_names)]


def _drop_observed_blocks(model: nn.Module, blocks: list[MatchedBlock]) -> tuple[list[MatchedBlock], list[Refusal]]:
    """Refuse blocks whose experts have hooks, which would not fire, or shards, which would not be gathered."""
    modules, remaining, refusals = dict(model.named_modules()), [], []
    for m in blocks:
        observers = {name: _find_observer(modules[name], m.result) for name in m.names}
        refusals += [
            Refusal(name, why[0], forward_line(modules[name]), remedy=why[1]) for name, why in observers.items() if why
        ]
        if names := tuple(name for name, why in observers.items() if not why):
            remaining.append(dataclasses.replace(m, names=names))
    return remaining, refusals


def _find_observer(block: nn.Module, result: BlockRewrite) -> tuple[str, str] | None:
    """Return the first hook on an absorbed module, or sharded parameter, of a block: reason and remedy."""
    for part in find_absorbed_names(block, result.graph, result.rewritten.recomputed_modules):
        if hook := find_hook_kind(block.get_submodule(part)):
            return (
                f"{part} has a {hook}, which the rewritten block would not call",
                "remove it; hooks on the block itself, its router and its shared experts stay",
            )
    for name, parameter in block.named_parameters():
        if _is_sharded(parameter):
            return f"{name} is a DTensor", "compile first, then shard the compiled model"
    return None


def _is_sharded(tensor: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _is_fully_sharded(model: nn.Module) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in model.modules())


def _priority(name: str, modules: dict[str, nn.Module], candidates: BlockCandidates) -> tuple:
    """Return the sort key of candidates: expert-like parameters first, then own routers, then few parameters."""
    inside = f"{name}." if name else ""
    expert_like = name in candidates.structural or any(s.startswith(inside) for s in candidates.structural)
    return not expert_like, _receives_expert_index(name, candidates), sum(p.numel() for p in modules[name].parameters())


def _receives_expert_index(name: str, candidates: BlockCandidates) -> bool:
    """Return whether a module is called with integers that the model computed from scores, not with token ids."""
    for node in candidates.calls[name].inputs if name in candidates.calls else []:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and not val.is_floating_point() and val.dtype != torch.bool:
            stack, seen = [node], set()
            while stack:
                n = stack.pop()
                if isinstance(n.meta.get("val"), FakeTensor):
                    return True
                if n not in seen:
                    seen.add(n)
                    stack += [*n.all_input_nodes, *n.meta.get("again", ())]
    return False


def _refuse_dense(name: str, modules: dict[str, nn.Module], candidates: BlockCandidates) -> Refusal:
    """Return the refusal of a block whose experts all contribute to each token."""
    nodes = candidates.calls[name].outputs
    return Refusal(
        name,
        "all its branches contribute to every token (dense gates, soft slots), so nothing can be skipped",
        source=str(nodes[0].meta["source"]) if nodes else "",
        remedy="select experts per token, for example with topk; if the model does so only after a warm-up, compile it "
        "in that state",
    )


def _refuse_unused_choice(chain: list[str], modules: dict[str, nn.Module], candidates: BlockCandidates) -> Refusal:
    """Return the refusal of a chain that selects something per token, while no parameter depends on the selection."""
    name = chain[min(1, len(chain) - 1)]
    nodes = candidates.calls[chain[0]].outputs
    return Refusal(
        name,
        "the block selects at this line, but every parameter contributes to the outputs of all tokens",
        source=str(nodes[0].meta["source"]) if nodes else "",
        remedy="if these are experts, they must compute each row by itself, in ops that torch differentiates: no batch "
        "norm in training, no attention among the rows, no autograd.Function",
        likely=not _priority(name, modules, candidates)[0],
    )


def _is_token_embedding(refusal: Refusal, modules: dict[str, nn.Module], candidates: BlockCandidates) -> bool:
    """Return whether the supposed experts are the embedding of token ids, which every language model has."""
    parts = [f"{refusal.name}.{culprit}".lstrip(".").rpartition(".")[0] for culprit in refusal.culprits]
    is_likely = refusal.name in candidates.structural  # it has other expert-like parameters
    return (
        bool(parts)
        and not is_likely
        and all(
            isinstance(modules.get(part), nn.Embedding)
            and part in candidates.calls
            and not _receives_expert_index(part, candidates)
            for part in parts
        )
    )


def _overlaps(name: str, names: set[str]) -> bool:
    """Return whether a module is, contains or is part of a module in `names`."""
    return any(name == t or t.startswith(name + ".") or name.startswith(t + ".") or not name or not t for t in names)


def _prove_equal_modules(
    name: str, modules: dict[str, nn.Module], candidates: BlockCandidates, plan: Plan
) -> list[MatchedBlock]:
    """Prove one module, and reuse its program for all modules that differ only in their weights."""
    blocks: list[MatchedBlock] = []
    signature = compute_signature(modules[name])
    attributes, has_mode_guard = find_attributes(modules[name]), has_custom_train(modules[""])
    unproven = [name, *[n for n, m in modules.items() if n != name and compute_signature(m) == signature]]
    while unproven:
        first = unproven[0]
        call = candidates.calls.get(first) or dataclasses.replace(candidates.calls[name], name=first)
        announce(f"proving {first or type(modules[first]).__name__}")
        start = time.perf_counter()
        with record_reads(modules[first], attributes) as reads:
            result = _rewrite_as_called(modules[first], call, candidates, plan, reads)
        if has_mode_guard:
            reads.add(BLOCK_MODE)
        equal = (first,) + tuple(
            n
            for n in unproven
            if n != first and all(is_same(read_value(modules[n], w), read_value(modules[first], w)) for w in reads)
        )
        blocks.append(MatchedBlock(equal, call, result, time.perf_counter() - start, frozenset(reads)))
        unproven = [n for n in unproven if n not in equal]
    return blocks


def _rewrite_as_called(
    module: nn.Module, call: SurveyedCall, candidates: BlockCandidates, plan: Plan, reads: set[AttributeLocation]
) -> BlockRewrite:
    """Rewrite a module for its recorded call, with stand-ins for objects if it passes any.

    Raises:
        Refused: see `rewrite_block`; also if the module does not run on abstract tensors, or at other sizes. Its trace
            has all attempts.
    """
    log: list[AttemptRun] = []
    try:
        return rewrite_with_objects(
            functools.partial(rewrite_block, module, call.name, plan=plan, log=log),
            call.args,
            call.kwargs,
            functools.partial(candidates.skip_calls, call),
            reads,
            functools.partial(_refusing_errors, module, call),
        )
    except Refused as why:
        if log:
            why.trace = dataclasses.replace(why.trace or ProofTrace(), attempts=tuple(log))
        raise


@contextlib.contextmanager
def _refusing_errors(module: nn.Module, call: SurveyedCall) -> Iterator[None]:
    """Turn errors of `rewrite_block` into refusals with a source line."""
    is_graph = isinstance(module, fx.GraphModule)
    try:
        yield
    except Refused as why:
        if is_graph:
            raise why.replace(source=why.source, remedy=_FLAT) from why
        if not why.source:
            raise why.replace(source=forward_line(module), remedy=why.remedy) from why
        raise
    except CaptureError as error:
        if cache := _find_cache((call.args, call.kwargs)):
            reason = f"its argument of class {cache} holds tensors of this run of the model, as a key-value cache does"
            raise Refused(reason, source=forward_line(module), remedy=NO_CACHE) from error
        raise Refused(f"it does not run on abstract tensors: {error}") from error
    except Exception as error:  # the user's code at unsupported sizes
        line = user_line(error)
        if (line or is_graph) and not is_internal_error(error):
            inputs_text = "at other sizes than the example's" if _is_capturable(module, call) else "on abstract tensors"
            reason = f"it does not run {inputs_text} ({summarize_error(error)})"
            raise Refused(reason, source=line, remedy=_FLAT if is_graph else "") from error
        raise refuse_own_bug(error, line or forward_line(module)) from error


def _find_cache(tree: Any, depth: int = 4) -> str:
    """Return the class of an argument that holds tensors of the abstract run in its attributes, or ""."""
    for leaf in pytree.tree_leaves(tree):
        attributes = list(getattr(leaf, "__dict__", {}).values())
        if isinstance(leaf, (torch.Tensor, nn.Module, type)) or not attributes or not depth:
            continue
        if any(isinstance(t, FakeTensor) for t in pytree.tree_leaves(attributes)) or _find_cache(attributes, depth - 1):
            return type(leaf).__name__
    return ""


def _is_capturable(module: nn.Module, call: SurveyedCall) -> bool:
    """Return whether a module runs on abstract tensors of the example's sizes."""
    with suppress_program_errors(MoefxError):
        capture_block(module, call.args, call.kwargs, Routing("diverse", 0))
        return True
    return False
