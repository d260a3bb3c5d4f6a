"""Slots of one token with equal experts are added as in the original, or the block is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moefx.errors import Refused

from ...blocks import D, rewritten
from .choosing_blocks import INF, Choosing, E, check, run_experts, sum_by_scatter


def pick_second(remaining):
    """Select a second expert by scores without the first one."""

    def choose(m, p):
        a = p.argmax(-1)
        i = torch.stack([a, remaining(p, F.one_hot(a, E))], -1)
        return p.gather(-1, i), i

    return choose


def pick_by_gates(n):
    """Select one expert by each of several gates, which may select the same."""

    def choose(m, p):
        i = torch.stack([p.argmax(-1), *((p * other).argmax(-1) for other in m.others[: n - 1])], -1)
        return p.gather(-1, i), i

    return choose


def pick_from_table(number):
    def choose(m, p):
        w, i = p.topk(2)
        return w, number(m, i)

    return choose


CHOOSE = {
    "argmax": pick_second(lambda p, first: (p * (1 - first)).argmax(-1)),
    "argmax of -inf": pick_second(lambda p, first: p.masked_fill(first.bool(), INF).argmax(-1)),
    "argsort": pick_second(lambda p, first: (p * (1 - first)).argsort(dim=-1, stable=True)[:, -1]),
    "two gates": pick_by_gates(2),
    "three gates": pick_by_gates(3),
    "table": pick_from_table(lambda m, i: m.table[i]),
    "a row of a table": pick_from_table(lambda m, i: m.tables[0][i]),
    "pairs": pick_from_table(lambda m, i: m.pairs[i[:, 0]]),
    "product": pick_from_table(lambda m, i: (i * m.factor) % E),
    "partner": pick_from_table(lambda m, i: torch.cat([i[:, :1], m.table[i[:, :1]]], -1)),
    "shifted apart": pick_from_table(lambda m, i: torch.stack([i[:, 0], (i[:, 1] + 1) % E], -1)),
}


def sum_by_one_hot(m, x, p, w, i):
    return torch.einsum("ted,te->td", run_experts(m, x), (F.one_hot(i, E) * w.unsqueeze(-1)).sum(1))


def sum_in_a_loop(m, x, p, w, i):
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(i == e)
        out = out.index_add(0, t, (x[t] @ m.up[e]).relu() @ m.down[e] * w[t, k, None])
    return out


def sum_if_either(m, x, p, w, i):
    return torch.einsum("ted,te->td", run_experts(m, x), p * F.one_hot(i, E).any(1))


def add_two_sums(m, x, p, w, i):
    hot = F.one_hot(i, E).to(x.dtype)
    h = torch.einsum("te,td,edh->teh", hot.sum(1), x, m.up).relu()
    return torch.einsum("teh,ehd,te->td", h, m.down, (hot * w[..., None]).sum(1))


def draw_ids():
    return torch.rand(40, E, generator=torch.Generator().manual_seed(0)).topk(2).indices


@pytest.mark.sampled(6)
@pytest.mark.parametrize("choose", [c for c in CHOOSE if c not in ("product", "partner")])
@pytest.mark.parametrize("combine", [sum_by_one_hot, sum_in_a_loop])
def test_equal_slots_that_add_up(choose, combine):
    check(CHOOSE[choose], combine)


@pytest.mark.parametrize("combine", [sum_by_scatter, add_two_sums])
def test_a_second_selection_that_masks_the_first(combine):
    check(CHOOSE["argmax of -inf"], combine)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("choose", [c for c in CHOOSE if c != "argmax of -inf"])
@pytest.mark.parametrize("combine", [sum_by_scatter, sum_if_either, add_two_sums])
def test_equal_slots_that_do_not_add_up(choose, combine):
    reasons = "a token may select the same expert twice|code outside the experts|row depends|Python reads a buffer"
    why = "" if choose == "product" else reasons
    with pytest.raises(Refused, match=why):  # a factor of 0 hides all experts but one from the captures
        rewritten(Choosing(CHOOSE[choose], combine))


def pick_repeatedly(times):
    """Select the best remaining expert `times` times."""

    def choose(m, p):
        columns, remaining = [], p
        for _ in range(times):
            columns.append(remaining.argmax(-1))
            remaining = remaining * (1 - F.one_hot(columns[-1], E))
        i = torch.stack(columns, -1)
        return p.gather(-1, i), i

    return choose


def scatter_last_two(m, x, p, w, i):
    gates = (F.one_hot(i[:, :1], E) * w[:, :1, None]).sum(1) + torch.zeros_like(p).scatter(-1, i[:, 1:], w[:, 1:])
    return torch.einsum("ted,te->td", run_experts(m, x), gates)


def add_last_if_new(m, x, p, w, i):
    return sum_by_one_hot(m, x, p, torch.cat([w[:, :-1], w[:, -1:] * (i[:, -1:] != i[:, -2:-1])], -1), i)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("times", [3])
@pytest.mark.parametrize("combine", [sum_by_one_hot, sum_in_a_loop, add_last_if_new])
def test_more_than_two_equal_slots_that_add_up(times, combine):
    check(pick_repeatedly(times), combine)


@pytest.mark.parametrize("times", [3])
@pytest.mark.parametrize("combine", [scatter_last_two, sum_by_scatter])
def test_more_than_two_equal_slots_that_do_not_add_up(times, combine):
    with pytest.raises(Refused, match="a token may select the same expert twice"):
        rewritten(Choosing(pick_repeatedly(times), combine))


def sum_by_comparison(m, x, p, w, i):
    """Compare ids instead of `one_hot`, whose check of the ids differs between torch versions."""
    return torch.einsum("ted,te->td", run_experts(m, x), torch.stack([((i == e) * w).sum(-1) for e in range(E)], -1))


@pytest.mark.parametrize("combine", [sum_by_comparison, sum_in_a_loop])
def test_expert_ids_of_the_call_that_add_up(combine):
    check(None, combine, draw_ids())


def test_expert_ids_of_the_call_that_do_not_add_up():
    with pytest.raises(Refused, match="a token may select the same expert twice"):
        rewritten(Choosing(None, sum_by_scatter), torch.zeros(40, D), draw_ids())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "number",
    [
        lambda m, i: i,
        lambda m, i: i.flip(-1),
        lambda m, i: (i + 1).masked_fill(i == 2, 9) - 1,
        lambda m, i: i.to(torch.int32).t().reshape(2, -1).t().long(),
    ],
)
def test_choices_of_one_topk_are_different(number):
    """Accept any combination of slots: one `topk` never selects an expert twice."""

    def combine(m, x, p, w, i):
        return scatter(m, x, F.pad(p, (0, 8)), w, i)

    def scatter(m, x, p, w, i):
        return torch.einsum("ted,te->td", run_experts(m, x), torch.zeros_like(p).scatter(-1, i, w)[:, :E])

    check(pick_from_table(number), combine)


def test_numbers_from_the_end():
    """Map index -1 to the last expert, and refuse it as a row of a sorted list."""

    def gathered(m, x, p, w, i):
        return torch.einsum("tkh,tkhd,tk->td", torch.einsum("td,tkdh->tkh", x, m.up[i]).relu(), m.down[i], w)

    check(pick_from_table(lambda m, i: i), gathered)
    with pytest.raises(Refused, match="below 0"):
        rewritten(Choosing(CHOOSE["table"], gathered))


def test_zero_weights_do_not_prove_that_slots_add_up():
    """Refuse a sum of slots that only adds up because a buffer masks the weight of the least likely expert."""

    def choose(m, p):
        i = torch.stack([p.argmin(-1), (p - 0.2).square().argmax(-1)], -1)
        return p.gather(-1, i), i

    with pytest.raises(Refused, match="a token may select the same expert twice"):
        rewritten(Choosing(choose, sum_by_scatter))
