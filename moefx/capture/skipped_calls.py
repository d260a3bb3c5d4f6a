"""Submodules that are given an object of the caller's, such as a key-value cache, are not run in captures.

What they return was recorded when the whole model ran on abstract tensors. In captures and in the numeric check an
unknown function of their inputs takes their place, with results of the recorded shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import Refused
from ..ir.attributes import Where
from ..ir.passed_objects import PassedObject, is_passed, replace_objects
from .captured import is_float, tensors_in
from .effects import HOOKS
from .inner_calls import InnerCall, objects_in
from .source import user_source


@dataclasses.dataclass(frozen=True)
class ResultTensor:
    """How a result follows from the inputs of a call.

    Attributes:
        like: position among the tensors of the call; the result has its shape, but for the last axis.
        width: size of the last axis; -1 if it is that of the input.
        dtype: None if it is that of the input.
    """

    like: int
    width: int
    dtype: torch.dtype | None


@dataclasses.dataclass(frozen=True)
class OtherResult:
    """A result of which nothing is known but its class."""

    text: str
    cls: type


Result = ResultTensor | OtherResult | int | None  # an int: the position among the objects of the call


@dataclasses.dataclass(frozen=True)
class SkippedCall:
    """A call of a submodule that is given objects.

    Attributes:
        module: its name, from the block.
        results: what is known of each.
        container: tuple or list, if it returns several; None if it returns one.
    """

    module: str
    results: tuple[Result, ...]
    container: type | None

    @classmethod
    def of(cls, module: str, args: tuple, kwargs: dict[str, Any], out: Any, widths: Collection[int]) -> SkippedCall:
        """Describe a recorded call, in whose arguments `PassedObject`s stand for objects. Results may have the last
        axis of an input, or one of `widths`."""
        inputs = tensors_in((args, kwargs))
        objects = _stand_ins_among((args, kwargs))
        container = type(out) if type(out) in (tuple, list) else None
        results = (_describe_result(r, inputs, objects, widths) for r in (out if container else [out]))
        return cls(module, tuple(results), container)


def _stand_ins_among(tree: Any) -> list[Any]:
    return [v for v in pytree.tree_leaves(tree) if is_passed(v)]


def _describe_result(
    result: Any, inputs: Sequence[torch.Tensor], objects: Sequence[Any], widths: Collection[int]
) -> Result:
    if result is None:
        return None
    if is_passed(result):
        return next((i for i, o in enumerate(objects) if o is result), OtherResult("an object", type(result)))
    if not isinstance(result, torch.Tensor):
        return OtherResult(f"a {type(result).__name__}", type(result))
    if not is_float(result):
        return OtherResult("integers", torch.Tensor)
    axes = [result.shape]
    if result.dim() and result.shape[-1] in widths and result.shape[-1] not in result.shape[:-1]:
        axes.append(result.shape[:-1])
    for same in axes:
        for i, t in enumerate(inputs):
            if is_float(t) and t.dim() == result.dim() > 0 and t.shape[: len(same)] == same:
                width = -1 if t.shape == result.shape else result.shape[-1]
                return ResultTensor(i, width, None if t.dtype == result.dtype else result.dtype)
    return OtherResult(f"a tensor of {list(result.shape)}, which is the shape of none of its inputs,", torch.Tensor)


@dataclasses.dataclass
class Skipping:
    """The stand-ins of one lift.

    Attributes:
        args, kwargs: of the call of the block, with the stand-ins.
        calls: of submodules that are skipped.
        read: refusals of what was read from stand-ins; an `except` of the user's may have hidden them.
        attributes: of submodules, which these set when they are called.
    """

    args: tuple
    kwargs: dict[str, Any]
    calls: dict[str, SkippedCall]
    read: list[Refused]
    attributes: set[tuple[str, str]]

    def check(self, read: Iterable[Where]) -> None:
        """Check what the captures of the block have read.

        Args:
            read: attributes of the block and its submodules.

        Raises:
            Refused: it needs what only the skipped calls know.
        """
        if self.read:
            raise self.read[0]
        for where in read:
            if (where.module, where.name) in self.attributes:
                raise Refused(
                    f"the block reads {where.module}.{where.name}, which {where.module} sets in a call that is given "
                    "an object and was not looked into",
                    culprits=(f"{where.module}.{where.name}",),
                    remedy=f"return the value from {where.module}",
                )


def skip(
    args: tuple, kwargs: dict[str, Any], objects: Mapping[int, Any] | None, inner: Iterable[InnerCall]
) -> Skipping | None:
    """Put stand-ins in the place of objects that a block passes on to submodules; None if it passes none on.

    Args:
        objects: those that submodules may write to, by id; None: all.
        inner: calls of submodules that are given objects.

    Raises:
        Refused: a submodule returns other things at different calls, or its calls cannot be skipped.
    """
    read: list[Refused] = []

    def refuse(name: str, what: str) -> Exception:
        why = Refused(
            f"the block itself reads {name}{what}, and what it holds is only known when it runs",
            source=str(user_source()),
            remedy=f"read it in the submodule that is given {name}, or pass the block what it needs as tensors and "
            "numbers",
        )
        read.append(why)
        return why

    given = {id(o): o for o in objects_in(args, kwargs)}
    own = given.keys() if objects is None else given.keys() & objects.keys()
    inner = [c for c in inner if own & {id(o) for o in objects_in(c.args, c.kwargs)}]
    if not inner:
        return None
    # all that is passed to these, as other calls may write to what this one has not written to
    own = given.keys() & {id(o) for c in inner for o in objects_in(c.args, c.kwargs)}
    stand_ins = {i: PassedObject(f"the given {type(given[i]).__name__}", type(given[i]), refuse) for i in own}
    calls: dict[str, SkippedCall] = {}
    for c in inner:
        if missed := _missed_by_captures(c, stand_ins):
            what, remedy = missed
            raise Refused(f"{c.name} is given an object that it may write to, and {what}", remedy=remedy)
        a, k = replace_objects((c.args, c.kwargs), stand_ins)
        call = SkippedCall.of(c.name, a, k, replace_objects(c.out, stand_ins), c.changes.widths)
        if calls.setdefault(c.name, call) != call:
            raise Refused(
                f"{c.name} is called several times with an object that it may write to, and returns other shapes each "
                "time",
                remedy="use a submodule for each of the calls",
            )
    attributes = {(f"{c.name}.{path}".rstrip("."), key) for c in inner for path, key in c.changes.attributes}
    return Skipping(replace_objects(args, stand_ins), replace_objects(kwargs, stand_ins), calls, read, attributes)


def _missed_by_captures(call: InnerCall, stand_ins: Mapping[int, Any]) -> tuple[str, str] | None:
    """What a recorded call does that captures would not see, and a remedy."""
    given = list(objects_in(call.args, call.kwargs))
    made = [type(given[i]).__name__ for i in sorted(call.changes.containers) if id(given[i]) not in stand_ins]
    if made:
        what = f"writes to a {made[0]} that the block itself has not been given"
        return what, f"return the new contents from {call.name}"
    if call.changes.shares and call.is_overwritten:
        return (
            "the block writes in place to a tensor that it was given or returned, and that may be kept",
            "compute a new tensor instead: y = y + x, not y += x",
        )
    return call.changes.missed


@contextlib.contextmanager
def skipping(block: nn.Module, calls: Mapping[str, SkippedCall]) -> Iterator[None]:
    """While the context is open, calls of submodules that are given a stand-in return unknown results."""
    undone: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for name, call in calls.items():
            module = block.get_submodule(name)
            state = vars(module)
            hooks = {k: state[k] for k in HOOKS if state.get(k)}  # programs call the module with its hooks
            undone.append((state, {k: v for k, v in state.items() if k in hooks or k == "forward"}))
            state["forward"] = _Stub(module.forward, call, bool(hooks))
            state.update({k: type(held)() for k, held in hooks.items()})
        yield
    finally:
        for state, before in reversed(undone):
            state.pop("forward")
            state.update(before)


def check_reads_of_types(block: nn.Module) -> None:
    """Check that a block's own code does not call `type` of what it is given: `isinstance` sees the class that a
    stand-in stands for, `type` does not. Submodules that are given a stand-in are not run.

    Raises:
        Refused: it may.
    """
    for cls in type(block).__mro__:
        members = {} if cls.__module__.startswith(("torch.", "builtins")) else vars(cls)
        for name, member in members.items():
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            if code is None or name.startswith("__") or name == "extra_repr":
                continue
            for line in _calls_of_type(code):
                raise Refused(
                    f"{cls.__name__}.{name} asks for the type of a variable, which may be an object that it is given",
                    source=f"{code.co_filename.rsplit('/', 1)[-1]}:{line}",
                    remedy="use isinstance",
                )


def _calls_of_type(code: types.CodeType) -> Iterator[int]:
    """Yield the lines that call `type` of a variable other than `self`."""
    lines = dict(dis.findlinestarts(code))
    line, is_next = 0, False
    for step in dis.get_instructions(code):
        line = lines.get(step.offset) or line
        if is_next and step.opname in ("PUSH_NULL", "CACHE"):
            continue
        if is_next and step.opname.startswith("LOAD_") and step.argval != "self":
            yield line
        is_next = "GLOBAL" in step.opname and step.argval == "type"


class _Stub:
    """The forward of a submodule that is skipped if it is given a stand-in."""

    def __init__(self, original: Any, call: SkippedCall, has_hooks: bool):
        self.original, self.call, self.has_hooks = original, call, has_hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _stand_ins_among((args, kwargs)):
            if self.has_hooks:
                raise Refused(
                    f"{self.call.module} has hooks, and is called both with an object that it may write to and without",
                    source=str(user_source()),
                    remedy="remove the hooks, or use a submodule for each of the calls",
                )
            return self.original(*args, **kwargs)
        inputs, call = tensors_in((args, kwargs)), self.call
        known = [r for r in call.results if isinstance(r, ResultTensor)]
        if any(r.like >= len(inputs) for r in known):
            raise Refused(f"{call.module} is called with other tensors than those that were recorded")
        if not known:
            raise Refused(
                f"{call.module} is given an object that it may write to, and returns no tensor of the shape of one of "
                "its inputs",
                source=str(user_source()),
                remedy="let it return a tensor in the shape of the hidden states, alone or in a tuple",
            )
        made = iter(UnknownResult.apply(tuple(known), *inputs))
        objects = _stand_ins_among((args, kwargs))
        out = [self._one(i, r, made, objects) for i, r in enumerate(call.results)]
        return call.container(out) if call.container else out[0]

    def _one(self, i: int, result: Result, made: Iterator[torch.Tensor], objects: Sequence[Any]) -> Any:
        if result is None:
            return None
        if isinstance(result, ResultTensor):
            return next(made)
        if isinstance(result, int):
            return objects[result]
        name = self.call.module

        def refuse(what: str, read: str) -> Exception:
            return Refused(
                f"the block reads {what}{read}: the submodule is given an object that it may write to, and was not "
                "looked into",
                source=str(user_source()),
                remedy=f"compute with it in {name}, or return it in the shape of the hidden states",
            )

        # nothing may take a stand-in for a tensor
        cls = None if result.cls is torch.Tensor else result.cls
        return PassedObject(f"result {i} of {name}, {result.text}", cls, refuse)


def result_kind(result: Any) -> str:
    """The name of the class of a result of a skipped call, as it is in a capture."""
    is_tensor = isinstance(result, fx.Node) or result.__class__ is PassedObject  # which shows no other class
    return "Tensor" if is_tensor else result.__class__.__name__


class UnknownResult(torch.autograd.Function):
    """Some function of the inputs, of which a capture knows the shapes alone. With numbers: noise, and the mean of the
    input over its last axis."""

    @staticmethod
    def forward(ctx: Any, results: tuple[ResultTensor, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.results, ctx.inputs = results, [(t.shape, t.dtype) for t in inputs]
        ctx.set_materialize_grads(False)
        made = []
        for i, r in enumerate(results):
            like = inputs[r.like]
            width = like.shape[-1] if r.width < 0 else r.width
            dtype, shape = r.dtype or like.dtype, (*like.shape[:-1], width)
            if isinstance(like, FakeTensor):
                made.append(torch.empty(shape, dtype=dtype, device=like.device))
                continue
            count = like.shape[:-1].numel() * width
            noise = torch.arange(count, device=like.device, dtype=torch.float64).mul(0.7).add(i).sin().reshape(shape)
            mean = like.to(torch.float64).mean(-1, keepdim=True)
            made.append((noise + 0.5 * mean).to(dtype))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        out: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for r, grad in zip(ctx.results, grads, strict=True):
            if grad is None:
                continue
            shape, dtype = ctx.inputs[r.like]
            part = (grad.sum(-1, keepdim=True) * (0.5 / shape[-1])).expand(shape).to(dtype)
            before = out[r.like]
            out[r.like] = part if before is None else before + part
        return (None, *out)


__all__ = ["SkippedCall", "Skipping", "UnknownResult", "check_reads_of_types", "result_kind", "skip", "skipping"]
