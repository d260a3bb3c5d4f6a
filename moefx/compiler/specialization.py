"""Specialize a rewritten block for calls of another kind."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from .._plan import Plan
from ..capture.arguments.block_arguments import Arguments
from ..capture.environment.code_locations import is_internal_error
from ..capture.environment.worker_thread import run_proof
from ..capture.search.block_search import search_blocks
from ..capture.search.module_structure import compute_signature
from ..capture.search.skipped_calls import SkippedCall, SkipPlan
from ..capture.state.inner_calls import copy_abstract, iterate_objects, iterate_tensors
from ..errors import MoefxError, Refused, summarize_error
from ..ir.argument_binding import Path, Specialization, describe_leaf, flatten_arguments, make_signature_binder
from ..ir.guards.attribute_reads import (
    BLOCK_MODE,
    AttributeLocation,
    find_attributes,
    find_tied_tensors,
    read_value,
    record_reads,
)
from ..ir.guards.stored_values import StoredForward, is_same
from ..ir.passed_objects import replace_objects
from ..passes.pass_manager import PassError
from ..runtime.block_forward import BlockForward
from ..runtime.change_detection import ReadAttributes
from ..runtime.program import Program
from ..util.module_names import quote_name
from ..util.user_code import forward_line, user_line
from .block_compiler import BlockRewrite, finish_block, rewrite_block, rewrite_with_objects
from .check_policy import CheckPolicy
from .own_bugs import find_own_bug
from .program_builder import build_program, move_kind

Kinds = tuple[tuple[Path, tuple[Any, ...]], ...]  # paths and kinds of arguments, see `Specialization`


class LazySpecializer:
    """Specializes a block for a call that no program admits: another mode, dtype or device, or sizes that take another
    branch. Blocks of one proof share their programs. Picklable.

    Args:
        arguments: the arguments of the call that the block was compiled with.
        by_mode: a program holds for one mode only, whether or not the block reads its mode (see `has_custom_train`).
    """

    def __init__(self, arguments: Arguments, plan: Plan, by_mode: bool):
        self.arguments, self.plan, self.by_mode = arguments, plan, by_mode
        self.shared_programs: list[_SharedProgram] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shared_programs": []}

    def __call__(
        self, block: nn.Module, call: Specialization, args: tuple | None, kwargs: Mapping[str, Any] | None
    ) -> Program | None:
        forward = vars(block).get("forward")
        assert isinstance(forward, BlockForward)
        block_signature = compute_signature(block)
        self.shared_programs = [shared for shared in self.shared_programs if shared.block() is not None]
        for shared in self.shared_programs:
            if shared.signature == block_signature and _admits_call(block, shared, call, args, kwargs):
                return shared.program.renamed(forward.name)
        try:
            program, attributes_read = run_proof(
                lambda: self._specialize(block, forward, call, args, kwargs), call.device, call.autocast
            )
        except Refused as why:
            if why.source:
                raise
            raise why.replace(source=forward_line(block), remedy=why.remedy) from why
        except Exception as error:
            is_deliberate = isinstance(error, MoefxError) and not isinstance(error, PassError)
            if not is_deliberate and (bug := find_own_bug(error, block)):
                raise bug from error
            raise
        self.shared_programs.append(_SharedProgram(weakref.ref(block), block_signature, attributes_read, program))
        return program

    def _specialize(
        self,
        block: nn.Module,
        forward: BlockForward,
        call: Specialization,
        args: tuple | None,
        kwargs: Mapping[str, Any] | None,
    ) -> tuple[Program, set[AttributeLocation]]:
        if (program := _find_program_of_other_device(block, forward, call)) is not None:
            attributes_read = {
                location
                for location, value in program.attributes.items()
                if not isinstance(value, (AttributeLocation, StoredForward))
            }
            return program.with_arguments(call.arguments), attributes_read
        is_traced = args is None
        abstract = pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.detach().to("meta") if t.is_floating_point() else t.detach().cpu(),
            self._arguments_from_kinds(block, call) if args is None else (args, dict(kwargs or {})),
        )
        tied = find_tied_tensors(block)
        expert_layout = forward.expert_layout
        if expert_layout is not None:
            from ..runtime.ranks.sharding import copy_with_all_experts  # torch.distributed is not in every build

            block = copy_with_all_experts(block, expert_layout.parameters, expert_layout.placement)
            forward = vars(block)["forward"]
        calls_before = forward.counts.original
        try:
            with forward.force_graph("original"):
                # steps 2 to 6 of `COMPILE_STEPS`, then 8 to 11, and 7 if the program admits the call
                result, (call_args, call_kwargs), attributes_read = self._prove(block, forward.name, abstract)
                rewrite = finish_block(block, result, self.plan, expert_layout)
                program = build_program(block, rewrite, call_args, call_kwargs, call.autocast, attributes_read, tied)
                if not is_traced:
                    _check_admits(block, program, *abstract)
                self._check_numerically(block, forward.name, result, expert_layout is not None, is_traced)
        finally:
            forward.counts.original = calls_before  # captures are no calls of the user
        return program.with_arguments(_keep_objects(call.arguments, program)), attributes_read

    def _prove(
        self, block: nn.Module, name: str, abstract: tuple[tuple, dict[str, Any]]
    ) -> tuple[BlockRewrite, tuple[tuple, dict[str, Any]], set[AttributeLocation]]:
        """Prove and rewrite a block for abstract arguments.

        Returns:
            The rewrite, the arguments that its program takes, and the attributes that captures read.
        """
        find_skipping = self._find_skipping(block, *abstract)
        with record_reads(block, find_attributes(block)) as attributes_read:
            rewrite = functools.partial(self._rewrite, block, name)
            result, args, kwargs = rewrite_with_objects(rewrite, *abstract, find_skipping, attributes_read)
        if self.by_mode:
            attributes_read.add(BLOCK_MODE)
        return result, abstract if result.skipped else (args, kwargs), attributes_read  # skipped: args has stand-ins

    def _check_numerically(
        self, block: nn.Module, name: str, result: BlockRewrite, is_spread: bool, is_traced: bool
    ) -> None:
        """Run the numeric check, if one is due and the block has all values here.

        Raises:
            Refused: the rewrite differs from the block.
        """
        obstacle = "the call is only being traced" if is_traced else ""
        if is_spread:
            obstacle = "this rank has only a part of the experts"
        verdict = CheckPolicy(self.plan).check(
            lambda: {name: block}, result, obstacle=obstacle, source=forward_line(block)
        )
        verdict.warn_if_unchecked(f"{quote_name(name)} for a new kind of call")

    def _find_skipping(
        self, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> Callable[[bool], SkipPlan | None]:
        """Run a block with objects once, on abstract tensors and copies of the objects, to find the submodules that
        receive them.
        """
        if not any(True for _ in iterate_objects(args, kwargs)):
            return lambda for_all_objects: None
        try:
            candidates = search_blocks(block, *_copy_objects(args, kwargs))
        except Refused as refused:
            refusal = refused
        except Exception as error:
            if is_internal_error(error):
                raise
            refusal = Refused(
                f"it does not run on abstract tensors ({summarize_error(error)})",
                source=user_line(error),
                remedy="read values of floats outside of the block, and pass the result as an argument",
            )
        else:
            return lambda for_all_objects: candidates.skip_calls(candidates.calls[""], for_all_objects)

        def refuse(for_all_objects: bool) -> SkipPlan | None:
            raise refusal

        return refuse

    def _rewrite(
        self,
        block: nn.Module,
        name: str,
        args: tuple,
        kwargs: dict[str, Any],
        skipped: Mapping[str, SkippedCall] | None = None,
    ) -> tuple[BlockRewrite, tuple, dict[str, Any]]:
        """Rewrite a block for a call. If that is refused, try again with the recorded shapes: a single token does not
        show which axes hold tokens.

        Returns:
            The rewrite, and the arguments of its captures: copies of objects that have no stand-ins.
        """
        if skipped is None:
            args, kwargs = _copy_objects(args, kwargs)
        try:
            return rewrite_block(block, name, args, kwargs, self.plan, skipped), args, kwargs
        except Refused as why:
            try:
                args, kwargs = self._with_recorded_shapes(block, args, kwargs)
                return rewrite_block(block, name, args, kwargs, self.plan, skipped), args, kwargs
            except Refused:
                raise why from None

    def _with_recorded_shapes(
        self, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call, with its tensors replaced by tensors of the recorded shapes.

        Raises:
            Refused: the tensors do not correspond to the recorded ones.
        """
        bind = make_signature_binder(block)
        recorded_args, recorded_kwargs = self.arguments.build_call(self.arguments.sizes)
        recorded_leaves = dict(flatten_arguments(bind(*recorded_args, **recorded_kwargs)))
        described_leaves = {id(t): (path, describe_leaf(t)) for path, t in flatten_arguments(bind(*args, **kwargs))}
        if not all(
            _has_same_type(recorded_leaves.get(path), kind)
            for path, kind in described_leaves.values()
            if kind[0] == "tensor"
        ):
            raise Refused(
                "its tensors do not correspond to those of the recorded call",
                remedy="compile with example_inputs that have the same arguments, with the same number of axes",
            )
        resized_tensors = {
            key: recorded_leaves[path].to(kind[1])
            for key, (path, kind) in described_leaves.items()
            if kind[0] == "tensor"
        }
        return pytree.tree_map_only(torch.Tensor, lambda t: resized_tensors.get(id(t), t), (args, kwargs))

    def _arguments_from_kinds(self, block: nn.Module, call: Specialization) -> tuple[tuple, dict[str, Any]]:
        """Make arguments for a call that is only being traced: tensors of the recorded shapes, and the call's own
        numbers, names and flags.

        Raises:
            Refused: the kinds of the arguments do not determine them.
        """
        args, kwargs = self.arguments.build_call(self.arguments.sizes)
        bound = inspect.signature(block.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            recorded_leaves = dict(flatten_arguments([(name, value)]))
            kinds = {path: kind for path, kind in call.arguments if path[0] == name}
            single_kind = kinds.get((name,), ())
            if kinds.keys() == recorded_leaves.keys() and all(
                _has_same_type(recorded_leaves[path], kind) for path, kind in kinds.items()
            ):
                cast = {
                    id(t): t.to(kinds[path][1]) for path, t in recorded_leaves.items() if isinstance(t, torch.Tensor)
                }
                bound.arguments[name] = pytree.tree_map_only(torch.Tensor, lambda t, cast=cast: cast[id(t)], value)
            elif len(kinds) == 1 and len(single_kind) == 2 and describe_leaf(single_kind[1]) == single_kind:
                bound.arguments[name] = single_kind[1]
            else:
                raise Refused(
                    f"argument {name} has another type than in example_inputs, and torch.compile traces the call "
                    "before it ever ran",
                    remedy="run it once in eager mode, before torch.compile traces it",
                )
        return bound.args, bound.kwargs


def _keep_objects(arguments: Kinds, program: Program) -> Kinds:
    """Return the kinds of a call's arguments, where each object that the program passes on counts as one."""
    kinds = dict(arguments)
    return tuple((p, kind if p in program.objects else kinds[p]) for p, kind in program.key.arguments)


def _copy_objects(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Copy the objects among arguments, with meta tensors for their floats, because captures may write to them."""
    copies = {id(o): _copy_object(o) for o in iterate_objects(args, kwargs) if type(o) not in (list, dict)}
    return replace_objects((args, kwargs), copies)


def _copy_object(passed_object: Any) -> Any:
    """Copy an object. One without tensors may stay: changes by a capture are undone.

    Raises:
        Refused: it holds tensors and cannot be copied.
    """
    try:
        return copy_abstract(passed_object)
    except Exception as error:
        if not any(True for _ in iterate_tensors(passed_object)):
            return passed_object
        name = type(passed_object).__name__
        raise Refused(
            f"it is called with a {name} that holds tensors and cannot be copied ({summarize_error(error)})",
            remedy=f"make copy.deepcopy of a {name} work",
        ) from error


def _check_admits(block: nn.Module, program: Program, args: tuple, kwargs: dict[str, Any]) -> None:
    """Check that a program admits the call that it was made for, as one with the recorded shapes may not.

    Raises:
        Refused: a guard of the program excludes the call's sizes.
    """
    guard = program.find_failed_guard(
        block, flatten_arguments(make_signature_binder(block)(*args, **kwargs), program.objects)
    )
    if guard is not None:
        raise Refused(
            f"no proof was found for the sizes of this call, only for {guard}",
            remedy="compile with example_inputs of these sizes, to read in moefx.explain why their proof fails",
        )


def _has_same_type(value: Any, kind: tuple) -> bool:
    """Return whether a value has the given kind, apart from the dtype and device of tensors. False for objects."""
    if isinstance(value, torch.Tensor):
        return kind[0] == "tensor" and kind[3] == value.dim()
    return kind == describe_leaf(value) and kind[0] != "object"


class _SharedProgram(NamedTuple):
    """A later program, with its block, the block's signature, and the attributes that captures read."""

    block: weakref.ref[nn.Module]
    signature: tuple
    attributes_read: set[AttributeLocation]
    program: Program


def _admits_call(
    block: nn.Module, shared: _SharedProgram, call: Specialization, args: tuple | None, kwargs: Mapping[str, Any] | None
) -> bool:
    """Return whether a program that was made for another block admits a call of this block."""
    program, other = shared.program, shared.block()
    if other is None or not all(is_same(read_value(block, w), read_value(other, w)) for w in shared.attributes_read):
        return False
    if not program.key.admits(call) or not ReadAttributes(block, program.attributes).are_unchanged():
        return False
    if program.guard is None or args is None:
        return True
    leaves = flatten_arguments(make_signature_binder(block)(*args, **(kwargs or {})), program.objects)
    return program.find_failed_guard(block, leaves) is None


def _find_program_of_other_device(block: nn.Module, forward: BlockForward, call: Specialization) -> Program | None:
    """Find a program for a call that differs from the program's kind in the device alone.

    Captures do not depend on the device without autocast. There is none if a program admits the call, whose guards then
    fail.
    """
    programs = [p for p in forward.programs if ReadAttributes(block, p.attributes).are_unchanged()]
    if any(p.key.admits(call) for p in programs):
        return None
    for program in programs:
        training = None if program.key.training is None else call.training
        expected = call._replace(grad=program.key.grad, training=training)
        if program.is_device_independent and _without_device(program.key) == _without_device(expected):
            return program
    return None


def _without_device(key: Specialization) -> Specialization:
    return key._replace(arguments=tuple((path, move_kind(kind, "any")) for path, kind in key.arguments))
