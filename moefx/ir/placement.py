"""Where each expert of a block lives: the explicit map from experts to (rank, slot)."""

from __future__ import annotations

import dataclasses

from ..errors import InvalidPlan


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
    def in_order(cls, num_experts: int, num_ranks: int, rank: int, *, axis: str, group: str) -> Placement:
        """The experts in their order, as many on each rank.

        Raises:
            InvalidPlan: they cannot be shared evenly.
        """
        if num_experts % num_ranks:
            fits = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise InvalidPlan(
                f"{num_experts} experts cannot be shared evenly by the {num_ranks} ranks of mesh axis {axis!r}; "
                f"sizes that fit: {', '.join(map(str, fits))}"
            )
        return cls(axis, group, num_ranks, rank, num_experts // num_ranks, tuple(range(num_experts)))

    @property
    def num_experts(self) -> int:
        return len(self.places)

    @property
    def own(self) -> list[int]:
        """The experts of this rank, by slot."""
        at = {place: expert for expert, place in enumerate(self.places)}
        return [at[self.rank * self.num_slots + slot] for slot in range(self.num_slots)]
