"""Distributed models in pipelines, and models of transformers."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import moefx
from moefx.errors import InvalidPlan

from ..blocks import D
from .launch import sampled
from .models import Model, is_expert_parameter


class Half(nn.Module):
    """Stage with one layer of the model."""

    def __init__(self, model: Model, number: int):
        super().__init__()
        self.first = model.first if number == 0 else None
        self.blocks = nn.ModuleList([model.blocks[number]])

    def forward(self, x):
        if self.first is not None:
            x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


PLAN = moefx.Plan(validation="symbolic")
TOKENS = torch.zeros(9, D)


def compute_loss(out, target):
    return ((out - target) ** 2).sum()


def case_two_stages_of_two_ranks() -> None:
    """Run 1F1B with several micro-batches in flight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage, micro, size = mesh["pp"].get_local_rank(), 4, 6
    for dispatch in ("dedup", "flat"):
        model = Model("gated", layers=2)
        plan = moefx.Plan(dispatch=dispatch, expert_axis="ep", validation="symbolic")
        half = moefx.compile(Half(copy.deepcopy(model), stage), mesh=mesh, plan=plan, example_inputs=(TOKENS,))
        torch.manual_seed(mesh["ep"].get_local_rank())
        x, target = torch.randn(micro * size, D), torch.randn(micro * size, D)
        pipeline_stage = PipelineStage(half, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(pipeline_stage, micro, loss_fn=compute_loss, scale_grads=False)
        schedule.step(*([x] if stage == 0 else []), **({"target": target} if stage == 1 else {}))
        compute_loss(model(x), target).backward()
        compared = 0
        for name, p in Half(model, stage).named_parameters():
            wanted = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            if is_expert_parameter(name):
                dist.all_reduce(wanted, group=mesh.get_group("ep"))
            parameter = dict(half.named_parameters()).get(name)
            if parameter is not None:
                got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
                compared += 1
        assert compared >= 7


def case_a_pipeline_axis_without_stages() -> None:
    """Refuse to cut a model into stages: with a mesh without the axis each stage compiles its part."""
    mesh, model, example = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep")), Model("gated"), (TOKENS,)
    with torch.device("meta"):
        meta = Model("gated")
    alike = copy.deepcopy(model.blocks[0])  # two stages with the same parameters by chance
    for whole in (model, meta, alike):
        for plan in (PLAN, PLAN.replace(expert_axis="ep"), PLAN.replace(expert_axis="auto")):
            for call in (moefx.compile, moefx.explain):
                try:
                    call(copy.deepcopy(whole), mesh=mesh, plan=plan, example_inputs=example)
                except InvalidPlan as found:
                    assert "stages 0, 1 hold the same model: compile does not split a model" in str(found), found
                    assert "moefx.pipeline(model, mesh, ...) does" in str(found), found
                    assert "mesh['ep']" in str(found), found
                else:
                    raise AssertionError("was accepted")
    assert moefx.blocks(moefx.compile(alike, mesh=mesh["ep"], plan=PLAN, example_inputs=example))


def case_transformers() -> None:
    try:
        from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError:
        return
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    models = (
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)),
        (MixtralForCausalLM, MixtralConfig(**sizes, num_local_experts=4)),
    )
    for make, config in sampled(models, 2):
        torch.manual_seed(0)
        model = make(config)
        compiled = moefx.compile(copy.deepcopy(model), mesh=mesh, plan=moefx.Plan(validation="symbolic"))
        assert len(moefx.blocks(compiled)) == 2
        ids = torch.randint(64, (2, 5 + dist.get_rank()))
        report = moefx.verify(compiled, model, {"input_ids": ids, "labels": ids}, routings=False)
        assert report.ok, report
