"""The dispatch mode of a capture: run and record each op of the user's program.

`Tracer` extends `Recorder` (the graph), `OpRunner` (values) and `ReadLogger` (what Python reads). It reduces ops to the
forms that the lifter reads: integer indices instead of masks, functional ops instead of in-place updates, comparisons
instead of the truth of floats.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import Refused
from ...ir.ancestors import has_ancestor
from ...util.tensor_trees import is_float, map_tensors, suspend_modes
from ..environment import device_autocast
from .capture_observer import CaptureObserver
from .capture_result import SubmoduleCall
from .concrete_routing import Routing
from .forced_values import ForcedValues
from .functionalize import find_functional_form, restore_row_axis
from .graph_recorder import grad_enabled, make_site
from .host_reads import Interventions, ReadLogger
from .layout_cache import find_layout, make_key, store_layout
from .node_origins import has_gradients, hash_computation, is_abstract
from .op_runner import find_aliases
from .op_sets import SHAPE_ONLY, TRUTHS
from .single_rank_collectives import is_single_rank_op, run_single_rank_op

aten = torch.ops.aten
# Checks return nothing: they raise or do nothing, and invented values need not pass them.
_CHECKS = {aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class Tracer(ReadLogger):
    """Runs and records every op of one capture.

    Attributes:
        observer: sees each op, and each call of a module instead of `calls`.
        calls: calls of submodules.
        modes_read: global modes that the program reads, such as "autocast".
        overwritten: tensors that the block does not own and writes to, with their values before, by id.
        state_ids: ids of parameters and buffers.
        state_sizes: the sizes of their axes.
    """

    def __init__(
        self, routing: Routing, interventions: Interventions | None = None, observer: CaptureObserver | None = None
    ):
        super().__init__(routing, interventions)
        self.observer = observer
        self.calls: list[SubmoduleCall] = []
        self.modes_read: set[str] = set()
        self.overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.state_ids: set[int] = set()
        self.state_sizes: set[int] = set()
        self._forced_values = ForcedValues(self)
        self._copied_by_collectives: list[fx.Node] = []  # copies of values with gradients, detached
        self._is_cast = False  # inside a function whose arguments autocast has cast

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
                return run_single_rank_op(func, args, self._copy_by_collective)
            if func is aten._local_scalar_dense.default:
                return self.read_item(args[0])
            if func is aten.is_same_size.default:
                return func(*args)
            if self.whole_op_depth:
                return self.compute(func, args, kwargs)[0]
            if self.autocast is not None and device_autocast.is_emulated() and not self._is_cast:
                cast = device_autocast.cast_arguments(func, args, kwargs, self.autocast, self._cast)
                args, kwargs = cast or (args, kwargs)
            return self.record(func, args, kwargs)

    # ---------------------------------------------------------------- ops
    def record(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op, append its nodes to the graph, and return the visible result."""
        if self.observer is not None:
            self.observer.log_op(func, args, len(self.nodes))
        func, args, kwargs = self._normalize(func, args, kwargs)
        if func in (aten.clone.default, aten.alias.default):
            return self._reuse_node(func, args, kwargs)
        if kwargs.get("generator") is not None:
            self.refuse(
                "the block draws random numbers from a generator of its own", "draw them from torch's default generator"
            )
        written_indices, is_view = find_aliases(func)
        node_args, node_kwargs, nodes = self._nodes_of(args, kwargs)
        if func.overloadpacket.__name__.startswith(("index_put", "_index_put")):
            node_args = (*node_args[:2], restore_row_axis(node_args[2]), *node_args[3:])
        from_integers = func in SHAPE_ONLY or all(node.meta.get("from_integers") for node in nodes)
        from_integers = from_integers and torch.Tag.nondeterministic_seeded not in func.tags
        if written_indices:
            return self._record_in_place(func, args, kwargs, node_args, node_kwargs, written_indices, from_integers)
        out, concrete = self.compute(func, args, kwargs)
        if type(out) is bool:  # `torch.equal`
            return self.log_read(out)
        forced_results = self._force_results(
            func, args, kwargs, (node_args, node_kwargs), (out, concrete), from_integers
        )
        start, (out, concrete) = len(self.nodes), forced_results or (out, concrete)
        out = self.record_out(func, node_args, node_kwargs, args, out, concrete, is_view, from_integers)
        if forced_results is not None:
            self._mark_forced(start, func, from_integers)
        return out

    def _force_results(
        self, target: Any, args: tuple, kwargs: dict[str, Any], nodes: tuple[Any, Any], results: tuple[Any, Any],
        from_integers: bool,
    ) -> tuple[Any, Any] | None:  # fmt: skip
        """Return the visible and the concrete result that an intervention forces here; None without an intervention.

        Args:
            nodes: the arguments and keyword arguments with nodes in the place of tensors.
            results: the results under the routing.
        """
        intervention = self.interventions.get(make_site(target, from_integers)) if self.interventions else None
        if intervention is None:
            return None
        computation = hash_computation(target, *nodes)
        return self._forced_values.apply(intervention, target, args, kwargs, results, computation, from_integers)

    def choose_part(self, view: tuple[Any, tuple], base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        func, args = view
        node_args, kwargs, nodes = self._nodes_of((base, *args), {})
        from_integers = bool(nodes[0].meta.get("from_integers"))
        forced = self._force_results(func, (base, *args), kwargs, (node_args, kwargs), (part, None), from_integers)
        return part if forced is None else forced[0]

    def _mark_forced(self, start: int, target: Any, from_integers: bool) -> None:
        """Record on the nodes since a position which intervention replaced their results."""
        for node in self.nodes[start:]:
            node.meta["forced"] = make_site(target, from_integers)

    def record_whole(
        self, target: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any], opaque: bool = False
    ) -> Any:
        """Record one call as one node; the ops inside it run but are not recorded."""
        with suspend_modes(), torch.DisableTorchFunction():
            node_args, node_kwargs, nodes = self._nodes_of(args, kwargs)
            from_integers = all(node.meta.get("from_integers") for node in nodes)
        self.whole_op_depth += 1
        try:
            out = run()
        finally:
            self.whole_op_depth -= 1
        with suspend_modes(), torch.DisableTorchFunction():
            forced_results = self._force_results(
                target, args, kwargs, (node_args, node_kwargs), (out, None), from_integers
            )
            start, (out, concrete) = len(self.nodes), forced_results or (out, None)
            self.record_out(target, node_args, node_kwargs, args, out, concrete, False, from_integers and not opaque)
            for node in self.nodes[start:] if opaque else ():
                node.meta["opaque"] = True
            if forced_results is not None:
                self._mark_forced(start, target, from_integers)
        return out

    def _normalize(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
        """Return an equivalent op: integer indices instead of masks, comparisons instead of the truth of floats."""
        name = func.overloadpacket.__name__
        if name in ("index_put", "index_put_") and self._is_masked_fill(*args):
            fill = aten.masked_fill_.Tensor if name.endswith("_") else aten.masked_fill.Tensor
            return fill, (args[0], args[1][0], args[2]), {}
        if name in _INDEXING:
            return func, (args[0], self._to_integer_indices(args[1]), *args[2:]), kwargs
        if name == "masked_select":
            mask = args[1].expand(args[0].shape)
            return aten.index.Tensor, (args[0], self._to_integer_indices([mask])), {}
        if name in TRUTHS:
            return func, map_tensors(args, self._compare_with_zero), kwargs
        if func is aten._to_copy.default and kwargs.get("dtype") is torch.bool and self._is_abstract(args[0]):
            return func, (self._compare_with_zero(args[0]),), {k: v for k, v in kwargs.items() if k != "dtype"}
        return func, args, kwargs

    def _is_masked_fill(self, t: torch.Tensor, indices: Any, value: torch.Tensor, accumulate: bool = False) -> bool:
        """Return whether an indexed write, such as `h[h < 0] = 0`, fills a mask of compared floats with one number.

        It selects no rows.
        """
        mask = indices[0] if len(indices) == 1 else None
        if mask is None or mask.dtype is not torch.bool or mask.shape != t.shape or value.dim() or accumulate:
            return False
        return any(is_abstract(n) for n in self.node_of(mask).all_input_nodes)

    def _to_integer_indices(self, indices: Any) -> list[torch.Tensor | None]:
        out: list[torch.Tensor | None] = []
        for i in indices:
            if i is not None and i.dtype in (torch.bool, torch.uint8):
                hits = self.record(aten.nonzero.default, (i,), {})
                out += [self.record(aten.select.int, (hits, 1, d), {}) for d in range(i.dim())]
            else:
                out.append(i)
        return out

    def _is_abstract(self, t: torch.Tensor) -> bool:
        return is_float(t) and not self.node_of(t).meta.get("from_integers")

    def _compare_with_zero(self, t: torch.Tensor) -> torch.Tensor:
        """Record the truth of abstract floats as a comparison, whose outcome can be forced."""
        return self.record(aten.ne.Scalar, (t, 0), {}) if self._is_abstract(t) else t

    def _reuse_node(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return a copy or a full view with the node of the original.

        Whether `contiguous` and `reshape` copy, and whether a slice takes everything, depends on sizes.
        """
        out, _ = self.compute(func, args, kwargs)
        is_view = func is aten.alias.default
        self.track(out, self.node_of(args[0]), args[0] if is_view else None, (func, ()) if is_view else None)
        return out

    def _nodes_of(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, list[fx.Node]]:
        """Return arguments with nodes in the place of tensors, and the list of these nodes."""
        nodes: list[fx.Node] = []

        def node_of(t: torch.Tensor) -> fx.Node:
            nodes.append(node := self.node_of(t))
            return node

        return map_tensors(args, node_of), map_tensors(kwargs, node_of) if kwargs else kwargs, nodes

    def _lift_literal(self, t: torch.Tensor) -> torch.Tensor:
        self.literal_numbers[id(t)] = self.op_numbers
        if is_float(t) and not isinstance(t, FakeTensor):
            with suspend_modes(), torch.DisableTorchFunction():
                node = self._constant(t)
                fake = node.meta["val"]
                self.track(fake, node)
                self.literal_numbers[id(fake)] = self.op_numbers
                return fake
        self.keep.append(t)
        return t

    # ---------------------------------------------------------------- in-place ops
    def _record_in_place(
        self, func: Any, args: tuple, kwargs: dict[str, Any], node_args: Any, node_kwargs: Any,
        written_indices: list[int], from_integers: bool,
    ) -> Any:  # fmt: skip
        names = [func._schema.arguments[i].name for i in written_indices]
        targets = [args[i] if i < len(args) else kwargs[n] for i, n in zip(written_indices, names, strict=True)]
        targets = [t for t in targets if isinstance(t, torch.Tensor)]
        if torch.Tag.inplace_view in func.tags:  # `t.transpose_(0, 1)`: the earlier node keeps its shape
            for t in targets:
                self.node_of(t).meta["val"] = self.to_fake(torch.empty_like(t, device="meta"))
        for t in targets:
            self._save_foreign(t)
            self._check_gradients(t)
        if any(not isinstance(t, FakeTensor) for t in targets):
            concrete_args, concrete_kwargs = map_tensors((args, kwargs), self.concrete)
            func(*concrete_args, **concrete_kwargs)  # the real integer tensor changes for the user, too
        else:
            self._compute_in_place(func, args, kwargs)
        if func is aten.copy_.default:
            target, source = args[:2]
            self.mutate(target, self._convert_to(source, target))
            return target
        functional, node_args, node_kwargs = find_functional_form(func, node_args, node_kwargs, names)
        forced_results = None
        if len(targets) == 1 and not isinstance(targets[0], FakeTensor):
            value, nodes = targets[0].clone(), (node_args, node_kwargs)
            forced_results = self._force_results(functional, args, kwargs, nodes, (value, value), from_integers)
            if forced_results is not None:
                targets[0].copy_(forced_results[0])
        node = self._emit_op(functional, node_args, node_kwargs, targets[0])
        if forced_results is not None:
            node.meta["forced"] = make_site(functional, from_integers)
        if len(targets) == 1:
            parts = [node]
        else:
            node.meta["val"] = None
            parts = [self.emit(operator.getitem, (node, i), {}) for i in range(len(targets))]
        for t, part in zip(targets, parts, strict=True):
            self.describe(part, t, from_integers)
            self.mutate(t, part)
        return targets[0] if len(targets) == 1 else tuple(targets)

    def _compute_in_place(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Let the op check its arguments, unless it has checked others with the same layouts."""
        key = None if torch.Tag.inplace_view in func.tags else make_key(func, args, kwargs)
        if find_layout(key) is None:
            store_layout(key, self.compute(func, args, kwargs)[0])

    def _save_foreign(self, t: torch.Tensor) -> None:
        """Save a tensor that is about to be written to, if it existed before the call and is no buffer or argument."""
        self.node_of(t)
        root = self.find_base(t)
        kind = self.node_of(root).meta.get("kind")
        if kind in ("constant", "attribute") and id(root) not in self.literal_numbers:
            self.overwritten.setdefault(id(root), (root, root.detach().clone()))

    def _check_gradients(self, t: torch.Tensor) -> None:
        """Refuse a write that autograd does not see, to a tensor with gradients: they would be those of the old value.

        Writes to parameters are effects.
        """
        root = self.find_base(t)
        if not is_float(t) or id(root) in self.state_ids:
            return
        view, is_detached = t, not grad_enabled()
        while view is not None:
            is_detached = is_detached or id(view) in self.detached
            view = self.aliases[id(view)].base
        if is_detached and has_gradients(self.node_of(root)):
            self.refuse(
                "a tensor that gradients flow through is written where autograd does not see it (no_grad, detach(), "
                ".data): its gradients would be those of the old value",
                "write to a copy, or out of place",
            )

    def _convert_to(self, source: torch.Tensor, target: torch.Tensor) -> fx.Node:
        """Record the value that `target.copy_(source)` leaves in `target`."""
        if source.dtype != target.dtype:
            source = self.record(aten._to_copy.default, (source,), {"dtype": target.dtype})
        if source.shape != target.shape:
            source = self.record(aten.expand.default, (source, list(target.shape)), {})
        return self.node_of(source)

    def check_conversion(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Refuse to replace a parameter or buffer by one of another dtype or shape. Returns whether they differ."""
        with suspend_modes(), torch.DisableTorchFunction():
            if (old.dtype, old.shape) == (new.dtype, new.shape):
                return False
            before, after = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (old, new))
        self.refuse(
            f"the forward converts a parameter or buffer in place, from {before} to {after}, so the next call differs",
            "convert it before you compile (module.to(dtype)); or call the model once, if it then stays as it is",
        )
        return True

    # ---------------------------------------------------------------- collectives over one rank
    def _copy_by_collective(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write one tensor into another as a collective does, unseen by autograd."""
        if self.whole_op_depth:
            self.compute(aten.copy_.default, (target, source), {})
        else:
            detached = self.record(aten.detach.default, (source,), {})
            if grad_enabled() and has_gradients(self.node_of(source)):
                self._copied_by_collectives.append(self.node_of(detached))
            self.record(aten.copy_.default, (target, detached), {})

    def refuse_lost_gradients(self, outputs: list[fx.Node]) -> None:
        """Refuse results without gradients that collectives have copied from values with gradients."""
        for n in outputs if self._copied_by_collectives else ():
            val = n.meta.get("val")
            if not isinstance(val, torch.Tensor) or not is_float(val) or has_gradients(n):
                continue
            if copies := [c for c in self._copied_by_collectives if has_ancestor(n, c)]:
                self.refusals.append(
                    Refused(
                        "no gradient flows through a collective of torch.distributed that writes to a tensor, and the "
                        "result of the block comes from one",
                        source=str(copies[0].meta["source"]),
                        remedy="call it in a torch.autograd.Function, whose backward is the opposite collective",
                    )
                )

    # ---------------------------------------------------------------- autocast
    def update_autocast(self) -> None:
        """Update the dtype of autocast at a call of the program."""
        self.autocast = device_autocast.get_autocast_dtype()
        if device_autocast.is_changed_by_block():
            self.modes_read.add("autocast")

    def _cast(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.record(aten._to_copy.default, (t,), dict(dtype=dtype))

    @contextlib.contextmanager
    def suspend_casts(self) -> Iterator[None]:
        """Leave out autocast inside a function whose arguments it has cast."""
        before, self._is_cast = self._is_cast, True
        try:
            yield
        finally:
            self._is_cast = before
