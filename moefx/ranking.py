"""Rankings of layouts as tables, formulas and a page; `plan` makes one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from .errors import NothingFits, UnknownArchitecture, UnknownPlatform
from .ir.argument_binding import ExampleInputs
from .planner.architecture import Architecture
from .planner.catalogue import find_model
from .planner.entries import COLUMNS, LEGEND, SIZES, TERMS, Entry, Rejected, SearchRequest
from .planner.layout import Schedule
from .planner.memory_formulas import MEMORY
from .planner.min_gpus import MinGpus, find_min_gpus
from .planner.platforms import Platform, find_platform
from .planner.ranking_page import render
from .planner.search import SearchResult, search_layouts
from .planner.simulation import SimulatedStep, simulate
from .planner.step_formulas import collect_values, find_step_sheet
from .planner.symbols import ExplainedFormulas, explain_formulas
from .util.default_device import neutral_device
from .util.unit_text import amount

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from .pipelines.pipeline_model import Pipeline

_MAX_SIZES = 9  # printed sizes of a reason


class ModelConfig(Protocol):
    """A config of transformers."""

    model_type: str


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The layouts that fit, fastest first, and the rejected ones with their reasons.

    Attributes:
        num_ranks: the world size.
        result: the result of the search.
    """

    model: Architecture
    platform: Platform
    num_ranks: int
    result: SearchResult

    @property
    def request(self) -> SearchRequest:
        return self.result.request

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.result.entries

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        return self.result.rejected

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        fastest = f", the fastest {self.entries[0]!r}" if self.entries else ""
        hardware = f"{self.num_ranks} x {self.platform.device}"
        return f"<Ranking of {self.model.name} on {hardware}: {len(self)} layouts fit{fastest}; print it for all>"

    def __getitem__(self, index: int) -> Entry:
        """Return the entry at an index from 0.

        Raises:
            NothingFits: no layout fits.
            IndexError: fewer layouts fit.
        """
        if not self.entries:
            raise NothingFits(self._format_nothing_fits())
        if not -len(self.entries) <= index < len(self.entries):
            raise IndexError(f"no entry {index}: {len(self.entries)} layouts fit, print the ranking for the reasons")
        return self.entries[index]

    def table(self, most: int = 10, first: int = 0) -> str:
        """Return a table of `most` entries, numbered from 1, beginning with index `first`."""
        numbered = enumerate(self.entries[first : first + most], first + 1)
        rows = [list(COLUMNS), *([str(number), *entry.cells()] for number, entry in numbered)]
        return "\n".join(
            "".join(f"{cell:<{width}}" for cell, width in zip(row, COLUMNS.values(), strict=True)).rstrip()
            for row in rows
        )

    def explain(self, index: int = 0) -> str:
        """Return the formulas of an entry's memory and time, with numbers, results and the meaning of each symbol."""
        return "\n\n".join(map(str, self.formulas(index)))

    def formulas(self, index: int = 0) -> tuple[ExplainedFormulas, ExplainedFormulas]:
        """Return the formulas (of the memory, of the time) of an entry; `explain` prints them."""
        entry = self[index]
        layout, platform = entry.layout, self.platform
        stage = 0 if not entry.memory["A_logits"] else layout.pp - 1
        values = collect_values(self.model, layout, platform, entry.experts_first)
        return (
            explain_formulas(MEMORY, "M_gpu", **layout.values(self.model, stage), M_fw=platform.overhead),
            explain_formulas(find_step_sheet(layout, platform, entry.experts_first), "MFU", **values),
        )

    def build(
        self,
        index: int,
        model: nn.Module,
        loss_fn: Callable[[Tensor, Any], Tensor],
        *,
        example_inputs: ExampleInputs | None = None,
        device_type: str | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        replicate_dense: bool = False,
        **fields: Any,
    ) -> Pipeline:
        """Build an entry on the ranks of this job, for training with `Pipeline.step`. Collective: every rank calls it.

        The mesh, the plan, the schedule, the micro-batches and ZeRO are the entry's. Stages have equal times by the
        formulas, as far as the memory allows. `step` takes batches of the planned size only.

        Args:
            index: the entry's index, from 0.
            model: the model of the ranking, not compiled; also on the meta device.
            loss_fn, example_inputs, mp_policy: as for `moefx.pipeline`.
            device_type: type of the mesh's devices. None: the model's, or "cuda" if available for a model on the meta
                device.
            replicate_dense: for an entry with SSMB: keep dense matrices whole on each rank of the axis "tp".
            fields: fields of the plan that replace the entry's, such as `validation="symbolic"`.

        Raises:
            InvalidPlan: the job has another number of ranks; or moefx does not do what the entry says, such as tensor
                parallelism of dense matrices.
            InvalidInput: the model has other sizes than the ranking's, or cannot be cut into stages.
            NothingFits, IndexError: see `__getitem__`.
        """
        from .pipelines.entry_builder import build_entry  # torch.distributed takes a while

        return build_entry(
            self, index, model, loss_fn, example_inputs=example_inputs, device_type=device_type, mp_policy=mp_policy,
            replicate_dense=replicate_dense, fields=fields,
        )  # fmt: skip

    def simulate(self, index: int = 0, *, skew: float = 0.0, seed: int = 0, stragglers: bool = True) -> SimulatedStep:
        """Simulate a step of an entry as events, beside its formulas (see `planner.simulation.simulate`)."""
        entry = self[index]
        options: dict[str, Any] = dict(skew=skew, seed=seed, stragglers=stragglers)
        return simulate(self.model, entry.layout, self.platform, entry.experts_first, **options)

    def html(self, path: str | PathLike[str], tell: Callable[[str], object] | None = None) -> None:
        """Write a page with tables, formulas and sources, and plots if matplotlib is installed (the extra `plot`).

        Args:
            tell: called with a line of progress before each step.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(render(self, tell), encoding="utf-8")

    def __str__(self) -> str:
        return self.format()

    def format(self, most: int = 10) -> str:
        """Return the `most` best layouts as a table with a legend, and the reasons against the rejected ones."""
        lines = [
            f"{self.model.name} on {self.num_ranks} x {self.platform.device}: {len(self.entries)} layouts fit "
            f"{amount(self.platform.memory_bytes, 'B')}"
        ]
        lines += ["", self.table(most), "", *LEGEND] if self.entries else [SIZES]
        if self.model.note:
            lines += [f"{self.model.name}: {self.model.note}."]
        if not self.platform.is_measured:
            lines += [f"{self.platform.name} has data-sheet figures only: real steps take longer, real MFUs are lower."]
        if not self.entries and (min_gpus := self.find_min_gpus()):
            lines += ["", str(min_gpus)]
        lines += ["", "rejected"] + [f"  {sizes}: {reason}" for sizes, reason in self.reasons()]
        return "\n".join(lines)

    def reasons(self) -> list[tuple[str, str]]:
        """Return (sizes, reason) for each kind of rejection. `rejected` has all sizes of each kind."""
        lines, short = [], dict[str, list[Rejected]]()
        for rejected in self.rejected:
            if rejected.lacking:
                short.setdefault(rejected.term, []).append(rejected)
                continue
            *first, last = rejected.label.split(", ")
            separator = f", ... ({len(first) - _MAX_SIZES} more), " if len(first) > _MAX_SIZES else ", "
            lines.append((separator.join(filter(None, (", ".join(first[:_MAX_SIZES]), last))), rejected.why))
        for term, group in short.items():
            nearest = min(group, key=lambda rejected: rejected.lacking)
            if len(group) == 1:
                lines.append((nearest.label, nearest.why))
                continue
            reason = f"do not fit, most of it is {TERMS[term]} ({term})"
            shortage = f"{nearest.label} comes nearest and needs {amount(nearest.lacking, 'B')} more"
            lines.append((f"{len(group)} sizes of PP, TP and EP", f"{reason}; {shortage}"))
        return lines

    @property
    def nearest(self) -> Rejected | None:
        return self.result.nearest

    def _format_nothing_fits(self) -> str:
        head, nearest = f"no layout of {self.model.name} fits {self.num_ranks} x {self.platform.device}", self.nearest
        if nearest is None:
            return f"{head}: no sizes divide. Take another world_size or batch; print(ranking) has the reasons"
        term, num_available = TERMS[nearest.term], self.platform.networks[-1].ranks
        remedy = "fewer tokens, or more GPUs" if nearest.term == "M_activations" else "more GPUs"
        has_more = not 0 < num_available < 2 * self.num_ranks
        call = "print(ranking.find_min_gpus())"
        explanation = f"{call} says how many would do" if has_more else f"the platform has at most {num_available}"
        return (
            f"{head} ({amount(self.platform.memory_bytes, 'B')} each). {nearest.label} comes nearest: it lacks "
            f"{amount(nearest.lacking, 'B')}, and needs most memory for {term}. Take {remedy} ({explanation}); "
            "print(ranking) has the reasons"
        )

    def find_min_gpus(self) -> MinGpus | None:
        """Find the smallest number of GPUs on which a layout fits, by doubling, if nothing fits here. Takes some
        seconds."""
        return find_min_gpus(self)


def search(model: Architecture, platform: Platform, num_ranks: int, **request: Any) -> Ranking:
    """Rank the layouts of `search_layouts`, which has the arguments and the errors."""
    return Ranking(model, platform, num_ranks, search_layouts(model, platform, num_ranks, **request))


@neutral_device()
def plan(
    model: str | Architecture | nn.Module | ModelConfig, platform: str | Platform,
    world_size: int, *, batch: int = 1024, tokens: int = 4096,
    max_sequences: int = 8, fast_domain: int | None = None, schedules: Sequence[Schedule] = ("1f1b",),
    example_inputs: ExampleInputs | None = None,
) -> Ranking:  # fmt: skip
    """Rank the layouts of a model that fit a platform, the fastest first.

    Args:
        model: a name of the catalogue, an `Architecture`, an nn.Module (also on the meta device, see `describe`), or a
            transformers config, whose model is built on the meta device.
        platform: a name ("frontier", "dgx-h100", "h200", "mi300x", "a100-40gb"), a platform file, or a `Platform`.
        world_size: all GPUs: `--gpus` of the command line, `num_ranks` of the ranking.
        batch: sequences of a step, over all GPUs.
        tokens: tokens of a sequence.
        max_sequences: largest number of sequences in a micro-batch.
        fast_domain: largest span of an expert axis in GPUs; None: the platform's figure, 0: any.
        schedules: pipeline schedules to choose from: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2".
        example_inputs: for a module only: its example inputs, as for `moefx.compile`.

    Raises:
        UnknownArchitecture, UnknownPlatform: no such model or platform. The message has similar names.
        InvalidPlan: a size is invalid.
    """
    architecture: Any = find_model(model) if isinstance(model, str) else model
    if isinstance(model, nn.Module):
        from .planner.describe import describe  # imports capture and all passes

        architecture = describe(model, example_inputs)
    elif hasattr(model, "model_type"):
        from .planner.model_configs import describe_config

        architecture = describe_config(model, example_inputs)
    if not isinstance(architecture, Architecture):
        raise UnknownArchitecture(
            "moefx.plan takes the name of a model, a module, a transformers config or an Architecture, not "
            f"{type(model).__name__}"
        )
    known_platform = find_platform(os.fspath(platform)) if isinstance(platform, (str, os.PathLike)) else platform
    if not isinstance(known_platform, Platform):
        raise UnknownPlatform(f"moefx.plan takes a platform, its name or a file, not {type(known_platform).__name__}")
    return search(
        architecture, known_platform, world_size, batch=batch, tokens=tokens, max_sequences=max_sequences,
        fast_domain=fast_domain, schedules=schedules,
    )  # fmt: skip
