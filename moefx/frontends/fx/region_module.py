"""A region as a module: with the weights as its parameters, to be proven; or called with them, in the graph."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx, nn

from ...errors import Refused
from ...ir.argument_binding import Path, Specialisation, kind_of
from ...runtime.module import install_forward
from ...runtime.program import Program
from .generalize import GeneralizedRegion
from .graph_analysis import GraphAnalysis
from .node_effects import is_library_call
from .node_queries import simplify_size, size_hint, user_sources
from .region_bounds import RegionBounds
from .region_code import Autocast, Modes, RegionCode, SizeExpression, Step, ValueRef
from .region_isolation import check_isolation, check_shared_memory, find_removable, is_used_outside
from .region_names import region_name, weight_names

_MAX_NUMBERS = 1 << 16


class Region(nn.Module):
    """What is proven. Its weights are on the meta device, or the graph's own for the numeric check.

    Args:
        names: of the weights; dots make parts of parts.
    """

    def __init__(self, code: RegionCode, names: tuple[str, ...], weights: list[torch.Tensor]):
        super().__init__()
        self.code, self.names = code, names
        for name, t in zip(names, weights, strict=True):
            owner, _, own = name.rpartition(".")
            place = _make_submodule(self, owner)
            if isinstance(t, nn.Parameter):
                place.register_parameter(own, t)
            else:
                place.register_buffer(own, t)

    def forward(self, x: torch.Tensor, *args: torch.Tensor) -> tuple[Any, ...]:
        return self.code.run((x, *args), [_find_tensor(self, name) for name in self.names])


class RegionCall(nn.Module):
    """What stands in the graph in the place of a region: called with what the region takes, and the weights behind it.

    Its own forward runs what the graph ran; a `BlockForward` runs the rewritten program in its place (see `install`).
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
    """A region, and what it is in the graph.

    Attributes:
        name: of the module that it was part of, else of the line that selects.
        source: the user's line that selects.
        inputs: the entry, and what is given.
        weights: nodes of parameters and buffers, by position; names: theirs in the module.
        outputs: nodes whose values are used outside.
        units: axes of size one that the region's first input comes without.
        key: what two regions must agree in to be one for the proof.
        floats: of the caller's by name, which it takes for constants.
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
        """The module to prove; `real`: with the numbers of the weights."""
        return Region(self.code, self.names, [_module_weight(analysis, n, real) for n in self.weights])

    def example_arguments(self, analysis: GraphAnalysis) -> tuple[torch.Tensor, ...]:
        """Of one call: meta tensors for floats.

        Raises:
            Refused: of integers that are given nothing is known.
        """
        found, dims = [], self._example_dims()
        for n, shape in zip(self.inputs, self.shapes, strict=True):
            t = analysis.value[n]
            known, sizes = (
                [s.at(d) if isinstance(s, SizeExpression) else int(s) for s in shape] for d in (self.dims, dims)
            )
            if t.is_floating_point():
                found.append(torch.empty(sizes, dtype=t.dtype, device="meta"))
                continue
            example = analysis.example_integers(n)
            if example is not None and list(example.shape) == known:
                found.append(_repeat_to(example.cpu(), sizes))
            elif t.dtype == torch.bool:
                found.append(torch.zeros(sizes, dtype=t.dtype))
            else:
                raise Refused(
                    f"it is given integers that the graph computes ({n.name}), of which nothing says what they may be",
                    source=analysis.source_line(n),
                )
        return tuple(found)

    def _example_dims(self) -> dict[str, int]:
        """The graph's sizes, or the next ones that nothing else is as long as: what is of tokens is told by them."""
        numbers = {s for shape in self.shapes for s in shape if type(s) is int}
        dims: dict[str, int] = {}
        for name, n in self.dims.items():
            while n in numbers or n in dims.values() or math.prod(dims.values()) * n in numbers:
                n += 1
            dims[name] = n
        return dims

    def specialisation(
        self, analysis: GraphAnalysis, program: Program, taken: tuple[fx.Node, ...] = ()
    ) -> Specialisation:
        """What the program of the block holds for in the graph, where it takes these values; by default the inputs."""
        kinds = [kind_of(analysis.value[n]) for n in taken or self.inputs]
        if self.units:
            kinds[0] = (*kinds[0][:3], kinds[0][3] - len(self.units))
        paths: list[Path] = [("x",), *(("args", i) for i in range(len(kinds) - 1))]
        return program.key._replace(arguments=tuple(zip(paths, kinds, strict=True)))

    def build_call(self, analysis: GraphAnalysis, program: Program) -> RegionCall:
        """The module for the graph, which runs the program of the block, with the weights as arguments."""
        key = self.specialisation(analysis, program, (*self.inputs, *self.weights))
        where = dict(zip(self.names, [path for path, _ in key.arguments[len(self.inputs) :]], strict=True))
        made = RegionCall(self.code, len(self.inputs))
        history = program.history.renamed(self.name)
        install_forward(made, [Program(key, history, (), program.guards, {}, program.moves, where)], name=self.name)
        return made


def extract_region(analysis: GraphAnalysis, bounds: RegionBounds) -> ExtractedRegion:
    """Raises:
    Refused: the region cannot be taken out of the graph; the message says why.
    """
    entry = analysis.value[bounds.entry]
    units = tuple(i for i, n in enumerate(map(simplify_size, entry.shape[:-1])) if type(n) is int and n == 1)
    check_isolation(analysis, bounds)
    inside = set(bounds.inside)
    used = dict.fromkeys(a for n in bounds.inside for a in n.all_input_nodes)
    weights = tuple(n for n in used if n in analysis.weights)
    inputs = (bounds.entry, *bounds.side_inputs)
    number_of = {n: i for i, n in enumerate((*inputs, *weights))}
    first = len(number_of)
    steps: list[Step] = []
    if units:
        number_of[bounds.entry] = first
    for n in bounds.inside:
        number_of[n] = first + bool(units) + len(number_of) - len(inputs) - len(weights)
    general = GeneralizedRegion(analysis, bounds, number_of)
    dims = general.dims
    whole = tuple(SizeExpression(dims.names[dims.axes.index(i)]) if i in dims.axes else size_hint(n)
                  for i, n in enumerate(entry.shape))  # fmt: skip
    if units:
        steps.append(Step(torch.reshape, (ValueRef(0), list(whole)), {}, (), Modes()))
    outside = analysis.modes[bounds.exit]
    for n in bounds.inside:
        args, kwargs = general.arguments[n]
        steps.append(
            Step(n.target, args, kwargs, user_sources(n, analysis.position[n]), _relative_modes(analysis.modes[n], outside),
                 n.op == "call_method")
        )  # fmt: skip
    outputs = tuple(n for n in find_removable(bounds, analysis) if is_used_outside(n, inside, analysis))
    check_shared_memory(analysis, inputs, outputs, inside)
    shapes = tuple(
        tuple(s for i, s in enumerate(whole) if i not in units) if n is bounds.entry else general.shapes[n]
        for n in inputs
    )
    axes = [i for i in range(dims.rank) if i not in units]
    code = RegionCode(
        tuple((name, axes.index(axis)) for name, axis in zip(dims.names, dims.axes, strict=True)),
        tuple(steps),
        tuple(number_of[n] for n in outputs),
    )
    names = weight_names(analysis, bounds, weights)
    forms = [(names[i], _weight_key(analysis, n)) for i, n in enumerate(weights)]
    given = [(analysis.value[n].dtype, s) for n, s in zip(inputs, shapes, strict=True)]
    calls = [(_target_text(s.target), s.args, s.kwargs, s.sources, s.modes, s.method) for s in steps]
    # Functions of the user's may have one name and be two.
    functions = tuple(n.target for n in bounds.inside if not is_library_call(n))
    key = repr((code.dims, code.outputs, forms, given, calls, outside.autocast)), functions
    source = analysis.source_line(bounds.seed)
    return ExtractedRegion(
        region_name(analysis, bounds), source, bounds, code, inputs, weights, names, outputs, units, shapes,
        dims.sizes, key, entry.device.type, outside.autocast, tuple(dims.floats.items()),
    )  # fmt: skip


def _relative_modes(here: Modes, outside: Modes) -> Modes:
    """What a step has on, other than where the region ends."""
    grad = here.grad if here.grad != outside.grad else None
    if here.grad is None and outside.grad is not None:
        grad = True
    return Modes(
        grad, () if here.autocast == outside.autocast else here.autocast or _disable_autocast(outside.autocast)
    )


def _disable_autocast(autocast: tuple[Autocast, ...]) -> tuple[Autocast, ...]:
    return tuple(Autocast(a.device, a.dtype, False) for a in autocast)


def _module_weight(analysis: GraphAnalysis, n: fx.Node, real: bool) -> torch.Tensor:
    t = analysis.weights[n]
    is_parameter = t.is_floating_point() and "._buffers[" not in analysis.source_name(n) and (
        isinstance(t, nn.Parameter) or isinstance(analysis.value[n], nn.Parameter) or n.op == "placeholder"
    )  # fmt: skip
    if real or not t.is_floating_point():
        held = t.detach()
    else:
        held = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return nn.Parameter(held, requires_grad=t.requires_grad) if is_parameter else held


def _weight_key(analysis: GraphAnalysis, n: fx.Node) -> tuple[Any, ...]:
    """What a proof is of, of a weight; of integers the numbers, too."""
    t = analysis.weights[n]
    numbers: Any = None
    if not t.is_floating_point() and type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta:
        numbers = tuple(t.detach().cpu().flatten().tolist()) if t.numel() <= _MAX_NUMBERS else id(t)
    return tuple(map(int, t.shape)), tuple(map(int, t.stride())), t.dtype, numbers, isinstance(t, nn.Parameter)


def _repeat_to(t: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    for axis, n in enumerate(sizes):
        t = t.index_select(axis, torch.arange(n) % max(1, t.shape[axis]))
    return t


def _target_text(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _make_submodule(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


def _find_tensor(root: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)
