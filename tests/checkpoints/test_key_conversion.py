"""Names of a checkpoint and of a model are grouped by transformers' conversions, in both directions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moefx.checkpoints.key_conversion import (
    KeyGroup,
    check_keys,
    find_transformers_model,
    group_checkpoint_keys,
    group_model_names,
)
from moefx.errors import InvalidCheckpoint

EXPERTS = 2


def build_model() -> Any:
    """Return a model whose experts are stacked, and separate in its checkpoints. transformers 4 has none."""
    pytest.importorskip("transformers.core_model_loading")
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, moe_intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=1,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.Qwen3MoeForCausalLM(config)


def separate_keys(layer: str = "model.layers.0.mlp.experts") -> dict[str, list[str]]:
    """Return the names of the experts' matrices in a checkpoint, by the name in the model."""
    return {
        f"{layer}.gate_up_proj": [f"{layer}.{e}.{kind}.weight" for kind in ("gate_proj", "up_proj") for e in range(2)],
        f"{layer}.down_proj": [f"{layer}.{e}.down_proj.weight" for e in range(2)],
    }


def test_names_of_plain_models_stay():
    groups, used = group_checkpoint_keys(None, ["a", "b"], ["a"])
    assert groups == [KeyGroup("a", {"a": ["a"]}), KeyGroup("b", {"b": ["b"]})] and used == []
    assert group_model_names(None, ["a"]) == [KeyGroup("a", {"a": ["a"]})]


def test_a_copy_computes_its_own_name_only():
    group = KeyGroup("a", {"a": ["a"]})
    assert group.find_results(["a", "b"]) == ["a"] and group.find_results(["b"]) == []


def test_the_only_source_is_copied():
    recorded = KeyGroup("new", {"old": ["old"]}).record({"old": ((2, 3), torch.float32)}, None, {})
    source, out = torch.arange(6.0).reshape(2, 3), torch.empty(1, 3)
    recorded.fill(out, "new", ((1, 2), (0, 3)), lambda name, region, to: to.copy_(source[slice(*region[0])]))
    assert torch.equal(out, source[1:])


@pytest.mark.hf
def test_separate_experts_are_grouped_to_stacks():
    model = build_model()
    wanted = separate_keys()
    keys = [*(key for keys in wanted.values() for key in keys), "lm_head.weight"]
    groups, used = group_checkpoint_keys(model, keys, list(model.state_dict()))
    by_result = {group.result: group for group in groups}
    assert {name: sorted(by_result[name].source_names) for name in wanted} == {
        name: sorted(sources) for name, sources in wanted.items()
    }
    assert by_result["lm_head.weight"].converter is None
    assert {*by_result} == {*wanted, "lm_head.weight"} and used


@pytest.mark.hf
def test_stacks_are_saved_as_separate_experts():
    model = build_model()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    results = set()
    for group in group_model_names(model, separate_keys()):
        sources = {name: (shapes[name], torch.float32) for name in group.source_names}
        results |= {*group.record(sources, model, shapes).results}
    assert results == {key for keys in separate_keys().values() for key in keys}


@pytest.mark.hf
def test_sources_that_do_not_fit_together_raise():
    model = build_model()
    (group,) = group_checkpoint_keys(
        model, separate_keys()["model.layers.0.mlp.experts.down_proj"], model.state_dict()
    )[0]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    first, second = group.source_names
    with pytest.raises(InvalidCheckpoint, match=r"conversion of .*down_proj.weight \[8, 4\].* failed"):
        group.record({first: ((8, 4), torch.float32), second: ((8, 5), torch.float32)}, model, shapes)


def test_missing_and_unexpected_keys_are_named():
    groups = [KeyGroup(name, {name: [name]}) for name in ("a", "extra")]
    with pytest.raises(
        InvalidCheckpoint, match=r"folder does not fit .* 1 keys are missing: .*b.* 1 keys are unexpec.*extra"
    ):
        check_keys(None, groups, ["a", "b"], set(), set(), "folder")


def test_tied_names_buffers_and_ignored_keys_are_no_fault():
    groups = [KeyGroup(name, {name: [name]}) for name in ("a", "layers.0.rotary.inv_freq", "mtp.weight")]
    model = SimpleNamespace(_keys_to_ignore_on_load_unexpected=[r"^mtp\."])
    check_keys(model, groups, ["a", "head"], {"head"}, {"rotary.inv_freq"}, "folder")
    with pytest.raises(InvalidCheckpoint, match=r"unexpected: .*mtp\.weight"):
        check_keys(None, groups, ["a", "head"], {"head"}, {"rotary.inv_freq"}, "folder")


def test_plain_modules_are_not_of_transformers():
    assert find_transformers_model([nn.Linear(2, 2)]) is None


@pytest.mark.hf
def test_a_model_of_transformers_is_found():
    model = build_model()
    assert find_transformers_model([nn.Linear(2, 2), model]) is model
