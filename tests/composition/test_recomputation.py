"""Recomputations with another routing than the forward raise, as in the original."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import moefx
from moefx.errors import RecomputedChoice
from moefx.ir.guards import recomputed_choice
from moefx.ir.ops import dialect

D, E, S = 8, 4, 40


class Mixture(nn.Module):
    """Loop over experts; subclasses define the selection."""

    expert = staticmethod(lambda: nn.Sequential(nn.Linear(D, 12), nn.SiLU(), nn.Linear(12, D)))

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(self.expert() for _ in range(E))
        self.register_buffer("bias", torch.zeros(E))

    def choose(self, scores):
        raise NotImplementedError

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = self.choose(scores)
        weights = scores.gather(1, chosen)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class MovedBias(Mixture):
    step = 0.05

    def choose(self, scores):
        chosen = (scores + self.bias).topk(2).indices
        with torch.no_grad():
            load = torch.bincount(chosen.flatten(), minlength=E).float()
            self.bias += self.step * (load.mean() - load).sign()
        return chosen


class Unmoved(MovedBias):
    step = 0.0


class Unfused(MovedBias):
    expert = staticmethod(lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh()))


class Top1(MovedBias):
    def choose(self, scores):
        chosen = (scores + self.bias).argmax(-1, keepdim=True)
        with torch.no_grad():
            self.bias -= self.step * torch.bincount(chosen.flatten(), minlength=E).float()
        return chosen


class Noise(Mixture):
    def choose(self, scores):
        return (scores + torch.randn_like(scores)).topk(2).indices


class Sampled(Mixture):
    def choose(self, scores):
        return torch.multinomial(scores, 2)


def compile_model(cls):
    torch.manual_seed(0)
    x = torch.randn(S, D)
    model = moefx.compile(cls(), example_inputs=(x,))
    assert moefx.blocks(model), cls
    return model, x


def differentiate(model, x, run):
    model.bias.zero_()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    run(model, x).pow(2).sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


CHANGED = {
    "bias": (MovedBias, {}),
    "bias of an argmax": (Top1, {}),
    "bias, experts that are not fused": (Unfused, {}),
    "noise": (Noise, {"preserve_rng_state": False}),
    "samples": (Sampled, {"preserve_rng_state": False}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CHANGED)
def test_another_choice_raises(case):
    cls, options = CHANGED[case]
    model, x = compile_model(cls)
    run = functools.partial(checkpoint, use_reentrant=False, **options)
    with pytest.raises(RecomputedChoice, match=r"\d+ of \d+ rows to other experts") as error:
        differentiate(model, x, run)
    assert isinstance(error.value, CheckpointError)
    assert model.forward.counts.original == 0


@pytest.mark.parametrize("frozen", ["router", "experts", "x"])
def test_another_choice_raises_with_frozen_parts(frozen):
    model, x = compile_model(MovedBias)
    if frozen != "x":
        getattr(model, frozen).requires_grad_(False)
    x.requires_grad_(frozen != "x")
    with pytest.raises(RecomputedChoice):
        checkpoint(model, x, use_reentrant=False).sum().backward()


def test_the_error_names_the_layer():
    torch.manual_seed(0)
    layers, x = nn.Sequential(Unmoved(), MovedBias()), torch.randn(S, D, requires_grad=True)
    model = moefx.compile(layers, example_inputs=(x,))
    out = functools.reduce(lambda h, layer: checkpoint(layer, h, use_reentrant=False), model, x)
    with pytest.raises(RecomputedChoice, match=r"^1: "):
        out.sum().backward()


@pytest.mark.parametrize("cls", [Unmoved, Noise, Sampled], ids=lambda cls: cls.__name__)
def test_the_same_choice_has_the_same_gradients(cls):
    model, x = compile_model(cls)
    wanted = differentiate(model, x, lambda m, x: m(x))
    got = differentiate(model, x, functools.partial(checkpoint, use_reentrant=False))
    torch.testing.assert_close(got, wanted)


def keep_topk(context, op, *args, **kwargs):
    keeps = op is torch.ops.aten.topk.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("cls", "policy"), [(MovedBias, keep_topk), (MovedBias, moefx.save_routing), (Top1, moefx.save_routing)]
)
def test_a_policy_keeps_the_first_choice(cls, policy):
    model, x = compile_model(cls)
    wanted = differentiate(model, x, lambda m, x: m(x))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    got = differentiate(model, x, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))
    torch.testing.assert_close(got, wanted)


def test_reentrant_is_as_the_original():
    """Compare no selections, as torch does: both models use the gradients of the recomputation."""
    model, x = compile_model(MovedBias)
    got = differentiate(model, x, functools.partial(checkpoint, use_reentrant=True))
    with model.forward.force_graph("original"):
        wanted = differentiate(model, x, functools.partial(checkpoint, use_reentrant=True))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("case", ["bias", "noise"])
def test_a_compiled_function_that_is_recomputed(case):
    cls, options = CHANGED[case]
    model, x = compile_model(cls)
    function = torch.compile(model, backend="aot_eager")
    with pytest.raises(RecomputedChoice, match=r"\d+ of \d+ rows to other experts"):
        differentiate(model, x, lambda model, x: checkpoint(function, x, use_reentrant=False, **options))


@pytest.mark.parametrize("cls", [Unmoved, Noise], ids=lambda cls: cls.__name__)
def test_a_compiled_function_with_equal_recomputation(cls):
    model, x = compile_model(cls)
    function = torch.compile(model, backend="aot_eager")
    wanted = differentiate(model, x, lambda model, x: function(x))
    got = differentiate(model, x, lambda model, x: checkpoint(function, x, use_reentrant=False))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("routes_otherwise", [True, False], ids=["other tokens, the same counts", "other slots"])
def test_another_assignment_of_tokens_raises(routes_otherwise):
    """Compare the rows of experts regardless of their slots."""
    ids = torch.tensor([[0, 1], [1, 2], [2, 0]])
    choices = iter([ids, ids.roll(1, 0) if routes_otherwise else ids.flip(1)])
    x = torch.randn(3, D, requires_grad=True)

    def run(x):
        token_ids, _, offsets, inverse, _ = dialect.build_pft(next(choices), None, None, num_experts=3)
        return dialect.dispatch(x, token_ids, offsets, inverse)

    out = checkpoint(run, x, use_reentrant=False)
    if not routes_otherwise:
        out.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))
        return
    with pytest.raises(RecomputedChoice, match="3 of 6 rows"):
        out.sum().backward()


def test_a_second_backward_and_tensors_on_the_host():
    model, x = compile_model(Unmoved)
    x.requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        out = model(x).pow(2).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (again,) = torch.autograd.grad(out, x)
    assert torch.equal(first, again)
    out = checkpoint(model, x, use_reentrant=False).pow(2).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    model.bias[0] = 100
    with pytest.raises(RecomputedChoice):
        torch.autograd.grad(out, x)


def test_without_hooks_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(recomputed_choice, "_differs", None)
    model, x = compile_model(MovedBias)
    differentiate(model, x, lambda m, x: m(x))


def test_a_device_is_looked_at_when_the_backward_is_enqueued(monkeypatch):
    """Simulate a GPU: the host reads the comparison after the gradients exist."""
    later = []
    monkeypatch.setattr(recomputed_choice, "_is_on_host", lambda t: False)
    monkeypatch.setattr(recomputed_choice, "_is_capturing", lambda: False)
    model, x = compile_model(MovedBias)
    x.requires_grad_()
    x.register_hook(later.append)
    with pytest.raises(RecomputedChoice, match="rows to other experts"):
        checkpoint(model, x, use_reentrant=False).pow(2).sum().backward()
    assert len(later) == 1
