"""`Plan(dispatch="pull")`: every rank reads what its experts need from the memory of the other ranks.

On the CPU, files that all processes map stand in for the memory of GPUs.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist

from moefx.bench.file_memory import memory_of_files
from moefx.ir.ops import peer_memory, peer_rows

from ..blocks import D
from . import gather_cases
from .gather_cases import count_collectives, make_mesh
from .models import Model, check, compile_over_mesh

PULL = gather_cases.GATHER.replace(dispatch="pull")
LIMITED = gather_cases.LIMITED.replace(dispatch="pull")


def pulled(case: Callable[[], None]) -> Callable[[], None]:
    """Return the case of "gather" for "pull"."""

    @functools.wraps(case)
    def run() -> None:
        plans = mock.patch.multiple(gather_cases, GATHER=PULL, LIMITED=LIMITED)
        with memory_of_files(), plans:
            case()

    return run


case_outputs_and_gradients = pulled(gather_cases.case_outputs_and_gradients)
case_ranks_without_tokens = pulled(gather_cases.case_ranks_without_tokens)
case_a_capacity = pulled(gather_cases.case_a_capacity)
case_a_stash = pulled(gather_cases.case_a_stash)
case_too_many_tokens = pulled(gather_cases.case_too_many_tokens)
case_shared_tokens = pulled(gather_cases.case_shared_tokens)
case_checkpoint_policies_and_frozen_experts = pulled(gather_cases.case_checkpoint_policies_and_frozen_experts)
case_recomputation = pulled(gather_cases.case_recomputation)
case_one_graph = pulled(gather_cases.case_one_graph)
case_a_load = pulled(gather_cases.case_a_load)
case_overwritten_experts = pulled(gather_cases.case_overwritten_experts)


def case_other_ways_without_peer_access() -> None:
    """Gather, and say why."""
    line = gather_cases.explain_experts(PULL)
    assert "every rank gathers the tokens of all ranks" in line, line
    assert "'gather' for the planned 'pull': ranks on cpu do not share memory" in line, line
    check(Model("gated", layers=1).double(), make_mesh(), PULL)
    with memory_of_files():
        line = gather_cases.explain_experts(LIMITED)
    assert "every rank pulls the tokens of its experts, at most 13 tokens a rank (as planned)" in line, line


def case_no_collectives() -> None:
    """Exchange through memory alone: four times for a layer, each with two waits of the devices."""
    waits: Counter = Counter()

    def count_waits(memory):
        waits["all"] += 1
        wait_for_all(memory)

    wait_for_all = peer_memory.PeerMemory.wait_for_all
    with memory_of_files(), mock.patch.object(peer_memory.PeerMemory, "wait_for_all", count_waits):
        compiled = compile_over_mesh(Model("gated", layers=1), make_mesh(), LIMITED)
        x = torch.randn(9, D)
        for _ in range(2):
            compiled(x).sum().backward()  # allocates; the third call compares no experts
        waits.clear()
        with count_collectives() as found:
            compiled(x).sum().backward()
        assert not found, found
        assert waits["all"] == 8, waits


def case_buffers_that_grow() -> None:
    """Compute the same after larger and smaller calls, by blocks of several widths that share the memory."""
    with memory_of_files():
        model = Model("gated", layers=2).double()
        compiled = compile_over_mesh(model, make_mesh(), PULL)
        for number in (3, 40, 5, 90, 3):
            x = torch.randn(number + dist.get_rank(), D, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), model(x))


FAULTS = {"read_rows": 4, "add_rows": 6}  # calls of two layers in forward and backward


def case_verify_detects_wrong_rows() -> None:
    """Report a wrong row in any exchange."""
    with memory_of_files():
        gather_cases.check_faults_are_seen(LIMITED, FAULTS, inject_fault)


@contextlib.contextmanager
def inject_fault(name: str, at: int) -> Iterator[list[int]]:
    """Add 1 to all rows of one rank in one call."""
    run, seen, changed = getattr(peer_rows, name), 0, list[int]()

    def run_wrong(*args, **kwargs):
        nonlocal seen
        seen += 1
        rows = run(*args, **kwargs)
        if (seen - 1) % FAULTS[name] != at or dist.get_rank() != 1:
            return rows
        changed.append(seen)
        return rows + 1.0

    with mock.patch.object(peer_rows, name, run_wrong):
        yield changed
