"""`capture_step` trains like the step itself, and refuses calls that a graph would run incorrectly."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import moefx
from moefx.errors import InvalidInput
from moefx.runtime import captured_step
from moefx.runtime.captured_step import CapturedStep, _StepGraph

from ..blocks import D, Gated, Loop

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_options_that_cannot_work_raise(monkeypatch):
    with pytest.raises(InvalidInput, match="warm_up is 0"):
        moefx.capture_step(print, warm_up=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInput, match="On a CPU call the step itself"):
        moefx.capture_step(print)


def test_options_in_tensors_on_the_cpu_are_numbers_of_the_graph():
    rate = torch.tensor(0.5)
    graph = object.__new__(_StepGraph)
    graph.optimizers = [torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate)]
    graph.options = dict(graph._read_options())
    graph._check_options()
    rate.fill_(0.25)
    with pytest.raises(InvalidInput, match=r"`lr` of group 0 of optimizer 0 \(AdamW\) changed from 0.5 to 0.25"):
        graph._check_options()


@pytest.mark.parametrize(
    "value, other",
    [
        (float("nan"), 1.0),
        (1, True),
        (numpy.arange(3.0), numpy.arange(4.0)),
        (numpy.array([1, numpy.nan]), numpy.array([1.0, 2.0])),
        (numpy.float32(2), numpy.float32(3)),
        (torch.tensor([1, float("nan")]), torch.tensor([1, 2.0])),
        (torch.tensor([True]), torch.tensor([False])),
    ],
)
def test_host_arguments_are_compared_by_value(value, other):
    expected = captured_step._copy_host_value(value)
    for same in (value, copy.deepcopy(value)):
        assert not captured_step._describe_difference(expected, same)
    assert captured_step._describe_difference(expected, other)
    if isinstance(value, (numpy.ndarray, Tensor)):
        value[:1] = 0 if value[0] else 1  # the captured step still has the old number
        assert captured_step._describe_difference(expected, value)


class Recording(contextlib.AbstractContextManager):
    """A context in the place of `torch.cuda.graph`. Its end may fail, as after a call that CUDA refused."""

    def __init__(self, fails: bool):
        self.fails = fails

    def __exit__(self, *_):
        if self.fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


REFUSED = RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_a_later_argument_may_not_require_a_gradient(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: Recording(False))
    leaves, tree = pytree.tree_flatten(((torch.zeros(3),), {}))
    graph = _StepGraph(lambda x: x.sum(), leaves, tree, stream=None)
    with pytest.raises(InvalidInput, match="requires a gradient"):
        graph.replay([torch.zeros(3, requires_grad=True)], tree)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "error, is_of_capture",
    [
        (KeyError("labels"), False),
        (RuntimeError("shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("8 GiB"), False),
        (REFUSED, True),
        (moefx.MoefxError("this copies to the host, and a CUDA graph is being captured"), True),
    ],
)
def test_an_error_of_the_step_itself_passes_through(monkeypatch, error, is_of_capture, fails):
    def step():
        raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: Recording(fails))
    with pytest.raises(InvalidInput if is_of_capture else type(error)) as raised:
        _StepGraph(step, *pytree.tree_flatten(((), {})), stream=None)
    if is_of_capture:
        assert raised.value.__cause__ is error
        assert f"cannot be captured as a CUDA graph: {type(error).__name__}: {error}" in str(raised.value)
    else:
        assert raised.value is error


class FreedStep:
    """Note that it is freed, in the place of a captured step."""

    def __init__(self):
        self.is_freed = False
        captured_step._free_before_groups_end(self)

    def free(self):
        self.is_freed = True
        CapturedStep.free(self)

    _graph = None


@pytest.fixture
def group():
    """A process group of one rank, and the method that ends it."""
    shutdown = dist.ProcessGroup.shutdown
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield shutdown
    if dist.is_initialized():
        dist.destroy_process_group()
    assert dist.ProcessGroup.shutdown is shutdown


def test_the_end_of_a_group_frees_steps_and_leaves_the_process_unchanged(group):
    steps = [FreedStep(), FreedStep()]
    assert dist.ProcessGroup.shutdown is not group
    dist.destroy_process_group()
    assert all(step.is_freed for step in steps) and dist.ProcessGroup.shutdown is group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the fixture ends it


@pytest.mark.parametrize("end", [FreedStep.free, lambda step: None], ids=["freed", "deleted"])
def test_the_last_step_leaves_the_process_unchanged(group, end):
    steps = [FreedStep(), FreedStep()]
    for left in (1, 0):
        end(steps.pop())
        gc.collect()
        assert (dist.ProcessGroup.shutdown is group) is (left == 0)


def test_a_later_replacement_of_the_method_stays(group, monkeypatch):
    step, ended = FreedStep(), []
    inner = dist.ProcessGroup.shutdown

    @functools.wraps(inner)
    def shutdown(process_group):
        ended.append(process_group)
        inner(process_group)

    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "shutdown", shutdown)
        step.free()
        assert dist.ProcessGroup.shutdown is shutdown
        other = FreedStep()
        dist.destroy_process_group()
        assert other.is_freed and len(ended) == 1 and dist.ProcessGroup.shutdown is shutdown
    captured_step._restore_shutdown()


class Training:
    """Training steps of one model with a batch per call."""

    def __init__(self, model: nn.Module, lr: float | Tensor = 1e-2, **options):
        self.model = model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, capturable=True, **options)

    def __call__(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        out = self.model(x)
        loss = (out * scale).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.detach(), "out": out.detach()}


@pytest.fixture(scope="module")
def compiled() -> nn.Module:
    torch.manual_seed(0)
    model = Loop(Gated).cuda()
    return moefx.compile(model, example_inputs=(torch.zeros(40, D, device="cuda"),))


def batch(seed: int, tokens: int = 40) -> Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.fixture
def pair(compiled) -> tuple[Training, CapturedStep]:
    """Return a plain step and a captured one, of equal models."""
    return Training(copy.deepcopy(compiled)), moefx.capture_step(Training(copy.deepcopy(compiled)), warm_up=2)


class TestOnGpu:
    pytestmark = on_gpu

    def test_trains_as_the_step_itself(self, pair):
        plain, step = pair
        results = []
        for seed in range(6):
            found, wanted = step(batch(seed)), plain(batch(seed))
            results.append((found, wanted))
            assert step.is_captured is (seed >= 2)
        for found, wanted in results:  # later calls did not overwrite them
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        parameters = zip(step._step.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in parameters)
        assert len({float(found["loss"]) for found, _ in results}) == 6

    def test_other_arguments_raise(self, pair):
        _, step = pair
        for seed in range(3):
            step(batch(seed), scale=2.0)
        for args, options, message in (
            ((batch(0, 41),), {"scale": 2.0}, rf"changed from float32\[40, {D}\] to float32\[41, {D}\]"),
            ((batch(0).double(),), {"scale": 2.0}, rf"to float64\[40, {D}\]"),
            ((batch(0),), {"scale": 3.0}, "changed from 2.0 to 3.0"),
            ((batch(0).cpu(),), {"scale": 2.0}, "was on cuda:0 in the capture, and is on cpu now"),
            ((batch(0).requires_grad_(),), {"scale": 2.0}, "requires a gradient"),
            ((batch(0),), {}, "is called with"),
        ):
            with pytest.raises(InvalidInput, match=message):
                step(*args, **options)
        assert torch.isfinite(step(batch(3), scale=2.0)["loss"])

    def test_a_learning_rate_that_is_a_number_may_not_change(self, pair):
        _, step = pair
        for seed in range(3):
            step(batch(seed))
        step._step.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(InvalidInput, match=r"`lr` of group 0 of optimizer 0 \(AdamW\) changed from 0.01 to 0.5"):
            step(batch(3))

    def test_a_learning_rate_that_is_a_tensor_may(self, compiled):
        rates = [torch.tensor(1e-2, device="cuda") for _ in range(2)]
        plain, captured = (Training(copy.deepcopy(compiled), lr) for lr in rates)
        step = moefx.capture_step(captured)
        for seed in range(6):
            for rate in rates:
                rate.fill_(1e-2 / (seed + 1))
            assert torch.equal(step(batch(seed))["out"], plain(batch(seed))["out"])

    def test_a_step_that_reads_a_value_raises(self, compiled):
        plain = Training(copy.deepcopy(compiled))
        step = moefx.capture_step(lambda x: plain(x)["loss"].item(), warm_up=1)
        step(batch(0))
        before = [p.clone() for p in plain.model.parameters()]
        with pytest.raises(InvalidInput, match="cannot be captured as a CUDA graph"):
            step(batch(1))
        assert all(map(torch.equal, plain.model.parameters(), before))  # the failed step trained nothing
        plain(batch(1))  # the process is unchanged

    def test_a_step_that_fails_itself_passes_its_error_on(self, compiled):
        plain, failing = Training(copy.deepcopy(compiled)), []
        stream = torch.cuda.current_stream()

        def train(x):
            plain.model(x)
            if failing:
                raise KeyError("labels")
            return plain(x)

        step = moefx.capture_step(train, warm_up=1)
        step(batch(0))
        failing.append(True)
        with pytest.raises(KeyError, match="labels"):
            step(batch(1))
        assert torch.cuda.current_stream() == stream
        failing.clear()
        for seed in range(2):
            step(batch(seed))
        assert step.is_captured

    def test_host_arguments_may_be_equal_only(self, compiled):
        plain = Training(copy.deepcopy(compiled))
        step = moefx.capture_step(lambda x, numbers, limit: plain(x), warm_up=1)
        numbers = numpy.arange(3)
        for seed in range(4):
            step(batch(seed), numbers, float("nan"))
        numbers[0] = 5
        with pytest.raises(InvalidInput, match="argument 1 of the captured step changed"):
            step(batch(0), numbers, float("nan"))

    def test_a_freed_step_keeps_its_results_and_refuses_calls(self, pair):
        _, step = pair
        for seed in range(3):
            result = step(batch(seed))
        step.free()
        assert torch.isfinite(result["loss"]) and not step.is_captured
        with pytest.raises(InvalidInput, match="was freed"):
            step(batch(3))
