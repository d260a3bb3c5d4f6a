"""`compile` leaves the process unchanged after interrupts, with other threads and with other defaults."""

from __future__ import annotations

import _thread
import builtins
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import moefx
from moefx.capture.environment.worker_thread import Interrupted, check_interrupt, run_in_worker
from moefx.capture.sizes.symbolic_sizes import Number
from moefx.capture.tracing.graph_recorder import Recorder

from . import models
from .blocks import D, Loop


class Stops(Loop):
    """Call `stop` in call number `at`, counted over all copies of the module."""

    def __init__(self, stop=lambda: None, at=0):
        super().__init__()
        numbers = iter(range(1, 10_000))
        self.number, self.stop, self.at = lambda: next(numbers), stop, at  # copies share the function
        self.steps = torch.tensor([1, 2])
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        if self.number() == self.at:
            self.stop()
        return super().forward(x) * self.steps.sum()


def _read_state(model):
    """Return all state of a process and a model that a capture changes temporarily."""
    patched = [builtins.len, torch.is_grad_enabled, torch.autograd.Function.__dict__.get("apply")]
    patched += [nn.Module.__call__, nn.Module._apply, nn.Module.__getattr__, "training" in vars(nn.Module)]
    tensors = [(name, id(t), type(t), t._version) for name, t in model.state_dict(keep_vars=True).items()]
    attributes = [(name, {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()]
    draws = torch.get_rng_state().tolist(), random.getstate()
    return patched, tensors, attributes, draws, sys.getrecursionlimit(), threading.stack_size()


def _list_workers():
    return [thread for thread in threading.enumerate() if thread.name == "moefx" and thread.is_alive()]


@contextlib.contextmanager
def assert_process_unchanged(model):
    x = torch.randn(7, D)
    before = _read_state(model)
    expected = model.mixed(x, *model.route(x))
    yield
    for thread in _list_workers():
        thread.join(1)
    assert _read_state(model) == before and not _list_workers()
    assert torch.equal(model.mixed(x, *model.route(x)), expected)


def _exit():
    raise SystemExit(3)


def _fail():
    raise KeyboardInterrupt


def _interrupt():
    _thread.interrupt_main()
    time.sleep(0.3)  # until the main thread handles it


STOPS = {"Ctrl-C": (_interrupt, KeyboardInterrupt), "exit": (_exit, SystemExit), "raise": (_fail, KeyboardInterrupt)}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("at", [1, 2, 5, 12])
@pytest.mark.parametrize("stop, raised", STOPS.values(), ids=STOPS)
def test_an_interrupted_compile_leaves_no_trace(stop, raised, at):
    model, example = Stops(stop, at), torch.randn(5, D)
    with assert_process_unchanged(model), pytest.raises(raised):
        moefx.compile(model, example_inputs=(example,))
    model.at = 0
    assert [block.name for block in moefx.explain(model, example_inputs=(example,)).matched] == [""]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(50))
def test_an_interrupt_at_any_moment(seed):
    model, delay = Stops(), random.Random(seed).uniform(0, 1.5)
    example = torch.randn(5, D)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    with assert_process_unchanged(model), pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            moefx.compile(model, example_inputs=(example,))


def test_an_interrupt_waits_until_the_worker_has_restored_state():
    held = []

    def work():
        held.append("swapped")
        _thread.interrupt_main()
        try:
            while True:
                check_interrupt()
                time.sleep(0.001)
        finally:
            time.sleep(0.2)
            held.clear()

    with pytest.raises(KeyboardInterrupt):
        run_in_worker(work)
    assert not held


def test_a_second_interrupt_ends_a_worker_at_once():
    def work():
        _thread.interrupt_main()
        with contextlib.suppress(Interrupted):
            while True:
                check_interrupt()
                time.sleep(0.001)
        _thread.interrupt_main()
        while True:
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        run_in_worker(work)
    assert not _list_workers()


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2


class Doubled(Loop):
    def forward(self, x):
        return Doubles.apply(super().forward(x)) if torch.is_grad_enabled() else None


def test_another_thread_may_use_the_original_meanwhile():
    model, x = Doubled(), torch.randn(7, D)
    hooked, faults, calls = [], [], []
    expected = model(x).detach()
    wanted_grad = torch.autograd.grad(model(x).sum(), model.gate.weight)[0]
    is_done = threading.Event()

    def use():
        while not is_done.is_set():
            calls.append(1)
            out = model(x)
            grad = torch.autograd.grad(out.sum(), model.gate.weight)[0]
            moved = nn.utils.skip_init(nn.Linear, 2, 2).double().weight.dtype
            fakes = [name for name, t in model.state_dict().items() if type(t) is not torch.Tensor]
            if fakes or moved != torch.float64 or not torch.equal(out, expected) or not torch.equal(grad, wanted_grad):
                faults.append(fakes or moved)
            if len(hooked) != len(calls):
                faults.append("hook")

    user = threading.Thread(target=use)
    model.gate.register_forward_hook(lambda *_: hooked.append(1) if threading.current_thread() is user else None)
    user.start()
    try:
        compiled = moefx.compile(model, example_inputs=(torch.randn(5, D),))
        verified = moefx.verify(compiled, model, (x,))
    finally:
        is_done.set()
        user.join()
    assert verified.ok and calls and not faults


@contextlib.contextmanager
def _set_default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _set_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "device": lambda: torch.device("meta"),
    "set device": lambda: _set_default_device("meta"),
    "float64": lambda: _set_default_dtype(torch.float64),
    "bfloat16": lambda: _set_default_dtype(torch.bfloat16),
}


class Capacity(Loop):
    """Drop padding and tokens over a capacity."""

    def forward(self, x, mask):
        h = x.reshape(-1, D)
        w, ids = self.route(h)
        hot = nn.functional.one_hot(ids.flatten(), len(self.experts))
        place = ((hot.cumsum(0) * hot).sum(-1) - 1).view_as(ids)
        keep = (place < max(4, int(1.25 * ids.numel() / len(self.experts)))) & mask.reshape(-1, 1)
        return self.mixed(h, w * keep, ids).view_as(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
def test_the_users_defaults_are_unchanged(default):
    model, inputs = Capacity(), (torch.randn(3, 7, D), torch.ones(3, 7, dtype=torch.bool))
    with default():
        before = torch.get_default_device(), torch.get_default_dtype()
        compiled = moefx.compile(model, example_inputs=inputs)
        assert [block.name for block in moefx.explain(model, example_inputs=inputs).matched] == [""]
        assert moefx.verify(compiled, model, inputs).ok
        assert (torch.get_default_device(), torch.get_default_dtype()) == before
        compiled(*inputs)
    assert moefx.blocks(compiled)[0].fallbacks == 0


def test_the_numeric_check_runs_the_block_with_the_users_device():
    seen: list[str] = []
    note = seen.append  # captures restore objects that a closure reaches directly

    class Asks(Loop):
        def forward(self, x):
            note(torch.get_default_device().type)
            return super().forward(x)

    model, x = Asks(), torch.randn(5, D)
    with torch.device("meta"):
        moefx.compile(model, example_inputs=(x,))
    assert "meta" in seen


def _collect_capture_objects():
    """Return the types of all objects of captures, by identity."""
    kinds = (FakeTensor, FakeTensorMode, Recorder, Number, torch.SymInt, torch.SymFloat)
    gc.collect()
    return {id(item): type(item) for item in gc.get_objects() if issubclass(type(item), kinds)}


def test_nothing_of_a_capture_is_reachable_afterwards():
    moefx.explain(Loop(), example_inputs=(torch.randn(5, D),))  # creates the objects that are created once
    before = _collect_capture_objects()
    for experts in range(4, 7):
        model = Loop(num_experts=experts)
        compiled = moefx.compile(model, example_inputs=(torch.randn(5, D),))
        compiled(torch.randn(9, D)).sum().backward()
        del compiled
    assert _collect_capture_objects().items() <= before.items()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", models.SUITES)
def test_nothing_of_many_captures_is_reachable_afterwards(suite):
    moefx.explain(Loop(), example_inputs=(torch.randn(5, D),))
    before = _collect_capture_objects()
    for name in random.Random(0).sample(names := models.names(suite), min(len(names), 10)):
        case = models.build(name)
        compiled = moefx.compile(case.model, example_inputs=case.inputs, strict=False)
        del case, compiled
        assert _collect_capture_objects().items() <= before.items(), name


@pytest.mark.parametrize("validation", ["symbolic", "auto"])
def test_replaced_parameters_are_freed_at_once(validation):
    """A wrapper that replaces the parameters of a compiled model frees their memory, before Python collects cycles."""
    model, x = Loop(), torch.randn(5, D)
    gc.collect()
    gc.disable()
    try:
        compiled = moefx.compile(model, example_inputs=(x,), plan=moefx.Plan(validation=validation))
        originals = [weakref.ref(parameter) for parameter in model.parameters()]
        del model
        for module in compiled.modules():
            for name in list(module._parameters):
                module._parameters[name] = None
        assert originals and [reference() for reference in originals] == [None] * len(originals)
    finally:
        gc.enable()
