"""Forward of a rewritten block: guards, modes, hooks, copies, and new kinds of calls."""

import copy
import functools
import gc
import inspect
import io
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from moefx.compiled_blocks import Block as Compiled
from moefx.errors import AbsorbedModuleChanged, MoefxError, NotRewritten, Refused
from moefx.ir.argument_binding import Guard
from moefx.runtime.block_forward import (
    BlockForward,
    find_rewritten_blocks,
    get_rewritten_forward,
    install_forward,
)
from moefx.runtime.program_requests import MAX_SPECIALIZATIONS

from ..ir.graphs import Block, D
from .rewriting import Model, build_program, rewrite

S = 6


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


def rewritten_block(**options):
    block, x = Block(), torch.randn(S, D)
    expected = block(x)
    (forward,) = rewrite(block, x, **options)
    return block, forward, x, expected


def test_only_the_instance_attribute_is_new():
    block, x = Block(), torch.randn(S, D)
    keys, modules = list(block.state_dict()), [name for name, _ in block.named_modules()]
    expected = block(x)
    rewrite(block, x)
    assert type(block) is Block and isinstance(get_rewritten_forward(block), BlockForward)
    assert list(block.state_dict()) == keys and [name for name, _ in block.named_modules()] == modules
    torch.testing.assert_close(block(x), expected)
    assert get_rewritten_forward(Block()) is None
    assert find_rewritten_blocks(block) == {"": get_rewritten_forward(block)}


def test_gradients_reach_every_parameter():
    block, _, x, expected = rewritten_block()
    wanted = torch.autograd.grad(expected.sum(), list(block.parameters()))
    found = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_the_signature_is_the_blocks_own():
    block, forward, x, expected = rewritten_block()
    assert inspect.signature(forward) == inspect.signature(Block().forward)
    torch.testing.assert_close(block(hidden_states=x, scale=1.0), expected)
    with pytest.raises(TypeError, match=r"forward\(\) missing 1 required positional argument: 'hidden_states'"):
        block()
    assert forward.counts.original == 0
    assert repr(forward) == "<rewritten forward of Block, 1 program(s)>"


def test_a_call_that_was_not_recorded_runs_the_original():
    block, forward, x, _ = rewritten_block()
    block(x)
    for call in (
        lambda: block(x, torch.ones(1)),  # an argument that was absent
        lambda: block(x, scale=2.0),  # another Python value
        lambda: block(x[None]),  # another rank
    ):
        before = forward.counts.original
        call()
        assert forward.counts.original == before + 1
    with torch.autocast("cpu", torch.bfloat16):
        block(x)
    assert (forward.counts.original, forward.counts.rewritten) == (4, 1)
    block.double()(x.double())
    assert (forward.counts.original, forward.counts.rewritten) == (5, 1)


def test_modes_are_part_of_the_key_only_if_read():
    block, x = Block(), torch.randn(S, D)
    forward = install_forward(block, [build_program(block, x, training=True)])
    block(x)
    block.eval()(x)
    assert (forward.counts.original, forward.counts.rewritten) == (1, 1)
    forward = install_forward(block, [build_program(block, x, grad=True)])
    block(x)
    with torch.no_grad():
        block.train()(x)
    assert (forward.counts.original, forward.counts.rewritten) == (1, 1)


def test_a_call_that_fails_a_guard_runs_the_original():
    block, x = Block(), torch.randn(S, D)
    block.top_k = 2
    guards = (Guard("self.top_k == 2", "top_k was read", "model.py:3"), Guard("hidden_states.shape[0] > 4"))
    forward = install_forward(block, [build_program(block, x, guards)])
    block(x)
    assert (forward.counts.rewritten, forward.counts.guard_failures) == (1, 0)
    block(x[:3])
    assert (forward.counts.original, forward.counts.guard_failures) == (1, 1)
    assert forward.counts.last_failed_guard == "hidden_states.shape[0] > 4: "
    block.top_k = 1
    block(x)
    assert forward.counts.last_failed_guard == "self.top_k == 2: top_k was read (model.py:3)"
    # A second program may run calls that the guards of the first one reject.
    forward.add(build_program(block, x))
    block(x[:3])
    assert (forward.counts.rewritten, forward.counts.original) == (2, 2)


def test_hooks_of_the_block_and_of_kept_submodules_fire():
    block, forward, x, _ = rewritten_block()
    x.requires_grad_()
    fired = []
    block.register_forward_hook(lambda *_: fired.append("block"))
    block.router.register_forward_hook(lambda *_: fired.append("router"))
    block.router.linear.register_full_backward_hook(lambda *_: fired.append("linear backward"))
    block(x).sum().backward()
    assert fired == ["router", "block", "linear backward"]
    assert forward.counts.rewritten == 1


def test_kept_submodules_may_be_replaced():
    block, forward, x, _ = rewritten_block()
    block.router.linear = nn.Linear(D, 4)
    expected = Block.forward(block, x)
    torch.testing.assert_close(block(x), expected)
    block.router = copy.deepcopy(block.router)
    torch.testing.assert_close(block(x), expected)
    assert forward.counts.rewritten == 2


def test_an_unknown_call_is_specialized_once():
    asked = []

    def specialize(block, call, args, kwargs):
        asked.append((call, args, kwargs))
        if call.autocast is not None:
            raise Refused("casts differ", source="model.py:9")
        return None if args[0].dim() == 1 else build_program(block, *args)

    block, x = Block(), torch.randn(S, D)
    forward = install_forward(block, [], specialize=specialize)
    for _ in range(2):
        torch.testing.assert_close(block(x), Block.forward(block, x))
        block(x[None])
        with torch.autocast("cpu", torch.bfloat16):
            block(x)
        block(x[0])
    assert [len(call.arguments) for call, _, _ in asked] == [3] * 4
    assert len(forward.programs) == 2
    assert (forward.counts.rewritten, forward.counts.original) == (4, 4)
    assert list(forward.refusals.values()) == ["casts differ (model.py:9)", "no program was made for it"]


def test_reasons_are_those_of_the_call(caplog):
    """A call with one reason, then one with another: each is logged."""

    def specialize(block, call, args, kwargs):
        raise Refused("casts differ" if call.autocast is not None else "rows differ")

    block, x = Block(), torch.randn(S, D)
    install_forward(block, [], specialize=specialize)
    block(x)
    with torch.autocast("cpu", torch.bfloat16):
        block(x)
    block(x)
    reasons = [record.getMessage().partition("kind of call: ")[2].partition(".")[0] for record in caplog.records]
    assert reasons == ["rows differ", "casts differ"]


def list_reasons(caplog):
    """The reasons of the logged fallbacks, in order."""
    texts = [record.getMessage().partition("kind of call: ")[2] for record in caplog.records]
    return [text.partition(". The call runs")[0] for text in texts]


def test_no_reason_names_the_guard_of_another_call(caplog):
    """A guard fails first. Later calls have other reasons: no program, the limit, and a transform."""
    block, x = Block(), torch.randn(S, D)
    programs = [build_program(block, x, (Guard("hidden_states.shape[0] > 4"),))]
    forward = install_forward(block, programs, specialize=lambda *call: None)
    block(x[:3])
    for step in range(MAX_SPECIALIZATIONS):
        block(x, scale=2.0 + step)
    torch.func.jvp(block, (x,), (x,))
    first, *others, last = reasons = list_reasons(caplog)
    assert first == "guard failed: hidden_states.shape[0] > 4:"
    assert others[0] == "no program was made for it" and len(others) == 2
    assert f"limit of {MAX_SPECIALIZATIONS} specializations reached" in others[1] and "as a tensor" in others[1]
    assert last == "forward-mode derivatives and torch.func transforms run the original"
    assert [reason.strip() for reason in forward.fallback_reasons] == reasons
    assert forward.counts.last_failed_guard == "hidden_states.shape[0] > 4: "


def test_a_spread_block_names_the_reason_of_the_call():
    def specialize(block, call, args, kwargs):
        raise Refused("casts differ" if call.autocast is not None else "rows differ")

    block, x = Block(), torch.randn(S, D)
    forward = install_forward(block, [], specialize=specialize)
    forward.expert_layout = object()
    for run in (block, torch.compile(block, backend="eager", fullgraph=True)):
        errors = NotRewritten, torch._dynamo.exc.Unsupported  # Dynamo wraps the error of a trace
        for why, is_autocast in (("rows", False), ("casts", True), ("rows", False)):
            wanted = pytest.raises(errors, match=f"kind of call: {why} differ")
            with torch.autocast("cpu", torch.bfloat16, is_autocast), wanted:
                run(x)


def test_an_eager_call_asks_again_after_a_refused_trace():
    def specialize(block, call, args, kwargs):
        if args is None:
            raise Refused("run it once in eager mode")
        return build_program(block, *args)

    block, x = Block(), torch.randn(S, D)
    forward = install_forward(block, [], specialize=specialize)
    traced = torch.compile(block, backend="eager")
    torch.testing.assert_close(traced(x), Block.forward(block, x))
    assert not forward.programs and list(forward.refusals.values()) == ["run it once in eager mode"]
    torch.testing.assert_close(block(x), Block.forward(block, x))
    assert len(forward.programs) == 1 and forward.counts.rewritten == 1


def test_an_argument_that_always_changes_does_not_lift_forever():
    asked = []
    block, x = Block(), torch.randn(S, D)
    install_forward(block, [], specialize=lambda *call: asked.append(call))
    for step in range(2 * MAX_SPECIALIZATIONS):
        block(x, scale=float(step))
    assert len(asked) == MAX_SPECIALIZATIONS


def test_an_accepted_program_counts_once():
    """Each call fails the guard of the programs before it, as a call that takes another branch does."""
    asked = []

    def specialize(block, call, args, kwargs):
        asked.append(call)
        size = len(args[0])
        return build_program(block, *args, guards=(Guard(f"hidden_states.shape[0] == {size}", one_way=True),))

    block = Block()
    forward = install_forward(block, [], specialize=specialize)
    for size in range(2, 4 + MAX_SPECIALIZATIONS):
        block(torch.randn(size, D))
    assert len(asked) == len(forward.programs) == MAX_SPECIALIZATIONS
    assert not forward.refusals


def test_the_compiled_program_stays_the_same():
    """A trace moves the programs of its call to the front."""
    block, x = Block(), torch.randn(S, D)
    forward = install_forward(block, [build_program(block, x, training=True)])
    forward.add(build_program(block, x, training=False))
    compiled, later = forward.programs
    torch.compile(block.eval(), backend="eager")(x)
    assert forward.programs == (later, compiled) and forward.compiled_program is compiled
    described = Compiled("", forward)
    assert described.spec is compiled.key and described.history is compiled.history
    assert pickle.loads(pickle.dumps(block)).forward.compiled_program.key == compiled.key


def test_capture_may_run_the_block_itself():
    def specialize(block, call, args, kwargs):
        block(*args, **kwargs)
        return build_program(block, *args)

    block, x = Block(), torch.randn(S, D)
    forward = install_forward(block, [], specialize=specialize)
    block(x)
    assert (forward.counts.rewritten, forward.counts.original) == (1, 1)


def test_a_block_can_run_as_the_original_or_after_any_pass():
    block, forward, x, expected = rewritten_block()
    with forward.force_graph("original"):
        torch.testing.assert_close(block(x), expected)
    assert (forward.counts.rewritten, forward.counts.original) == (0, 1)
    with forward.force_graph("rewrite"):
        torch.testing.assert_close(block(x), expected)
    with forward.force_graph("lower"), pytest.raises(KeyError, match="no pass 'lower' ran"):
        block(x)
    block(x)
    assert forward.counts.rewritten == 3


def test_loads_are_recorded_on_demand():
    block, forward, x, expected = rewritten_block()
    with pytest.raises(MoefxError, match="off; call record_load"):
        forward.load()
    forward.record_load()
    assert forward.load() is None
    torch.testing.assert_close(block(x), expected)
    ids = block.router(x)[1]
    assert forward.load().tolist() == [(ids == e).sum() for e in range(4)]
    assert copy.deepcopy(block).forward.load() is None
    with forward.force_graph("original"):
        block(x)
    assert forward.load() is None  # no rewritten call is the last one
    block(x[:2])
    assert forward.load().sum() == 2 * ids.shape[1]
    forward.record_load(False)
    block(x)
    with pytest.raises(MoefxError, match="off"):
        forward.load()


# -- absorbed submodules ---------------------------------------------------------------------------


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return 2 * self.base(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    "class": (lambda b: setattr(b.experts[1].up, "__class__", Doubled), r"experts\.1\.up became a Doubled"),
    "replaced": (lambda b: setattr(b.experts[1], "up", Adapter(b.experts[1].up)),
                 r"experts\.1\.up was replaced \(Linear by Adapter\)"),
    "expert": (lambda b: b.experts.__setitem__(0, copy.deepcopy(b.experts[0])), r"experts\.0 was replaced"),
    "all": (lambda b: setattr(b, "experts", copy.deepcopy(b.experts)), r"experts was replaced"),
    "deleted": (lambda b: b.experts.__delitem__(2), r"experts\.2 was replaced"),
    "added": (lambda b: b.experts[0].add_module("lora", nn.Linear(1, 1)),
              r"experts\.0\.lora \(Linear\) was added"),
    "hook": (lambda b: b.experts[3].register_forward_hook(print), r"experts\.3 got a forward hook"),
    "pre hook": (lambda b: b.experts[3].up.register_forward_pre_hook(print), "got a forward pre hook"),
    "backward hook": (lambda b: b.experts[3].up.register_full_backward_hook(print), "got a backward hook"),
    "parametrized": (lambda b: nn.utils.parametrizations.weight_norm(b.experts[0].down),
                     r"experts\.0\.down became a ParametrizedLinear"),
    "a bias": (lambda b: setattr(b.experts[1].up, "bias", nn.Parameter(torch.zeros(1))),
               r"experts\.1\.up\.bias was added"),
    "forward": (lambda b: setattr(b.experts[0].act, "forward", torch.relu),
                r"act was given a forward of its own"),
}  # fmt: skip


@pytest.mark.parametrize("when", ["later", "pickle"])
def test_another_forward_of_an_absorbed_class_raises(when, monkeypatch):
    block, _, x, _ = rewritten_block()
    block(x)
    block = pickle.loads(pickle.dumps(block)) if when == "pickle" else block
    expert = type(block.experts[0])
    monkeypatch.setattr(expert, "forward", lambda self, x: x)
    with pytest.raises(AbsorbedModuleChanged, match=r"experts\.0 got a new forward in its class"):
        block(x)
    monkeypatch.undo()
    block(x)


@pytest.mark.parametrize("change", ["class of the block", "forward of its class"])
def test_another_forward_of_the_block_runs(change, monkeypatch):
    block, forward, x, _ = rewritten_block()
    wanted = 2 * block(x)
    cls, plain = type(block), type(block).forward
    twice = lambda self, x: 2 * plain(self, x)  # noqa: E731
    if change == "class of the block":
        block.__class__ = type("Twice", (cls,), {"forward": twice})
    else:
        monkeypatch.setattr(cls, "forward", twice)
    torch.testing.assert_close(block(x), wanted)
    assert forward.counts.original == 1 and "is not the one" in forward.counts.last_failed_guard
    block.__class__ = type("Wrapped", (cls,), {})  # like FSDP
    if change == "class of the block":
        torch.testing.assert_close(2 * block(x), wanted)
        assert forward.counts.original == 1


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["first call", "later", "deepcopy", "pickle"])
def test_a_changed_absorbed_submodule_raises(change, when):
    block, forward, x, _ = rewritten_block()
    install_forward(block, forward.programs, name="layers.3.mlp")
    if when != "first call":
        block(x)
    if when == "deepcopy":
        block = copy.deepcopy(block)
    if when == "pickle":
        block = pickle.loads(pickle.dumps(block))
    make, message = CHANGES[change]
    make(block)
    for _ in range(2):
        with pytest.raises(AbsorbedModuleChanged, match=rf"^layers\.3\.mlp\..*{message}") as caught:
            block(x)
    assert "before moefx.compile" in str(caught.value)
    with get_rewritten_forward(block).force_graph("original"):
        block(x)


def test_a_removed_hook_and_harmless_attributes_are_fine():
    block, forward, x, _ = rewritten_block()
    block(x)
    handle = block.experts[0].register_forward_hook(print)
    with pytest.raises(AbsorbedModuleChanged):
        block(x)
    handle.remove()
    block.experts[0].note = "seen"
    block(x)
    x.requires_grad_().register_hook(lambda grad: grad)  # increases the version that detects hooks
    block(x)
    assert forward.counts.rewritten == 3


def test_parameters_may_be_exchanged():
    block, _, x, _ = rewritten_block()
    block(x)
    block.load_state_dict({k: v + 1 for k, v in block.state_dict().items()}, assign=True)
    torch.testing.assert_close(block(x), Block.forward(block, x))
    parameters = {name: torch.randn_like(p) for name, p in block.named_parameters()}
    found = torch.func.functional_call(block, parameters, (x,))
    with block.forward.force_graph("original"):
        torch.testing.assert_close(found, torch.func.functional_call(block, parameters, (x,)))


# -- copies ----------------------------------------------------------------------------------------


def save_and_load(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda m: copy.deepcopy(copy.deepcopy(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": save_and_load,
    "copy of a pickle": lambda m: copy.deepcopy(pickle.loads(pickle.dumps(m))),
}


def specialize(block, call, args, kwargs):
    return build_program(block, *args)


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_bound_to_their_own_block(how):
    model, x = Model(), torch.randn(S, D)
    expected = model(x)
    rewrite(model, x, specialize=specialize)
    duplicate = COPIES[how](model)
    for layer, old in zip(duplicate.layers, model.layers, strict=True):
        assert layer.forward.block is layer is not old
        assert inspect.signature(layer.forward).parameters.keys() == inspect.signature(old.forward).parameters.keys()
    torch.testing.assert_close(duplicate(x), expected)
    with torch.no_grad():
        for p in duplicate.parameters():
            p.zero_()
    assert not duplicate.layers[0](x).any()
    torch.testing.assert_close(model(x), expected)
    duplicate(x[None])  # specializes in the copy only
    assert len(duplicate.layers[0].forward.programs) == 2 and len(model.layers[0].forward.programs) == 1
    assert duplicate.layers[0].forward.counts.original == 0


def test_layers_share_programs_in_copies_and_pickles():
    model, x = Model(layers=6, num_experts=32), torch.randn(S, D)
    forwards = rewrite(model, x)
    assert len({f.programs[0].fn for f in forwards}) == 1
    duplicate = copy.deepcopy(model)
    assert duplicate.layers[0].forward.programs == forwards[0].programs
    one, six = (len(pickle.dumps(m)) for m in (model.layers[0], model))
    bare = len(pickle.dumps(Model(layers=6, num_experts=32)))
    assert six - bare < 3 * (one - bare / 6)


def test_an_instance_level_forward_stays_the_original():
    def double(block, hidden_states, mask: "torch.Tensor | None" = None):
        return 2 * Block.forward(block, hidden_states)

    for make in (lambda b: functools.partial(double, b), lambda b: types.MethodType(double, b)):
        block, x = Block(), torch.randn(S, D)
        block.forward = make(block)
        program = build_program(block, x)
        forward = install_forward(block, [program])
        torch.testing.assert_close(block(x), Block.forward(block, x))
        torch.testing.assert_close(block(x[None]), 2 * Block.forward(block, x[None]))
        again = install_forward(block, [program])
        assert again.original is forward.original
        duplicate = copy.deepcopy(block)
        with torch.no_grad():
            duplicate.router.linear.weight.add_(torch.randn(4, D))
        torch.testing.assert_close(duplicate(x[None]), 2 * Block.forward(duplicate, x[None]))


def test_a_method_that_was_only_bound_again_is_no_instance_level_forward():
    block, x = Block(), torch.randn(S, D)
    block.forward = types.MethodType(Block.forward, block)
    forward = install_forward(block, [build_program(block, x)])
    assert forward.original is None
    loaded = pickle.loads(pickle.dumps(block))
    torch.testing.assert_close(loaded(x[None]), block(x[None]))


def _double(block, hidden_states):
    return 2 * Block.forward(block, hidden_states)


def test_an_instance_level_forward_pickles():
    block, x = Block(), torch.randn(S, D)
    block.forward = functools.partial(_double, block)
    install_forward(block, [])
    loaded = pickle.loads(pickle.dumps(block))
    torch.testing.assert_close(loaded(x), block(x))
    assert list(inspect.signature(loaded.forward).parameters) == ["hidden_states"]


def test_a_rewritten_model_is_collected():
    model, x = Model(), torch.randn(S, D)
    rewrite(model, x)
    model(x)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# -- torch.compile and export ----------------------------------------------------------------------


def test_one_graph_for_any_batch_and_sequence():
    model, x = Model(layers=3), torch.randn(2, 5, D)
    rewrite(model, x)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for shape in ((2, 5), (3, 4), (2, 7), (5, 3), (4, 9)):
        y = torch.randn(*shape, D)
        torch.testing.assert_close(compiled(y), model(y))
    assert backend.frame_count <= 2  # static, then dynamic sizes
    assert sum(n.target is torch.ops.moefx.expert_mlp.default for n in backend.graphs[-1].graph.nodes) == 3
    assert not any("gate" in str(n.target) for n in backend.graphs[-1].graph.nodes if n.op == "call_module")


def test_compiling_block_by_block_compiles_like_layers_once():
    model, x = Model(layers=4), torch.randn(2, 5, D, requires_grad=True)
    expected = model(x)
    rewrite(model, x)
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
    torch.testing.assert_close(model(x), expected)
    assert backend.frame_count <= 2


def test_compiled_training_and_statistics():
    model, x = Model(), torch.randn(2, 5, D)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    forwards = rewrite(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    forwards[0].record_load()
    compiled(x)
    assert forwards[0].load().sum() == 2 * 5 * 2


def test_a_change_is_noticed_when_dynamo_traces():
    model, x = Model(), torch.randn(S, D)
    rewrite(model, x)
    model.layers[1].experts[0].up = Adapter(model.layers[1].experts[0].up)
    with pytest.raises(Exception, match=r"layers\.1\.experts\.0\.up was replaced"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)


def test_unknown_calls_are_specialized_when_dynamo_traces():
    block, x = Block(), torch.randn(S, D)
    known = build_program(block, x)

    def specialize(block, call, args, kwargs):
        assert args is None and kwargs is None
        return known if known.key.admits(call) else None

    install_forward(block, [], specialize=specialize)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), Block.forward(block, x))


def test_guards_are_guards_of_dynamo_too():
    block, x = Block(), torch.randn(S, D)
    guard = Guard("hidden_states.shape[0] > 4")
    install_forward(block, [build_program(block, x, [guard])])
    compiled = torch.compile(block, backend="aot_eager")
    torch.testing.assert_close(compiled(x), Block.forward(block, x))
    torch.testing.assert_close(compiled(x[:3]), Block.forward(block, x[:3]))


@pytest.mark.parametrize("strict", [True, False])
def test_a_rewritten_block_can_be_exported(strict):
    model, x = Model(), torch.randn(S, D)
    expected = model(x)
    rewrite(model, x)
    tokens = torch.export.Dim("tokens", min=2)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: tokens},), strict=strict)
    torch.testing.assert_close(exported.module()(x), expected)
    y = torch.randn(S + 5, D)
    torch.testing.assert_close(exported.module()(y), model(y))
    assert any("expert_mlp" in str(n.target) for n in exported.graph.nodes)


def test_gradients_are_equal_under_gradient_checkpointing():
    model, x = Model(), torch.randn(S, D, requires_grad=True)
    rewrite(model, x)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    for reentrant in (False, True):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        out.sum().backward()
        torch.testing.assert_close(x.grad, wanted)
        x.grad = None
