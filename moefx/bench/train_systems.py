"""The systems of `bench train`: layouts of a model over ranks, and a model that trains in one of them."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import moefx

from ..pipelines.pipeline_schedules import KINDS
from .ep_variants import DISPATCHES
from .layers import build_model, list_kernels
from .rank_device import RankDevice

_AXES = ("pp", "dp", "ep")
_PEER, _GRAPH = "grouped_mm", "graph"


@dataclasses.dataclass(frozen=True)
class TrainingSize:
    """Sizes of a step.

    Attributes:
        sequences: of a step, over all ranks. length: tokens of a sequence.
        most: sequences of a forward on a rank, without a pipeline; the others accumulate their gradients.
        is_tiny: a tiny model, to test the benchmark on a CPU.
    """

    layers: int
    sequences: int
    length: int
    most: int
    is_tiny: bool = False


@dataclasses.dataclass(frozen=True)
class System:
    """A layout over ranks.

    Attributes:
        pp, dp, ep: ranks along each axis. Ranks of "dp" and "ep" have sequences of their own.
        schedule: of the pipeline, "" without one. dispatch: "" for the default.
        is_compiled: by moefx, else transformers' `grouped_mm`.
        is_captured: whether a step is one CUDA graph.
    """

    name: str
    pp: int
    dp: int
    ep: int
    schedule: str
    dispatch: str
    is_compiled: bool
    is_captured: bool

    @property
    def data_ranks(self) -> int:
        return self.dp * self.ep

    def split_sequences(self, size: TrainingSize) -> tuple[int, int]:
        """Return the micro-batches of a rank, and the sequences of each.

        Raises:
            ValueError: the sequences cannot be split evenly.
        """
        own, rest = divmod(size.sequences, self.data_ranks)
        number = own if self.schedule else -(-own // size.most)
        if rest or own == 0 or own % number:
            raise ValueError(
                f"{size.sequences} sequences cannot be split over {self.data_ranks} ranks in micro-batches of "
                f"{size.most}"
            )
        return number, own // number


def parse_system(text: str, ranks: int) -> System:
    """Parse "fsdp", or axes with their ranks such as "pp2xdp2xep2". An axis without a number has all ranks left.

    A schedule, a dispatch, "grouped_mm" or "graph" follow: "pp2xep4:zbv", "ep:gather+graph", "pp2xep4:1f1b+gather".

    Raises:
        ValueError: the axes have not as many ranks as there are, or a word is unknown.
    """
    axes, _, words = text.partition(":")
    sizes: dict[str, int] = dict.fromkeys(_AXES, 1)
    open_axis = ""
    for part in axes.replace("fsdp", "dp").split("x"):
        if not (found := re.fullmatch(r"(pp|dp|ep)(\d*)", part)):
            raise ValueError(f"system {text!r}: expected axes such as fsdp, ep, pp2xep4, not {part!r}")
        if found[2]:
            sizes[found[1]] = int(found[2])
        else:
            open_axis = found[1]
    taken = sizes["pp"] * sizes["dp"] * sizes["ep"]
    if open_axis:
        sizes[open_axis], taken = ranks // taken, ranks // taken * taken
    if taken != ranks:
        raise ValueError(f"system {text!r} is for {taken} ranks, there are {ranks}")
    schedule, dispatch, is_compiled, is_captured = "", "", True, False
    for word in filter(None, words.split("+")):
        if word in KINDS and "pp" in axes:
            schedule = word
        elif word in DISPATCHES and "ep" in axes:
            dispatch = word
        elif word == _PEER and "pp" not in axes and "ep" not in axes:
            is_compiled = False
        elif word == _GRAPH and "pp" not in axes:
            is_captured = True
        else:
            raise ValueError(f"system {text!r}: {word!r} is no schedule, dispatch, {_PEER!r} or {_GRAPH!r} that fits")
    schedule = schedule or ("1f1b" if "pp" in axes else "")
    pp, dp, ep = sizes.values()
    return System(text, pp, dp, ep, schedule, dispatch, is_compiled, is_captured)


def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Training:
    """One system on this rank.

    Attributes:
        microbatches: of a step on this rank. sequences: of each micro-batch.
    """

    def __init__(self, system: System, size: TrainingSize, device: RankDevice):
        self.system, self.length, self.device = system, size.length, device
        self.microbatches, self.sequences = system.split_sequences(size)
        self.model: Any = build_model(
            "eager" if system.is_compiled else "grouped_mm", size.layers, device.type, size.is_tiny
        )
        self.vocab_size = self.model.config.vocab_size
        self.model = self._spread(self.model)
        # a captured AdamW(foreach=True) divides DTensors by plain tensors, the numbers of steps, and DTensor raises
        parameters, is_captured = self.model.parameters(), system.is_captured
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=is_captured)
        self.train_captured = moefx.capture_step(self.train) if system.is_captured else None
        # ranks of one pipeline have the same tokens
        self.generator = torch.Generator(device.type).manual_seed(1 + dist.get_rank() % system.data_ranks)

    def _spread(self, model: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        system = self.system
        named = {"pp": system.pp} if system.schedule else {}
        named |= {axis: size for axis, size in (("dp", system.dp), ("ep", system.ep)) if size > 1}
        named = named or {"dp": 1}
        mesh = init_device_mesh(self.device.type, tuple(named.values()), mesh_dim_names=tuple(named))
        fields: dict[str, Any] = dict(dispatch=system.dispatch) if system.dispatch else {}
        if system.dispatch in ("gather", "pull"):
            fields |= dict(max_tokens=self.sequences * self.length)
        if system.ep > 1:
            fields |= dict(expert_axis="ep")
        elif system.schedule and system.dp > 1:
            fields |= dict(layout={"ep": 1})
        plan = moefx.Plan(validation="symbolic", **fields)
        if system.schedule:
            example = {"input_ids": torch.zeros(1, min(64, self.length), dtype=torch.long, device=self.device.type)}
            options: dict[str, Any] = dict(schedule=system.schedule, microbatches=self.microbatches, plan=plan)
            return moefx.pipeline(model, mesh, loss_fn=compute_loss, example_inputs=example, **options)
        if system.ep > 1:
            return moefx.parallelize(moefx.compile(model, mesh=mesh, plan=plan), mesh)
        if system.is_compiled:
            model = moefx.compile(model, plan=plan)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def draw_ids(self) -> Tensor:
        size = self.microbatches * self.sequences, self.length
        return torch.randint(0, self.vocab_size, size, device=self.device.type, generator=self.generator)

    def compute_gradients(self, ids: Tensor) -> Tensor:
        if self.system.schedule:
            return self.model.step(input_ids=ids, target=ids)
        total = torch.zeros((), device=self.device.type)
        for number, part in enumerate(ids.chunk(self.microbatches)):
            if self.microbatches > 1:
                self.model.set_requires_gradient_sync(number == self.microbatches - 1)
            loss = compute_loss(self.model(input_ids=part).logits, part) / self.microbatches
            loss.backward()
            total += loss.detach()
        return total

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, ids: Tensor) -> Tensor:
        loss = self.compute_gradients(ids)
        self.update()
        return loss

    def measure_step(self) -> tuple[Tensor, float, float]:
        """Run a step. Returns its loss, its ms without the optimizer, and the ms of the optimizer (0 in a graph)."""
        ids, losses = self.draw_ids(), list[Tensor]()
        if (train_captured := self.train_captured) is not None:
            ms = self._measure_ms(lambda: losses.append(train_captured(ids)))
            return losses[0], ms, 0.0
        gradients_ms = self._measure_ms(lambda: losses.append(self.compute_gradients(ids)))
        return losses[0], gradients_ms, self._measure_ms(self.update)

    def profile_kernels(self) -> list[dict[str, Any]]:
        """Profile one step. Returns name, ms and calls of its kernels, the longest first."""
        with torch.profiler.profile() as profile:
            self.measure_step()
        return list_kernels(profile.key_averages())

    def free(self) -> None:
        """Free the CUDA graph."""
        if self.train_captured is not None:
            self.train_captured.free()

    def _measure_ms(self, run: Callable[[], object]) -> float:
        self.device.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        run()
        self.device.synchronize()
        return (time.perf_counter() - begin) * 1e3
