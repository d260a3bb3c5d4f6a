"""Turn a region into a module: with its weights as parameters, for the proof, or as a call in the graph."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import torch
from torch import fx, nn

from ...errors import Refused
from ...ir.argument_binding import Path, Specialization, describe_leaf
from ...runtime.block_forward import install_forward
from ...runtime.program import Program
from ...util.tensor_bytes import view_bytes
from .generalize import GeneralizedRegion
from .graph_analysis import GraphAnalysis
from .node_effects import is_library_call
from .node_queries import find_user_sources, get_size_hint, simplify_size
from .region_bounds import RegionBounds
from .region_code import Autocast, Modes, RegionCode, SizeExpression, Step, ValueRef
from .region_isolation import check_isolation, check_shared_memory, find_removable, is_used_outside
from .region_names import name_region, name_weights


class Region(nn.Module):
    """The module to prove. Its weights are on the meta device, or the graph's own for the numeric check.

    Args:
        names: the names of the weights; dots make submodules.
    """

    def __init__(self, code: RegionCode, names: tuple[str, ...], weights: list[torch.Tensor]):
        super().__init__()
        self.code, self.names = code, names
        for name, t in zip(names, weights, strict=True):
            owner, _, leaf = name.rpartition(".")
            module = _make_submodule(self, owner)
            if isinstance(t, nn.Parameter):
                module.register_parameter(leaf, t)
            else:
                module.register_buffer(leaf, t)

    def forward(self, x: torch.Tensor, *args: torch.Tensor) -> tuple[Any, ...]:
        return self.code.run((x, *args), [_find_tensor(self, name) for name in self.names])


class RegionCall(nn.Module):
    """The module that replaces a region in its graph. It is called with the region's inputs, then its weights.

    Its own forward runs the graph's code; a `BlockForward` runs the rewritten program instead (see `install`).
    """

    is_region = True  # `verify` finds no such module in the reference

    def __init__(self, code: RegionCode, num_inputs: int):
        super().__init__()
        self.code, self.num_inputs = code, num_inputs

    def forward(self, x: torch.Tensor, *args: torch.Tensor) -> tuple[Any, ...]:
        values = (x, *args)
        return self.code.run(values[: self.num_inputs], values[self.num_inputs :])


@dataclasses.dataclass(frozen=True)
class ExtractedRegion:
    """A region with its position in the graph.

    Attributes:
        name: the user's module, or the line that selects.
        source: the user's line that selects.
        inputs: the entry, then the side inputs.
        weights: nodes of parameters and buffers.
        names: the names of the weights in the module.
        outputs: nodes whose values are used outside.
        units: axes of size one that the region's first input lacks.
        shapes: the shape of each input, with `SizeExpression`s.
        dims: the graph's own sizes of the token dims.
        key: equal keys mean that one proof serves both regions.
        floats: floats of the caller that the region takes as constants, by name.
    """

    name: str
    source: str
    bounds: RegionBounds
    code: RegionCode
    inputs: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    names: tuple[str, ...]
    outputs: tuple[fx.Node, ...]
    units: tuple[int, ...]
    shapes: tuple[tuple[Any, ...], ...]
    dims: dict[str, int]
    key: tuple[str, tuple[Any, ...]]
    device: str
    autocast: tuple[Autocast, ...]
    floats: tuple[tuple[str, torch.SymFloat], ...] = ()

    def build_module(self, analysis: GraphAnalysis, real: bool = False) -> Region:
        """Build the module to prove. `real`: with the values of the weights."""
        return Region(self.code, self.names, [_find_module_weight(analysis, n, real) for n in self.weights])

    def make_example_arguments(self, analysis: GraphAnalysis) -> tuple[torch.Tensor, ...]:
        """Make the arguments of one call, with meta tensors for floats.

        Raises:
            Refused: the region reads integers with unknown values.
        """
        arguments, dims = [], self._find_example_dims()
        for n, shape in zip(self.inputs, self.shapes, strict=True):
            t = analysis.value[n]
            known_shape, sizes = (
                [s.at(d) if isinstance(s, SizeExpression) else int(s) for s in shape] for d in (self.dims, dims)
            )
            if t.is_floating_point():
                arguments.append(torch.empty(sizes, dtype=t.dtype, device="meta"))
                continue
            example = analysis.find_example_integers(n)
            if example is not None and list(example.shape) == known_shape:
                arguments.append(_repeat_to(example.cpu(), sizes))
            elif t.dtype == torch.bool:
                arguments.append(torch.zeros(sizes, dtype=t.dtype))
            else:
                raise Refused(
                    f"it receives integers that the graph computes ({n.name}), and their possible values are unknown",
                    source=analysis.find_source_line(n),
                )
        return tuple(arguments)

    def _find_example_dims(self) -> dict[str, int]:
        """Return the graph's sizes, each increased until no other size equals it, so that sizes identify the token
        dims."""
        numbers = {s for shape in self.shapes for s in shape if type(s) is int}
        dims: dict[str, int] = {}
        for name, n in self.dims.items():
            while n in numbers or n in dims.values() or math.prod(dims.values()) * n in numbers:
                n += 1
            dims[name] = n
        return dims

    def specialization(
        self, analysis: GraphAnalysis, program: Program, passed_nodes: tuple[fx.Node, ...] = ()
    ) -> Specialization:
        """Return the specialization of the program in this graph.

        Args:
            passed_nodes: the nodes that are passed as arguments; by default the inputs.
        """
        kinds = [describe_leaf(analysis.value[n]) for n in passed_nodes or self.inputs]
        if self.units:
            kinds[0] = (*kinds[0][:3], kinds[0][3] - len(self.units))
        paths: list[Path] = [("x",), *(("args", i) for i in range(len(kinds) - 1))]
        return program.key._replace(arguments=tuple(zip(paths, kinds, strict=True)))

    def build_call(self, analysis: GraphAnalysis, program: Program) -> RegionCall:
        """Build the module for the graph, which runs the program with the weights as arguments."""
        key = self.specialization(analysis, program, (*self.inputs, *self.weights))
        paths = dict(zip(self.names, [path for path, _ in key.arguments[len(self.inputs) :]], strict=True))
        region_call = RegionCall(self.code, len(self.inputs))
        history = program.history.renamed(self.name)
        installed = Program(
            key, history, (), program.guards, {}, program.is_device_independent, paths, program.is_repeatable
        )
        install_forward(region_call, [installed], name=self.name)
        return region_call


def extract_region(analysis: GraphAnalysis, bounds: RegionBounds) -> ExtractedRegion:
    """Extract a region from its graph.

    Raises:
        Refused: the region cannot be taken out of the graph; the message gives the reason.
    """
    entry = analysis.value[bounds.entry]
    units = tuple(i for i, n in enumerate(map(simplify_size, entry.shape[:-1])) if type(n) is int and n == 1)
    check_isolation(analysis, bounds)
    inside = set(bounds.inside)
    nodes_read = dict.fromkeys(a for n in bounds.inside for a in n.all_input_nodes)
    weights = tuple(n for n in nodes_read if n in analysis.weights)
    inputs = (bounds.entry, *bounds.side_inputs)
    number_of = {n: i for i, n in enumerate((*inputs, *weights))}
    first = len(number_of)
    if units:
        number_of[bounds.entry] = first
    for n in bounds.inside:
        number_of[n] = first + bool(units) + len(number_of) - len(inputs) - len(weights)
    generalized = GeneralizedRegion(analysis, bounds, number_of)
    dims = generalized.dims
    full_shape = tuple(SizeExpression(dims.names[dims.axes.index(i)]) if i in dims.axes else get_size_hint(n)
                  for i, n in enumerate(entry.shape))  # fmt: skip
    steps = _build_steps(generalized)
    if units:
        steps.insert(0, Step(torch.reshape, (ValueRef(0), list(full_shape)), {}, (), Modes()))
    outer_modes = analysis.modes[bounds.exit]
    outputs = tuple(n for n in find_removable(bounds, analysis) if is_used_outside(n, inside, analysis))
    check_shared_memory(analysis, inputs, outputs, inside)
    shapes = tuple(
        tuple(s for i, s in enumerate(full_shape) if i not in units) if n is bounds.entry else generalized.shapes[n]
        for n in inputs
    )
    axes = [i for i in range(dims.rank) if i not in units]
    code = RegionCode(
        tuple((name, axes.index(axis)) for name, axis in zip(dims.names, dims.axes, strict=True)),
        tuple(steps),
        tuple(number_of[n] for n in outputs),
    )
    names = name_weights(analysis, bounds, weights)
    forms = [(names[i], _make_weight_key(analysis, n)) for i, n in enumerate(weights)]
    dtypes = [(analysis.value[n].dtype, s) for n, s in zip(inputs, shapes, strict=True)]
    calls = [(_format_target(s.target), s.args, s.kwargs, s.sources, s.modes, s.method) for s in steps]
    # Two functions of the user may share a name.
    functions = tuple(n.target for n in bounds.inside if not is_library_call(n))
    key = repr((code.dims, code.outputs, forms, dtypes, calls, outer_modes.autocast)), functions
    source = analysis.find_source_line(bounds.selection)
    return ExtractedRegion(
        name_region(analysis, bounds), source, bounds, code, inputs, weights, names, outputs, units, shapes,
        dims.sizes, key, entry.device.type, outer_modes.autocast, tuple(dims.floats.items()),
    )  # fmt: skip


def _build_steps(region: GeneralizedRegion) -> list[Step]:
    """Build the step of each node inside a region."""
    analysis, bounds = region.analysis, region.bounds
    steps = []
    for n in bounds.inside:
        args, kwargs = region.arguments[n]
        sources = find_user_sources(n, analysis.position[n])
        step_modes = _find_relative_modes(analysis.modes[n], analysis.modes[bounds.exit])
        steps.append(Step(n.target, args, kwargs, sources, step_modes, n.op == "call_method"))
    return steps


def _find_relative_modes(modes: Modes, outer_modes: Modes) -> Modes:
    """Return the modes of a step that differ from those at the region's exit."""
    grad = modes.grad if modes.grad != outer_modes.grad else None
    if modes.grad is None and outer_modes.grad is not None:
        grad = True
    return Modes(
        grad,
        () if modes.autocast == outer_modes.autocast else modes.autocast or _disable_autocast(outer_modes.autocast),
    )


def _disable_autocast(autocast: tuple[Autocast, ...]) -> tuple[Autocast, ...]:
    return tuple(Autocast(a.device, a.dtype, False) for a in autocast)


def _find_module_weight(analysis: GraphAnalysis, n: fx.Node, real: bool) -> torch.Tensor:
    """Return the tensor or parameter for a weight of the module. `real`: with its values."""
    t = analysis.weights[n]
    is_parameter = t.is_floating_point() and "._buffers[" not in analysis.find_source_name(n) and (
        isinstance(t, nn.Parameter) or isinstance(analysis.value[n], nn.Parameter) or n.op == "placeholder"
    )  # fmt: skip
    if real or not t.is_floating_point():
        tensor = t.detach()
    else:
        tensor = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=t.requires_grad) if is_parameter else tensor


def _make_weight_key(analysis: GraphAnalysis, n: fx.Node) -> tuple[Any, ...]:
    """Return the properties of a weight that a proof depends on: shape, strides, dtype, and the values of integers."""
    t = analysis.weights[n]
    numbers: Any = None
    if not t.is_floating_point() and type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta:
        numbers = hashlib.sha256(view_bytes(t)).digest()
    return tuple(map(int, t.shape)), tuple(map(int, t.stride())), t.dtype, numbers, isinstance(t, nn.Parameter)


def _repeat_to(t: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    for axis, n in enumerate(sizes):
        t = t.index_select(axis, torch.arange(n) % max(1, t.shape[axis]))
    return t


def _format_target(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _make_submodule(root: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a path, and create it if it does not exist."""
    for part in path.split(".") if path else ():
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


def _find_tensor(root: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)
