"""Submodules that are given an object of the caller's, such as a key-value cache, are not run in captures.

What they return was recorded when the whole model ran on abstract tensors. In captures and in the numeric check an
unknown function of their inputs takes their place, with results of the recorded shapes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import Refused
from ..ir.attributes import Where
from ..ir.passed_objects import PassedObject, is_passed, replace_objects
from ..ir.reached import FUNCTIONS
from .captured import below_modes, is_float, tensors_in
from .containers import slots_of
from .recorder import Recorder
from .source import user_source

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, nn.Module,
    type, enum.Enum, slice, range, types.ModuleType, functools.partial, *FUNCTIONS,
)  # fmt: skip
_DEPTH = 5


def objects_in(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the objects and the containers among arguments that a callee can write to."""
    stack = [*args, *kwargs.values()]
    while stack:
        value = stack.pop()
        if is_passed(value) or isinstance(value, _PLAIN):
            continue
        if not isinstance(value, tuple):
            yield value
        if type(value) in (tuple, list, dict):
            stack += value.values() if type(value) is dict else value


def holds_tensors(value: Any, kind: type = torch.Tensor, depth: int = _DEPTH) -> bool:
    """Whether an object, or what it refers to, has tensors of this kind."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, kind)
    if isinstance(value, _PLAIN) or not depth or is_passed(value):
        return False
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner += value
    inner += getattr(value, "__dict__", {}).values()
    inner += [v for slot in slots_of(value) for v in slot.get()]
    return any(holds_tensors(v, kind, depth - 1) for v in inner)


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
class SkippedCall:
    """A call of a submodule that is given objects.

    Attributes:
        module: its name, from the block.
        results: a `ResultTensor`, None, or a text that says why nothing is known of it; several if it returns a tuple.
        is_tuple: whether it does.
    """

    module: str
    results: tuple[ResultTensor | str | None, ...]
    is_tuple: bool

    @classmethod
    def of(cls, module: str, args: tuple, kwargs: dict[str, Any], out: Any, widths: Collection[int]) -> SkippedCall:
        """Describe a recorded call, in whose arguments `PassedObject`s stand for objects. Results may have the last
        axis of an input, or one of `widths`."""
        inputs = tensors_in((args, kwargs))
        is_tuple = type(out) in (tuple, list)
        return cls(module, tuple(_describe_result(r, inputs, widths) for r in (out if is_tuple else [out])), is_tuple)


def _describe_result(result: Any, inputs: Sequence[torch.Tensor], widths: Collection[int]) -> ResultTensor | str | None:
    if result is None:
        return None
    if not isinstance(result, torch.Tensor):
        return f"a {type(result).__name__}"
    if not is_float(result):
        return "integers"
    axes = [result.shape]
    if result.dim() and result.shape[-1] in widths and result.shape[-1] not in result.shape[:-1]:
        axes.append(result.shape[:-1])
    for same in axes:
        for i, t in enumerate(inputs):
            if is_float(t) and t.dim() == result.dim() > 0 and t.shape[: len(same)] == same:
                width = -1 if t.shape == result.shape else result.shape[-1]
                return ResultTensor(i, width, None if t.dtype == result.dtype else result.dtype)
    return f"a tensor of {list(result.shape)}, which is the shape of none of its inputs,"


@dataclasses.dataclass
class InnerCall:
    """A recorded call of a submodule that is given objects or containers.

    Attributes:
        name: of the submodule, from the block.
        changes: what it does beside.
    """

    name: str
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    changes: Changes


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a call of a submodule does beside its result.

    Attributes:
        written: what it does to its tensor arguments that a capture would miss, or "".
        attributes: those that it sets: submodule, from the called one, and name.
        widths: sizes of its parameters.
    """

    written: str = ""
    attributes: frozenset[tuple[str, str]] = frozenset()
    widths: frozenset[int] = frozenset()


class StateBefore:
    """What a call of a submodule may change, as it is before the call."""

    def __init__(self, tracer: Recorder, module: nn.Module, arguments: tuple[tuple, dict[str, Any]]):
        self.tracer, self.module = tracer, module
        self.tensors = _tensors_passed(arguments)
        self.versions = self._versions()
        self.attributes = self._attributes()

    def changes(self, out: Any) -> Changes:
        """What was done since."""
        now = self._attributes()
        names = {key for key, value in now.items() if key not in self.attributes or self.attributes[key] is not value}
        with below_modes(), torch.DisableTorchFunction():
            roots = {id(self.tracer.root(t)) for t in self.tensors}
            made = [t for t in tensors_in(out) if id(t) in self.tracer.aliases]
            is_returned = any(id(self.tracer.root(t)) in roots for t in made)
        written = "writes to one of its inputs in place" if self._versions() != self.versions else ""
        written = written or ("returns one of its inputs, or a view of it" if is_returned else "")
        widths = frozenset(n for p in self.module.parameters() for n in p.shape)
        return Changes(written, frozenset(names), widths)

    def _versions(self) -> list[int]:
        with below_modes(), torch.DisableTorchFunction():
            for t in self.tensors:
                self.tracer.node_of(t)
            return [self.tracer.versions.get(id(self.tracer.root(t)), 0) for t in self.tensors]

    def _attributes(self) -> dict[tuple[str, str], Any]:
        return {
            (name, key): value
            for name, m in self.module.named_modules()
            for key, value in {**vars(m), **m._buffers}.items()
            if not key.startswith("_")
        }


def _tensors_passed(tree: Any) -> list[torch.Tensor]:
    """The tensors among arguments that are not in containers which a callee may write to."""
    args, kwargs = tree
    found: list[torch.Tensor] = []
    stack = [*args, *kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            stack += value
    return found


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
        if c.changes.written:
            raise Refused(
                f"{c.name} is given an object that it may write to, and {c.changes.written}",
                remedy="return a new tensor from it",
            )
        a, k = replace_objects((c.args, c.kwargs), stand_ins)
        call = SkippedCall.of(c.name, a, k, c.out, c.changes.widths)
        if calls.setdefault(c.name, call) != call:
            raise Refused(
                f"{c.name} is called several times with an object that it may write to, and returns other shapes each "
                "time",
                remedy="use a submodule for each of the calls",
            )
    attributes = {(f"{c.name}.{path}".rstrip("."), key) for c in inner for path, key in c.changes.attributes}
    return Skipping(replace_objects(args, stand_ins), replace_objects(kwargs, stand_ins), calls, read, attributes)


@contextlib.contextmanager
def skipping(block: nn.Module, calls: Mapping[str, SkippedCall]) -> Iterator[None]:
    """While the context is open, calls of submodules that are given a stand-in return unknown results."""
    with contextlib.ExitStack() as stack:
        for name, call in calls.items():
            module = block.get_submodule(name)
            state, before = vars(module), vars(module).get("forward")
            stub = _Stub(module.forward, call)
            state["forward"] = stub
            undo = functools.partial(state.__setitem__, "forward", before) if before is not None else None
            stack.callback(undo or functools.partial(state.pop, "forward", None))
        yield


class _Stub:
    """The forward of a submodule that is skipped if it is given a stand-in."""

    def __init__(self, original: Any, call: SkippedCall):
        self.original, self.call = original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(map(is_passed, pytree.tree_leaves((args, kwargs)))):
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
                remedy="let it return what it computes, in the shape of the hidden states",
            )
        made = iter(UnknownResult.apply(tuple(known), *inputs))
        out = [self._one(i, r, made) for i, r in enumerate(call.results)]
        return tuple(out) if call.is_tuple else out[0]

    def _one(self, i: int, result: ResultTensor | str | None, made: Iterator[torch.Tensor]) -> Any:
        if result is None:
            return None
        if isinstance(result, ResultTensor):
            return next(made)
        name = self.call.module

        def refuse(what: str, read: str) -> Exception:
            return Refused(
                f"the block reads {what}{read}: the submodule is given an object that it may write to, and was not "
                "looked into",
                source=str(user_source()),
                remedy=f"compute with it in {name}, or return it in the shape of the hidden states",
            )

        return PassedObject(f"result {i} of {name}, {result} ", None, refuse)


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


def copy_abstract(value: Any) -> Any:
    """Copy an object, with meta tensors in the place of its floats.

    Raises whatever a class raises whose objects cannot be copied.
    """
    memo: dict[int, Any] = {}
    _note_tensors(value, memo, _DEPTH, [])
    return copy.deepcopy(value, memo)


def _note_tensors(value: Any, memo: dict[int, Any], depth: int, keep: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        memo[id(value)] = value.detach().to("meta") if is_float(value) else value.detach().cpu().clone()
        return
    if isinstance(value, nn.Module):
        memo[id(value)] = value  # the cache's owner, say
        return
    if isinstance(value, _PLAIN) or not depth:
        return
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner += value
    inner += getattr(value, "__dict__", {}).values()
    inner += [v for slot in slots_of(value) for v in slot.get()]
    for v in inner:
        _note_tensors(v, memo, depth - 1, keep)


__all__ = [
    "SkippedCall", "Skipping", "UnknownResult", "copy_abstract", "holds_tensors", "objects_in", "skip", "skipping",
]  # fmt: skip
