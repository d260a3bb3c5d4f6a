"""`Plan`: the options of `compile`, in one frozen, printable, JSON-serialisable value."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal, get_args

from .errors import InvalidPlan

_MIN_CAPACITY_FACTOR = 2**-20  # capacities are computed with fractions of denominators up to 2**20

_UNBOUNDED = 2**31
# names of the sizes in `Plan.layout`, with their values
_LAYOUT_SIZES = {
    **dict.fromkeys(("pp", "tp", "ep"), range(1, _UNBOUNDED + 1)), "zero": range(4),
    "microbatches": range(1, _UNBOUNDED + 1), "recompute": range(2),
}  # fmt: skip

Checkpoint = Literal["h", "x", "all", "auto"]
Validation = Literal["symbolic", "numeric", "auto"]
PlacementOrder = Literal["ep_first", "dp_first"]
SequenceGradients = Literal["replicated", "partial"]
DropRule = Literal["weight", "position_token", "position_slot"]
Dispatch = Literal["auto", "flat", "dedup", "rbd", "halo", "gather", "pull"]
Gradients = Literal["manual"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Options of `compile`. All fields are optional.

    Attributes: Memory of the experts
        checkpoint: the tensors that the expert MLP keeps for its backward (MoEBlaze section 5). `"h"`: its input X and
            the up-projection H, the activation is recomputed; `"x"`: X only; `"all"`: the activation too; `"auto"`:
            the fastest policy that fits the memory, by the planner (docs/how_to/automatic_plans.md).

    Attributes: Ranks of the experts
        expert_axis: the mesh axis over which the experts are spread, or several that become one, `("dp", "tp")`. None:
            `"ep"` if the mesh has such an axis, else its only axis. `"auto"`: the fastest layout that fits the
            memory by the planner's formulas, `sequence_axis` included; it has no effect without a mesh.
        placement: the order of ranks that the mesh must have. `"ep_first"`: the ranks of an expert group are
            neighbours, so exchanges stay local; `"dp_first"`: the ranks of a data-parallel group are neighbours (X-MoE
            appendix C.1). None accepts both.
        node_size: ranks of a node, numbered node by node. None: LOCAL_WORLD_SIZE, which torchrun sets, else all ranks.
        topology_levels: ranks of units above a node, such as `(32, 512)` for switch groups of 32 and racks of 512
            ranks. `"rbd"` and `"halo"` take one more hop for each.

    Attributes: Sequence and gradients
        sequence_axis: a tensor-parallel mesh axis whose ranks all have the same tokens. Each rank routes a part of
            them, and the sums are gathered (X-MoE section 4.3, SSMB). Its ranks are among those of `expert_axis`.
        sequence_gradients: the gradient of the block's output that each rank of `sequence_axis` receives:
            `"replicated"`, the whole gradient; `"partial"`, one of its summands.
        gradients: `"manual"` says that you reduce gradients yourself, between the backward and the optimizer's step;
            `explain` prints the reductions. moefx cannot detect them: without this field, it warns at the first step
            on gradients that neither `fully_shard` nor DistributedDataParallel reduces.

    Attributes: Exchange of rows
        dispatch: how rows travel to their experts. `"flat"`: one row for each slot; `"dedup"`: one for each rank
            that has experts of the token; `"rbd"`: one for each node, and from there one for each rank (X-MoE section
            4.2); `"halo"`: as `"rbd"`, but rows that stay in the node do not wait for rows of other nodes (Piper
            section V); `"gather"`: an all-gather brings the tokens of all ranks to every rank, and a reduce-scatter
            returns their sums: the host reads nothing, and CUDA graphs can hold the exchange; `"pull"`: as `"gather"`,
            but a rank reads from the memory of other GPUs of the node only the tokens that its experts need, and their
            sums; without such access `compile` takes `"gather"`, or `"dedup"`, and `explain` says why; `"auto"`: the
            fastest one by the bandwidths within and between nodes, which `compile` measures, and the host's time;
            `explain` shows the figures. It chooses `"gather"` on GPUs only, and never `"pull"`.
        pilots: False: `"halo"` sends a row for each slot, as in Piper, instead of one for each node and rank.
        chunks: the number of parts in which tokens travel. Experts compute on one part while others are on their way.
            It pays if exchanges take long and experts have many rows.
        max_tokens: with `dispatch="gather"` or `"pull"`, or if `"auto"` chooses the former, the maximum number of
            tokens that a rank has in a call. Every call has room for as many, and a call with more raises
            `InvalidInput`. None: the hosts agree on the largest number before each call, which CUDA graphs cannot hold.
        stash_factor: with `"gather"` or `"pull"` on GPUs, the size of the stash that all layers share for the
            activations of the backward. 1 is the size for equally many rows on each rank. The backward computes lost
            activations again: results do not change. 0 keeps none. None keeps all rows of each layer in tensors for
            the worst case, W times larger on W ranks, without copies. `"auto"`: 1.1 over more than two ranks, else
            None.
        timeout: seconds that a rank waits for others in an exchange before it raises `RanksLost`. None: the timeout of
            the mesh's process groups (see `torch.distributed.init_process_group`).

    Attributes: Capacity
        capacity_factor: a capacity for a model that has none: each expert keeps at most ceil(capacity_factor * slots /
            experts) of one rank's slots. This changes the results: `verify` shows it as soon as a slot is dropped.
            None: the model's own rule.
        drop: which slots an expert keeps under `capacity_factor`: those with the largest routing weights (`"weight"`),
            those of the first tokens (`"position_token"`), or all first slots before the second ones
            (`"position_slot"`).

    Attributes: Planner
        tokens: tokens per rank and micro-batch that the planner assumes. None: those of the example inputs, or 4096
            without any.
        memory: bytes of a device for parameters, gradients, optimizer and activations, if a field is `"auto"`. None:
            all of its memory.
        zero: the stage of ZeRO, 0 to 3, by which you shard states (`fully_shard`: 3), if a field is `"auto"`. None:
            the lowest stage that fits.
        layout: sizes that the planner counted on (`Entry.plan`), as pairs or a dict: "pp", "tp", "ep", "zero",
            "microbatches", "recompute". `compile` raises if the mesh has other sizes, or if the entry needs a step
            that `compile` does not perform, such as tensor parallelism. Sizes that are left out are not checked.

    Attributes: Checks
        validation: `"symbolic"` proves the rewrite on abstract tensors under several routings; `"numeric"` also runs
            original and rewritten block side by side on a few tokens; `"auto"` does so if the weights exist and
            `validation_seconds` allows it.
        validation_seconds: time budget of the numeric check, in seconds. `compile` has it once for all blocks. Each
            program for a later kind of call has it again, and so has each region of a flat graph.

    Attributes: Passes
        fuse: collapse dispatch, GEMMs and the pointwise part into `expert_mlp`. False: one op per step, for debugging.
        disable: names of passes to leave out, such as `("fuse",)`, to bisect a problem.
    """

    checkpoint: Checkpoint = "h"
    expert_axis: str | tuple[str, ...] | None = None
    placement: PlacementOrder | None = None
    sequence_axis: str | None = None
    sequence_gradients: SequenceGradients = "replicated"
    gradients: Gradients | None = None
    dispatch: Dispatch = "auto"
    pilots: bool = True
    chunks: int = 1
    max_tokens: int | None = None
    stash_factor: float | Literal["auto"] | None = "auto"
    capacity_factor: float | None = None
    drop: DropRule = "weight"
    node_size: int | None = None
    topology_levels: tuple[int, ...] = ()
    timeout: float | None = None
    tokens: int | None = None
    memory: float | None = None
    zero: int | None = None
    layout: tuple[tuple[str, int], ...] | None = None
    validation: Validation = "auto"
    validation_seconds: float = 30.0
    fuse: bool = True
    disable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, choices in (
            ("checkpoint", Checkpoint),
            ("dispatch", Dispatch),
            ("drop", DropRule),
            ("sequence_gradients", SequenceGradients),
            *((("placement", PlacementOrder),) if self.placement is not None else ()),
            *((("gradients", Gradients),) if self.gradients is not None else ()),
            ("validation", Validation),
        ):
            value = getattr(self, field)
            if value not in get_args(choices):
                raise InvalidPlan(f"Plan({field}={value!r}): expected one of {', '.join(map(repr, get_args(choices)))}")
        if isinstance(self.expert_axis, list):
            object.__setattr__(self, "expert_axis", tuple(self.expert_axis))
        for field in ("expert_axis", "sequence_axis"):
            axis = getattr(self, field)
            several = axis if field == "expert_axis" and isinstance(axis, tuple) else (axis,)
            if axis is not None and not (several and all(isinstance(name, str) for name in several)):
                raise InvalidPlan(f"Plan({field}={axis!r}): expected the name of a mesh axis")
        seconds = self.validation_seconds
        if not (type(seconds) in (int, float) and seconds >= 0):
            raise InvalidPlan(f"Plan(validation_seconds={self.validation_seconds!r}): expected a number >= 0")
        for field in ("fuse", "pilots"):
            if type(getattr(self, field)) is not bool:
                raise InvalidPlan(f"Plan({field}={getattr(self, field)!r}): expected True or False")
        if self.node_size is not None and not _is_size(self.node_size):
            raise InvalidPlan(f"Plan(node_size={self.node_size!r}): expected a number of ranks, or None")
        if not _is_size(self.chunks):
            raise InvalidPlan(f"Plan(chunks={self.chunks!r}): expected a number of parts, 1 or more")
        if self.max_tokens is not None and not _is_size(self.max_tokens):
            raise InvalidPlan(f"Plan(max_tokens={self.max_tokens!r}): expected a number of tokens, or None")
        factor = self.capacity_factor
        if factor is not None and not (type(factor) in (int, float) and 0 < factor < 1e6):
            raise InvalidPlan(f"Plan(capacity_factor={factor!r}): expected a number > 0, or None")
        if factor is not None and factor < _MIN_CAPACITY_FACTOR:
            raise InvalidPlan(
                f"Plan(capacity_factor={factor!r}): expected {_MIN_CAPACITY_FACTOR!r} or more. An expert keeps one "
                f"slot at least: capacity_factor={_MIN_CAPACITY_FACTOR!r} keeps one, or one in a million"
            )
        factor = self.stash_factor
        if factor not in (None, "auto") and not (type(factor) in (int, float) and 0 <= factor < 1e6):
            raise InvalidPlan(f"Plan(stash_factor={factor!r}): expected a number >= 0, 'auto' or None")
        if self.timeout is not None and not (type(self.timeout) in (int, float) and 0 < self.timeout < 1e9):
            raise InvalidPlan(f"Plan(timeout={self.timeout!r}): expected seconds, or None")
        if self.tokens is not None and not _is_size(self.tokens):
            raise InvalidPlan(f"Plan(tokens={self.tokens!r}): expected a number of tokens, or None")
        if self.memory is not None and not (type(self.memory) in (int, float) and 0 < self.memory < 1e18):
            raise InvalidPlan(f"Plan(memory={self.memory!r}): expected bytes, or None")
        if self.zero is not None and not (type(self.zero) is int and self.zero in range(4)):
            raise InvalidPlan(f"Plan(zero={self.zero!r}): expected 0, 1, 2, 3 or None")
        if isinstance(self.expert_axis, (tuple, list)) and len(set(self.expert_axis)) < len(self.expert_axis):
            raise InvalidPlan(f"Plan(expert_axis={self.expert_axis!r}): names an axis twice")
        levels = self.topology_levels
        if not isinstance(levels, (tuple, list)) or not all(map(_is_size, levels)):
            raise InvalidPlan(f"Plan(topology_levels={levels!r}): expected numbers of ranks, (32, 512) for example")
        object.__setattr__(self, "topology_levels", tuple(levels))
        if self.layout is not None:
            object.__setattr__(self, "layout", _parse_layout(self.layout))
        if isinstance(self.disable, str):
            raise InvalidPlan(
                f"Plan(disable={self.disable!r}): expected names of passes in a tuple, ({self.disable!r},)"
            )
        if not isinstance(self.disable, (tuple, list, set, frozenset)):
            raise InvalidPlan(f"Plan(disable={self.disable!r}): expected names of passes in a tuple")
        is_ordered = isinstance(self.disable, (tuple, list))
        names = self.disable if is_ordered else sorted(self.disable, key=str)  # ranks compare their plans
        object.__setattr__(self, "disable", tuple(names))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the plan that `to_json` wrote.

        Raises:
            InvalidPlan: no JSON object, or an object with unknown fields.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidPlan(f"a plan is a JSON object: {error}") from error
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known)) if isinstance(fields, dict) else [repr(fields)]
        if unknown:
            raise InvalidPlan(f"a plan has no field {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**fields)

    @property
    def is_undecided(self) -> bool:
        """Whether the planner decides a field."""
        return "auto" in (self.checkpoint, self.expert_axis)

    @property
    def may_gather(self) -> bool:
        """Whether the experts of a rank may get the tokens of all ranks: no counts of rows are exchanged."""
        return self.dispatch in ("gather", "pull", "auto")

    def resolve_stash_factor(self, num_ranks: int) -> float | None:
        """Return `stash_factor` for this number of ranks of the experts. `"auto"` copies rows into a stash where the
        worst case is more than twice the mean."""
        if self.stash_factor == "auto":
            return 1.1 if num_ranks > 2 else None
        return self.stash_factor

    def replace(self, **changes: Any) -> Plan:
        return dataclasses.replace(self, **changes)


def _parse_layout(layout: Any) -> tuple[tuple[str, int], ...]:
    try:
        pairs = tuple((name, size) for name, size in (layout.items() if isinstance(layout, dict) else layout))
    except (TypeError, ValueError):
        pairs = ((layout, None),)
    if not all(isinstance(name, str) and type(size) is int for name, size in pairs):
        raise InvalidPlan(f"Plan(layout={layout!r}): expected sizes by name, {{'pp': 2, 'ep': 8}} for example, or None")
    for name, size in pairs:
        if name not in _LAYOUT_SIZES:
            raise InvalidPlan(f"Plan(layout={layout!r}): no size {name!r}; there is {', '.join(_LAYOUT_SIZES)}")
        if size not in _LAYOUT_SIZES[name]:
            largest = _LAYOUT_SIZES[name].stop - 1
            expected = f"{_LAYOUT_SIZES[name].start}" + (" or more" if largest >= _UNBOUNDED else f" to {largest}")
            raise InvalidPlan(f"Plan(layout={layout!r}): {name}={size}, expected {expected}")
    if len(dict(pairs)) < len(pairs):
        raise InvalidPlan(f"Plan(layout={layout!r}): names a size twice")
    return pairs


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
