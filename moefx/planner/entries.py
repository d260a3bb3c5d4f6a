"""Layouts that fit, what was rejected, and what was asked."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._plan import Plan
from ..util.unit_text import amount
from .layout import Layout, Schedule

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
class SearchRequest:
    """What a ranking was asked, as of `plan`; `fast_domain` is 0 for any."""

    batch: int
    tokens: int
    most_sequences: int
    fast_domain: int
    schedules: tuple[Schedule, ...]
