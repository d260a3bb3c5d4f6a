"""What runs an op during a capture: floats are abstract, integers real, and floats get shadows where integers follow
from them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    in_kernel_invocation_manager,
)

from ..errors import CaptureError, Refused
from . import device_autocast
from .capture_result import FORCE_MIXED, FORCE_SPREAD, HostRead, LimitedOutcome, SubmoduleCall
from .code_locations import (
    Source,
    find_user_opcode,
    find_user_source,
    find_user_stack,
    is_user_asking_number,
    is_user_asking_tensor,
)
from .concrete_routing import Routing
from .concrete_values import compute_concrete_value
from .functionalize import GROUPED_MM, find_functional_form, make_grouped_result, require_one_dtype, restore_row_axis
from .graph_recorder import Recorder, grad_enabled
from .idle_tests import ASKS, KEYS, LOADS, IdleQuestions
from .layout_cache import empty, is_pure, key_of, known_result, remember
from .node_origins import (
    find_leaf_kinds,
    follows_from_floats,
    has_ancestor,
    has_gradients,
    hash_computation,
    is_abstract,
    is_nan_check,
)
from .op_sets import CHOICES, SHAPE_ONLY, TRUTHS
from .routed_numbers import ROW_COUNT, RoutedFloat, RoutedInt, asks_if_empty
from .single_rank_collectives import is_single_rank_op, run_single_rank_op
from .symbolic_sizes import peek_value
from .tensor_trees import collect_tensors, has_values, is_float, map_tensors, suspend_modes

aten = torch.ops.aten
# They raise or do nothing, as `assert` does: no part of what is computed, and invented numbers need not pass them.
_CHECKS = {aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default}
# These say where in a tensor they found what they selected.
_PLACES = {
    "argmax", "argmin", "argsort", "cummax", "cummin", "kthvalue", "max", "median", "min", "mode", "nanmedian", "sort",
    "topk",
}  # fmt: skip
# How reads come out, by where they are, through all calls; comparisons and numbers by where they are computed, by which
# op, and whether of what is known of the routing alone. A function says what integers are to be that an op gave, or an
# argument has (by its number).
Interventions = Mapping[tuple[Source, ...] | tuple[Source, str, bool] | int, Any]


@functools.cache
def _aliases(func: Any) -> tuple[list[int], bool]:
    """Which arguments an op writes to, and whether its results may share memory with any."""
    infos = [a.alias_info for a in func._schema.arguments]
    written = [i for i, info in enumerate(infos) if info is not None and info.is_write]
    return written, any(info is not None for info in infos)


class Tracer(Recorder):
    """Runs and records every op of one capture; it is the `CountLog` of the numbers of the routing."""

    def __init__(self, routing: Routing, interventions: Interventions | None = None):
        super().__init__()
        self.routing, self.interventions = routing, interventions or {}
        self.coins: dict[tuple[int, torch.Size], torch.Tensor] = {}  # outcomes of what comes out mixed, by question
        self.numbers: dict[tuple[Source, torch.Size], torch.Tensor] = {}  # what choices are made of then
        self.reads: list[HostRead] = []
        self.plain_reads: dict[tuple[Source, ...], list[Any]] = {}  # integers, by the calls that read them
        self.questions = IdleQuestions()
        self.turned: Counter[tuple[Source, ...]] = Counter()  # how many times a read came out otherwise
        self.calls: list[SubmoduleCall] = []
        self.modes_read: set[str] = set()
        self.refusals: list[Refused] = []
        self.overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors of others, and what they held
        self.state: set[int] = set()  # parameters and buffers, by id
        self.held: set[int] = set()  # their sizes
        self.cut_off: list[fx.Node] = []  # values that collectives have copied, without their gradients
        self.originals: dict[int, str] = {}  # names of the block's parameters, by the ids of the real ones
        self.quiet = 0  # inside an operation that is recorded whole
        self.is_cast = False  # inside a function that autocast has cast the arguments of
        self.touched = False  # whether the op at work was called with a number of the routing

    # ------------------------------------------------------------------ numbers of the routing (a `CountLog`)
    def compared(self, count: Any, op: str, other: Any, value: bool) -> bool:
        if is_user_asking_number():
            self.ask(ASKS if asks_if_empty(count, op, other) else LOADS)
        if isinstance(other, (RoutedInt, RoutedFloat)) and op in ("eq", "ne") and find_user_opcode() != "COMPARE_OP":
            return value  # keys of a dict: whether two ids are one is no branch
        if asks_if_empty(count, op, other):
            return value  # without rows nothing is computed; other captures had experts without
        if count.expr is ROW_COUNT and count.value == 0:  # either way nothing is computed: it tells nothing of rows
            return self._turned(find_user_stack(), value, (op, other))
        return self._noted(value, count.expr if isinstance(count.expr, fx.Node) else None, (op, other), count.origins)

    def _noted(
        self, value: Any, node: fx.Node | None = None, asked: tuple[str, Any] | None = None,
        of: frozenset[Any] = frozenset(),
    ) -> Any:  # fmt: skip
        """What Python reads here, as it is to come out."""
        calls = find_user_stack()
        value = self._turned(calls, value, asked)
        self.reads.append(HostRead(calls, value, node, asked, of))
        return value

    def ask(self, how: str) -> None:
        """The program asks here which experts have tokens: see `idle_tests`."""
        self.questions.note(how)

    def note_error(self, is_of_rows: bool) -> None:
        """An op raised an error, which the program may catch.

        Args:
            is_of_rows: whether the number of rows may be the reason.
        """
        if not is_user_asking_tensor():
            return
        self.questions.errors[find_user_stack()] = is_of_rows or self.questions.errors.get(find_user_stack(), False)

    def _turned(self, calls: tuple[Source, ...], value: Any, asked: tuple[str, Any] | None) -> Any:
        flip = self.interventions.get(calls, value)
        if not isinstance(flip, LimitedOutcome):
            return flip
        if asked is not None and flip.compared_with and peek_value(asked[1]) not in flip.compared_with:
            return value
        self.turned[calls] += 1
        return flip.value if self.turned[calls] <= flip.num_reads else value

    def asks_for_grad(self, t: torch.Tensor) -> bool:
        """Whether a tensor requires a gradient, which is not known here: it may come out either way."""
        return self._noted(t.requires_grad)

    def refuse(self, reason: str, remedy: str) -> None:
        """The program does here what a block must not do; other modules may."""
        self.refusals.append(Refused(reason, source=str(find_user_source()), remedy=remedy))

    def refuses_conversion(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Refuse a parameter or buffer that becomes one of another dtype or shape. Returns whether it does."""
        with suspend_modes(), torch.DisableTorchFunction():
            if (old.dtype, old.shape) == (new.dtype, new.shape):
                return False
            of, to = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (old, new))
        self.refuse(
            f"a call converts a parameter or buffer for good, from {of} to {to}: the next call computes otherwise",
            "convert it before you compile (module.to(dtype)); or call the model once, if it then stays as it is",
        )
        return True

    def leak(self, expr: Any) -> None:
        self.sizes.routed = True

    def keyed(self) -> None:
        if is_user_asking_number():
            self.ask(KEYS)

    def use(self, size: Any) -> None:
        self.touched = True
        self.sizes.given |= {size.value}

    def rows_of_routing(self, before: int) -> None:
        """The ops since `before` made rows as many as the routing says."""
        for node in self.nodes[before:]:
            node.meta["ragged"] = True
            if isinstance(val := node.meta.get("val"), torch.Tensor) and val.dim():
                self.lengths.add(val.shape[0])

    def _is_state(self, node: fx.Node) -> bool:
        """Computed from buffers, attributes and single integers only: a step, say, that is counted or given."""
        leaves = find_leaf_kinds(node)
        return leaves == {True} or (True in leaves and node.meta["val"].dim() == 0 and not follows_from_floats(node))

    def concrete(self, t: torch.Tensor) -> torch.Tensor:
        return self.concrete_value(self.node_of(t)) if isinstance(t, FakeTensor) else t

    def concrete_value(self, node: fx.Node) -> torch.Tensor:
        """The concrete value of a node under this routing."""
        return compute_concrete_value(node, self.routing.invent_value)

    def _constant(self, t: torch.Tensor) -> fx.Node:
        if id(t) not in self.named and (t.requires_grad or isinstance(t, nn.Parameter)):
            if name := self.originals.get(id(t)):
                self.refuse(
                    f"the block computes with its parameter {name} by way of a list, a dictionary or an object",
                    f"use self.{name}, or hold such parameters in a torch.nn.ParameterList or ParameterDict",
                )
            else:
                self.refuse(
                    f"the block computes with a parameter of {list(t.shape)} that is not its own",
                    "make the module that owns it a submodule of the block, or compute with it outside of the block",
                )
        return super()._constant(t)

    # ------------------------------------------------------------------ execution
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.lift_fresh.default, aten.lift.default):
            return self._lift_literal(args[0])
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        if func in _CHECKS:
            return None
        with suspend_modes(), torch.DisableTorchFunction():
            if is_single_rank_op(func, args):
                return run_single_rank_op(func, args, self._copy_values)
            if func is aten._local_scalar_dense.default:
                return self._host_read(args[0])
            if func is aten.is_same_size.default:
                return func(*args)
            if self.quiet:
                return self.compute(func, args, kwargs)[0]
            if self.autocast is not None and device_autocast.is_emulated() and not self.is_cast:
                given = device_autocast.cast_arguments(func, args, kwargs, self.autocast, self._cast)
                args, kwargs = given or (args, kwargs)
            return self.record(func, args, kwargs)

    def _copy_values(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """What a collective does that writes one tensor into another: autograd does not see it."""
        if self.quiet:
            self.compute(aten.copy_.default, (target, source), {})
        else:
            detached = self.record(aten.detach.default, (source,), {})
            if grad_enabled() and has_gradients(self.node_of(source)):
                self.cut_off.append(self.node_of(detached))
            self.record(aten.copy_.default, (target, detached), {})

    def refuse_cut_off(self, outputs: list[fx.Node]) -> None:
        """Refuse results that are computed from values with gradients by collectives alone, so that none flow back."""
        for n in outputs:
            val = n.meta.get("val")
            if not isinstance(val, torch.Tensor) or not is_float(val) or has_gradients(n):
                continue
            if cut := [c for c in self.cut_off if has_ancestor(n, c)]:
                self.refusals.append(
                    Refused(
                        "no gradient flows through a collective of torch.distributed that writes to a tensor, and the "
                        "result of the block comes from one",
                        source=str(cut[0].meta["source"]),
                        remedy="call it in a torch.autograd.Function, whose backward is the opposite collective",
                    )
                )

    def notice_autocast(self) -> None:
        """How it is at a call of the program's."""
        self.autocast = device_autocast.get_autocast_dtype()
        if device_autocast.is_changed_by_block():
            self.modes_read.add("autocast")

    def _cast(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.record(aten._to_copy.default, (t,), dict(dtype=dtype))

    @contextlib.contextmanager
    def already_cast(self) -> Iterator[None]:
        """Autocast does nothing inside of a function that it has cast the arguments of."""
        before, self.is_cast = self.is_cast, True
        try:
            yield
        finally:
            self.is_cast = before

    def _lift_literal(self, t: torch.Tensor) -> torch.Tensor:
        self.literals[id(t)] = self.given
        if is_float(t) and not isinstance(t, FakeTensor):
            with suspend_modes(), torch.DisableTorchFunction():
                node = self._constant(t)
                fake = node.meta["val"]
                self.track(fake, node)
                self.literals[id(fake)] = self.given
                return fake
        self.keep.append(t)
        return t

    def _host_read(self, t: torch.Tensor) -> Any:
        node = self.node_of(t)
        original = node.meta.get("original") if node.op == "get_attr" and not is_float(t) else None
        value = (original if original is not None and has_values(original) else self.concrete(t)).item()
        is_asked = t.dtype is torch.bool or is_float(t) or self._is_state(node)
        if t.dtype is torch.bool and follows_from_floats(node) and is_user_asking_tensor() and not is_nan_check(node):
            self.ask(ASKS)
        if not is_asked and not follows_from_floats(node):
            self.note_plain(node, value)
        return self._noted(value, node) if is_asked else value

    def note_plain(self, node: fx.Node, value: Any) -> None:
        """Python reads integers that no routing and no state determines: see `matching.probes.plain_integers`."""
        is_computed = node.op == "call_function" or node.meta.get("kind") == "constant"
        if is_computed and find_leaf_kinds(node) == {False}:
            self.plain_reads.setdefault(find_user_stack(), []).append(value)

    def record(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in ("index_put", "index_put_") and self._is_masked_fill(*args):
            fill = aten.masked_fill_.Tensor if name.endswith("_") else aten.masked_fill.Tensor
            return self.record(fill, (args[0], args[1][0], args[2]), {})
        if name in (
            "index",
            "index_put",
            "index_put_",
            "_index_put_impl_",
            "_unsafe_index",
            "_unsafe_index_put",
        ):
            args = (args[0], self._integer_indices(args[1]), *args[2:])
        elif name == "masked_select":
            return self.record(aten.index.Tensor, (args[0], self._integer_indices([args[1].expand(args[0].shape)])), {})
        if name in TRUTHS:
            args = map_tensors(args, self._truth)
        elif func is aten._to_copy.default and kwargs.get("dtype") is torch.bool and self._is_abstract(args[0]):
            args, kwargs = (self._truth(args[0]),), {k: v for k, v in kwargs.items() if k != "dtype"}
        if func in (aten.clone.default, aten.alias.default):
            return self._same_value(func, args, kwargs)
        if kwargs.get("generator") is not None:
            self.refuse(
                "the block draws random numbers from a generator of its own", "draw them from torch's default generator"
            )
        written, is_view = _aliases(func)
        node_args, node_kwargs, nodes = self._nodes_of(args, kwargs)
        if name.startswith(("index_put", "_index_put")):
            node_args = (*node_args[:2], restore_row_axis(node_args[2]), *node_args[3:])
        known = func in SHAPE_ONLY or all(node.meta.get("known") for node in nodes)
        known = known and torch.Tag.nondeterministic_seeded not in func.tags
        if written:
            return self._record_in_place(func, args, kwargs, node_args, node_kwargs, written, known)
        out, concrete = self.compute(func, args, kwargs)
        if type(out) is bool:  # `torch.equal`
            return self._noted(out)
        flip = self.interventions.get((find_user_source(), str(func), known)) if self.interventions else None
        if callable(flip):
            changed = {id(t): flip(t) for t in collect_tensors(out) if not is_float(t)}
            out, concrete = (map_tensors(tree, lambda t: changed.get(id(t), t)) for tree in (out, concrete))
        elif flip == FORCE_SPREAD:
            asked = hash_computation(func, node_args, node_kwargs)
            out, concrete = self._spread(func, args, kwargs, out, concrete, asked)
        elif flip == FORCE_MIXED:
            asked = hash_computation(func, node_args, node_kwargs)
            out, concrete = self._mixed(func, args, kwargs, out, concrete, asked, known)
        return self.record_out(func, node_args, node_kwargs, args, out, concrete, is_view, known)

    def _nodes_of(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, list[fx.Node]]:
        """Arguments with the nodes of their tensors, and these nodes."""
        nodes: list[fx.Node] = []

        def node_of(t: torch.Tensor) -> fx.Node:
            nodes.append(node := self.node_of(t))
            return node

        return map_tensors(args, node_of), map_tensors(kwargs, node_of) if kwargs else kwargs, nodes

    def _is_abstract(self, t: torch.Tensor) -> bool:
        return is_float(t) and not self.node_of(t).meta.get("known")

    def _truth(self, t: torch.Tensor) -> torch.Tensor:
        """Whether abstract floats are not 0, asked as a comparison: like any other it may come out either way."""
        return self.record(aten.ne.Scalar, (t, 0), {}) if self._is_abstract(t) else t

    def _mixed(
        self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, concrete: Any, asked: int, known: bool
    ) -> tuple[Any, Any]:
        """What an op gave, and its concrete result, otherwise (see `MIXED`). The same question, in every turn of a
        loop, say, has the same answer."""
        source = find_user_source()
        if func.overloadpacket.__name__ in CHOICES:

            def arbitrary(t: torch.Tensor) -> torch.Tensor:
                if known:
                    return self._tossed(self.concrete(t), asked)
                numbers = self.numbers.setdefault((source, t.shape), self.routing.draw_numbers(t.shape))
                return numbers.to(t.dtype) if is_float(t) else self.concrete(t)

            concrete = func(*map_tensors(args, arbitrary), **kwargs)
            others = iter(collect_tensors(concrete))
            return map_tensors(out, lambda t: other if not is_float(other := next(others)) else t), concrete
        if not isinstance(out, torch.Tensor):
            return out, concrete
        if is_float(out):
            concrete = func(*map_tensors(args, self.concrete), **kwargs) if concrete is None else concrete
            return out, self._tossed(concrete, asked)
        mixed = self._tossed(out, asked)
        if torch.equal(mixed, out):
            mixed = ~out if out.dtype is torch.bool else out + 1
        return mixed, mixed

    def _spread(
        self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, concrete: Any, asked: int
    ) -> tuple[Any, Any]:
        """What an op gave, and its concrete result, otherwise (see `SPREAD`). Of what selects the values are spread,
        and the places are those of other numbers."""
        if concrete is None:
            concrete = func(*map_tensors(args, self.concrete), **map_tensors(kwargs, self.concrete))
        if func.overloadpacket.__name__ in _PLACES:
            args = map_tensors(args, lambda t: self.routing.draw_numbers(t.shape) if t.dim() else self.concrete(t))
            others = iter(collect_tensors(func(*args, **kwargs)))
        else:
            others = itertools.repeat(None)

        def otherwise(t: torch.Tensor) -> torch.Tensor:
            other = next(others)
            if other is None or is_float(other) or other.shape != t.shape:
                return self._spread_out(t, asked)
            return other.to(t.dtype)

        concrete = map_tensors(concrete, otherwise)
        there = iter(collect_tensors(concrete))
        return map_tensors(out, lambda t: t if is_float(next_ := next(there)) else next_), concrete

    def _spread_out(self, value: torch.Tensor, asked: int) -> torch.Tensor:
        if not value.numel():
            return value
        spread = self._tossed(value, asked)
        if value.dtype is not torch.bool:
            is_zero = self.coins.setdefault((asked + 1, value.shape), self.routing.draw_coins(value.shape))
            is_zero = is_zero ^ bool(is_zero.sum() > is_zero.numel() // 2)  # else nothing is left of them
            first = torch.arange(value.numel()).view(value.shape) == 0
            spread = torch.where(is_zero if is_zero.any() else first, torch.zeros_like(value), spread)
        if torch.equal(spread, value) or (value.numel() == 1 and value.dtype is not torch.bool):
            spread = ~value if value.dtype is torch.bool else value + 1
        return spread

    def _tossed(self, value: torch.Tensor, asked: int) -> torch.Tensor:
        """Element by element a coin for the question, or a number as it was or one more."""
        coins = self.coins.setdefault((asked, value.shape), self.routing.draw_coins(value.shape)).clone()
        return coins if value.dtype is torch.bool else value + coins.to(value.dtype)

    def _same_value(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """A copy, or all of it as a view: the same value. Whether `contiguous` and `reshape` copy depends on the
        sizes, and so does whether a slice is all there is."""
        out, _ = self.compute(func, args, kwargs)
        is_view = func is aten.alias.default
        self.track(out, self.node_of(args[0]), args[0] if is_view else None, (func, ()) if is_view else None)
        return out

    def _is_masked_fill(self, t: torch.Tensor, indices: Any, value: torch.Tensor, accumulate: bool = False) -> bool:
        """`h[h < 0] = 0`: where a comparison of floats holds a number is put, in place of which no row is chosen."""
        mask = indices[0] if len(indices) == 1 else None
        if mask is None or mask.dtype is not torch.bool or mask.shape != t.shape or value.dim() or accumulate:
            return False
        return any(is_abstract(n) for n in self.node_of(mask).all_input_nodes)

    def _integer_indices(self, indices: Any) -> list[torch.Tensor | None]:
        out: list[torch.Tensor | None] = []
        for i in indices:
            if i is not None and i.dtype in (torch.bool, torch.uint8):
                hits = self.record(aten.nonzero.default, (i,), {})
                out += [self.record(aten.select.int, (hits, 1, d), {}) for d in range(i.dim())]
            else:
                out.append(i)
        return out

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(what the user sees, the concrete result where one was needed)."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        flat = collect_tensors((args, kwargs))
        if flat and not any(isinstance(t, FakeTensor) for t in flat):
            concrete = func(*args, **kwargs)
            return map_tensors(concrete, lambda t: self.to_fake(t) if is_float(t) else t), concrete
        key = key_of(func, args, kwargs) if is_pure(func) else None
        if (known := known_result(key)) is not None:
            return self._fake(empty(known)), None
        if _aliases(func) == ([], True) and not kwargs and len(flat) == 1 and args[0] is flat[0]:
            with in_kernel_invocation_manager(self.fake_mode):
                view = func(*args)
            return map_tensors(view, self._fake), None
        if self.autocast is None:  # which brings some of them together
            require_one_dtype(func, args)
        fargs, fkwargs = map_tensors((args, kwargs), self._all_fake)
        try:
            with self.fake_mode:
                out = make_grouped_result(*fargs) if func.overloadpacket is GROUPED_MM else func(*fargs, **fkwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = None
        leaves = collect_tensors(out)
        if out is not None and leaves and all(is_float(t) for t in leaves):
            remember(key, out)
            return out, None
        if self.quiet and flat:
            raise CaptureError(
                f"{func} inside an operation that is kept whole, at {find_user_source()}: {find_user_source().text}"
            )
        cargs, ckwargs = map_tensors((args, kwargs), self.concrete)
        concrete = func(*cargs, **ckwargs)
        if not collect_tensors(concrete):
            return concrete, concrete
        fakes = iter(leaves) if out is not None else None

        def visible(t: torch.Tensor) -> torch.Tensor:
            fake = next(fakes) if fakes else None
            if not is_float(t):
                return t
            return fake if fake is not None else self.to_fake(t)

        return map_tensors(concrete, visible), concrete

    def _all_fake(self, t: torch.Tensor) -> torch.Tensor:
        """Fake tensors remember what they gave for such arguments as these, but only where no argument is real."""
        plain = type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided and t.device.type == "cpu"
        return self.to_fake(t) if plain else t

    def _record_in_place(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        node_args: Any,
        node_kwargs: Any,
        written: list[int],
        known: bool,
    ) -> Any:
        names = [func._schema.arguments[i].name for i in written]
        targets = [args[i] if i < len(args) else kwargs[n] for i, n in zip(written, names, strict=True)]
        targets = [t for t in targets if isinstance(t, torch.Tensor)]
        if torch.Tag.inplace_view in func.tags:  # `t.transpose_(0, 1)`: the node of before keeps its shape
            for t in targets:
                self.node_of(t).meta["val"] = self.to_fake(torch.empty_like(t, device="meta"))
        for t in targets:
            self._keep_foreign(t)
            self._check_gradients(t)
        if any(not isinstance(t, FakeTensor) for t in targets):
            cargs, ckwargs = map_tensors((args, kwargs), self.concrete)
            func(*cargs, **ckwargs)  # the real integer tensor changes under the user's eyes
        else:
            self._compute_in_place(func, args, kwargs)
        if func is aten.copy_.default:
            target, source = args[:2]
            self.mutate(target, self._converted(source, target))
            return target
        functional, node_args, node_kwargs = find_functional_form(func, node_args, node_kwargs, names)
        node = self._emit_op(functional, node_args, node_kwargs, targets[0])
        if len(targets) == 1:
            parts = [node]
        else:
            node.meta["val"] = None
            parts = [self.emit(operator.getitem, (node, i), {}) for i in range(len(targets))]
        for t, part in zip(targets, parts, strict=True):
            self.describe(part, t, known)
            self.mutate(t, part)
        return targets[0] if len(targets) == 1 else tuple(targets)

    def _compute_in_place(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Have the op check its arguments, unless it did for others with the same layouts."""
        key = None if torch.Tag.inplace_view in func.tags else key_of(func, args, kwargs)
        if known_result(key) is None:
            remember(key, self.compute(func, args, kwargs)[0])

    def _keep_foreign(self, t: torch.Tensor) -> None:
        """Before a tensor that was there before the call, and is neither buffer nor argument, is written to."""
        self.node_of(t)
        root = self.root(t)
        kind = self.node_of(root).meta.get("kind")
        if kind in ("constant", "attribute") and id(root) not in self.literals:
            self.overwritten.setdefault(id(root), (root, root.detach().clone()))

    def _check_gradients(self, t: torch.Tensor) -> None:
        """Before a tensor is written to: gradients that it has are those of what it was, if autograd does not see
        it. What is done to parameters is an effect."""
        root = self.root(t)
        if not is_float(t) or id(root) in self.state or not has_gradients(self.node_of(root)):
            return
        of, is_detached = t, not grad_enabled()
        while of is not None:
            is_detached = is_detached or id(of) in self.detached
            of = self.aliases[id(of)].base
        if is_detached:
            self.refuse(
                "a tensor that gradients flow through is written where autograd does not see it (no_grad, detach(), "
                ".data): its gradients would be those of the old value",
                "write to a copy, or out of place",
            )

    def _converted(self, source: torch.Tensor, like: torch.Tensor) -> fx.Node:
        """What `like.copy_(source)` leaves in `like`."""
        if source.dtype != like.dtype:
            source = self.record(aten._to_copy.default, (source,), {"dtype": like.dtype})
        if source.shape != like.shape:
            source = self.record(aten.expand.default, (source, list(like.shape)), {})
        return self.node_of(source)

    def record_whole(
        self, target: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any], opaque: bool = False
    ) -> Any:
        """Record one call as one node; the ops inside it run but are not recorded."""
        with suspend_modes(), torch.DisableTorchFunction():
            node_args, node_kwargs, nodes = self._nodes_of(args, kwargs)
            known = all(node.meta.get("known") for node in nodes)
        self.quiet += 1
        try:
            out = run()
        finally:
            self.quiet -= 1
        with suspend_modes(), torch.DisableTorchFunction():
            before = len(self.nodes)
            self.record_out(target, node_args, node_kwargs, args, out, None, False, known and not opaque)
            if opaque:
                for node in self.nodes[before:]:
                    node.meta["opaque"] = True
        return out
