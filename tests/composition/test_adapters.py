"""Adapters and changes work on kept modules, and raise a named error on absorbed experts."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from torch import nn

import moefx
from moefx.errors import AbsorbedModuleChanged

from .models import (
    ALL,
    CLOSE,
    NEAR,
    D,
    H,
    Model,
    assert_rewritten,
    assert_same,
    build,
    build_pair,
    compile_model,
    compute_logits,
    draw_ids,
    find_experts,
    needs_transformers,
    run_step,
)


def find_router(model: nn.Module) -> nn.Module:
    return model.moes[1].router if isinstance(model, Model) else model.model.layers[1].mlp.gate


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ALL)
def test_hooks_on_routers_fire_and_may_change_the_result(kind):
    original, compiled = build_pair(kind)
    seen = {}
    for name, model in (("original", original), ("compiled", compiled)):
        find_router(model).register_forward_hook(lambda m, args, out, name=name: seen.setdefault(name, out))
        find_router(model).register_forward_pre_hook(lambda m, args: (2 * args[0], *args[1:]))
    assert_same(run_step(compiled, draw_ids()), run_step(original, draw_ids()), **NEAR)
    torch.testing.assert_close(seen["compiled"], seen["original"], **NEAR)
    assert_rewritten(compiled)


@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_a_replaced_router_is_used(kind):
    original, compiled = build_pair(kind)
    fresh = nn.Linear(D, 4, bias=False).double()
    original.moes[0].router, compiled.moes[0].router = fresh, copy.deepcopy(fresh)
    assert_same(run_step(compiled, draw_ids()), run_step(original, draw_ids()))
    assert_rewritten(compiled)


def _replace(experts: nn.Module) -> None:
    experts[1] = copy.deepcopy(experts[1])


def _replace_part(experts: nn.Module) -> None:
    experts[1].up = nn.Linear(D, H, bias=False)


CHANGES = {
    "replaced": (_replace, r"experts\.1 was replaced"),
    "part": (_replace_part, r"experts\.1\.up was replaced"),
    "hook": (lambda e: e[1].register_forward_hook(lambda *a: None), r"experts\.1 got a forward hook"),
    "parametrized": (
        lambda e: nn.utils.parametrizations.weight_norm(e[1].up),
        r"experts\.1\.up became a ParametrizedLinear",
    ),
    "pruned": (
        lambda e: nn.utils.prune.l1_unstructured(e[1].up, "weight", 0.5),
        r"experts\.1\.up got a forward pre hook",
    ),
    "frozen norm": (lambda e: nn.utils.parametrizations.spectral_norm(e[1].down), r"experts\.1\.down became"),
    "removed": (lambda e: e.__delitem__(3), r"experts\.3 was removed"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("called_before", [False, True], ids=["at once", "later"])
def test_a_changed_expert_raises(change, called_before):
    _, compiled = build_pair("loop")
    if called_before:
        run_step(compiled, draw_ids())
    make, message = CHANGES[change]
    make(find_experts(compiled))
    for _ in range(2):
        with pytest.raises(AbsorbedModuleChanged, match=rf"^moes\.1\.{message}.* before moefx\.compile") as error:
            compiled(draw_ids())
    assert isinstance(error.value, RuntimeError)


STACKED_CHANGES = {
    "hook": (lambda e: e.register_forward_hook(lambda *a: None), "got a forward hook"),
    "parametrized": (
        lambda e: nn.utils.parametrize.register_parametrization(e, next(iter(e._parameters)), nn.Identity()),
        "became a Parametrized",
    ),
    "forward": (lambda e: setattr(e, "forward", lambda *a: a[0]), "was given a forward of its own"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("change", STACKED_CHANGES)
@pytest.mark.parametrize("kind", [k for k in ALL if k != "loop"])
def test_changed_stacked_experts_raise(change, kind):
    _, compiled = build_pair(kind)
    make, message = STACKED_CHANGES[change]
    make(find_experts(compiled))
    with pytest.raises(AbsorbedModuleChanged, match=rf"layers\.1\.mlp\.experts {message}|moes\.1\.experts {message}"):
        compute_logits(compiled, draw_ids())


def test_a_hook_on_an_expert_before_compile_is_a_reason_to_refuse():
    """Refuse only the layer with the hook, which is still called."""
    original = build("loop")
    fired = []
    original.moes[1].experts[2].register_forward_hook(lambda *a: fired.append(1))
    with pytest.warns(UserWarning, match=r"moes\.1: experts\.2 has a forward hook, which .* would not call"):
        compiled = compile_model(original)
    assert [block.name for block in moefx.blocks(compiled)] == ["moes.0"]
    fired.clear()
    torch.testing.assert_close(compute_logits(compiled, draw_ids()), compute_logits(original, draw_ids()), **CLOSE)
    assert len(fired) == 2  # one call of each model
    (refused,) = moefx.explain(original).refused
    assert refused.name == "moes.1" and refused.remedy.startswith("remove it")


@pytest.mark.parametrize("module", ["", "router"])
def test_hooks_on_kept_modules_are_allowed(module):
    original = build("loop")
    fired = []
    original.moes[1].get_submodule(module).register_forward_hook(lambda *a: fired.append(1))
    compiled = compile_model(original)
    fired.clear()
    compute_logits(compiled, draw_ids())
    assert fired == [1]
    assert_rewritten(compiled)


def _relu_forward(expert, x):
    return expert.down(expert.up(x).relu())


def test_a_replaced_forward_before_compile_is_rewritten():
    original = build("loop")
    for moe in original.moes:
        for expert in moe.experts:
            expert.forward = types.MethodType(_relu_forward, expert)
    compiled = compile_model(original)
    assert "relu" in moefx.explain(compiled).matched[0].expert
    for model in (compiled, copy.deepcopy(compiled)):
        assert_same(run_step(model, draw_ids()), run_step(original, draw_ids()))
        assert_rewritten(model)
    del compiled.moes[0].experts[1].forward
    with pytest.raises(AbsorbedModuleChanged, match=r"moes\.0\.experts\.1 was given a forward of its own"):
        compiled(draw_ids())


# -- PEFT ------------------------------------------------------------------------------------------


def _lora(targets: list[str]):
    peft = pytest.importorskip("peft")
    return peft, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)


@needs_transformers
@pytest.mark.hf
@pytest.mark.parametrize("when", ["after", "before"])
def test_lora_on_attention_leaves_the_blocks_rewritten(when):
    peft, config = _lora(["q_proj", "v_proj"])
    original, compiled = build_pair("qwen3")
    torch.manual_seed(5)
    expected = peft.get_peft_model(original, config)
    if when == "after":
        found = peft.get_peft_model(compiled, config)
        found.load_state_dict(expected.state_dict())
        inner = compiled
    else:
        found = inner = moefx.compile(copy.deepcopy(expected), example_inputs={"input_ids": draw_ids()})
    assert_same(run_step(found, draw_ids()), run_step(expected, draw_ids()), **NEAR)
    assert len(moefx.blocks(inner)) == 2 and all(b.fallbacks == 0 for b in moefx.blocks(inner))
    trained = [n for n, p in found.named_parameters() if p.requires_grad]
    assert trained and all("lora" in n for n in trained)


@pytest.mark.parametrize("when", ["after", "before"])
def test_lora_on_routers_trains_as_in_the_original(when):
    peft, config = _lora(["router"])
    original, compiled = build_pair("loop")
    torch.manual_seed(5)
    expected = peft.inject_adapter_in_model(config, original)
    if when == "after":
        found = peft.inject_adapter_in_model(config, compiled)
        found.load_state_dict(expected.state_dict())
    else:
        found = moefx.compile(copy.deepcopy(expected))
    assert "lora_A" in str(found.moes[0].router)
    assert_same(run_step(found, draw_ids()), run_step(expected, draw_ids()))
    assert_rewritten(found)


@pytest.mark.parametrize("layer", ["up", "down"])
def test_lora_on_an_absorbed_expert_raises(layer):
    peft, config = _lora([layer])
    _, compiled = build_pair("loop")
    compiled = peft.inject_adapter_in_model(config, compiled)
    with pytest.raises(AbsorbedModuleChanged, match=rf"moes\.0\.experts\.0\.{layer} was replaced \(Linear by Linear\)"):
        compiled(draw_ids())


def test_lora_on_experts_before_compile():
    """Rewrite the adapters with the block, or leave the block unchanged, but never ignore them."""
    peft, config = _lora(["up", "down"])
    torch.manual_seed(5)
    original = peft.inject_adapter_in_model(config, build("loop"))
    compiled = compile_model(original, strict=False)
    assert_same(run_step(compiled, draw_ids()), run_step(original, draw_ids()))
    assert moefx.blocks(compiled) or moefx.explain(compiled).refused


@needs_transformers
@pytest.mark.hf
def test_lora_on_stacked_experts_of_transformers_raises():
    peft = pytest.importorskip("peft")
    _, compiled = build_pair("qwen3")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    wrapped = peft.get_peft_model(compiled, config)
    with pytest.raises(AbsorbedModuleChanged, match=r"layers\.0\.mlp\.experts"):
        run_step(wrapped, draw_ids())
