"""Joined ops equal single ops bit by bit, and are one autograd node."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import operator
import weakref

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from moefx.errors import DoubleBackward
from moefx.ir import op_providers
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.graphs.joined_ops import JoinedOps
from moefx.ir.op_providers import registry
from moefx.runtime.block_forward import find_rewritten_blocks

from ..proof_memory import share_proofs
from .joined_block import Block, D, E, T


@pytest.fixture(scope="module")
def compiled() -> nn.Module:
    torch.manual_seed(0)
    with share_proofs():
        return moefx.compile(Block(), (torch.randn(T, D),), plan=moefx.Plan(validation="symbolic"))


def find_joined_ops(model: nn.Module) -> JoinedOps:
    (forward,) = find_rewritten_blocks(model).values()
    (found,) = [v for v in forward.programs[0].fn.__globals__.values() if isinstance(v, JoinedOps)]
    return found


def run(model: nn.Module, x: torch.Tensor, one_by_one: bool = False) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    x = x.detach().clone().requires_grad_()
    (forward,) = find_rewritten_blocks(model).values()
    program = forward.programs[0]
    function, program.fn = program.fn, program.traced_fn if one_by_one else program.fn
    try:
        out = model(x)
    finally:
        program.fn = function
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("autocast", (False, True))
def test_results_equal_those_of_single_ops_bit_by_bit(compiled, autocast):
    x = torch.randn(T, D)
    assert len(find_joined_ops(compiled).names) > 1
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        joined, single = run(compiled, x), run(compiled, x, one_by_one=True)
    assert all(map(torch.equal, joined, single)), [(a - b).abs().max() for a, b in zip(joined, single, strict=True)]
    assert joined[0].isfinite().all() and all(grad.any() for grad in joined[1:])


def test_a_call_is_one_autograd_node(compiled):
    out = compiled(torch.randn(T, D, requires_grad=True))
    assert type(out.grad_fn).__name__ == "_JoinedNodeBackward"


def test_modes_see_the_single_ops(compiled):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Names():
        compiled(torch.randn(T, D))
    assert [f"moefx::{name}" for name in find_joined_ops(compiled).names] == [
        s for s in seen if s.startswith("moefx::")
    ]


def test_a_second_derivative_raises_and_a_graph_of_the_first_does_not(compiled):
    x = torch.randn(T, D, requires_grad=True)
    # The loss is linear, so the gradient of the output does not depend on the input.
    (plain,) = torch.autograd.grad(compiled(x).sum(), x)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    assert torch.equal(plain, grad) and grad.requires_grad
    for wanted in ([x], [compiled.up], [compiled.gate.weight]):
        with pytest.raises(DoubleBackward, match="differentiable once"):
            torch.autograd.grad(grad.sum(), wanted, retain_graph=True, allow_unused=True)


def test_a_derivative_by_the_incoming_gradient_raises(compiled):
    x, v = torch.randn(T, D, requires_grad=True), torch.randn(T, D, requires_grad=True)
    (grad,) = torch.autograd.grad((compiled(x) * v).sum(), x, create_graph=True)
    with pytest.raises(DoubleBackward, match="differentiable once"):
        torch.autograd.grad(grad.square().sum(), v, allow_unused=True)
    with pytest.raises(DoubleBackward, match="differentiable once"):
        torch.autograd.functional.jvp(compiled, x.detach(), v.detach())


def test_joined_ops_run_on_the_meta_device(compiled):
    model = copy.deepcopy(compiled).to("meta")
    assert model(torch.empty(T, D, device="meta")).shape == (T, D)


def test_a_default_device_is_no_mode_that_looks_at_ops(compiled):
    torch.set_default_device("cpu")
    try:
        out = compiled(torch.randn(T, D, requires_grad=True))
    finally:
        torch.set_default_device(None)
    assert type(out.grad_fn).__name__ == "_JoinedNodeBackward"


def test_unused_results_have_no_number_of_another(compiled):
    """Do not number the unused last result of `build_pft`, which needs a gradient, among the inputs of `dispatch`."""
    graph = fx.Graph()
    ids, weights, x = map(graph.placeholder, ("ids", "weights", "x"))
    pft = graph.call_function(torch.ops.moefx.build_pft.default, (ids, weights, None), {"num_experts": E})
    token_ids, _, offsets, inverse = (graph.call_function(operator.getitem, (pft, i)) for i in range(4))
    graph.output(graph.call_function(torch.ops.moefx.dispatch.default, (x, token_ids, offsets, inverse)))
    weights, x = torch.rand(T, 2, requires_grad=True), torch.randn(T, D)
    function = BlockGraph("", graph).compile(join=True)
    assert not function(None, torch.rand(T, E).argsort(1)[:, :2], weights, x).requires_grad
    x.requires_grad_()
    function(None, torch.rand(T, E).argsort(1)[:, :2], weights, x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0)) and weights.grad is None


def test_calls_without_gradients_keep_no_activations(compiled, monkeypatch):
    experts, policies = registry["expert_mlp"], []
    stock = experts.run
    monkeypatch.setattr(experts, "run", lambda *a, keep, **k: policies.append(keep) or stock(*a, keep=keep, **k))
    x = torch.randn(T, D)
    wanted = compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), wanted)
    frozen = copy.deepcopy(compiled).requires_grad_(False)
    assert torch.equal(frozen(x), wanted)
    assert torch.equal(frozen(x.requires_grad_()), wanted)
    assert policies == ["h", "none", "none", "h"]


def test_each_op_that_keeps_activations_has_its_own_node(compiled):
    (forward,) = find_rewritten_blocks(compiled).values()
    block = forward.programs[0].history.graph.copy()
    (mlp,) = block.find(torch.ops.moefx.expert_mlp.default)
    with block.graph.inserting_after(mlp):
        again = block.graph.node_copy(mlp)
    output = block.output
    with block.graph.inserting_before(output):
        first, second = (block.graph.call_function(operator.getitem, (m, 0)) for m in (mlp, again))
        block.graph.call_function(torch.ops.aten.add_.Tensor, (first, second))
    function = block.compile(join=True)
    assert sum(isinstance(v, JoinedOps) for v in function.__globals__.values()) == 1
    assert "expert_mlp.default" in inspect.getsource(function)


def test_frozen_experts_and_frozen_inputs(compiled):
    for frozen in (("up", "down"), ("gate.weight",), ("up",)):
        model = copy.deepcopy(compiled)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        x, results = torch.randn(T, D), []
        for one_by_one in (False, True):
            (forward,) = find_rewritten_blocks(model).values()
            program = forward.programs[0]
            function, program.fn = program.fn, program.traced_fn if one_by_one else program.fn
            with contextlib.ExitStack() as stack:
                stack.callback(setattr, program, "fn", function)
                model(x).square().sum().backward()
            results.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for joined, single in zip(*results, strict=True):
            assert (joined is None) == (single is None) and (joined is None or torch.equal(joined, single))
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
            name for name, _ in model.named_parameters() if name in frozen
        ]


def put_off_matrices(compiled) -> BlockGraph:
    """Return the graph with `weights_later`, which is joined separately, because an op of the user follows it."""
    (forward,) = find_rewritten_blocks(compiled).values()
    block = forward.programs[0].history.graph.copy()
    (mlp,) = block.find(torch.ops.moefx.expert_mlp.default)
    (pft,) = block.find(torch.ops.moefx.build_pft.default)
    with block.graph.inserting_before(mlp):
        later = block.graph.call_function(torch.ops.moefx.weights_later.default, (mlp.args[5], mlp.args[7]))
        block.graph.call_function(torch.ops.aten.relu.default, (mlp.args[0],))
        place_choices = torch.ops.moefx.place_choices.default  # unused: a single op is not joined
        block.graph.call_function(place_choices, (pft.args[0], None), {"places": list(range(E))})
    mlp.args = (*mlp.args, later)
    return block


def test_gradients_of_matrices_wait_in_another_joined_node(compiled):
    block = put_off_matrices(compiled)
    function = block.compile(join=True)
    assert sum(isinstance(v, JoinedOps) for v in function.__globals__.values()) == 2
    results, x = [], torch.randn(T, D, requires_grad=True)
    for run_block in (function, block.compile()):  # joined, and op by op
        model, x.grad = copy.deepcopy(compiled), None
        op_providers.reset_counters()
        run_block(model, x).square().sum().backward()
        calls = {op: n for (op, _), n in op_providers.counters().items()}
        assert calls["expert_mlp_backward"] == 2, "one call for the rows, a later one for the matrices"
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("join", [True, False])
def test_factors_of_matrices_that_are_not_wanted_are_freed_with_the_graph(compiled, monkeypatch, join):
    """Free the factors although the node of `weights_later` does not run, without the garbage collector."""
    factors = []
    backward = registry["expert_mlp_backward"]
    monkeypatch.setattr(backward, "observe", lambda outputs: factors.extend(map(weakref.ref, outputs)))
    x = torch.randn(T, D, requires_grad=True)
    out = put_off_matrices(compiled).compile(join=join)(compiled, x)
    gc.collect()
    gc.disable()
    try:
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert len(factors) > 1
        del out, grad
        assert not any(factor() is not None for factor in factors)
    finally:
        gc.enable()


def test_an_in_place_change_of_a_saved_tensor_raises(compiled):
    model = copy.deepcopy(compiled)
    out = model(torch.randn(T, D, requires_grad=True))
    with torch.no_grad():
        model.down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_graph_is_freed_after_the_backward(compiled):
    x = torch.randn(T, D, requires_grad=True)
    out = compiled(x)
    node = weakref.ref(out.grad_fn)
    out.sum().backward()
    del out
    gc.collect()
    assert node() is None


def test_a_retained_graph_runs_twice(compiled):
    x = torch.randn(T, D, requires_grad=True)
    out = compiled(x)
    out.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    out.sum().backward()
    assert torch.equal(first, x.grad)
