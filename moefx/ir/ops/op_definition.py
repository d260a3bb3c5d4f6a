"""`Op`: one torch.library op, defined from a readable torch implementation.

The implementation is the semantics of the op, its default provider (named "reference") and the fallback of every other
provider. An `Op` also holds a fake, an autograd formula whose backward is another op, an autocast rule, the faster
providers, and a shape contract:

    "x[S,D], token_ids[B], expert_offsets[E+1], inverse[S,K] -> rows[B,D]"

Every call, real or fake, checks its arguments against the contract. Tests check the results (`tests/op_contracts.py`).

Ops are defined by `torch.library.Library.define`: a call takes about half the time of a `torch.library.custom_op`. If
the implementation of an op calls another op, that call bypasses the dispatcher.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...errors import DoubleBackward, InvalidInput
from ..guards import recomputed_choice
from ..op_providers import Provider, choose_provider, registry
from .op_contract import Contract, check_equal, format_shape
from .partial_backward import BackwardRuns, keeps_graph

NAMESPACE = "moefx"
# FRAGMENT: other files define ops in the same namespace.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_AUTOCAST_DEVICES = ("cpu", "cuda")  # ROCm builds of torch call their devices "cuda" as well


class _ThreadState(threading.local):
    """Whether this thread runs an op's implementation, below the dispatcher; and whether ops are joined."""

    is_below_dispatcher = False
    is_joined = False


_thread = _ThreadState()
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset


def _list_plain_keysets() -> frozenset[int]:
    key = torch.DispatchKey
    cpu, gpu, views = (torch.DispatchKeySet(k) for k in (key.CPU, key.CUDA, key.ADInplaceOrView))
    backends = cpu, gpu, cpu | gpu
    return frozenset(keyset.raw_repr() for backend in backends for keyset in (backend, backend | views))


_PLAIN_KEYSETS = _list_plain_keysets()  # without modes, subclasses and transforms


class Derivative(NamedTuple):
    """The derivative of an op: see `Op.autograd`."""

    save: Callable[..., None]
    backward: Callable[..., Sequence[Any]]


class Op:
    """A `torch.library` op in namespace `moefx`. Calling it calls the registered overload.

    Args:
        schema: the schema without its namespace, such as `"dispatch(Tensor x, ...) -> Tensor"`.
        contract: the shapes, one line.
        reference: the readable implementation on plain torch tensors (any device, any floating dtype).
        keeps_activations: its backward keeps rows of activations. A node of joined ops has at most one op of this kind.
        without_backward: keyword arguments of a call without a backward, which returns the first result alone.
    """

    def __init__(
        self,
        schema: str,
        *,
        contract: str,
        reference: Callable[..., Any],
        keeps_activations: bool = False,
        without_backward: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        self.name, self.keeps_activations = schema.partition("(")[0], keeps_activations
        self.without_backward = without_backward
        self.contract = Contract.parse(contract)
        self.reference = reference
        self.providers: dict[str, Provider] = {}
        self.observe: Callable[[Any], None] | None = None  # called with the outputs of each run
        self.derivative: Derivative | None = None
        self.cast: Callable[..., tuple[Sequence[Any], dict[str, Any]]] | None = None  # the autocast rule
        functools.update_wrapper(self, reference)
        self.provider("reference")(reference)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        arguments = [a.name for a in self.overload._schema.arguments]
        self.routing_arguments = recomputed_choice.routing_arguments(arguments)
        self._shape_checks = [(arguments.index(n), n, dims) for n, dims in self.contract.inputs.items()]
        _library.impl(self.name, self.run, "CompositeExplicitAutograd")
        registry[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _thread.is_below_dispatcher and not is_profiled():  # a profile shows calls of the dispatcher
            return self.run(*args, **kwargs)
        return self.overload(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<moefx op {self.name}: {self.contract.text}>"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the best provider on plain tensors, below the dispatcher."""
        self.check_shapes(args)
        provider = choose_provider(self, args, kwargs)
        before, _thread.is_below_dispatcher = _thread.is_below_dispatcher, True
        try:
            outputs = provider.run(*args, **kwargs)
        finally:
            _thread.is_below_dispatcher = before
        if self.observe is not None:
            self.observe(outputs)
        return outputs

    def check_shapes(self, args: Sequence[Any]) -> None:
        """Raise `InvalidInput` unless the tensors have the shapes of the contract."""
        sizes: dict[str, Any] = {}
        for index, name, dims in self._shape_checks:
            value = args[index] if index < len(args) else None
            if value is None:
                continue
            shape = value.shape
            if len(shape) != len(dims):
                raise InvalidInput(
                    f"moefx::{self.name}: {name} has shape {format_shape(shape)}, expected [{','.join(dims)}]"
                )
            for letter, size in zip(dims, shape, strict=True):
                if letter == "_":
                    continue
                if letter == "E+1":
                    letter, size = "E", size - 1
                other = sizes.setdefault(letter, size)
                if other is not size:
                    check_equal(other, size, f"moefx::{self.name}", name, shape, dims, letter)

    # -- registration around the implementation

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that returns the shapes and dtypes of the results, for fake and meta tensors."""

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_shapes(args)
            return function(*args, **kwargs)

        torch.library.register_fake(f"{NAMESPACE}::{self.name}", checked, lib=_library)
        return function

    def provider(
        self, name: str, supports: Callable[..., bool] = lambda *_, **__: True, rank: int = 0
    ) -> Callable[..., Any]:
        """Register another implementation. `choose_provider` tries higher ranks first, and later ones at equal rank."""

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            self.providers[name] = Provider(name, run, supports, rank)
            self.providers = dict(sorted(self.providers.items(), key=lambda item: item[1].rank))
            return run

        return register

    def autocast(self, cast: Callable[..., tuple[Sequence[Any], dict[str, Any]]]) -> Callable[..., Any]:
        """Register the autocast rule `cast(dtype, *args, **kwargs) -> (args, kwargs)`. By default nothing is cast."""
        self.cast = cast
        for device in _AUTOCAST_DEVICES:
            keys = torch.DispatchKeySet(getattr(torch.DispatchKey, f"Autocast{device.upper()}"))

            def kernel(*args: Any, _device: str = device, _keys: Any = keys, **kwargs: Any) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(_keys):
                    new_args, kwargs = cast(torch.get_autocast_dtype(_device), *args, **kwargs)
                    return self.overload(*new_args, **kwargs)

            _library.impl(self.name, kernel, f"Autocast{device.upper()}")
        return cast

    def autograd(self, *, save: Callable[..., None], backward: Callable[..., Sequence[Any]]) -> None:
        """Register the derivative.

        Args:
            save: `save(ctx, args, kwargs, outputs)` runs after the forward and saves inputs and outputs for the
                backward. It saves no other tensors, so that version checks and saved-tensor hooks cover all of them.
            backward: `backward(ctx, grads)` returns one gradient per positional argument, a list (or None) for a list.
                `grads` holds None for outputs without a gradient; `ctx.needs[i]` tells whether argument i, or any
                element of it, needs one. `ctx.needs_later[i]` tells whether it needs one in another backward, for which
                `ctx.delayed` may be set (see `partial_backward`). It reads saved tensors once, by `unpack_saved(ctx)`,
                and calls an op, so that the backward is one named node too.
        """
        self.derivative = Derivative(save, backward)
        function = _autograd_function(self, save, backward)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                lengths, flat = _flatten(args)
                structure: dict[str, Any] = {}
                outputs = function.apply(keyset, kwargs, lengths, structure, *flat)
                return structure["type"](outputs) if structure["type"] else outputs
            return self._below_autograd(keyset, args, kwargs)

        skip_in_dynamo(kernel)
        _library.impl(self.name, kernel, "Autograd", with_keyset=True)

    def _below_autograd(self, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        keyset = keyset & _BELOW_AUTOGRAD
        with torch._C._AutoDispatchBelowAutograd():
            if keyset.raw_repr() in _PLAIN_KEYSETS:
                return self.run(*args, **kwargs)
            return self.overload.redispatch(keyset, *args, **kwargs)

    def without_gradient(self) -> None:
        """Declare that the results have no gradient."""
        skip_in_dynamo(kernel := lambda keyset, *args, **kwargs: self._below_autograd(keyset, args, kwargs))
        _library.impl(self.name, kernel, "Autograd", with_keyset=True)

    def once_differentiable(self, forward: str) -> None:
        """Make this backward op raise `DoubleBackward` if it is differentiated itself."""

        def backward(ctx: Any, grads: Any) -> Sequence[Any]:
            raise_double_backward(forward)

        self.autograd(save=lambda ctx, args, kwargs, outputs: None, backward=backward)


def raise_double_backward(op: str) -> NoReturn:
    raise DoubleBackward(
        f"moefx::{op} is differentiable once, but a gradient of its gradient was requested, as a gradient penalty or a "
        "Hessian-vector product does. Use the original model for that"
    )


@contextlib.contextmanager
def run_joined() -> Iterator[None]:
    """Run ops of this thread one after the other without the dispatcher: see `ir.graphs.joined_ops`. Their
    providers run below autograd, as in a single call."""
    before = _thread.is_below_dispatcher, _thread.is_joined
    _thread.is_below_dispatcher = _thread.is_joined = True
    try:
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        _thread.is_below_dispatcher, _thread.is_joined = before


def copy_unless_joined(tensor: Tensor) -> Tensor:
    """Copy a result that shares memory with an op's arguments, which the dispatcher forbids. Between joined ops, return
    the tensor itself."""
    return tensor if _thread.is_joined else tensor.clone()


is_profiled = getattr(getattr(torch._C, "_autograd", None), "_profiler_enabled", lambda: True)


def is_last_use(saved: Sequence[Any]) -> bool:
    """Return whether the running backward reads the saved tensors for the last time: it is not traced, and its graph is
    freed afterwards (no `retain_graph`)."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(t) is torch.Tensor for t in saved) and not keeps_graph()


def unpack_saved(ctx: Any) -> Sequence[Any]:
    """Return the tensors that the forward saved. Call it once: checkpointing unpacks each tensor once only.

    Raises:
        RecomputedChoice: a recomputed forward selected other experts.
    """
    saved = ctx.saved_tensors
    if ctx.choice is not None:
        recomputed_choice.require_same_routing(ctx.choice, saved)
        if is_last_use(ctx.choice.tensors):
            ctx.choice = None
    return saved


def fill_gradients(grads: Sequence[Tensor | None], outputs: Sequence[Any]) -> list[Tensor]:
    """Return the gradients of the floating-point results in their dtypes, zeros for results without a gradient.

    Every rank takes part in the exchange of a backward, even without a gradient of its own.

    Args:
        outputs: (shape, dtype, device) of each result.
    """
    return [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.to(dtype)
        for grad, (shape, dtype, device) in zip(grads, outputs, strict=True)
        if dtype.is_floating_point
    ]


def op(schema: str, *, contract: str, **options: Any) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that makes `Op(schema, ..., reference=the decorated function)`."""
    return lambda reference: Op(schema, contract=contract, reference=reference, **options)


def flatten_lists(args: Sequence[Any]) -> Iterator[Any]:
    """Iterate over arguments and the items of lists among them."""
    return itertools.chain.from_iterable(arg if isinstance(arg, (list, tuple)) else (arg,) for arg in args)


def _flatten(args: Sequence[Any]) -> tuple[tuple[int | None, ...], list[Any]]:
    """Flatten lists of tensors, because autograd.Function does not look into them."""
    return tuple([len(arg) if isinstance(arg, (list, tuple)) else None for arg in args]), list(flatten_lists(args))


def _unflatten(lengths: Sequence[int | None], flat: Sequence[Any]) -> list[Any]:
    result, start = [], 0
    for length in lengths:
        result.append(flat[start] if length is None else list(flat[start : start + length]))
        start += 1 if length is None else length
    return result


def _list_item_ranges(lengths: Sequence[int | None]) -> list[range]:
    """Return the indices of each argument's items in the flat list."""
    counts = [1 if length is None else length for length in lengths]
    return [range(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]


def _reduce_needs(lengths: Sequence[int | None], needs: Sequence[bool]) -> list[bool]:
    """Return whether each argument, or any element of it, needs a gradient."""
    return [any(n) if isinstance(n, list) else n for n in _unflatten(lengths, needs)]


def _autograd_function(
    op: Op, save: Callable[..., None], backward: Callable[..., Sequence[Any]]
) -> type[torch.autograd.Function]:
    def run_forward(ctx: Any, keyset: Any, kwargs: dict, lengths: tuple, structure: dict, *flat: Any) -> Any:
        args = _unflatten(lengths, flat)
        outputs = op._below_autograd(keyset, args, kwargs)
        structure["type"] = type(outputs) if isinstance(outputs, (list, tuple)) else None
        ctx.lengths, ctx.delayed = lengths, None
        ctx.runs = BackwardRuns([False] * 4 + [isinstance(t, Tensor) for t in flat])
        ctx.set_materialize_grads(False)  # zeros for saved activations would take memory
        save(ctx, args, kwargs, outputs)
        ctx.choice = recomputed_choice.record_routing(
            op.name, [args[i] for i in op.routing_arguments], ctx.to_save or ()
        )
        return tuple(outputs) if structure["type"] else outputs

    def run_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        needs = ctx.runs.find_needs(ctx)
        ctx.needs = needs_ever = _reduce_needs(ctx.lengths, ctx.needs_input_grad[4:])
        if needs is not ctx.needs_input_grad:
            ctx.needs = _reduce_needs(ctx.lengths, needs[4:])
        ctx.needs_later = [need and not now for need, now in zip(needs_ever, ctx.needs, strict=True)]
        if ctx.runs.has_left_all(needs[4:], grads):
            unpack_saved(ctx)  # raises if one was changed in place
            gradients = ctx.delayed.compute(ctx.needs)
        else:
            ctx.delayed = None
            gradients = backward(ctx, grads)
        ctx.runs.end(grads, [ctx], lambda call: _list_item_ranges(call.lengths))
        flat: list[Any] = []
        for length, grad in zip(ctx.lengths, gradients, strict=True):
            if length is None:
                flat.append(grad)
            else:
                flat.extend((None,) * length if grad is None else grad)
        return (None, None, None, None, *flat)

    # The class name is shown as grad_fn: <build_pftBackward>.
    skip_in_dynamo(run_forward)
    skip_in_dynamo(run_backward)
    members = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type(op.name, (torch.autograd.Function,), members)


def skip_in_dynamo(function: Callable[..., Any]) -> None:
    """Tell Dynamo to skip the frames of a function. After a graph break Dynamo inspects every frame, even of functions
    that C++ calls."""
    with contextlib.suppress(ImportError, AttributeError):  # only compilation takes longer without it
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


skip_in_dynamo(Op.run)
