"""Skip submodules that get an object of the caller, such as a key-value cache, in captures.

The survey of the whole model records their results. Captures and the numeric check run an unknown function of the same
inputs instead, with results of the recorded shapes. A rewrite is correct under these conditions:

- The block only passes objects on, returns them, and compares them with None. `PassedObject` refuses other uses that it
  sees, and `refuse_identity_tests` the rest. The same holds for results, except floats in the shape of an input.
- The submodule writes only to objects that it gets, and to its own state that the block does not read. It returns new
  tensors. `InnerCall` checks this.
- Floats that it returns have the recorded shape and dtype and are contiguous, which the rewritten graph checks at each
  call. The block does not read their attributes; `_Result` refuses it.
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

from ...errors import Refused
from ...ir.guards.attribute_reads import AttributeLocation
from ...ir.passed_objects import PassedObject, is_passed, replace_objects
from ...util.tensor_trees import is_float
from ..environment.code_locations import find_user_source, is_user_access
from ..state.inner_calls import InnerCall, collect_given_tensors, iterate_objects
from ..state.side_effects import HOOKS


@dataclasses.dataclass(frozen=True)
class ResultTensor:
    """The layout of a result.

    Attributes:
        template: position of the input tensor that has the shape of the result.
        dtype: None if it is the dtype of that input.
    """

    template: int
    dtype: torch.dtype | None


Result = ResultTensor | str | None  # a str describes an unsupported result


@dataclasses.dataclass(frozen=True)
class SkippedCall:
    """A call of a submodule that gets objects.

    Attributes:
        module: path of the submodule from the block.
        results: its results.
        container: tuple or list, if it returns several results; None if it returns one.
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
    """The stand-ins of one proof, and the calls to skip.

    Attributes:
        args, kwargs: arguments of the block, with stand-ins for objects.
        calls: skipped calls, by the path of the submodule.
        forbidden_reads: refusals of reads from stand-ins, which an `except` of the program may have hidden.
        attributes: attributes that the submodules set when they are called, as (module, name).
    """

    args: tuple
    kwargs: dict[str, Any]
    calls: dict[str, SkippedCall]
    forbidden_reads: list[Refused]
    attributes: set[tuple[str, str]]

    def check_reads(self, attributes_read: Iterable[AttributeLocation]) -> None:
        """Check that the captures needed no results of skipped calls but tensors.

        Args:
            attributes_read: attributes of the block and its submodules that the captures read.

        Raises:
            Refused: they read a stand-in, or an attribute that a skipped call sets.
        """
        if self.forbidden_reads:
            raise self.forbidden_reads[0]
        for location in attributes_read:
            if (location.module, location.name) in self.attributes:
                raise Refused(
                    f"the block reads {location.module}.{location.name}, which {location.module} sets in a call that "
                    "gets an object and that captures skip",
                    culprits=(f"{location.module}.{location.name}",),
                    remedy=f"return the value from {location.module}",
                )


def plan_skipped_calls(
    args: tuple, kwargs: dict[str, Any], objects: Mapping[int, Any] | None, inner: Iterable[InnerCall]
) -> SkipPlan | None:
    """Put stand-ins in the place of objects that a block passes to submodules. Return None if it passes none.

    Args:
        objects: objects that submodules may write to, by id; None: all.
        inner: calls of submodules that get objects.

    Raises:
        Refused: the calls of a submodule return different layouts, or have side effects that captures would miss.
    """
    objects_by_id = {id(o): o for o in iterate_objects(args, kwargs)}
    passed_on = objects_by_id.keys() if objects is None else objects_by_id.keys() & objects.keys()
    inner = [c for c in inner if passed_on & {id(o) for o in iterate_objects(c.args, c.kwargs)}]
    if not inner:
        return None
    # all objects that these calls get: another call of the model may write to other ones
    passed_on = objects_by_id.keys() & {id(o) for c in inner for o in iterate_objects(c.args, c.kwargs)}
    forbidden_reads: list[Refused] = []
    stand_ins = {
        i: _make_stand_in(f"the given {type(objects_by_id[i]).__name__}", "", forbidden_reads) for i in passed_on
    }
    calls: dict[str, SkippedCall] = {}
    for c in inner:
        if missed_change := c.find_missed_change(passed_on):
            reason, remedy = missed_change
            raise Refused(f"{c.name} gets an object that it may write to, and {reason}", remedy=remedy)
        call = SkippedCall.of(c)
        if calls.setdefault(c.name, call) != call:
            raise Refused(
                f"{c.name} is called several times with an object that it may write to, and returns different shapes",
                remedy="use a submodule for each of the calls",
            )
    attributes = {(f"{c.name}.{path}".rstrip("."), key) for c in inner for path, key in c.changes.attributes}
    return SkipPlan(
        replace_objects(args, stand_ins), replace_objects(kwargs, stand_ins), calls, forbidden_reads, attributes
    )


def _make_stand_in(name: str, module: str, forbidden_reads: list[Refused]) -> PassedObject:
    """Make a stand-in for an argument of the block, or for a result of a submodule.

    Args:
        module: path of the submodule; "" for an argument.
        forbidden_reads: collects refusals of reads.
    """

    def refuse(name: str, access: str) -> Exception | None:
        if not is_user_access(sys._getframe(1)):
            return None
        reason = f"the block itself reads {name}{access}, whose content is only known when it runs"
        remedy = f"read it in the submodule that gets {name}, or pass its content to the block as tensors and numbers"
        if module:
            reason = f"the block reads {name}{access}: {_UNSEEN}"
            remedy = f"compute with it in {module}, or return it in the shape of the hidden states and contiguous"
        forbidden_reads.append(Refused(reason, source=str(find_user_source()), remedy=remedy))
        return forbidden_reads[-1]

    return PassedObject(name, refuse)


_UNSEEN = "the submodule gets an object that it may write to, so captures skip it"


class _Result(FakeTensor):
    """A float that a skipped submodule returned in a capture. Attributes that it may have got are unknown."""

    _read: list[Refused]

    def __getattr__(self, key: str) -> Any:
        if not is_user_access(sys._getframe(1)):
            raise AttributeError(key)
        refusal = Refused(
            f"the block reads the attribute {key} of a tensor that a submodule returns: {_UNSEEN}",
            source=str(find_user_source()),
            remedy="return it beside the tensor, and compute with it in the submodule",
        )
        self._read.append(refusal)
        raise refusal


@contextlib.contextmanager
def patch_skipped_calls(block: nn.Module, calls: Mapping[str, SkippedCall]) -> Iterator[list[Refused]]:
    """Replace the forwards of submodules by ones that return unknown results.

    Yields refusals of reads from these results, which an `except` of the program may have hidden.
    """
    saved_states: list[tuple[dict[str, Any], dict[str, Any]]] = []
    forbidden_reads: list[Refused] = []
    try:
        for name, call in calls.items():
            module = block.get_submodule(name)
            state = vars(module)
            hooks = {k: state[k] for k in HOOKS if state.get(k)}  # rewritten programs call the module with its hooks
            saved_states.append((state, {k: v for k, v in state.items() if k in hooks or k == "forward"}))
            state["forward"] = _Stub(call, forbidden_reads)
            state.update({k: type(hook)() for k, hook in hooks.items()})
        yield forbidden_reads
    finally:
        for state, before in reversed(saved_states):
            state.pop("forward")
            state.update(before)


class _Stub:
    """The forward of a skipped submodule."""

    def __init__(self, call: SkippedCall, forbidden_reads: list[Refused]):
        self.call, self.forbidden_reads = call, forbidden_reads
        self.result_class = type("_Result", (_Result,), {"_read": forbidden_reads})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, call = collect_given_tensors((*args, *kwargs.values())), self.call
        tensor_results = [r for r in call.results if isinstance(r, ResultTensor)]
        if not any(is_passed(v) for v in pytree.tree_leaves((args, kwargs))):
            raise Refused(
                f"{call.module} is called with an object that it may write to, and without one elsewhere in the block",
                source=str(find_user_source()),
                remedy="use a submodule for each of the calls",
            )
        if any(r.template >= len(inputs) for r in tensor_results):
            raise Refused(f"{call.module} is called with other tensors than those that were recorded")
        if not tensor_results:
            text = ", ".join("None" if r is None else str(r) for r in call.results)
            raise Refused(
                f"{call.module} gets an object that it may write to, and returns no contiguous tensor of the shape "
                f"of one of its inputs, but {text}",
                source=str(find_user_source()),
                remedy="let it return a tensor in the shape of the hidden states, alone or in a tuple, and "
                "y.contiguous() instead of a y that is not contiguous",
            )
        tensors = iter(UnknownResult.apply(tuple(tensor_results), *inputs))
        out = [self._make(i, r, tensors) for i, r in enumerate(call.results)]
        return call.container(out) if call.container else out[0]

    def _make(self, i: int, result: Result, tensors: Iterator[torch.Tensor]) -> Any:
        if isinstance(result, str):
            module = self.call.module
            return _make_stand_in(f"result {i} of {module}, {result},", module, self.forbidden_reads)
        if result is None:
            return None
        tensor = next(tensors)
        if type(tensor) is FakeTensor:
            tensor.__class__ = self.result_class
        return tensor


class UnknownResult(torch.autograd.Function):
    """An unknown function of the inputs. On real tensors it returns noise plus half of the input.

    A capture sees the shapes of its results only.
    """

    @staticmethod
    def forward(ctx: Any, results: tuple[ResultTensor, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.results, ctx.inputs = results, [(t.shape, t.dtype) for t in inputs]
        ctx.set_materialize_grads(False)
        tensors = []
        for i, r in enumerate(results):
            x = inputs[r.template]
            out = torch.empty(x.shape, dtype=r.dtype or x.dtype, device=x.device)
            if not isinstance(x, FakeTensor):
                noise = torch.arange(x.numel(), device=x.device, dtype=torch.float64).mul(0.7).add(i).sin()
                out.copy_(noise.reshape(x.shape) + 0.5 * x)
            tensors.append(out)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        out: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for r, grad in zip(ctx.results, grads, strict=True):
            if grad is None:
                continue
            part, before = 0.5 * grad.to(ctx.inputs[r.template][1]), out[r.template]
            out[r.template] = part if before is None else before + part
        return (None, *out)


__all__ = ["SkipPlan", "SkippedCall", "UnknownResult", "patch_skipped_calls", "plan_skipped_calls"]
