"""A transformers model, unchanged: Qwen3-MoE with a tiny configuration, original beside compiled.

pip install transformers
python examples/qwen3_moe.py [--steps 20]
"""

import argparse
import copy
import itertools

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import moefx
from moefx.demo.stdlib_text import batches, standard_library_text


def build() -> PreTrainedModel:
    """Random weights; byte-level vocabulary. Also: python -m moefx explain examples.qwen3_moe:build"""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        output_router_logits=True,  # adds the load-balancing loss, computed from the recorded router logits
        max_position_embeddings=128,
    )
    # transformers' own loop over the experts: its grouped-GEMM variant has no float64, which main() uses.
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def main(steps: int = 20) -> float:
    """Returns the largest difference of the two losses."""
    original = build().double()
    compiled = moefx.compile(copy.deepcopy(original))
    assert type(compiled) is type(original)
    print(moefx.explain(compiled))
    print(f"\n{moefx.graph(compiled, 'model.layers.0.mlp')}")

    stream = batches(standard_library_text(), batch=4, context=64, seed=0)
    ids, _ = next(stream)
    print(f"\n{moefx.verify(compiled, original, {'input_ids': ids})}\n")

    models = {"original": original, "compiled": compiled}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=3e-3) for name, model in models.items()}
    largest = 0.0
    for step, (ids, _) in enumerate(itertools.islice(stream, steps)):
        losses = {}
        for name, model in models.items():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name] = loss.item()
        difference = abs(losses["original"] - losses["compiled"])
        largest = max(largest, difference)
        print(f"step {step:3}  loss {losses['original']:.6f}  difference {difference:.1e}")
    print(f"largest difference {largest:.1e}")
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
