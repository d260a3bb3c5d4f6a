"""Run one op of a capture: floats as fake tensors, integers and booleans as real ones.

The caller gets a result as the user's program sees it. If an integer follows from floats, the op also runs on the
concrete values that the routing invents for them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    in_kernel_invocation_manager,
)

from ...errors import CaptureError, Refused
from ...util.tensor_trees import collect_tensors, is_float, map_tensors
from ..environment.code_locations import find_user_source
from .concrete_routing import Routing
from .concrete_values import compute_concrete_value
from .functionalize import GROUPED_MM, make_grouped_result, require_one_dtype
from .graph_recorder import Recorder
from .layout_cache import find_layout, is_pure, make_key, make_meta_tensor, store_layout


@functools.cache
def find_aliases(func: Any) -> tuple[list[int], bool]:
    """Return the positions of the arguments that an op writes to, and whether its results may share memory with any."""
    infos = [a.alias_info for a in func._schema.arguments]
    written_indices = [i for i, info in enumerate(infos) if info is not None and info.is_write]
    return written_indices, any(info is not None for info in infos)


class OpRunner(Recorder):
    """Runs ops under a routing.

    Attributes:
        refusals: why the block must not be rewritten, although the capture goes on. Other modules may do the same.
        originals: names of the block's parameters, by the ids of the real ones.
        whole_op_depth: above 0 inside an operation that is recorded as one node.
    """

    def __init__(self, routing: Routing):
        super().__init__()
        self.routing = routing
        self.refusals: list[Refused] = []
        self.originals: dict[int, str] = {}
        self.whole_op_depth = 0

    def refuse(self, reason: str, remedy: str) -> None:
        """Log that the current line of the program does something that a block must not do."""
        self.refusals.append(Refused(reason, source=str(find_user_source()), remedy=remedy))

    def concrete(self, t: torch.Tensor) -> torch.Tensor:
        return self.concrete_value(self.node_of(t)) if isinstance(t, FakeTensor) else t

    def concrete_value(self, node: fx.Node) -> torch.Tensor:
        """Return the value of a node under the routing."""
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

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Run an op without recording it.

        Returns:
            The result that the user sees, and the concrete result if one was needed.
        """
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        flat = collect_tensors((args, kwargs))
        if flat and not any(isinstance(t, FakeTensor) for t in flat):
            concrete = func(*args, **kwargs)
            return map_tensors(concrete, lambda t: self.to_fake(t) if is_float(t) else t), concrete
        key = make_key(func, args, kwargs) if is_pure(func) else None
        if (layout := find_layout(key)) is not None:
            return self._fake(make_meta_tensor(layout)), None
        if find_aliases(func) == ([], True) and not kwargs and len(flat) == 1 and args[0] is flat[0]:
            with in_kernel_invocation_manager(self.fake_mode):
                view = func(*args)
            return map_tensors(view, self._fake), None
        if self.autocast is None:  # autocast would unify some dtypes
            require_one_dtype(func, args)
        out = self._run_fake(func, args, kwargs)
        leaves = collect_tensors(out)
        if out is not None and leaves and all(is_float(t) for t in leaves):
            store_layout(key, out)
            return out, None
        if self.whole_op_depth and flat:
            source = find_user_source()
            raise CaptureError(f"{func} inside an operation that is kept whole, at {source}: {source.text}")
        return self._run_concrete(func, args, kwargs, leaves if out is not None else None)

    def _run_fake(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the fake result of an op, or None if its shape or value depends on the data."""
        args, kwargs = map_tensors((args, kwargs), self._to_fake_if_plain)
        try:
            with self.fake_mode:
                return make_grouped_result(*args) if func.overloadpacket is GROUPED_MM else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None

    def _run_concrete(self, func: Any, args: tuple, kwargs: dict[str, Any], fakes: list[Any] | None) -> tuple[Any, Any]:
        """Run an op on concrete values. Args: fakes: the tensors of its fake result, if there is one."""
        args, kwargs = map_tensors((args, kwargs), self.concrete)
        concrete = func(*args, **kwargs)
        if not collect_tensors(concrete):
            return concrete, concrete
        remaining = iter(fakes) if fakes is not None else None

        def make_visible(t: torch.Tensor) -> torch.Tensor:
            fake = next(remaining) if remaining else None
            if not is_float(t):
                return t
            return fake if fake is not None else self.to_fake(t)

        return map_tensors(concrete, make_visible), concrete

    def _to_fake_if_plain(self, t: torch.Tensor) -> torch.Tensor:
        """Make real arguments fake: torch caches fake results only if no argument is real."""
        is_plain = type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided and t.device.type == "cpu"
        return self.to_fake(t) if is_plain else t
