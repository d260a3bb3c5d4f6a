"""Dual schedules: one micro-batch computes while another one waits for its exchange, and all bits stay the same."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.pipelining import schedules
from torch.profiler import ProfilerActivity, profile

from moefx.errors import RanksLost
from moefx.ir.ops import row_exchange, token_gather, uneven_all_to_all
from moefx.pipelines import microbatch_overlap
from moefx.util import turn_taking

from .launch import sampled
from .parallelize_cases import check_raises
from .pipeline_training_cases import PLAN, Decoder, Layer, RecomputedLayer, build, draw_batch, find_data_rank, make_mesh
from .pull_cases import memory_of_files

KINDS, MICROBATCHES = ("gated", "joined", "gated", "gated"), 6
SIZES = {"pp": 2, "ep": 2}
Results = dict[str, Tensor]


class RandomLayer(Layer):
    """Layer with dropout before its experts."""

    def forward(self, x, mask):
        return super().forward(F.dropout(x, 0.2), mask)


class RecomputedRandomLayer(RecomputedLayer, RandomLayer):
    pass


def build_dual(layer: type[Layer] = Layer, sizes: dict[str, int] = SIZES, **options: Any) -> Any:
    options = dict(schedule="dualpipev", microbatches=MICROBATCHES) | options
    return build(Decoder(*KINDS, layer=layer).double(), make_mesh(**sizes), **options)


def run_step(pipe: Any, sizes: dict[str, int] = SIZES) -> Results:
    """Run a step, and return the loss and all gradients of this rank."""
    number, ranks = find_data_rank(make_mesh(**sizes))
    ids, target = (tensor[number] for tensor in draw_batch(0, ranks, 2 * MICROBATCHES))
    pipe.zero_grad()
    torch.manual_seed(dist.get_rank())
    loss = pipe.step(ids, target=target)
    gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    local = {name: g.to_local() if hasattr(g, "to_local") else g for name, g in gradients.items()}
    return {"loss": loss, **{name: gradient.clone() for name, gradient in local.items()}}


def check_equal_bits(found: Results, wanted: Results, options: Any = "") -> None:
    assert list(found) == list(wanted), options
    unequal = [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    assert not unequal, (options, unequal)


def check_both_ways(sizes: dict[str, int] = SIZES, **options: Any) -> tuple[Any, Results]:
    """Check that steps with overlap equal a step without, bit by bit. Returns the pipeline and the results."""
    pipe = build_dual(sizes=sizes, **options)
    pipe.overlaps_exchanges = False
    wanted = run_step(pipe, sizes)
    assert pipe.wait_counts == (0, 0)
    pipe.overlaps_exchanges = True
    for _ in range(2):
        check_equal_bits(run_step(pipe, sizes), wanted, options)
        assert threading.active_count() == ACTIVE_THREADS[0], threading.enumerate()
    return pipe, wanted


ACTIVE_THREADS = [threading.active_count()]


def case_all_bits_are_equal() -> None:
    for dispatch, checkpoint in sampled((("dedup", "x"), ("flat", "h"), ("dedup", "all"), ("gather", "h")), 3):
        pipe, _ = check_both_ways(plan=PLAN.replace(dispatch=dispatch, checkpoint=checkpoint))
        covered, total = pipe.wait_counts
        waits = 4 if dispatch == "gather" else 5  # two in each direction; the counts of rows
        assert f"{covered} of {total} waits for exchanges covered" in repr(pipe)
        assert 0 < covered < total == waits * MICROBATCHES * len(pipe.stages), (dispatch, covered, total)
    for fields in sampled((dict(dispatch="dedup", chunks=2), dict(dispatch="gather", max_tokens=8)), 2):
        check_both_ways(plan=PLAN.replace(**fields))


def case_exchanges_of_several_hops() -> None:
    for dispatch in sampled(("rbd", "halo"), 2):
        pipe, _ = check_both_ways(sizes={"pp": 1, "ep": 4}, plan=PLAN.replace(dispatch=dispatch, node_size=2))
        assert pipe.wait_counts.covered > 0


def case_autocast() -> None:
    """The backward runs under the autocast of the step, and a weight that is used twice keeps its one cast."""
    pipe = build(Decoder(*KINDS), make_mesh(**SIZES), schedule="dualpipev", microbatches=MICROBATCHES)
    results = []
    for overlaps in (False, True, True):
        pipe.overlaps_exchanges = overlaps
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(run_step(pipe))
    plain = run_step(pipe)
    check_equal_bits(results[1], results[0])
    check_equal_bits(results[2], results[0])
    assert not torch.equal(plain["loss"], results[0]["loss"])


def case_sequence_shards() -> None:
    """Share the tokens of a micro-batch between the ranks of the expert axis."""
    plan = PLAN.replace(expert_axis="tp", sequence_axis="tp")
    pipe, _ = check_both_ways(sizes={"pp": 2, "tp": 2}, plan=plan)
    assert pipe.wait_counts.covered > 0


def case_random_layers_and_recomputations() -> None:
    """Layers that run again draw their own random numbers again, and leave the others alone."""
    _, once = check_both_ways(layer=RandomLayer)
    pipe, again = check_both_ways(layer=RecomputedRandomLayer)
    check_equal_bits(again, once)
    assert pipe.wait_counts.covered > 0
    check_both_ways(layer=RandomLayer, recompute=True)


def case_pulled_rows_do_not_overlap() -> None:
    with memory_of_files():
        pipe, _ = check_both_ways(plan=PLAN.replace(dispatch="pull"))
        assert pipe.wait_counts == (0, 0)


@contextlib.contextmanager
def record_exchanges(seconds: Callable[[], float]) -> Iterator[list[str]]:
    """Sleep before each exchange starts and after each wait. Yields the names of the micro-batches' parts, in the order
    in which they start exchanges."""
    order: list[str] = []

    def wrap_start(start: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            turns = turn_taking.find_turns()
            side = None if turns is None or all(turns._has_ended) else turns._find_side()
            order.append("alone" if side is None or turns is None else turns._labels[side])
            time.sleep(seconds())
            return start(*args, **kwargs)

        return record

    def wait(*args: Any, original: Any = uneven_all_to_all.wait_for_collectives, **kwargs: Any) -> Any:
        arrived = original(*args, **kwargs)
        time.sleep(seconds())
        return arrived

    with contextlib.ExitStack() as stack:
        for module, name in (
            (row_exchange, "start_all_to_all"),
            (uneven_all_to_all, "start_all_to_all"),
            (token_gather, "start_gather"),
            (token_gather, "start_scatter"),
        ):
            stack.enter_context(mock.patch.object(module, name, wrap_start(getattr(module, name))))
        for module in (row_exchange, token_gather, uneven_all_to_all):
            stack.enter_context(mock.patch.object(module, "wait_for_collectives", wait))
        yield order


def case_time_changes_neither_bits_nor_order() -> None:
    group = make_mesh(**SIZES).get_group("ep")
    for dispatch in ("dedup", "gather"):
        pipe = build_dual(plan=PLAN.replace(dispatch=dispatch))
        with record_exchanges(lambda: 0.0) as wanted_order:
            wanted = run_step(pipe)
        runs = [name for name, _ in itertools.groupby(wanted_order) if name != "alone"]
        assert len(runs) > 1.5 * len(set(runs))  # the two parts of an action alternate
        for seed in range(2):
            generator = random.Random(seed * 100 + dist.get_rank())
            with record_exchanges(lambda generator=generator: generator.choice([0, 0, 0.02])) as order:
                check_equal_bits(run_step(pipe), wanted)
            assert order == wanted_order
        orders: list[Any] = [None, None]
        dist.all_gather_object(orders, wanted_order, group=group)
        assert orders[0] == orders[1]


def case_errors_end_both_parts() -> None:
    """Raise in one part of an action while the other one waits. The next step works."""
    sizes = {"pp": 1, "ep": 4}
    pipe = build_dual(sizes=sizes)
    wanted = run_step(pipe, sizes)
    errors: tuple[Any, ...] = ValueError, KeyboardInterrupt
    for kind in (schedules.FORWARD, schedules.FULL_BACKWARD):
        for error in errors:
            original = microbatch_overlap._RUN_BY_TYPE[kind]

            def fail(action: Any, context: Any, original: Any = original, error: Any = error) -> None:
                original(action, context)
                raise error("of the user")

            with mock.patch.dict(microbatch_overlap._RUN_BY_TYPE, {kind: fail}):
                check_raises(error, "of the user", run_step, pipe, sizes)
            assert threading.active_count() == ACTIVE_THREADS[0], threading.enumerate()
            assert turn_taking.find_turns() is None
            dist.barrier()
            check_equal_bits(run_step(pipe, sizes), wanted)


def loses_a_rank() -> None:
    """End one rank in the middle of an action: the others raise, and no thread is left."""
    sizes = {"pp": 1, "ep": 4}
    pipe = build_dual(sizes=sizes)
    wanted = run_step(pipe, sizes)
    assert wanted
    original, starts = row_exchange.start_all_to_all, [0]

    def start(*args: Any) -> Tensor:
        turns = turn_taking.find_turns()
        starts[0] += turns is not None and not any(turns._has_ended)
        if dist.get_rank() == 1 and starts[0] == 6:
            os._exit(0)
        return original(*args)

    with mock.patch.object(row_exchange, "start_all_to_all", start):
        try:
            run_step(pipe, sizes)
        except RuntimeError as error:  # torch names the stage, and keeps the cause
            assert isinstance(error.__cause__, RanksLost), error
        else:
            raise AssertionError("the step ended without a rank")
    assert threading.active_count() == ACTIVE_THREADS[0], threading.enumerate()
    os._exit(0)  # the group is broken


def case_a_profile_shows_exchanges_beside_the_other_part() -> None:
    pipe = build_dual()
    run_step(pipe)
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as profiled:
        run_step(pipe)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    in_transit = [e for e in events if e["name"].startswith("exchange of ")]
    assert len(in_transit) == pipe.wait_counts.covered
    computing = [e for e in events if e["name"] in ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul")]
    for direction, other in (("forward", "backward"), ("backward", "forward")):
        beside = [
            (exchange, op)
            for exchange in in_transit
            if exchange["name"].startswith(f"exchange of {direction}")
            for op in computing
            if op["tid"] != exchange["tid"] and exchange["ts"] < op["ts"] < exchange["ts"] + exchange["dur"]
        ]
        parts = [e for e in events if e["name"].startswith(f"{other} of micro-batch")]
        assert beside, direction
        for _, op in beside:  # the matrix product belongs to the other micro-batch
            assert any(p["tid"] == op["tid"] and p["ts"] <= op["ts"] <= p["ts"] + p["dur"] for p in parts)
