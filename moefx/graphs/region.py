"""A region as a module: with the weights as its parameters, to be proven; or called with them, in the graph."""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from typing import Any

import torch
from torch import fx, nn

from ..errors import Refused
from ..ir.binding import Path, kind_of
from ..runtime.module import install
from ..runtime.program import Program
from .code import Autocast, Code, Modes, Size, Step, Value
from .extents import Extent
from .facts import Facts, hint, is_held, is_random, sources_of, target_name
from .sizes import Generalised

_MOST_NUMBERS = 1 << 16


class Region(nn.Module):
    """What is proven. Its weights are on the meta device, or the graph's own for the numeric check.

    Args:
        names: of the weights; dots make parts of parts.
    """

    def __init__(self, code: Code, names: tuple[str, ...], weights: list[torch.Tensor]):
        super().__init__()
        self.code, self.names = code, names
        for name, t in zip(names, weights, strict=True):
            owner, _, own = name.rpartition(".")
            place = _made(self, owner)
            if isinstance(t, nn.Parameter):
                place.register_parameter(own, t)
            else:
                place.register_buffer(own, t)

    def forward(self, x: torch.Tensor, *args: torch.Tensor) -> tuple[Any, ...]:
        return self.code.run((x, *args), [_found(self, name) for name in self.names])


class RegionCall(nn.Module):
    """What stands in the graph in the place of a region: called with what the region takes, and the weights behind it.

    Its own forward runs what the graph ran; a `BlockForward` runs the rewritten program in its place (see `install`).
    """

    is_region = True  # `verify` finds no such module in the reference

    def __init__(self, code: Code, num_inputs: int):
        super().__init__()
        self.code, self.num_inputs = code, num_inputs

    def forward(self, x: torch.Tensor, *args: torch.Tensor) -> tuple[Any, ...]:
        values = (x, *args)
        return self.code.run(values[: self.num_inputs], values[self.num_inputs :])


@dataclasses.dataclass(frozen=True)
class Extracted:
    """A region, and what it is in the graph.

    Attributes:
        name: of the module that it was part of, else of the line that selects.
        source: the user's line that selects.
        inputs: the entry, and what is given.
        weights: nodes of parameters and buffers, by position; names: theirs in the module.
        outputs: nodes whose values are used outside.
        units: axes of size one that the region's first input comes without.
        key: what two regions must agree in to be one for the proof.
    """

    name: str
    source: str
    extent: Extent
    code: Code
    inputs: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    names: tuple[str, ...]
    outputs: tuple[fx.Node, ...]
    units: tuple[int, ...]
    shapes: tuple[tuple[Any, ...], ...]
    dims: dict[str, int]
    key: str
    device: str
    autocast: tuple[Autocast, ...]

    def block(self, facts: Facts, real: bool = False) -> Region:
        """The module to prove; `real`: with the numbers of the weights."""
        return Region(self.code, self.names, [_weight(facts, n, real) for n in self.weights])

    def arguments(self, facts: Facts) -> tuple[torch.Tensor, ...]:
        """Of one call, of the graph's sizes: meta tensors for floats."""
        found = []
        for n, shape in zip(self.inputs, self.shapes, strict=True):
            t = facts.value[n]
            sizes = [s.at(self.dims) if isinstance(s, Size) else int(s) for s in shape]
            if t.is_floating_point():
                found.append(torch.empty(sizes, dtype=t.dtype, device="meta"))
                continue
            example = facts.examples.get(n)
            if type(example) is torch.Tensor and not example.is_meta and list(example.shape) == sizes:
                found.append(example.detach().cpu())
            else:
                found.append(torch.zeros(sizes, dtype=t.dtype))
        return tuple(found)

    def call(self, facts: Facts, program: Program) -> RegionCall:
        """The module for the graph, which runs the program of the block, with the weights as arguments."""
        values = [facts.value[n] for n in (*self.inputs, *self.weights)]
        kinds = [kind_of(t) for t in values]
        if self.units:
            kinds[0] = (*kinds[0][:3], kinds[0][3] - len(self.units))
        paths: list[Path] = [("x",), *(("args", i) for i in range(len(values) - 1))]
        key = program.key._replace(arguments=tuple(zip(paths, kinds, strict=True)))
        where = dict(zip(self.names, paths[len(self.inputs) :], strict=True))
        made = RegionCall(self.code, len(self.inputs))
        history = program.history.renamed(self.name)
        install(made, [Program(key, history, (), program.guards, {}, program.moves, where)], name=self.name)
        return made


def extract(facts: Facts, extent: Extent) -> Extracted:
    """Raises:
    Refused: the region cannot be taken out of the graph; the message says why.
    """
    entry = facts.value[extent.entry]
    units = tuple(i for i, n in enumerate(entry.shape[:-1]) if type(n) is int and n == 1)
    _check(facts, extent)
    inside = set(extent.inside)
    used = dict.fromkeys(a for n in extent.inside for a in n.all_input_nodes)
    weights = tuple(n for n in used if n in facts.weights)
    inputs = (extent.entry, *extent.given)
    number_of = {n: i for i, n in enumerate((*inputs, *weights))}
    first = len(number_of)
    steps: list[Step] = []
    if units:
        number_of[extent.entry] = first
    for n in extent.inside:
        number_of[n] = first + bool(units) + len(number_of) - len(inputs) - len(weights)
    general = Generalised(facts, extent, number_of)
    dims = general.dims
    whole = tuple(Size(dims.names[dims.axes.index(i)]) if i in dims.axes else hint(n)
                  for i, n in enumerate(entry.shape))  # fmt: skip
    if units:
        steps.append(Step(torch.reshape, (Value(0), list(whole)), {}, (), Modes()))
    outside = facts.modes[extent.exit]
    for n in extent.inside:
        args, kwargs = general.arguments[n]
        steps.append(
            Step(n.target, args, kwargs, sources_of(n, facts.at[n]), _inner(facts.modes[n], outside),
                 n.op == "call_method")
        )  # fmt: skip
    outputs = tuple(n for n in extent.inside if _is_used(n, inside, facts))
    _check_shared(facts, inputs, outputs, inside)
    shapes = tuple(
        tuple(s for i, s in enumerate(whole) if i not in units) if n is extent.entry else general.shapes[n]
        for n in inputs
    )
    axes = [i for i in range(dims.rank) if i not in units]
    code = Code(
        tuple((name, axes.index(axis)) for name, axis in zip(dims.names, dims.axes, strict=True)),
        tuple(steps),
        tuple(number_of[n] for n in outputs),
    )
    names = _names(facts, weights)
    forms = [(names[i], _form(facts, n)) for i, n in enumerate(weights)]
    given = [(facts.value[n].dtype, s) for n, s in zip(inputs, shapes, strict=True)]
    calls = [(_target(s.target), s.args, s.kwargs, s.sources, s.modes, s.method) for s in steps]
    key = repr((code.dims, code.outputs, forms, given, calls, outside.autocast))
    source = str(sources_of(extent.seed, facts.at[extent.seed])[0])
    return Extracted(
        _name(facts, extent) or re.sub(r"\W", "_", source), source, extent, code, inputs, weights, names, outputs,
        units, shapes, dims.sizes, key, entry.device.type, outside.autocast,
    )  # fmt: skip


def _check(facts: Facts, extent: Extent) -> None:
    inside = set(extent.inside)
    last = max(facts.at[n] for n in extent.inside)
    first = min(facts.at[n] for n in extent.inside if n in facts.live)
    for n in extent.inside:
        where = str(sources_of(n, facts.at[n])[0])
        if n.op not in ("call_function", "call_method"):
            raise Refused(f"the region calls a module of the graph, {n.target}", source=where)
        if n in facts.written:
            for s in facts.storages(facts.written[n]):
                before = {s for m in (extent.entry, *extent.given, *facts.weights) for s in facts.storages(m)}
                if s in before:
                    raise Refused("the region writes to a tensor that was there before it", source=where)
    for n in extent.given:
        if facts.tensor(n) is None:
            raise Refused(f"the region takes {n.name}, which is no tensor", culprits=(n.name,))
    if any(is_random(n) for n in extent.inside):
        others = [n for n in facts.nodes[first:last] if n not in inside and is_random(n)]
        if others:
            raise Refused(
                "random numbers are drawn inside of the region and beside it: their order would change",
                source=str(sources_of(others[0], facts.at[others[0]])[0]),
            )


def _is_used(n: fx.Node, inside: set[fx.Node], facts: Facts) -> bool:
    """Whether the value of a node is read outside of the region; what the region does not change can be computed there
    as well."""
    if not is_removed(n, inside, facts):
        return False
    users = [u for u in n.users if u not in inside and u in facts.at]
    if not users:
        return False
    if facts.tensor(n) is None:
        if any(u.target is not n.target and u.op == "output" for u in users):
            raise Refused(f"{n.name}, several tensors at once, is used outside of the region", culprits=(n.name,))
        return True
    first = min(facts.at[u] for u in users)
    for s in facts.storages(n):
        later = [w for w in facts.writers[s] if w in inside and facts.at[w] > first]
        if later:
            raise Refused(
                f"{n.name} is used outside of the region before the region is done with it", culprits=(n.name,),
                source=str(sources_of(n, facts.at[n])[0]),
            )  # fmt: skip
    return True


def _check_shared(
    facts: Facts, inputs: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...], inside: set[fx.Node]
) -> None:
    """What comes out may be memory of its own: it must not matter whether two values are one."""
    start = min(facts.at[n] for n in inside if n in facts.live)
    values = [set(facts.storages(n)) for n in (*inputs, *outputs)]
    for storage in set().union(*values[len(inputs) :]):
        later = [w for w in facts.writers[storage] if w not in inside and facts.at[w] > start]
        if later and sum(storage in mine for mine in values) > 1:
            raise Refused(
                "a tensor that the region shares memory with is written to, in place, outside of it",
                source=str(sources_of(later[0], facts.at[later[0]])[0]),
            )


def is_removed(n: fx.Node, inside: set[fx.Node], facts: Facts) -> bool:
    """Whether a node is computed by the region alone. What follows from weights or from nothing, is not random and is
    not written to, may be computed twice."""
    return n in facts.live or is_random(n) or bool(set(facts.storages(n)) & _written_in(inside, facts))


def _written_in(inside: set[fx.Node], facts: Facts) -> set[int]:
    return {s for n in inside if n in facts.written for s in facts.storages(facts.written[n])}


def _inner(here: Modes, outside: Modes) -> Modes:
    """What a step has on, other than where the region ends."""
    grad = here.grad if here.grad != outside.grad else None
    if here.grad is None and outside.grad is not None:
        grad = True
    return Modes(grad, () if here.autocast == outside.autocast else here.autocast or _without(outside.autocast))


def _without(autocast: tuple[Autocast, ...]) -> tuple[Autocast, ...]:
    return tuple(Autocast(a.device, a.dtype, False) for a in autocast)


def _weight(facts: Facts, n: fx.Node, real: bool) -> torch.Tensor:
    t = facts.weights[n]
    is_parameter = t.is_floating_point() and "._buffers[" not in facts.source_name(n) and (
        isinstance(t, nn.Parameter) or isinstance(facts.value[n], nn.Parameter) or n.op == "placeholder"
    )  # fmt: skip
    if real or not t.is_floating_point():
        held = t.detach()
    else:
        held = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return nn.Parameter(held, requires_grad=t.requires_grad) if is_parameter else held


def _form(facts: Facts, n: fx.Node) -> tuple[Any, ...]:
    """What a proof is of, of a weight; of integers the numbers, too."""
    t = facts.weights[n]
    numbers: Any = None
    if not t.is_floating_point() and type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta:
        numbers = tuple(t.detach().cpu().flatten().tolist()) if t.numel() <= _MOST_NUMBERS else id(t)
    return tuple(map(int, t.shape)), tuple(map(int, t.stride())), t.dtype, numbers, isinstance(t, nn.Parameter)


def _target(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


# ---------------------------------------------------------------------- names
def _names(facts: Facts, weights: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """Of the weights: as their modules have them, without what all have in common; else by number."""
    full = [_full_name(facts, n) for n in weights]
    parts = [name.split(".") for name in full]
    if all(full) and len(set(full)) == len(full) and all(_is_named(facts, n) for n in weights):
        common = len(_common([p[:-1] for p in parts]))
        short = [".".join(p[common:]) for p in parts]
        prefixes = {s for name in short for s in _owners(name)}
        if not prefixes & set(short) and not any(hasattr(nn.Module, p) for s in short for p in s.split(".")):
            return tuple(short)
    return _roles(facts, weights)


def _is_named(facts: Facts, n: fx.Node) -> bool:
    """Whether a weight has the name that its module gave it, rather than one that a tracer has counted."""
    return not str(n.target).startswith("_") if n.op == "get_attr" else is_held(facts.source_name(n))


def _roles(facts: Facts, weights: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """Weights that the same is done with are one list, in order: the experts of one that has no names."""
    families: dict[Any, list[fx.Node]] = {}
    for n in sorted(weights, key=lambda n: min(facts.at[u] for u in facts.users[n])):
        families.setdefault((tuple(facts.weights[n].shape), tuple(_role(n, 2))), []).append(n)
    names = {}
    for i, family in enumerate(families.values()):
        name = f"weight_{_letters(i)}"  # numbers would make one list of them
        names.update({n: f"{name}.{j}" if len(family) > 1 else name for j, n in enumerate(family)})
    return tuple(names[n] for n in weights)


def _letters(i: int) -> str:
    return (_letters(i // 26 - 1) if i >= 26 else "") + string.ascii_lowercase[i % 26]


def _role(n: fx.Node, depth: int) -> list[Any]:
    """What is computed with a value: the next ops that do more than move it, and as which argument they have it."""
    found = []
    for u in n.users:
        if target_name(u) in _MOVES:
            found += _role(u, depth)
        elif depth:
            at = next((i for i, a in enumerate(u.args) if a is n), -1)
            found.append((target_name(u), at, tuple(_role(u, depth - 1))))
    return sorted(set(found), key=repr)


_MOVES = {
    "t", "T", "mT", "transpose", "permute", "view", "reshape", "_unsafe_view", "to", "_to_copy", "expand", "unsqueeze",
    "squeeze", "detach", "contiguous", "clone", "alias",
}  # fmt: skip


def _full_name(facts: Facts, n: fx.Node) -> str:
    if n.op == "get_attr":
        return str(n.target)
    name = facts.source_name(n)
    if not is_held(name):
        return re.sub(r"\W", "_", str(n.target))
    return ".".join(re.findall(r"\['?([^'\]]+)'?\]", name)[1:])


def _owners(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _name(facts: Facts, extent: Extent) -> str:
    """The innermost module that all of the region was computed in, "" where the graph does not say or it is the whole
    model."""
    paths = []
    for n in extent.inside:
        stack = n.meta.get("nn_module_stack")
        if stack and n in facts.live:
            path = str(next(reversed(stack.values()))[0])
            paths.append(re.sub(r"\['?([^'\]]+)'?\]", r".\1", re.sub(r"^L\['\w+'\]", "", path)).strip(".").split("."))
    common = _common(paths) if paths else []
    return ".".join(p for p in common if p not in ("_modules",) and p)


def _common(paths: list[list[str]]) -> list[str]:
    """The parts that all paths begin with."""
    every = list(zip(*paths, strict=False))
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, every)]


def _made(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


def _found(root: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


__all__ = ["Extracted", "Region", "RegionCall", "extract", "is_removed"]
