"""Proves the blocks of most cases when it is imported: the ranks that are forked afterwards share the proofs.

With a GPU it proves nothing: proofs touch CUDA, which a forked process cannot initialize again.
"""

from __future__ import annotations

import torch

import moefx

from ..passes.blocks import D
from ..proof_memory import proving_once
from .models import Model

KINDS = {
    torch.float32: ("gated", "joined", "numbered", "flat", "stacked", "kinds"),
    torch.float64: ("gated", "joined", "stacked", "biased", "every expert", "kinds", "picky"),
}

torch.set_num_threads(1)
with proving_once():
    for dtype, kinds in KINDS.items() if not torch.cuda.device_count() else ():
        for kind in kinds:
            model, example = Model(kind, layers=1).to(dtype), torch.zeros(9, D, dtype=dtype)
            assert moefx.explain(model, plan=moefx.Plan(validation="symbolic"), example_inputs=(example,)).matched
