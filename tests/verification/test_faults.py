"""Injected faults: every mistake in every provider of every op is flagged, and the ops as they are pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moefx.ir.dialect import build_pft
from moefx.ir.op import registry
from moefx.lowering import select
from moefx.verification.report import verify

from .compiled import broken, compiled_pair

IDS = torch.arange(36).remainder(32).view(2, 18)


def swap(result, topk_ids, *args, **kwargs):
    ids = torch.where(topk_ids == 0, 1, torch.where(topk_ids == 1, 0, topk_ids))
    return build_pft.reference(ids, *args, **kwargs)


def keep_all_but(position: int) -> Callable[..., Any]:
    def corrupt(result, topk_ids, topk_weights, keep, **kwargs):
        keep = torch.ones_like(topk_ids, dtype=torch.bool)
        keep.view(-1)[position] = False
        return build_pft.reference(topk_ids, topk_weights, keep, **kwargs)

    return corrupt


def dropped_token(result, topk_ids, topk_weights, keep, **kwargs):
    keep = torch.ones_like(topk_ids, dtype=torch.bool)
    keep[5] = False
    return build_pft.reference(topk_ids, topk_weights, keep, **kwargs)


def scaled_weights(result, *args, **kwargs):
    return (*result[:4], result[4] * 1.001)


def part(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Change one result of an op with several, or the only one."""

    def corrupt(result, *args, **kwargs):
        if isinstance(result, torch.Tensor):
            return change(result)
        if index >= len(result):
            return result
        return type(result)([*result[:index], change(result[index]), *result[index + 1 :]])

    return corrupt


def scale(t):
    return t * 1.001


def lose_first(t):
    """Of a gradient of stacked weights: one expert; of rows: one row."""
    return torch.cat([torch.zeros_like(t[:1]), t[1:]])


def one_nan(t):
    t = t.clone()
    t.view(-1)[3] = torch.nan
    return t


CHANGES = {"scaled": scale, "zero": torch.zeros_like, "one lost": lose_first, "NaN": one_nan}
ROUTING = {
    "swapped experts": swap,
    "one dropped pair": keep_all_but(7),
    "the last pair dropped": keep_all_but(-1),
    "one dropped token": dropped_token,
    "scaled weights": scaled_weights,
}
NUM_RESULTS = {"expert_mlp_backward": 5, "grouped_mm_backward": 1, "combine_backward": 2}
BY_PASS = {  # which ops the blocks run after which pass
    "checkpoint": (
        "build_pft",
        "build_pft_backward",
        "expert_mlp",
        "expert_mlp_backward",
        "combine",
        "dispatch",
    ),
    "rewrite": ("grouped_mm", "grouped_mm_backward", "combine", "combine_backward", "dispatch"),
}


def cases() -> Iterator[Any]:
    for last_pass, ops in BY_PASS.items():
        for op in ops:
            for provider in registry[op].providers:
                faults = ROUTING if op == "build_pft" else {
                    f"{name} result {i}": part(i, change)
                    for i in range(NUM_RESULTS.get(op, 1)) for name, change in CHANGES.items()
                }  # fmt: skip
                for name, corrupt in faults.items():
                    yield pytest.param(
                        last_pass, op, provider, corrupt, id=f"{last_pass}-{op}-{provider}-{name}"
                    )


@functools.cache
def runs(op: str, provider: str, last_pass: str) -> bool:
    """Does the provider take these calls at all? Some are for 16 bit or for GPUs only."""
    _, compiled = compiled_pair(last_pass=last_pass, num_layers=1)
    try:
        with select.force(op, provider):
            select.reset_counters()
            compiled(IDS)["logits"].sum().backward()
            return select.counters().get((op, provider), 0) > 0
    except (RuntimeError, NotImplementedError):
        return False


@pytest.mark.parametrize(("last_pass", "op", "provider", "corrupt"), list(cases()))
def test_every_fault_is_flagged(last_pass, op, provider, corrupt):
    if not runs(op, provider, last_pass):
        pytest.skip(f"{provider} does not run {op} here")
    original, compiled = compiled_pair(last_pass=last_pass, num_layers=1)
    with select.force(op, provider), broken(op, corrupt, provider=provider):
        report = verify(compiled, original, (IDS,))
    assert not report.ok and report.first_block == "layers.0"
    assert report.first_pass and report.first_pass.startswith(("rewrite", "fuse"))


@pytest.mark.parametrize("last_pass", BY_PASS)
def test_every_provider_passes_as_it_is(last_pass):
    original, compiled = compiled_pair(last_pass=last_pass, num_layers=1)
    for op in BY_PASS[last_pass]:
        for provider in registry[op].providers:
            if runs(op, provider, last_pass):
                with select.force(op, provider):
                    report = verify(compiled, original, (IDS,))
                assert report.ok, f"{op} {provider}\n{report}"
