"""Survey a model: find its MoE blocks, prove each, and refuse modules that look like one."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .._plan import Plan
from ..capture.environment.worker_thread import run_proof
from ..capture.search.block_search import BlockCandidates
from ..errors import Cause, MoefxError, Refused
from ..ir.argument_binding import find_device
from ..util.model_copy import copy_model
from ..util.progress import announce
from .equal_modules import prove_equal_modules
from .example_run import run_examples, run_originals
from .observed_blocks import drop_observed_blocks, is_fully_sharded
from .survey_result import MatchedBlock, Refusal, Survey


def survey_model(model: nn.Module, example_inputs: Any, plan: Plan) -> Survey:
    """Find, prove and rewrite the MoE blocks of a model, in a worker thread.

    Runs on a copy (`Survey.twin`). A model that cannot be copied is surveyed in place, and restored.

    Autocast is off: calls under autocast are proven when they occur.

    Raises:
        InvalidInput: the example inputs do not fit.
        CaptureError: the model does not run on them.
        MoefxError: the model is sharded by FSDP.
    """
    return run_proof(lambda: _survey_model(model, example_inputs, plan), find_device(model).type)


def _survey_model(model: nn.Module, example_inputs: Any, plan: Plan) -> Survey:
    start = time.perf_counter()
    announce(f"running {type(model).__name__} on abstract tensors")
    if is_fully_sharded(model):
        raise MoefxError(
            f"{type(model).__name__} is sharded already, and FSDP modules cannot be copied: "
            "call moefx.compile first, then fully_shard on the compiled model"
        )
    twin, copies = _try_copy(model)
    with run_originals(twin), torch.compiler.set_stance("force_eager"):  # torch may have compiled some modules
        try:
            candidates = run_examples(twin, example_inputs)
        except Refused as why:
            refusal = Refusal("", why.reason, why.source, remedy=why.remedy, cause=why.cause)
            return Survey((), (refusal,), time.perf_counter() - start, False, twin, copies)
        blocks, refusals = _prove_candidates(twin, candidates, plan)
    blocks, others = drop_observed_blocks(model, blocks)
    seconds, traffic = time.perf_counter() - start, candidates.traffic
    return Survey(tuple(blocks), (*refusals, *others), seconds, candidates.has_attention, twin, copies, traffic=traffic)


def _try_copy(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Copy a model. If that fails, return the model itself and no copies."""
    try:
        return copy_model(model)
    except Exception:  # `compile` says so when it needs the copy
        return model, {}


def _prove_candidates(
    model: nn.Module, candidates: BlockCandidates, plan: Plan
) -> tuple[list[MatchedBlock], list[Refusal]]:
    """Prove the modules around each selection: those with expert-like parameters and the smaller ones first, at most
    two per selection. Modules that receive an expert index come last, because a block should contain its router.
    Modules that only pass their arguments on to a refused one are left out: their proof is the same.
    """
    modules = dict(model.named_modules())
    selections_of: dict[str, list[int]] = {}
    for i, enclosing in enumerate(candidates.enclosing_modules):
        for name in enclosing:
            selections_of.setdefault(name, []).append(i)
    blocks: list[MatchedBlock] = []
    rewritten_names: set[str] = set()
    refusals: dict[int, list[Refusal]] = {i: [] for i in range(len(candidates.enclosing_modules))}
    for name in sorted(selections_of, key=lambda n: _priority(n, modules, candidates)):
        open_selections = [
            i for i in selections_of[name] if len(refusals[i]) < 2 or _receives_expert_index(name, candidates)
        ]
        if not open_selections or _overlaps(name, rewritten_names):
            continue
        refused_names = {refusal.name for i in open_selections for refusal in refusals[i]}
        if any(_adds_nothing(name, inner, modules, candidates) for inner in refused_names):
            continue
        try:
            proven = prove_equal_modules(name, modules, candidates, plan)
        except Refused as why:
            refusal = Refusal(name, why.reason, why.source, why.culprits, why.remedy, trace=why.trace, cause=why.cause)
            if why.cause is Cause.NOT_ROUTED:
                if name not in candidates.branches:
                    continue
                refusal = _refuse_dense(name, modules, candidates)
            for i in open_selections:
                refusals[i].append(refusal)
        else:
            blocks += proven
            rewritten_names |= {n for m in proven for n in m.names}
    for i, enclosing in enumerate(candidates.enclosing_modules):
        if not refusals[i] and not any(_overlaps(name, rewritten_names) for name in enclosing):
            refusals[i].append(_refuse_unused_choice(enclosing, modules, candidates))
    by_name = {r[0].name: r[0] for r in refusals.values() if r and not _is_token_embedding(r[0], modules, candidates)}
    return blocks, [r for r in by_name.values() if not _overlaps(r.name, rewritten_names)]


def _priority(name: str, modules: dict[str, nn.Module], candidates: BlockCandidates) -> tuple:
    """Return the sort key of candidates: expert-like parameters first, then own routers, then few parameters."""
    inside = f"{name}." if name else ""
    expert_like = name in candidates.structural or any(s.startswith(inside) for s in candidates.structural)
    return not expert_like, _receives_expert_index(name, candidates), sum(p.numel() for p in modules[name].parameters())


def _adds_nothing(outer: str, inner: str, modules: dict[str, nn.Module], candidates: BlockCandidates) -> bool:
    """Return whether a module owns nothing but another one, and only passes its arguments on to it."""

    def list_owned(name: str) -> set[int]:
        module = modules[name]
        return {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}

    calls = candidates.calls
    if outer not in calls or inner not in calls or not calls[inner].is_passed_on_by(calls[outer]):
        return False
    enclosing = {id(m) for n, m in modules.items() if inner.startswith(f"{n}.") or not n}
    return list_owned(outer) <= list_owned(inner) | enclosing


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


def _refuse_unused_choice(enclosing: list[str], modules: dict[str, nn.Module], candidates: BlockCandidates) -> Refusal:
    """Return the refusal of modules around a selection on which no parameter depends, innermost first."""
    name = enclosing[min(1, len(enclosing) - 1)]
    nodes = candidates.calls[enclosing[0]].outputs
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
