"""The layout of a block's experts over a mesh, as the layers below `distribution` see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    from ..ir.expert_placement import ExchangeRoutes, Placement, SharedTokens
    from .ranks.sharding import ExpertParameters
    from .ranks.topology import ExpertAxis


class BlockLayout(Protocol):
    """What the package reads of an `ExpertLayout` of `distribution.block_distribution`. Its `str` says it in a line.

    Attributes:
        placement: the rank of each expert.
        routes: how rows travel.
        sequence: the ranks that share tokens, None without `Plan(sequence_axis=...)`.
        parameters: names of the experts' parameters in the block.
        number: identifies the blocks that share this layout.
    """

    @property
    def placement(self) -> Placement: ...
    @property
    def routes(self) -> ExchangeRoutes: ...
    @property
    def sequence(self) -> SharedTokens | None: ...
    @property
    def parameters(self) -> ExpertParameters: ...
    @property
    def number(self) -> int: ...

    def add_collectives(self, block: nn.Module, result: Any) -> Any:
        """Return a `BlockRewrite` whose history ends with the graph of one rank."""
        ...

    def keep_own_experts(self, block: nn.Module, axis: ExpertAxis) -> None:
        """Reduce a block's parameters to those of this rank's experts."""
        ...

    def copy_with_all_experts(self, block: nn.Module) -> nn.Module:
        """Copy a block that holds the experts of this rank, for another proof."""
        ...


__all__ = ["BlockLayout"]
