"""Prove a module as the model calls it, and reuse its program for modules that differ in their weights only."""

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
from ..capture.environment.code_locations import suppress_program_errors
from ..capture.search.block_search import BlockCandidates, SurveyedCall
from ..capture.search.module_structure import compute_signature
from ..capture.tracing.concrete_routing import Routing
from ..errors import CaptureError, MoefxError, Refused, summarize_error
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
from ..util.progress import announce
from ..util.user_code import forward_line, user_line
from .block_compiler import BlockRewrite, rewrite_block, rewrite_with_objects
from .own_bugs import find_own_bug
from .survey_result import MatchedBlock

_FLAT = "moefx.rewrite_graph(graph, example_inputs) looks into graphs"


def prove_equal_modules(
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
        if bug := find_own_bug(error, module):
            raise bug from error
        inputs_text = "at other sizes than the example's" if _is_capturable(module, call) else "on abstract tensors"
        reason = f"it does not run {inputs_text} ({summarize_error(error)})"
        raise Refused(reason, source=user_line(error), remedy=_FLAT if is_graph else "") from error


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
