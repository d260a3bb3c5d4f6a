"""Parameter slices: the parts of the user's parameters that experts use, and the expert that each may belong to.

A slice may also be a part of a buffer: the mask of a pruned weight, the scale of a quantised one.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import torch
from torch import nn

from .term import Term

_MOVING = ("select", "slice", "reshape", "permute", "expand")


def is_parameter_slice(t: Term) -> bool:
    """Return whether a term is a parameter or a part of one, moved but not computed with."""
    return strip_moves(t).op == "param"


def is_state_slice(t: Term) -> bool:
    """Return whether a term is a parameter or buffer or a part of one, moved but not computed with."""
    return strip_moves(t).op in ("param", "buffer")


def strip_moves(t: Term) -> Term:
    """Return the operand of a chain of moves (picks, slices, reshapes, casts): for a slice, its parameter."""
    while t.op in _MOVING or (t.op == "pointwise" and t.args[0] in ("cast", "detach")):
        t = t.operands[0]
    return t


def get_fqn(t: Term) -> str:
    """Return the FQN of the parameter or buffer that a term is a part of."""
    return strip_moves(t).args[0]


def get_tensor(block: nn.Module, fqn: str) -> torch.Tensor:
    """Return a parameter or buffer of the block by FQN."""
    owner, _, name = fqn.rpartition(".")
    return getattr(block.get_submodule(owner), name)


@dataclasses.dataclass(frozen=True)
class ParameterSlice:
    """A part of a parameter or buffer.

    Attributes:
        fqn: the parameter.
        steps: (op, shape of the result, arguments) of each move that leads to the part, outermost last.
    """

    fqn: str
    steps: tuple[tuple, ...]

    @staticmethod
    def from_term(t: Term) -> ParameterSlice:
        """Convert a term for which `is_state_slice` holds."""
        steps: list[tuple] = []
        while t.op not in ("param", "buffer"):
            if t.op == "pointwise":
                steps.append((t.args[0], *[v for _, v in t.args[1]]))
                t = t.args[2]
            elif t.op == "select":
                steps += reversed(_steps_of_element(t))
                t = t.args[0]
            else:
                steps.append((t.op, t.shape, *t.args[1:]))
                t = t.args[0]
        return ParameterSlice(t.args[0], tuple(reversed(steps)))

    @property
    def axes(self) -> frozenset[int]:
        """Axes of the parameter at which the part has one index."""
        op, *rest = self.steps[0] if self.steps else ("",)
        return frozenset(axis for axis, _ in rest[1]) if op == "select" else frozenset()

    def __str__(self) -> str:
        text = self.fqn
        for op, *rest in self.steps:
            if op == "squeeze":
                continue
            if op == "select":
                text += f"[{', '.join(str(i) for _, i in rest[1])}]"
            elif op == "slice":
                text += f"[{':, ' * rest[1]}{rest[2]}:{rest[3]}]"
            else:
                text += f".{op}"
        return text


def _steps_of_element(t: Term) -> list[tuple]:
    """Return the steps of a `select` term: first the axes that select something, then those of size one."""
    inner, indices = t.args
    real = [(a, i) for a, i in indices if inner.shape[a] > 1]
    unit = [(a - sum(r < a for r, _ in real), i) for a, i in indices if inner.shape[a] == 1]
    shape = tuple(n for d, n in enumerate(inner.shape) if d not in dict(real))
    steps = [("select", shape, tuple(real))] if real else []
    return [*steps, ("squeeze", t.shape, tuple(unit))] if unit else steps


class Siblings(list[str]):
    """Names of the parts of a module that differ in their number only, in order."""

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The position of each name."""
        return {part: number for number, part in enumerate(self)}


def guess_experts(part: ParameterSlice, children: dict[str, Siblings]) -> list[int]:
    """List the experts that a slice may belong to, most likely first.

    Candidates are its index in a stack or a flat matrix, and its position among sibling modules.

    Args:
        children: the numbered parts of each parent, by FQN of the parent.
    """
    parts, candidates = part.fqn.split("."), []
    for depth in range(len(parts)):
        siblings = children.get(".".join(parts[:depth]))
        if siblings is not None and len(siblings) > 1 and parts[depth] in siblings.numbers:
            candidates.append(siblings.numbers[parts[depth]])
    for op, *rest in part.steps:
        if op == "select" and rest[1]:
            return [rest[1][0][1]]
        if op == "slice":
            _, _, start, stop, step = rest
            if step == 1 and start % (stop - start) == 0:
                # a block of an expert's own matrix, or of a matrix of all experts
                return [*candidates, start // (stop - start)]
    return candidates


def find_siblings(block: nn.Module) -> dict[str, Siblings]:
    """Find the parts of each module that differ in their number only: `0`, `1`, ... or `expert_0`, `expert_1`, ..."""
    out: dict[str, Siblings] = {}
    for name, module in block.named_modules():
        parts = [*module._modules, *module._parameters]
        families: dict[str, list[str]] = {}
        for part in parts:
            if re.search(r"\d", part):
                families.setdefault(re.sub(r"\d+", "#", part), []).append(part)
        largest = max(families.values(), key=len, default=[])
        if len(largest) < 2 and isinstance(module, nn.ModuleDict):
            # named experts, perhaps beside a router: parts with equal parameters
            kinds: dict[tuple, list[str]] = {}
            for part, child in module.items():
                kinds.setdefault(tuple((n, t.shape) for n, t in child.named_parameters()), []).append(part)
            largest = max(kinds.values(), key=len, default=[])
        if len(largest) > 1:
            out[name] = Siblings(sorted(largest, key=_split_digits))
    return out


def number_nested_modules(block: nn.Module) -> dict[str, int]:
    """Number the modules of nested lists, counted through all inner lists, by FQN."""
    numbers: dict[str, int] = {}
    for name, module in block.named_modules():
        inner = list(module.named_children())
        if len(inner) > 1 and all(type(m) is nn.ModuleList for m in (module, *(part for _, part in inner))):
            parts = [f"{name}.{outer}.{part}" for outer, nested in inner for part, _ in nested.named_children()]
            numbers |= {part.lstrip("."): number for number, part in enumerate(parts)}
    return numbers


def _split_digits(text: str) -> list:
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", text)]
