"""Integer inputs, such as token ids: later calls have other values than the example."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx
from moefx.errors import NoMoEBlockFound

D, E, H, V = 8, 4, 12, 100


class Weights(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use, self.router = use, nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.register_buffer("table", torch.arange(V) % E)
        self.register_buffer("special", torch.arange(V) == 50)
        self.register_buffer("stops", torch.tensor([0, 50, 77]))

    def looped(self, x, w, i, expert=lambda e, y: y):
        flat, w, i = x.reshape(-1, D), w.reshape(-1, w.shape[-1]), i.reshape(-1, i.shape[-1])
        out = torch.zeros_like(flat)
        for e in range(E):
            t, k = torch.where(i == e)
            y = expert(e, (flat[t] @ self.up[e]).relu() @ self.down[e])
            out = out.index_add(0, t, y * w[t, k, None])
        return out.view(x.shape)

    def dense(self, x, w, i):
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter_add(-1, i, w)
        h = torch.einsum("...d,edh->...eh", x, self.up).relu()
        return torch.einsum("...eh,ehd,...e->...d", h, self.down, gates)


class Chosen(Weights):
    """What is given changes the hidden states, the logits, the choice or the output."""

    def __init__(self, where, use, experts="dense"):
        super().__init__(use)
        self.where, self.experts = where, getattr(self, experts)

    def changed(self, where, value, given):
        return self.use(self, value, *given) if where == self.where else value

    def forward(self, x, *given):
        x = self.changed("hidden", x, given)
        logits = self.changed("logits", self.router(x), given)
        w, i = self.changed("choice", logits.softmax(-1).topk(2, -1), given)
        w, i = self.changed("weights", w, given), self.changed("experts", i, given)
        return self.changed("output", self.experts(x, w, i), given)


class Hashed(Weights):
    """The experts are chosen by what is given alone; ids of no expert are nobody's."""

    def forward(self, x, *given):
        i = self.use(self, *given)
        return self.looped(x, torch.ones(*i.shape, 1, dtype=x.dtype), i[..., None])


class Gathered(Hashed):
    """The weights of each token's expert are gathered, negative ids from the end."""

    def forward(self, x, *given):
        i = self.use(self, *given)
        return torch.einsum("...h,...hd->...d", torch.einsum("...d,...dh->...h", x, self.up[i]).relu(), self.down[i])


class Gated(Hashed):
    """The weight is a column of the scores of all experts."""

    def forward(self, x, *given):
        flat, i, out = x.view(-1, D), self.use(self, *given).reshape(-1), torch.zeros_like(x.view(-1, D))
        scores = self.router(flat).softmax(-1)
        for e in range(E):
            (t,) = torch.where(i == e)
            out = out.index_add(0, t, (flat[t] @ self.up[e]).relu() @ self.down[e] * scores[t, e, None])
        return out.view(x.shape)


class Kinds(Hashed):
    """Every other expert is of another kind."""

    def forward(self, x, *given):
        i = self.use(self, *given)
        ones = torch.ones(*i.shape, 1, dtype=x.dtype)
        return self.looped(x, ones, i[..., None], lambda e, y: y.sigmoid() if e % 2 else y)


_DRAWS = torch.Generator().manual_seed(0)


def ids(low, high, *shape):
    return torch.randint(low, high, shape or (2, 9), generator=_DRAWS)


def pad(t):
    return t[..., None]


def masked_in_a_loop(b, w, g):
    for s in (0, -100, 77):
        w = w * pad(g != s)
    return w


def masked_in_place(b, w, g):
    ok = torch.ones_like(g, dtype=torch.bool)
    for s in (0, 77):
        ok &= g != s
    return w * pad(ok)


def masked_by_a_chain(b, w, g):
    ok = torch.ones_like(g, dtype=torch.bool)
    for s in (0, 77):
        ok = ok & (g != s)
    return w * pad(ok)


def masked_where_some_are(b, w, g):
    return w * pad(g != 0) if (g == 0).any() else w


def checked(b, w, g):
    assert (g >= 0).all()
    return w * pad(g != 0)


def differs(g, s):
    return pad(g != s)


def check(model, example, later):
    """Right in outputs and gradients, for what the example has, and what it lacks."""
    model = model.double()
    x = torch.randn(2, 9, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x, *example), plan=moefx.Plan(validation="symbolic"))
    for given in (example, *later):
        for cut in (slice(None), (slice(0, 1), slice(0, 7))):
            given = tuple(g[cut] if g.dim() > 1 else g[cut[0]] if g.dim() and cut != slice(None) else g for g in given)
            x = torch.randn(*(2, 9) if cut == slice(None) else (1, 7), D, dtype=torch.float64, requires_grad=True)
            found = []
            for one in (model, compiled):
                out = one(x, *given)
                grads = torch.autograd.grad(out.sin().sum(), [x, *one.parameters()], allow_unused=True)
                found.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
            for mine, truth in zip(found[1], found[0], strict=True):
                torch.testing.assert_close(mine, truth.expand_as(mine), rtol=1e-9, atol=1e-9)
    assert moefx.blocks(compiled)[0].fallbacks == 0


PLAIN, NEAR, PADS = (ids(1, 40),), (ids(48, 53),), (ids(0, 3),)
MASKED = torch.zeros(2, 9, dtype=torch.int64).index_put_(
    (torch.tensor([0, 1]), torch.tensor([3, 5])), torch.tensor([5, 7])
)
OF_WEIGHTS = {
    "padding": (lambda b, w, g: w * pad(g != 0), PLAIN, PADS),
    "-100": (lambda b, w, g: w.masked_fill(pad(g == -100), 0.0), PLAIN, (torch.where(ids(0, 2) > 0, -100, PLAIN[0]),)),
    "threshold": (lambda b, w, g: torch.where(pad(g >= 100), 0.5 * w, w), PLAIN, (ids(50, 150),)),
    "not in a range": (lambda b, w, g: w * pad(~((g > 50) & (g < 60))), PLAIN, (ids(45, 65),)),
    "in a gap": (lambda b, w, g: w * pad(~((g > 10) & (g < 12))), (ids(0, 5) * 4,), (ids(9, 14),)),
    "isin": (lambda b, w, g: w * pad(~torch.isin(g, torch.tensor([0, 50]))), PLAIN, PADS, NEAR),
    "isin a buffer": (lambda b, w, g: w * pad(~torch.isin(g, b.stops)), (ids(1, 40),), PADS, NEAR),
    "flags in a buffer": (lambda b, w, g: w * pad(~b.special[g]), PLAIN, NEAR),
    "searched": (lambda b, w, g: w * pad(b.stops[torch.searchsorted(b.stops, g).clamp(max=2)] != g), PLAIN, PADS, NEAR),
    "bucketize": (lambda b, w, g: w * pad(1 + torch.bucketize(g, torch.tensor([50, 60]))), PLAIN, (ids(45, 65),)),
    "two inputs": (lambda b, w, g, h: w * pad(g < h), (ids(1, 40), ids(50, 90)), (ids(1, 40), ids(1, 40))),
    "and": (
        lambda b, w, g, h: torch.where(pad((g == 50) & (h == 3)), 0.5 * w, w),
        (ids(1, 40), ids(0, 2)),
        (ids(49, 52), ids(2, 5)),
    ),
    "two inputs, never equal": (
        lambda b, w, g, h: torch.where(pad(g == h), 0.5 * w, w),
        (ids(20, 40), ids(50, 90)),
        (ids(20, 25), ids(20, 25)),
    ),
    "of a sequence": (lambda b, w, g: w * (g != 0)[:, None, None], (torch.tensor([3, 5]),), (torch.tensor([0, 5]),)),
    "lengths": (
        lambda b, w, n: w * pad(torch.arange(w.shape[1]) < n[:, None]),
        (torch.tensor([9, 9]),),
        (torch.tensor([0, 5]),),
        (torch.tensor([20, 5]),),
    ),
    "half": (lambda b, w, g: w * pad(g // 2 != 25), PLAIN, NEAR),
    "remainder": (lambda b, w, g: w * pad(g % 4 != 3), (ids(1, 10) * 4,), (ids(1, 10),)),
    "chained": (lambda b, w, g: w * pad(((g + 3) // 7) % 5 != 4), (ids(0, 3) * 35 + 4,), (ids(0, 60),)),
    "cast": (lambda b, w, g: w / pad(1 + (g / 50).long()), PLAIN, (ids(1, 99),)),
    "truth": (lambda b, w, g: w * pad(g.bool()), PLAIN, PADS),
    "several in a loop": (masked_in_a_loop, PLAIN, PADS, (ids(76, 79),), (ids(-101, -98),)),
    "one of several is there": (masked_in_a_loop, PADS, PADS, (ids(76, 79),), (ids(-101, -98),)),
    "nearly all are masked": (masked_in_a_loop, (MASKED,), PADS, (ids(76, 79),)),
    "in place": (masked_in_place, PLAIN, PADS, (ids(76, 79),)),
    "a chain": (masked_by_a_chain, PLAIN, PADS, (ids(76, 79),)),
    "moved": (lambda b, w, g: w * pad(g != 0) * pad(g.roll(1, -1) != 0), PLAIN, PADS),
    "a function, twice": (
        lambda b, w, g, h: w * differs(g, 0) * differs(h, 7),
        (ids(1, 40), ids(1, 5)),
        (ids(0, 3), ids(6, 9)),
    ),
    "one or the other": (lambda b, w, g: w * pad(g != 0) + 0.1 * w * pad(g == 0), PLAIN, PADS),
    "counted": (lambda b, w, g: w / (1 + (g == 0).sum()), PLAIN, PADS),
    "behind the first": (lambda b, w, g: w * pad((g == 50).cumsum(-1) == 0), PLAIN, NEAR),
    "a third type": (lambda b, w, g: torch.where(pad(g == 2), 0.5 * w, w), (ids(0, 2),), (ids(0, 3),)),
    "clamped": (lambda b, w, g: w * pad(1 + b.table[g.clamp(max=V - 1)]), PLAIN, (ids(90, 110),)),
    "checked": (checked, PLAIN, PADS),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_from_integers_are_rewritten(name):
    torch.manual_seed(0)
    use, example, *later = OF_WEIGHTS[name]
    check(Chosen("weights", use), example, later)


ELSEWHERE = {
    "hidden": ("hidden", lambda b, x, g: x * pad(g != 0), PADS),
    "logits": ("logits", lambda b, s, g: s.masked_fill(pad(g == 50) & (torch.arange(E) == 1), -1e9), NEAR),
    "choice": ("choice", lambda b, c, g: (c[0] * pad(g != 0), torch.where(pad(g == 0), 0, c[1])), PADS),
    "experts": ("experts", lambda b, i, g: torch.where(pad(g == 50), E - 1 - i, i), NEAR),
    "unknown": (
        "experts",
        lambda b, i, g: torch.where(pad(g < V), (i + pad(b.table[g.clamp(0, V - 1)])) % E, E - 1 - i),
        (ids(90, 110),),
    ),
    "output": ("output", lambda b, o, g: o * pad(g != 0), PADS),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("experts", ["dense", "looped"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_integers_that_choose_weights_rows_or_drops(name, experts):
    torch.manual_seed(0)
    where, use, later = ELSEWHERE[name]
    check(Chosen(where, use, experts), PLAIN, [later])


ALL = torch.arange(18).view(2, 9)
BY_IDS = {
    "hash and padding": (Hashed, lambda b, g: torch.where(g == 0, E, g % E), ALL + 1, PADS[0]),
    "a special token": (Hashed, lambda b, g: torch.where(g == 50, 0, g % E), ALL, ids(49, 56)),
    "beyond a table": (Hashed, lambda b, g: torch.where(g < V, b.table[g.clamp(max=V - 1)], -1), ALL, ids(90, 110)),
    "a table, clamped": (Hashed, lambda b, g: b.table[g.clamp(0, V - 1)], ALL, ids(-20, 120)),
    "clamped": (Hashed, lambda b, g: g.clamp(max=E - 1), ALL % E, ids(0, 10)),
    "abs": (Hashed, lambda b, g: g.abs(), ALL % E, ids(-3, E)),
    "clamped, which never matters": (Hashed, lambda b, g: (g % E).clamp(0, E - 1), ALL, ids(0, 99)),
    "gathered, clamped": (Gathered, lambda b, g: g.clamp(max=E - 1), ALL % E, ids(0, 99)),
    "gathered, hashed": (Gathered, lambda b, g: g % E, ALL % E, ids(-10, 99)),
    "gathered from the end": (Gathered, lambda b, g: g, ALL % E, ids(-E, E)),
    "nobody's": (Hashed, lambda b, g: g, ALL % E, ids(-3, E + 3)),
    "nobody's of scores": (Gated, lambda b, g: g, ALL % E, ids(-3, E + 3)),
    "nobody's of kinds": (Kinds, lambda b, g: g, ALL % E, ids(-3, E + 3)),
    "nobody's beyond": (Gated, lambda b, g: torch.where(g < 50, g % E, E + 3), ALL, ids(45, 55)),
    "none of kinds beyond": (Kinds, lambda b, g: torch.where(g < 50, g % E, -1), ALL, ids(45, 55)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BY_IDS)
def test_experts_chosen_by_ids_are_rewritten(name):
    torch.manual_seed(0)
    block, use, example, later = BY_IDS[name]
    check(block(use), (example,), [(later,)])


SOME, SEVENS = torch.rand(2, 9, dtype=torch.float64, generator=_DRAWS) + 1, ids(6, 8).double()
OF_FLOATS = {
    "one or the other": (lambda b, w, g: w * pad(g != 0) + 0.1 * w * pad(g == 0), SOME),
    "several in a loop": (lambda b, w, g: [w := w * pad(g != s) for s in (0, 7, 9)][-1], SOME),
    "one of several is there": (lambda b, w, g: [w := w * pad(g != s) for s in (0, 7, 9)][-1], SEVENS),
    "a function, twice": (lambda b, w, g: w * differs(g, 0) * differs(g, 7), SEVENS),
    "nested": (lambda b, w, g: torch.where(pad(g == 0), 0.5 * w, torch.where(pad(g > 5), 2 * w, w)), SOME),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OF_FLOATS)
def test_comparisons_of_float_arguments_are_rewritten(name):
    torch.manual_seed(0)
    use, example = OF_FLOATS[name]
    check(Chosen("weights", use), (example,), [(ids(0, 10).double(),)])


def test_experts_of_a_token():
    """Several experts are given for each token; some are none, which the example lacks."""

    def use(b, i, w):
        return b.looped(w[0], w[1].masked_fill(i >= E, 0.0), i.clamp(max=E - 1))

    class Given(Weights):
        def forward(self, x, i, w):
            return self.use(self, i, (x, w))

    torch.manual_seed(0)
    order, w = torch.rand(3, 7, E).argsort(-1)[..., :2], torch.rand(3, 7, 2, dtype=torch.float64)
    model, x = Given(use).double(), torch.randn(3, 7, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x, order, w))
    for i in (order, torch.where(torch.rand(3, 7, 2) < 0.3, E, order)):
        torch.testing.assert_close(compiled(x, i, w), model(x, i, w))
    assert moefx.blocks(compiled)[0].fallbacks == 0


REFUSED = {
    "a branch": (masked_where_some_are, PLAIN, "code outside the experts depends on"),
    "two inputs, never on one line": (  # of numbers that nothing names
        lambda b, w, g, h: torch.where(pad(g * 7919 + h * 104729 == 999999937), 0.5 * w, w),
        (ids(20, 40), ids(50, 90)),
        "pass example_inputs with which both outcomes occur",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REFUSED)
def test_uses_of_integers_that_may_differ_are_refused(name):
    use, example, reason = REFUSED[name]
    with pytest.raises(NoMoEBlockFound, match=reason):
        check(Chosen("weights", use), example, [])


class Counted(Weights):
    """Integers of which ones and zeros are a mask, and others count: of copies of a token, say."""

    def forward(self, x, mask):
        flat = x.reshape(-1, D)
        w, i = self.router(flat).softmax(-1).max(-1)
        chosen = F.one_hot(i, E) * mask.reshape(-1, 1)
        gates = chosen.to(x.dtype) * self.use(self, w, chosen)[:, None]
        h = torch.einsum("td,edh->teh", flat, self.up).relu()
        return torch.einsum("teh,ehd,te->td", h, self.down, gates).view(x.shape)


COUNTED = {
    "where there are any": lambda b, w, chosen: w * (chosen.sum(-1) > 0),
    "as they are": lambda b, w, chosen: w,
    "with a capacity": lambda b, w, chosen: w * (((chosen.cumsum(0) * chosen).sum(-1) <= 4) & (chosen.sum(-1) > 0)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("name", COUNTED)
def test_masks_that_are_counted_are_rewritten(name, first):
    torch.manual_seed(0)
    check(Counted(COUNTED[name]), (ids(0, first),), [(ids(0, 4),), (ids(1, 2),)])


class Shifted(Chosen):
    """What an expert makes of zeros is not zero."""

    def __init__(self, where, use):
        super().__init__(where, use, "shifted")
        self.shift = nn.Parameter(torch.randn(E, H))

    def shifted(self, x, w, i):
        flat, out = x.reshape(-1, D), torch.zeros_like(x.reshape(-1, D))
        for e in range(E):
            t, k = torch.where(i.reshape(-1, 2) == e)
            y = F.silu(flat[t] @ self.up[e] + self.shift[e]) @ self.down[e]
            out = out.index_add(0, t, y * w.reshape(-1, 2)[t, k, None])
        return x + out.view(x.shape)


def emptied(b, x, g):
    x = x.clone()
    x[g == 0] = 0
    return x


PADDED = {
    "times": lambda b, x, g: x * pad(g),
    "where": lambda b, x, g: torch.where(pad(g != 0), x, 0.0),
    "another row": lambda b, x, g: torch.where(pad(g != 0), x, 2.0 * torch.ones_like(x)),
    "filled": lambda b, x, g: x.masked_fill(pad(g == 0), 0.0),
    "in place": emptied,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PADDED)
def test_padding_has_rows_of_its_own(name):
    torch.manual_seed(0)
    mask = ids(0, 2)
    check(Shifted("hidden", PADDED[name]), (mask,), [(1 - mask,), (torch.zeros_like(mask),), (torch.ones_like(mask),)])


def test_a_mask_of_sequences():
    """Of few sequences all are masked by chance, and no expert is seen then."""
    torch.manual_seed(0)
    later = (torch.tensor([[1]]),), (torch.tensor([[0], [1]]),), (torch.tensor([[0], [0]]),)
    check(Chosen("weights", lambda b, w, g: w * pad(g)), (torch.tensor([[1], [0]]),), later)


@pytest.mark.parametrize("there", [E, -E - 1])
def test_an_error_stays_one(there):
    """Where the original's index is out of bounds nobody takes the rows in silence."""
    model = Gathered(lambda b, g: g).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(torch.randn(2, 9, D).double(), ALL % E))
    beyond = torch.full_like(ALL, there)
    for one in (model, compiled):
        with pytest.raises(IndexError, match="out of bounds"):
            one(torch.randn(2, 9, D).double(), beyond)
