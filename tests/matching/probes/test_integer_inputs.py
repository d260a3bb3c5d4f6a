"""Integer inputs such as token ids, with other values in later calls than in the example."""

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
    """Change hidden states, logits, selection or output by integer inputs."""

    def __init__(self, where, use, experts="dense"):
        super().__init__(use)
        self.where, self.experts = where, getattr(self, experts)

    def changed(self, where, value, integers):
        return self.use(self, value, *integers) if where == self.where else value

    def forward(self, x, *integers):
        x = self.changed("hidden", x, integers)
        logits = self.changed("logits", self.router(x), integers)
        w, i = self.changed("choice", logits.softmax(-1).topk(2, -1), integers)
        w, i = self.changed("weights", w, integers), self.changed("experts", i, integers)
        return self.changed("output", self.experts(x, w, i), integers)


class Hashed(Weights):
    """Select experts by integer inputs alone; ids outside the range select none."""

    def forward(self, x, *integers):
        i = self.use(self, *integers)
        return self.looped(x, torch.ones(*i.shape, 1, dtype=x.dtype), i[..., None])


class Gathered(Hashed):
    """Gather the weights of each token's expert; negative ids count from the end."""

    def forward(self, x, *integers):
        i = self.use(self, *integers)
        return torch.einsum("...h,...hd->...d", torch.einsum("...d,...dh->...h", x, self.up[i]).relu(), self.down[i])


class Gated(Hashed):
    """Take the weight from a column of the scores of all experts."""

    def forward(self, x, *integers):
        flat, i, out = x.view(-1, D), self.use(self, *integers).reshape(-1), torch.zeros_like(x.view(-1, D))
        scores = self.router(flat).softmax(-1)
        for e in range(E):
            (t,) = torch.where(i == e)
            out = out.index_add(0, t, (flat[t] @ self.up[e]).relu() @ self.down[e] * scores[t, e, None])
        return out.view(x.shape)


class Kinds(Hashed):
    """Use another activation in every other expert."""

    def forward(self, x, *integers):
        i = self.use(self, *integers)
        ones = torch.ones(*i.shape, 1, dtype=x.dtype)
        return self.looped(x, ones, i[..., None], lambda e, y: y.sigmoid() if e % 2 else y)


_DRAWS = torch.Generator().manual_seed(0)


def draw_ids(low, high, *shape):
    return torch.randint(low, high, shape or (2, 9), generator=_DRAWS)


def is_no_padding(t):
    return t[..., None]


def mask_in_a_loop(b, w, g):
    for s in (0, -100, 77):
        w = w * is_no_padding(g != s)
    return w


def mask_in_place(b, w, g):
    ok = torch.ones_like(g, dtype=torch.bool)
    for s in (0, 77):
        ok &= g != s
    return w * is_no_padding(ok)


def mask_by_a_chain(b, w, g):
    ok = torch.ones_like(g, dtype=torch.bool)
    for s in (0, 77):
        ok = ok & (g != s)
    return w * is_no_padding(ok)


def mask_if_any(b, w, g):
    return w * is_no_padding(g != 0) if (g == 0).any() else w


def check_and_mask(b, w, g):
    assert (g >= 0).all()
    return w * is_no_padding(g != 0)


def compare_gates(g, s):
    return is_no_padding(g != s)


def check(model, example, later):
    """Check outputs and gradients for integers of the example and for new integers."""
    model = model.double()
    x = torch.randn(2, 9, D, dtype=torch.float64)
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x, *example), plan=moefx.Plan(validation="symbolic"))
    for integers in (example, *later):
        for cut in (slice(None), (slice(0, 1), slice(0, 7))):
            integers = tuple(
                g[cut] if g.dim() > 1 else g[cut[0]] if g.dim() and cut != slice(None) else g for g in integers
            )
            x = torch.randn(*(2, 9) if cut == slice(None) else (1, 7), D, dtype=torch.float64, requires_grad=True)
            results = []
            for one in (model, compiled):
                out = one(x, *integers)
                grads = torch.autograd.grad(out.sin().sum(), [x, *one.parameters()], allow_unused=True)
                results.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
            for actual, expected in zip(results[1], results[0], strict=True):
                torch.testing.assert_close(actual, expected.expand_as(actual), rtol=1e-9, atol=1e-9)
    assert moefx.blocks(compiled)[0].fallbacks == 0


PLAIN, NEAR, PADS = (draw_ids(1, 40),), (draw_ids(48, 53),), (draw_ids(0, 3),)
MASKED = torch.zeros(2, 9, dtype=torch.int64).index_put_(
    (torch.tensor([0, 1]), torch.tensor([3, 5])), torch.tensor([5, 7])
)
OF_WEIGHTS = {
    "padding": (lambda b, w, g: w * is_no_padding(g != 0), PLAIN, PADS),
    "-100": (
        lambda b, w, g: w.masked_fill(is_no_padding(g == -100), 0.0),
        PLAIN,
        (torch.where(draw_ids(0, 2) > 0, -100, PLAIN[0]),),
    ),
    "threshold": (lambda b, w, g: torch.where(is_no_padding(g >= 100), 0.5 * w, w), PLAIN, (draw_ids(50, 150),)),
    "not in a range": (lambda b, w, g: w * is_no_padding(~((g > 50) & (g < 60))), PLAIN, (draw_ids(45, 65),)),
    "in a gap": (lambda b, w, g: w * is_no_padding(~((g > 10) & (g < 12))), (draw_ids(0, 5) * 4,), (draw_ids(9, 14),)),
    "isin": (lambda b, w, g: w * is_no_padding(~torch.isin(g, torch.tensor([0, 50]))), PLAIN, PADS, NEAR),
    "isin a buffer": (lambda b, w, g: w * is_no_padding(~torch.isin(g, b.stops)), (draw_ids(1, 40),), PADS, NEAR),
    "flags in a buffer": (lambda b, w, g: w * is_no_padding(~b.special[g]), PLAIN, NEAR),
    "searched": (
        lambda b, w, g: w * is_no_padding(b.stops[torch.searchsorted(b.stops, g).clamp(max=2)] != g),
        PLAIN,
        PADS,
        NEAR,
    ),
    "bucketize": (
        lambda b, w, g: w * is_no_padding(1 + torch.bucketize(g, torch.tensor([50, 60]))),
        PLAIN,
        (draw_ids(45, 65),),
    ),
    "two inputs": (
        lambda b, w, g, h: w * is_no_padding(g < h),
        (draw_ids(1, 40), draw_ids(50, 90)),
        (draw_ids(1, 40), draw_ids(1, 40)),
    ),
    "and": (
        lambda b, w, g, h: torch.where(is_no_padding((g == 50) & (h == 3)), 0.5 * w, w),
        (draw_ids(1, 40), draw_ids(0, 2)),
        (draw_ids(49, 52), draw_ids(2, 5)),
    ),
    "two inputs, never equal": (
        lambda b, w, g, h: torch.where(is_no_padding(g == h), 0.5 * w, w),
        (draw_ids(20, 40), draw_ids(50, 90)),
        (draw_ids(20, 25), draw_ids(20, 25)),
    ),
    "of a sequence": (lambda b, w, g: w * (g != 0)[:, None, None], (torch.tensor([3, 5]),), (torch.tensor([0, 5]),)),
    "lengths": (
        lambda b, w, n: w * is_no_padding(torch.arange(w.shape[1]) < n[:, None]),
        (torch.tensor([9, 9]),),
        (torch.tensor([0, 5]),),
        (torch.tensor([20, 5]),),
    ),
    "half": (lambda b, w, g: w * is_no_padding(g // 2 != 25), PLAIN, NEAR),
    "remainder": (lambda b, w, g: w * is_no_padding(g % 4 != 3), (draw_ids(1, 10) * 4,), (draw_ids(1, 10),)),
    "chained": (
        lambda b, w, g: w * is_no_padding(((g + 3) // 7) % 5 != 4),
        (draw_ids(0, 3) * 35 + 4,),
        (draw_ids(0, 60),),
    ),
    "cast": (lambda b, w, g: w / is_no_padding(1 + (g / 50).long()), PLAIN, (draw_ids(1, 99),)),
    "truth": (lambda b, w, g: w * is_no_padding(g.bool()), PLAIN, PADS),
    "several in a loop": (mask_in_a_loop, PLAIN, PADS, (draw_ids(76, 79),), (draw_ids(-101, -98),)),
    "one of several is there": (mask_in_a_loop, PADS, PADS, (draw_ids(76, 79),), (draw_ids(-101, -98),)),
    "nearly all are masked": (mask_in_a_loop, (MASKED,), PADS, (draw_ids(76, 79),)),
    "in place": (mask_in_place, PLAIN, PADS, (draw_ids(76, 79),)),
    "a chain": (mask_by_a_chain, PLAIN, PADS, (draw_ids(76, 79),)),
    "moved": (lambda b, w, g: w * is_no_padding(g != 0) * is_no_padding(g.roll(1, -1) != 0), PLAIN, PADS),
    "a function, twice": (
        lambda b, w, g, h: w * compare_gates(g, 0) * compare_gates(h, 7),
        (draw_ids(1, 40), draw_ids(1, 5)),
        (draw_ids(0, 3), draw_ids(6, 9)),
    ),
    "one or the other": (lambda b, w, g: w * is_no_padding(g != 0) + 0.1 * w * is_no_padding(g == 0), PLAIN, PADS),
    "counted": (lambda b, w, g: w / (1 + (g == 0).sum()), PLAIN, PADS),
    "behind the first": (lambda b, w, g: w * is_no_padding((g == 50).cumsum(-1) == 0), PLAIN, NEAR),
    "a third type": (
        lambda b, w, g: torch.where(is_no_padding(g == 2), 0.5 * w, w),
        (draw_ids(0, 2),),
        (draw_ids(0, 3),),
    ),
    "clamped": (lambda b, w, g: w * is_no_padding(1 + b.table[g.clamp(max=V - 1)]), PLAIN, (draw_ids(90, 110),)),
    "checked": (check_and_mask, PLAIN, PADS),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_from_integers_are_rewritten(name):
    torch.manual_seed(0)
    use, example, *later = OF_WEIGHTS[name]
    check(Chosen("weights", use), example, later)


ELSEWHERE = {
    "hidden": ("hidden", lambda b, x, g: x * is_no_padding(g != 0), PADS),
    "logits": ("logits", lambda b, s, g: s.masked_fill(is_no_padding(g == 50) & (torch.arange(E) == 1), -1e9), NEAR),
    "choice": (
        "choice",
        lambda b, c, g: (c[0] * is_no_padding(g != 0), torch.where(is_no_padding(g == 0), 0, c[1])),
        PADS,
    ),
    "experts": ("experts", lambda b, i, g: torch.where(is_no_padding(g == 50), E - 1 - i, i), NEAR),
    "unknown": (
        "experts",
        lambda b, i, g: torch.where(
            is_no_padding(g < V), (i + is_no_padding(b.table[g.clamp(0, V - 1)])) % E, E - 1 - i
        ),
        (draw_ids(90, 110),),
    ),
    "output": ("output", lambda b, o, g: o * is_no_padding(g != 0), PADS),
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
    "a special token": (Hashed, lambda b, g: torch.where(g == 50, 0, g % E), ALL, draw_ids(49, 56)),
    "beyond a table": (
        Hashed,
        lambda b, g: torch.where(g < V, b.table[g.clamp(max=V - 1)], -1),
        ALL,
        draw_ids(90, 110),
    ),
    "a table, clamped": (Hashed, lambda b, g: b.table[g.clamp(0, V - 1)], ALL, draw_ids(-20, 120)),
    "clamped": (Hashed, lambda b, g: g.clamp(max=E - 1), ALL % E, draw_ids(0, 10)),
    "abs": (Hashed, lambda b, g: g.abs(), ALL % E, draw_ids(-3, E)),
    "clamped, which never matters": (Hashed, lambda b, g: (g % E).clamp(0, E - 1), ALL, draw_ids(0, 99)),
    "gathered, clamped": (Gathered, lambda b, g: g.clamp(max=E - 1), ALL % E, draw_ids(0, 99)),
    "gathered, hashed": (Gathered, lambda b, g: g % E, ALL % E, draw_ids(-10, 99)),
    "gathered from the end": (Gathered, lambda b, g: g, ALL % E, draw_ids(-E, E)),
    "nobody's": (Hashed, lambda b, g: g, ALL % E, draw_ids(-3, E + 3)),
    "nobody's of scores": (Gated, lambda b, g: g, ALL % E, draw_ids(-3, E + 3)),
    "nobody's of kinds": (Kinds, lambda b, g: g, ALL % E, draw_ids(-3, E + 3)),
    "nobody's beyond": (Gated, lambda b, g: torch.where(g < 50, g % E, E + 3), ALL, draw_ids(45, 55)),
    "none of kinds beyond": (Kinds, lambda b, g: torch.where(g < 50, g % E, -1), ALL, draw_ids(45, 55)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BY_IDS)
def test_experts_chosen_by_ids_are_rewritten(name):
    torch.manual_seed(0)
    block, use, example, later = BY_IDS[name]
    check(block(use), (example,), [(later,)])


SOME, SEVENS = torch.rand(2, 9, dtype=torch.float64, generator=_DRAWS) + 1, draw_ids(6, 8).double()
OF_FLOATS = {
    "one or the other": (lambda b, w, g: w * is_no_padding(g != 0) + 0.1 * w * is_no_padding(g == 0), SOME),
    "several in a loop": (lambda b, w, g: [w := w * is_no_padding(g != s) for s in (0, 7, 9)][-1], SOME),
    "one of several is there": (lambda b, w, g: [w := w * is_no_padding(g != s) for s in (0, 7, 9)][-1], SEVENS),
    "a function, twice": (lambda b, w, g: w * compare_gates(g, 0) * compare_gates(g, 7), SEVENS),
    "nested": (
        lambda b, w, g: torch.where(is_no_padding(g == 0), 0.5 * w, torch.where(is_no_padding(g > 5), 2 * w, w)),
        SOME,
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OF_FLOATS)
def test_comparisons_of_float_arguments_are_rewritten(name):
    torch.manual_seed(0)
    use, example = OF_FLOATS[name]
    check(Chosen("weights", use), (example,), [(draw_ids(0, 10).double(),)])


def test_experts_of_a_token():
    """Pass several experts per token. Later calls contain ids without an expert."""

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
    "a branch": (mask_if_any, PLAIN, "code outside the experts depends on"),
    "two inputs, never on one line": (  # none of the numbers appears elsewhere
        lambda b, w, g, h: torch.where(is_no_padding(g * 7919 + h * 104729 == 999999937), 0.5 * w, w),
        (draw_ids(20, 40), draw_ids(50, 90)),
        "pass example_inputs with which both outcomes occur",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSED)
def test_uses_of_integers_that_may_differ_are_refused(name):
    use, example, reason = REFUSED[name]
    with pytest.raises(NoMoEBlockFound, match=reason):
        check(Chosen("weights", use), example, [])


def test_a_large_number():
    check(
        Chosen("weights", lambda b, w, g: torch.where(is_no_padding(g > 1 << 41), 0.5 * w, w)),
        PLAIN,
        [(PLAIN[0] + (1 << 42) * draw_ids(0, 2),)],
    )


def test_a_large_product():
    """Halve the weights of one number, which no capture has."""
    check(
        Chosen(
            "weights",
            lambda b, w, g: torch.where(is_no_padding(g.clamp(0, 50000) * (1 << 30) == 3000 << 30), 0.5 * w, w),
        ),
        PLAIN,
        [(torch.where(torch.rand(2, 9) < 0.5, 3000, PLAIN[0]),)],
    )


class Counted(Weights):
    """Use integers as a mask if they are 0 or 1, and as counts otherwise, such as copies of a token."""

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
    check(Counted(COUNTED[name]), (draw_ids(0, first),), [(draw_ids(0, 4),), (draw_ids(1, 2),)])


class Shifted(Chosen):
    """Shift hidden units, so that an expert maps zeros to other values."""

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


def empty_padding(b, x, g):
    x = x.clone()
    x[g == 0] = 0
    return x


PADDED = {
    "times": lambda b, x, g: x * is_no_padding(g),
    "where": lambda b, x, g: torch.where(is_no_padding(g != 0), x, 0.0),
    "another row": lambda b, x, g: torch.where(is_no_padding(g != 0), x, 2.0 * torch.ones_like(x)),
    "filled": lambda b, x, g: x.masked_fill(is_no_padding(g == 0), 0.0),
    "in place": empty_padding,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PADDED)
def test_padding_has_its_own_rows(name):
    torch.manual_seed(0)
    mask = draw_ids(0, 2)
    check(Shifted("hidden", PADDED[name]), (mask,), [(1 - mask,), (torch.zeros_like(mask),), (torch.ones_like(mask),)])


def test_a_mask_of_sequences():
    """Mask all of a few sequences by chance, so that captures show no expert."""
    torch.manual_seed(0)
    later = (torch.tensor([[1]]),), (torch.tensor([[0], [1]]),), (torch.tensor([[0], [0]]),)
    check(Chosen("weights", lambda b, w, g: w * is_no_padding(g)), (torch.tensor([[1], [0]]),), later)


@pytest.mark.parametrize("there", [E, -E - 1])
def test_an_index_error_of_the_original_is_raised(there):
    """Raise for indices out of bounds like the original, and never return rows."""
    model = Gathered(lambda b, g: g).double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(torch.randn(2, 9, D).double(), ALL % E))
    beyond = torch.full_like(ALL, there)
    for one in (model, compiled):
        with pytest.raises(IndexError, match="out of bounds"):
            one(torch.randn(2, 9, D).double(), beyond)
