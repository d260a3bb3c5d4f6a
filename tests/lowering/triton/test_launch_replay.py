"""Replayed calls equal their host code, and different calls are recorded again."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
import torch
from torch import Tensor

from moefx.ir import op_providers
from moefx.ir.ops import dialect, expert_gemms
from moefx.lowering.triton import expert_mlp_call as run_module
from moefx.lowering.triton import expert_mlp_steps, launch_replay
from moefx.lowering.triton.tape_playback import Allocate, Free

from ...covering import sample_product
from ...ir.routings import Layer, Routing
from .layers import CONFIGS, LINEAR, move_layer, run_and_differentiate

RECORDED = ("build_pft", "expert_mlp", "expert_mlp_backward")


@pytest.fixture
def plays(monkeypatch) -> list[launch_replay.Tape]:
    """Collect the tapes that are played."""
    seen, stock = [], launch_replay.Tape.play
    monkeypatch.setattr(launch_replay.Tape, "play", lambda self, *args: seen.append(self) or stock(self, *args))
    return seen


def run_with_tapes(
    layer: Layer, device: str, seed: int, tapes: dict, monkeypatch, num_tokens: int = 17, num_rows: int | None = None,
    **options,
) -> list[Tensor]:  # fmt: skip
    """Return output and gradients for tensors and a routing from the seed, with these tapes."""
    # As on a GPU, where gradients of separate parameters form one stack.
    monkeypatch.setattr(expert_gemms, "has_separate_gradients", lambda *_: False)
    monkeypatch.setattr(launch_replay, "_tapes", tapes)
    torch.manual_seed(seed)
    ids, weights = torch.rand(num_tokens, 3).argsort(1)[:, :2], torch.rand(num_tokens, 2)
    x, grad = torch.randn(num_tokens, 32), torch.randn(num_tokens, 32)
    known = None if num_rows is None else torch.tensor([num_rows])
    ids = ids.masked_fill(torch.arange(2 * num_tokens).view(-1, 2) >= (num_rows or 2 * num_tokens), -1)
    routing = Routing(ids.to(device), weights.to(device), 3, num_rows=known)
    with contextlib.ExitStack() as stack:
        for op in (*RECORDED, "build_pft_backward"):
            stack.enter_context(op_providers.force(op, "triton"))
        return run_and_differentiate(layer, routing, x.to(device), weights.to(device), grad.to(device), **options)


WAYS = {name: (name, keep) for name, keep in (("separate", "h"), ("sliced", "x"), ("descriptors", "all"))}


@pytest.mark.parametrize("make, name, keep", sample_product(LINEAR, WAYS, order=1))
def test_a_replayed_call_equals_its_host_code(device, monkeypatch, plays, make, name, keep):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS[name])
    layer, tapes = move_layer(device, make(3, 32, 40), torch.float32), {}
    options = dict(keep=keep, reduce=True)
    run_with_tapes(layer, device, 0, tapes, monkeypatch, **options)
    assert len(tapes) == len(RECORDED) and not plays
    got = run_with_tapes(layer, device, 1, tapes, monkeypatch, **options)
    want = run_with_tapes(layer, device, 1, {}, monkeypatch, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(plays) == len(RECORDED)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("name", ["descriptors", "separate"])
def test_numbers_of_tokens_are_on_no_tape(device, monkeypatch, plays, name, reduce):
    """Replay calls with different numbers of tokens: `round_up_rows` keeps the sizes of the buffers."""
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS[name])
    layer, tapes = move_layer(device, LINEAR["swiglu_list"](3, 32, 40), torch.float32), {}
    for number, num_tokens in enumerate((17, 23)):
        options = dict(num_tokens=num_tokens, num_rows=30, reduce=reduce)
        got = run_with_tapes(layer, device, 1, tapes, monkeypatch, **options)
        assert len(tapes) == 2 and len(plays) == 2 * number
        want = run_with_tapes(layer, device, 1, {}, monkeypatch, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_other_parameters_are_another_call(device, monkeypatch, plays):
    tapes = {}
    layers = [move_layer(device, LINEAR["swiglu_list"](3, 32, 40), torch.float32) for _ in range(2)]
    for layer in layers:
        run_with_tapes(layer, device, 0, tapes, monkeypatch)
    assert len(tapes) == 1 + 2 * 2 and len(plays) == 1  # the routing is the same


def test_changes_in_place_are_seen(device, monkeypatch, plays):
    layer, tapes = move_layer(device, LINEAR["interleaved_clamped"](3, 32, 40), torch.float32), {}
    before = run_with_tapes(layer, device, 0, tapes, monkeypatch)
    with torch.no_grad():
        layer.down[0].mul_(2)
        layer.down_bias[0].mul_(2)
    torch.testing.assert_close(run_with_tapes(layer, device, 0, tapes, monkeypatch)[0], 2 * before[0])
    assert len(plays) == len(RECORDED)


def test_two_inputs_of_one_storage_run_the_host_code(device, monkeypatch, plays):
    monkeypatch.setattr(launch_replay, "_tapes", {})
    both, calls = torch.zeros(2, 4, device=device), []
    for _ in range(2):
        launch_replay.replay_or_record("key", (both[0], both[1]), (), lambda: calls.append(0) or [])
    assert len(calls) == 2 and not plays


VIEWS = {"turned": lambda w: w.view(3, 2).mT, "part": lambda w: w[:, 1:], "flat": lambda w: w.flatten()[2:5]}


@pytest.mark.parametrize("of", [*VIEWS.values(), lambda w: w], ids=[*VIEWS, "itself"])
@pytest.mark.parametrize("is_first", [True, False])
def test_constants_of_one_storage_are_distinguished(monkeypatch, plays, of, is_first):
    """Distinguish parameters at the same address: a tape replays each launch with its own parameter."""
    monkeypatch.setattr(launch_replay, "_tapes", {})
    w = torch.arange(6.0).view(2, 3)
    constants = (w, of(w)) if is_first else (of(w), w)
    for source in (w, of(w), w[1:, ::2]):  # the last one is a view of both
        got = [
            launch_replay.replay_or_record(
                str(source), (torch.zeros(4),), constants, lambda t=source: [launch_replay.apply(torch.clone, t)]
            )
            for _ in range(2)
        ]
        assert all(torch.equal(result, source) for (result,) in got)
    assert plays


def test_a_view_of_a_new_tensor_is_not_replayed(monkeypatch, plays):
    monkeypatch.setattr(launch_replay, "_tapes", {})
    x = torch.arange(6.0).view(2, 3)
    for _ in range(2):
        (got,) = launch_replay.replay_or_record("key", (x,), (), lambda: [launch_replay.apply(torch.clone, x).mT])
        assert torch.equal(got, x.mT)
    assert not plays


def test_weights_that_other_threads_count_are_not_on_the_tape(monkeypatch, plays):
    monkeypatch.setattr(launch_replay, "_tapes", {})
    x = torch.zeros(4)

    def host_code() -> list[Tensor]:
        thread = threading.Thread(target=lambda: op_providers.count_weight_path("view", 5))
        thread.start()
        thread.join()
        return [launch_replay.apply(torch.clone, x)]

    launch_replay.replay_or_record("key", (x,), (), host_code)
    op_providers.reset_counters()
    launch_replay.replay_or_record("key", (x,), (), host_code)
    assert plays and not any(op_providers.weight_paths().values())


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_choices_that_are_left_out_are_recorded(device, monkeypatch, plays, stride, has_weights):
    monkeypatch.setattr(launch_replay, "_tapes", {})
    ids, weights = torch.rand(17, 4).argsort(1)[:, :2].to(device), torch.rand(17, 2, device=device)
    keep = (torch.rand(17, 2) < 0.5).repeat_interleave(stride, 1)[:, ::stride].to(device)
    with op_providers.force("build_pft", "triton"):
        first, second = (
            dialect.build_pft(ids, weights if has_weights else None, keep, num_experts=4) for _ in range(2)
        )
    assert all(map(torch.equal, first, second)) and len(plays) == 1


def test_host_code_that_does_more_than_launch_is_run_each_time(device, monkeypatch, plays):
    monkeypatch.setattr(launch_replay, "_tapes", {})
    x, calls = torch.zeros(4, device=device), []
    for _ in range(2):
        (result,) = launch_replay.replay_or_record("key", (x,), (), lambda: calls.append(0) or [x + len(calls)])
    assert result[0] == 2 and len(calls) == 2 and not plays


def test_memory_is_freed_when_the_host_code_frees_it(device, monkeypatch):
    monkeypatch.setattr(launch_replay, "_tapes", tapes := {})
    x = torch.zeros(4, device=device)

    def host_code() -> list[Tensor]:
        first = launch_replay.empty((8,), torch.float32, x.device)
        del first
        return [launch_replay.empty((2,), torch.float32, x.device)]

    launch_replay.replay_or_record("key", (x,), (), host_code)
    (recorded,) = tapes.values()
    assert [type(step) for step in recorded.steps] == [Allocate, Free, Allocate]


def test_a_replay_counts_weights_equally(device, monkeypatch, plays):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS["sliced"])
    layer, tapes, counted = move_layer(device, LINEAR["weight_before"](3, 32, 40), torch.float32), {}, []
    layer.down[0] = layer.down[0].detach().mT.contiguous().mT.requires_grad_()  # other strides need a copy
    for _ in range(2):
        op_providers.reset_counters()
        run_with_tapes(layer, device, 0, tapes, monkeypatch)
        counted.append({path: n for path, n in op_providers.weight_paths().items() if n})
    assert counted[0] == counted[1] and counted[0]["stacked_copy"] and plays


def test_a_replay_gives_ignored_weights_zero_gradients(device, monkeypatch, plays):
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS["sliced"])
    monkeypatch.setattr(launch_replay, "_tapes", {})
    layer = move_layer(device, LINEAR["weight_before"](3, 32, 40), torch.float32)
    body = dataclasses.replace(layer.body, act=("silu", "a0")).to_json()
    routing = Routing(torch.rand(33, 3).argsort(1)[:, :2].to(device), torch.rand(33, 2, device=device), 3)
    token_ids, _, offsets, inverse, weights = routing.build()
    x, grad = torch.randn(33, 32, device=device), torch.randn(66, 32, device=device)
    args = (x, token_ids, offsets, inverse, weights, layer.up, layer.up_bias, layer.down, layer.down_bias)
    needs = [False, True, False, False, False, False]
    for _ in range(3):
        poison = torch.full((66,), float("nan"), device=device)  # the next allocation may reuse this memory
        del poison
        (got,) = expert_mlp_steps.expert_mlp_backward(grad, *args, [], body=body, keep="x", needs=needs)
        assert got.shape == weights.shape and not got.any() and not got.isnan().any()
    assert len(plays) == 2
