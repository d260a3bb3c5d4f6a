"""Shipped models have the published numbers of parameters."""

from __future__ import annotations

import pytest
import torch

from moefx.errors import UnknownArchitecture
from moefx.planner.architecture import Architecture, Attention
from moefx.planner.catalogue import MODELS, find_model

RELEASED = [model for model in MODELS.values() if not model.name.startswith("x-moe")]
# Published active parameters of other definitions, with their formulas.
OTHERWISE = {
    "gpt-oss-20b": lambda m: m.parameters(m.top_k) - m.vocab_size * m.hidden_size,  # without the embedding
    "gpt-oss-120b": lambda m: m.parameters(m.top_k) - m.vocab_size * m.hidden_size,
    "deepseek-v3.2": lambda m: m.parameters(m.top_k) - m.num_layers * m.attention.num_extra,  # those of V3
}


@pytest.mark.parametrize("model", RELEASED, ids=lambda m: m.name)
def test_parameters_equal_the_published_totals(model):
    total, active = model.published
    assert model.parameters() == pytest.approx(total, rel=0.02)
    found = OTHERWISE.get(model.name, lambda m: m.parameters(m.top_k))(model)
    assert found == pytest.approx(active, rel=0.02)
    assert model.source


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("x-moe-small", 10.1, 1.3),
        ("x-moe-medium", 55.2, 5.2),
        ("x-moe-large", 201.4, 11.5),
        ("x-moe-super", 545.4, 28.4),  # the table has 28.7: 1.2 % more than its own sizes give
    ],
)
def test_x_moe_table_3(name, total, active):
    """Match the table exactly in its convention: two matrices, experts in every layer, "B" = 2^30, no routers."""
    model = find_model(name)
    routers = model.num_layers * model.hidden_size * model.num_experts
    assert round((model.parameters() - routers) / 2**30, 1) == total
    assert round((model.parameters(model.top_k) - routers) / 2**30, 1) == pytest.approx(active, abs=0.051)


@pytest.mark.parametrize(
    ("name", "total"), [("x-moe-small", 14.9), ("x-moe-medium", 81.5), ("x-moe-large", 299.4), ("x-moe-super", 812.3)]
)
def test_x_moe_table_3_with_gates(name, total):
    """Show that SwiGLU experts would have half as many parameters more than the table counts."""
    model = find_model(name)
    routers = model.num_layers * model.hidden_size * model.num_experts
    assert round((model.replace(matrices=3).parameters() - routers) / 2**30, 1) == total


def test_a_trillion_by_experts():
    """Match 1.7 T on 1024 GPUs of Piper section VII.D with experts of two matrices; three give 2.58 T."""
    m10b = Architecture(
        name="m10b", hidden_size=5120, num_layers=32, num_moe_layers=32,
        attention=Attention(num_heads=40, num_kv_heads=40, head_size=128), num_experts=256, top_k=2,
        expert_size=20480, matrices=2, norms=0,
    )  # fmt: skip
    assert m10b.parameters() == pytest.approx(1.72e12, rel=0.005)
    assert m10b.replace(num_experts=128).parameters() == pytest.approx(862e9, rel=0.005)
    assert m10b.replace(matrices=3).parameters() == pytest.approx(2.58e12, rel=0.005)


# Sizes of the catalogue as configurations of transformers, with fewer layers and a small vocabulary, to count the
# parameters of the modules.
def _configure_deepseek(m):
    a = m.attention
    return dict(
        q_lora_rank=a.query_rank, kv_lora_rank=a.kv_rank, qk_rope_head_dim=a.rope_size,
        qk_nope_head_dim=a.head_size - a.rope_size, v_head_dim=a.value_size, n_routed_experts=m.num_experts,
        n_shared_experts=m.shared_size // m.expert_size, moe_intermediate_size=m.expert_size,
        intermediate_size=m.dense_size, first_k_dense_replace=1,
    )  # fmt: skip


CLASSES = {
    "deepseek-v2": ("DeepseekV2", _configure_deepseek),
    "deepseek-v3": ("DeepseekV3", _configure_deepseek),
    "mixtral-8x7b": ("Mixtral", lambda m: dict(intermediate_size=m.expert_size, num_local_experts=m.num_experts)),
    "qwen3-30b-a3b": ("Qwen3Moe", lambda m: dict(moe_intermediate_size=m.expert_size, num_experts=m.num_experts)),
    "olmoe-1b-7b": ("Olmoe", lambda m: dict(intermediate_size=m.expert_size, num_experts=m.num_experts)),
    "gpt-oss-20b": ("GptOss", lambda m: dict(intermediate_size=m.expert_size, num_local_experts=m.num_experts)),
}


@pytest.mark.hf
@pytest.mark.parametrize("name", CLASSES)
def test_against_the_modules(name):
    """Match the modules of transformers exactly."""
    transformers = pytest.importorskip("transformers")
    kind, make_options = CLASSES[name]
    model = find_model(name)
    model = model.replace(num_layers=2, num_moe_layers=min(model.num_moe_layers, 2), vocab_size=96)
    if model.dense_size:
        model = model.replace(num_moe_layers=1)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=model.hidden_size, num_hidden_layers=2, vocab_size=96, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, num_attention_heads=model.attention.num_heads,
        num_key_value_heads=model.attention.num_kv_heads, head_dim=model.attention.head_size,
        num_experts_per_tok=model.top_k, **make_options(model),
    )  # fmt: skip
    with torch.device("meta"):
        built = getattr(transformers, f"{kind}ForCausalLM")(config)
    buffers = sum(b.numel() for n, b in built.named_buffers() if n.endswith("e_score_correction_bias"))
    assert sum(p.numel() for p in built.parameters()) + buffers == model.parameters()


def test_models_are_found_by_name_and_close_names_are_proposed():
    assert find_model("DeepSeek-V3") is MODELS["deepseek-v3"]
    with pytest.raises(UnknownArchitecture, match="no model 'deepsek-v3' in the catalogue; did you mean deepseek-v3"):
        find_model("deepsek-v3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(top_k=9), "a token takes 9 of 8 experts"),
        (dict(num_moe_layers=33), "33 of 32 layers have experts"),
        (dict(num_moe_layers=16), "layers without experts need a dense_size"),
        (dict(matrices=4), "experts of 4 matrices, expected 2 or 3"),
        (dict(hidden_size=0), "hidden_size is 0, expected a whole number above 0"),
    ],
)
def test_impossible_sizes_raise(change, message):
    with pytest.raises(UnknownArchitecture, match=message):
        find_model("mixtral-8x7b").replace(**change)
