"""Routing decisions follow the reference only if rounding decides them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefx.comparison.policy import tolerance
from moefx.comparison.routing_tape import AlignMode, CannotReplay, RecordingMode, ReplayMode, Scope, Tape

TOL = tolerance(torch.float32, 16)


def draw_scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def replay(function, x, promote=True):
    """Return the result on x, the result of the replay in float64 and the tape."""
    tape, scope = Tape(), Scope()
    with RecordingMode(tape, scope):
        first = function(x)
    with ReplayMode(tape, scope, promote=promote):
        return first, function(x.double() if promote else x), tape


def align(function, x, moved):
    """Return `function(x)` as the reference, the aligned `function(moved)` and the rows of the routing."""
    tape, scope = Tape(), Scope()
    with scope.enter("layers.1.mlp"):
        with RecordingMode(tape, scope):
            first = function(x)
        mode = AlignMode(tape, scope, TOL, "a case")
        with mode:
            out = function(moved)
    return first, out, mode.rows


SELECT = {
    "topk": lambda x: x.topk(3, -1)[::-1],
    "topk of another dim": lambda x: x.topk(3, dim=0)[::-1],
    "smallest": lambda x: x.topk(3, -1, largest=False, sorted=False)[::-1],
    "sort": lambda x: x.sort(dim=-1, descending=True)[::-1],
    "stable sort": lambda x: x.sort(dim=0, stable=True)[::-1],
    "argsort": lambda x: (x.argsort(-1), x),
    "max": lambda x: x.max(-1)[::-1],
    "min keepdim": lambda x: x.min(0, keepdim=True)[::-1],
    "argmax": lambda x: (x.argmax(-1), x),
    "argmax of all": lambda x: (x.argmax(), x),
    "argmin keepdim": lambda x: (x.argmin(dim=1, keepdim=True), x),
    "median": lambda x: x.median(-1)[::-1],
    "kthvalue": lambda x: x.kthvalue(2, -1)[::-1],
    "cummax": lambda x: x.cummax(-1)[::-1],
}


@pytest.mark.parametrize("op", SELECT)
def test_a_selection_is_imposed_and_its_values_are_those_of_the_new_floats(op):
    tape, scope = Tape(), Scope()
    x = draw_scores(6, 8)
    with RecordingMode(tape, scope):
        ids, values = SELECT[op](x)
    other = x.flip(0).double() * 3  # selects other experts for all tokens
    own_ids, _ = SELECT[op](other)
    with ReplayMode(tape, scope, promote=True):
        new_ids, new_values = SELECT[op](other)
    assert not torch.equal(own_ids, ids)
    assert torch.equal(new_ids, ids) and new_values.dtype == torch.float64
    if values is not x:
        assert new_values.shape == values.shape
        assert torch.isin(new_values, other).all() and not torch.equal(new_values, values.double())


def test_gradients_flow_through_an_imposed_selection():
    tape, scope = Tape(), Scope()
    with RecordingMode(tape, scope):
        ids = draw_scores(6, 8).topk(3, -1).indices
    x = draw_scores(6, 8, seed=1).requires_grad_()
    with ReplayMode(tape, scope, promote=False):
        x.topk(3, -1).values.sum().backward()
    assert torch.equal(x.grad, torch.zeros(6, 8).scatter(-1, ids, 1.0))


DECIDE = {
    "comparison": lambda x: (x.softmax(-1) > 0.2, x >= x.mean(), x == x.amax(-1, keepdim=True)),
    "nonzero": lambda x: torch.where(x.clamp_min(0) != 0),
    "cast": lambda x: ((x * 3).long(), x.round().int(), x.bool()),
    "searchsorted": lambda x: (
        torch.searchsorted(x.sort(-1).values, x),
        torch.bucketize(x, torch.zeros(1).to(x)),
    ),
}


@pytest.mark.parametrize("op", DECIDE)
def test_every_op_from_floats_to_integers_is_a_decision(op):
    tape, scope = Tape(), Scope()
    with RecordingMode(tape, scope):
        first = DECIDE[op](draw_scores(6, 8))
    with ReplayMode(tape, scope, promote=True):
        again = DECIDE[op](draw_scores(6, 8, seed=3).double())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_recorded_mask_is_not_changed_by_later_updates_in_place():
    def group_limited(x):  # the mask is made by an op on floats, then filled
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask.scatter_(-1, x.topk(2, -1).indices, True)
        return mask

    first, again, _ = replay(group_limited, draw_scores(6, 8))
    assert torch.equal(first, again) and int(again.sum()) == 12


def test_explicit_casts_to_low_precision_do_not_round_the_truth():
    weight = draw_scores(8, 8, seed=2).double()

    def router(x):
        p = F.softmax(x @ weight.to(x.dtype), -1, dtype=torch.float32) + torch.zeros(8, dtype=torch.float32)
        return (p.float().half() * torch.tensor([1.0, 1.1] * 4)).to(torch.bfloat16)

    x = draw_scores(6, 8)
    exact = F.softmax(x.double() @ weight, -1) * torch.tensor([1.0, 1.1] * 4).double()
    first, truth, _ = replay(router, x)
    assert first.dtype == torch.bfloat16 and truth.dtype == torch.float64
    assert torch.allclose(truth, exact, rtol=1e-7, atol=0)


DRAW = {
    "rand": lambda x: x + torch.rand(6, 8).to(x),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "multinomial": lambda x: x.softmax(-1).multinomial(2) + x[:, :2] * 0,
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "randperm": lambda x: x[torch.randperm(6)],
}


@pytest.mark.parametrize("op", DRAW)
def test_random_draws_are_the_same_in_float64(op):
    torch.manual_seed(0)
    first, truth, _ = replay(DRAW[op], draw_scores(6, 8))
    assert truth.dtype == torch.float64
    torch.testing.assert_close(first.double(), truth, rtol=1e-5, atol=1e-6)


def test_a_draw_inside_a_kernel_is_refused():
    def attention(x):
        q = x.view(1, 1, 6, 8)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)[0]

    tape, scope = Tape(), Scope()
    q = draw_scores(1, 1, 6, 8)
    with RecordingMode(tape, scope):
        F.scaled_dot_product_attention(q, q, q)
    assert not tape.cannot_replay
    tape.cannot_replay = "draws"
    with pytest.raises(CannotReplay, match="draws"):
        ReplayMode(tape, scope, promote=True)


def test_another_path_in_float64_is_refused():
    def path(x):
        return x.topk(2).values if x.dtype == torch.float32 else x.topk(3).values

    with pytest.raises(CannotReplay, match="topk"):
        replay(path, draw_scores(6, 8))


def test_near_ties_follow_the_reference_and_are_counted():
    x = draw_scores(32, 8)
    x[5, 3] = x[5].topk(2).values[1] * (1 - 1e-8)  # rounds to a tie
    x[9] = torch.tensor([1.0, 1.0, 1.0, 0, 0, 0, 0, 0])
    moved = x.clone()
    moved[5, x[5].topk(2).indices] += torch.tensor([0.0, -1e-7])
    moved[9, 2] += 1e-7
    first, out, (row,) = align(lambda t: t.topk(2, -1), x, moved)
    assert (row.block, row.op, row.case, row.tokens) == ("layers.1.mlp", "topk", "a case", 32)
    assert row.imposed == 2 and row.beyond == 0 and row.identical == 30 / 32 and row.margin < 1e-6
    assert torch.equal(first.indices, out.indices)
    assert torch.equal(out.values, moved.gather(-1, out.indices))


def test_a_difference_beyond_rounding_is_kept_and_counted():
    x = draw_scores(32, 8)
    moved = x.clone()
    moved[5] = moved[5].flip(0)
    selected = moved.topk(2, -1).indices
    first, out, (row,) = align(lambda t: t.topk(2, -1), x, moved)
    assert row.imposed == 0 and row.beyond == 1 and row.identical == 31 / 32
    assert torch.equal(out.indices, selected) and not torch.equal(out.indices, first.indices)


def test_a_tie_that_is_broken_differently_is_a_difference():
    x = torch.zeros(4, 8)
    tape, scope = Tape(), Scope()
    with scope.enter("mlp"):
        with RecordingMode(tape, scope):
            x.topk(2, -1)
        (decision,) = next(iter(tape.decisions.values()))
        selected = decision.results[0].clone()
        decision.results = (selected.flip(-1) + 1,)  # other experts of the tie
        mode = AlignMode(tape, scope, TOL)
        with mode:
            assert torch.equal(x.topk(2, -1).indices, selected)
    assert mode.rows[0].beyond == 4 and mode.rows[0].imposed == 0


@pytest.mark.parametrize("op", SELECT)
def test_every_selection_aligns(op):
    x = torch.full((6, 8), 0.5)  # ties everywhere: any selection is correct
    moved = x + draw_scores(6, 8) * 1e-9
    first, out, (row,) = align(SELECT[op], x.double(), moved.double() + draw_scores(6, 8).double() * 1e-9)
    assert torch.equal(out[0], first[0]) and row.beyond == 0
    _, out, (row,) = align(SELECT[op], draw_scores(6, 8), draw_scores(6, 8, seed=1))
    assert torch.equal(out[0], SELECT[op](draw_scores(6, 8, seed=1))[0]) and row.imposed == 0


def test_masked_experts_and_other_ops_between():
    def router(x):
        top = x.masked_fill(x < -1, -torch.inf).topk(2, -1)
        return top.indices

    x = draw_scores(32, 8)
    first, out, (row,) = align(router, x, x.clone())
    assert torch.equal(first, out) and row.identical == 1
    # Ops that only one of the programs has do not shift the alignment.
    tape, scope = Tape(), Scope()
    with RecordingMode(tape, scope):
        x.argsort(-1), x.topk(3, -1), x.topk(2, -1)
    mode = AlignMode(tape, scope, TOL)
    with mode:
        x.max(-1), x.topk(2, -1)
    assert not mode.rows  # outside of a block nothing is reported


def test_alignment_when_rounding_decides_the_second_router():
    """Compare two layers: without alignment of the first, all values of the second would differ."""
    from tests.verification.models import Plain, Rewritten

    from .compared_models import check

    class Two(nn.Module):
        def __init__(self, kind):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = kind(dropout=0.0), kind(dropout=0.0)
            with torch.no_grad():  # experts 0-3 score like 4-7 up to rounding
                self.b.router.weight[4:] = self.b.router.weight[:4] * (1 + 1e-7)
                self.b.router.bias[4:] = self.b.router.bias[:4]

        def forward(self, x):
            return self.b(x + self.a(x)[0])

    torch.manual_seed(0)
    original, compiled = Two(Plain), Two(Rewritten)
    compiled.load_state_dict(original.state_dict())
    x = torch.randn(4, 64, 16)
    differ = (original(x)[1].topk(2).indices != compiled(x)[1].topk(2).indices).any(-1)
    assert bool(differ.any())
    for dtype in (None, torch.float64, torch.bfloat16):
        comparison = check(original, compiled, x, dtype=dtype)
        assert comparison.ok, [row for row in comparison.rows if not row.ok]
    compiled.b.fault = "swapped experts"
    assert not check(original, compiled, x).ok


def test_tensors_of_the_default_dtype_are_promoted():
    """Promote constants of the default dtype too: scatter and products require equal dtypes."""

    def function(x):
        w, ids = x.topk(2, -1)
        gates = torch.zeros(len(x), x.shape[-1]).scatter(1, ids, w) * torch.full((x.shape[-1],), 0.5)
        return gates @ torch.eye(x.shape[-1]) + torch.rand(x.shape[-1])

    first, exact, _ = replay(function, draw_scores(5, 8))
    assert exact.dtype is torch.float64
    torch.testing.assert_close(exact.float(), first)
