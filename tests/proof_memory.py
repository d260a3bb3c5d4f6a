"""Prove equal blocks once: a test that compiles one for another mesh, wrapper or mode reuses the proof.

`compile` spends most of its time on proofs. Tests of proofs and of side effects of `compile` do not use this module.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import nn

import moefx
import moefx.compiler.check_policy
import moefx.compiler.equal_modules
from moefx.capture.search.block_search import BlockCandidates, SurveyedCall
from moefx.capture.search.module_structure import compute_signature
from moefx.compiler.block_compiler import BlockRewrite
from moefx.compiler.numeric_check import NumericCheck, Outcome, check_numerically
from moefx.ir.guards.attribute_reads import AttributeLocation, find_globals, find_tied_tensors, read_value
from moefx.ir.guards.code_closure import FUNCTION_TYPES
from moefx.ir.guards.stored_values import StoredFieldNames, is_configuration, is_same, snapshot


@dataclasses.dataclass
class _Proof:
    """Proof of `block`, the attributes that it depends on, and the globals that the block's code names."""

    block: nn.Module
    read: set[AttributeLocation]
    globals: dict[AttributeLocation, Any]
    result: BlockRewrite


_rewrite_as_called = moefx.compiler.equal_modules._rewrite_as_called
_PROOFS: dict[tuple | None, list[_Proof]] = defaultdict(list)
_CHECKS: list[tuple[weakref.ref[BlockRewrite], NumericCheck]] = []


def rewrite_once(
    module: nn.Module, call: SurveyedCall, candidates: BlockCandidates, plan: moefx.Plan, read: set[AttributeLocation]
) -> BlockRewrite:
    """Replace `equal_modules._rewrite_as_called`.

    Two blocks are equal if `survey_model` would give two modules of a model the same program, and the methods and
    globals of their classes and the types of all arguments are equal.
    """
    before = frozenset(read)
    key, names = _make_key(module, call, candidates, plan), find_globals(module)
    proof = next((p for p in _PROOFS.get(key, ()) if _holds_for(p, module, names)), None)
    read.clear()  # remove the attributes that the comparison read
    read |= before
    if proof is not None:
        read |= proof.read
        return proof.result
    result = _rewrite_as_called(module, call, candidates, plan, read)
    if key is not None:
        held = {where: StoredFieldNames(v) if is_configuration(v) else snapshot(v) for where, v in names.items()}
        _PROOFS[key].append(_Proof(module, set(read), held, result))
    return result


def forget_proofs() -> None:
    """Release all proofs and their blocks."""
    _PROOFS.clear()


def check_once(block: nn.Module, result: BlockRewrite, name: str, seconds: float) -> NumericCheck:
    """Replace `check_policy.check_numerically`: return the earlier check of a reused proof."""
    for proof, check in _CHECKS:
        if proof() is result:
            return check
    check = check_numerically(block, result, name, seconds)
    if check.outcome is Outcome.AGREES:
        _CHECKS.append((weakref.ref(result), check))
    return check


def share_proofs() -> mock._patch:
    """Return a context in which `compile` and `explain` prove equal blocks once in the process."""
    return mock.patch.multiple(moefx.compiler.equal_modules, _rewrite_as_called=rewrite_once)


def share_checks() -> mock._patch:
    """Return a context in which reused proofs are not checked numerically again, even with other weights."""
    return mock.patch.multiple(moefx.compiler.check_policy, check_numerically=check_once)


def _holds_for(proof: _Proof, module: nn.Module, names: dict[AttributeLocation, Any]) -> bool:
    attributes = [(read_value(module, where), read_value(proof.block, where)) for where in proof.read]
    return is_same(names, proof.globals) and all(is_same(value, other) for value, other in attributes)


def _make_key(module: nn.Module, call: SurveyedCall, candidates: BlockCandidates, plan: moefx.Plan) -> tuple | None:
    """Return the inputs of a proof besides attributes and globals, or None if some cannot be compared."""
    arguments, structure = pytree.tree_flatten((call.args, call.kwargs))
    passes_objects = candidates.skip_calls(call) is not None  # calls of other modules may get some
    if passes_objects or not all(map(_is_comparable, arguments)):
        return None
    classes = dict.fromkeys(cls for m in module.modules() for cls in type(m).__mro__)
    defined = [cls for cls in classes if not cls.__module__.startswith(("torch.", "builtins"))]
    methods = [
        (cls, name, value) for cls in defined for name, value in vars(cls).items() if isinstance(value, FUNCTION_TYPES)
    ]
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    return (
        call.name,
        compute_signature(module),
        tuple(find_tied_tensors(module).items()),
        tuple(methods),
        frozenset(devices),
        tuple(map(_describe_kind, arguments)),
        structure,
        torch.get_default_dtype(),
        (plan.fuse, plan.disable, plan.checkpoint),
    )


def _is_comparable(argument: Any) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.is_floating_point() and argument.layout is torch.strided
    return isinstance(argument, (bool, int, float, str, type(None), torch.dtype))


def _describe_kind(argument: Any) -> tuple:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype, argument.device, argument.requires_grad
    return type(argument), argument
