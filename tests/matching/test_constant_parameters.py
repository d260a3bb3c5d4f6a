"""Parameters and buffers that are all zeros or ones before training are not treated as constants."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import moefx

from ..blocks import D, E, K, Loop, Mlp

HELD = {"bias": torch.zeros(E), "most": torch.full((E,), 100.0),
        "ones": torch.ones(E), "noise": torch.zeros(()), "offset": torch.zeros(E),
        "factor": torch.ones(())}  # fmt: skip


class Held(Loop):
    """Route by `route`: (self, x) -> (weights, experts, mask of kept slots, statistics)."""

    def __init__(self, route, k=K):
        super().__init__(Mlp, k)
        self.choose, self.k = route, k
        for name, value in HELD.items():
            self.register_buffer(name, value.clone())

    def forward(self, x):
        w, ids, keep, statistics = self.choose(self, x)
        return self.kept(x, w, ids, keep), statistics

    def kept(self, x, w, ids, keep):
        return self.mixed(x, w * keep, ids)

    def change(self, generator):
        for name, value in HELD.items():
            getattr(self, name).copy_(value + torch.rand(value.shape, generator=generator))


class Dense(Held):
    def mixed(self, x, w, ids):
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter_add(1, ids, w)
        up, down = (torch.stack([getattr(e, name).weight for e in self.experts]) for name in ("up", "down"))
        return torch.einsum("teh,edh,te->td", torch.einsum("td,ehd->teh", x, up).relu(), down, gates)


class Masked(Held):
    """Skip dropped slots in the loop."""

    def kept(self, x, w, ids, keep):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where((ids == e) & keep)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
        return out


def count_choices(ids):
    return F.one_hot(ids, E).sum((0, 1))


def count_another_choice(b, x):
    scores = b.gate(x).sigmoid()
    clean = scores.topk(b.k, -1)[1]
    ids = (scores + b.bias).topk(b.k, -1)[1]
    return scores.gather(1, ids), ids, torch.ones_like(ids, dtype=torch.bool), count_choices(clean)


def route_by_argmax(b, x):
    scores = b.gate(x).softmax(-1)
    clean, ids = scores.argmax(-1), (scores + b.bias).argmax(-1)
    return (
        scores.gather(1, ids[:, None]),
        ids[:, None],
        torch.ones_like(ids[:, None], dtype=torch.bool),
        count_choices(clean[:, None]),
    )


def route_to_alive(b, x):
    scores = b.gate(x).softmax(-1)
    clean = scores.topk(b.k, -1)[1]
    w, ids = (scores * b.ones).topk(b.k, -1)
    return w, ids, torch.ones_like(ids, dtype=torch.bool), count_choices(clean)


def route_with_noise(b, x):
    logits = b.gate(x)
    clean = logits.topk(b.k, -1)[1]
    w, ids = (logits + logits.flip(-1) * b.noise).softmax(-1).topk(b.k, -1)
    return w, ids, torch.ones_like(ids, dtype=torch.bool), count_choices(clean)


def route_in_groups(b, x):
    def chosen(scores):
        group = scores.view(-1, 2, E // 2).amax(-1).argmax(-1, keepdim=True)
        is_in = (torch.arange(E) // (E // 2)) == group
        return scores.masked_fill(~is_in, float("-inf")).topk(b.k, -1)[1]

    scores = b.gate(x).sigmoid()
    clean, ids = chosen(scores), chosen(scores + b.bias)
    return scores.gather(1, ids), ids, torch.ones_like(ids, dtype=torch.bool), count_choices(clean)


def weigh_another_choice(b, x):
    """Use the first selection for weights and the second for experts."""
    scores = b.gate(x).sigmoid()
    clean = scores.topk(b.k, -1)[1]
    ids = (scores + b.bias).topk(b.k, -1)[1]
    return scores.gather(1, clean), ids, torch.ones_like(ids, dtype=torch.bool), count_choices(clean)


def route_after_waiting(b, x):
    w, ids = b.gate(x).softmax(-1).topk(1, -1)
    chosen = F.one_hot(ids[:, 0], E)
    place = ((chosen.cumsum(0) + 4 * b.offset) * chosen).sum(-1)
    return w, ids, (place <= 5)[:, None], count_choices(ids)


def route_by_cost(b, x):
    w, ids = b.gate(x).softmax(-1).topk(1, -1)
    chosen = F.one_hot(ids[:, 0], E)
    place = ((chosen * b.ones).cumsum(0) * chosen).sum(-1)
    return w, ids, (place <= 5)[:, None], count_choices(ids)


def route_beside_a_count(b, x):
    w, ids = b.gate(x).softmax(-1).topk(1, -1)
    chosen = F.one_hot(ids[:, 0], E)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return w, ids, (place <= 3 + 4 * b.noise)[:, None], (place > 3).sum()


def route_by_a_factor(b, x):
    w, ids = b.gate(x).softmax(-1).topk(b.k, -1)
    place = F.one_hot(ids, E).sum(1).cumsum(0).gather(1, ids)
    return w, ids, place <= 4 * b.factor, (place > 4).sum()


def limit_another_choice(b, x):
    scores = b.gate(x).softmax(-1)
    clean, ids = scores.argmax(-1), (scores + b.bias).argmax(-1)
    chosen = F.one_hot(clean, E)
    keep = (chosen.cumsum(0) * chosen).sum(-1) <= 4
    return scores.gather(1, ids[:, None]), ids[:, None], keep[:, None], count_choices(ids[:, None])


ROUTES = [
    count_another_choice,
    route_by_argmax,
    route_to_alive,
    route_with_noise,
    route_in_groups,
    weigh_another_choice,
    route_after_waiting,
    route_by_cost,
    route_beside_a_count,
    route_by_a_factor,
    limit_another_choice,
]


def check(model, compiled):
    generator = torch.Generator().manual_seed(0)
    for n in (20, 7, 40):
        x = torch.randn(n, D, dtype=torch.float64, generator=generator, requires_grad=True)
        results = []
        for one in (model, compiled):
            out, statistics = one(x)
            tensors = [x, *one.experts.parameters(), one.gate.weight]
            results.append([out, statistics, *torch.autograd.grad(out.sin().sum(), tensors, materialize_grads=True,
                                                                allow_unused=True)])  # fmt: skip
        for actual, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(actual, expected)
        for one in (model, compiled):
            one.change(torch.Generator().manual_seed(n))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", [Held, Dense, Masked])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_constant_parameters_are_not_folded(route, kind):
    torch.manual_seed(0)
    model = kind(route).double()
    plan = moefx.Plan(validation="symbolic")
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(torch.randn(20, D).double(),), plan=plan)
    check(model, compiled)
    assert moefx.blocks(compiled)[0].fallbacks == 0


def select_mask(scores):
    return torch.zeros_like(scores).scatter(1, scores.topk(K, -1)[1], 1)


def bound_above(b, scores):
    return scores.minimum(b.most)


def bound_below(b, scores):
    return scores.maximum(b.most - 200)


def bound_by_tens(b, scores):
    return scores + (b.offset / 10).floor()


LIMITS = [bound_above, bound_below, bound_by_tens]


class Twice(Held):
    """Select by scores that `behind` bounds: (self, scores) -> scores. No score reaches the bound before training."""

    def __init__(self, behind, mask):
        super().__init__(None)
        self.behind, self.mask = behind, mask

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        mask = self.mask(self.behind(self, scores))
        ids = scores.topk(self.k, -1)[1]
        return self.mixed(x, (scores * mask).gather(1, ids), ids), ids.sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("behind", LIMITS)
def test_a_mask_of_another_choice(behind):
    with pytest.raises(moefx.errors.NoMoEBlockFound, match="some slots are dropped by no known rule"):
        _compile_symbolically(Twice(behind, select_mask).double())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("behind", LIMITS)
def test_a_mask_of_a_comparison_with_another_choice(behind):
    """Keep the masked weights separate from the weights of the other selection."""
    torch.manual_seed(0)
    model = Twice(behind, lambda q: q >= q.topk(K, -1)[0][:, -1:]).double()
    compiled = _compile_symbolically(model)
    check(model, compiled)
    for one in (model, compiled):
        one.most.copy_(torch.tensor([0.1, 0.3, 100, 0.2] * E)[:E])
        one.offset.copy_(torch.tensor([0.1, 90, 0.2, 14] * E)[:E])
    x = torch.randn(20, D).double()
    torch.testing.assert_close(compiled(x)[0], model(x)[0])


def _compile_symbolically(model):
    plan = moefx.Plan(validation="symbolic")
    return moefx.compile(copy.deepcopy(model), example_inputs=(torch.randn(20, D).double(),), plan=plan)


def mask_by_itself(b, x):
    scores = b.gate(x).softmax(-1)
    w, ids = (scores * select_mask(scores)).topk(b.k, -1)
    return w / w.sum(-1, keepdim=True), ids, torch.ones_like(ids, dtype=torch.bool), count_choices(ids)


def mask_by_logits(b, x):
    logits = b.gate(x)
    w = logits.softmax(-1) * select_mask(logits)
    ids = logits.softmax(-1).topk(b.k, -1)[1]
    w = w / w.sum(-1, keepdim=True)
    return w.gather(1, ids), ids, torch.ones_like(ids, dtype=torch.bool), count_choices(ids)


def mask_by_the_least(b, x):
    scores = b.gate(x).softmax(-1) + b.bias
    w = scores * (scores >= scores.topk(b.k, -1)[0][:, -1:])
    ids = scores.topk(b.k, -1)[1]
    return w.gather(1, ids), ids, torch.ones_like(ids, dtype=torch.bool), count_choices(ids)


@pytest.mark.parametrize("route", [mask_by_itself, mask_by_logits, mask_by_the_least])
def test_a_mask_of_the_same_choice(route):
    """Accept two forms of one selection, which no values of the buffers distinguish."""
    test_constant_parameters_are_not_folded(route, Held)


def test_a_constant_parameter_is_not_folded():
    """Keep a zero parameter, which the first optimizer step changes."""
    torch.manual_seed(0)
    model = Held(count_another_choice).double()
    del model.bias
    model.bias = torch.nn.Parameter(torch.zeros(E).double())
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(torch.randn(20, D).double(),))
    with torch.no_grad():
        for one in (model, compiled):
            one.bias.copy_(torch.tensor([0.3, -0.3, 0.1, 0.0]))
    x = torch.randn(20, D).double()
    torch.testing.assert_close(compiled(x), model(x))
