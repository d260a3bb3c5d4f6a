"""Experts in named attributes instead of a list: a type, a mask or a score selects a module or parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moefx

from ..blocks import D, Gated, H, Mlp
from ..models.case import run_and_differentiate


def write_outputs(x, *pairs):
    out = torch.zeros_like(x)
    for expert, mask in pairs:
        out[mask] = expert(x[mask])
    return out


class SpeechOrText(nn.Module):
    """Select speech by one type; all other types are text."""

    def __init__(self):
        super().__init__()
        self.speech, self.text = Mlp(), Mlp()

    def forward(self, x, types):
        is_speech = types == 1
        return x + write_outputs(x, (self.text, ~is_speech), (self.speech, is_speech))


class Neighbours(SpeechOrText):
    """Select speech if the right neighbour is speech too."""

    def forward(self, x, types):
        is_speech = torch.zeros_like(types, dtype=torch.bool)
        is_speech[:, :-1] = (types[:, :-1] == 1) & (types[:, 1:] == 1)
        return write_outputs(x, (self.speech, is_speech), (self.text, ~is_speech))


class Selected(SpeechOrText):
    """Run both experts on all tokens, and select by `where`."""

    def forward(self, x, mask):
        return torch.where(mask.unsqueeze(-1), self.speech(x), self.text(x))


class ThreeSizes(nn.Module):
    """Experts of different kinds and widths with their own norms, by name."""

    def __init__(self):
        super().__init__()
        self.norm_of_code, self.code = nn.LayerNorm(D), Gated()
        self.norm_of_prose, self.prose = nn.LayerNorm(D), Mlp()
        self.norm_of_table, self.table = nn.LayerNorm(D), nn.Linear(D, D)
        self.types = {"prose": 0, "table": 1, "code": 2}

    def forward(self, x, types):
        out = torch.zeros_like(x)
        for name, number in self.types.items():
            here = (types == number).nonzero()[:, 0]
            rows = getattr(self, f"norm_of_{name}")(x[here])
            out = out.index_copy(0, here, getattr(self, name)(rows))
        return out


class Matrices(nn.Module):
    """Modalities with one matrix each, without modules."""

    def __init__(self):
        super().__init__()
        self.of_left, self.of_right = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))
        self.bias_of_left = nn.Parameter(torch.randn(H))

    def forward(self, x, mask):
        out = x.new_empty(*x.shape[:-1], H)
        out[mask] = F.linear(x[mask], self.of_left, self.bias_of_left)
        out[~mask] = F.linear(x[~mask], self.of_right)
        return out


class EasyOrHard(nn.Module):
    """Select one of two experts by a score, and weight it."""

    def __init__(self):
        super().__init__()
        self.easy, self.hard, self.score = Mlp(), Gated(), nn.Linear(D, 1)

    def forward(self, x):
        p = self.score(x).sigmoid()
        return torch.where(p > 0.5, p * self.hard(x), (1 - p) * self.easy(x))


def draw_rows(n):
    return torch.randn(n, D, dtype=torch.float64)


def draw_types(n, most=2):
    return torch.randint(0, most, (n,))


CASES = {
    "types": (SpeechOrText, [(draw_rows(n), draw_types(n, most)) for n, most in ((9, 2), (1, 2), (40, 6))]),
    "one type": (SpeechOrText, [(draw_rows(n), draw_types(n, most)) for n, most in ((9, 1), (40, 2), (40, 6))]),
    "neighbours": (Neighbours, [(torch.randn(b, 7, D).double(), torch.randint(0, 2, (b, 7))) for b in (2, 5)]),
    "where": (Selected, [(draw_rows(n), draw_types(n).bool()) for n in (9, 1, 40)]),
    "three sizes": (ThreeSizes, [(draw_rows(n), draw_types(n, most)) for n, most in ((9, 2), (40, 3), (40, 5))]),
    "matrices": (Matrices, [(draw_rows(n), draw_types(n).bool()) for n in (9, 2, 40)]),
    "score": (EasyOrHard, [(draw_rows(n),) for n in (9, 1, 40)]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_experts_that_are_named_in_python_are_rewritten(case):
    torch.manual_seed(0)
    make, calls = CASES[case]
    model = make().double()
    compiled = moefx.compile(model, example_inputs=calls[0])
    for args in calls:
        torch.testing.assert_close(*(run_and_differentiate(m, m, *args) for m in (compiled, model)))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class InAList(nn.Module):
    """Select one of two experts in a list by a comparison: all types except 1 select the first."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x, types):
        return write_outputs(x, (self.experts[1], types == 1), (self.experts[0], types != 1))


def test_types_that_the_example_lacks():
    torch.manual_seed(0)
    model = InAList().double()
    compiled = moefx.compile(model, example_inputs=(draw_rows(9), draw_types(9)))
    for most in (2, 5):
        args = draw_rows(40), draw_types(40, most)
        torch.testing.assert_close(*(run_and_differentiate(m, m, *args) for m in (compiled, model)))


class OwnMasks(nn.Module):
    """Apply masks that may overlap: the later one overwrites the earlier."""

    def __init__(self, merge):
        super().__init__()
        self.near, self.far, self.merge = Mlp(), Mlp(), merge

    def forward(self, x, near, far):
        return self.merge(x, (self.near, near), (self.far, far))


def write_stacked(x, *pairs):
    """Stack the masks, as the refusal of separate masks recommends."""
    mask, out = torch.stack([mask for _, mask in pairs], -1), torch.zeros_like(x)
    for e, (expert, _) in enumerate(pairs):
        here = mask[..., e]
        out[here] += expert(x[here])
    return out


def test_a_mask_for_each_expert():
    args = draw_rows(9), draw_types(9).bool(), draw_types(9).bool()
    with pytest.raises(moefx.NoMoEBlockFound, match=r"mask of its own \(2 masks\).*torch.stack\(masks, -1\)"):
        moefx.compile(OwnMasks(write_outputs).double(), example_inputs=args)
    model = OwnMasks(write_stacked).double()
    compiled = moefx.compile(model, example_inputs=args)
    torch.testing.assert_close(*(run_and_differentiate(m, m, *args) for m in (compiled, model)))


class Merged(nn.Module):
    """Insert image features into embeddings: this selects no experts."""

    def __init__(self):
        super().__init__()
        self.embed, self.project, self.mlp = nn.Embedding(9, D), nn.Linear(4, D), Mlp()

    def forward(self, ids, pixels):
        x = self.embed(ids).masked_scatter((ids == 0)[:, None], self.project(pixels))
        return x + self.mlp(x)


class OneModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.other = Mlp(), Mlp()

    def forward(self, x, mask):
        return self.other(torch.where(mask[:, None], self.mlp(x), self.mlp(2 * x)))


@pytest.mark.parametrize(
    ("make", "args"),
    [(Merged, (torch.arange(9) % 3, torch.randn(3, 4))), (OneModule, (torch.randn(9, D), torch.arange(9) > 4))],
    ids=["image features", "one module twice"],
)
def test_modules_without_experts_are_no_candidates(make, args):
    report = moefx.explain(make(), example_inputs=args)
    assert not report.matched and not report.refused
