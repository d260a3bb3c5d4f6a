"""The layout of a block's experts over a mesh: where each expert is, and how rows travel to it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from ...errors import MoefxError
from ...ir.expert_placement import ExchangeRoutes, Placement, SharedTokens
from .sharding import ExpertParameters


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The layout, over the expert axis of a mesh, of blocks that share a proof. Its `str` describes it in one line.

    Attributes:
        placement: the rank of each expert.
        routes: how rows travel.
        reason: why `routes` was chosen.
        sequence: the ranks that share tokens; None without `Plan(sequence_axis=...)`.
        parameters: names of the experts' parameters in the block.
        number: identifies the blocks that share this layout, see `ir.ops.parameter_samples`.
    """

    placement: Placement
    routes: ExchangeRoutes
    reason: str
    sequence: SharedTokens | None
    parameters: ExpertParameters
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__, compare=False)

    def __str__(self) -> str:
        placement, levels = self.placement, " x ".join(map(str, self.routes.sizes))
        way = "halo" if self.routes.splits_intra_node else "rbd" if len(self.routes.levels) > 1 else "one exchange"
        rows = "one row for each of its " + ("ranks" if self.routes.dedup else "experts")
        parts = f", in {self.routes.chunks} parts" if self.routes.chunks > 1 else ""
        if self.routes.gathers:
            limit = self.routes.max_tokens
            how = "pulls the tokens of its experts" if self.routes.pulls else "gathers the tokens of all ranks"
            agreement = f"at most {limit} tokens a rank" if limit else "the hosts agree on the number of tokens"
            kept = self.routes.stash_layers
            stash = "" if kept is None else f"; a stash keeps activations of {kept:g} balanced layers for the backward"
            return (
                f"experts over {placement.num_ranks} ranks of mesh axis {placement.axis!r}, "
                f"{placement.experts_per_rank} each; every rank {how}, {agreement} "
                f"({self.reason}){stash}"
            )
        return (
            f"experts over {placement.num_ranks} ranks of mesh axis {placement.axis!r} ({levels}), "
            f"{placement.experts_per_rank} each; a token travels as {rows}, {way}{parts} ({self.reason})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLayout:
        return self  # a value

    def __reduce__(self) -> Any:
        # In another process the names of process groups are unknown, or mean other groups.
        raise MoefxError(
            "a model that is spread over a mesh cannot be pickled: its programs run in process groups of these "
            "processes. Save moefx.full_state_dict(model), or its state dict with torch.distributed.checkpoint, and "
            "load that into a model that moefx.compile has spread anew"
        )
