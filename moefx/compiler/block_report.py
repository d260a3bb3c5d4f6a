"""Build the report of a rewritten block, which `explain` prints."""

from __future__ import annotations

import torch
from torch import nn

from ..inspection.explain import BlockReport
from ..inspection.proof_trace import ProofTrace
from ..ir.expressions.expert_body import ExpertBody, find_up_widths
from ..ir.graphs.block_graph import BlockGraph
from ..ir.node_values import get_argument
from ..runtime.program import Program
from .survey_result import MatchedBlock

_MASK = "by the program's own mask"


def build_report(matched: MatchedBlock, program: Program, block: nn.Module) -> BlockReport:
    """Build the report of a rewritten block."""
    match, graph = matched.result.match, matched.result.graph
    mlps = graph.find(torch.ops.moefx.expert_mlp.default)
    combines = graph.find(torch.ops.moefx.combine.default)
    expert = (
        "; ".join(ExpertBody.from_json(str(n.kwargs["body"])).pretty() for n in mlps)
        or "a general function of its rows"
    )
    unfused = "; ".join(str(n.meta["unfused"]) for n in combines if "unfused" in n.meta)
    drop = str(match.drop_rule or (_MASK if match.keep_masks else ""))
    if match.keep_masks and "m" in match.forms[0].expert_index.axes:
        drop += ", which leaves a token any number of experts"
    if not match.drop_rule and (
        rules := {str(n.kwargs.get("drop", "none")) for n in graph.find(torch.ops.moefx.build_pft.default)} - {"none"}
    ):
        drop = "; ".join(filter(None, (drop, f"over the plan's capacity, by {rules.pop()}")))
    return BlockReport(
        names=tuple(matched.names), kind=type(block).__name__, num_experts=match.num_experts, top_k=match.slots,
        expert=expert,
        drop=drop, holds_for=program.holds_for, routings=len(match.forms), validation=matched.verdict,
        seconds=matched.seconds,
        saved_before=None, saved_after=_count_kept_bytes(graph), unfused=unfused,
        guards=tuple(str(g) for g in match.guards),
        bodies=tuple((str(n.kwargs["body"]), find_up_widths(n)) for n in mlps),
        notes=() if matched.expert_layout is None else (str(matched.expert_layout),),
        trace=ProofTrace(match.probe_runs, attempts=matched.result.attempts),
    )  # fmt: skip


def _count_kept_bytes(graph: BlockGraph) -> int | None:
    """Count the bytes per token that the fused experts keep for the backward: X once, K rows of the policy's values."""
    total = 0
    for node in graph.find(torch.ops.moefx.expert_mlp.default):
        x, inverse = (get_argument(node, name).meta.get("val") for name in ("x", "inverse"))
        value = node.meta.get("val")
        if x is None or value is None or inverse is None:
            return None
        total += x.shape[-1] * x.element_size()
        total += sum(int(v.shape[-1]) * v.element_size() for v in value[1:]) * int(inverse.shape[-1])
    return total or None
