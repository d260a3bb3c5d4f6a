"""Faults in compiled models: every wrong kernel of every provider and every wrong graph is reported."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph

import moefx
from moefx.inspection.history import History
from moefx.ir import op_providers
from moefx.ir.ops.dialect import build_pft
from moefx.ir.ops.op_definition import registry
from moefx.runtime.block_forward import get_rewritten_forward, install_forward
from moefx.runtime.program import Program
from moefx.verification.verify_report import verify

from .compiled import break_op
from .faulty_models import IDS, Model, build_models, make_ids


def swap(result, topk_ids, *args, **kwargs):
    ids = torch.where(topk_ids == 0, 1, torch.where(topk_ids == 1, 0, topk_ids))
    return build_pft.reference(ids, *args, **kwargs)


def keep_all_but(position: int) -> Callable[..., Any]:
    def corrupt(result, topk_ids, topk_weights, keep, **kwargs):
        keep = torch.ones_like(topk_ids, dtype=torch.bool)
        keep.view(-1)[position] = False
        return build_pft.reference(topk_ids, topk_weights, keep, **kwargs)

    return corrupt


def drop_token(result, topk_ids, topk_weights, keep, **kwargs):
    keep = torch.ones_like(topk_ids, dtype=torch.bool)
    keep[5] = False
    return build_pft.reference(topk_ids, topk_weights, keep, **kwargs)


def scale_weights(result, *args, **kwargs):
    return (*result[:4], scale(result[4]))


def change_result(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Change one result of an op that returns several, or the only result."""

    def corrupt(result, *args, **kwargs):
        if isinstance(result, torch.Tensor):
            return change(result)
        if index >= len(result):
            return result
        return type(result)([*result[:index], change(result[index]), *result[index + 1 :]])

    return corrupt


def scale(t):
    return t * (1.001 if t.dtype == torch.float32 else 1.1)  # larger than rounding errors


def lose_first(t):
    """Set one expert of a gradient of stacked weights to zero, or one row of a gradient of rows."""
    return torch.cat([torch.zeros_like(t[:1]), t[1:]])


def write_nan(t):
    t = t.clone()
    t.view(-1)[3] = torch.nan
    return t


CHANGES = {"scaled": scale, "zero": torch.zeros_like, "one lost": lose_first, "NaN": write_nan}
ROUTING = {
    "swapped experts": swap,
    "one dropped pair": keep_all_but(7),
    "the last pair dropped": keep_all_but(-1),
    "one dropped token": drop_token,
    "scaled weights": scale_weights,
}
NUM_RESULTS = {"expert_mlp_backward": 5, "grouped_mm_backward": 1, "combine_backward": 2}
FUSED = ("build_pft", "build_pft_backward", "expert_mlp", "expert_mlp_backward", "combine", "dispatch")
UNFUSED = (
    "grouped_mm", "grouped_mm_backward", "expert_rows", "expert_rows_backward", "combine",
    "dispatch",
)  # fmt: skip


def list_cases() -> Iterator[Any]:
    for fuse, ops in ((True, FUSED), (False, UNFUSED)):
        for op in ops:
            faults = ROUTING if op == "build_pft" else {
                f"{name}-{i}": change_result(i, change)
                for i in range(NUM_RESULTS.get(op, 1)) for name, change in CHANGES.items()
            }  # fmt: skip
            # Faults of a routing change the reference's routing, for all providers.
            for which, provider in enumerate(["reference"] if op == "build_pft" else registry[op].providers):
                for number, (name, corrupt) in enumerate(faults.items()):
                    ident = f"{'fused' if fuse else 'unfused'}-{op}-{provider}-{name}"
                    # Run all faults with the reference; with other providers one fault per result, a different one
                    # each.
                    result, change = divmod(number, len(CHANGES))
                    sampled = provider == "reference" or (result + change + which) % len(CHANGES) == 0
                    marks = [] if sampled else [pytest.mark.exhaustive]
                    yield pytest.param(fuse, op, provider, corrupt, id=ident, marks=marks)


@functools.cache
def is_run_by(fuse: bool, op: str, provider: str) -> bool:
    """Return whether the provider runs these calls. Some providers support only 16 bits or GPUs."""
    compiled = copy.deepcopy(build_models(fuse, provider)[1])
    try:
        with op_providers.force(op, provider):
            op_providers.reset_counters()
            compiled(make_ids(provider)).sum().backward()
            return op_providers.counters().get((op, provider), 0) > 0
    except (RuntimeError, NotImplementedError):
        return False


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("fuse", "op", "provider", "corrupt"), list(list_cases()))
def test_every_wrong_kernel_is_flagged(fuse, op, provider, corrupt):
    if not is_run_by(fuse, op, provider):
        pytest.skip(f"{provider} does not run {op} here")
    original, compiled = build_models(fuse, provider)
    with op_providers.force(op, provider), break_op(op, corrupt, provider=provider):
        report = verify(compiled, original, (make_ids(provider),), routings=False)
    assert not report.ok and report.first_block == "layer" and report.first_pass


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fuse", [True, False])
def test_every_correct_provider_passes(fuse):
    ran = set()
    for op in FUSED if fuse else UNFUSED:
        for provider in registry[op].providers:
            if is_run_by(fuse, op, provider):
                ran.add((op, provider))
                original, compiled = build_models(fuse, provider)
                with op_providers.force(op, provider):
                    report = verify(compiled, original, (make_ids(provider),), routings=False, token_counts=())
                assert report.ok, f"{op} {provider}\n{report}"
    gemms = ("expert_mlp", "expert_mlp_backward") if fuse else ("grouped_mm", "grouped_mm_backward")
    assert ran >= {(op, provider) for op in gemms for provider in ("reference", "segments", "grouped_mm")}


# -- wrong graphs ------------------------------------------------------------------------------------------


def keep_stale_buffer(graph: Graph) -> None:
    for node in [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default]:
        graph.erase_node(node)


def swap_experts(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" and node.target.startswith(("experts.0.", "experts.1.")):
            node.target = f"experts.{1 - int(node.target[8])}{node.target[9:]}"


def cut_router_gradient(graph: Graph) -> None:
    (pft,) = [n for n in graph.nodes if n.target is torch.ops.moefx.build_pft.default]
    with graph.inserting_before(pft):
        pft.args = (
            pft.args[0],
            graph.call_function(torch.ops.aten.detach.default, (pft.args[1],)),
            pft.args[2],
        )


def cut_input_gradient(graph: Graph) -> None:
    for mlp in [n for n in graph.nodes if n.target is torch.ops.moefx.expert_mlp.default]:
        with graph.inserting_before(mlp):
            mlp.args = (graph.call_function(torch.ops.aten.detach.default, (mlp.args[0],)), *mlp.args[1:])


def replace_body(change: Callable[[str], str]) -> Callable[[Graph], None]:
    def spoil(graph: Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.moefx.expert_mlp.default:
                before = node.kwargs["body"]
                node.kwargs = {**node.kwargs, "body": change(before)}
                assert node.kwargs["body"] != before

    return spoil


def change_capacity(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.moefx.build_pft.default:
            node.kwargs = {**node.kwargs, "capacity": 12, "drop": "position_token"}


WRONG_GRAPHS = {
    "stale buffer": keep_stale_buffer,
    "swapped experts": swap_experts,
    "missing router gradient": cut_router_gradient,
    "missing input gradient": cut_input_gradient,
    "other activation": replace_body(lambda text: text.replace('"silu"', '"gelu"')),
    "routing weight left out": replace_body(lambda text: text.replace('["mul.Tensor","y","w"]', '"y"').replace(
        '["mul.Tensor", "y", "w"]', '"y"')),
    "tokens over a capacity dropped": change_capacity,
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fault", WRONG_GRAPHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_wrong_graph_is_flagged(fault, dtype):
    original, compiled = build_models(True, "grouped_mm" if dtype == torch.bfloat16 else "")
    compiled = copy.deepcopy(compiled)
    block = compiled.layer
    forward = get_rewritten_forward(block)
    (program,) = forward.programs
    last = program.history.snapshots[-1]
    graph = last.graph.copy()
    WRONG_GRAPHS[fault](graph.graph)
    snapshots = (*program.history.snapshots[:-1], dataclasses.replace(last, graph=graph))
    spoiled = Program(program.key, History("layer", snapshots), program.absorbed, program.guards)
    assert verify(compiled, original, (IDS,)).ok
    install_forward(block, [spoiled], name="layer")
    report = verify(compiled, original, (IDS,))
    assert not report.ok and report.first_block == "layer", str(report)
    assert report.first_pass.startswith(f"{last.pass_name} (")


# -- wrong only in a second backward, or for some cotangents ------------------------------------------------


class OnceOnly(torch.autograd.Function):
    """Identity with a wrong gradient in a second backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.ran = False
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ran, ctx.ran = ctx.ran, True
        return grad * 2 if ran else grad


class NeedsStrides(torch.autograd.Function):
    """Identity with a wrong gradient for a cotangent of stride 0."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if 0 in grad.stride() else grad


class Refuses(torch.autograd.Function):
    """Identity that raises in a second backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.ran = False
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.ran:
            raise RuntimeError("this op has one backward")
        ctx.ran = True
        return grad


@pytest.mark.parametrize("fault", [OnceOnly, NeedsStrides])
def test_a_wrong_second_backward_is_flagged(fault):
    original, compiled = build_models(True)
    compiled = copy.deepcopy(compiled)
    forward = compiled.forward
    compiled.forward = lambda ids: fault.apply(forward(ids))
    report = verify(compiled, original, (IDS,), routings=False)
    assert report.failed and all(row.name.endswith(" (second backward)") for row in report.failed)


class Once(Model):
    def forward(self, ids):
        return Refuses.apply(super().forward(ids))


def test_a_model_with_one_backward_is_compared_without_a_second():
    torch.manual_seed(0)
    original = Once()
    compiled = moefx.compile(original, example_inputs=(IDS,))
    report = verify(compiled, original, (IDS,), routings=False)
    assert report.ok and any("no second backward compared" in note for note in report.notes), str(report)
