"""Where each expert of a block lives, the explicit map from experts to (rank, slot), and the ways there."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from ..errors import InvalidPlan


@dataclasses.dataclass(frozen=True)
class TopologyLevel:
    """Ranks of an expert axis that are alike but for one level of the topology.

    Attributes:
        axis: what this is called in print. size: W, how many ranks. group: name of their process group.
    """

    axis: str
    size: int
    group: str


@dataclasses.dataclass(frozen=True)
class ExchangeRoutes:
    """How rows get from rank to rank: in one exchange, or in one at each level (X-MoE section 4.2, Piper section V).

    Attributes:
        levels: coarse to fine. position: this rank's, as process groups number the ranks of the axis. order: of each
            position the rank's number on the axis.
        dedup: a token travels once to each rank of a level (its pilot), else once for each choice.
        near_apart: what stays in the node does not take part in the levels above (HALO's phase I).
        timeout: seconds to wait for other ranks; None: as long as the process groups allow.
        chunks: the tokens travel in so many parts, so that some are computed on while others are on their way.
        gathers: every rank gets the tokens of all ranks by an even collective (see `ir.ops.token_gather`).
        max_tokens: with `gathers`, the most tokens of a rank in a call; None: `host_group`, a process group that works
            on the CPU, agrees before each call.
    """

    levels: tuple[TopologyLevel, ...]
    position: int
    order: tuple[int, ...]
    dedup: bool
    splits_intra_node: bool = False
    timeout: float | None = None
    chunks: int = 1
    gathers: bool = False
    max_tokens: int | None = None
    host_group: str = ""

    def label(self, index: int) -> str:
        """What a level is called behind a name; "" if there is one only."""
        return self.levels[index].axis.rpartition("/")[2] if len(self.levels) > 1 else ""

    @property
    def sizes(self) -> list[int]:
        return [level.size for level in self.levels]

    def ranks_within(self, index: int) -> int:
        """How many positions there are behind each rank of a level."""
        return math.prod(self.sizes[index + 1 :])

    def position_of(self, rank: int) -> int:
        return self.order.index(rank)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The experts of a block over the ranks of one mesh axis. A value; it may be replaced when experts move.

    Attributes:
        axis: name of the mesh axis, for people.
        group: name of its process group, as ops take it.
        num_ranks: W, ranks of the axis. rank: this one's number on it.
        num_slots: experts of a rank.
        places: of each expert, rank * num_slots + slot; a permutation of 0 ... E-1.
    """

    axis: str
    group: str
    num_ranks: int
    rank: int
    num_slots: int
    places: tuple[int, ...]

    @classmethod
    def in_order(cls, num_experts: int, num_ranks: int, rank: int, *, axis: str, group: str, of: str = "") -> Placement:
        """The experts in their order, as many on each rank. `of`: the block's name, for people.

        Raises:
            InvalidPlan: they cannot be shared evenly.
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
        return len(self.places)

    @property
    def local_experts(self) -> list[int]:
        """The experts of this rank, by slot."""
        at = {place: expert for expert, place in enumerate(self.places)}
        return [at[self.rank * self.num_slots + slot] for slot in range(self.num_slots)]

    def select_local(self, full: Tensor) -> Tensor:
        """Of a tensor whose first axis holds all experts, one after the other and as long each, those of this rank."""
        return full.unflatten(0, (self.num_experts, -1))[self.local_experts].flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class SharedTokens:
    """Ranks that have the same tokens, each of which routes a part of them (X-MoE section 4.3).

    Attributes:
        axis: what this is called in print. group: name of the process group. size, rank: of it.
        gradients: of the block's output, "replicated" or "partial".
    """

    axis: str
    group: str
    size: int
    rank: int
    gradients: str
