"""Layouts: how ranks share a model and its tokens, and the checkpoint policy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

from .._plan import Plan
from ..errors import InvalidPlan
from .architecture import Architecture, check_whole_numbers

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
PlannedDispatch = Literal["flat", "dedup", "rbd", "halo", "gather"]  # those of `Plan.dispatch` with a formula


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """Tensors that the experts of a layer keep for their backward.

    Attributes:
        rows: copies of each routed row. 0: rows are read by index from the tokens, or from the received rows, which
            are kept once.
        hidden: kept tensors of the hidden width: `"none"`, the `"up"`-projections, or `"all"` with the activation.
        outputs: copies of the experts' output, two bytes an element.
        capacity_factor: room of the buffers over the number of slots.
        mask_bytes: bytes of an element of the [S, E, C] masks, summed over all masks.
        source: origin of these figures.
    """

    rows: int = 0
    hidden: Literal["none", "up", "all"] = "up"
    outputs: int = 0
    capacity_factor: float = 1.0
    mask_bytes: int = 0
    source: str = "Plan(checkpoint=...)"

    def num_hidden(self, matrices: int) -> int:
        return {"none": 0, "up": matrices - 1, "all": matrices}[self.hidden]


CHECKPOINT_POLICIES = {
    "h": CheckpointPolicy(),
    "x": CheckpointPolicy(hidden="none"),
    "all": CheckpointPolicy(hidden="all"),
    "x-moe": CheckpointPolicy(rows=1, hidden="all", outputs=1, source="X-MoE table 2"),
    "tutel": CheckpointPolicy(
        rows=1, hidden="all", outputs=2, capacity_factor=1.25, source="X-MoE 5.4.1: A_combine in float32"
    ),
    # A boolean mask, its copy in half precision for `einsum`, and the weights in float32 and in half precision.
    "deepspeed-moe": CheckpointPolicy(
        rows=1, hidden="all", outputs=1, capacity_factor=1.25, mask_bytes=1 + 2 + 4 + 2,
        source="X-MoE sections 3.1 and 5.1; dispatch_mask and combine_weights of DeepSpeed's sharded_moe.py",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks, tokens and policies of a training step.

    Attributes:
        pp: pipeline stages.
        tp: ranks that share the dense matrices and have the same tokens.
        dp: ranks of a stage with tokens of their own. A layout has pp * tp * dp ranks.
        ep: ranks that share the experts of a layer; divides tp * dp.
        ssmb: whether each tp rank routes its part of the sequence (X-MoE section 4.3). Otherwise all route all tokens.
        zero: ZeRO stage: optimizer states (1), gradients (2) and parameters (3) are spread over replicas.
        dispatch: how rows travel between the ranks of `ep`.
        kept: the experts' checkpoint policy, a key of `CHECKPOINT_POLICIES`.
        recompute: whether layers keep only their input and run again in the backward.
        sequences: sequences of a micro-batch on a rank.
        tokens: tokens of a sequence (Piper's s).
        microbatches: micro-batches of a rank in a step (M).
        schedule: pipeline schedule.
        chunks: chunks of a stage in the interleaved schedule.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    ep: int = 1
    ssmb: bool = False
    zero: int = 1
    dispatch: PlannedDispatch = "dedup"
    kept: str = "h"
    recompute: bool = False
    sequences: int = 1
    tokens: int = 4096
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    chunks: int = 1

    def __post_init__(self) -> None:
        sizes = ("pp", "tp", "dp", "ep", "sequences", "tokens", "microbatches", "chunks")
        check_whole_numbers(InvalidPlan, **{name: getattr(self, name) for name in sizes})
        if (self.tp * self.dp) % self.ep:
            stage = f"tp * dp = {self.tp} * {self.dp} = {self.tp * self.dp}, the ranks of a stage"
            raise InvalidPlan(f"ep={self.ep} does not divide {stage}")
        for name, choices in (
            ("dispatch", get_args(PlannedDispatch)),
            ("schedule", get_args(Schedule)),
            ("kept", CHECKPOINT_POLICIES),
        ):
            if getattr(self, name) not in choices:
                raise InvalidPlan(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}")
        if self.zero not in range(4):
            raise InvalidPlan(f"zero is {self.zero!r}, expected 0, 1, 2 or 3")

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that have the same experts."""
        return self.tp * self.dp // self.ep

    def in_flight(self, stage: int) -> float:
        """Count the micro-batches whose activations a stage (from 0) keeps at its peak, in units of a whole stage.

        GPipe: all (Piper eq. 3). 1F1B: one for each stage behind it (eq. 4). Interleaved: Megatron-LM's warm-up (arXiv
        2104.04473 section 2.2), in chunks of a stage. Zero bubble (arXiv 2401.10241 section 2): under H1 every stage
        keeps as many as 1F1B's first stage, under H2 twice as many less one.
        """
        behind, most = self.pp - stage, self.microbatches
        if self.schedule == "gpipe":
            return most
        if self.schedule == "interleaved":
            warm_up = 2 * (behind - 1) + (self.chunks - 1) * self.pp + 1
            return min(warm_up, most * self.chunks) / self.chunks
        return min({"1f1b": behind, "zb-h1": self.pp, "zb-h2": 2 * self.pp - 1}[self.schedule], most)

    def count_stage_layers(self, model: Architecture, stage: int) -> tuple[int, int]:
        """Count (layers, layers with experts) of a stage (from 0).

        Layers are split evenly. If they do not divide, the first stages have one more.
        """
        per_stage, remainder = divmod(model.num_layers, self.pp)
        begin, end = (i * per_stage + min(i, remainder) for i in (stage, stage + 1))
        begins, ends = (i * model.num_moe_layers // model.num_layers for i in (begin, end))
        return end - begin, ends - begins

    def transfers(self) -> float:
        """Number of transfers between neighbouring stages that a stage waits for in a step.

        Most transfers overlap with computing; the count follows from the schedule's events (see `planner.simulation`).
        """
        if self.pp == 1:
            return 0.0
        if self.schedule == "interleaved":
            return 2.0 * (self.pp * self.chunks - 1)
        if self.schedule == "gpipe":
            return 2.0 * (self.pp - 1)
        return 2.0 * max(self.microbatches, self.pp) * (self.pp - 1) / self.pp

    def spread(self, zero: int) -> dict[str, float]:
        """Return the symbols for the number of ranks that a ZeRO stage spreads parameters, gradients and optimizer
        states over."""
        replicas = self.expert_replicas
        return {
            "z_p": self.dp if zero > 2 else 1, "z_g": self.dp if zero > 1 else 1, "z_o": self.dp if zero > 0 else 1,
            "y_p": replicas if zero > 2 else 1, "y_g": replicas if zero > 1 else 1, "y_o": replicas if zero > 0 else 1,
        }  # fmt: skip

    def values(self, model: Architecture, stage: int = 0) -> dict[str, float]:
        """Return the symbols' values for `memory_formulas` at a stage.

        Raises:
            InvalidPlan: `ep` does not divide the experts, or there are more stages than layers (Piper eq. 8 and 9).
        """
        if model.num_experts % self.ep:
            raise InvalidPlan(f"ep={self.ep} does not divide the {model.num_experts} experts of {model.name}")
        if self.pp > model.num_layers:
            raise InvalidPlan(f"pp={self.pp} stages, but {model.name} has {model.num_layers} layers")
        policy, gathers = CHECKPOINT_POLICIES[self.kept], self.dispatch == "gather"
        room = Plan().resolve_stash_factor(self.ep)
        return _collect_model_values(model) | self.spread(self.zero) | {
            "PP": self.pp, "TP": self.tp, "EP": self.ep, "G": self.tp if self.ssmb else 1,
            "b": self.sequences, "s": self.tokens, "m": self.in_flight(stage),
            "n_emb": 1 if self.pp > 1 or model.is_tied else 2,
            "n_logits": int(stage == self.pp - 1 and model.vocab_size > 0),
            "n_rows": policy.rows, "n_h": policy.num_hidden(model.matrices), "n_y": policy.outputs,
            "c": policy.capacity_factor * (min(room or self.ep, self.ep) if gathers else 1),
            "w_mask": policy.mask_bytes, "n_flat": int(self.dispatch == "flat" and self.ep > 1), "n_all": int(gathers),
            "n_again": int(self.recompute),
        }  # fmt: skip


@functools.lru_cache(maxsize=64)
def _collect_model_values(model: Architecture) -> dict[str, float]:
    a, d = model.attention, model.hidden_size
    return {
        "d": d, "L": model.num_layers, "L_moe": model.num_moe_layers, "E": model.num_experts, "k": model.top_k,
        "F": model.expert_size, "F_shared": model.shared_size, "F_dense": model.dense_size, "n_mat": model.matrices,
        "V": model.vocab_size, "H": a.num_heads, "n_attn": int(a.num_heads > 0),
        "n_shared": int(model.shared_size > 0),
        "N_attn": a.parameters(d) + model.norms * d,
        "N_expert": model.expert_parameters(), "N_rest": model.shared_parameters(), "N_ffn": model.dense_parameters(),
        "w_attn": a.query_width + a.kv_width + a.out_width, "w_latent": a.query_rank + a.kv_rank + a.rope_size,
        "w_scores": a.query_width + a.out_width, "N_other": model.num_other,
        "w_point": model.pointwise_bytes,
    }  # fmt: skip
