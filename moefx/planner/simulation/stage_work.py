"""What a stage does with a micro-batch, by the formulas of its own layers; and which ranks wait for each other.

The formulas of `planner.step` are of one stage, with the most layers and the logits, that stands for all. Here layers
are spread as evenly as can be, the first stages having one more where they do not divide, those with experts evenly
among them, the logits on the last stage alone; and gradients go around rings that `network.ring` lays.
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
class Experts:
    """Seconds of the experts of a rank and layer: `fixed` + `by_rows` * (its choices over the mean of all ranks)."""

    fixed: float
    by_rows: float

    def seconds(self, load: Tensor) -> Tensor:
        return self.fixed + self.by_rows * load

    def __add__(self, other: Experts) -> Experts:
        return Experts(self.fixed + other.fixed, self.by_rows + other.by_rows)

    def times(self, factor: float) -> Experts:
        return Experts(self.fixed * factor, self.by_rows * factor)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward or a backward of a stage and micro-batch, in seconds, but for exchanges of rows.

    Attributes:
        dense: compute of all but routed experts. tensor: exchanges of its tensor ranks. parameters: of ZeRO-3.
        experts: of one layer.
    """

    dense: float
    tensor: float
    parameters: float
    experts: Experts


@dataclasses.dataclass(frozen=True)
class Stage:
    """Attributes:
    moe_layers: how many of its layers have experts.
    weights: the part of `backward` that makes gradients of weights.
    again: how often its forward runs again.
    transfer: seconds to the next stage, of a micro-batch. gradients, optimizer: seconds, once a step.
    """

    moe_layers: int
    forward: Pass
    backward: Pass
    weights: Pass
    again: int
    transfer: float
    gradients: float
    optimizer: float


def build_stages(model: Architecture, layout: Layout, platform: Platform, experts_first: bool) -> list[Stage]:
    """All of them, the first one first.

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
    formulas, found = find_step_sheet(layout, platform, experts_first), []
    for i in range(layout.pp):
        (every, with_experts), is_last = layout.layers_of(model, i), i == layout.pp - 1
        own = values | {
            "L": every, "L_moe": with_experts, "l_t": every, "l_t_moe": with_experts, "h_t": int(is_last),
            "n_logits": values["n_logits"] if is_last else 0,
            "n_emb": values["n_emb"] if i == 0 or is_last else 0, "n_p2p": 1,
        }  # fmt: skip
        one, two = (formulas(**own | {"skew": skew}) for skew in (1.0, 2.0))
        found.append(_stage(with_experts, own, one, two, layout.pp > 1))
    return found


def _stage(
    moe_layers: int, values: dict[str, float], one: dict[str, float], two: dict[str, float], sends: bool
) -> Stage:
    """From results for a rank with the mean of choices and for one with twice as many."""

    def experts(name: str) -> Experts:
        by_rows = two[name] - one[name]
        return Experts(one[name] - by_rows, by_rows)

    layers = one["l"]
    dense = layers * one["T_attention"] + moe_layers * one["T_rest"] + (layers - moe_layers) * one["T_ffn"]
    dense += one["T_logits"]
    scores = layers * one["F_scores"] / (values["peak"] * values["e_attn"])  # have no weights
    forward, step = experts("T_experts"), experts("T_experts_step")
    again = values["n_again"] + values["n_up"] * (values["n_mat"] - 1) / values["n_mat"]
    tensor, parameters = (one["T_tp"] + one["T_gather"]) / (2 + values["n_again"]), one["T_params"] / 2
    return Stage(
        moe_layers=moe_layers,
        forward=Pass(dense, tensor, parameters, forward),
        backward=Pass(
            (one["n_pass"] - 1) * dense, (1 + values["n_again"]) * tensor, parameters, step + forward.times(again - 1)
        ),
        again=int(values["n_again"]),
        weights=Pass(dense - scores, 0.0, 0.0, step + forward.times(-2)),
        transfer=one["T_p2p"] if sends else 0.0,
        gradients=one["T_grads"],
        optimizer=one["T_optimizer"],
    )  # fmt: skip


def list_expert_groups(layout: Layout, experts_first: bool) -> tuple[Tensor, Tensor]:
    """Ranks of a stage, numbered from 0, whose experts are one set; and which of these groups wait for each other.

    Returns:
        int64 [G, EP]; int64 [G], numbers of pipelines: groups that share tensor ranks go on together.
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
