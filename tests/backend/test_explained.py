"""What `explain`, `graph` and `history` say of a model, as Dynamo compiles it for more sizes, and anew."""

from __future__ import annotations

import logging

import pytest
import torch

import moefx
from moefx.backend import backend
from moefx.errors import MoefxError

from .models import D, model


def compiled(module):
    return torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})


def tokens(*shape):
    return torch.randn(*shape, D, dtype=torch.float64)


@pytest.mark.parametrize("shapes", [[(2, 9), (1, 1), (0, 3)], [(1, 1), (2, 9)]])
def test_a_graph_of_one_token_is_a_note(shapes, caplog):
    """Where regions of the same name are rewritten in others."""
    caplog.set_level(logging.INFO)
    call = compiled(model("weight_gather"))
    for shape in shapes:
        call(tokens(*shape))
    explained = moefx.explain(call)
    assert len(explained.matched) == 1 and not explained.refused
    assert "note        graphs of a single token, or of none, run as they were" in str(explained)
    warned = [r for r in caplog.records if "one token only" in r.getMessage() and r.levelname == "WARNING"]
    assert len(warned) == (shapes[0] == (1, 1))  # before any other it is news


def test_of_one_token_alone():
    call = compiled(model("weight_gather"))
    call(tokens(1, 1))
    text = str(moefx.explain(call))
    assert "refused: layers.0.moe, layers.1.moe" in text and "there is one token only" in text
    assert "call it with more" in text


def test_after_a_reset_of_dynamo():
    """What was compiled before does not run any more."""
    call = compiled(model("weight_gather"))
    call(x := tokens(2, 9))
    assert moefx.graph(call, "layers.0.moe")
    torch._dynamo.reset()
    assert not moefx.blocks(call) and "not called yet" in str(moefx.explain(call))
    for ask in (moefx.graph, moefx.history):
        with pytest.raises(MoefxError, match="once it was called"):
            ask(call, "layers.0.moe")
    call(x)
    assert moefx.graph(call, "layers.0.moe")


def test_a_second_model_of_a_class():
    """Dynamo takes the graphs of the first."""
    for which in range(2):
        call = compiled(model("weight_gather"))
        call(tokens(2, 9))
        assert len(moefx.blocks(call)) == (2 if which == 0 else 0)
    assert "Dynamo runs the graphs of an equal model that was compiled before" in str(moefx.explain(call))
