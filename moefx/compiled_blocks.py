"""The rewritten blocks of a compiled model: `blocks`, `graph`, `history`, and the record that `compile` leaves."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .compiler.survey_result import Refusal
from .errors import MoefxError
from .inspection.explain import BlockReport
from .inspection.history import History
from .ir.argument_binding import Specialization
from .ir.graphs.block_graph import BlockGraph
from .runtime.block_forward import BlockForward, find_rewritten_blocks
from .runtime.graph_backend import find_backend
from .util.model_wrappers import unwrap_model
from .util.module_names import quote_name

if TYPE_CHECKING:
    from .planner.decision import Decision

RECORD = "_moefx_record"
UNCHANGED: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()  # models returned as they are


@dataclasses.dataclass(frozen=True)
class Record:
    """The findings of `compile`, stored on the compiled model: names, texts and numbers, no second model."""

    matched: tuple[BlockReport, ...]
    refused: tuple[Refusal, ...]
    seconds: float
    planned: Decision | None = None
    gradients: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict) -> Record:
        return self


@dataclasses.dataclass(frozen=True)
class Block:
    """A rewritten block of a compiled model."""

    name: str
    forward: BlockForward

    @property
    def spec(self) -> Specialization:
        """The specialization that the block was compiled for. Later calls may have added others."""
        return self.forward.compiled_program.key

    @property
    def graph(self) -> BlockGraph:
        return self.history.graph

    @property
    def history(self) -> History:
        return self.forward.compiled_program.history

    @property
    def fallbacks(self) -> int:
        """Calls that ran the original code instead of the rewritten graph."""
        return self.forward.counts.original

    @property
    def stash_misses(self) -> int:
        """Backwards that computed activations again because the stash had lost them (`Plan(stash_factor=...)`), since
        the block was compiled. Waits for the GPU. Calls inside of compiled graphs are not counted."""
        counter = self.forward.miss_counter
        return 0 if counter is None else counter.read()

    def record_load(self, on: bool = True) -> None:
        """Turn routing statistics on or off; off is the default. Warns if the compiler of the graph keeps none."""
        if on and (other := self.forward.compiled_by):
            warnings.warn(
                f"moefx: there will be no routing statistics: the code that {other!r} makes of a graph keeps none. "
                "torch.compile(model, backend='moefx', options={'backend': 'eager'}) does, and moefx.compile(model)",
                stacklevel=2,
            )
        self.forward.record_load(on)

    def load(self) -> torch.Tensor | None:
        """Tokens per expert [E] of the last call, on the device, without host synchronisation. None before the first
        call, and if the last one ran the original forward.

        Over a mesh these are this rank's tokens (with a `sequence_axis`: its part of them), and E counts the experts of
        all ranks: the sum over the ranks is the load of all tokens.
        """
        return self.forward.load()


def blocks(compiled: nn.Module) -> list[Block]:
    """List the rewritten blocks of a compiled model, in module order."""
    return [Block(name, forward) for name, forward in find_forwards(compiled).items()]


def graph(compiled: nn.Module, name: str, *, after: str | None = None) -> BlockGraph:
    """Return the rewritten graph of a block, or its graph after a named pass. `print` it.

    Raises:
        MoefxError: no rewritten block has this name. NoSuchPass: no such pass ran on it.
    """
    graphs = history(compiled, name)
    return graphs.graph if after is None else graphs[after].graph


def history(compiled: nn.Module, name: str) -> History:
    """Return all graphs of a block, pass by pass.

    Raises:
        MoefxError: no rewritten block has this name.
    """
    forwards = find_forwards(compiled)
    if not forwards:
        raise MoefxError(
            "no block of this model is rewritten; pass the result of moefx.compile, or of torch.compile with "
            "backend='moefx' after its first call"
        )
    by_region = {forward.name: forward for forward in forwards.values()}  # `explain` names the regions of a graph so
    block_forward = forwards.get(name) or by_region.get(name)
    if block_forward is None:
        raise MoefxError(f"no rewritten block {name!r}; there is {', '.join(quote_name(n) for n in forwards)}")
    return block_forward.compiled_program.history


def find_forwards(target: nn.Module) -> dict[str, BlockForward]:
    """Return the rewritten blocks of a model. If it was compiled with `backend="moefx"`, also the regions of its
    graphs."""
    if is_compiled_function(target):
        return find_graph_regions(target)[1]
    blocks = find_rewritten_blocks(model := unwrap_model(target))
    # A result of `moefx.compile` shares weights with its original, which torch may have compiled, too.
    return blocks if blocks and target is model else {**find_graph_regions(target)[1], **blocks}


def is_compiled_function(target: Any) -> bool:
    """Return whether `torch.compile` returned this for a function."""
    return inspect.isfunction(target) and hasattr(target, "_torchdynamo_orig_callable")


def find_graph_regions(target: Any) -> tuple[Record | None, dict[str, BlockForward]]:
    """Return the record and the regions of a model or function that was compiled with `backend="moefx"`."""
    backend = find_backend()
    return backend.find_record(target) if backend is not None else (None, {})
