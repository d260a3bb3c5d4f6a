"""Comparisons of the experts' loads in Python, checked for every expert and for few and many tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moefx.errors import Refused
from moefx.matching.probes import exact_loads, load_comparisons

from ...blocks import D, Mlp, rewritten

E = 12  # more experts than a capture can crowd with its tokens


class Loads(nn.Module):
    """Loop over experts. `weigh` returns the weights of all tokens, `run` the results of an expert's rows."""

    def __init__(self, weigh=None, run=None, k: int = 1):
        super().__init__()
        self.weigh, self.run, self.k = weigh, run, k
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))
        self.penalty = [1.0] * (E - 1) + [0.25]

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(self.k)
        if self.weigh is not None:
            w = self.weigh(w, torch.bincount(ids.flatten(), minlength=E).tolist())
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, slot = torch.where(ids == e)
            if self.run is not None:
                t, slot, times = self.run(self, e, t, slot)
            else:
                times = 1.0
            if t.numel() == 0:
                continue
            out = out.index_add(0, t, expert(x[t]) * w[t, slot, None] * times)
        return out


def scale_small_last(m, e, t, k):
    return t, k, 0.5 if t.shape[0] > 8 and e == E - 1 else 1.0


def scale_small_last_by_difference(m, e, t, k):
    return t, k, 0.5 if t.shape[0] - 9 > 0 and e == E - 1 else 1.0


def penalize(m, e, t, k):
    return t, k, m.penalty[e] if len(t) >= 9 else 1.0


def require_a_batch(m, e, t, k):
    return (t[:0], k[:0], 1.0) if e == E - 1 and t.shape[0] < 10 else (t, k, 1.0)


def sum_ones(m, e, t, k):
    return t, k, 0.5 if torch.ones_like(t).sum() > 8 and e == E - 1 else 1.0


def count_mask(m, e, t, k):
    return t, k, 0.5 if (t >= 0).sum() > 8 and e == E - 1 else 1.0


def scale_by_share(m, e, t, k):
    return t, k, 0.5 if t.shape[0] > 8 and t.shape[0] * 2 > 3 * 8 and e == 2 else 1.0


def run_block_of_rows(m, e, t, k):
    if t.shape[0] < 2:
        return t, k, 1.0
    return t, k, 0.5 if t[-1].item() - t[0].item() == t.shape[0] - 1 and t.shape[0] > 2 else 1.0


@pytest.mark.parametrize(
    "run",
    [
        scale_small_last,
        scale_small_last_by_difference,
        penalize,
        pytest.param(require_a_batch, marks=pytest.mark.exhaustive),
        sum_ones,
        count_mask,
        scale_by_share,
        run_block_of_rows,
    ],
    ids=lambda f: f.__name__,
)
def test_a_comparison_that_matters_for_some_expert_is_refused(run):
    with pytest.raises(Refused):
        rewritten(Loads(run=run))


def scale_single_last(m, e, t, k):
    return t, k, 0.5 if t.shape[0] == 1 and e == E - 1 else 1.0


def scale_single_last_by_difference(m, e, t, k):
    return t, k, 0.5 if not t.shape[0] - 1 and e == E - 1 else 1.0


def scale_some_loads(m, e, t, k):
    return t, k, 0.5 if t.shape[0] in (1, 7) and e == 3 else 1.0


def scale_unless_single(m, e, t, k):
    return t, k, 0.5 if t.shape[0] != 1 and e == E - 1 else 1.0


@pytest.mark.parametrize(
    "run",
    [scale_single_last, scale_single_last_by_difference, scale_some_loads, scale_unless_single],
    ids=lambda f: f.__name__,
)
def test_a_load_that_matters_for_one_of_two_choices_is_refused(run):
    with pytest.raises(Refused):
        rewritten(Loads(run=run, k=2))


@pytest.mark.parametrize("slots, experts", [(1, 2), (2, 3), (2, 6), (4, 6), (3, 3)])
@pytest.mark.parametrize("load", [1, 3])
def test_each_expert_beside_the_crowd_gets_the_load(load, slots, experts):
    counts = torch.zeros(experts, dtype=torch.int64)
    routings = [*exact_loads.list_exact_routings(load, slots, experts, tokens=20)]
    for routing in routings:
        assert len(routing.selections) == 20
        assert all(len({*selection}) == slots for selection in routing.selections)
        loads = torch.bincount(torch.tensor(routing.selections).flatten(), minlength=experts)
        counts += loads == load
        assert loads.sum() == 20 * slots
    assert len(routings) == (2 if experts > slots else 0)
    assert (counts > 0).sum() == min(experts, 2 * (experts - slots))


def test_too_few_tokens_for_a_load_give_no_routing():
    assert not [*exact_loads.list_exact_routings(5, 1, 12, tokens=20)]


def test_loads_next_to_a_limit_are_chosen():
    assert exact_loads.choose_exact_loads([("gt", 8), ("eq", 1), ("eq", 0.5)], has_computed_numbers=False) == [
        1, 7, 8, 9
    ]  # fmt: skip
    assert exact_loads.choose_exact_loads([("eq", 300)], has_computed_numbers=True) == [1, 2, 3, 4, 300]


WEIGHTS = {
    "even": lambda w, c: w * 0.5 if max(c) == min(c) else w,
    "neighbours": lambda w, c: w * 0.5 if c[2] == c[3] and c[4] == c[5] and c[0] == c[1] else w,
    "largest_is_last": lambda w, c: w * 0.5 if max(range(E), key=lambda e: c[e]) == E - 1 and c[-1] > 14 else w,
    "single_among_many": lambda w, c: w * 0.5 if w.shape[0] > 40 and any(n == 1 for n in c) else w,
    "crowd_and_idle": lambda w, c: w * 0.5 if max(c) > 8 and sum(c[: E - 1]) == 0 else w,
    "crowd_and_none_idle": lambda w, c: w * 0.5 if max(c) > 8 and min(c) > 0 else w,
}


@pytest.mark.sampled(3)  # one refused and one guarded case
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_loads_that_matter_together_are_refused_or_guarded(name):
    if name != "single_among_many":
        with pytest.raises(Refused):
            rewritten(Loads(weigh=WEIGHTS[name]))
        return
    result = rewritten(Loads(weigh=WEIGHTS[name]))
    assert any("40" in str(guard) for guard in result.match.guards)


def apply_capacity(m, e, t, k):
    return (t[:9], k[:9], 1.0) if t.shape[0] > 9 else (t, k, 1.0)


def narrow_rows(m, e, t, k):
    """Narrow to nine rows, which fails if a probe forces it for fewer."""
    return (t.narrow(0, 0, 9), k.narrow(0, 0, 9), 1.0) if t.shape[0] > 9 else (t, k, 1.0)


def run_chunks(m, e, t, k):
    start, parts = 0, [t[:0]]
    while start < t.shape[0]:
        parts.append(t[start : start + 4])
        start += 4
    return torch.cat(parts), k, 1.0


def pad_rows(m, e, t, k):
    places = 4
    while places < t.shape[0]:
        places *= 2
    return torch.cat([t, t.new_zeros(places - t.shape[0])])[: t.shape[0]], k, 1.0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("run", [apply_capacity, narrow_rows, run_chunks, pad_rows], ids=lambda f: f.__name__)
def test_a_comparison_that_is_the_same_for_all_experts_is_rewritten(run):
    assert rewritten(Loads(run=run)).match.num_experts == E


class Segments(nn.Module):
    """Slice sorted tokens; an expert without tokens has an empty segment."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(1)
        order = ids[:, 0].argsort(stable=True)
        ends = torch.bincount(ids[:, 0], minlength=E).cumsum(0).tolist()
        out = torch.zeros_like(x)
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            t = order[start:end]
            out[t] = self.experts[e](x[t]) * w[t]
        return out


def test_an_empty_segment_is_no_comparison_of_loads():
    assert rewritten(Segments()).match.num_experts == E


class Stopping(Loads):
    """Stop the loop if no token is left."""

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(1)
        out, left = torch.zeros_like(x), x.shape[0]
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
            left -= t.shape[0]
            if left == 0:
                break
        return out


def test_a_loop_that_stops_when_no_token_is_left():
    assert rewritten(Stopping()).match.num_experts == E


def test_a_block_that_compares_no_loads_gets_no_captures(monkeypatch):
    monkeypatch.setattr(load_comparisons, "_find_sides", None)
    assert rewritten(Loads(k=2)).match.num_experts == E
