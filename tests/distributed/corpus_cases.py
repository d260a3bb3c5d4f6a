"""Models of the corpus with their experts over all ranks, and other tokens on each rank.

A list names the models that cannot be distributed yet, with reasons; it should become shorter.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError

from .. import models
from ..models.case import Case
from .launch import sampled

PLAN = moefx.Plan(dispatch="dedup", timeout=100, validation="symbolic")
REFUSED = {
    "i6b_split_weight_before_norm": "the experts share a value",
    "n_unequal_experts": "several kinds of experts with matrices",
    "s_moe_plus_plus": "the 5 experts of moe cannot be shared evenly",
}
# not rewritten on one device either, or refused by the numeric check
NOT_REWRITTEN = ("s_vmap_tokens", "s_one_wide_hidden", "s_embedding_bag_combine")


def run_case(case: Case) -> str:
    """Return the error of a case, or "" if it passes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    torch.manual_seed(rank)
    inputs = case.fresh(2, 6 + rank, seed=rank + 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = moefx.compile(case.model, mesh=mesh, plan=PLAN, example_inputs=case.inputs or inputs)
        except MoefxError as error:
            return f"{type(error).__name__}: {error}"
        report = moefx.verify(compiled, case.model, inputs)
    fallbacks = [block.name for block in moefx.blocks(compiled) if block.fallbacks]
    return f"fallbacks of {fallbacks}" if fallbacks else "" if report.ok else str(report)


def check(names: list[str]) -> None:
    wrong = []
    for name in names:
        case = models.build(name)
        if case.verdict == "refuse" or name in NOT_REWRITTEN:
            continue
        error = run_case(case)
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if not any(errors):
            ok = name not in REFUSED
        elif case.verdict == "either" and name not in REFUSED:
            ok = error.startswith(("NoMoEBlockFound", "Refused"))
        else:
            ok = REFUSED.get(name, "\0") in error
        print(name, "ok" if ok else error, flush=True)
        wrong += [] if ok else [f"{name}: {error[:2000]}"]
    assert not wrong, "\n".join(wrong)


def case_sampled_models() -> None:
    check(sampled(["i5_gather_weights_interleaved", "s_identity_experts_dense", "s_zero_copy_constant",
                   "s_capacity_slices", "s_shared_as_expert_zero", "s_per_expert_scale"], 3))  # fmt: skip


def case_models_that_cannot_be_distributed() -> None:
    """Run some models that cannot be distributed; blocks of `compile_cases` cover the other two reasons."""
    check(sampled(["s_moe_plus_plus", "n_unequal_experts", "i6b_split_weight_before_norm"], 3))


def every_model() -> None:
    for suite in ("plain", "unseen", "hf"):
        check(models.names(suite))
