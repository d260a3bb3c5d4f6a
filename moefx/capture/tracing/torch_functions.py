"""The torch function mode of a capture: keep contractions whole, and return symbolic sizes and routed numbers.

It runs above autograd and above decompositions. The dispatch mode (`tracer`) records the ops below.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...util.tensor_trees import collect_tensors, is_float, suspend_modes
from ..emptiness.idle_tests import ROWS
from ..environment import device_autocast
from ..environment.code_locations import is_user_asking_tensor
from ..sizes.routed_numbers import ROW_COUNT, wrap_routed
from ..sizes.symbolic_sizes import Size, unwrap_numbers, wrap_sizes
from ..sizes.view_sizes import MAX_ROWS_PER_TOKEN, ViewSizes
from .capture_result import LAYOUT
from .functionalize import require_one_dtype_under
from .node_origins import follows_from_floats
from .tracer import Tracer

aten = torch.ops.aten

_RECURRENCES = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)

# Functions that are recorded whole. The lifter reads one labelled contraction, not its decomposition. A decomposed
# cosine hides from autograd, and a recurrence has a part per step.
_WHOLE: dict[Any, Any] = {
    F.linear: F.linear,
    torch.einsum: torch.einsum,
    torch.matmul: torch.matmul,
    torch.Tensor.matmul: torch.matmul,
    torch.Tensor.__matmul__: torch.matmul,
    torch.Tensor.__rmatmul__: lambda a, b: torch.matmul(b, a),
    F.scaled_dot_product_attention: F.scaled_dot_product_attention,
    torch.cosine_similarity: torch.cosine_similarity,
    **{recurrence: recurrence for recurrence in _RECURRENCES},
}


class TorchFunctions(TorchFunctionMode):
    """Keeps contractions whole, returns symbolic sizes, and notes sizes that views require."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer
        self._view_sizes = ViewSizes(tracer.sizes)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        arguments = (*args, *(kwargs or {}).values())
        args, options = unwrap_numbers(args), unwrap_numbers(kwargs or {})
        tracer = self.tracer
        has_routed_argument, tracer.has_routed_argument = tracer.has_routed_argument, False
        before = tracer.op_numbers
        if tracer.sizes.op_arguments:
            tracer.op_numbers, tracer.sizes.op_arguments = before | tracer.sizes.op_arguments, frozenset()
        try:
            if func in _LISTS and _is_along_rows(func, args, options):
                if self._has_routed_rows(args[0]):
                    tracer.log_emptiness_test(ROWS)
                elif isinstance(size := self._shape(args[0])[0], Size):
                    tracer.sizes.log_leak(size.expr)
            return self._call(func, args, options, has_routed_argument, arguments)
        except Exception:
            tracer.log_error(any(map(self._has_routed_rows, collect_tensors((args, options)))))
            raise
        finally:
            tracer.op_numbers = before

    def _check_view(self, t: Any, *shape: Any) -> None:
        """Note the sizes that a view accepts: see `ViewSizes`."""
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if isinstance(t, torch.Tensor) and not _is_batched(t) and all(isinstance(n, int) for n in shape):
            self._view_sizes.check(self._shape(t), shape)

    def _call(
        self, func: Any, args: tuple, options: dict[str, Any], has_routed_argument: bool, arguments: tuple
    ) -> Any:
        """Run a function.

        Args:
            has_routed_argument: whether an argument is a number of the routing.
            arguments: the arguments with symbolic sizes.
        """
        tracer, start = self.tracer, len(self.tracer.nodes)
        if tracer.whole_op_depth:
            return func(*args, **options)
        tracer.update_autocast()
        if func in _VIEWS:
            self._check_view(*arguments)
        elif func in _UNFLATTEN and len(arguments) == 3 and isinstance(arguments[1], int):
            t, dim, parts = arguments
            shape = self._shape(t)
            self._check_view(t, *shape[: dim % t.dim()], *parts, *shape[dim % t.dim() + 1 :])
        if (answer := self._answer_query(func, args, options)) is not _NO_QUERY:
            return answer
        if func in _RMS_NORMS and (norm := _without_eps(*args, **options)):
            return self._run(torch.rms_norm, norm, {}, self._whole_norm)
        whole_op = _WHOLE.get(func)
        tensors = collect_tensors(args) if whole_op is not None else []
        if whole_op is not None and any(is_float(t) for t in tensors) and not any(map(_is_batched, tensors)):
            return self._record_whole(func, whole_op, args, options)
        out = self._run(func, args, options)
        if func is torch.Tensor.__getitem__:
            with suspend_modes(), torch.DisableTorchFunction():
                for dim, stop in _find_full_slices(*args):
                    out = tracer.record(aten.slice.Tensor, (out, dim, 0, stop), {})
        if has_routed_argument:
            tracer.log_routed_rows(start)
        return out

    def _answer_query(self, func: Any, args: tuple, options: dict[str, Any]) -> Any:
        """Answer a function that reads a size, a value or a flag, or sets `.data`; `_NO_QUERY` for other functions."""
        if func in _COUNTS:
            return math.prod(self._shape(args[0]))
        if func in _SIZES:
            if func is torch.Tensor.__len__ or args[1:] or options:
                dim = 0 if func is torch.Tensor.__len__ else (*args[1:], *options.values())[0]
                return self._shape(args[0])[dim] if dim is not None else self._shape(args[0])
            return self._shape(args[0])
        if func in _NUMBERS:
            return self._wrap_numbers(args[0], func(*args, **options))
        if func is torch.Tensor.__int__:
            return int(self._wrap_numbers(args[0], func(*args, **options)))
        if func == _REQUIRES_GRAD:
            return self.tracer.read_requires_grad(args[0])
        if func in _LAYOUT and is_user_asking_tensor():
            self.tracer.modes_read.add(LAYOUT)
        if func in _AUTOGRAD_STATE and is_user_asking_tensor():
            self.tracer.refuse(
                f"the block reads {_AUTOGRAD_STATE[func]} of a tensor, which differs between calls",
                "use torch.is_grad_enabled() instead",
            )
        if func == _SET_DATA:
            return self._set_data(*args)
        if func in _HOOKS:
            self.tracer.refuse(
                f"the block calls {func.__name__} on a tensor, and a capture has no gradients",
                "use a torch.autograd.Function, or call it outside of the block",
            )
            return RemovableHandle(OrderedDict())
        if func in _BACKWARDS:
            self.tracer.refuse(
                f"the block calls {func.__name__} in its forward, and a capture has no gradients",
                "use a torch.autograd.Function, or compute the gradients outside of the block",
            )
        return _NO_QUERY

    def _record_whole(self, func: Any, whole_op: Any, args: tuple, options: dict[str, Any]) -> Any:
        """Run a function of `_WHOLE` and record it as one node."""
        tracer = self.tracer
        if func is torch.Tensor.__rmatmul__:
            args, func = (args[1], args[0]), torch.matmul
        for name in _NAMES.get(whole_op, ())[len(args) :]:
            if name in options:
                args = (*args, options.pop(name))
        if whole_op in _OF_ONE_DTYPE:
            require_one_dtype_under(tracer.autocast, whole_op.__name__, collect_tensors((args, options)))
        run, is_recurrent = functools.partial(func, *args, **options), func in _RECURRENCES
        if tracer.autocast is None and all(isinstance(t, FakeTensor) for t in collect_tensors((args, options))):
            on_meta = functools.partial(_recur_once, func) if is_recurrent else func
            run = functools.partial(tracer.run_on_meta, on_meta, args, options)
        if not device_autocast.is_emulated():
            return tracer.record_whole(_WHOLE[func], args, options, run, is_recurrent)
        with device_autocast.use_cpu_autocast(tracer.autocast):  # most products are cast alike on all devices
            out = tracer.record_whole(_WHOLE[func], args, options, run, is_recurrent)
        if tracer.autocast is None:
            return out
        return device_autocast.check_result_dtype(func, args, options, tracer.autocast, out)

    def _run(self, func: Any, args: tuple, options: dict[str, Any], run: Any = None) -> Any:
        """Run `func`, or `run` in its place, under the autocast of the block's device."""
        run = run or func
        if not device_autocast.is_emulated():
            return run(*args, **options)
        dtype = self.tracer.autocast
        with device_autocast.use_cpu_autocast(None):
            if dtype is None or any(map(_is_batched, collect_tensors((args, options)))):
                return run(*args, **options)
            casted = device_autocast.cast_arguments(func, args, options, dtype, torch.Tensor.to)
            if casted is None:
                return device_autocast.check_result_dtype(func, args, options, dtype, run(*args, **options))
            with self.tracer.suspend_casts():
                out = run(*casted[0], **casted[1])
            return device_autocast.check_result_dtype(func, args, options, dtype, out)

    def _whole_norm(self, *args: Any) -> torch.Tensor:
        return self.tracer.record_whole(aten.rms_norm.default, args, {}, functools.partial(torch.rms_norm, *args))

    def _shape(self, t: torch.Tensor) -> torch.Size:
        tracer = self.tracer
        ragged = self._has_routed_rows(t)
        with torch.DisableTorchFunction():
            shape = t.shape
            first = shape[0] if shape else None
        out = wrap_sizes(shape, tracer.sizes)
        if ragged and type(out[0]) is int:
            out = torch.Size([wrap_routed(first, ROW_COUNT, tracer), *out[1:]])
        elif out and type(out[0]) is int and (multiple := self._find_multiple(t, out[0])) is not None:
            out = torch.Size([multiple, *out[1:]])
        return out

    def _has_routed_rows(self, t: Any) -> bool:
        """Return whether the routing determines the number of rows of a tensor."""
        if not isinstance(t, torch.Tensor) or _is_batched(t):
            return False
        with suspend_modes(), torch.DisableTorchFunction():
            shape = t.shape
            return (
                bool(shape) and shape[0] in self.tracer.row_counts and bool(self.tracer.node_of(t).meta.get("ragged"))
            )

    def _find_multiple(self, t: torch.Tensor, rows: int) -> Any:
        """Return the number of rows as a size if each token has several, such as one per slot; None otherwise."""
        sizes = self.tracer.sizes
        tokens = sizes.tokens
        per_token, rest = divmod(rows, tokens)
        if rest or not 2 <= per_token <= MAX_ROWS_PER_TOKEN or tokens < _MIN_TOKENS or _is_batched(t):
            return None
        with suspend_modes(), torch.DisableTorchFunction():
            if rows in self.tracer.state_sizes or self.tracer.node_of(t).op == "get_attr":
                return None
        return Size(rows, f"{per_token}*{sizes.tokens_text}", sizes)

    def _set_data(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Record `t.data = value`, which calls no op, as a copy that autograd does not see.

        Refuse it if it changes the dtype or shape of `t`, or if `value` is a parameter or buffer itself.
        """
        tracer = self.tracer
        if tracer.check_conversion(t, value):
            _SET_DATA(t, value)
            return
        with suspend_modes(), torch.DisableTorchFunction():
            root, source = tracer.find_base(t), tracer.find_base(value)
            if source is root and (value.stride(), value.storage_offset()) == (t.stride(), t.storage_offset()):
                return  # its own data
        if source is not root and id(source) in tracer.state_ids:
            tracer.refuse(
                "`.data` of one parameter or buffer is made that of another: from then on they share memory",
                "copy the values: b.copy_(a), or b.data = a.data.clone()",
            )
        with torch.no_grad():
            t.copy_(value)

    def _wrap_numbers(self, t: torch.Tensor, value: Any) -> Any:
        """Return integers that Python read; if the routing determines them, as routed numbers."""
        with suspend_modes(), torch.DisableTorchFunction():
            if is_float(t) or t.dtype is torch.bool or _is_batched(t):
                return value
            node = self.tracer.node_of(t)
            if follows_from_floats(node):
                return wrap_routed(value, node, self.tracer)
            self.tracer.log_plain_read(node, value)
            return value


def _is_along_rows(func: Any, args: tuple, options: dict[str, Any]) -> bool:
    """Return whether a function splits along the first axis, so that the length of its list depends on that axis."""
    at = _LISTS[func]
    dim = options.get("dim", args[at] if len(args) > at else 0)
    lengths = (*options.values(), *args[1:])  # the lengths of all parts fix their number
    return bool(args) and dim in (0, -args[0].dim()) and not any(isinstance(n, (list, tuple)) for n in lengths)


def _recur_once(func: Any, x: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Return the results of a recurrence on meta tensors for all steps, computed for a single step."""
    if options or (isinstance(args[0], torch.Tensor) and not is_float(args[0])):  # or packed sequences
        return func(x, *args, **options)
    is_batch_first = bool(args[-1])
    axis = 1 if is_batch_first else 0
    if x.shape[axis] < 1:  # torch raises an error
        return func(x, *args)
    out, *states = func(x.narrow(axis, 0, 1), *args)
    steps, batch = (x.shape[0], x.shape[1]) if not is_batch_first else (x.shape[1], x.shape[0])
    all_steps = out.new_empty(steps, batch, out.shape[-1])
    return (all_steps.transpose(0, 1) if is_batch_first else all_steps, *states)


def _without_eps(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> tuple[torch.Tensor, list[int], torch.Tensor | None, None] | None:
    """Return the arguments of a norm without `eps`; None if it has one.

    torch's default depends on the dtype: a number from one capture would be wrong in another dtype.
    """
    if eps is not None or not is_float(input) or _is_batched(input):
        return None
    return input, list(normalized_shape), weight, None


def _find_full_slices(t: torch.Tensor, index: Any) -> list[tuple[int, int]]:
    """Return (dim of the result, stop) of slices `[:stop]` that take a whole axis.

    torch calls no op for these, but does at other sizes.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if _is_batched(t) or not all(p is None or p is Ellipsis or type(p) in (int, slice) for p in parts):
        return []
    slices, source, result = [], 0, 0
    for part in parts:
        if part is Ellipsis:
            num_trailing = t.dim() - sum(type(p) in (int, slice) for p in parts)
            source, result = source + num_trailing, result + num_trailing
            continue
        if type(part) is slice and part.start in (None, 0) and part.step in (None, 1) and part.stop == t.shape[source]:
            slices.append((result, part.stop))
        source += part is not None
        result += type(part) is not int
    return slices


def _is_batched(t: torch.Tensor) -> bool:
    """Return whether a tensor is wrapped by `vmap`, so that ops see another tensor than Python."""
    return is_functorch_wrapped_tensor(t)


_SIZES = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.__len__,
}  # type: ignore[attr-defined]


_VIEWS = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}
_UNFLATTEN = {torch.Tensor.unflatten, torch.unflatten}
_RMS_NORMS = {F.rms_norm, torch.rms_norm}
# Arguments that may be passed by name.
_NAMES = {
    F.linear: ("input", "weight", "bias"),
    torch.matmul: ("input", "other"),
    torch.cosine_similarity: ("x1", "x2"),
}
_OF_ONE_DTYPE = {F.linear, torch.matmul, torch.einsum}
# TorchFunctions that return a list whose length follows from an axis, with the position of their `dim` argument.
_LISTS = {
    torch.Tensor.tolist: 9, torch.Tensor.__iter__: 9, torch.Tensor.unbind: 1, torch.unbind: 1, torch.Tensor.split: 2,
    torch.split: 2, torch.Tensor.chunk: 2, torch.chunk: 2,
}  # fmt: skip
_NO_QUERY = object()
_NUMBERS = {torch.Tensor.item, torch.Tensor.tolist}
_LAYOUT = {torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.storage_offset}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_AUTOGRAD_STATE = {getattr(torch.Tensor, name).__get__: name for name in ("grad_fn", "grad", "is_leaf", "output_nr")}
_MIN_TOKENS = 17  # a multiple of fewer tokens may be any number
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad}
_BACKWARDS = {torch.autograd.grad, torch.Tensor.backward}
_COUNTS = {torch.Tensor.numel, torch.Tensor.nelement, torch.numel}
