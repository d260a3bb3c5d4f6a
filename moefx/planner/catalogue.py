"""Models by name. Sizes come from the released configurations, totals from the authors' papers and model cards.

Piper's table I lists most of them; `note` names its differences to the release. X-MoE's four models are its table 3,
in the convention that makes the table exact: experts of two matrices, every layer with experts, no vocabulary, and "B"
for 2^30.
"""

from __future__ import annotations

from ..errors import UnknownArchitecture, nearest
from .architecture import Architecture, Attention


def _mla(num_heads: int, query_rank: int = 1536, num_extra: int = 0) -> Attention:
    """Build attention with DeepSeek-V2's head and latent sizes."""
    return Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_size=192, value_size=128, query_rank=query_rank, kv_rank=512,
        rope_size=64, num_extra=num_extra,
    )  # fmt: skip


def _gqa(num_heads: int, num_kv_heads: int, head_size: int = 128, **options: object) -> Attention:
    return Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, **options)  # type: ignore[arg-type]


def _xmoe(name: str, d: int, h: int, E: int, k: int, layers: int, total: float, active: float, s: int) -> Architecture:
    heads = d // 128
    return Architecture(
        name=name, hidden_size=d, num_layers=layers, num_moe_layers=layers, attention=_gqa(heads, heads),
        num_experts=E, top_k=k, expert_size=h, matrices=2, norms=0, context=s,
        published=(total * 2**30, active * 2**30), source="X-MoE table 3",
    )  # fmt: skip


_RELEASES = [
    Architecture(
        name="deepseek-v2", hidden_size=5120, num_layers=60, num_moe_layers=59, attention=_mla(128),
        num_experts=160, top_k=6, expert_size=1536, shared_size=2 * 1536, dense_size=12288, vocab_size=102400,
        context=131072, published=(236e9, 21e9), source="arXiv 2405.04434; deepseek-ai/DeepSeek-V2 config.json",
    ),
    Architecture(
        name="deepseek-v3", hidden_size=7168, num_layers=61, num_moe_layers=58, attention=_mla(128),
        num_experts=256, top_k=8, expert_size=2048, shared_size=2048, dense_size=18432, vocab_size=129280,
        router_bias=256, context=131072, published=(671e9, 37e9),
        source="arXiv 2412.19437; deepseek-ai/DeepSeek-V3 config.json",
        note="without the multi-token prediction module, which the published total leaves out too",
    ),
    Architecture(
        name="deepseek-v3.2", hidden_size=7168, num_layers=61, num_moe_layers=58,
        # the indexer: queries from the latent row, one key, a weight for each of its 64 heads, a LayerNorm
        attention=_mla(128, num_extra=1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128),
        num_experts=256, top_k=8, expert_size=2048, shared_size=2048, dense_size=18432, vocab_size=129280,
        router_bias=256, context=131072, published=(671e9, 37e9),
        source="deepseek-ai/DeepSeek-V3.2-Exp config.json; Piper table I",
    ),
    Architecture(
        name="mixtral-8x7b", hidden_size=4096, num_layers=32, num_moe_layers=32, attention=_gqa(32, 8),
        num_experts=8, top_k=2, expert_size=14336, vocab_size=32000, context=32768, published=(46.7e9, 12.9e9),
        source="arXiv 2401.04088; mistralai/Mixtral-8x7B-v0.1 config.json",
    ),
    Architecture(
        name="mixtral-8x22b", hidden_size=6144, num_layers=56, num_moe_layers=56, attention=_gqa(48, 8),
        num_experts=8, top_k=2, expert_size=16384, vocab_size=32000, context=65536, published=(141e9, 39e9),
        source="mistralai/Mixtral-8x22B-v0.1 config.json and model card",
    ),
    Architecture(
        name="qwen3-30b-a3b", hidden_size=2048, num_layers=48, num_moe_layers=48,
        attention=_gqa(32, 4, num_extra=2 * 128), num_experts=128, top_k=8, expert_size=768, vocab_size=151936,
        context=131072, published=(30.5e9, 3.3e9), source="arXiv 2505.09388; Qwen/Qwen3-30B-A3B config.json",
    ),
    Architecture(
        name="qwen3-235b-a22b", hidden_size=4096, num_layers=94, num_moe_layers=94,
        attention=_gqa(64, 4, num_extra=2 * 128), num_experts=128, top_k=8, expert_size=1536, vocab_size=151936,
        context=131072, published=(235e9, 22e9), source="arXiv 2505.09388; Qwen/Qwen3-235B-A22B config.json",
        note="Piper table I gives hidden size 7168 and FFN 2048 (DeepSeek-V3's), which would be 530 B of experts alone",
    ),
    Architecture(
        name="llama4-scout", hidden_size=5120, num_layers=48, num_moe_layers=48, attention=_gqa(40, 8),
        num_experts=16, top_k=1, expert_size=8192, shared_size=8192, vocab_size=202048, context=10485760,
        published=(109e9, 17e9), source="meta-llama/Llama-4-Scout-17B-16E config.json (text) and model card",
        note="the language model; the published total has the vision encoder (0.9 B) too",
    ),
    Architecture(
        name="llama4-maverick", hidden_size=5120, num_layers=48, num_moe_layers=24, attention=_gqa(40, 8),
        num_experts=128, top_k=1, expert_size=8192, shared_size=8192, dense_size=16384, vocab_size=202048,
        context=1048576, published=(400e9, 17e9),
        source="meta-llama/Llama-4-Maverick-17B-128E config.json (text) and model card",
    ),
    Architecture(
        name="arctic", hidden_size=7168, num_layers=35, num_moe_layers=35, attention=_gqa(56, 8),
        num_experts=128, top_k=2, expert_size=4864, shared_size=7168, vocab_size=32000, norms=3, context=4096,
        published=(480e9, 17e9), source="Snowflake/snowflake-arctic-base config.json and model card",
        note="shared_size is the dense branch beside the experts; Piper table I has about 3,660 for the FFN, which are "
        "the 3.66 B parameters of an expert over all layers, and a context of 128K, the release has 4096",
    ),
    Architecture(
        name="kimi-k2", hidden_size=7168, num_layers=61, num_moe_layers=60, attention=_mla(64),
        num_experts=384, top_k=8, expert_size=2048, shared_size=2048, dense_size=18432, vocab_size=163840,
        router_bias=384, context=131072, published=(1.04e12, 32.6e9),
        source="arXiv 2507.20534; moonshotai/Kimi-K2-Base config.json",
    ),
    Architecture(
        name="olmoe-1b-7b", hidden_size=2048, num_layers=16, num_moe_layers=16,
        attention=_gqa(16, 16, num_extra=2 * 2048), num_experts=64, top_k=8, expert_size=1024, vocab_size=50304,
        context=4096, published=(6.92e9, 1.28e9), source="arXiv 2409.02060; allenai/OLMoE-1B-7B-0924 config.json",
    ),
    Architecture(
        name="gpt-oss-20b", hidden_size=2880, num_layers=24, num_moe_layers=24,
        attention=_gqa(64, 8, 64, has_bias=True, num_extra=64), num_experts=32, top_k=4, expert_size=2880,
        vocab_size=201088, router_bias=32, expert_bias=True, context=131072, published=(20.91e9, 3.61e9),
        source="arXiv 2508.10925 table 1; openai/gpt-oss-20b config.json",
        note="the published active parameters leave out the embedding",
    ),
    Architecture(
        name="gpt-oss-120b", hidden_size=2880, num_layers=36, num_moe_layers=36,
        attention=_gqa(64, 8, 64, has_bias=True, num_extra=64), num_experts=128, top_k=4, expert_size=2880,
        vocab_size=201088, router_bias=128, expert_bias=True, context=131072, published=(116.83e9, 5.13e9),
        source="arXiv 2508.10925 table 1; openai/gpt-oss-120b config.json",
        note="the published active parameters leave out the embedding",
    ),
    _xmoe("x-moe-small", 2048, 1408, 64, 6, 28, 10.1, 1.3, 2048),
    _xmoe("x-moe-medium", 5120, 1536, 128, 6, 28, 55.2, 5.2, 4096),
    _xmoe("x-moe-large", 7168, 2048, 256, 8, 28, 201.4, 11.5, 4096),
    _xmoe("x-moe-super", 7168, 2560, 256, 8, 61, 545.4, 28.7, 4096),
]  # fmt: skip
MODELS = {model.name: model for model in _RELEASES}


def find_model(name: str) -> Architecture:
    """Find a model of `MODELS` by name; case is ignored.

    Raises:
        UnknownArchitecture: no model has this name. The message has similar names.
    """
    model = MODELS.get(name.lower())
    if model is None:
        near = nearest(name.lower(), MODELS, cutoff=0.5)
        place = "and no such file" if "/" in name or name.endswith(".json") else "in the catalogue"
        raise UnknownArchitecture(
            f"no model {name!r} {place}{near or '.'} The catalogue has {', '.join(MODELS)}; a transformers config is "
            "named by its file or directory, a module of your own by package.module:factory or given to moefx.plan"
        )
    return model
