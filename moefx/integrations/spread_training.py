"""Recognize spread models, and check that a library which runs the training loop may train them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..distribution.training_wiring import SPREAD_MESH, SpreadMesh
from ..errors import InvalidInput
from ..runtime.ranks.data_parallel_wrappers import ACCELERATED_PIPELINE_REFUSAL
from ..runtime.ranks.staged_models import STAGED


def find_spread_model(model: Any) -> nn.Module | None:
    """Return the module that `compile` has spread over a mesh: the model itself, or one inside of it. Return None for
    other models, and for objects that are no modules."""
    if not isinstance(model, nn.Module):
        return None
    return next((module for module in model.modules() if SPREAD_MESH in vars(module)), None)


def get_spread_mesh(spread: nn.Module) -> SpreadMesh:
    return vars(spread)[SPREAD_MESH]


def check_is_whole(model: nn.Module, spread: nn.Module) -> None:
    """Refuse a spread model that is only a part of the trained model, or a stage of a pipeline (`InvalidInput`)."""
    if STAGED in vars(model):
        raise ACCELERATED_PIPELINE_REFUSAL.build_error()
    if getattr(model, "_orig_mod", model) is not spread:
        raise InvalidInput(
            f"{type(spread).__name__}, which moefx.compile has spread over ranks, is inside of {type(model).__name__}. "
            "Gradients of the parameters around it would not be reduced: compile and parallelize the whole model"
        )


def check_trainable(model: nn.Module, num_processes: int, precision: str) -> None:
    """Check that a spread model is ready for training by a library with one batch for each process.

    Args:
        num_processes: the processes that get batches of their own.
        precision: accelerate's `mixed_precision`.

    Raises:
        InvalidInput: the model is not parallelized or not whole, some ranks of its mesh have the same tokens, or the
            precision needs a decision that ranks do not make together.
    """
    spread = find_spread_model(model)
    assert spread is not None
    check_is_whole(model, spread)
    name, mesh = type(spread).__name__, get_spread_mesh(spread)
    if not mesh.parallelized:
        raise InvalidInput(
            f"the gradients of {name} are not reduced over its ranks: call moefx.parallelize(model, mesh) before you "
            "build the optimizer, and prepare the result"
        )
    plain = [n for n, p in spread.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain:
        raise InvalidInput(
            f"{len(plain)} parameter(s) of {name} ({plain[0]}{', ...' if len(plain) > 1 else ''}) were added after "
            "moefx.parallelize, and their gradients would not be reduced: add them before moefx.compile"
        )
    ranks = mesh.reductions["others"].divisor
    if ranks != num_processes:
        raise InvalidInput(
            f"{ranks} ranks of {name} have tokens of their own, and accelerate gives each of "
            f"{num_processes} processes a batch of its own. Use a mesh over all processes without a sequence axis, a "
            "'pp' axis, or a 'tp' axis beside the expert axis; or write the loop yourself (docs/how_to/"
            "expert_parallel_training.md)"
        )
    if precision not in ("no", "bf16"):
        raise InvalidInput(
            f"mixed_precision={precision!r}: each rank would decide by its own experts whether to skip a step. Use "
            "'bf16', or MixedPrecisionPolicy in moefx.parallelize(mp_policy=...)"
        )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Sequence[nn.Module]) -> None:
    """Refuse (`InvalidInput`) optimizers with parameters that `parallelize` has replaced, or that FSDP has gathered."""
    spread = [model for model in models if find_spread_model(model) is not None]
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        stale = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if spread and stale:
            raise InvalidInput(
                f"{type(optimizer).__name__} has {len(stale)} parameter(s) that {type(spread[0]).__name__} does not "
                "have any more: build the optimizer after moefx.parallelize, which replaces parameters, and before a "
                "forward with gradients, which leaves gathered ones"
            )
