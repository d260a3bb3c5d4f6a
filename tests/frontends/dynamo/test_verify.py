"""`moefx.verify` of the result of `torch.compile(model, backend="moefx")`."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import moefx
from moefx.errors import InvalidInput
from moefx.frontends.dynamo.backend import backend
from tests.verification.compiled import break_op

from .models import D, build_model

OPTIONS = {"backend": "aot_eager", "validation": "symbolic"}
X = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def compile_module(module):
    return torch.compile(module, backend=backend, options=OPTIONS)


def test_verify_of_the_model_itself():
    """Compare the whole model and each region with the original, whose weights the compiled model shares."""
    original = build_model("dense_masked")
    before = copy.deepcopy(original.state_dict())
    call = compile_module(original)
    report = moefx.verify(call, original, (X,), routings=False)
    assert report.ok, str(report)
    assert {row.block for row in report.rows} == {"", "layers.0.moe", "layers.1.moe"}
    assert {row.name for row in report.rows if row.block == ""} >= set(dict(original.named_parameters()))
    assert "compiled by aot_eager, as a whole" in report.covered
    second, third = report.covered[0].split(","), report.covered[1].split(",")
    assert second[0] == "call 2: 18 tokens" and third[0].startswith("call 3: ")
    count = int(third[0].split()[2])
    assert {row.op for row in report.routing} == {"topk"} and {row.tokens for row in report.routing} == {18, count}
    assert all(torch.equal(t, before[name]) for name, t in original.state_dict().items())
    assert "not called yet" in str(moefx.explain(call))
    assert moefx.verify(call, call, (X,), grads=False, routings=False).ok


def test_names_of_a_sequential():
    """Use the names of `blocks` for regions. torch's own modules around them call the graphs as before."""
    original = torch.nn.Sequential(
        build_model("dense_masked").layers[0]["moe"], build_model("dense_masked").layers[0]["moe"]
    )
    original[0].forward = functools.partial(_first, original[0].forward)
    call = compile_module(original)
    call(X)
    report = moefx.verify(call, original, (X,), grads=False, routings=False)
    assert report.ok and {row.block for row in report.rows} == {"", *(b.name for b in moefx.blocks(call))}


def _first(forward, x):
    return forward(x)[0]


def test_verify_finds_other_weights():
    original = build_model("stack_gather", num_layers=1)
    other = copy.deepcopy(original)
    assert moefx.verify(compile_module(original), other, (X,), routings=False).ok
    with torch.no_grad():
        other.layers[0]["moe"].w_up.mul_(1.01)
    assert not moefx.verify(compile_module(original), other, (X,), routings=False, grads=False).ok


def test_the_pass_that_broke_a_region_is_named():
    original = build_model("stack_gather", num_layers=1)
    with break_op("expert_mlp_backward", lambda grads, *_, **__: [*grads[:-1], grads[-1] * 1.01]):
        report = moefx.verify(compile_module(original), original, (X,), routings=False)
    assert report.first_block == "layers.0.moe" and report.first_pass.startswith("fuse (")


@pytest.mark.parametrize("of_a_layer", [False, True])
def test_a_model_compiled_in_place_is_compared_with_itself(of_a_layer):
    original = build_model("dense_masked", num_layers=1)
    (original.layers[0]["moe"] if of_a_layer else original).compile(backend=backend, options=OPTIONS)
    report = moefx.verify(original, original, (X.float(),), dtype=torch.float32, routings=False)
    assert report.ok and any(row.kind == "path" for row in report.rows)


def test_verify_of_a_model_without_regions():
    layer = torch.nn.Linear(D, D).double()
    report = moefx.verify(compile_module(layer), layer, (X,))
    assert not report.ok and "nothing of moefx ran" in str(report)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (lambda m: (m, compile_module(m)), "the arguments are swapped"),
        (lambda m: (torch.compile(m, backend="eager"), m), "backend of torch.compile is not 'moefx'"),
        (lambda m: (torch.compile(lambda x: m(x), backend=backend), m), "got a function, which has no parameters"),
    ],
)
def test_invalid_pairs_raise(pair, message):
    with pytest.raises(InvalidInput, match=message):
        moefx.verify(*pair(build_model("stack_gather", num_layers=1)), (X,))
