"""A small block, and proofs of it whose evidence tests add themselves."""

from __future__ import annotations

import torch

from moefx.capture.arguments.argument_interpretations import interpret_arguments
from moefx.capture.arguments.size_collisions import ModelNumbers
from moefx.capture.sizes.size_guards import SizeGuard
from moefx.capture.tracing.concrete_routing import Routing
from moefx.matching.proof.proof_state import ProofState

from .lift.small_blocks import D, E, Small

GUARD = SizeGuard("S", "gt", "1", True)


def new_proof(block=None) -> ProofState:
    block = block or Small()
    return ProofState(
        block, next(iter(interpret_arguments((torch.zeros(5, D),), {}, ModelNumbers.of(block)))), max_experts=E
    )


def lift(proof: ProofState, seed: int = 0, tokens: int = 12):
    return proof.capture_and_lift(Routing("diverse", seed), {"S": tokens})
