"""Each refusal has a cause. It decides the next attempt of a proof."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moefx
from moefx.capture.argument_interpretations import interpret_arguments
from moefx.capture.size_collisions import ModelNumbers
from moefx.capture.size_guards import SizeGuard
from moefx.compiler import proof_attempts
from moefx.errors import Cause, Refused
from moefx.frontends.dynamo.backend import backend
from moefx.matching.proof_state import ProofState
from moefx.passes.rewrite import Placeholders
from moefx.util.user_code import PACKAGE_DIR

from ..passes.blocks import Block, D, E, Loop, Mlp, rewritten


def return_norm(b, x):
    w, ids = b.route(x)
    out, norm = torch.zeros_like(x), x.new_zeros(())
    for e in range(E):
        t, k = torch.where(ids == e)
        y = b.expert(e, x[t], w[t, k, None])
        norm = norm + y.square().sum()
        out = out.index_add(0, t, y)
    return out, norm


def take_neighbours_expert(b, x):
    w, ids = b.gate(x).softmax(-1).topk(1)
    ids = ids[:, 0].tolist()
    return torch.stack([b.experts[ids[t - 1] if t % 5 == 4 else e](x[t]) * w[t] for t, e in enumerate(ids)])


def add_first_row(b, x):
    w, ids = b.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t, b.expert(e, x[t] + x[:1], w[t, k, None]))
    return out


def sum_experts(b, x, w, ids):
    gates = torch.zeros(len(x), E).scatter(-1, ids, w)
    return sum(gates[:, e, None] * b.experts[e](x) for e in range(E))


def select_top_experts(b, x):
    return sum_experts(b, x, *b.route(x))


def select_largest_and_furthest(b, x):
    scores = b.gate(x)
    ids = torch.stack([scores.argmax(-1), scores.square().argmax(-1)], -1)
    return sum_experts(b, x, scores.softmax(-1).gather(-1, ids), ids)


def keep_last_rows(b, x):
    w, ids = b.gate(x).softmax(-1).topk(1)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t[-3:], b.expert(e, x[t[-3:]], w[t[-3:], k[-3:], None]))
    return out


class Series(nn.Module):
    """Each sample of [B, L, C] selects experts for its whole series."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(12, E), nn.ModuleList(nn.Linear(12, 12) for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x.mean(-1)).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b = torch.where(ids[:, 0] == e)[0]
            out = out.index_add(0, b, expert(x[b].transpose(1, 2)).transpose(1, 2) * w[b, :, None])
        return out


class Pixels(nn.Module):
    """Each pixel of an image selects convolutions."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, E), nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x.movedim(1, -1)).softmax(-1).topk(2)
        gates = torch.zeros(*ids.shape[:-1], E).scatter(-1, ids, w).movedim(-1, 1)
        return sum(gates[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


BLOCKS = {
    Cause.NOT_ROUTED: (Mlp, (5, D)),
    Cause.NOT_TOGETHER: (lambda: Block(return_norm), (5, D)),
    Cause.UNEXPLAINED_INDEX: (lambda: Block(take_neighbours_expert), (29, D)),
    Cause.FOREIGN_ROW: (lambda: Block(add_first_row), (40, D)),
    Cause.SINGLE_ELEMENTS: (lambda: Loop(lambda: Mlp(lambda h: h.sort(-1).values)), (40, D)),
    Cause.REPEATED_CHOICE: (lambda: Block(select_largest_and_furthest), (40, D)),
    Cause.UNEXPLAINED_DROPS: (lambda: Block(keep_last_rows), (40, D)),
    Cause.MIXED_POSITIONS: (Series, (9, 12, 4)),
    Cause.CONVOLUTIONS: (Pixels, (2, 4, 32, 32)),
}


@pytest.mark.parametrize("cause", BLOCKS, ids=lambda cause: cause.name)
def test_a_refused_block_has_the_cause(cause):
    make, shape = BLOCKS[cause]
    with pytest.raises(Refused) as raised:
        rewritten(make(), torch.zeros(shape))
    assert raised.value.cause is cause, raised.value
    assert cause.name not in str(raised.value)


def test_no_sizes():
    block, x = Loop(Mlp), torch.zeros(5, D)
    arguments = next(iter(interpret_arguments((x,), {}, ModelNumbers.of(block))))
    state = ProofState(block, arguments, within=(SizeGuard(next(iter(arguments.sizes)), "lt", "1", True),))
    with pytest.raises(Refused) as raised:
        state.size_choice.choose(64, 0)
    assert raised.value.cause is Cause.NO_SIZES


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    torch._dynamo.reset()
    block = Block(select_top_experts)
    compiled = torch.compile(block, backend=backend, options={"backend": "eager"}, dynamic=False)
    compiled(torch.randn(tokens, D))
    refused = moefx.explain(compiled).refused
    assert [r.cause for r in refused] == [Cause.FEW_TOKENS]
    assert "cause" not in repr(refused[0]) and "FEW_TOKENS" not in moefx.explain(compiled).to_json()


def test_every_cause_has_a_program():
    assert {*BLOCKS, Cause.NO_SIZES, Cause.FEW_TOKENS, Cause.OTHER} == {*Cause}
    assert Refused("it counts to three").cause is Cause.OTHER


def raise_error(error):
    raise error


def make_bug():
    """A function that counts as code of moefx, and fails."""
    found = {}
    exec(compile("def fail(*args): assert not args", f"{PACKAGE_DIR}/bug.py", "exec"), found)
    return found["fail"]


def test_a_bug_in_another_interpretation_is_not_hidden(monkeypatch):
    attempts = [lambda *args: raise_error(Refused("no")), make_bug()]
    monkeypatch.setattr(proof_attempts, "_prove_arguments", lambda *args: attempts.pop(0)(*args))
    tensors = torch.zeros(1, 5, D), torch.zeros(1, D)  # the second first axis may be a batch of one
    with pytest.raises(AssertionError):
        proof_attempts.prove_and_rewrite(Loop(Mlp), tensors, {}, Placeholders([], {}))
    assert not attempts
