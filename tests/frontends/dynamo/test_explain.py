"""`explain`, `graph` and `history` of a model that Dynamo compiles for several sizes, and after a reset."""

from __future__ import annotations

import logging

import pytest
import torch

import moefx
from moefx.errors import InvalidInput, MoefxError
from moefx.frontends.dynamo.backend import backend

from ... import blocks
from .models import D, build_model


def compile_module(module):
    return torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})


def draw_tokens(*shape):
    return torch.randn(*shape, D, dtype=torch.float64)


@pytest.mark.parametrize("shapes", [[(2, 9), (1, 1), (0, 3)], [(1, 1), (2, 9)]])
def test_a_graph_of_one_token_adds_a_note(shapes, caplog):
    """Note graphs of one token if their regions are rewritten in other graphs."""
    caplog.set_level(logging.INFO)
    call = compile_module(build_model("weight_gather"))
    for shape in shapes:
        call(draw_tokens(*shape))
    explained = moefx.explain(call)
    assert len(explained.matched) == 1 and not explained.refused
    assert "note        graphs of a single token, or of none, run unchanged" in str(explained)
    warned = [r for r in caplog.records if "a single token, so" in r.getMessage() and r.levelname == "WARNING"]
    assert len(warned) == (shapes[0] == (1, 1))  # a warning if no other graph was compiled before


def test_explain_of_graphs_of_one_token():
    call = compile_module(build_model("weight_gather"))
    call(draw_tokens(1, 1))
    text = str(moefx.explain(call))
    assert "refused: layers.0.moe, layers.1.moe" in text and "a single token, so sizes do not identify" in text
    assert "call it with more" in text


def test_explain_after_a_reset_of_dynamo():
    """Explain no graphs from before the reset: they do not run any more."""
    call = compile_module(build_model("weight_gather"))
    call(x := draw_tokens(2, 9))
    assert moefx.graph(call, "layers.0.moe")
    torch._dynamo.reset()
    assert not moefx.blocks(call) and "not called yet" in str(moefx.explain(call))
    for ask in (moefx.graph, moefx.history):
        with pytest.raises(MoefxError, match="after its first call"):
            ask(call, "layers.0.moe")
    call(x)
    assert moefx.graph(call, "layers.0.moe")


def test_explain_of_a_second_model_of_a_class():
    """Explain why a second model has no regions: Dynamo reuses the graphs of the first."""
    for which in range(2):
        call = compile_module(build_model("weight_gather"))
        call(draw_tokens(2, 9))
        assert len(moefx.blocks(call)) == (2 if which == 0 else 0)
    assert "Dynamo reuses graphs of an equal model" in str(moefx.explain(call))


class Looped(torch.nn.Module):
    """Loop that Dynamo does not compile."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = torch.nn.Linear(D, 4), torch.nn.Parameter(torch.randn(4, D, D))

    def forward(self, x):
        w, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            token, k = torch.where(ids == e)
            out.index_add_(0, token, (x[token] @ self.up[e]) * w[token, k, None])
        return out


def test_explain_gives_the_reason_for_no_regions():
    """Print the reason that applies."""

    def of(module, *inputs):
        call = torch.compile(module, backend=backend, options={"backend": "eager"})
        for x in inputs:
            call(x)
        explained = moefx.explain(call)
        assert "0 refused" in str(explained) and "nothing found" in str(explained)
        return explained.refused[0].reason

    x = torch.randn(5, D)
    assert of(torch.nn.Linear(D, D)) == "it has no graph: it was not called yet"
    dense = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.ReLU())
    assert of(dense, x) == "Dynamo made one graph of it, and none selects experts"
    assert of(dense, x[:3], x[:2]).startswith("Dynamo made 2 graphs of it")
    assert of(torch.nn.Linear(D, 3)).startswith("it has no graph: it was not called yet, or")
    looped = torch.nn.Sequential(torch.nn.Linear(D, D), Looped())
    assert "Dynamo does not compile forward (test_explain.py:" in of(looped, x)
    assert "Dynamo made 2 graphs of it" in of(dense)


def mixture(weights, x):
    """Mixture as a function, with its weights in a dict."""
    w, ids = (x @ weights["router"]).softmax(-1).topk(2, -1)
    gates = x.new_zeros(*x.shape[:-1], 4).scatter(-1, ids, w)
    h = torch.einsum("...d,edh->...eh", x, weights["up"]).relu()
    return torch.einsum("...eh,ehd,...e->...d", h, weights["down"], gates)


def layer(weights, x):
    for _ in range(2):
        x = x + mixture(weights, x)
    return x[:, :-1]


def test_explain_of_a_function():
    """Explain a function: its regions are those of the graphs of its lines, one per call of them."""
    torch.manual_seed(0)
    weights = {"router": torch.randn(D, 4), "up": torch.randn(4, D, 5), "down": torch.randn(4, 5, D)}
    weights = {name: weight.double() for name, weight in weights.items()}
    call, other = compile_module(layer), compile_module(mixture)
    assert "not called yet" in str(moefx.explain(call)) and not moefx.blocks(call)
    for length in (9, 11):
        x = draw_tokens(2, length)
        torch.testing.assert_close(call(weights, x), layer(weights, x))
    names = [block.name for block in moefx.blocks(call)]
    assert len(names) == 2 and names[1] == f"{names[0]}_2" and str(moefx.explain(call)).startswith("layer: 2 MoE")
    assert moefx.graph(call, names[1]).find("moefx::expert_mlp")
    assert not moefx.blocks(other)
    with pytest.raises(InvalidInput, match="got a function"):
        moefx.explain(layer)


class Watched(torch.nn.Module):
    """Mixture, and counts of the tokens that another selection sends to each expert."""

    def __init__(self):
        super().__init__()
        self.moe, self.gate = build_model("weight_gather", num_layers=1), torch.nn.Linear(D, 4)

    def forward(self, x):
        chosen = self.gate(x).topk(2, -1)[1]
        return self.moe(x)[0], torch.nn.functional.one_hot(chosen, 4).flatten(0, -2).sum(0)


def test_explain_of_an_unchanged_graph():
    x = torch.randn(20, blocks.D)
    graph = torch.export.export(blocks.Loop(), (x,), strict=False).module()
    assert moefx.rewrite_graph(graph, (x,)) is graph
    assert "depends on data" in str(moefx.explain(graph))


def test_statistics_outside_a_region_are_unchanged():
    x = draw_tokens(2, 9)
    graph = torch.export.export(Watched().double(), (x,)).module()
    explained = moefx.explain(moefx.rewrite_graph(graph, (x,)))
    assert len(explained.matched) == 1 and not explained.refused
