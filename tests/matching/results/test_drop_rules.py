"""Capacities: a drop rule if one describes the kept slots, else the program's own mask."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.errors import Refused
from moefx.matching.results.match_result import Match

from ...blocks import D, E, H, K, Loop, Mlp, rewritten
from ...models.unseen import capacity


class Queue(Loop):
    """Each expert takes the first `room` of its slots, in an order that subclasses define."""

    def __init__(self, room=lambda n: max(2, int(1.1 * K * n / E))):
        super().__init__(Mlp)
        self.room = room

    def order(self, t, k, w):
        return torch.arange(len(t))

    def forward(self, x):
        w, ids = self.route(x)
        out, room = torch.zeros_like(x), self.room(x.shape[0])
        for e in range(E):
            t, k = torch.where(ids == e)
            first = self.order(t, k, w)[:room]
            t, k = t[first], k[first]
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


class FirstChoices(Queue):
    def order(self, t, k, w):
        return torch.argsort(k, stable=True)


class Largest(Queue):
    def order(self, t, k, w):
        return torch.argsort(w[t, k], descending=True, stable=True)


class Last(Queue):
    def order(self, t, k, w):
        return torch.arange(len(t)).flip(0)


class Crowded(Queue):
    """Drop slots only if an expert has too many."""

    def __init__(self, keep):
        super().__init__(lambda n: 6)
        self.keep = keep

    def forward(self, x):
        w, ids = self.route(x)
        out, room = torch.zeros_like(x), self.room(x.shape[0])
        for e in range(E):
            t, k = torch.where(ids == e)
            if len(t) > room:
                first = self.keep(w[t, k], room)
                t, k = t[first], k[first]
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def check_sizes(block: nn.Module, *tokens: int) -> Match:
    """Compare the rewritten block for each number of tokens; return its match."""
    block = block.double()
    result = rewritten(block, torch.randn(9, D, dtype=torch.float64))
    program = result.graph.compile()
    for n in tokens:
        x = torch.randn(n, D, dtype=torch.float64)
        assert all(guard.holds({"S": n}) for guard in result.match.guards)
        torch.testing.assert_close(program(block, x), block(x))
    return result.match


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("block", "order"), [(Queue, "position_token"), (FirstChoices, "position_slot"), (Largest, "weight")]
)
def test_the_rule_is_found_and_applied(block, order):
    match = check_sizes(block(), 1, 2, 7, 50, 333)
    assert match.drop_rule is not None and match.drop_rule.order == order and match.keep_masks is None
    assert all(match.drop_rule.capacity({"S": n}) == max(2, int(1.1 * K * n / E)) for n in range(1, 3000))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "room",
    [
        lambda n: math.ceil(n / E),
        lambda n: min(n, max(4, math.ceil(n * 1.25 / E))),
        lambda n: K * ((n + E - 1) // E),
        lambda n: (n // 3) + (n // 3) % 2 + 1,
        lambda n: round(0.3 * n) + 1,
        lambda n: min(int(1.25 * n / E) + int(1.25 * n / E) % 2, 100),
        lambda n: int(1.1 * K * n / E) + 1,
        lambda n: max(3, 2 * int(1.1 * n / E)),
        lambda n: int(n * 1.1) // E + 1,
    ],
    ids=["ceil", "clamped", "rounded_up", "even", "round", "capped", "plus_one", "times_two", "divided"],
)
def test_capacities_hold_for_all_sizes(room):
    capacity = rewritten(Queue(room)).match.drop_rule.capacity
    assert [capacity({"S": n}) for n in range(1, 600)] == [room(n) for n in range(1, 600)]


SEVERAL = 12


class TwelveExperts(Queue):
    """Use a number of experts with an odd factor: few sizes are divisible by it."""

    def __init__(self, room):
        super().__init__(room)
        self.gate = nn.Linear(D, SEVERAL, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(SEVERAL))

    def forward(self, x):
        w, ids = self.route(x)
        out, room = torch.zeros_like(x), self.room(x.shape[0])
        hot = F.one_hot(ids, SEVERAL).reshape(-1, SEVERAL)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1).reshape(ids.shape)
        for e in range(SEVERAL):
            t, k = torch.where((ids == e) & (place < room))
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


class Sampled(TwelveExperts):
    """Use the capacity in a `topk`, so that no comparison shows it."""

    def forward(self, x):
        best = self.gate(x).topk(min(self.room(x.shape[0]), x.shape[0]), 0).values[-1]
        w, ids = (self.gate(x) + best).softmax(-1).topk(K, -1)
        return self.mixed(x, w, ids)


@pytest.mark.sampled(12)
def test_crowded_experts_keep_their_largest_weights():
    match = check_sizes(Crowded(lambda w, room: w.argsort(descending=True)[:room]), 7, 33, 200)
    assert match.drop_rule is not None and match.drop_rule.order == "weight"


@pytest.mark.parametrize(
    ("fewer", "reason"),
    [(0, "some slots are dropped by no known rule.*compute a mask over all slots"),
     (1, "more than 6 rows keeps 5 of them, and one with 6 rows keeps all: if len.*compare the number of rows")],
)  # fmt: skip
def test_topk_over_the_slots_of_crowded_experts_is_refused(fewer, reason):
    with pytest.raises(Refused, match=reason):
        rewritten(Crowded(lambda w, room: w.topk(room - fewer).indices))


@pytest.mark.parametrize("block", [TwelveExperts, Sampled])
@pytest.mark.parametrize(
    "room",
    [
        lambda n: max(math.ceil(n / SEVERAL), 4),
        lambda n: max(math.ceil(n / SEVERAL * 1.0), 4),
        lambda n: int(1.25 * n * K / SEVERAL) + 1,
        lambda n: max(int(n / SEVERAL), 1) + 1,
        lambda n: 2 if n > 32 else 1,
    ],
    ids=["ceil", "float", "plus_one", "floor", "threshold"],
)
def test_capacities_that_differ_at_few_sizes(block, room):
    """Distinguish `ceil(q)` and `int(q) + 1`, which are equal unless q is whole."""
    model = block(room)
    result = rewritten(model)
    for n in (1, 2, 12, 24, 30, 31, 32, 33, 36, 47, 48, 49, 60, 96, 97, 120, 240, 252):
        if all(g.holds({"S": n}) for g in result.match.guards):
            x = torch.randn(1, D) + 0.01 * torch.randn(n, D)
            torch.testing.assert_close(result.graph.compile()(model, x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("experts", [13])
def test_second_choices_that_are_all_dropped(experts, monkeypatch):
    """Fill the capacity by first choices alone, if two experts get all tokens."""
    monkeypatch.setattr(capacity, "E", experts)
    model = capacity.GShardTop2().double()
    result = rewritten(model, torch.zeros(9, capacity.D, dtype=torch.float64))
    for n in (1, 9, 24, 60):
        x = torch.randn(n, capacity.D, dtype=torch.float64)
        torch.testing.assert_close(result.graph.compile()(model, x), model(x))


class OfImages(Queue):
    """Compute the capacity from the product of several token axes."""

    def __init__(self):
        super().__init__(lambda n: max(4, math.ceil(2 * n / E * 1.25)))

    def forward(self, x):
        return super().forward(x.reshape(-1, D)).reshape(x.shape)


def test_a_capacity_of_a_product_of_sizes():
    model = nn.Sequential(OfImages()).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(2, 8, 8, D, dtype=torch.float64),))
    for size in ((2, 8, 8), (1, 1, 1), (1, 4, 16), (5, 3, 2), (1, 20, 20)):
        x = torch.randn(*size, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


def test_a_piecewise_capacity_is_specialized_per_piece():
    """Build one program per piece of the capacity, the second at the first call with such a size."""
    model = nn.Sequential(Queue(lambda n: (int(0.9 * n / E) + 7) // 8 * 8 if n > 20 else 3)).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(33, D, dtype=torch.float64),))
    block = moefx.blocks(compiled)[0]
    for n in (21, 333, 20, 5, 600, 12):
        x = torch.randn(n, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert block.fallbacks == 0 and len(compiled[0].forward.programs) == 2


def test_an_order_without_a_rule_is_refused():
    with pytest.raises(Refused, match="dropped by no known rule"):
        rewritten(Last())


class Masked(Loop):
    def keep(self, w):
        return w > 0.3

    def forward(self, x):
        w, ids = self.route(x)
        keep, out = self.keep(w), torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where((ids == e) & keep)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


class SecondIsOptional(Masked):
    """Always keep the first choice, regardless of the comparison."""

    def keep(self, w):
        keep = w > 0.3
        return torch.cat([torch.ones_like(keep[:, :1]), keep[:, 1:]], 1)


@pytest.mark.parametrize("block", [Masked, SecondIsOptional])
def test_the_programs_own_mask_is_used(block):
    block = block()
    nn.init.zeros_(block.gate.weight)  # all weights are 1/E: below the threshold
    match = check_sizes(block, 1, 7, 50)
    assert match.drop_rule is None and match.keep_masks is not None


class PassesThrough(Loop):
    def __init__(self):
        super().__init__(Mlp, k=1)

    def forward(self, x):
        w, ids = self.route(x)
        out, room = x.clone(), max(1, int(1.5 * x.shape[0] / E))
        for e in range(E):
            t = (ids[:, 0] == e).nonzero().squeeze(-1)[:room]
            out[t] = self.expert(e, x[t], w[t])
        return out


def test_tokens_without_an_expert_may_pass_through():
    match = check_sizes(PassesThrough(), 1, 7, 50, 333)
    assert match.forms[0].unrouted_value is not None and match.drop_rule is not None


def test_padding_goes_to_no_expert():
    class Padding(Loop):
        def forward(self, x):
            w, ids = self.route(x)
            ids = ids.masked_fill(x[:, :1] > 1.0, E)
            out = torch.zeros_like(x)
            for e in range(E):
                t, k = torch.where(ids == e)
                out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
            return out

    match = check_sizes(Padding(), 1, 7, 50)
    assert match.drop_rule is None and match.keep_masks is None and match.num_experts == E


class ByProbability(Loop):
    """Keep the likeliest tokens of each expert (policy "probs" of DeepSpeed), by the program's mask."""

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        w, ids = scores.topk(K)
        room = min(len(x), max(4, -(-len(x) * K // E)))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
        likely = torch.zeros_like(scores).scatter(1, ids, w).topk(room, dim=0, sorted=False).indices
        kept = chosen & torch.zeros_like(chosen).scatter(0, likely, True)
        gates = scores * kept
        gates, out = gates / gates.sum(-1, keepdim=True).clamp_min(1e-9), torch.zeros_like(x)
        for e in range(E):
            t = kept[:, e].nonzero().flatten()
            out = out.index_add(0, t, self.expert(e, x[t], gates[t, e, None]))
        return out


def test_every_expert_may_keep_its_likeliest_tokens():
    check_sizes(ByProbability(), 1, 7, 50, 333)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "room",
    [lambda n: 64, lambda n: max(int(1.25 * K * n / E), 40), lambda n: -(-n * K // E // 64) * 64],
    ids=["constant", "floor", "multiple"],
)
def test_a_capacity_above_the_first_captures_is_found(room):
    check_sizes(Queue(room), 1, 33, 64, 100, 400)


def test_capacity_for_every_token_is_no_limit():
    """Set the capacity to the number of tokens, which no expert exceeds."""
    block = Queue(lambda n: n)
    block.gate.weight.data.zero_()  # all tokens to the same experts
    assert not check_sizes(block, 1, 9, 60, 300).guards


def test_a_capacity_above_all_captures_is_a_guard():
    """Drop nothing below the guard; above it the original runs."""
    block = Queue(lambda n: 2000)
    match = rewritten(block).match
    assert match.drop_rule is None and [str(g) for g in match.guards] == [f"S*{K} <= 2000"]


class Generous(nn.Module):
    """Use weights of selected experts, and weights per expert after drops, which captures without drops equate."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(8, D, H)), nn.Parameter(torch.randn(8, H, D))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(K, -1)
        w = w / w.sum(-1, keepdim=True)
        chosen = F.one_hot(ids, 8)
        queue = chosen.transpose(0, 1).reshape(-1, 8).cumsum(0).view(K, -1, 8).transpose(0, 1)
        here = (queue <= math.ceil(1.25 * K * len(x) / 8)) & (chosen > 0)
        h = torch.einsum("td,edh->teh", x, self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, (w[..., None] * here).sum(1))


def test_weights_that_differ_in_some_captures_only():
    torch.manual_seed(0)
    match = check_sizes(Generous(), 1, 2, 7, 50, 333)
    assert match.drop_rule is not None and match.drop_rule.order == "position_slot"
    assert not all(lifted.kept_slots.all() for lifted in match.forms)


class Buffers(nn.Module):
    """Compact kept slots into a buffer [E, C, D], which may have fewer rows than there are tokens."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 5, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(5, *s) / 3) for s in ((D, 8), (8, D)))

    def forward(self, x):
        w, ids = self.gate(x).sigmoid().topk(2)
        places, flat = (len(x) * 2 + 4) // 5, ids.reshape(-1)
        hits = F.one_hot(flat, 5)
        rank = (hits.cumsum(0) * hits).sum(-1) - 1
        keep = rank < places
        token, e, rank = torch.arange(len(x)).repeat_interleave(2)[keep], flat[keep], rank[keep]
        rows = x.new_zeros(5, places, D)
        rows[e, rank] = x[token]
        y = torch.bmm(torch.relu(torch.bmm(rows, self.up)), self.down)
        return torch.zeros_like(x).index_add(0, token, y[e, rank] * w.reshape(-1)[keep, None])


def test_a_block_with_buffers_of_slots_is_rewritten():
    check_sizes(Buffers(), 1, 2, 9, 50, 333)


class PerSequence(Loop):
    """Compute the capacity per sequence: the values for 5 x 19 and for 3 tokens are equal, for 1 x 40 they differ."""

    def __init__(self):
        super().__init__(Mlp, k=1)

    def forward(self, x):
        w, ids = self.route(x)
        chosen = F.one_hot(ids[..., 0], E)
        room = float(max(4, int(x.shape[1] * 1.25 / 8)))
        kept = chosen * ((chosen.cumsum(1) - 1) * chosen < room)
        return sum(kept[..., e : e + 1] * w * expert(x) for e, expert in enumerate(self.experts))


def test_a_capacity_of_each_sequence():
    model = nn.Sequential(PerSequence()).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(2, 12, D, dtype=torch.float64),))
    for size in ((2, 12), (1, 40), (5, 19), (3, 100), (1, 1), (4, 33)):
        x = torch.randn(*size, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Allowed(nn.Module):
    """Select the best expert of a token and another one by a table; a buffer masks the weights of experts.

    Args:
        loops: loop over experts instead of gathering weights per slot.
        maps: map the best expert by a table too.
    """

    def __init__(self, loops: bool, maps: bool):
        super().__init__()
        torch.manual_seed(0)
        n = 5
        self.loops, self.maps = loops, maps
        self.gate = nn.Linear(D, n)
        self.up, self.down = nn.Parameter(torch.randn(n, D, H)), nn.Parameter(torch.randn(n, H, D))
        self.register_buffer("allowed", torch.ones(n, dtype=torch.bool))
        self.register_buffer("table", torch.tensor([2, 0, 1, 4, 3]))
        self.register_buffer("other", torch.arange(n))

    def forward(self, x):
        p = self.gate(x).masked_fill(~self.allowed, float("-inf")).softmax(-1)
        best = p.argmax(-1)
        i = torch.stack([self.table[p.argmax(-1)], self.other[best] if self.maps else best], -1)
        w = p.gather(-1, i)
        if not self.loops:
            h = torch.einsum("td,tkdh->tkh", x, self.up[i]).relu()
            return torch.einsum("tkh,tkhd,tk->td", h, self.down[i], w)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            t, k = torch.where(i == e)
            out = out.index_add(0, t, (x[t] @ self.up[e]).relu() @ self.down[e] * w[t, k, None])
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("maps", [False, True])
def test_experts_that_a_buffer_does_not_allow_are_experts(loops, maps):
    """Find experts without a weight in the first captures that select them, without the numeric check."""
    model = Allowed(loops, maps).double()
    plan = moefx.Plan(validation="symbolic")
    x = torch.randn(200, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x[:9],), plan=plan, strict=not maps)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(moefx.blocks(compiled)) == 1 or maps


class Third(nn.Module):
    """Select two experts by one gate and a third by another, which gets the remaining capacity: usually none."""

    def __init__(self, n: int = 5, room: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.other, self.room = nn.Linear(D, n), nn.Linear(D, n), room
        self.up, self.down = nn.Parameter(torch.randn(n, D, H)), nn.Parameter(torch.randn(n, H, D))
        self.register_buffer("allowed", torch.ones(n, dtype=torch.bool))

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        third = self.other(x).masked_fill(~self.allowed, -1e9).argmax(-1, keepdim=True)
        i = torch.cat([p.topk(2).indices, third], -1)
        hot = F.one_hot(i, p.shape[-1])
        before = hot.transpose(0, 1).reshape(-1, p.shape[-1]).cumsum(0) - 1
        place = (before.reshape(i.shape[1], -1, p.shape[-1]).transpose(0, 1) * hot).sum(-1)
        w = p.gather(-1, i) * (place < self.room)
        places = F.one_hot(place.clamp(max=self.room - 1), self.room).to(x.dtype)
        combine = torch.einsum("tk,tke,tkc->tec", w, hot.to(x.dtype), places)
        h = torch.einsum("ecd,edh->ech", torch.einsum("tec,td->ecd", (combine != 0).to(x.dtype), x), self.up).relu()
        return torch.einsum("tec,ecd->td", combine, torch.einsum("ech,ehd->ecd", h, self.down))


@pytest.mark.exhaustive
def test_a_slot_that_is_nearly_always_dropped():
    """Keep the third slot, which few tokens show."""
    rewritten = 0
    for n in (5, 7):
        model = nn.Sequential(Third(n)).double()
        compiled = moefx.compile(
            copy.deepcopy(model),
            example_inputs=(torch.randn(24, D, dtype=torch.float64),),
            plan=moefx.Plan(validation="symbolic"),
            strict=False,
        )
        rewritten += len(moefx.blocks(compiled))
        for tokens in (3, 9, 24, 24, 100):
            x = torch.randn(tokens, D, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), model(x))
    assert rewritten


class Threshold(Loop):
    """Give some experts only the tokens with large weights."""

    def __init__(self, strict):
        super().__init__(Mlp, k=1)
        self.strict = strict

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e in range(E):
            keep = (ids == e) & (w > 0.3) if e in self.strict else ids == e
            t, k = torch.where(keep)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strict", [(2,), (1, 3), tuple(range(E - 1))])
def test_a_threshold_of_some_experts_is_refused(strict):
    with pytest.raises(Refused, match="slots are dropped"):
        rewritten(Threshold(strict))


def test_a_threshold_of_all_experts():
    check_sizes(Threshold(range(E)), 1, 9, 100)
