"""Prove the blocks of most cases at import, so that forked ranks share the proofs and slow imports.

With a GPU it proves nothing: proofs touch CUDA, which a forked process cannot initialize again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.pipelining
from torch import nn

import moefx
import moefx.planner

from ..blocks import D, Dropping
from ..proof_memory import share_proofs
from .models import BLOCKS, Model, build_causal_model

HAS_TRANSFORMERS = False
with contextlib.suppress(ImportError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # forks do not have its thread
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    HAS_TRANSFORMERS = True

KINDS = {
    torch.float32: ("gated", "joined", "numbered", "flat", "stacked", "kinds", "every expert"),
    torch.float64: ("gated", "joined", "numbered", "flat", "stacked", "biased", "every expert", "kinds", "picky"),
}
SYMBOLIC = moefx.Plan(validation="symbolic")
AUTO = SYMBOLIC.replace(checkpoint="auto")


def build_proven() -> Iterator[tuple[nn.Module, Any, moefx.Plan]]:
    """Yield models, their example inputs and plans."""
    for dtype, kinds in KINDS.items():
        for kind in kinds:
            yield Model(kind, layers=1).to(dtype), torch.zeros(9, D, dtype=dtype), SYMBOLIC
    for block in (BLOCKS["gated"](), BLOCKS["stacked"](), BLOCKS["gated"]().double(), Dropping().double()):
        yield block, torch.zeros(9, D, dtype=next(block.parameters()).dtype), SYMBOLIC
    yield Model("gated", layers=1, num_experts=8), torch.zeros(9, D), SYMBOLIC
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float64, "meta")):  # as in pipelines
        for kind in ("gated", "joined"):
            example = torch.zeros(6, D, dtype=dtype, device=device)
            yield Model(kind, layers=1).to(device, dtype), example, SYMBOLIC
    for num_experts, plan in ((4, SYMBOLIC), (4, AUTO), (5, AUTO)):
        yield Model("gated", layers=1, num_experts=num_experts), torch.zeros(64, D), plan
    if HAS_TRANSFORMERS:
        yield build_causal_model(layers=1), {"input_ids": torch.zeros(2, 7, dtype=torch.long)}, SYMBOLIC


torch.set_num_threads(1)
if not torch.cuda.device_count():
    with share_proofs():
        for model, example, plan in build_proven():
            inputs = example if isinstance(example, dict) else (example,)
            assert moefx.explain(model, plan=plan, example_inputs=inputs).matched
    with torch.no_grad():
        torch.compile(nn.Linear(D, D), backend="aot_eager", dynamic=True)(torch.zeros(9, D))
    torch._dynamo.reset()
