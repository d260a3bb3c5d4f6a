"""Layouts that fit, ranked, and what was rejected: as tables, formulas and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._plan import Plan
from .._units import amount
from ..errors import NothingFits
from .architecture import Architecture
from .layout import Layout, Schedule
from .memory import MEMORY
from .platforms import Platform
from .simulation import Simulated, simulate
from .step import given, sheet_of
from .symbols import Explained, explained

if TYPE_CHECKING:
    from .fewest import Fewest

COLUMNS = {
    "": 5, "PP": 10, "TP": 4, "DP": 6, "EP": 5, "placed": 10, "SSMB": 6, "ZeRO": 6, "rows": 8, "kept": 8,
    "micro-batches": 15, "memory": 12, "step": 12, "MFU": 0,
}  # fmt: skip
LEGEND = (
    "PP stages (x4: of 4 chunks each, interleaved; a name: by that schedule; else 1F1B), TP ranks of the dense",
    "matrices, DP ranks with other sequences, EP ranks of the experts, which are next to each other (EP first) or",
    "their replicas are. SSMB: in MoE blocks TP ranks have a part of the sequence each. ZeRO: its stage. rows: one for",
    "each expert of a token (flat) or each rank of these (dedup), or by hops over nodes (rbd, halo). kept: for the",
    "backward, by the policy h or x of Plan(checkpoint=...), or inputs of layers, which run again. micro-batches: 16",
    "of 8 sequences each. MFU: FLOP that the model asks for, over what the GPUs could do.",
)
SIZES = "PP stages, TP ranks of the dense matrices, DP ranks with other sequences, EP ranks of the experts."


TERMS = {  # of the memory, that a rejected layout may have most of
    "M_params": "parameters", "M_grads": "gradients", "M_optimizer": "optimizer states", "M_activations": "activations"
}  # fmt: skip
_MOST_SIZES = 9  # of a kind that are printed


@dataclasses.dataclass(frozen=True)
class Entry:
    """A layout that fits.

    Attributes:
        experts_first: ranks of an expert axis are next to each other, else replicas are (X-MoE appendix C.1).
        memory, step: results of the sheets, in bytes and seconds.
        units: ranks of units above a node, between which the links of the expert axis differ.
    """

    layout: Layout
    experts_first: bool
    memory: dict[str, float]
    step: dict[str, float]
    units: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return self.step["T_step"]

    @property
    def mfu(self) -> float:
        return self.step["MFU"]

    @property
    def short(self) -> str:
        """Enough of a layout to tell it from its neighbours."""
        x = self.layout
        kept = "inputs" if x.recompute else x.kept
        return f"PP{x.pp} TP{x.tp} EP{x.ep}{' SSMB' if x.ssmb else ''} ZeRO-{x.zero} {kept}"

    @property
    def words(self) -> str:
        """The same for readers without a legend: `4 pipeline stages, experts over 8 GPUs, ZeRO-1, ...`"""
        x = self.layout
        shared = {"data parallelism": x.dp, "tensor parallelism": x.tp, "experts": x.ep}
        parts = [f"{x.pp} pipeline stages"] if x.pp > 1 else []
        parts += [f"{what} over {ranks} GPUs" for what, ranks in shared.items() if ranks > 1]
        parts += ["SSMB"] if x.ssmb else []
        kept = "only inputs of layers" if x.recompute else f"policy {x.kept!r}"
        return ", ".join([*parts, f"ZeRO-{x.zero}", f"kept for the backward: {kept}"])

    def __repr__(self) -> str:
        x = self.layout
        found = f"{amount(self.memory['M_gpu'], 'B')}, {amount(self.seconds, 's')} a step, MFU {self.mfu:.1%}"
        return f"<Entry {self.short}, {x.microbatches} micro-batches of {x.sequences}: {found}>"

    def cells(self) -> list[str]:
        """Its line of a table whose columns are `COLUMNS`, without the number."""
        x = self.layout
        placed = "-" if x.ep == 1 else "EP first" if self.experts_first else "DP first"
        order = {"1f1b": "", "interleaved": f" x{x.chunks}"}.get(x.schedule, f" {x.schedule}") if x.pp > 1 else ""
        rows = x.way if x.ep > 1 else "-"
        sizes = [f"{x.pp}{order}", x.tp, x.dp, x.ep, placed, "yes" if x.ssmb else "-", x.zero, rows]
        policies = ["inputs" if x.recompute else x.kept, f"{x.microbatches} of {x.sequences}"]
        found = [amount(self.memory["M_gpu"], "B"), amount(self.seconds, "s"), f"{self.mfu:.1%}"]
        return [*map(str, sizes), *policies, *found]

    @property
    def mesh(self) -> dict[str, tuple[Any, ...]]:
        """Of `init_device_mesh(device_type, **entry.mesh)`: axes "pp", "dp", "ep" and "tp", as far as there are several
        ranks along them, what is near each other last."""
        x = self.layout
        ep = x.ep // x.tp if x.ssmb else x.ep
        inner = dict(dp=x.dp // ep, ep=ep) if self.experts_first else dict(ep=ep, dp=x.dp // ep)
        axes = {name: size for name, size in (dict(pp=x.pp) | inner | dict(tp=x.tp)).items() if size > 1} or dict(dp=1)
        return dict(mesh_shape=tuple(axes.values()), mesh_dim_names=tuple(axes))

    def plan(self, **more: Any) -> Plan:
        """What `moefx.compile` takes, over a mesh as `mesh` says. Without an expert axis it takes no mesh. Stages, TP,
        ZeRO and micro-batches are not compile's to do: `Plan.layout` has them, and compile refuses those that are left
        in it."""
        x, names = self.layout, self.mesh["mesh_dim_names"]
        counted = dict(pp=x.pp, tp=x.tp, ep=x.ep, zero=x.zero, microbatches=x.microbatches, recompute=int(x.recompute))
        spread: dict[str, Any] = dict(tokens=x.sequences * x.tokens, layout=counted)
        if x.ep > 1:
            spread |= dict(expert_axis="ep", dispatch=x.way, topology_levels=self.units)
            if x.ssmb:
                spread |= dict(expert_axis=("ep", "tp") if "ep" in names else "tp", sequence_axis="tp")
            if x.ssmb or x.tp == 1:  # else ranks of "tp" are between those of "ep", whichever comes first
                spread |= dict(placement="ep_first" if self.experts_first else "dp_first")
        kept: Any = x.kept
        return Plan(**(dict(checkpoint=kept) | spread | more))


@dataclasses.dataclass(frozen=True)
class Rejected:
    """Layouts that are none, of one kind.

    Attributes:
        sizes: what they have in common, one or the other: ({"EP": 64}, {"EP": 128}).
        lacking: bytes, of the one that lacks least, where nothing else is wrong; else 0.
        term: the largest one of its memory, there.
    """

    sizes: tuple[dict[str, int], ...]
    why: str
    lacking: float = 0.0
    term: str = ""

    @property
    def what(self) -> str:
        return ", ".join(" ".join(f"{name}={size}" for name, size in sizes.items()) for sizes in self.sizes)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a ranking was asked, as of `plan`; `fast_domain` is 0 for any."""

    batch: int
    tokens: int
    most_sequences: int
    fast_domain: int
    schedules: tuple[Schedule, ...]


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Layouts that fit, the fastest first, and what was rejected.

    Attributes:
        num_ranks: the world size.
    """

    model: Architecture
    platform: Platform
    num_ranks: int
    asked: Asked
    entries: tuple[Entry, ...]
    rejected: tuple[Rejected, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        best = f", the fastest {self.entries[0]!r}" if self.entries else ""
        where = f"{self.num_ranks} x {self.platform.device}"
        return f"<Ranking of {self.model.name} on {where}: {len(self)} layouts fit{best}; print it for all>"

    def __getitem__(self, index: int) -> Entry:
        """The first has number 0.

        Raises:
            NothingFits: there is none. IndexError: there are fewer.
        """
        if not self.entries:
            raise NothingFits(self._nothing())
        if not -len(self.entries) <= index < len(self.entries):
            raise IndexError(f"no entry {index}: {len(self.entries)} layouts fit, print the ranking for the reasons")
        return self.entries[index]

    def table(self, most: int = 10, first: int = 0) -> str:
        """Entries, a line each, numbered from 1; from the one with index `first` on."""
        chosen = enumerate(self.entries[first : first + most], first + 1)
        rows = [list(COLUMNS), *([str(number), *entry.cells()] for number, entry in chosen)]
        return "\n".join(
            "".join(f"{cell:<{width}}" for cell, width in zip(row, COLUMNS.values(), strict=True)).rstrip()
            for row in rows
        )

    def explain(self, index: int = 0) -> str:
        """Formulas, numbers and results of an entry, and what their symbols mean: its memory, then its time."""
        return "\n\n".join(map(str, self.formulas(index)))

    def formulas(self, index: int = 0) -> tuple[Explained, Explained]:
        """Of the memory and of the time of an entry, which `explain` prints."""
        entry = self[index]
        layout, platform = entry.layout, self.platform
        stage = 0 if not entry.memory["A_logits"] else layout.pp - 1
        values = given(self.model, layout, platform, entry.experts_first)
        return (
            explained(MEMORY, "M_gpu", **layout.values(self.model, stage), M_fw=platform.overhead),
            explained(sheet_of(layout, platform, entry.experts_first), "MFU", **values),
        )

    def simulate(self, index: int = 0, *, skew: float = 0.0, seed: int = 0, stragglers: bool = True) -> Simulated:
        """A step of an entry as events, beside its formulas: see `planner.simulation.simulate`."""
        entry = self[index]
        more: dict[str, Any] = dict(skew=skew, seed=seed, stragglers=stragglers)
        return simulate(self.model, entry.layout, self.platform, entry.experts_first, **more)

    def html(self, path: str | PathLike[str], tell: Callable[[str], object] | None = None) -> None:
        """Write a page: tables, formulas and sources, and pictures where matplotlib is there (the extra `plot`).

        Args:
            tell: called with a line on what is being done.

        Raises:
            OSError: the file cannot be written.
        """
        from .page import render

        Path(path).write_text(render(self, tell), encoding="utf-8")

    def __str__(self) -> str:
        return self.shown()

    def shown(self, most: int = 10) -> str:
        """What fits, a table of the best with its legend, and what was rejected and why."""
        lines = [
            f"{self.model.name} on {self.num_ranks} x {self.platform.device}: {len(self.entries)} layouts fit "
            f"{amount(self.platform.capacity, 'B')}"
        ]
        lines += ["", self.table(most), "", *LEGEND] if self.entries else [SIZES]
        if self.model.note:
            lines += [f"{self.model.name}: {self.model.note}."]
        if not self.platform.is_measured:
            lines += [f"Nobody measured {self.platform.name}: by data sheets, steps are too short and MFUs too high."]
        if not self.entries and (found := self.fewest()):
            lines += ["", str(found)]
        lines += ["", "rejected"] + [f"  {what}: {why}" for what, why in self.reasons()]
        return "\n".join(lines)

    def reasons(self) -> list[tuple[str, str]]:
        """What was rejected and why, a line for each kind: `rejected` has all sizes of it."""
        lines, short = [], dict[str, list[Rejected]]()
        for each in self.rejected:
            if each.lacking:
                short.setdefault(each.term, []).append(each)
                continue
            *first, last = each.what.split(", ")
            more = f", ... ({len(first) - _MOST_SIZES} more), " if len(first) > _MOST_SIZES else ", "
            lines.append((more.join(filter(None, (", ".join(first[:_MOST_SIZES]), last))), each.why))
        for term, group in short.items():
            nearest = min(group, key=lambda each: each.lacking)
            if len(group) == 1:
                lines.append((nearest.what, nearest.why))
                continue
            why = f"do not fit, most of it is {TERMS[term]} ({term})"
            lacking = f"{nearest.what} lacks least, {amount(nearest.lacking, 'B')}"
            lines.append((f"{len(group)} sizes of PP, TP and EP", f"{why}; {lacking}"))
        return lines

    @property
    def nearest(self) -> Rejected | None:
        """Of what does not fit, the region that lacks least."""
        return min((r for r in self.rejected if r.lacking), key=lambda r: r.lacking, default=None)

    def _nothing(self) -> str:
        head, nearest = f"no layout of {self.model.name} fits {self.num_ranks} x {self.platform.device}", self.nearest
        if nearest is None:
            return f"{head}: none divides so. Take another world_size or batch; print(ranking) says what divides what"
        term, there = TERMS[nearest.term], self.platform.networks[-1].ranks
        remedy = "fewer tokens, or more GPUs" if nearest.term == "M_activations" else "more GPUs"
        has_more = not 0 < there < 2 * self.num_ranks
        how = "print(ranking.fewest()) says how many would do" if has_more else f"the platform has {there} at the most"
        return (
            f"{head} ({amount(self.platform.capacity, 'B')} each). {nearest.what} lacks least: "
            f"{amount(nearest.lacking, 'B')}, most of what it needs is {term}. Take {remedy} ({how}); "
            "print(ranking) has the reasons"
        )

    def fewest(self) -> Fewest | None:
        """Where nothing fits, the smallest number of GPUs, doubled each time, on which something does. It takes some
        seconds at the most."""
        from .fewest import fewest

        return fewest(self)
