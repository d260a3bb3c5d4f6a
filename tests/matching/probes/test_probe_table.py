"""Remove each probe: a program that is then rewritten wrongly, or refused needlessly, and is neither with the probe.

Each row of `TABLE` is one probe. The numeric check is off (see `conftest`), which would find most of these rewrites.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
import moefx.matching.first_captures
import moefx.matching.prove
from moefx.matching.probes.expert_coverage import _count_experts
from moefx.matching.probes.probe import Probe
from moefx.matching.probes.probe_list import PROBES

D, E = 8, 4


def draw(tokens):
    return torch.randn(tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def choose(*experts):
    """Make one token per expert, which scores that expert highest: `Loop` has an identity matrix as router."""
    return 4 * torch.eye(D, dtype=torch.float64)[list(experts)] + draw(len(experts)) / 9


class Loop(nn.Module):
    """Mixture of experts. Each program below changes one step."""

    def __init__(self, num_experts=E, k=2):
        super().__init__()
        self.router, self.k = nn.Linear(D, num_experts, bias=False), k
        nn.init.eye_(self.router.weight)
        self.experts = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(num_experts))

    def forward(self, x):
        return self.mix(x, *self.select(x))

    def select(self, x):
        return self.router(x).softmax(-1).topk(self.k)

    def mix(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.run(e, x[t]) * w[t, k, None])
        return out

    def run(self, e, rows):
        return self.experts[e](rows).relu()


class ScaledRows(Loop):
    """Scale the rows of each expert. A factor of the weights would need no probe: the graph keeps the program's ops."""

    def mix(self, x, w, ids):
        factor, out = self.factor(w, ids), torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.run(e, x[t]) * w[t, k, None] * factor[t, k, None])
        return out


# ---------------------------------------------------------------------- slots and experts
class FirstTen(Loop):
    """Keep ten selections, first slots first: no second slot is kept if there are ten tokens."""

    def forward(self, x):
        w, ids = self.select(x)
        kept = (torch.arange(2 * len(x)).view(2, -1) < 10).t()
        out = torch.zeros_like(x)
        for k in range(2):
            for e in range(E):
                (t,) = torch.where((ids[:, k] == e) & kept[:, k])
                out = out.index_add(0, t, self.run(e, x[t]) * (w * kept)[t, k, None])
        return out


class LastOfMany(nn.Module):
    """Gather the matrix of each token's expert. The last expert is another function."""

    def __init__(self):
        super().__init__()
        self.router, self.up = nn.Linear(D, 105, bias=False), nn.Parameter(torch.randn(105, D, D))

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(1)
        y = torch.einsum("td,tde->te", x, self.up[ids[:, 0]])
        return torch.where(ids == 104, y.tanh(), y.relu()) * w


class OneExpert(Loop):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, x):
        w, ids = self.router(x).sigmoid().topk(1)
        out = torch.zeros_like(x)
        for e in range(1):
            t, k = torch.where((ids == e) & (w > 0.5))
            out = out.index_add(0, t, self.run(e, x[t]) * w[t, k, None])
        return out


class ByTokenId(Loop):
    def forward(self, x, ids):
        chosen, out = ids % E, torch.zeros_like(x)
        for e in range(E):
            mask = chosen == e
            if mask.any():  # true for each expert, while ids spread out
                out[mask] = self.run(e, x[mask])
        return out


# ---------------------------------------------------------------------- branches, floats and integers
class WarmUp(Loop):
    def __init__(self):
        super().__init__()
        self.register_buffer("is_warm", torch.zeros((), dtype=torch.long))

    def select(self, x):
        w, ids = super().select(x)
        return (w / 2 if self.is_warm else w), ids


class Threshold(ScaledRows):
    def factor(self, w, ids):
        return w > 0.01


class Limited(Loop):
    def __init__(self):
        super().__init__()
        self.limit = nn.Parameter(torch.full((E,), 0.15))

    def select(self, x):
        scores = self.router(x).softmax(-1)
        w, ids = scores.topk(2)
        return w * (ids == torch.minimum(scores, self.limit).topk(2).indices).all(-1)[:, None], ids


class HashedMask(ScaledRows):
    def forward(self, x, ids):
        self.is_kept = (ids * ids * 7919 % 10007 != 36)[:, None].expand(-1, 2)
        return super().forward(x)

    def factor(self, w, ids):
        return self.__dict__.pop("is_kept")


MASKED_ID = next(n for n in range(10007) if n * n * 7919 % 10007 == 36)


class ByCount(ScaledRows):
    def factor(self, w, ids):
        return (1 + torch.bincount(ids.flatten(), minlength=E) // 300)[ids]


class Ranked(ScaledRows):
    def factor(self, w, ids):
        hot = F.one_hot(ids.flatten(), E)
        return (hot.cumsum(0) * hot).sum(-1).view_as(ids) <= 64


class PassingTests(Loop):
    """Halve the results of tokens that choose three of 16 experts in one of 3360 orders."""

    def __init__(self):
        super().__init__(16, 3)

    def mix(self, x, w, ids):
        results = x.new_zeros(len(x), 3, D)
        for e in range(16):
            t, k = torch.where(ids == e)
            results = results.index_put((t, k), self.run(e, x[t]) * w[t, k, None])
        halved = results / 2
        for slot, number in enumerate((5, 2, 7)):
            halved = torch.where((ids[:, slot] == number)[:, None, None], halved, results)
        return halved.sum(1)


class Remembering(Loop):
    """Select the experts of the previous call, if it had as many tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(0, 2, dtype=torch.long))

    def select(self, x):
        scores = self.router(x).softmax(-1)
        if self.last.size(0) == len(x):
            ids = self.last
        else:
            ids = scores.topk(2).indices
            self.last = ids.detach()
        return scores.gather(-1, ids), ids


class TwoMaxima(Loop):
    """Select by two maxima, which are the same expert if the other scores are zero."""

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        first = scores.argmax(-1)
        second = (scores * (1 - F.one_hot(first, E))).argmax(-1)
        ids = torch.stack([first, second], 1)
        gates = torch.zeros_like(scores).scatter(1, ids, torch.full_like(scores[:, :2], 0.7))
        return sum(gates[:, e : e + 1] * self.run(e, x) for e in range(E))


# ---------------------------------------------------------------------- numbers of tokens
class WithoutSecondRow(Loop):
    def forward(self, x):
        try:
            x[1]
        except IndexError:
            return self.experts[0](x)
        return super().forward(x)


class ByLoad(Loop):
    """Scale experts by a list of numbers, one per number of tokens."""

    def __init__(self):
        super().__init__(3)

    def mix(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(3):
            t, k = torch.where(ids == e)
            scale = ([1.0, 0.5] + [1.0] * 9999)[len(t)]
            out = out.index_add(0, t, self.run(e, x[t]) * w[t, k, None] * scale)
        return out


class OneCrowd(Loop):
    def __init__(self):
        super().__init__(12)

    def run(self, e, rows):
        y = super().run(e, rows)
        return y / 2 if len(rows) > 18 and e == 6 else y


class ByHalf(Loop):
    def select(self, x):
        w, ids = super().select(x)
        return w * max(1, int(len(x) / 2) // 50), ids


class ByDivisor(Loop):
    def select(self, x):
        w, ids = super().select(x)
        return (w / 2 if math.gcd(len(x), 64) == 64 else w), ids


class OddOrEven(Loop):
    def select(self, x):
        w, ids = super().select(x)
        return w * (1 + len(x) % 2), ids


# ---------------------------------------------------------------------- idle experts
class CountingIdle(Loop):
    def __init__(self):
        super().__init__(7, 1)

    def mix(self, x, w, ids):
        out, idle = torch.zeros_like(x), 0
        for e in range(7):
            t = (ids == e).nonzero()[:, 0]
            if len(t) == 0:
                idle += 1
                continue
            out = out.index_add(0, t, self.run(e, x[t]) * w[t])
        return out * 0.5 if idle == 5 else out


class CountingBusy(Loop):
    def __init__(self):
        super().__init__(8, 1)

    def mix(self, x, w, ids):
        out, busy = torch.zeros_like(x), torch.zeros((), dtype=torch.long)
        for e in range(8):
            t = (ids == e).nonzero()[:, 0]
            if len(t):
                busy += 1
                out = out.index_add(0, t, self.run(e, x[t]) * w[t])
        return out * 0.5 if busy.item() == 2 else out


class ListingIdle(Loop):
    def __init__(self):
        super().__init__(7, 1)

    def mix(self, x, w, ids):
        idle = [e for e in range(7) if not (ids == e).any()]
        return super().mix(x, w * (2.0 if len(idle) > 5 else 1.0), ids)


# ---------------------------------------------------------------------- the table
def set_buffer(name, value):
    def change(model):
        getattr(model, name).fill_(value)

    return change


@dataclasses.dataclass(frozen=True)
class Row:
    """A program, and what happens to it without a probe.

    Attributes:
        calls: the arguments of later calls.
        change: changes the model after it was compiled.
        without: "wrong": some call returns another value. "accepted": it is rewritten, although nothing selects.
            "refused": it is refused, although the rewrite is right. Otherwise no program was found that needs the
            probe: the words of the refusal, or "right".
        caught_by: the check that catches the program without the probe, if no program needs it.
    """

    model: Callable[[], nn.Module]
    calls: tuple[tuple[torch.Tensor, ...], ...]
    example: tuple[torch.Tensor, ...] = (draw(20),)
    change: Callable[[nn.Module], None] = lambda model: None
    without: str = "wrong"
    caught_by: str = ""


TWO_BUSY = choose(*[0] * 30, *[1] * 30)
IDS = torch.arange(1, 21)
TABLE = {
    "show_all_slots": Row(FirstTen, ((draw(3),), (draw(7),), (draw(40),)), without="refused"),
    "show_all_experts": Row(LastOfMany, ((draw(2000),),)),
    "refuse_single_expert": Row(OneExpert, ((draw(7),),), without="accepted"),
    "leave_experts_idle": Row(
        ByTokenId,
        ((draw(9), torch.zeros(9, dtype=torch.long)), (draw(9), torch.arange(9))),
        example=(draw(20), (IDS - 1) * 7 % 23),
        without="refused",
    ),
    "flip_branches": Row(WarmUp, ((draw(9),),), change=set_buffer("is_warm", 1)),
    "mix_decisions": Row(Threshold, ((20 * draw(40),),)),
    # the lift finds the mask by its terms, and the captures show both of its outcomes
    "separate_selections": Row(Limited, ((draw(400),),), without="right", caught_by="mix_decisions, and the lift"),
    "vary_integer_inputs": Row(HashedMask, ((draw(9), torch.full((9,), MASKED_ID)),), example=(draw(20), IDS)),
    "vary_count_functions": Row(ByCount, ((draw(900),),)),
    "combine_choices": Row(
        PassingTests, ((draw(9),), (torch.tensor([[0, 0, 3, 0, 0, 4, 0, 2]] * 9, dtype=torch.float64),))
    ),
    "overflow_limits": Row(Ranked, ((draw(400),),)),
    "vary_state_between_calls": Row(Remembering, ((draw(9),), (-draw(9),))),
    "repeat_experts": Row(TwoMaxima, ((1e5 * draw(9),),)),
    "vary_token_counts": Row(WithoutSecondRow, ((draw(1),), (draw(2),), (draw(3),))),
    "vary_expert_counts": Row(ByLoad, ((draw(3),), (draw(5),), (draw(2),))),
    "vary_loads": Row(OneCrowd, ((draw(288),),)),
    "vary_leaked_sizes": Row(ByHalf, ((draw(800),),)),
    "try_round_sizes": Row(ByDivisor, ((draw(128),), (draw(63),))),
    "guard_constant_expressions": Row(OddOrEven, ((draw(6),), (draw(7),), (draw(30),))),
    "refuse_emptiness_decisions": Row(CountingIdle, ((TWO_BUSY,), (draw(9),))),
    "refuse_python_integers": Row(CountingBusy, ((TWO_BUSY,), (draw(9),))),
    "concentrate_tokens": Row(
        ListingIdle,
        ((choose(*[3] * 60),),),
        without="depends on which experts have tokens",
        caught_by="refuse_emptiness_decisions",
    ),
}


def remove_probe(monkeypatch, name):
    """Leave out a probe and its repetitions. Later steps need the number of experts from `show_all_experts`, and the
    first captures show experts in its place."""
    if name == "show_all_experts":
        monkeypatch.setattr(moefx.matching.first_captures, "choose_unseen_experts", lambda state: ())
    count = Probe(lambda state: state.set_num_experts(_count_experts(state)), "no proof at all")
    for names in ("COVERAGE", "INTERVENTIONS", "CONFIRMATIONS"):
        probes = [count if p.name == name == "show_all_experts" else p for p in getattr(moefx.matching.prove, names)]
        monkeypatch.setattr(moefx.matching.prove, names, tuple(p for p in probes if p.name != name))


def compile_and_call(row):
    """Return whether each call has the value of the original, and whether it ran the rewritten block.

    Raises:
        NoMoEBlockFound: the block is refused.
    """
    torch.manual_seed(0)
    model = row.model().double()
    original = copy.deepcopy(model)
    compiled = moefx.compile(model, example_inputs=row.example)
    row.change(compiled)
    row.change(original)
    are_right = [torch.allclose(compiled(*call), original(*call)) for call in row.calls]
    return are_right, moefx.blocks(compiled)[0].fallbacks < len(row.calls)


@pytest.mark.filterwarnings("ignore:.*is not rewritten for this kind of call")
@pytest.mark.parametrize("name", TABLE)
def test_a_program_that_needs_the_probe(name, monkeypatch):
    row = TABLE[name]
    try:
        are_right, is_rewritten = compile_and_call(row)
        assert all(are_right) and is_rewritten
        is_refused = False
    except moefx.NoMoEBlockFound:
        is_refused = True
    remove_probe(monkeypatch, name)
    match row.without:
        case "wrong":
            assert not all(compile_and_call(row)[0])
        case "accepted":
            assert is_refused and compile_and_call(row)[1]
        case "refused":
            assert not is_refused
            with pytest.raises(moefx.NoMoEBlockFound):
                compile_and_call(row)
        case "right":
            assert all(compile_and_call(row)[0])
        case reason:
            with pytest.raises(moefx.NoMoEBlockFound, match=reason):
                compile_and_call(row)


def test_each_probe_has_a_program():
    assert {*TABLE} == {probe.name for probe in PROBES}
    assert all(bool(row.caught_by) != (row.without in ("wrong", "accepted", "refused")) for row in TABLE.values())
