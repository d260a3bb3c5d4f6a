"""`moefx.verify` of models with distributed experts, and faults that it must report."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import moefx
import moefx.ir.ops.row_exchange
from moefx.errors import InvalidInput
from moefx.ir.ops.uneven_all_to_all import start_all_to_all

from ..blocks import D
from .launch import sampled
from .models import Model, compile_over_mesh

PLANS = {
    name: moefx.Plan(dispatch=name, node_size=2, validation="symbolic") for name in ("flat", "dedup", "rbd", "halo")
}


def compile_pair(kind: str, plan: moefx.Plan, layers: int = 2) -> tuple[Model, Model]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model = Model(kind, layers=layers, num_experts=dist.get_world_size())
    return model, compile_over_mesh(model, mesh, plan)


def draw_tokens(number: int = 9) -> torch.Tensor:
    return torch.randn(number + dist.get_rank(), D)


def case_correct_models_pass() -> None:
    for (name, plan), kind in sampled(zip(PLANS.items(), ("gated", "joined", "joined", "gated"), strict=True), 4):
        model, compiled = compile_pair(kind, plan, layers=1)
        for dtype in (None, torch.float64):
            report = moefx.verify(compiled, model, draw_tokens(), dtype=dtype, routings=dtype is None)
            assert report.ok, f"{name}, {kind}\n{report}"
            compared = {row.name for row in report.rows if row.kind == "grad_param"}
            assert compared >= {name for name, _ in compiled.named_parameters()}


def case_experts_without_tokens_on_some_ranks() -> None:
    """Compare experts without tokens on some ranks, which get no gradient there in any precision."""
    for kind in sampled(("kinds", "gated"), 2):
        model, compiled = compile_pair(kind, PLANS["dedup"], layers=1)
        for number in sampled((0, 1), 2):
            few = torch.randn(number if dist.get_rank() == 0 else 9, D)
            report = moefx.verify(compiled, model, few, routings=False)
            assert report.ok, f"{kind}, {number} tokens\n{report}"


class OnSmall(Model):
    def forward(self, x):
        if x.abs().max() > 1e3:
            raise ValueError("x is too large")
        return super().forward(x)


def case_different_comparisons_raise() -> None:
    model, compiled = compile_pair("gated", PLANS["dedup"])
    rank = dist.get_rank()
    ranks = f"ranks 0, {', '.join(map(str, range(2, dist.get_world_size())))}: sets of inputs: 1, seeds: 1"
    for inputs, options, wanted in (
        ([draw_tokens()] * (2 if rank == 1 else 1), {}, (ranks, "rank 1: sets of inputs: 2, seeds: 1")),
        (draw_tokens(), {"seeds": range(1 + (rank == 1))}, (ranks, "rank 1: sets of inputs: 1, seeds: 2")),
        (draw_tokens(), {"routings": rank != 1}, (ranks, "routings: True", "routings: False")),
        (
            (draw_tokens(), 3) if rank == 1 else draw_tokens(),
            {},
            (ranks, "rank 1: InvalidInput", "does not take these inputs"),
        ),
    ):
        try:
            moefx.verify(compiled, model, inputs, **options)
        except InvalidInput as found:
            assert all(text in str(found) for text in wanted), found
        else:
            raise AssertionError(f"compared: {wanted}")
    small = copy.deepcopy(model)
    small.__class__ = OnSmall
    try:
        moefx.verify(compiled, small, draw_tokens() * (1e6 if rank == 1 else 1))
    except InvalidInput as found:
        wanted = ": ValueError: x is too large" if rank == 1 else ", on another rank"
        assert f"the reference does not run on inputs 0, seed 0{wanted}" in str(found), found
    else:
        raise AssertionError("compared")
    assert moefx.verify(compiled, model, draw_tokens(), routings=False).ok


def case_different_weights_are_reported() -> None:
    for kind in ("gated", "joined"):
        model, compiled = compile_pair(kind, PLANS["dedup"], layers=1)
        name, parameter = next((n, p) for n, p in compiled.named_parameters() if "down" in n)
        if dist.get_rank() == 2:
            with torch.no_grad():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(1.5)
        report = moefx.verify(compiled, model, draw_tokens(), routings=False)
        held = [row for row in report.failed if row.kind == "state" and row.name == name]
        assert not report.ok, report
        assert bool(held) == (dist.get_rank() == 2), report


def agree_on_all_ranks(ok: bool) -> bool:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, ok)
    return all(found)


@contextlib.contextmanager
def inject_fault(fault: str, at: int) -> Iterator[list[int]]:
    """Change rows in the `at`-th exchange of each pass over the model, on rank 1. Yield the exchanges that changed."""
    seen, changed = 0, list[int]()

    def start_wrong(rows, sent, received, group):
        nonlocal seen
        seen += 1
        if (seen - 1) % 8 == at and dist.get_rank() == 1 and rows.shape[0] > 1:
            changed.append(seen)
            rows = rows.clone()
            # Change only the values of packed rows: other places would change how long ranks wait.
            values = rows[:, : D * 4] if rows.dtype is torch.uint8 else rows
            if fault == "swapped":
                values[[0, -1]] = values[[-1, 0]]
            elif fault == "lost":
                values[-1] = 0
        return start_all_to_all(rows, sent, received, group)

    with mock.patch.object(moefx.ir.ops.row_exchange, "start_all_to_all", start_wrong):
        yield changed


EXCHANGES = {"flat": 2, "dedup": 2, "rbd": 4, "halo": 6}


def check_faults(name: str, faults: list[tuple[int, str]]) -> None:
    model, compiled = compile_pair("joined", PLANS[name])
    for at, fault in faults:
        with inject_fault(fault, at) as changed:
            report = moefx.verify(compiled, model, draw_tokens(), routings=False)
        assert bool(changed) == (dist.get_rank() == 1), f"exchange {at} of {name} did not run: {changed}"
        assert not agree_on_all_ranks(report.ok), f"{fault} rows in exchange {at} of {name} were not seen\n{report}"


def case_faults() -> None:
    """Run every exchange with one of the faults, and every dispatch with both."""
    for way, (name, exchanges) in sampled(enumerate(reversed(EXCHANGES.items())), 4):
        check_faults(name, [(at, ("swapped", "lost")[(at + way) % 2]) for at in range(exchanges)])


def every_fault() -> None:
    for name, exchanges in EXCHANGES.items():
        check_faults(name, [(at, fault) for at in range(exchanges) for fault in ("swapped", "lost")])


def case_the_wrong_group() -> None:
    """Exchange rows with the wrong group. All ranks send equally many rows, so that only values differ."""
    model, compiled = compile_pair("every expert", PLANS["rbd"], layers=1)
    layout = moefx.blocks(compiled)[0].forward.expert_layout
    inter, intra = (level.group for level in layout.routes.levels)
    other, exchanges = {inter: intra, intra: inter}, list[str]()

    def exchanged(rows, sent, received, group):
        exchanges.append(group)
        return start_all_to_all(rows, sent, received, other[group])

    assert moefx.verify(compiled, model, torch.randn(6, D), routings=False).ok
    with mock.patch.object(moefx.ir.ops.row_exchange, "start_all_to_all", exchanged):
        report = moefx.verify(compiled, model, torch.randn(6, D), routings=False)
    assert {inter, intra} == set(exchanges), exchanges
    assert not agree_on_all_ranks(report.ok), report
