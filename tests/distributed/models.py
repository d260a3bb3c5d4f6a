"""Models for the cases, and their comparison with the plain model on each rank's tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import moefx

from ..blocks import D, E, Gated, Loop, Mlp, Stacked

VOCAB = 32  # of `build_causal_model`


def run_mlp(self, x):
    return torch.relu(x @ self.up) @ self.down


def run_gated_mlp(self, x):
    gate, up = (x @ self.gate_up).chunk(2, -1)
    return (torch.sigmoid(gate) * up) @ self.down.mT


class Picky(Loop):
    """Divide by a value of each slot and by its weight, so that missing rows give NaN."""

    def forward(self, x):
        scores = self.gate(x)
        w, ids = scores.softmax(-1).topk(self.k, -1)
        v, spread, out = scores.gather(1, ids).exp(), scores.std(), torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y = torch.tanh(self.experts[e](x[t]) / v[t, k, None] / spread)
            out = out.index_add(0, t, y * w[t, k, None].sqrt())
        return out


class Kinds(Loop):
    """Experts followed by another kind of module and by two identities, which all ranks keep."""

    def __init__(self, num_experts=E):
        super().__init__(Gated, k=3, num_experts=num_experts)
        self.gate, self.other = nn.Linear(D, num_experts + 3, bias=False), Mlp()

    def forward(self, x):
        w, ids = self.route(x)
        out, number = torch.zeros_like(x), len(self.experts)
        for e in range(number):
            t, k = torch.where(ids == e)
            if len(t):  # otherwise its parameters have no gradient
                out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        t, k = torch.where(ids == number)
        out = out.index_add(0, t, self.other(x[t]) * w[t, k, None])
        return out + x * (w * (ids > number)).sum(-1, keepdim=True)


class Numbered(Loop):
    """Two numbers per expert, one of them in a tensor with those of all experts."""

    def __init__(self, num_experts=E):
        super().__init__(Gated, num_experts=num_experts)
        self.experts_scale = nn.Parameter(torch.rand(num_experts))
        for expert in self.experts:
            expert.slope = nn.Parameter(torch.rand(1))

    def expert(self, e, x, w):
        y = self.experts[e](x)
        return torch.tanh(y * torch.exp(self.experts[e].slope)) * self.experts_scale[e] * w


class Flat(Loop):
    """Concatenate the experts' matrices along one axis, as DBRX does."""

    def __init__(self, num_experts=E):
        super().__init__(num_experts=num_experts)
        self.experts, self.num_experts = None, num_experts
        self.up, self.down = (nn.Parameter(torch.randn(num_experts * 8, D) / 3) for _ in range(2))

    def forward(self, x):
        (w, ids), out = self.route(x), torch.zeros_like(x)
        up, down = (p.view(self.num_experts, 8, D) for p in (self.up, self.down))
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, torch.relu(x[t] @ up[e].T) @ down[e] * w[t, k, None])
        return out


BLOCKS = {
    "numbered": Numbered,
    "flat": Flat,
    "kinds": Kinds,
    "picky": lambda n=E: Picky(num_experts=n),
    "gated": lambda n=E: Loop(Gated, num_experts=n),
    "biased": lambda n=E: Loop(Mlp, num_experts=n),
    "every expert": lambda n=E: Loop(Gated, k=n, num_experts=n),
    "stacked": lambda n=E: Stacked(run_mlp, num_experts=n, up=(D, 8), down=(8, D)),
    "joined": lambda n=E: Stacked(run_gated_mlp, num_experts=n, gate_up=(D, 16), down=(D, 8)),
}


class Model(nn.Module):
    """Layers of a block, with equal parameters on every rank."""

    def __init__(self, kind: str, layers: int = 2, num_experts: int = E):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(BLOCKS[kind](num_experts) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def is_expert_parameter(name: str) -> bool:
    return "experts" in name or name.endswith(("up", "down"))


def compile_over_mesh(model: nn.Module, mesh: DeviceMesh, plan: moefx.Plan) -> nn.Module:
    inputs = (torch.zeros(9, D, dtype=next(model.parameters()).dtype, device=mesh.device_type),)
    compiled = moefx.compile(copy.deepcopy(model), mesh=mesh, plan=plan, example_inputs=inputs)
    assert moefx.blocks(compiled)
    return compiled


def check(model: nn.Module, mesh: DeviceMesh, plan: moefx.Plan, x: Tensor | None = None) -> nn.Module:
    """Compare outputs and gradients with the plain model on this rank's tokens.

    Gradients of experts are sums over the ranks of the expert axis.
    """
    compiled = compile_over_mesh(model, mesh, plan)
    axis = plan.expert_axis or "ep"
    if x is None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(7 + dist.get_rank(), D, dtype=torch.float64, generator=generator)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, want = compiled(inputs[0]), model(inputs[1])
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(want)
    (want * grad).sum().backward()
    (out * grad).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-10)
    compiled_parameters, seen = dict(compiled.named_parameters()), set()
    for name, parameter in model.named_parameters():  # all ranks in the same order
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if is_expert_parameter(name):
            dist.all_reduce(wanted, group=mesh.get_group(axis))
        if (compiled_parameter := compiled_parameters.get(name)) is None:
            continue
        seen.add(name)
        got = compiled_parameter.grad
        if isinstance(compiled_parameter, DTensor):
            assert compiled_parameter.shape == parameter.shape
            slots = compiled_parameter.to_local().shape[0]
            first = mesh[axis].get_coordinate()[0] * slots
            wanted = wanted[first : first + slots]
            got = torch.zeros_like(wanted) if got is None else got.to_local()
        got = torch.zeros_like(wanted) if got is None else got
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    assert seen == set(compiled_parameters)
    assert all(block.fallbacks == 0 for block in moefx.blocks(compiled))
    return compiled


def build_causal_model(layers: int = 2, **options: Any) -> Any:
    """Build a small causal model of transformers, in float64."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8,
             "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, **options)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
