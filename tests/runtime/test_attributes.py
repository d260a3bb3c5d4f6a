"""Plain attributes and globals that a forward reads: blocks are compiled again if they change."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import logging
import pickle
import types

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import moefx
from moefx.runtime import block_forward, program_requests

from ..proof_memory import share_checks, share_proofs
from . import scales

D, E = 16, 3
GAIN = 1.0
SETTINGS = {"temperature": 1.0}
NAMESPACE = types.SimpleNamespace(offset=0.0, other=1)


def amplify(y):
    return y * GAIN


class Config:
    def __init__(self):
        self.bias, self.name = 0.0, "unused"


class Block(nn.Module):
    boost = 1.0

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D)) for _ in range(E)
        )
        self.k, self.scale, self.norm, self.act = 2, 1.0, False, F.relu
        self.options, self.config = {"power": [1.0, 2.0]}, Config()
        self.seen = 0

    def forward(self, x):
        scores = self.router(x) / SETTINGS["temperature"] + self.config.bias + NAMESPACE.offset
        weights, chosen = scores.sigmoid().topk(self.k)
        if self.norm:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            y = self.act(expert(x[token])) * self.options["power"][1]
            out.index_add_(0, token, amplify(y) * weights[token, slot, None])
        return out * self.scale * self.boost


CHANGES = {
    "int": lambda m: setattr(m, "k", 1),
    "float": lambda m: setattr(m, "scale", 2.0),
    "flag": lambda m: setattr(m, "norm", True),
    "function": lambda m: setattr(m, "act", F.gelu),
    "container": lambda m: m.options["power"].__setitem__(1, 3.0),
    "configuration": lambda m: setattr(m.config, "bias", 0.7),
    "other_configuration": lambda m: setattr(m, "config", type("Other", (), {"bias": -0.3})()),
    "of_the_class": lambda m: setattr(m, "boost", 3.0),
    "of_an_expert": lambda m: setattr(m.experts[1][0], "eps", 0.5),
}


@pytest.fixture
def x():
    return torch.randn(30, D, dtype=torch.double)


@pytest.fixture(autouse=True)
def _proofs_are_shared():
    with share_proofs(), share_checks():
        yield


def build_pair(x, kind=Block):
    model = kind().double()
    return model, moefx.compile(copy.deepcopy(model), example_inputs=(x,))


def count_calls(compiled):
    return moefx.explain(compiled).matched[0].calls


@pytest.mark.sampled(8)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_attribute_recompiles(change, x):
    model, compiled = build_pair(x)
    before = model(x)
    torch.testing.assert_close(compiled(x), before, rtol=0, atol=1e-13)
    change(model), change(compiled)
    assert not torch.allclose(model(x), before)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (3, 0, 1)  # three rewritten calls, one of them after a change


def test_unread_attributes_may_change(x):
    model, compiled = build_pair(x)
    compiled.config.name, compiled.seen = "other", 5
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (1, 0, 0)


def test_back_to_the_old_value_finds_the_old_program(x):
    model, compiled = build_pair(x)
    for k in (1, 2, 1, 2):
        model.k = compiled.k = k
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert len(compiled.forward.programs) == 2


@pytest.mark.parametrize("name, value", [("GAIN", 5.0), ("SETTINGS", {"temperature": 0.2})])
def test_a_changed_global_recompiles(monkeypatch, name, value, x):
    model, compiled = build_pair(x)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    before = model(x)
    monkeypatch.setitem(globals(), name, value)
    assert not torch.allclose(model(x), before)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (2, 0, 1)


def test_a_global_of_an_attribute_s_name_is_not_read(monkeypatch, x):
    """Ignore a global `scale` if the forward reads `self.scale`."""
    monkeypatch.setitem(globals(), "scale", [])
    monkeypatch.setitem(globals(), "k", 5)
    model, compiled = build_pair(x)
    monkeypatch.setitem(globals(), "scale", [1.0])
    monkeypatch.setitem(globals(), "k", 6)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (1, 0, 0)


def test_attribute_that_always_changes_warns_a_bounded_number_of_times(monkeypatch, x, caplog):
    for module in (program_requests, block_forward):
        monkeypatch.setattr(module, "MAX_SPECIALIZATIONS", 2)
    model, compiled = build_pair(x)
    for step in range(6):
        monkeypatch.setitem(globals(), "GAIN", 1.0 + step / 7)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    records = [r for r in caplog.records if "runs the original forward" in r.getMessage()]
    assert 0 < len(records) <= 2


def test_a_changed_global_object_recompiles(monkeypatch, x):
    model, compiled = build_pair(x)
    monkeypatch.setattr(NAMESPACE, "other", 2)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (1, 0, 0)
    monkeypatch.setattr(NAMESPACE, "offset", -1.0)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (2, 0, 1)


def test_a_setting_deep_in_a_configuration(x):
    class Nested(Block):
        def __init__(self):
            super().__init__()
            self.settings = types.SimpleNamespace(moe=types.SimpleNamespace(output=types.SimpleNamespace(scale=1.0)))

        def forward(self, x):
            return super().forward(x) * self.settings.moe.output.scale

    model, compiled = build_pair(x, Nested)
    for m in (model, compiled):
        m.settings.moe.output.scale = 3.0
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (1, 0, 1)
    for m in (model, compiled):  # an equal object, then a different one
        m.settings.moe = types.SimpleNamespace(output=types.SimpleNamespace(scale=3.0))
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    for m in (model, compiled):
        m.settings.moe = types.SimpleNamespace(output=types.SimpleNamespace(scale=0.5))
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (3, 0, 2)


@dataclasses.dataclass(slots=True)
class Scaled:
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted(Scaled):
    pass


class Loose(Scaled):  # with its own dict
    pass


ARGUMENTS = types.SimpleNamespace(moe=Slotted())


def get_arguments():
    return ARGUMENTS


class Schedule:
    """Callable that returns a number from its state."""

    step = 0

    def __call__(self):
        return 1.0 + self.step


class Doubled(Schedule):
    def __call__(self):
        return 2.0 * super().__call__()


class Namespace:
    scale = 1.0


class Holding(Block):
    """Read attributes from containers and from objects of several kinds."""

    def __init__(self):
        super().__init__()
        self.scales, self.held = [torch.ones(()), torch.ones(())], types.SimpleNamespace(t=torch.ones(()))
        self.mixed = {"scale": 1.0, "logger": logging.getLogger(__name__)}
        self.deep, self.slotted, self.loose = {"a": {"b": {"c": 1.0}}}, Slotted(), Loose()
        self.schedule, self.layers, self.recent = Schedule(), [Scaled(), {"moe": Schedule()}], collections.deque([1.0])

    def forward(self, x):
        scale = self.scales[0] * self.held.t * self.deep["a"]["b"]["c"] * self.slotted.scale * self.loose.scale
        scale = scale * self.schedule() * self.layers[0].scale * self.layers[1]["moe"]() * sum(self.recent)
        scale = (
            scale
            * self.mixed["scale"]
            * self.factors[0]
            * Namespace.scale
            * getattr(self.held, "more", 1.0)
            * self.space.scale
        )
        return super().forward(x) * scale * get_arguments().moe.scale

    factors = (1.0,)
    space = type("Space", (), {"scale": 1.0, "__module__": __name__})


HELD = {
    "in place": lambda m: m.scales[0].mul_(2.0),
    "in a list": lambda m: m.scales.__setitem__(0, torch.tensor(3.0)),
    "in an object": lambda m: setattr(m.held, "t", torch.tensor(3.0)),
    "deep in a dict": lambda m: m.deep["a"]["b"].update(c=3.0),
    "a slot": lambda m: setattr(m.slotted, "scale", 3.0),
    "a slot of a base": lambda m: setattr(m.loose, "scale", 3.0),
    "of what is called": lambda m: setattr(m.schedule, "step", 2),
    "another kind": lambda m: setattr(m, "schedule", Doubled()),
    "an object in a list": lambda m: setattr(m.layers[0], "scale", 3.0),
    "an object in a dict": lambda m: setattr(m.layers[1]["moe"], "step", 2),
    "beside what is not compared": lambda m: m.mixed.update(scale=3.0),
    "not there before": lambda m: setattr(m.held, "more", 3.0),
    "a tuple of the class": lambda m: setattr(m, "factors", (3.0,)),
    "of a class that is held": lambda m: setattr(m.space, "scale", 3.0),
    "of a class": lambda m: setattr(Namespace, "scale", 3.0),
    "in a deque": lambda m: m.recent.append(2.0),
    "of all blocks": lambda m: setattr(get_arguments().moe, "scale", 3.0),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("change", HELD.values(), ids=HELD)
def test_elements_of_containers_are_watched(change, x):
    model, compiled = build_pair(x, Holding)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (1, 0, 0)
    for m in (model, compiled):
        change(m)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    again = copy.deepcopy(compiled)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (2, 0, 1) and count_calls(again) == (3, 0, 1)
    get_arguments().moe.scale = Namespace.scale = Holding.space.scale = 1.0


def test_an_attribute_that_each_call_sets_to_the_same(x):
    class Tells(Block):
        mode = "training"

        def __init__(self):
            super().__init__()
            self.mode = "training"

        def forward(self, x):
            self.mode = "training" if self.training else "eval"
            return super().forward(x)

    model, compiled = build_pair(x, Tells)
    for training in (True, False, True):
        for m in (model, compiled):
            m.train(training)(x)
        assert compiled.mode == model.mode
    assert count_calls(compiled)[0] == 1


class Calibration:
    @classmethod
    def of(cls, y):
        return y * scales.SCALE


class Helped(Block):
    def forward(self, x):
        return scales.scale(super().forward(x))


class Calibrated(Block):
    def forward(self, x):
        return Calibration.of(super().forward(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Helped, Calibrated])
def test_a_changed_setting_of_another_module_recompiles(kind, monkeypatch, x):
    model, compiled = build_pair(x, kind)
    monkeypatch.setattr(scales, "SCALE", -2.0)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (1, 0, 1)


def test_dynamo_guards_attributes(monkeypatch, x):
    monkeypatch.setattr(NAMESPACE, "offset", 0.0)
    model, compiled = build_pair(x)
    traced = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-13)
    changes = [CHANGES["int"], CHANGES["container"], lambda m: setattr(NAMESPACE, "offset", 0.5)]
    for change in changes:
        change(model), change(compiled)
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-13)


def test_dynamo_guards_objects_in_containers(x):
    model, compiled = build_pair(x, Holding)
    traced = torch.compile(compiled, backend="eager")
    for change in (
        lambda m: None,
        *(HELD[kind] for kind in ("another kind", "an object in a list", "in a deque")),
    ):
        change(model), change(compiled)
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-13)


def test_copies_watch_their_own_attributes(x):
    model, compiled = build_pair(x)
    twin = copy.deepcopy(compiled)
    twin.k = 1
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    model.k = 1
    torch.testing.assert_close(twin(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled) == (1, 0, 0)


def test_a_loaded_model_remembers(x):
    model, compiled = build_pair(x)
    compiled(x)
    buffer = io.BytesIO()
    torch.save(compiled, buffer, pickle_module=pickle)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded.scale = model.scale = 4.0
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=1e-13)


def test_layers_that_differ_in_an_attribute_are_proven_separately(x):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Block(), Block(), Block()
            self.b.scale, self.c.seen = 3.0, 7

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    model = Layers().double()
    compiled = moefx.compile(copy.deepcopy(model), example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
    assert [m.calls for m in moefx.explain(compiled).matched] == [(1, 0, 0)] * 3


class Settings(dict):
    """Dict with its keys as attributes."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Lenient(nn.Module):
    """Read an attribute that may be missing, and one of a dict of another class."""

    def __init__(self):
        super().__init__()
        self.router, self.settings = nn.Linear(D, E), Settings(gain=1.5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D)) for _ in range(E))
        self.logger = logging.getLogger(__name__)

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(2)
        w = w * getattr(self, "late", 1.0) * self.settings.gain
        out = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            out = out.index_add(0, t, self.experts[e](x[t]) * w[t, k, None])
        return out


def test_missing_attributes_and_dicts_of_other_classes():
    model = nn.Sequential(Lenient()).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D, dtype=torch.float64),))
    x = torch.randn(9, D, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(compiled[0].forward.programs) == 1
    again = pickle.loads(pickle.dumps(compiled))
    torch.testing.assert_close(again(x), model(x))
    assert len(again[0].forward.programs) == 1
    compiled[0].late = model[0].late = 2.0
    torch.testing.assert_close(compiled(x), model(x))
    compiled[0].settings["gain"] = model[0].settings["gain"] = 0.5
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Prior(Block):
    """Read a NumPy array, and an attribute of the class."""

    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.prior = numpy.full(4, 0.25)

    def forward(self, x):
        return super().forward(x / Prior.temperature) * torch.as_tensor(numpy.log(self.prior), dtype=x.dtype).repeat(4)


def replace_prior(block):
    block.prior = numpy.array([0.7, 0.1, 0.1, 0.1])


def change_in_place(block):
    block.prior[0] = 3.0


def change_class(block):
    Prior.temperature = 5.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [replace_prior, change_in_place, change_class])
def test_arrays_and_attributes_of_the_class(change, x, monkeypatch):
    monkeypatch.setattr(Prior, "temperature", 1.0)
    model, compiled = build_pair(x, Prior)
    before = compiled(x)
    again = copy.deepcopy(compiled)
    for block in (model, compiled):
        change(block)
    torch.testing.assert_close(compiled(x), model(x))
    assert not torch.allclose(compiled(x), before)
    torch.testing.assert_close(again(x), model(x) if change is change_class else before)


class Tied(Block):
    """Experts that share a matrix."""

    def __init__(self):
        super().__init__()
        for expert in self.experts:
            expert[0].weight = self.experts[0][0].weight


def untie(model):
    for i, expert in enumerate(model.experts):
        expert[0].weight = nn.Parameter(expert[0].weight.detach() * (i + 1))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, up = nn.Linear(D, E), nn.Parameter(torch.randn(D, D))
        self.up = nn.ParameterList([up] * E)
        self.down = nn.ParameterList([torch.randn(D, D) for _ in range(E)])

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(-1, ids, w)
        return sum(gates[:, e, None] * ((x @ self.up[e]).relu() @ self.down[e]) for e in range(E))


def test_one_tensor_in_a_list(x):
    torch.compiler.reset()  # all tests share its limit of graphs
    model, compiled = build_pair(x, Listed)
    traced = torch.compile(compiled, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-12)
    for m in (model, compiled):
        m.up[2] = nn.Parameter(m.up[2].detach() * 2)
    for run in (compiled, traced):
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-12)


def test_tensors_that_were_shared(x):
    torch.compiler.reset()  # all tests share its limit of graphs
    model, compiled = build_pair(x, Tied)
    traced = torch.compile(compiled, backend="eager")
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-13)
    with torch.no_grad():
        untie(model), untie(compiled)
    for run in (compiled, traced):
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-13)
    model(x).sum().backward(), compiled(x).sum().backward()
    for parameter, original in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, original.grad, rtol=0, atol=1e-12)
    assert count_calls(compiled) == (2, 0, 1)


class Optional(Block):
    def __init__(self):
        super().__init__()
        self.shared, self.bias = nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x):
        y = super().forward(x)
        y = y if self.shared is None else y + self.shared(x)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def test_attributes_that_become_none(x):
    model, compiled = build_pair(x, Optional)
    shared = compiled.shared
    for name, value in (("shared", None), ("bias", None), ("shared", shared)):
        setattr(model, name, value), setattr(compiled, name, value)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert count_calls(compiled)[:2] == (6, 0)  # the failed run of a program does not count as a second call


def test_recomputations_of_a_checkpoint_count(x):
    """A checkpoint leaves its second run as soon as it has all tensors, by an exception."""
    _, compiled = build_pair(x, Optional)
    checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert count_calls(compiled)[:2] == (2, 0)


class Noisy(Optional):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.25))


class Counting(Optional):
    def __init__(self):
        super().__init__()
        self.register_buffer("tokens", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.tokens += x.shape[0]
        return super().forward(x)


class Hooked(Optional):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.router.register_forward_hook(lambda *_: self.calls.append(""))


@pytest.mark.parametrize("kind", [Noisy, Counting, Hooked])
def test_a_failed_call_with_effects_is_not_repeated(x, kind):
    model, compiled = build_pair(x, kind)
    model.bias = compiled.bias = None
    with pytest.raises(moefx.errors.AbsorbedModuleChanged, match=r"because bias was removed.*: call again"):
        compiled(x)
    assert count_calls(compiled)[:2] == (0, 0)
    for _ in range(2):
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-13)


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scores = nn.Linear(D, E), nn.Softmax(-1)

    def forward(self, x):
        return self.scores(self.linear(x))


class ByWeight(Block):
    """Select experts with positive weights, such as those of a softmax."""

    def __init__(self):
        super().__init__()
        self.router = Chooser()

    def forward(self, x):
        w, ids = self.router(x).topk(2)
        weights = torch.zeros(len(x), E, dtype=x.dtype).scatter(-1, ids, w)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            (token,) = torch.where(weights[:, e] > 0)
            out.index_add_(0, token, expert(x[token]) * weights[token, e, None])
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["router.scores", "router"])
def test_routers_of_another_kind_are_checked_again(part, x):
    model, compiled = build_pair(x, ByWeight)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    other = nn.Tanh() if part == "router.scores" else nn.Linear(D, E).double()
    model.set_submodule(part, other), compiled.set_submodule(part, copy.deepcopy(other))
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert "now, and the forward reads it" in compiled.forward.counts.last_failed_guard


class OfTheClass:
    """Descriptor of a library."""

    def __get__(self, owner, cls):
        return {"seen": 1}


class Defaults:
    parts = OfTheClass()
    names = {"width": 1}  # noqa: RUF012
    inner = Config()

    def __init__(self):
        self.bias = 0.0


class Configured(Block):
    def __init__(self):
        super().__init__()
        self.config = Defaults()

    def forward(self, x):
        return super().forward(x) * self.config.names["width"] * len(self.config.parts) + self.config.inner.bias


def test_checks_of_attributes_are_prepared_once(x):
    """Prepare the comparison once: comparing values one by one takes a hundred times as long."""
    model, compiled = build_pair(x, Configured)
    read = compiled.forward.block_programs.installed[0].attributes
    assert read.are_unchanged() and read._live is not None and read._live.are_unchanged()
    before = read._live
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-13)
    assert read._live is before
