"""Functions of counts, ranks and sizes that change above the captured token counts."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
import moefx.compiler.check_policy
from moefx.compiler.numeric_check import check_numerically
from moefx.matching import prove
from moefx.matching.probes.count_functions import vary_count_functions

from ...blocks import D, E, K, Loop, Mlp


class Weighted(Loop):
    """Change the weights by a function of the whole batch."""

    def __init__(self, change):
        super().__init__(Mlp)
        self.change = change
        self.register_buffer("table", torch.cat([torch.ones(150), torch.full((9000,), 0.5)]))

    def forward(self, x):
        w, ids = self.route(x)
        counts = F.one_hot(ids, E).sum((0, 1))
        w = self.change(self, w, ids, counts)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def _count_ranks(ids, dtype=torch.int64):
    hits = F.one_hot(ids, E).reshape(-1, E).to(dtype)
    return (hits.cumsum(0) - 1).gather(1, ids.reshape(-1, 1)).reshape(ids.shape)


def _scatter_counts(ids):
    return torch.zeros(E, dtype=torch.int64).scatter(0, ids.flatten(), 1, reduce="add")


CHANGES = {
    "divided": lambda b, w, ids, n: w / (1 + (n // 150)[ids]),
    "clamped": lambda b, w, ids, n: w * (n.clamp(min=150)[ids] / 150.0),
    "clamped_in_place": lambda b, w, ids, n: w * (n.clamp_(min=150)[ids] / 150.0),
    "clamped_in_place_and_unused": lambda b, w, ids, n: (n.clamp_(min=150), w)[1],
    "looked_up": lambda b, w, ids, n: w * b.table[n][ids],
    "scattered": lambda b, w, ids, n: w * (_scatter_counts(ids) <= 150)[ids],
    "rank_divided": lambda b, w, ids, n: w / (1 + _count_ranks(ids) // 100),
    "rank_limited": lambda b, w, ids, n: w * (_count_ranks(ids) < 100),
    "rank_in_half": lambda b, w, ids, n: w * (_count_ranks(ids, torch.bfloat16) < 100),
    "rank_in_float": lambda b, w, ids, n: w * (_count_ranks(ids).float() < 99.5),
    "position_in_place": lambda b, w, ids, n: w / (1 + torch.arange(len(w)).remainder_(300))[:, None],
    "size_divided": lambda b, w, ids, n: w / (1 + w.shape[0] // 150),
    "size_floored": lambda b, w, ids, n: w * max(3, int(0.02 * w.shape[0])),
    "size_floored_float": lambda b, w, ids, n: w * (_count_ranks(ids).float() < float(max(20, int(0.1 * w.shape[0])))),
}


def make_crowd(tokens: int) -> torch.Tensor:
    x = torch.randn(tokens, D, dtype=torch.float64)
    x[: 2 * tokens // 3] = x[0].clone()
    return x


@pytest.mark.sampled(len(CHANGES))
@pytest.mark.parametrize("name", list(CHANGES))
def test_functions_of_counts_are_equal_for_many_tokens_per_expert(name):
    """Compile on the meta device, where no numeric check runs."""
    torch.manual_seed(0)
    model = nn.Sequential(Weighted(CHANGES[name])).double()
    compiled = moefx.compile(
        nn.Sequential(Weighted(CHANGES[name])).double().to("meta"),
        example_inputs=(torch.randn(9, D, dtype=torch.float64),),
    )
    compiled = compiled.to_empty(device="cpu")
    compiled.load_state_dict(model.state_dict())
    for tokens in (1, 9, 60, 300, 700):
        x = make_crowd(tokens)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


TABLE = [1.0] * 200 + [0.5] * 600
# Functions that are constant up to a number of tokens or a size, written with ops that no proof needs to follow.
LEVELS = {
    "relu": lambda b, w, ids, n: w / (1 + torch.relu(n - 150)).to(w.dtype)[ids],
    "floor of a float": lambda b, w, ids, n: w * (1 - 0.2 * (n.double() / 150).floor())[ids],
    "rounded sigmoid": lambda b, w, ids, n: w * torch.sigmoid(0.5 * (150 - n.double())).round()[ids],
    "exp": lambda b, w, ids, n: w * torch.exp(-(n.double() - 150).clamp(min=0))[ids],
    "shift": lambda b, w, ids, n: w / (1 + (n >> 8))[ids],
    "list by size": lambda b, w, ids, n: w * TABLE[w.shape[0]],
    "logarithm of a size": lambda b, w, ids, n: w * (0.5 if int(math.log2(w.shape[0] + 2)) == 8 else 1.0),
    "tensor of a size": lambda b, w, ids, n: w / (1 + (torch.tensor(float(w.shape[0])) / 150).floor()),
    "positions": lambda b, w, ids, n: w / (1 + torch.arange(w.shape[0]) // 150)[:, None],
    "from a position on": lambda b, w, ids, n: w.index_fill(0, torch.arange(w.shape[0])[200:], 0.5),
    "up to a position from the end": lambda b, w, ids, n: torch.cat([0.5 * w[:-200], w[-200:]]),
    "from a rank on": lambda b, w, ids, n: w.index_fill(0, w[:, 0].argsort()[200:], 0.5),
    "rank of a float": lambda b, w, ids, n: w * (1 - 0.5 * (w[:, 0].argsort().argsort() > 200).to(w.dtype))[:, None],
    "one position": lambda b, w, ids, n: w * (1 - 0.5 * (torch.arange(w.shape[0]) == 200).to(w.dtype))[:, None],
    "all but one position": lambda b, w, ids, n: w * (torch.arange(w.shape[0]) != 200).to(w.dtype)[:, None],
    "turned positions": lambda b, w, ids, n: w * (200 - torch.arange(w.shape[0]) >= 0).to(w.dtype)[:, None],
    "narrow positions": lambda b, w, ids, n: w * (torch.arange(w.shape[0]).to(torch.uint8) + 1 > 0)[:, None],
    "squares": lambda b, w, ids, n: w * (torch.arange(w.shape[0]) ** 2 < 40000).to(w.dtype)[:, None],
    "one rank": lambda b, w, ids, n: w * (1 - 0.5 * (_count_ranks(ids) == 200).to(w.dtype)),
    "root of a rank": lambda b, w, ids, n: w * (_count_ranks(ids).double().sub(1).sqrt() < 14).to(w.dtype),
    "equal": lambda b, w, ids, n: w * (0.5 if torch.equal(n.max(), torch.tensor(300)) else 1.0),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", list(LEVELS))
def test_saturating_functions_of_counts(name):
    model = nn.Sequential(Weighted(LEVELS[name])).double()
    example = (torch.randn(9, D, dtype=torch.float64),)
    compiled = moefx.compile(copy.deepcopy(model).to("meta"), example_inputs=example, strict=False)
    assert bool(moefx.blocks(compiled)) == (name not in ("list by size", "equal"))
    compiled = compiled.to_empty(device="cpu")
    compiled.load_state_dict(model.state_dict())
    for tokens in (1, 9, 60, 254, 300, 700):
        x = make_crowd(tokens)
        torch.testing.assert_close(compiled(x), model(x), msg=f"{tokens} tokens")


class DividedRows(Loop):
    """Divide each expert's rows by a function of its count. The graph would keep the program's own function of the
    weights."""

    def forward(self, x):
        w, ids = self.route(x)
        divisors = 1 + F.one_hot(ids, E).sum((0, 1)) // 150
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]) / divisors[ids][t, k, None])
        return out


def test_the_numeric_check_sees_large_counts(monkeypatch):
    """Refuse the rewrite by the numeric check alone if the probe of counts is missing."""
    monkeypatch.setattr(moefx.compiler.check_policy, "check_numerically", check_numerically)
    others = tuple(probe for probe in prove.INTERVENTIONS if probe.run is not vary_count_functions)
    monkeypatch.setattr(prove, "INTERVENTIONS", others)
    with pytest.raises(moefx.NoMoEBlockFound, match="a crowd of tokens"):
        moefx.compile(
            nn.Sequential(DividedRows(Mlp)).double(),
            example_inputs=(torch.randn(9, D, dtype=torch.float64),),
        )


class PerSequence(Weighted):
    """Limit the tokens of an expert per sequence, to at least four: the only limit in small captures."""

    def forward(self, x):
        w, ids = self.route(x)
        places = max(min(x.shape[1], int(x.shape[1] * 1.25 / E)), 4)
        hits = F.one_hot(ids, E).float()
        before = (hits.cumsum(1) - hits).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        w = w * (before < float(places))
        flat, out = x.reshape(-1, D), torch.zeros_like(x.reshape(-1, D))
        for e in range(E):
            t, k = torch.where(ids.reshape(-1, ids.shape[-1]) == e)
            out = out.index_add(0, t, self.expert(e, flat[t], w.reshape(-1, w.shape[-1])[t, k, None]))
        return out.reshape(x.shape)


@pytest.mark.exhaustive
def test_a_lower_bound_that_holds_for_small_sizes():
    model = nn.Sequential(PerSequence(None)).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(2, 7, D, dtype=torch.float64),))
    for shape in ((1, 1), (2, 7), (4, 10), (3, 60), (1, 300)):
        x = torch.randn(*shape, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


def test_a_partial_is_the_same_in_the_copy():
    """Compare partials in the compiled model, which holds a copy: partials compare by identity."""
    block = Weighted(None)
    block.change = functools.partial(_scale, factor=0.5)
    compiled = moefx.compile(nn.Sequential(block), example_inputs=(torch.randn(9, D),))
    compiled(torch.randn(9, D))
    assert len(compiled[0].forward.programs) == 1
    compiled[0].change = functools.partial(_scale, factor=2.0)
    x = torch.randn(9, D)
    torch.testing.assert_close(compiled(x), 4 * nn.Sequential(block)(x))


def _scale(block, w, ids, counts, factor):
    return w * factor


class PerToken(Loop):
    """Loop over tokens, and scale the result for more tokens than any capture has."""

    def forward(self, x):
        w, ids = self.route(x)
        rows = [sum(w[t, k] * self.experts[int(ids[t, k])](x[t : t + 1]) for k in range(K)) for t in range(len(x))]
        return torch.cat(rows) * (1.0 if len(rows) <= 400 else 0.5)


@pytest.mark.exhaustive  # `test_python_budgets` guards similar code
def test_loop_over_tokens_is_guarded_by_captured_sizes():
    torch.manual_seed(0)
    model = PerToken().double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(5, D, dtype=torch.float64),))
    for tokens, fallbacks in ((5, 0), (200, 0), (450, 1)):
        x = torch.randn(tokens, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
        assert moefx.blocks(compiled)[0].fallbacks == fallbacks


def test_expert_ids_are_not_ranks():
    """Compare sorted expert ids with a sentinel, which is no capacity and needs no guard."""

    class Sentinel(Loop):
        def forward(self, x):
            w, ids = self.route(x)
            sorted_ids, order = ids.reshape(-1).sort()
            nobody, rows = sorted_ids >= E, x[order // K]
            y = torch.zeros_like(rows)
            for e in range(E):
                (rows_of_expert,) = torch.where(sorted_ids == e)
                y = y.index_copy(0, rows_of_expert, self.experts[e](rows[rows_of_expert]))
            y = y.masked_fill(nobody[:, None], 0.0) * w.reshape(-1)[order, None]
            return torch.zeros_like(x).index_add(0, order // K, y)

    model = nn.Sequential(Sentinel(Mlp)).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(5, D, dtype=torch.float64),))
    x = torch.randn(200, D, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Limited(Loop):
    """Each expert keeps its first tokens.

    `keep(all tokens, tokens of the expert, its weights)` returns a mask or indices.
    """

    def __init__(self, keep):
        super().__init__(Mlp)
        self.keep = keep

    def forward(self, x):
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            stay = self.keep(x, t, w[t, k])
            t, k = t[stay], k[stay]
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def _mask_over(x, t, w):
    return w.topk(40).indices if len(t) > 40 else torch.arange(len(t))


KEEPS = {
    "the smaller of the tokens and a number": lambda x, t, w: torch.arange(len(t)) < min(len(x), 40),
    "a branch on the tokens": lambda x, t, w: torch.arange(len(t)) < (40 if len(x) > 40 else len(x)),
    "places in an expert": lambda x, t, w: torch.arange(len(t)) < 40,
    "as many places": lambda x, t, w: torch.arange(min(40, len(t))),
    "numbers by ones": lambda x, t, w: torch.ones_like(t).cumsum(0) <= 40,
    "the largest weights": _mask_over,
    "as many of the largest weights": lambda x, t, w: w.topk(min(40, len(t))).indices,
}


@pytest.mark.exhaustive  # `test_the_smaller_of_the_tokens_and_a_number_is_a_capacity` runs one of these
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_limit_beyond_the_captures_drops_slots(keep, axes):
    torch.manual_seed(0)
    block = Limited(keep).double()

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x.reshape(-1, D)).view(x.shape)

    model = block if axes == 1 else Rows()
    example = torch.randn(*[(24,), (2, 12)][axes - 1], D, dtype=torch.float64)
    compiled = moefx.compile(
        copy.deepcopy(model), plan=moefx.Plan(validation="symbolic"), example_inputs=(example,), strict=False
    )
    for tokens in (12, 60, 240):
        x = make_crowd(tokens).reshape(*[(-1,), (2, -1)][axes - 1], D)
        torch.testing.assert_close(compiled(x), model(x))


class LimitOfTheLast(Loop):
    def __init__(self):
        super().__init__(Mlp, k=1, num_experts=8)

    def mixed(self, x, w, ids):
        hits = F.one_hot(ids[:, 0], 8)
        rank = (hits.cumsum(0) * hits).sum(1, keepdim=True)
        return super().mixed(x, torch.where((rank > 16) & (ids == 7), w * 0.5, w), ids)


def test_a_limit_of_one_expert_alone():
    torch.manual_seed(0)
    block = LimitOfTheLast().double()
    with torch.no_grad():
        block.gate.weight[7] *= 4  # selected often
    example = torch.randn(36, D, dtype=torch.float64)
    compiled = moefx.compile(
        copy.deepcopy(block), plan=moefx.Plan(validation="symbolic"), example_inputs=(example,), strict=False
    )
    assert moefx.blocks(compiled)
    x = torch.randn(90, D, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), block(x))


def test_the_smaller_of_the_tokens_and_a_number_is_a_capacity():
    model = Limited(KEEPS["the smaller of the tokens and a number"]).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(24, D, dtype=torch.float64),))
    for tokens in (12, 60, 240):
        x = make_crowd(tokens)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


FLAGS = [1] * 150 + [0] * 900


class Flagged(Loop):
    """Drop slots if a function of their rank within the expert returns 0."""

    def __init__(self, flags):
        super().__init__(Mlp)
        self.flags = flags

    def forward(self, x):
        w, ids = self.route(x)
        hits, ranks, out = F.one_hot(ids, E), _count_ranks(ids), torch.zeros_like(x)
        for e in range(E):
            t, k = (hits[..., e] * self.flags(ranks)).bool().nonzero(as_tuple=True)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def _compare_with_limit(r):
    return torch.stack([r, torch.full_like(r, 149)], -1)


# Functions that return 1 or true for few tokens, without a comparison with a number.
FLAGS_OF_RANKS = {
    "a table of floats": lambda r: torch.tensor([float(f) for f in FLAGS])[r],
    "a table of integers": lambda r: torch.tensor(FLAGS)[r],
    "a table of truths": lambda r: torch.tensor(FLAGS)[r].bool(),
    "one of some": lambda r: torch.isin(r, torch.arange(150)),
    "a cast": lambda r: 1 - (r / 150).long().clamp(max=1),
    "a cast of a cast": lambda r: 1 - (r / 150).int().bool().double(),
    "a cast that is 0": lambda r: (r / 150).long() == 0,
    "digits of half precision": lambda r: (r + 106).bfloat16().long() == r + 106,
    "the larger of two": lambda r: _compare_with_limit(r).amax(-1) == 149,
    "where the larger of two is": lambda r: _compare_with_limit(r).argmax(-1),
    "the order of two": lambda r: _compare_with_limit(r).sort(-1).indices[..., 1],
    "the first of two": lambda r: _compare_with_limit(r).topk(1, -1).indices[..., 0],
    "an overflow": lambda r: ~torch.isinf(torch.exp(4.7 * r.double())),
    "how many are beyond": lambda r: (torch.histc(r.double(), 1, 150, 9000) == 0).expand(r.shape),
}


REFUSED_RANKS = (
    "a table of floats", "a table of integers", "a table of truths", "where the larger of two is", "the order of two",
    "the first of two", "how many are beyond",
)  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", FLAGS_OF_RANKS)
def test_functions_of_ranks_that_are_constant_for_few_tokens(name):
    _check(Flagged(FLAGS_OF_RANKS[name]), is_rewritten=name not in REFUSED_RANKS)


@pytest.mark.exhaustive
def test_flags_of_counts():
    """Index flags by counts. The vector of counts has one entry per expert."""

    class Full(Flagged):
        def forward(self, x):
            self.flags = lambda r: torch.tensor(FLAGS)[F.one_hot(self.route(x)[1], E).sum((0, 1))][self.route(x)[1]]
            return super().forward(x)

    _check(Full(None), is_rewritten=False)


@pytest.mark.exhaustive  # `test_the_reason_names_the_line_and_the_remedy_works` runs one of these
@pytest.mark.parametrize("flags", FLAGS_OF_RANKS.values(), ids=FLAGS_OF_RANKS)
def test_functions_of_positions_that_are_constant_for_few_tokens(flags):
    _check(Limited(lambda x, t, w: flags(torch.arange(len(t))).bool()), is_rewritten=False)


OF_PLACES = {
    "parts of ones": lambda x, t, w: torch.ones_like(t).cumsum(0) / 150 < 1,
    "a straight line": lambda x, t, w: torch.linspace(0, len(t) / 150, len(t) + 1)[:-1].long() == 0,
    "below what a count is cut to": lambda x, t, w: torch.arange(len(t)) < torch.ones_like(t).sum().clamp(max=150),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", OF_PLACES.values(), ids=OF_PLACES)
def test_masks_of_positions_that_are_constant_for_few_tokens(keep):
    _check(Limited(keep), is_rewritten=False)


def test_the_reason_names_the_line_and_the_remedy_works():
    """Refuse the mask with a remedy, which the next test applies."""
    model = nn.Sequential(Limited(lambda x, t, w: (torch.arange(len(t)) / 150).long() == 0))
    with pytest.raises(moefx.NoMoEBlockFound, match=r"constant for few tokens(.|\n)*multiply the routing weights"):
        moefx.compile(model, example_inputs=(torch.randn(24, D),))


def test_a_mask_of_the_program_is_used_if_it_may_matter():
    model = nn.Sequential(Flagged(FLAGS_OF_RANKS["a cast of a cast"])).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(24, D, dtype=torch.float64),))
    for tokens in (12, 60, 480):
        x = make_crowd(tokens)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Counting(Loop):
    """Scale by a number that Python computes from the tokens of an expert and of the call."""

    def __init__(self, factor):
        super().__init__(Mlp)
        self.factor = factor

    def forward(self, x):
        w, ids = self.route(x)
        counts, out = torch.bincount(ids.flatten(), minlength=E).tolist(), torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None] * self.factor(counts[e], counts)))
        return out


FACTORS = {
    "a quotient": lambda n, counts: 0.5 ** (n // 100),
    "a table": lambda n, counts: TABLE[n],
    "a table of the least": lambda n, counts: TABLE[min(counts)],
    "bits": lambda n, counts: 1.0 if int(n).bit_length() < 8 else 0.5,
    "the second in order": lambda n, counts: 1.0 if sorted(map(int, counts))[1] < 100 else 0.5,
}


@pytest.mark.sampled(len(FACTORS))
@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_numbers_that_python_makes_of_counts(factor):
    """Guard by the number of tokens of one expert, for any distribution of the tokens."""
    inputs = torch.randn(240, D, dtype=torch.float64), torch.randn(1, D).expand(210, D)
    _check(Counting(factor), *inputs, is_rewritten=True)


def _check(block, *inputs, is_rewritten):
    torch.manual_seed(0)
    model = nn.Sequential(block).double()
    compiled = moefx.compile(
        copy.deepcopy(model),
        plan=moefx.Plan(validation="symbolic"),
        example_inputs=(torch.randn(24, D, dtype=torch.float64),),
        strict=False,
    )
    assert bool(moefx.blocks(compiled)) == is_rewritten
    for x in (make_crowd(12), make_crowd(60), make_crowd(240), make_crowd(480), *inputs):
        x = x.double()
        torch.testing.assert_close(compiled(x), model(x), msg=f"{len(x)} tokens")


class UpToTheLast(Loop):
    """Skip experts after the last one that any token selects."""

    def mixed(self, x, w, ids):
        out, last = torch.zeros_like(x), ids.max()
        for e in range(3):
            if e > last:
                break
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def test_the_last_expert_is_no_count_of_tokens():
    model = UpToTheLast(Mlp, 2, 3).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(6, D, dtype=torch.double),))
    for tokens in (1, 2, 6, 100):
        x = torch.randn(tokens, D, dtype=torch.double)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Rounding(Loop):
    """Compute the positions of tokens in low-precision floats."""

    def __init__(self, positions):
        super().__init__(Mlp)
        self.positions = positions

    def mixed(self, x, w, ids):
        positions = self.positions(len(x))
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, positions[t], self.expert(e, x[t], w[t, k, None]))
        return out


@pytest.mark.parametrize(
    "positions",
    [lambda n: torch.arange(n).bfloat16().long(), lambda n: torch.arange(n, dtype=torch.bfloat16).view(-1).long()],
    ids=["cast", "made"],
)
def test_positions_of_few_digits(positions):
    model = Rounding(positions).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.double),))
    for tokens in (9, 250, 301):
        x = torch.randn(tokens, D, dtype=torch.double)
        torch.testing.assert_close(compiled(x), model(x))


class SkippingIdle(Loop):
    """Loop over three experts with one slot per token, and skip idle ones."""

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in range(3):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out


def test_the_last_expert_may_be_the_idle_one():
    model = SkippingIdle(Mlp, 1, 3).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.double),))
    for tokens in (1, 2, 9, 100):
        x = torch.randn(tokens, D, dtype=torch.double)
        torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class OrAsItIs(Loop):
    """Use an identity as the second expert."""

    def __init__(self):
        super().__init__(Mlp, 1, 2)
        self.experts[1] = nn.Identity()


def test_a_single_expert_that_tokens_may_skip_is_refused():
    with pytest.raises(moefx.NoMoEBlockFound, match="there is a single expert"):
        moefx.compile(OrAsItIs(), example_inputs=(torch.randn(9, D),))


class RareTriple(Loop):
    """Change the weights of tokens that choose three experts in one order. Captures have few of the 1320 orders."""

    def __init__(self, change):
        super().__init__(Mlp, 3, 12)
        self.change, self.rare = change, 0

    def number(self, ids):
        return ids[:, 0] * 144 + ids[:, 1] * 12 + ids[:, 2]

    def mixed(self, x, w, ids):
        return super().mixed(x, self.change(w, self.number(ids)[:, None], self.rare), ids)


class RareSum(RareTriple):
    """Compute the number of a triple by a list of factors."""

    def number(self, ids):
        return (ids * torch.tensor([144, 12, 1])).sum(-1)


class RareScan(RareTriple):
    """Compare slot by slot."""

    def mixed(self, x, w, ids):
        triple = torch.tensor([self.rare // 144, self.rare // 12 % 12, self.rare % 12])
        is_rare = (ids == triple).long().cumprod(-1)[:, -1:]
        return Loop.mixed(self, x, self.change(w, self.rare + 1 - is_rare, self.rare), ids)


@pytest.mark.parametrize("kind", [RareTriple, RareSum, RareScan])
@pytest.mark.parametrize(
    "change",
    [
        lambda w, number, rare: w * (number != rare),
        lambda w, number, rare: torch.where(number == rare, 0.0, w),
        lambda w, number, rare: w.masked_fill((number - rare).abs() < 1, 0),
        lambda w, number, rare: w / (1 + (number == rare)),
    ],
    ids=["product", "where", "fill", "quotient"],
)
def test_combinations_of_choices_that_no_capture_has(change, kind):
    torch.manual_seed(0)
    model, x = kind(change).double(), torch.randn(3000, D, dtype=torch.double)
    numbers = model.number(model.route(x)[1])
    model.rare = int(numbers[numbers.bincount()[numbers].argmin()])
    compiled = moefx.compile(model, example_inputs=(x[:30],), plan=moefx.Plan(validation="symbolic"))
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0
