"""Block of three experts with one matrix each, and the results of lifting its captures."""

from __future__ import annotations

import torch
from torch import fx, nn

from moefx.capture.concolic import capture_block
from moefx.capture.tracing.capture_result import Capture
from moefx.capture.tracing.concrete_routing import Routing
from moefx.ir.node_values import get_op_name
from moefx.matching.lift.canonical_form import CanonicalForm
from moefx.matching.lift.lift_options import LiftOptions
from moefx.matching.lift.lifter import Lifter
from moefx.matching.lift.parameter_uses import ParameterUses

D, E, K, TOKENS = 4, 3, 2, 6
EXPERTS = {f"experts.{e}.weight" for e in range(E)}


class Small(nn.Module):
    def __init__(self, k: int = K):
        super().__init__()
        self.router, self.k = nn.Linear(D, E, bias=False), k
        self.experts = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(E))

    def choose(self, x):
        return self.router(x).softmax(-1).topk(self.k)

    def mix(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * weights[t, k, None])
        return out

    def forward(self, x):
        return self.mix(x, *self.choose(x))


def capture(block: nn.Module, *inputs: torch.Tensor, tokens: int = TOKENS) -> Capture:
    return capture_block(block, (torch.zeros(tokens, D, device="meta"), *inputs), {}, Routing("diverse", 0))


def find_uses(block: nn.Module, *inputs: torch.Tensor, tokens: int = TOKENS) -> ParameterUses:
    return ParameterUses(block, capture(block, *inputs, tokens=tokens))


def lift(block: nn.Module, *inputs: torch.Tensor, tokens: int = TOKENS) -> CanonicalForm:
    return Lifter(block, capture(block, *inputs, tokens=tokens), None, LiftOptions()).lift()


def find_nodes(captured: Capture, name: str) -> list[fx.Node]:
    return [n for n in captured.nodes if get_op_name(n) == name]
