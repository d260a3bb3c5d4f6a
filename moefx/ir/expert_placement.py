"""The placement of a block's experts on ranks, and the exchanges that bring rows there."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from ..errors import InvalidPlan


@dataclasses.dataclass(frozen=True)
class TopologyLevel:
    """The ranks of an expert axis that differ at one level of the topology only.

    Attributes:
        axis: printed name. size: W, the number of ranks. group: name of their process group.
    """

    axis: str
    size: int
    group: str


@dataclasses.dataclass(frozen=True)
class ExchangeRoutes:
    """The exchanges that bring rows to ranks: a single one, or one at each level (X-MoE section 4.2, Piper section V).

    Attributes:
        levels: coarse to fine. position: of this rank. order: the rank of each position.
        dedup: a token travels once to each rank of a level (as its pilot), otherwise once for each slot.
        splits_intra_node: rows that stay in the node skip the upper levels (HALO's phase I).
        timeout: seconds to wait for other ranks; None for the limit of the process groups.
        chunks: number of parts in which the tokens travel, so that computation overlaps with exchanges.
        gathers: every rank gets the tokens of all ranks by an even collective (see `ir.ops.token_gather`).
        pulls: with `gathers`, every rank reads the tokens that it needs from the memory of the other ranks instead
            (see `ir.ops.peer_rows`).
        max_tokens: with `gathers`, the most tokens of a rank in a call. If None, the ranks agree before each call over
            `host_group`, a process group that works on the CPU.
        stash_layers: with `gathers`, the room of all layers' stash (see `ir.activation_stash`), in rows that this
            rank's experts get in one balanced layer. If None, each layer keeps all rows in tensors of its own.
    """

    levels: tuple[TopologyLevel, ...]
    position: int
    order: tuple[int, ...]
    dedup: bool
    splits_intra_node: bool = False
    timeout: float | None = None
    chunks: int = 1
    gathers: bool = False
    pulls: bool = False
    max_tokens: int | None = None
    host_group: str = ""
    stash_layers: float | None = None

    def label(self, index: int) -> str:
        """Return the suffix of a level in node names; "" if there is only one level."""
        return self.levels[index].axis.rpartition("/")[2] if len(self.levels) > 1 else ""

    @property
    def sizes(self) -> list[int]:
        return [level.size for level in self.levels]

    def ranks_within(self, index: int) -> int:
        """Return the number of positions below each rank of a level."""
        return math.prod(self.sizes[index + 1 :])

    def position_of(self, rank: int) -> int:
        return self.order.index(rank)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The map from a block's experts to ranks of a mesh axis, and to local ids. Immutable.

    Attributes:
        axis: printed name of the mesh axis.
        group: name of its process group, as ops take it.
        num_ranks: W, ranks of the axis. rank: this rank's number on the axis.
        experts_per_rank: the same on all ranks.
        physical_ids: rank * experts_per_rank + local id of each expert; a permutation of 0 ... E-1.
    """

    axis: str
    group: str
    num_ranks: int
    rank: int
    experts_per_rank: int
    physical_ids: tuple[int, ...]

    @classmethod
    def in_order(cls, num_experts: int, num_ranks: int, rank: int, *, axis: str, group: str, of: str = "") -> Placement:
        """Place the experts in order, the same number on each rank. `of`: the block's name for error messages.

        Raises:
            InvalidPlan: the number of ranks does not divide the number of experts.
        """
        if num_experts % num_ranks:
            fits = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise InvalidPlan(
                f"the {num_experts} experts of {of or 'the model'} cannot be shared evenly by the {num_ranks} ranks of "
                f"mesh axis {axis!r}; sizes that fit: {', '.join(map(str, fits))}"
            )
        return cls(axis, group, num_ranks, rank, num_experts // num_ranks, tuple(range(num_experts)))

    @property
    def num_experts(self) -> int:
        return len(self.physical_ids)

    @property
    def local_experts(self) -> list[int]:
        """The ids of this rank's experts, by local id."""
        expert_by_physical_id = {physical_id: expert for expert, physical_id in enumerate(self.physical_ids)}
        first = self.rank * self.experts_per_rank
        return [expert_by_physical_id[physical_id] for physical_id in range(first, first + self.experts_per_rank)]

    def select_local(self, full: Tensor) -> Tensor:
        """Select this rank's experts from a tensor whose first axis holds all experts in equal parts."""
        return full.unflatten(0, (self.num_experts, -1))[self.local_experts].flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class SharedTokens:
    """Ranks that hold the same tokens, and route a part of them each (X-MoE section 4.3).

    Attributes:
        axis: printed name. group: name of the process group. size, rank: the group's size and this rank's number.
        gradients: "replicated" or "partial", for the gradient of the block's output.
    """

    axis: str
    group: str
    size: int
    rank: int
    gradients: str
