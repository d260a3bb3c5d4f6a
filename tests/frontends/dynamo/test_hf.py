"""transformers with `experts_implementation="grouped_mm"`."""

from __future__ import annotations

import copy

import pytest
import torch

import moefx
from moefx.frontends.dynamo import backend, registry

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.hf


def test_grouped_mm():
    """Rewrite all layers with the routing rules of the model by one proof. Logits and gradients equal the original."""
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=0, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend.backend, options={"backend": "aot_eager", "validation": "symbolic"})
    for shape in ((2, 9), (3, 7)):  # the second graph has symbolic sizes
        ids = torch.randint(0, 64, shape)
        losses = [m(input_ids=ids, labels=ids, use_cache=False).loss for m in (compiled, reference)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-4)
    assert [b.name for b in moefx.blocks(compiled)] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert len(registry.COMPILED_GRAPHS) == 2 and not moefx.explain(compiled).refused
