"""The stash changes where activations are, never a result: see `moefx.ir.activation_stash`."""

from __future__ import annotations

import dataclasses
import gc
import random

import pytest
import torch

from moefx.ir import activation_stash, op_providers
from moefx.ir.activation_stash import MissCounter
from moefx.ir.ops import dialect
from moefx.ir.running_block import running
from moefx.lowering.triton import expert_mlp_call as run_module

from ...ir.routings import LAYERS, draw_routing
from .layers import CONFIGS, move_layer

TOKENS, SLOTS, EXPERTS, WIDTH = 20, 2, 3, 16


@pytest.fixture(autouse=True)
def run_kernels(device, monkeypatch):
    """Run the kernels, with small tiles, and without stashes of other tests."""
    monkeypatch.setattr(run_module, "choose_config", lambda *_: CONFIGS["sliced"])
    activation_stash._stashes.clear()
    with op_providers.force("expert_mlp", "triton"), op_providers.force("expert_mlp_backward", "triton"):
        yield


class Call:
    """The forward and the backward of one layer, with the stash and without it."""

    def __init__(self, make, device: str, keep: str, stash_rows: float, skip: float = 0.0):
        layer = move_layer(device, make(EXPERTS, WIDTH, 24), torch.bfloat16)
        routing = draw_routing(TOKENS, SLOTS, EXPERTS)
        # Slots of experts on other ranks are outside of the range.
        ids = torch.where(torch.rand(TOKENS, SLOTS) < skip, EXPERTS, routing.topk_ids)
        routing = dataclasses.replace(routing, topk_ids=ids.to(device))
        weights = routing.topk_weights.to(device, torch.bfloat16)
        self.x = torch.randn(TOKENS, WIDTH, device=device).bfloat16().requires_grad_()
        self.grad = torch.randn(TOKENS, layer.width(self.x), device=device).bfloat16()
        self.leaves = [self.x, *layer.parameters]
        token_ids, _, offsets, inverse, row_weights = routing.build(weights)
        self.num_rows = int(offsets[-1])
        options = dict(body=layer.text, keep=keep, reduce=True)
        lists = (layer.up, layer.up_bias, layer.down, layer.down_bias)
        self.counter = MissCounter()

        def run(**stashed):
            running.counter = self.counter.number
            outputs = dialect.expert_mlp(self.x, token_ids, offsets, inverse, row_weights, *lists, **options, **stashed)
            running.counter = 0
            return outputs

        out, *_ = run()
        self.wanted = [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]
        self.start = lambda: run(stash_rows=stash_rows)

    def forward(self):
        self.out, self.ticket = self.start()

    def backward(self) -> None:
        """Run the backward, and compare bit by bit."""
        found = [self.out, *torch.autograd.grad(self.out, self.leaves, self.grad, retain_graph=True)]
        assert all(map(torch.equal, found, self.wanted))


@pytest.mark.parametrize(
    "make, keep, share",
    [
        (LAYERS["swiglu_list"], "h", 0.5),
        (LAYERS["interleaved_clamped"], "all", 0.1),
        (LAYERS["interleaved_clamped"], "h", 0.0),
    ],
)
def test_results_are_equal_whatever_the_stash_keeps(device, make, keep, share):
    """Backwards in any order, some of them twice. `share` is the part of all rows that the stash has room for."""
    layers = 3
    calls = [Call(make, device, keep, share * layers * SLOTS) for _ in range(layers)]
    order = random.Random(int(100 * share))
    for call in calls:
        call.forward()
    room = int(share * layers * SLOTS * TOKENS)
    for index in order.sample(range(layers), layers):
        calls[index].backward()
        missed = sum(call.num_rows for call in calls[index:]) > room
        assert calls[index].counter.read() == missed
        if order.random() < 0.5:
            calls[index].backward()
            assert calls[index].counter.read() == 2 * missed


def test_rows_of_this_rank_alone_are_kept(device):
    """Most choices fall on other ranks' experts, and three layers fit where one would in the worst case."""
    calls = [Call(LAYERS["swiglu_list"], device, "h", SLOTS, skip=0.8) for _ in range(3)]
    assert 0 < sum(call.num_rows for call in calls) <= TOKENS * SLOTS
    for call in calls:
        call.forward()
    for call in reversed(calls):
        call.backward()
        assert call.counter.read() == 0


def test_later_rows_overwrite_the_oldest(device):
    """Calls whose backward never comes use up the stash, and no more."""
    calls = [Call(LAYERS["swiglu_list"], device, "h", 2 * SLOTS) for _ in range(4)]
    for call in calls:
        call.forward()
    for call in calls:
        call.backward()
    assert [call.counter.read() for call in calls] == [1, 1, 0, 0]


def test_a_larger_stash_misses_what_the_smaller_one_had(device):
    """Rows of an older ring are never taken from a newer one."""
    small, large = (Call(LAYERS["swiglu_list"], device, "h", room) for room in (SLOTS, 2 * SLOTS))
    small.forward()
    large.forward()
    small.backward()
    large.backward()
    assert (small.counter.read(), large.counter.read()) == (1, 0)


def test_no_tokens(device):
    call = Call(LAYERS["swiglu_list"], device, "h", SLOTS, skip=2.0)
    call.forward()
    call.backward()
    assert call.num_rows == call.counter.read() == 0


def test_the_last_counter_takes_the_stashes_along(device):
    gc.collect()  # counters of other tests
    call = Call(LAYERS["swiglu_list"], device, "h", SLOTS)
    call.forward()
    assert activation_stash._stashes
    call.out = call.ticket = None
    del call
    gc.collect()
    assert not activation_stash._stashes
