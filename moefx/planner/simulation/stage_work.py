"""The work of each stage on a micro-batch, by the formulas of its own layers, and the groups that wait for each other.

`step_formulas` let the longest stage stand for all. Here each stage has its own layers: they are spread evenly, the
first stages have one more if they do not divide, and the last stage has the logits. Gradients travel in the rings of
`network.estimate_ring`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..architecture import Architecture
from ..layout import Layout
from ..platforms import Platform
from ..step_formulas import collect_values, find_step_sheet
from .network import estimate_ring


@dataclasses.dataclass(frozen=True)
class ExpertSeconds:
    """Seconds of a rank's experts in a layer: `fixed` + `by_rows` * (its routed rows over the mean of all ranks)."""

    fixed: float
    by_rows: float

    def seconds(self, load: Tensor) -> Tensor:
        return self.fixed + self.by_rows * load

    def __add__(self, other: ExpertSeconds) -> ExpertSeconds:
        return ExpertSeconds(self.fixed + other.fixed, self.by_rows + other.by_rows)

    def times(self, factor: float) -> ExpertSeconds:
        return ExpertSeconds(self.fixed * factor, self.by_rows * factor)


@dataclasses.dataclass(frozen=True)
class PassSeconds:
    """Seconds of a forward or backward of a micro-batch on a stage, without exchanges of rows.

    Attributes:
        dense: compute outside of routed experts.
        tensor: exchanges of the tensor ranks.
        parameters: gathers of ZeRO-3.
        experts: routed experts of one layer.
    """

    dense: float
    tensor: float
    parameters: float
    experts: ExpertSeconds


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The work of a stage.

    Attributes:
        moe_layers: number of its layers with experts.
        weights: the part of `backward` for gradients of weights.
        again: how often its forward runs again.
        transfer: seconds of a micro-batch's transfer to the next stage.
        gradients, optimizer: seconds, once a step.
    """

    moe_layers: int
    forward: PassSeconds
    backward: PassSeconds
    weights: PassSeconds
    again: int
    transfer: float
    gradients: float
    optimizer: float


def build_stages(model: Architecture, layout: Layout, platform: Platform, experts_first: bool) -> list[StageWork]:
    """Build the work of all stages in their order.

    Raises:
        InvalidPlan: the layout does not fit the model.
    """
    replicas, stage_ranks = layout.expert_replicas, layout.tp * layout.dp
    values = collect_values(model, layout, platform, experts_first) | {
        "PP": 1,
        "beta_tp": estimate_ring(platform, range(layout.tp)),
        "beta_dp": estimate_ring(platform, range(0, stage_ranks, layout.tp)),
        "beta_replicas": estimate_ring(
            platform, range(0, stage_ranks, layout.ep) if experts_first else range(replicas)
        ),
    }
    formulas, stages = find_step_sheet(layout, platform, experts_first), []
    for i in range(layout.pp):
        (num_layers, with_experts), is_last = layout.count_stage_layers(model, i), i == layout.pp - 1
        stage_values = values | {
            "L": num_layers, "L_moe": with_experts, "l_t": num_layers, "l_t_moe": with_experts, "h_t": int(is_last),
            "n_logits": values["n_logits"] if is_last else 0,
            "n_emb": values["n_emb"] if i == 0 or is_last else 0, "n_p2p": 1,
        }  # fmt: skip
        at_mean, at_double = (formulas(**stage_values | {"skew": skew}) for skew in (1.0, 2.0))
        stages.append(_build_stage(with_experts, stage_values, at_mean, at_double, layout.pp > 1))
    return stages


def _build_stage(
    moe_layers: int, values: dict[str, float], at_mean: dict[str, float], at_double: dict[str, float], sends: bool
) -> StageWork:
    """Build the work of a stage.

    Args:
        at_mean, at_double: results of the formulas for a rank with the mean load, and with twice that load.
        sends: whether the pipeline has several stages.
    """

    def experts(name: str) -> ExpertSeconds:
        by_rows = at_double[name] - at_mean[name]
        return ExpertSeconds(at_mean[name] - by_rows, by_rows)

    layers = at_mean["l"]
    dense = layers * at_mean["T_attention"] + moe_layers * at_mean["T_rest"] + (layers - moe_layers) * at_mean["T_ffn"]
    dense += at_mean["T_logits"]
    scores = layers * at_mean["F_scores"] / (values["peak"] * values["e_attn"])  # have no weights
    forward, step = experts("T_experts"), experts("T_experts_step")
    num_recomputed = values["n_again"] + values["n_up"] * (values["n_mat"] - 1) / values["n_mat"]
    tensor, parameters = (at_mean["T_tp"] + at_mean["T_gather"]) / (2 + values["n_again"]), at_mean["T_params"] / 2
    return StageWork(
        moe_layers=moe_layers,
        forward=PassSeconds(dense, tensor, parameters, forward),
        backward=PassSeconds(
            (at_mean["n_pass"] - 1) * dense, (1 + values["n_again"]) * tensor, parameters,
            step + forward.times(num_recomputed - 1),
        ),
        again=int(values["n_again"]),
        weights=PassSeconds(dense - scores, 0.0, 0.0, step + forward.times(-2)),
        transfer=at_mean["T_p2p"] if sends else 0.0,
        gradients=at_mean["T_grads"],
        optimizer=at_mean["T_optimizer"],
    )  # fmt: skip


def list_expert_groups(layout: Layout, experts_first: bool) -> tuple[Tensor, Tensor]:
    """List the expert groups of a stage, and the groups that wait for each other.

    Returns:
        int64 [G, EP], the ranks of each group, numbered from 0; int64 [G], the pipeline of each group. Groups that
        share tensor ranks are in one pipeline.
    """
    ranks = torch.arange(layout.tp * layout.dp)
    groups = ranks.view(-1, layout.ep) if experts_first else ranks.view(layout.ep, -1).T
    labels = torch.arange(len(groups))
    while True:
        of_rank = torch.empty_like(ranks)
        of_rank[groups] = labels[:, None]
        together = of_rank.view(-1, layout.tp).amin(1).repeat_interleave(layout.tp)
        if (together[groups].amin(1) == labels).all():
            return groups, torch.unique(labels, return_inverse=True)[1]
        labels = together[groups].amin(1)
