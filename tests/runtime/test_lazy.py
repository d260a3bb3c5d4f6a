"""Blocks that are specialized during a user's call, without a visible effect."""

from __future__ import annotations

import collections
import copy
import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import moefx
from moefx.compiler import check_policy, equal_modules, specialization
from moefx.compiler.numeric_check import NumericCheck, Outcome, check_numerically
from moefx.passes.pass_manager import PassError
from moefx.util.user_code import PACKAGE_DIR

from ..blocks import D, E, Loop, Mlp


@pytest.fixture
def x():
    return torch.randn(9, D, dtype=torch.float64, requires_grad=True)


class ScaledInEval(Loop):
    """Block with another scale in eval mode, for which it is lifted again."""

    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else 0.5)


def build_pair(x, model):
    model = model.double()
    return model, moefx.compile(copy.deepcopy(model), example_inputs=(x,))


def count_calls(compiled):
    (block,) = moefx.blocks(compiled)
    return block.forward.counts.rewritten, block.fallbacks


@pytest.mark.parametrize("validation, checks", [("auto", 1), ("numeric", 1), ("symbolic", 0)])
def test_later_programs_are_checked_as_the_plan_asks(x, monkeypatch, validation, checks):
    compiled = moefx.compile(ScaledInEval().double(), example_inputs=(x,), plan=moefx.Plan(validation=validation))
    calls = []

    def record(*args):
        calls.append(args)
        return check_numerically(*args)

    monkeypatch.setattr(check_policy, "check_numerically", record)
    compiled.eval()(x)
    assert count_calls(compiled) == (1, 0) and len(calls) == checks


def test_a_later_program_that_cannot_be_checked_is_reported(x, monkeypatch):
    _, compiled = build_pair(x, ScaledInEval())
    impossible = NumericCheck(Outcome.NOT_COMPARED, "could not run: no kernel")
    monkeypatch.setattr(check_policy, "check_numerically", lambda *_: impossible)
    with pytest.warns(UserWarning, match="for a new kind of call without a numeric check.*could not run: no kernel"):
        compiled.eval()(x)


@pytest.mark.parametrize("code", ["{}['key']", "raise PassError('pass fuse: not a legal graph')"])
def test_a_bug_of_moefx_in_a_later_proof_is_reported_as_a_bug(x, monkeypatch, caplog, code):
    def finish_block(*args):
        exec(compile(code, f"{PACKAGE_DIR}/some_module.py", "exec"), {"PassError": PassError})

    model, compiled = build_pair(x, ScaledInEval())
    monkeypatch.setattr(specialization, "finish_block", finish_block)
    torch.testing.assert_close(compiled.eval()(x), model.eval()(x))
    (record,) = caplog.records
    assert "moefx itself failed on it" in record.getMessage() and "please report it" in record.getMessage()


def test_an_error_of_the_user_in_a_later_proof_is_no_bug(x, caplog):
    class TrainedOnly(Loop):
        def forward(self, x):
            if not self.training:
                raise ValueError("only in training")
            return super().forward(x)

    _, compiled = build_pair(x, TrainedOnly())
    with pytest.raises(ValueError, match="only in training"):
        compiled.eval()(x)
    (record,) = caplog.records
    assert "ValueError: only in training" in record.getMessage() and "report" not in record.getMessage()


def test_recorders_see_their_own_call_only(x):
    _, compiled = build_pair(x, ScaledInEval())
    seen = []
    compiled.gate.register_forward_hook(lambda module, args, out: seen.append(out))
    compiled.eval()(x)
    assert count_calls(compiled) == (1, 0) and len(moefx.blocks(compiled)[0].forward.programs) == 2
    assert len(seen) == 1 and type(seen[0]) is torch.Tensor


@pytest.mark.parametrize("kind", ["forward hook", "pre hook"])
def test_hooks_of_the_block_run_outside_it(kind, x):
    model = Loop()
    if kind == "forward hook":
        model.register_forward_hook(lambda module, args, out: out * 2)
    else:
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model, compiled = build_pair(x, model)
    torch.testing.assert_close(compiled(x), model(x))
    assert count_calls(compiled) == (1, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_new_kind_of_call_inside_of_a_checkpoint_equals_the_original(reentrant, x):
    model, compiled = build_pair(x, ScaledInEval())
    results = []
    for m in (model, compiled):
        m.eval()
        out = checkpoint(m, x, use_reentrant=reentrant)
        out.sum().backward()
        results.append((out, m.gate.weight.grad))
    torch.testing.assert_close(*results)
    assert count_calls(compiled)[1] == 0


def test_captures_are_no_flops(x):
    _, compiled = build_pair(x, ScaledInEval())
    compiled.eval()
    flops = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            compiled(x)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


class UncapturableInEval(Loop):
    """Run an operation in eval mode that abstract numbers do not support."""

    @staticmethod
    @functools.cache
    def scale(tokens):
        return 1.0 / tokens

    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else self.scale(x.shape[0]))


def test_refused_blocks_run_the_original(x):
    model, compiled = build_pair(x, UncapturableInEval())
    for m in (model, compiled):
        m.eval()
    torch.testing.assert_close(compiled(x), model(x))
    assert count_calls(compiled) == (0, 1)
    assert "unhashable" in str(moefx.explain(compiled))


def test_the_reason_for_the_original_is_logged_once(x, caplog):
    torch.manual_seed(0)
    model = Loop(lambda: nn.Sequential(Mlp(), nn.Dropout(0.5))).eval()
    _, compiled = build_pair(x, model)
    assert "eval (" in moefx.explain(compiled).matched[0].holds_for
    compiled(x)
    assert not caplog.records
    compiled.train()
    for _ in range(3):
        compiled(x)
    (record,) = caplog.records
    assert record.name.startswith("moefx") and record.levelname == "WARNING"
    assert "is not rewritten for this kind of call: the experts draw random numbers" in record.getMessage()


class Cache(collections.UserDict):
    pass


def test_arguments_without_a_value_are_named(x):
    """Name an argument without a value, such as an empty cache that layers fill."""

    class WithCache(Loop):
        def forward(self, x, cache=None):
            return super().forward(x)

    compiled = moefx.compile(WithCache().double(), example_inputs=(x, Cache()))
    assert "cache: a Cache" in moefx.explain(compiled).matched[0].holds_for


def test_transforms_run_the_original(x):
    model, compiled = build_pair(x, Loop())

    def loss(module):
        return lambda values: torch.func.functional_call(module, values, (x.detach(),)).square().sum()

    grads, truth = (torch.func.grad(loss(m))(dict(m.named_parameters())) for m in (compiled, model))
    torch.testing.assert_close(grads, truth)
    assert count_calls(compiled) == (0, 1)
    (matched,) = moefx.explain(compiled).matched
    assert matched.notes == ("forward-mode derivatives and torch.func transforms run the original",)


def test_a_trace_changes_no_description(x):
    """Dynamo moves the program of eval to the front; graph and explanation still begin with that of training."""
    _, compiled = build_pair(x, ScaledInEval())
    graph = moefx.graph(compiled, "")
    torch.compile(compiled.eval(), backend="eager")(x)
    (block,) = moefx.blocks(compiled)
    assert len(block.forward.programs) == 2 and block.forward.programs[0].key.training is False
    assert moefx.graph(compiled, "") is block.graph is graph and block.spec.training is True
    assert [text.split()[0] for text in moefx.explain(compiled).matched[0].also_for] == ["eval"]


def test_an_auxiliary_loss_that_adds_up(x):
    class Adds(Loop):
        aux = 0.0

        def __init__(self):
            super().__init__()
            self.aux = 0.0

        def forward(self, x):
            self.aux = self.aux + self.gate(x).logsumexp(-1).square().mean()
            return super().forward(x)

    model, compiled = build_pair(x, Adds())
    for _ in range(3):
        for m in (model, compiled):
            m(x)
        torch.testing.assert_close(compiled.aux, model.aux)
    for m in (model, compiled):
        m.aux = 0.0
        m(x)
    torch.testing.assert_close(compiled.aux, model.aux)
    assert count_calls(compiled)[0] >= 2


def test_features_as_long_as_the_sequence():
    """Compile [B, C, L] although the example does not distinguish the axes."""

    class Channels(Loop):
        def forward(self, h):
            rows = h.transpose(1, 2)
            return super().forward(rows.reshape(-1, D)).view(rows.shape).transpose(1, 2)

    model, compiled = build_pair(torch.randn(4, D, D, dtype=torch.float64), Channels())
    for length in (D, 5, 40):
        x = torch.randn(4, D, length, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x))
    assert count_calls(compiled) == (3, 0)


def test_a_deleted_bias_raises(x):
    _, compiled = build_pair(x, Loop(Mlp))
    compiled.experts[2].up.bias = None
    with pytest.raises(moefx.MoefxError, match=r"experts\.2\.up\.bias was removed"):
        compiled(x)


class HooksATensor(Loop):
    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-1, 1))
        return super().forward(x)


class KeepsAGradient(Loop):
    def forward(self, x):
        x = x * 1.0
        x.retain_grad()
        return super().forward(x)


class OwnGenerator(Loop):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, generator=self.generator, dtype=x.dtype))


class ChangesItsRouter(Loop):
    def forward(self, x):
        with torch.no_grad():
            self.gate.weight.copy_(nn.functional.normalize(self.gate.weight))
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (HooksATensor, "if x.requires_grad"),
        (KeepsAGradient, "retain_grad"),
        (OwnGenerator, "generator of its own"),
        (ChangesItsRouter, "changes gate.weight"),
    ],
)
def test_effects_that_no_graph_repeats_are_refused(kind, why, x):
    model = kind().double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(moefx.NoMoEBlockFound, match=why):
        moefx.compile(model, example_inputs=(x,))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_one_token_first():
    """Use the token axes of the example: a call with one token does not show them."""

    class Weighted(ScaledInEval):
        def forward(self, x, mask):
            return super().forward(x.flatten(0, 1)).view_as(x) * mask[..., None]

    model = nn.ModuleDict({"moe": Weighted()}).double()
    model.forward = lambda x, mask: model["moe"](x, mask)
    example = torch.randn(3, 7, D, dtype=torch.float64), torch.ones(3, 7, dtype=torch.float64)
    compiled = moefx.compile(model, example_inputs=example)
    model.eval(), compiled.eval()
    for size in ((1, 1), (2, 5), (1, 40)):
        x, mask = torch.randn(*size, D, dtype=torch.float64), torch.rand(size, dtype=torch.float64)
        torch.testing.assert_close(compiled["moe"](x, mask), model["moe"](x, mask))
    assert count_calls(compiled) == (3, 0)


class Optional(Loop):
    """Depend on all kinds of arguments, some of which disable the mixture."""

    def forward(self, x, scale=1.0, dense=False, k=None, *, how="sum", extra=None, **others):
        p = self.gate(x).softmax(-1)
        if dense:
            return sum(p[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts))
        w, ids = p.topk(k or self.k, -1)
        out = self.mixed(x, w * scale, ids)
        out = out.cumsum(0) if how == "prefix" else out
        for factor in (extra or {}).get("factors", ()):
            out = out * factor
        return out if others.get("mask") is None else out * others["mask"]


ARGUMENTS = [
    {"scale": 2.0}, {"scale": 0.0}, {"dense": True}, {"k": 1}, {"k": E}, {"how": "prefix"}, {"how": "max"},
    {"extra": {"factors": [0.5, 0.0]}}, {"extra": {"factors": (2.0,)}}, {"mask": 0.25},
    {"extra": collections.OrderedDict(factors=[3.0])},
    {"mask": torch.arange(9.0, dtype=torch.float64)[:, None]},
]  # fmt: skip


@pytest.mark.sampled(21)
@pytest.mark.parametrize("kwargs", ARGUMENTS, ids=lambda kwargs: str(kwargs)[1:25])
@pytest.mark.parametrize("how", ["eager", "compiled", "exported"])
def test_a_call_has_its_own_arguments(how, kwargs):
    """Use the arguments of the call instead of the example's."""
    x = torch.randn(9, D, dtype=torch.float64)
    model = Optional().double()
    compiled = run = moefx.compile(model, example_inputs=(x,), plan=moefx.Plan(validation="symbolic"))
    if how == "exported":
        run = torch.export.export(compiled, (x,), kwargs).module()
    elif how == "compiled":
        run = torch.compile(compiled, backend="eager")
    torch.testing.assert_close(run(x, **kwargs), model(x, **kwargs))
    if how == "eager":
        kwargs = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        torch.testing.assert_close(run(x[:1], **kwargs), model(x[:1], **kwargs))


class Activated(Loop):
    def forward(self, x, act):
        return self.mixed(act(x), *self.route(x))


def make_scale(factor):
    return lambda x: x * factor


def scale_by_first(factors):
    return lambda x: x * factors[0]


ACTIVATIONS = {
    "functions": (F.relu, F.silu),
    "builtins": (torch.relu, torch.tanh),
    "methods": (torch.Tensor.relu, torch.Tensor.tanh),
    "lambdas": (lambda x: x.relu(), lambda x: x.tanh()),
    "closures": (make_scale(2.0), make_scale(3.0)),
    "partials": (
        functools.partial(F.leaky_relu, negative_slope=0.1),
        functools.partial(F.leaky_relu, negative_slope=0.5),
    ),
    "modules": (nn.LeakyReLU(0.1), nn.LeakyReLU(0.5)),
    "defaults": (lambda x, by=2.0: x * by, lambda x, by=3.0: x * by),
    "lists": (scale_by_first([2.0]), scale_by_first([3.0])),
    "ops": (torch.ops.aten.relu, torch.ops.aten.tanh),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("pair_of", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_functions_among_the_arguments_are_distinguished(pair_of, x):
    model = Activated().double()
    plan = moefx.Plan(validation="symbolic")
    compiled = moefx.compile(model, example_inputs=(x.detach(), pair_of[0]), plan=plan)
    for act in (*pair_of, *pair_of):
        torch.testing.assert_close(compiled(x, act), model(x, act))
    assert count_calls(compiled) == (4, 0) and len(moefx.blocks(compiled)[0].forward.programs) == 2
    traced = torch.compile(moefx.compile(model, example_inputs=(x.detach(), pair_of[0]), plan=plan), backend="eager")
    for act in pair_of if pair_of is not ACTIVATIONS["methods"] else ():  # Dynamo equates the methods
        torch.testing.assert_close(traced(x, act), model(x, act))


def test_a_call_of_one_token_has_its_own_arguments(x):
    """Use the example's shapes for tensors of a one-token call, and the call's own values."""
    model, compiled = build_pair(x.detach(), Optional())
    for n, scale in enumerate((2.0, 3.0)):
        torch.testing.assert_close(compiled(x.detach()[:1], scale), model(x.detach()[:1], scale))
        assert count_calls(compiled) == (n + 1, 0)


def test_lookups_of_dynamo_are_no_reads_of_the_block(x):
    """Ignore attributes that Dynamo looks up in modules."""
    model = nn.ModuleList(Optional() for _ in range(2)).double()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            for n, layer in enumerate(self.layers):
                x = x + layer(x, scale=n + 0.5, k=1 + n)
            return x

    net = Net()
    compiled = moefx.compile(net, example_inputs=(x.detach(),))
    torch.testing.assert_close(torch.compile(compiled, backend="eager", dynamic=True)(x), net(x))


class Layers(nn.Module):
    """Sequence of equal blocks."""

    def __init__(self, kind, number=3):
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(number)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def lifts(monkeypatch):
    """Collect the names of lifted blocks."""
    found = []
    for module in (specialization, equal_modules):
        stock = module.rewrite_block

        def counted(*args, stock=stock, **options):
            found.append(args[1])
            return stock(*args, **options)

        monkeypatch.setattr(module, "rewrite_block", counted)
    return found


def check(model, compiled, x):
    before = [block.fallbacks for block in moefx.blocks(compiled)]
    torch.testing.assert_close(compiled(x), model(x))
    assert [block.fallbacks for block in moefx.blocks(compiled)] == before


class Multiples(Loop):
    """Scale multiples of 307 tokens differently: captures do not have several such sizes."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view(x.shape) * (0.5 if x.shape[1] % 307 == 0 else 1.0)


def test_a_lift_that_excludes_the_sizes_of_its_call_is_refused_once(lifts):
    x = torch.randn(2, 9, D, dtype=torch.float64)
    model, compiled = build_pair(x, Multiples())
    del lifts[:]
    for tokens in (307, 614, 307, 921):
        rows = torch.randn(2, tokens, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(rows), model(rows))
    (block,) = moefx.blocks(compiled)
    assert len(lifts) <= 2 and len(block.forward.programs) == 1 and count_calls(compiled) == (0, 4)
    assert "no proof was found for the sizes of this call" in str(moefx.explain(compiled))
    check(model, compiled, x)


def test_block_that_ignores_its_mode_has_one_program(x, lifts):
    model, compiled = build_pair(x, Layers(Loop))
    for mode in (False, True):
        model.train(mode), compiled.train(mode)
        check(model, compiled, x)
    assert lifts == ["blocks.0"]
    assert all(block.forward.programs[0].key.training is None for block in moefx.blocks(compiled))


class WithDropout(Loop):
    """Read the mode of a submodule."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.dropout(x))


@pytest.mark.parametrize("kind", [ScaledInEval, WithDropout])
def test_equal_blocks_share_the_program_of_the_other_mode(x, lifts, kind):
    model, compiled = build_pair(x, Layers(kind))
    model.eval(), compiled.eval()
    for size in (9, 4):
        check(model, compiled, x[:size])
    assert lifts == ["blocks.0", "blocks.0"]
    assert [len(block.forward.programs) for block in moefx.blocks(compiled)] == [2, 2, 2]
    assert [str(b.forward.programs[1].history.name) for b in moefx.blocks(compiled)] == [
        f"blocks.{i}" for i in range(3)
    ]


def test_a_block_that_no_longer_equals_others_is_lifted_alone(x, lifts):
    class Scaled(ScaledInEval):
        factor = 1.0

        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def forward(self, x):
            return super().forward(x) * self.factor

    model, compiled = build_pair(x, Layers(Scaled))
    for m in (model, compiled):
        m.eval()
        m.blocks[1].factor = 3.0
    check(model, compiled, x)
    assert lifts == ["blocks.0", "blocks.0", "blocks.1"]


def test_a_copy_shares_later_programs(x, lifts):
    model, compiled = build_pair(x, Layers(ScaledInEval))
    twin = copy.deepcopy(compiled)
    for m in (model, compiled, twin):
        m.eval()
    check(model, compiled, x)
    with torch.no_grad():
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            b.copy_(a.mul_(1.5))
    check(model, twin, x)
    assert len(lifts) == 2


class AsksAnother(Loop):
    """Read the mode of a module that is no submodule."""

    def __init__(self):
        super().__init__()
        self.others = [nn.Identity()]  # not registered

    def train(self, mode=True):
        self.others[0].train(mode)
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) * (1.0 if self.others[0].training else 0.5)


class LooksItUp(Loop):
    def forward(self, x):
        return super().forward(x) * (1.0 if vars(self)["training"] else 0.5)


class Dynamic(Loop):
    def forward(self, x):
        return super().forward(x) * (1.0 if getattr(self, "train" + "ing") else 0.5)


class AsksOneOfItsKind(AsksAnother):
    """Read the mode of a module whose class also occurs among the submodules."""

    def __init__(self):
        super().__init__()
        self.others = [nn.Linear(1, 1)]


class SwapsItsExperts(Loop):
    """Change attributes in `train`, without reading the mode in `forward`."""

    def __init__(self):
        super().__init__()
        self.both = nn.ModuleList([self.experts, copy.deepcopy(self.experts)])

    def train(self, mode=True):
        self.experts = self.both[0 if mode else 1]
        return super().train(mode)


class Reorders(Loop):
    """Change a tensor in `train` that is no plain attribute."""

    def train(self, mode=True):
        self.order = torch.arange(E) if mode else torch.arange(E).flip(0)
        return super().train(mode)

    def route(self, x):
        w, ids = super().route(x)
        return w, self.order[ids]

    def __init__(self):
        super().__init__()
        self.train()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [AsksAnother, AsksOneOfItsKind, LooksItUp, Dynamic, SwapsItsExperts, Reorders])
def test_other_ways_to_read_the_mode(x, kind):
    model, compiled = build_pair(x, Layers(kind, 1))
    for mode in (True, False, True):
        model.train(mode), compiled.train(mode)
        check(model, compiled, x)
    assert len(moefx.blocks(compiled)[0].forward.programs) == 2


class InOtherOrder(ScaledInEval):
    """Reorder experts in eval mode, differently in each block."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def route(self, x):
        w, ids = super().route(x)
        return w, ids if self.training else self.order[ids]


def test_blocks_that_differ_in_the_other_mode_only(x):
    layers = Layers(Loop, 0)
    layers.blocks.extend([InOtherOrder(torch.arange(E)), InOtherOrder(torch.arange(E).flip(0))])
    model, compiled = build_pair(x, layers)
    for mode in (True, False):
        model.train(mode), compiled.train(mode)
        check(model, compiled, x)


def run_concurrently(*calls):
    """Run calls in parallel threads and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        barrier = threading.Barrier(len(calls))

        def run(call):
            barrier.wait()
            return call()

        return list(pool.map(run, calls))


@pytest.fixture
def hasty_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def test_threads_that_lift_at_once(x, hasty_threads):
    """Call models in several threads, each in a dtype that is not compiled yet."""
    model, compiled = build_pair(x, Loop())
    pairs = [(copy.deepcopy(model).to(t), copy.deepcopy(compiled).to(t)) for t in (torch.float32, torch.bfloat16) * 2]
    inputs = [torch.randn(20, D, dtype=next(m.parameters()).dtype) for m, _ in pairs]
    results = run_concurrently(*(functools.partial(c, i) for (_, c), i in zip(pairs, inputs, strict=True)))
    for (m, c), i, result in zip(pairs, inputs, results, strict=True):
        torch.testing.assert_close(result, m(i))
        forward = moefx.blocks(c)[0].forward
        assert count_calls(c) == (1, 0), (forward.refusals, forward.counts.last_failed_guard)


def test_threads_that_call_one_compiled_model_at_once(x, hasty_threads):
    """Run forward and backward in threads, in training and without gradients: each sees its own values and programs."""
    model, compiled = build_pair(x, Loop())
    inputs = [torch.randn(n, D, dtype=torch.float64) for n in (9, 20)]

    def train(run, x):
        out = run(x)
        return [out, *torch.autograd.grad(out.square().sum(), [*run.parameters()])]

    def infer(run, x):
        with torch.no_grad():
            return [run(x)]

    work = [functools.partial(step, x=x) for x in inputs for step in (train, infer)]
    several = run_concurrently(*[lambda step=step: [step(compiled) for _ in range(10)] for step in work])
    for step, results in zip(work, several, strict=True):
        for result in results:
            torch.testing.assert_close(result, step(model))
    (block,) = moefx.blocks(compiled)
    assert not block.fallbacks and len(block.forward.programs) == 1


def test_threads_that_share_a_block_lift_it_once(x, hasty_threads, monkeypatch):
    _, compiled = build_pair(x, ScaledInEval())
    lifted = []
    stock = specialization.rewrite_block
    monkeypatch.setattr(specialization, "rewrite_block", lambda *args: (lifted.append(args), stock(*args))[1])
    compiled.eval()
    first, *others = run_concurrently(*[functools.partial(compiled, x)] * 3)
    assert all(torch.equal(first, other) for other in others)
    assert count_calls(compiled) == (3, 0) and len(lifted) == 1
