"""Build a mutant: a new class from a base class, with a line inserted at a hook or replaced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import linecache
import textwrap
from collections import Counter

import torch
import torch.nn as nn

from tests.models.case import BlockSpec, Case

from . import bases
from .bases import BASES, D
from .mutations import MUTATIONS, NOT_FOR, Mutation


def _insert(source: str, hook: str, code: str) -> str | None:
    """Insert the lines of `code` below the comment `# @hook` of `source`. Return None without that hook."""
    lines = []
    found = False
    for line in source.splitlines():
        lines.append(line)
        if line.strip() == f"# @{hook}":
            found = True
            lines += textwrap.indent(code, line[: line.index("#")]).splitlines()
    return "\n".join(lines) + "\n" if found else None


def _replace(source: str, old: str, new: str) -> str:
    """Replace `old` in `source`; further lines of `new` get the indentation of the line."""
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    start = source.rindex("\n", 0, source.index(old)) + 1
    indent = source[start : len(source) - len(source[start:].lstrip())]
    return source.replace(old, new.replace(";; ", "\n" + indent))


@functools.cache
def _read_source(base: str) -> str:
    return inspect.getsource(BASES[base])


def mutate(base: str, mutation: Mutation) -> str | None:
    source = _read_source(base)
    if mutation.old:
        return _replace(source, mutation.old, mutation.code) if mutation.base == base else None
    return _insert(source, mutation.hook, mutation.code)


@dataclasses.dataclass(frozen=True)
class Mutant:
    base: str
    mutation: Mutation

    @property
    def name(self) -> str:
        return f"{self.base}/{self.mutation.name}"

    @functools.cached_property
    def source(self) -> str:
        source = mutate(self.base, self.mutation)
        assert source is not None
        return source

    def make(self) -> nn.Module:
        block = _build_class(self.base, self.source, f"<mutant {self.name}>")()
        if "self.perm" in self.source:
            block.register_buffer("perm", torch.tensor([2, 0, 1, 4, 3]))
        if "self.scale" in self.source:
            block.scale = nn.Parameter(torch.empty(bases.E))
        if "self.drift" in self.source:
            block.register_buffer("drift", torch.tensor(0.3))
        if "self.offset" in self.source:
            block.register_buffer("offset", torch.tensor([0.6, -0.4, 0.3, -0.2, 0.1]))
        if "self.calls" in self.source:
            block.calls = 1
        return block

    def build(self, dtype: torch.dtype = torch.float64) -> Case:
        return self._spec(self.make).build(seed=3, dtype=dtype)

    def build_base(self, dtype: torch.dtype = torch.float64) -> Case:
        return self._spec(BASES[self.base]).build(seed=3, dtype=dtype)

    def _spec(self, make) -> BlockSpec:
        random = any(s in self.source for s in ("rand", "dropout"))
        return BlockSpec(self.name, "mutant", "either", self.mutation.same, make, rng=random, dim=D,
                         num_experts=bases.E, live=3, skew=_skew)  # fmt: skip


def _skew(block: nn.Module) -> int:
    block.gate.weight[1], block.gate.weight[2:] = -block.gate.weight[0], 0
    return 1


def _build_class(name: str, source: str, filename: str) -> type[nn.Module]:
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace = dict(vars(bases), __name__="tests.mutants.generated")
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def list_mutants(bases_per_mutation: int | None = 2) -> list[Mutant]:
    """Return the suite in a fixed order: each prefix is a fair sample.

    Args:
        bases_per_mutation: number of bases per mutation, among those with its hook. None: all.
    """
    everything = sorted(_list_all(), key=lambda m: (_hash_name(m.name), m.name))
    if bases_per_mutation is None:
        return everything
    seen: Counter[str] = Counter()
    chosen = []
    for mutant in everything:
        seen[mutant.mutation.name] += 1
        if seen[mutant.mutation.name] <= bases_per_mutation:
            chosen.append(mutant)
    return chosen


def _list_all() -> list[Mutant]:
    return [
        Mutant(base, mutation)
        for base in BASES
        for mutation in MUTATIONS
        if mutation.name not in NOT_FOR.get(base, "").split() and mutate(base, mutation) is not None
    ]


def _hash_name(name: str) -> int:
    """Return a pseudo-random sort key that is the same in every process."""
    value = 0
    for char in name:
        value = (value * 131 + ord(char)) % 1_000_003
    return value
