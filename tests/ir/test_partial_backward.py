"""Backwards by a part of the inputs equal whole backwards, and do not repeat the experts' work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

import moefx
from moefx.ir.ops import expert_mlp as experts
from moefx.runtime.block_forward import find_rewritten_blocks

from ..blocks import D, Gated, Loop, WithBias
from ..proof_memory import share_proofs
from .counting import Counting

KINDS: dict[str, Callable[[], nn.Module]] = {
    "separate": lambda: Loop(Gated),
    "separate with biases": lambda: Loop(lambda: Gated(bias=True)),
    "stacked with biases": WithBias,
}


@pytest.fixture(params=(False, True), ids=("joined", "one by one"))
def one_by_one(request) -> bool:
    return request.param


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counting = Counting(experts.expert_mlp_backward)
    monkeypatch.setattr(experts, "expert_mlp_backward", counting)
    return counting.parts


def run_block(kind: str, one_by_one: bool) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """Run a compiled block. Returns it, its input, its output, and the autograd node of the experts."""
    torch.manual_seed(0)
    block, x = KINDS[kind]().double(), torch.randn(12, D, dtype=torch.float64, requires_grad=True)
    with share_proofs():
        compiled = moefx.compile(block, (x.detach(),), plan=moefx.Plan(validation="symbolic"))
    (program,) = find_rewritten_blocks(compiled)[""].programs
    program.fn = program.traced_fn if one_by_one else program.fn
    out = compiled(x * 1)
    nodes = [out.grad_fn]
    while (node := nodes.pop()).name() not in ("expert_mlpBackward", "_JoinedNodeBackward"):
        nodes += [child for child, _ in node.next_functions if child is not None]
    return compiled, x, out, node


def list_expert_parameters(block: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in block.named_parameters() if name != "gate.weight"]


def differentiate_by_input(out: Tensor, x: Tensor, node: Any) -> tuple[Tensor, list[tuple[GradientEdge, Tensor]]]:
    """Differentiate by x alone. Returns also the gradients that the experts' node received."""
    received: list[Any] = []
    handle = node.register_prehook(received.append)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), x, retain_graph=True)
    handle.remove()
    return grad, [(GradientEdge(node, i), g) for i, g in enumerate(received[0]) if g is not None]


def differentiate_by_experts(block: nn.Module, edges: list[tuple[GradientEdge, Tensor]], **options: bool) -> Any:
    outputs, grads = zip(*edges, strict=True)
    parameters = list_expert_parameters(block)
    return torch.autograd.grad(outputs, parameters, grads, materialize_grads=True, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_delayed_gradients_of_weights_equal_those_of_a_whole_backward(kind, one_by_one, parts):
    block, x, out, node = run_block(kind, one_by_one)
    of_x, edges = differentiate_by_input(out, x, node)
    assert parts == {"rows": 1}
    of_experts = differentiate_by_experts(block, edges, retain_graph=True)
    assert parts == {"rows": 1, "weights": 1}
    out.pow(2).sum().backward()
    assert parts == {"rows": 1, "weights": 1, "all": 1}
    torch.testing.assert_close(of_x, x.grad)
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in list_expert_parameters(block)]
    assert all(grad.any() for grad in wanted[-2:])
    torch.testing.assert_close(list(of_experts), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_other_gradients_in_the_second_run_are_computed_anew(kind, one_by_one, parts):
    block, x, out, node = run_block(kind, one_by_one)
    _, edges = differentiate_by_input(out, x, node)
    doubled = differentiate_by_experts(block, [(edge, 2 * grad) for edge, grad in edges], retain_graph=True)
    edges[0][1].mul_(3)  # changed in place since the first run
    tripled = differentiate_by_experts(block, edges)
    assert parts["weights"] == 0
    torch.testing.assert_close(list(tripled), [1.5 * grad for grad in doubled])


def test_a_weight_that_changes_between_the_runs_raises(one_by_one):
    block, x, out, node = run_block("separate", one_by_one)
    _, edges = differentiate_by_input(out, x, node)
    with torch.no_grad():
        list_expert_parameters(block)[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        differentiate_by_experts(block, edges)


PARTS: dict[str, Callable[[str], bool]] = {
    "input": lambda name: name == "x",
    "router": lambda name: name == "gate.weight",
    "up": lambda name: name.endswith((".up.weight", "w1")),
    "down": lambda name: name.endswith((".down.weight", "w2")),
    "biases": lambda name: name.endswith((".bias", "b1", "b2")),
    "experts": lambda name: name not in ("x", "gate.weight"),
    "input and down": lambda name: name == "x" or name.endswith((".down.weight", "w2")),
}


def list_leaves(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"x": x, **dict(block.named_parameters())}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_part_equal_those_of_a_whole_backward(kind, one_by_one):
    """Differentiate by a part, then by everything: a run leaves nothing behind for the next one."""
    block, x, out, _ = run_block(kind, one_by_one)
    out.pow(2).sum().backward()
    wanted = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in list_leaves(block, x).items()}
    assert all(wanted[name].any() for name in ("x", "gate.weight"))
    for part, is_in in PARTS.items():
        block, x, out, _ = run_block(kind, one_by_one)
        leaves, loss = list_leaves(block, x), out.pow(2).sum()
        inputs = [leaf for name, leaf in leaves.items() if is_in(name)]
        if not inputs:
            continue
        found = torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(list(found), [grad for n, grad in wanted.items() if is_in(n)], msg=part)
        loss.backward()
        whole = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
        torch.testing.assert_close(whole, wanted, msg=part)
