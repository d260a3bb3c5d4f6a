"""Results of a search: layouts that fit, rejected ones, and the request."""

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
    "PP: pipeline stages (1F1B; x4: interleaved with 4 chunks; otherwise the schedule's name). TP: ranks that share",
    "the dense matrices. DP: ranks with other sequences. EP: ranks that share the experts. placed: EP ranks (EP",
    "first) or their replicas (DP first) are neighbours. SSMB: each TP rank routes a part of the sequence. ZeRO: its",
    "stage. rows: a token travels to each expert (flat), to each rank (dedup), or by hops over nodes (rbd, halo).",
    "kept: policy h or x of Plan(checkpoint=...), or the inputs of layers, which run again. micro-batches: 16 of 8:",
    "16 micro-batches of 8 sequences. MFU: FLOP of the model over the peak FLOP of the GPUs.",
)
SIZES = "PP stages, TP ranks of the dense matrices, DP ranks with other sequences, EP ranks of the experts."
TERMS = {  # parts of the memory that can be the largest one of a rejected layout
    "M_params": "parameters", "M_grads": "gradients", "M_optimizer": "optimizer states", "M_activations": "activations"
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entry:
    """A layout that fits.

    Attributes:
        experts_first: the ranks of an expert axis are neighbours, otherwise their replicas are (X-MoE appendix C.1).
        memory, step: results of the sheets, in bytes and seconds.
        units: sizes of the units above a node at which the links of the expert axis change, in ranks.
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
    def short_label(self) -> str:
        """A short label: `PP4 TP1 EP8 ZeRO-1 h`."""
        x = self.layout
        policy = "inputs" if x.recompute else x.kept
        return f"PP{x.pp} TP{x.tp} EP{x.ep}{' SSMB' if x.ssmb else ''} ZeRO-{x.zero} {policy}"

    @property
    def long_label(self) -> str:
        """The label in words: `4 pipeline stages, experts over 8 GPUs, ZeRO-1, ...`"""
        x = self.layout
        num_ranks_by_size = {"data parallelism": x.dp, "tensor parallelism": x.tp, "experts": x.ep}
        parts = [f"{x.pp} pipeline stages"] if x.pp > 1 else []
        parts += [f"{size_name} over {ranks} GPUs" for size_name, ranks in num_ranks_by_size.items() if ranks > 1]
        parts += ["SSMB"] if x.ssmb else []
        policy = "only inputs of layers" if x.recompute else f"policy {x.kept!r}"
        return ", ".join([*parts, f"ZeRO-{x.zero}", f"kept for the backward: {policy}"])

    def __repr__(self) -> str:
        x = self.layout
        figures = f"{amount(self.memory['M_gpu'], 'B')}, {amount(self.seconds, 's')} a step, MFU {self.mfu:.1%}"
        return f"<Entry {self.short_label}, {x.microbatches} micro-batches of {x.sequences}: {figures}>"

    def cells(self) -> list[str]:
        """Return the entry's cells in a table with the columns `COLUMNS`, without the number."""
        x = self.layout
        order_text = "-" if x.ep == 1 else "EP first" if self.experts_first else "DP first"
        order = {"1f1b": "", "interleaved": f" x{x.chunks}"}.get(x.schedule, f" {x.schedule}") if x.pp > 1 else ""
        rows = x.dispatch if x.ep > 1 else "-"
        sizes = [f"{x.pp}{order}", x.tp, x.dp, x.ep, order_text, "yes" if x.ssmb else "-", x.zero, rows]
        policies = ["inputs" if x.recompute else x.kept, f"{x.microbatches} of {x.sequences}"]
        figures = [amount(self.memory["M_gpu"], "B"), amount(self.seconds, "s"), f"{self.mfu:.1%}"]
        return [*map(str, sizes), *policies, *figures]

    @property
    def mesh(self) -> dict[str, tuple[Any, ...]]:
        """Arguments for `init_device_mesh(device_type, **entry.mesh)`.

        The axes are "pp", "dp", "ep" and "tp", each if it has several ranks. Ranks of later axes are nearer.
        """
        x = self.layout
        ep = x.ep // x.tp if x.ssmb else x.ep
        inner = dict(dp=x.dp // ep, ep=ep) if self.experts_first else dict(ep=ep, dp=x.dp // ep)
        axes = {name: size for name, size in (dict(pp=x.pp) | inner | dict(tp=x.tp)).items() if size > 1} or dict(dp=1)
        return dict(mesh_shape=tuple(axes.values()), mesh_dim_names=tuple(axes))

    def plan(self, **overrides: Any) -> Plan:
        """Return the plan for `moefx.compile` over the mesh of `mesh`. Without an expert axis `compile` takes no mesh.

        `compile` does not implement stages, TP, ZeRO and micro-batches. `Plan.layout` lists them, and `compile` raises
        for each one that is still listed.

        Args:
            overrides: fields that replace the entry's.
        """
        x, names = self.layout, self.mesh["mesh_dim_names"]
        layout = dict(pp=x.pp, tp=x.tp, ep=x.ep, zero=x.zero, microbatches=x.microbatches, recompute=int(x.recompute))
        spread: dict[str, Any] = dict(tokens=x.sequences * x.tokens, layout=layout)
        if x.ep > 1:
            spread |= dict(expert_axis="ep", dispatch=x.dispatch, topology_levels=self.units)
            if x.dispatch == "gather":
                spread |= dict(max_tokens=-(-x.sequences * x.tokens // (x.tp if x.ssmb else 1)))
            if x.ssmb:
                spread |= dict(expert_axis=("ep", "tp") if "ep" in names else "tp", sequence_axis="tp")
            if x.ssmb or x.tp == 1:  # otherwise "tp" ranks lie between "ep" ranks in both placements
                spread |= dict(placement="ep_first" if self.experts_first else "dp_first")
        policy: Any = x.kept
        return Plan(**(dict(checkpoint=policy) | spread | overrides))


@dataclasses.dataclass(frozen=True)
class Rejected:
    """Layouts that were rejected for one reason.

    Attributes:
        sizes: the sizes at fault, one dictionary for each alternative: ({"EP": 64}, {"EP": 128}).
        why: the reason.
        lacking: bytes that the nearest layout lacks, 0 if memory is not the reason.
        term: the largest part of that layout's memory, a key of `TERMS`.
    """

    sizes: tuple[dict[str, int], ...]
    why: str
    lacking: float = 0.0
    term: str = ""

    @property
    def label(self) -> str:
        return ", ".join(" ".join(f"{name}={size}" for name, size in sizes.items()) for sizes in self.sizes)


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """The arguments of a search (see `ranking.plan`). `fast_domain` is 0 for no limit."""

    batch: int
    tokens: int
    max_sequences: int
    fast_domain: int
    schedules: tuple[Schedule, ...]
