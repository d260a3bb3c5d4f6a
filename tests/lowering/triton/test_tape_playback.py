"""Tapes: overlapping buffers, the order of launches, and batches as CUDA graphs."""

from __future__ import annotations

import itertools
import random
import weakref

import pytest
import torch

from moefx.ir import op_providers
from moefx.lowering.triton import launch_replay, tape_playback
from moefx.lowering.triton.tape_playback import Allocate, Apply, Free, Launch, LaunchBatch, Playback

from ...ir.routings import Routing
from .layers import LINEAR, move_layer

CPU = torch.device("cpu")


def draw_tape(seed: int) -> tuple[list, list[int], dict[int, int]]:
    """Return steps that allocate, launch and free, the results' registers, and the bytes of each buffer."""
    draw = random.Random(seed)
    sizes, alive, steps = dict[int, int](), list[int](), []
    for _ in range(60):
        kind = draw.random()
        if kind < 0.4:
            register = 1 + len(sizes)
            sizes[register] = draw.choice((0, 1, 511, 512, 513, 4096, tape_playback._MAX_WORKSPACE_BUFFER + 1))
            steps.append(Allocate(register, (sizes[register],), torch.uint8, CPU))
            alive.append(register)
        elif kind < 0.6 and len(alive) > 2:
            register = alive.pop(draw.randrange(len(alive)))
            steps.append(Free(register))
        elif alive:
            used = draw.sample(alive, min(3, len(alive)))
            steps.append(Launch(lambda *_: None, [None] * 3, [(i, s, 0) for i, s in enumerate(used)], ()))
        if alive and kind > 0.95:
            register = 1 + len(sizes)
            sizes[register] = 8
            steps.append(Apply(register, lambda t: t[:8].clone(), ((alive[0], None),)))
            alive.append(register)
    return steps, alive[:1], sizes


@pytest.mark.parametrize("seed", range(8))
def test_buffers_of_the_workspace_overlap_only_if_one_is_free(monkeypatch, seed):
    monkeypatch.setattr(tape_playback.launching, "INTERPRETED", False)
    steps, results, sizes = draw_tape(seed)
    moved_steps, total = tape_playback._use_workspace(steps, results, 1 + len(sizes))
    launches = [s for s in steps if isinstance(s, Launch)]
    moved_launches = [s for s in moved_steps if isinstance(s, Launch)]
    workspace, place = total - 1, dict[int, int]()
    for before, after in zip(launches, moved_launches, strict=True):
        for (_, register, _), (_, now, offset) in zip(before.pointers, after.pointers, strict=True):
            if now == workspace:
                assert place.setdefault(register, offset) == offset, "a buffer moved"
            else:
                assert now == register
    (buffer,) = [s for s in moved_steps if isinstance(s, Allocate) and s.register == workspace]
    alive: set[int] = set()
    for step in steps:
        if isinstance(step, Allocate) and step.register in place:
            alive.add(step.register)
            spans = sorted((place[s], place[s] + sizes[s]) for s in alive if sizes[s])
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
            assert max((end for _, end in spans), default=0) <= buffer.num_bytes
        elif isinstance(step, Free):
            alive.discard(step.register)
    assert place, "the tape moves no buffer"
    assert not {
        s.register for s in steps if isinstance(s, Allocate) and s.num_bytes > tape_playback._MAX_WORKSPACE_BUFFER
    } & {*place}


def test_launches_keep_their_order_around_frees_and_functions(monkeypatch):
    monkeypatch.setattr(tape_playback, "_uses_graphs", False)
    monkeypatch.setattr(tape_playback.launching, "INTERPRETED", True)  # no workspace
    done: list[str] = []

    def launch(name: str, register: int) -> Launch:
        return Launch(lambda *_: done.append(name), [None], [(0, register, 0)], ())

    def shorten(tensor: torch.Tensor) -> torch.Tensor:
        done.append("function")
        return tensor[:1].clone()

    buffer = Allocate(1, (4,), torch.float32, CPU)
    steps = [launch("a", 0), buffer, launch("b", 1), Apply(2, shorten, ((0, None),)), launch("c", 2), Free(1)]
    playback = Playback([*steps, launch("d", 0)], [2], 3)
    (result,) = playback.play([torch.arange(4.0)], [])
    assert done == ["a", "b", "function", "c", "d"] and result.tolist() == [0.0]
    assert [len(action.launches) for action in playback.actions if isinstance(action, LaunchBatch)] == [2]


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def captures(monkeypatch) -> list[FakeGraph]:
    """Collect captured graphs, on a machine without a GPU."""
    graphs: list[FakeGraph] = []
    monkeypatch.setattr(tape_playback, "_uses_graphs", True)
    monkeypatch.setattr(tape_playback, "_batches", weakref.WeakSet())
    monkeypatch.setattr(tape_playback, "_attempts_to_skip", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tape_playback, "_capture_graph", lambda *_: graphs.append(FakeGraph()) or graphs[-1])
    return graphs


def make_batch(done: list[int]) -> LaunchBatch:
    return LaunchBatch([Launch(lambda *_, i=i: done.append(i), [None], [(0, 0, 0)], ()) for i in range(2)])


def test_launches_are_captured_when_their_addresses_recur(captures):
    done: list[int] = []
    batch, first, second = make_batch(done), torch.zeros(4), torch.zeros(4)
    batch([first])
    batch([second])
    assert done == [0, 1, 0, 1] and not captures
    batch([first])
    batch([first])
    assert len(done) == 4 and [g.replays for g in captures] == [2]
    batch([second])
    assert [g.replays for g in captures] == [2, 1]


def test_nothing_is_captured_inside_of_a_capture(captures, monkeypatch):
    done: list[int] = []
    batch, x = make_batch(done), torch.zeros(4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        batch([x])
    assert len(done) == 6 and not captures


def test_a_thread_launches_while_another_captures(captures):
    done: list[int] = []
    batch, x = make_batch(done), torch.zeros(4)
    batch([x])
    with tape_playback._capturing:
        batch([x])
    assert len(done) == 4 and not captures
    batch([x])
    assert len(done) == 4 and len(captures) == 1


def test_launches_go_on_without_graphs_if_a_capture_fails(captures, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(tape_playback, "_capture_graph", fail)
    done: list[int] = []
    batch, x = make_batch(done), torch.zeros(4)
    for _ in range(4):
        batch([x])
    assert len(done) == 8 and not tape_playback._uses_graphs
    (message,) = caplog.messages
    assert "MOEFX_LAUNCH_GRAPHS=0" in message and "not permitted" in message


def test_graphs_that_do_not_run_make_room_for_others(captures, monkeypatch):
    monkeypatch.setattr(tape_playback, "_MAX_GRAPHS", 3)
    batch, inputs = make_batch([]), [torch.zeros(4) for _ in range(8)]
    for x in inputs[:3] * 2:
        batch([x])
    assert len(batch.graphs) == 3
    for x in [*inputs[3:4] * 2, *inputs[:2]]:  # all three graphs ran since the last check: no space
        batch([x])
    assert len(captures) == 3
    monkeypatch.setattr(tape_playback, "_attempts_to_skip", 0)
    for x in inputs[3:4] * 2:
        batch([x])
    assert len(captures) == 4 and {x.data_ptr() for x in (inputs[0], inputs[1], inputs[3])} == {
        address for (address,) in batch.graphs
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_at_known_addresses_is_one_graph(monkeypatch):
    monkeypatch.setattr(launch_replay, "_tapes", tapes := {})
    layer = move_layer("cuda", LINEAR["weight_before"](3, 32, 40), torch.float32)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        for p in layer.parameters:
            p.grad = None
        x.grad = weights.grad = None
        token_ids, _, offsets, inverse, row_weights = Routing(ids, weights, 3).build(weights)
        out, *_ = torch.ops.moefx.expert_mlp.default(
            x, token_ids, offsets, inverse, row_weights, layer.up, layer.up_bias, layer.down, layer.down_bias,
            body=layer.body.to_json(), reduce=True,
        )  # fmt: skip
        out.square().sum().backward()
        return [out.detach().clone(), x.grad.clone(), weights.grad.clone(), *(p.grad.clone() for p in layer.parameters)]

    def inputs(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        ids = torch.rand(64, 3, device="cuda").argsort(1)[:, :2].contiguous()
        return [torch.randn(64, 32, device="cuda", requires_grad=True), ids,
                torch.rand(64, 2, device="cuda", requires_grad=True)]  # fmt: skip

    monkeypatch.setattr(tape_playback, "_uses_graphs", False)
    expected = {seed: run(*inputs(seed)) for seed in range(3)}
    expected |= {seed: run(*inputs(seed)) for seed in range(3)}
    monkeypatch.setattr(tape_playback, "_uses_graphs", True)
    first_inputs = inputs(0)
    for seed in (0, 1, 2, 0, 1, 2):  # the same addresses, other values
        with torch.no_grad():
            for tensor, other in zip(first_inputs, inputs(seed), strict=True):
                tensor.copy_(other)
        assert all(map(torch.equal, run(*first_inputs), expected[seed]))
    batches = [action for tape in tapes.values() for action in tape.playback.actions if isinstance(action, LaunchBatch)]
    assert batches and any(batch.graphs for batch in batches)
    for seed in range(3):  # other addresses
        assert all(map(torch.equal, run(*inputs(seed)), expected[seed]))
    assert op_providers.counters()["expert_mlp", "triton"]
