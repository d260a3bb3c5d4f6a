"""torch's functions during a capture: contractions stay whole, sizes and numbers remember where they come from."""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..errors import Refused
from . import device_autocast
from .code_locations import find_user_source
from .functionalize import require_one_dtype_under
from .idle_tests import ROWS
from .node_origins import follows_from_floats
from .routed_numbers import ROW_COUNT, wrap_routed
from .symbolic_sizes import Number, Size, evaluate_size, unwrap_numbers, wrap_sizes
from .tensor_trees import collect_tensors, is_float, suspend_modes
from .tracer import Tracer

aten = torch.ops.aten

_RECURRENCES = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)

# Decomposing these loses what the lifter wants to see: one labelled contraction. A cosine's parts hide from autograd. A
# recurrence has as many parts as steps.
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


class Functions(TorchFunctionMode):
    """Keeps contractions whole and hands out sizes that remember where they came from."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer
        self._views: dict[tuple[str, bool], bool] = {}  # see `_fits_all_sizes`

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        args, options = unwrap_numbers(args), unwrap_numbers(kwargs or {})
        tracer = self.tracer
        touched, tracer.has_routed_argument = tracer.has_routed_argument, False
        before = tracer.op_numbers
        if tracer.sizes.given:
            tracer.op_numbers, tracer.sizes.given = before | tracer.sizes.given, frozenset()
        try:
            if func in _LISTS and _is_along_rows(func, args, options):
                if self._has_note_routed_rows(args[0]):
                    tracer.note_question(ROWS)
                elif isinstance(size := self._shape(args[0])[0], Size):
                    tracer.sizes.leak(size.expr)
            return self._called(func, args, options, touched, given)
        except Exception:
            tracer.note_error(any(map(self._has_note_routed_rows, collect_tensors((args, options)))))
            raise
        finally:
            tracer.op_numbers = before

    def _check_view(self, t: Any, *shape: Any) -> None:
        """Note the sizes that a view takes: `x.view(-1, 8, D)` asks for a multiple of 8 tokens.

        Raises:
            Refused: the sizes of this capture are none of them. The log has the comparison, so that others are chosen.
        """
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not isinstance(t, torch.Tensor) or _is_batched(t) or not all(isinstance(n, int) for n in shape):
            return
        own, sizes = self._shape(t), self.tracer.sizes
        known = [n for n in shape if isinstance(n, Size) or n != -1]
        several = [n for n in (*own, *known) if isinstance(n, Number)]
        if not any(isinstance(n, Size) for n in own) or any(not isinstance(n.expr, str) for n in several):
            return
        tokens: Any = functools.reduce(lambda a, b: a * b, [n for n in own if isinstance(n, Size)])
        step: Any = math.prod(known)
        width = math.prod(n for n in own if type(n) is int)
        if len(known) == len(shape):
            left, right, is_met = f"{tokens.expr}*{width}", _text(step), tokens.value * width == _plain(step)
        elif type(step) is int:
            step //= math.gcd(step, width)
            left, right, is_met = f"{tokens.expr}%{step}", "0", step < 2 or tokens.value % step == 0
        else:
            left, right, is_met = f"({tokens.expr}*{width})%({step.expr})", "0", tokens.value * width % step.value == 0
        if self._fits_all_sizes(own, known, is_whole=len(known) == len(shape)):
            return
        sizes.note(left, "eq", right, is_met)
        if not is_met:
            source = find_user_source()
            what = f"a multiple of {step}" if type(step) is int and len(known) < len(shape) else "one that fits"
            raise Refused(
                f"the number of tokens has to be {what} here: {source.text}",
                source=str(source),
                remedy="pass example_inputs of several such sizes, or pad the tokens outside of the block",
            )

    def _fits_all_sizes(self, own: Iterable[Any], asked: Iterable[Any], is_whole: bool) -> bool:
        """Whether a view fits at all sizes, by some names of its numbers. A small size of this capture may be a number
        of the program, such as the choices of a token, and a multiple of few tokens has no name. A view that fits some
        sizes only is seen in captures whose numbers have one name each.

        Args:
            is_whole: no axis is left to torch (-1).
        """
        sizes = self.tracer.sizes
        names = [_names(n, sizes.tokens, sizes.tokens_text) for n in (*own, "/", *asked)]
        key = str(names), is_whole
        if key not in self._views:
            conditions = (_condition(each, is_whole) for each in itertools.product(*names))
            self._views[key] = any(_is_identity(left, right, sizes.dims) for left, right in conditions)
        return self._views[key]

    def _called(self, func: Any, args: tuple, options: dict[str, Any], touched: bool, given: tuple) -> Any:
        """`given`: the arguments with sizes that remember where they come from."""
        tracer, before = self.tracer, len(self.tracer.nodes)
        if tracer.whole_op_depth:
            return func(*args, **options)
        tracer.notice_autocast()
        if func in _VIEWS:
            self._check_view(*given)
        elif func in _UNFLATTEN and len(given) == 3 and isinstance(given[1], int):
            t, dim, parts = given
            own = self._shape(t)
            self._check_view(t, *own[: dim % t.dim()], *parts, *own[dim % t.dim() + 1 :])
        if func in _COUNTS:  # of elements: the product of the sizes
            return math.prod(self._shape(args[0]))
        if func in _SIZES:
            if func is torch.Tensor.__len__ or args[1:] or options:
                dim = 0 if func is torch.Tensor.__len__ else (*args[1:], *options.values())[0]
                return self._shape(args[0])[dim] if dim is not None else self._shape(args[0])
            return self._shape(args[0])
        if func in _NUMBERS:
            return self._numbers(args[0], func(*args, **options))
        if func is torch.Tensor.__int__:
            return int(self._numbers(args[0], func(*args, **options)))
        if func == _REQUIRES_GRAD:
            return tracer.read_requires_grad(args[0])
        if func == _SET_DATA:
            return self._set_data(*args)
        if func in _HOOKS:
            tracer.refuse(
                f"the block calls {func.__name__} on a tensor: what that does to gradients is not part of a capture",
                "use a torch.autograd.Function, or call it outside of the block",
            )
            return RemovableHandle(OrderedDict())
        if func in _RMS_NORMS and (norm := _without_eps(*args, **options)):
            return self._run(torch.rms_norm, norm, {}, self._whole_norm)
        whole = _WHOLE.get(func)
        tensors = collect_tensors(args) if whole is not None else []
        if whole is None or not any(is_float(t) for t in tensors) or any(map(_is_batched, tensors)):
            out = self._run(func, args, options)
            if func is torch.Tensor.__getitem__:
                with suspend_modes(), torch.DisableTorchFunction():
                    for dim, stop in _whole_slices(*args):
                        out = tracer.record(torch.ops.aten.slice.Tensor, (out, dim, 0, stop), {})
            if touched:
                tracer.note_routed_rows(before)
            return out
        if func is torch.Tensor.__rmatmul__:
            args, func = (args[1], args[0]), torch.matmul
        for name in _NAMES.get(whole, ())[len(args) :]:
            if name in options:
                args = (*args, options.pop(name))
        if whole in _OF_ONE_DTYPE:
            require_one_dtype_under(tracer.autocast, whole.__name__, collect_tensors((args, options)))
        run, is_recurrent = functools.partial(func, *args, **options), func in _RECURRENCES
        if tracer.autocast is None and all(isinstance(t, FakeTensor) for t in collect_tensors((args, options))):
            made = functools.partial(_recur_once, func) if is_recurrent else func
            run = functools.partial(tracer.abstract, made, args, options)
        if device_autocast.is_emulated():
            with device_autocast.use_cpu_autocast(tracer.autocast):  # to most products all devices do the same
                out = tracer.record_whole(_WHOLE[func], args, options, run, is_recurrent)
            return (
                out
                if tracer.autocast is None
                else device_autocast.check_result(func, args, options, tracer.autocast, out)
            )
        return tracer.record_whole(_WHOLE[func], args, options, run, is_recurrent)

    def _run(self, func: Any, args: tuple, options: dict[str, Any], run: Any = None) -> Any:
        """`func`, or instead of it `run`, which records the same."""
        run = run or func
        if not device_autocast.is_emulated():
            return run(*args, **options)
        dtype = self.tracer.autocast
        with device_autocast.use_cpu_autocast(None):
            if dtype is None or any(map(_is_batched, collect_tensors((args, options)))):
                return run(*args, **options)
            given = device_autocast.cast_arguments(func, args, options, dtype, torch.Tensor.to)
            if given is None:
                return device_autocast.check_result(func, args, options, dtype, run(*args, **options))
            with self.tracer.suspend_casts():
                out = run(*given[0], **given[1])
            return device_autocast.check_result(func, args, options, dtype, out)

    def _whole_norm(self, *args: Any) -> torch.Tensor:
        return self.tracer.record_whole(aten.rms_norm.default, args, {}, functools.partial(torch.rms_norm, *args))

    def _shape(self, t: torch.Tensor) -> torch.Size:
        tracer = self.tracer
        ragged = self._has_note_routed_rows(t)
        with torch.DisableTorchFunction():
            shape = t.shape
            first = shape[0] if shape else None
        out = wrap_sizes(shape, tracer.sizes)
        if ragged and type(out[0]) is int:
            out = torch.Size([wrap_routed(first, ROW_COUNT, tracer), *out[1:]])
        elif out and type(out[0]) is int and (several := self._several(t, out[0])) is not None:
            out = torch.Size([several, *out[1:]])
        return out

    def _has_note_routed_rows(self, t: Any) -> bool:
        """Whether a tensor has as many rows as the routing says."""
        if not isinstance(t, torch.Tensor) or _is_batched(t):
            return False
        with suspend_modes(), torch.DisableTorchFunction():
            shape = t.shape
            return (
                bool(shape) and shape[0] in self.tracer.row_counts and bool(self.tracer.node_of(t).meta.get("ragged"))
            )

    def _several(self, t: torch.Tensor, rows: int) -> Any:
        """How many rows there are where each token has a few, of each choice one, say; None where they have not."""
        sizes = self.tracer.sizes
        tokens = sizes.tokens
        each, rest = divmod(rows, tokens)
        if rest or not 2 <= each <= _MOST_OF_A_TOKEN or tokens < _LEAST_TOKENS or _is_batched(t):
            return None
        with suspend_modes(), torch.DisableTorchFunction():
            if rows in self.tracer.state_sizes or self.tracer.node_of(t).op == "get_attr":
                return None
        return Size(rows, f"{each}*{sizes.tokens_text}", sizes)

    def _set_data(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """`t.data = value`: no op tells of it. It is a copy that autograd does not see, unless it makes `t` another
        kind of tensor, or `value` is a parameter or buffer itself."""
        tracer = self.tracer
        if tracer.refuses_conversion(t, value):
            _SET_DATA(t, value)
            return
        with suspend_modes(), torch.DisableTorchFunction():
            root, source = tracer.root(t), tracer.root(value)
            if source is root and (value.stride(), value.storage_offset()) == (t.stride(), t.storage_offset()):
                return  # its own data
        if source is not root and id(source) in tracer.state_ids:
            tracer.refuse(
                "`.data` of one parameter or buffer is made that of another: from then on they share memory",
                "copy the values: b.copy_(a), or b.data = a.data.clone()",
            )
        with torch.no_grad():
            t.copy_(value)

    def _numbers(self, t: torch.Tensor, value: Any) -> Any:
        """Integers that Python read from the routing."""
        with suspend_modes(), torch.DisableTorchFunction():
            if is_float(t) or t.dtype is torch.bool or _is_batched(t):
                return value
            node = self.tracer.node_of(t)
            if follows_from_floats(node):
                return wrap_routed(value, node, self.tracer)
            self.tracer.note_plain(node, value)
            return value


def _is_along_rows(func: Any, args: tuple, options: dict[str, Any]) -> bool:
    """Whether the function splits along the first axis, so that the length of its result depends on that axis."""
    at = _LISTS[func]
    dim = options.get("dim", args[at] if len(args) > at else 0)
    several = (*options.values(), *args[1:])  # the lengths of the parts, whose number they are
    return bool(args) and dim in (0, -args[0].dim()) and not any(isinstance(n, (list, tuple)) for n in several)


def _recur_once(func: Any, x: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """What a recurrence gives for meta tensors, as large as for all steps, from a single one."""
    if options or (isinstance(args[0], torch.Tensor) and not is_float(args[0])):  # or packed sequences
        return func(x, *args, **options)
    is_batch_first = bool(args[-1])
    axis = 1 if is_batch_first else 0
    if x.shape[axis] < 1:  # torch says what is wrong
        return func(x, *args)
    out, *states = func(x.narrow(axis, 0, 1), *args)
    steps, batch = (x.shape[0], x.shape[1]) if not is_batch_first else (x.shape[1], x.shape[0])
    every = out.new_empty(steps, batch, out.shape[-1])
    return (every.transpose(0, 1) if is_batch_first else every, *states)


def _without_eps(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> tuple[torch.Tensor, list[int], torch.Tensor | None, None] | None:
    """A norm's arguments if eps is left to torch, which takes that of the dtype: a number from one capture would be
    wrong in another dtype."""
    if eps is not None or not is_float(input) or _is_batched(input):
        return None
    return input, list(normalized_shape), weight, None


def _names(n: Any, tokens: int, tokens_text: str) -> list[str]:
    """The expressions that a number of a shape may have come from."""
    if isinstance(n, Number):
        return [n.expr, str(n.value)] if n.value <= _MOST_OF_A_TOKEN else [n.expr]
    if isinstance(n, int) and n and n % tokens == 0 and n // tokens <= _MOST_OF_A_TOKEN:
        return [str(n), f"{n // tokens}*{tokens_text}"]
    return [str(n)]


def _condition(names: tuple[str, ...], is_whole: bool) -> tuple[str, str]:
    """The two sides that are equal if a view fits. Args: names of the tensor's axes, "/", and of the asked ones."""
    at = names.index("/")
    own, asked = "*".join(names[:at]) or "1", "*".join(names[at + 1 :]) or "1"
    return (own, asked) if is_whole else (f"({own})%({asked})", "0")


def _is_identity(left: str, right: str, dims: Iterable[str]) -> bool:
    """Whether two expressions are equal at all sizes, by some that have no factor in common."""
    several = [dict(zip(dims, primes, strict=False)) for primes in _PRIMES]
    try:
        return all(evaluate_size(left, one) == evaluate_size(right, one) for one in several)
    except (ArithmeticError, NameError):
        return False


_PRIMES = ((31, 37, 41, 43, 47), (53, 29, 59, 61, 67), (71, 73, 23, 79, 83))


def _text(size: Any) -> str:
    return size.expr if isinstance(size, Number) else str(size)


def _plain(size: Any) -> Any:
    return size.value if isinstance(size, Number) else size


def _whole_slices(t: torch.Tensor, index: Any) -> list[tuple[int, int]]:
    """(dim of the result, stop) of slices `[:stop]` that take all there is: torch leaves them out, and for other sizes
    it does not."""
    parts = index if isinstance(index, tuple) else (index,)
    if _is_batched(t) or not all(p is None or p is Ellipsis or type(p) in (int, slice) for p in parts):
        return []
    found, source, result = [], 0, 0
    for part in parts:
        if part is Ellipsis:
            rest = t.dim() - sum(type(p) in (int, slice) for p in parts)
            source, result = source + rest, result + rest
            continue
        if type(part) is slice and part.start in (None, 0) and part.step in (None, 1) and part.stop == t.shape[source]:
            found.append((result, part.stop))
        source += part is not None
        result += type(part) is not int
    return found


def _is_batched(t: torch.Tensor) -> bool:
    """Inside `vmap`: the tensors that ops see are others than the ones that Python sees."""
    return is_functorch_wrapped_tensor(t)


_SIZES = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.__len__,
}  # type: ignore[attr-defined]


_VIEWS = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}
_UNFLATTEN = {torch.Tensor.unflatten, torch.unflatten}
_RMS_NORMS = {F.rms_norm, torch.rms_norm}
# arguments that may come by name
_NAMES = {
    F.linear: ("input", "weight", "bias"),
    torch.matmul: ("input", "other"),
    torch.cosine_similarity: ("x1", "x2"),
}
_OF_ONE_DTYPE = {F.linear, torch.matmul, torch.einsum}
# Functions that return a list whose length follows from an axis, with the position of their `dim` argument.
_LISTS = {
    torch.Tensor.tolist: 9, torch.Tensor.__iter__: 9, torch.Tensor.unbind: 1, torch.unbind: 1, torch.Tensor.split: 2,
    torch.split: 2, torch.Tensor.chunk: 2, torch.chunk: 2,
}  # fmt: skip
_NUMBERS = {torch.Tensor.item, torch.Tensor.tolist}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_MOST_OF_A_TOKEN = 16
_LEAST_TOKENS = 17  # of fewer, a multiple may be any number
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad}
_COUNTS = {torch.Tensor.numel, torch.Tensor.nelement, torch.numel}
