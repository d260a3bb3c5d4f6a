"""Branches on the routing: the number of tokens of an expert, or the selected experts."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import Refused
from moefx.matching.probes.branch_outcomes import flip_branches

from ..lift.small_blocks import Small
from ..small_proofs import lift, new_proof

D, E, K = 16, 4, 2


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D)) for _ in range(E))

    def forward(self, x):
        t = x.reshape(-1, D)
        weights, chosen = self.gate(t).softmax(-1).topk(K)
        return self.mix(t, weights, chosen).view_as(x)

    def mix(self, t, weights, chosen):
        out = torch.zeros_like(t)
        for e in range(E):
            token, slot = torch.where(chosen == e)
            y = self.experts[e](t[token])
            if self.special(e, t[token], chosen):
                y = y * 0.5
            out.index_add_(0, token, y * weights[token, slot, None])
        return out

    def special(self, e, rows, chosen):
        return False


def make_case(special):
    return type("Special", (Loop,), {"special": lambda self, e, rows, chosen: special(e, rows, chosen)})


TRAPS = {
    "len": lambda e, rows, chosen: len(rows) > 300,
    "shape": lambda e, rows, chosen: rows.shape[0] >= 70,
    "size": lambda e, rows, chosen: rows.size(0) > 300,
    "numel": lambda e, rows, chosen: rows.numel() > 5000,
    "one_of": lambda e, rows, chosen: len(rows) in (77, 99),
    "share": lambda e, rows, chosen: len(rows) / chosen.shape[0] > 0.999,
    "odd": lambda e, rows, chosen: len(rows) % 2,
    "item": lambda e, rows, chosen: (chosen == e).sum().item() > 300,
    "tensor": lambda e, rows, chosen: (chosen == e).sum() > 300,
    "int": lambda e, rows, chosen: int((chosen == e).sum()) > 300,
    "tolist": lambda e, rows, chosen: torch.bincount(chosen.flatten(), minlength=E).tolist()[e] > 300,
    "difference": lambda e, rows, chosen: rows.shape[0] - 300 > 0,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("special", TRAPS.values(), ids=TRAPS)
def test_branches_on_the_tokens_of_an_expert_are_refused(special):
    """Refuse the block, or guard the sizes for which the branch changes."""
    model = make_case(special)().double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(2, 40, D).double(),), strict=False)
    assert bool(moefx.blocks(compiled)) == (special is TRAPS["int"])
    halved = 0
    for tokens in (1, 77, 300, 900):
        x = torch.randn(1, 1, D).double().expand(1, tokens, D) + 1e-3 * torch.randn(1, tokens, D).double()
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
        halved += not torch.allclose(
            model(x), Loop.mix(_make_dense(model), x[0], *_run_routed(model, x)), rtol=0, atol=1e-9
        )
    assert halved, "the trap never sprang"


def _make_dense(model):
    plain = Loop().double()
    plain.load_state_dict(model.state_dict())
    return plain


def _run_routed(model, x):
    return model.gate(x[0]).softmax(-1).topk(K)


class Unique(Loop):
    """Run only selected experts, with all checks that careful users write."""

    def mix(self, t, weights, chosen):
        out = torch.zeros_like(t)
        for e in chosen.unique().tolist():
            if e >= len(self.experts):
                continue
            token, slot = torch.where(chosen == e)
            if len(token) == 0 or token.numel() == 0 or token.shape[0] < 1:
                continue
            out.index_add_(0, token, self.experts[e](t[token]) * weights[token, slot, None])
        return out


class Offsets(Loop):
    """Slice the sorted tokens with bounds on the host."""

    def mix(self, t, weights, chosen):
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        rows, outs, start = t[order // K], [], 0
        for e, count in enumerate(torch.bincount(flat, minlength=E).tolist()):
            if count > 0:
                outs.append(self.experts[e](rows[start : start + count]))
            start += count
        y = torch.cat(outs) * weights.flatten()[order, None]
        return torch.zeros_like(t).index_add_(0, order // K, y)


class Lists(Loop):
    """Group tokens in Python lists, keyed by expert ids."""

    def mix(self, t, weights, chosen):
        groups = defaultdict(list)
        for token, experts in enumerate(chosen.tolist()):
            for slot, e in enumerate(experts):
                groups[e].append((token, slot))
        out = torch.zeros_like(t)
        for e in sorted(groups):
            token, slot = torch.tensor(groups[e]).unbind(1)
            out.index_add_(0, token, self.experts[e](t[token]) * weights[token, slot, None])
        return out


class Asked(Loop):
    """Test each selected expert for tokens, although it has some."""

    def mix(self, t, weights, chosen):
        out = torch.zeros_like(t)
        for e in chosen.unique():
            mask = chosen == int(e.item())
            if not mask.any():
                continue
            token = mask.any(dim=-1).nonzero().squeeze(-1)
            slot = mask[token].int().argmax(dim=-1, keepdim=True)
            out.index_add_(0, token, self.experts[int(e)](t[token]) * weights[token].gather(-1, slot))
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Unique, Offsets, Lists, Asked])
def test_bookkeeping_on_the_host_is_no_branch(kind):
    model = kind().double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(2, 8, D).double(),))
    for tokens in (1, 3, 200):
        x = torch.randn(1, tokens, D).double()
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert moefx.explain(compiled).matched[0].calls == (3, 0, 0)  # never the original


class IfThreeWasChosen(Loop):
    def mix(self, t, weights, chosen):
        out = super().mix(t, weights, chosen)
        return out * 2 if (chosen == 3).any() else out


class HalvedForEveryIdleExpert(Loop):
    def mix(self, t, weights, chosen):
        out = torch.zeros_like(t)
        for e in range(E):
            if (chosen == e).any():
                token, slot = torch.where(chosen == e)
                out = out.index_add(0, token, self.experts[e](t[token]) * weights[token, slot, None])
            else:
                out = out * 0.5
        return out


@pytest.mark.parametrize("kind", [IfThreeWasChosen, HalvedForEveryIdleExpert])
def test_branches_on_a_selected_expert_are_refused(kind):
    with pytest.raises(moefx.NoMoEBlockFound, match=r"depends on the routing|under different routings"):
        moefx.compile(kind().double(), example_inputs=(torch.randn(2, 40, D).double(),))


@pytest.mark.parametrize("is_odd", [lambda chosen: (chosen & 1).any(), lambda chosen: ((chosen | 1) == 3).any()])
def test_bits_of_an_index_are_no_constant(is_odd):
    """Read the lowest bit of an index: some tokens select no odd expert, though the highest, 4, is even."""

    class Odd(Loop):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(D, E + 1, bias=False)

        def mix(self, t, weights, chosen):
            y = super().mix(t, weights, chosen)
            return y * 2 if is_odd(chosen) else y

    with pytest.raises(moefx.errors.NoMoEBlockFound):
        moefx.compile(Odd(), example_inputs=(torch.randn(3, 5, D),))


class Clipped(Small):
    """Clip large results of experts if `bound` returns true. Results are small in all captures."""

    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def mix(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y = expert(x[t])
            if y.norm() > 5:
                y = self.bound(y)
            out = out.index_add(0, t, y * weights[t, k, None])
        return out


@pytest.mark.parametrize("bound, changes_form", [(torch.clone, False), (torch.tanh, True)])
def test_a_branch_is_settled_after_its_verdict(bound, changes_form):
    proof = new_proof(Clipped(bound))
    proof.evidence.add(lift(proof))
    reads = {read.call_stack for read in proof.evidence.reference.capture.reads}
    if changes_form:
        with pytest.raises(Refused, match="a value that Python reads"):
            flip_branches(proof)
    else:
        flip_branches(proof)
    assert reads and {proof.evidence.is_settled(calls) for calls in reads} == {not changes_form}
