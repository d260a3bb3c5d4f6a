"""Submodules that are given an object of the caller's, such as a key-value cache, are not run in captures.

What they return was recorded when the whole model ran on abstract tensors. In captures and in the numeric check an
unknown function of their inputs takes their place, with results of the recorded shapes. A rewrite is right under these
conditions:

- The block hands objects on, returns them, and asks whether they are None. `PassedObject` refuses all else that it can
  see, and `refuse_identity_questions` the rest. The same holds for results but floats in the shape of an input.
- The submodule writes to what it is given as objects, and to its own state that the block does not read. It returns
  new tensors. `InnerCall` sees whether this was so.
- Floats that it returns have the recorded shape and dtype, are contiguous, and their attributes are not read. The
  rewritten graph checks the former at each call; `_Result` refuses the latter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import Refused
from ..ir.guards.attribute_reads import AttributeLocation
from ..ir.passed_objects import PassedObject, is_passed, replace_objects
from .code_locations import find_user_source, is_user_access
from .inner_calls import InnerCall, collect_given_tensors, iterate_objects
from .side_effects import HOOKS
from .tensor_trees import is_float


@dataclasses.dataclass(frozen=True)
class ResultTensor:
    """How a result follows from the inputs of a call.

    Attributes:
        like: position among the tensors of the call; the result has its shape.
        dtype: None if it is that of the input.
    """

    like: int
    dtype: torch.dtype | None


Result = ResultTensor | str | None  # a str: what it is, of which nothing is known


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
    def of(cls, call: InnerCall) -> SkippedCall:
        inputs, out = collect_given_tensors((*call.args, *call.kwargs.values())), call.out
        container = type(out) if type(out) in (tuple, list) else None
        return cls(call.name, tuple(_describe(r, inputs) for r in (out if container else [out])), container)


def _describe(result: Any, inputs: Sequence[torch.Tensor]) -> Result:
    if result is None:
        return None
    if not isinstance(result, torch.Tensor):
        return f"a {type(result).__name__}"
    if not is_float(result):
        return "integers"
    if not result.is_contiguous():
        return f"a tensor of strides {list(result.stride())}, which is not contiguous"
    for i, t in enumerate(inputs):
        if is_float(t) and t.shape == result.shape and t.dim():
            return ResultTensor(i, None if t.dtype == result.dtype else result.dtype)
    return f"a tensor of {list(result.shape)}, which is the shape of none of its inputs"


@dataclasses.dataclass
class SkipPlan:
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

    def check_reads(self, read: Iterable[AttributeLocation]) -> None:
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


def plan_skipped_calls(
    args: tuple, kwargs: dict[str, Any], objects: Mapping[int, Any] | None, inner: Iterable[InnerCall]
) -> SkipPlan | None:
    """Put stand-ins in the place of objects that a block passes on to submodules; None if it passes none on.

    Args:
        objects: those that submodules may write to, by id; None: all.
        inner: calls of submodules that are given objects.

    Raises:
        Refused: a submodule returns other things at different calls, or its calls cannot be skipped.
    """
    given = {id(o): o for o in iterate_objects(args, kwargs)}
    own = given.keys() if objects is None else given.keys() & objects.keys()
    inner = [c for c in inner if own & {id(o) for o in iterate_objects(c.args, c.kwargs)}]
    if not inner:
        return None
    # all that is passed to these, as other calls may write to what this one has not written to
    own = given.keys() & {id(o) for c in inner for o in iterate_objects(c.args, c.kwargs)}
    read: list[Refused] = []
    stand_ins = {i: _stand_in(f"the given {type(given[i]).__name__}", "", read) for i in own}
    calls: dict[str, SkippedCall] = {}
    for c in inner:
        if missed := c.find_missed_change(own):
            what, remedy = missed
            raise Refused(f"{c.name} is given an object that it may write to, and {what}", remedy=remedy)
        call = SkippedCall.of(c)
        if calls.setdefault(c.name, call) != call:
            raise Refused(
                f"{c.name} is called several times with an object that it may write to, and returns other shapes each "
                "time",
                remedy="use a submodule for each of the calls",
            )
    attributes = {(f"{c.name}.{path}".rstrip("."), key) for c in inner for path, key in c.changes.attributes}
    return SkipPlan(replace_objects(args, stand_ins), replace_objects(kwargs, stand_ins), calls, read, attributes)


def _stand_in(name: str, module: str, read: list[Refused]) -> PassedObject:
    """Make a stand-in for an argument of the block, or for a result of a submodule. Args: read: see `Skipping`."""

    def refuse(name: str, what: str) -> Exception | None:
        if not is_user_access(sys._getframe(1)):
            return None
        why = f"the block itself reads {name}{what}, and what it holds is only known when it runs"
        remedy = (
            f"read it in the submodule that is given {name}, or pass the block what it needs as tensors and numbers"
        )
        if module:
            why = f"the block reads {name}{what}: {_UNSEEN}"
            remedy = f"compute with it in {module}, or return it in the shape of the hidden states and contiguous"
        read.append(Refused(why, source=str(find_user_source()), remedy=remedy))
        return read[-1]

    return PassedObject(name, refuse)


_UNSEEN = "the submodule is given an object that it may write to, and was not looked into"


class _Result(FakeTensor):
    """A float that a skipped submodule returned, in a capture. What attributes it has besides a tensor's is unknown."""

    _read: list[Refused]

    def __getattr__(self, key: str) -> Any:
        if not is_user_access(sys._getframe(1)):
            raise AttributeError(key)
        why = Refused(
            f"the block reads the attribute {key} of a tensor that a submodule returns: {_UNSEEN}",
            source=str(find_user_source()),
            remedy="return it beside the tensor, and compute with it in the submodule",
        )
        self._read.append(why)
        raise why


@contextlib.contextmanager
def patch_skipped_calls(block: nn.Module, calls: Mapping[str, SkippedCall]) -> Iterator[list[Refused]]:
    """While the context is open, calls of submodules that are given a stand-in return unknown results. Yields refusals
    of what was read from these; an `except` of the user's may have hidden them."""
    undone: list[tuple[dict[str, Any], dict[str, Any]]] = []
    read: list[Refused] = []
    try:
        for name, call in calls.items():
            module = block.get_submodule(name)
            state = vars(module)
            hooks = {k: state[k] for k in HOOKS if state.get(k)}  # programs call the module with its hooks
            undone.append((state, {k: v for k, v in state.items() if k in hooks or k == "forward"}))
            state["forward"] = _Stub(call, read)
            state.update({k: type(held)() for k, held in hooks.items()})
        yield read
    finally:
        for state, before in reversed(undone):
            state.pop("forward")
            state.update(before)


class _Stub:
    """The forward of a submodule that is skipped."""

    def __init__(self, call: SkippedCall, read: list[Refused]):
        self.call, self.read = call, read
        self.result_class = type("_Result", (_Result,), {"_read": read})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, call = collect_given_tensors((*args, *kwargs.values())), self.call
        known = [r for r in call.results if isinstance(r, ResultTensor)]
        if not any(is_passed(v) for v in pytree.tree_leaves((args, kwargs))):
            raise Refused(
                f"{call.module} is called with an object that it may write to, and without one elsewhere in the block",
                source=str(find_user_source()),
                remedy="use a submodule for each of the calls",
            )
        if any(r.like >= len(inputs) for r in known):
            raise Refused(f"{call.module} is called with other tensors than those that were recorded")
        if not known:
            text = ", ".join("None" if r is None else str(r) for r in call.results)
            raise Refused(
                f"{call.module} is given an object that it may write to, and returns no contiguous tensor of the shape "
                f"of one of its inputs, but {text}",
                source=str(find_user_source()),
                remedy="let it return a tensor in the shape of the hidden states, alone or in a tuple, and "
                "y.contiguous() instead of a y that is not contiguous",
            )
        made = iter(UnknownResult.apply(tuple(known), *inputs))
        out = [self._make(i, r, made) for i, r in enumerate(call.results)]
        return call.container(out) if call.container else out[0]

    def _make(self, i: int, result: Result, made: Iterator[torch.Tensor]) -> Any:
        if isinstance(result, str):
            module = self.call.module
            return _stand_in(f"result {i} of {module}, {result},", module, self.read)
        if result is None:
            return None
        tensor = next(made)
        if type(tensor) is FakeTensor:
            tensor.__class__ = self.result_class
        return tensor


class UnknownResult(torch.autograd.Function):
    """Some function of the inputs, of which a capture knows the shapes alone. With numbers: noise, and half of the
    input."""

    @staticmethod
    def forward(ctx: Any, results: tuple[ResultTensor, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.results, ctx.inputs = results, [(t.shape, t.dtype) for t in inputs]
        ctx.set_materialize_grads(False)
        made = []
        for i, r in enumerate(results):
            like = inputs[r.like]
            out = torch.empty(like.shape, dtype=r.dtype or like.dtype, device=like.device)
            if not isinstance(like, FakeTensor):
                noise = torch.arange(like.numel(), device=like.device, dtype=torch.float64).mul(0.7).add(i).sin()
                out.copy_(noise.reshape(like.shape) + 0.5 * like)
            made.append(out)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        out: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for r, grad in zip(ctx.results, grads, strict=True):
            if grad is None:
                continue
            part, before = 0.5 * grad.to(ctx.inputs[r.like][1]), out[r.like]
            out[r.like] = part if before is None else before + part
        return (None, *out)


__all__ = ["SkipPlan", "SkippedCall", "UnknownResult", "patch_skipped_calls", "plan_skipped_calls"]
