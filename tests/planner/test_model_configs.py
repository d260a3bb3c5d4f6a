"""transformers configs: models of any size, and errors for contradicting sizes."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import moefx
from moefx import cli
from moefx.errors import CaptureError, UnknownArchitecture
from moefx.planner.model_configs import _find_invalid, load_config

pytestmark = pytest.mark.hf
transformers = pytest.importorskip("transformers")
EIGHT = ("h200", 8)


def test_a_config():
    """Plan a config without a module: the planner builds it on the meta device."""
    config = transformers.Qwen3MoeConfig(num_hidden_layers=3)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    ranking = moefx.plan(config, *EIGHT, batch=8)
    assert ranking.model.parameters() == sum(p.numel() for p in model.parameters())
    assert ranking.model.name == "Qwen3MoeForCausalLM"
    with pytest.raises(UnknownArchitecture, match=r"^transformers makes no model of CLIPVisionConfig"):
        moefx.plan(transformers.CLIPVisionConfig(), *EIGHT)
    with pytest.raises(UnknownArchitecture, match=r"^LlamaForCausalLM has no experts"):
        moefx.plan(transformers.LlamaConfig(num_hidden_layers=1), *EIGHT)


def save_config(path, config, **changes):
    """Save a config with other values, or without those that are None."""
    config.save_pretrained(path)
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return str(path)


def test_the_command_takes_a_config_file(tmp_path, capsys, recwarn):
    path = save_config(tmp_path, transformers.OlmoeConfig(num_hidden_layers=2))
    assert cli.main(["plan", path, "--platform", "h200", "--gpus", "2", "--batch", "8", "--no-page"]) == 0
    assert "OlmoeForCausalLM on 2 x NVIDIA H200" in capsys.readouterr().out
    assert not [w for w in recwarn if "does not say all sizes" in str(w.message)]
    (tmp_path / "config.json").write_text("[]")
    assert cli.main(["plan", path, "--gpus", "2"]) == 1
    assert "is no transformers config" in capsys.readouterr().err


def test_sizes_that_a_file_does_not_have(tmp_path):
    """Warn about sizes that transformers replaces by defaults."""
    config = transformers.MixtralConfig(num_hidden_layers=2)
    path = save_config(tmp_path, config, num_local_experts=None, hidden_size=None, num_key_value_heads=None)
    with pytest.warns(UserWarning, match="hidden_size=4096, num_local_experts=8 are defaults of MixtralConfig"):
        load_config(path)
    if "num_experts" in config.attribute_map:  # another name for the same field
        save_config(tmp_path, config, num_local_experts=None, num_experts=8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_config(path)


DO_NOT_GO_TOGETHER = {
    "choices": ("Mixtral", dict(num_experts_per_tok=20), "num_experts_per_tok is 20, expected at most 8, which is"),
    "no experts": ("Mixtral", dict(num_local_experts=0), "num_local_experts is 0, expected a whole number above 0"),
    "heads": ("Olmoe", dict(hidden_size=2050), "num_attention_heads is 16, expected a divisor of hidden_size"),
    "pairs": ("Mixtral", dict(num_key_value_heads=5), "num_key_value_heads is 5, expected a divisor of num_"),
    "negative": ("Mixtral", dict(hidden_size=-8), "hidden_size is -8, expected a whole number above 0"),
    "division": ("Mixtral", dict(num_attention_heads=0), "num_attention_heads is 0, expected a whole number above 0"),
    "layers": ("Mixtral", dict(num_hidden_layers=0), "num_hidden_layers is 0, expected a whole number above 0"),
    "groups": ("DeepseekV3", dict(n_group=7), "n_group is 7, expected a divisor of n_routed_experts, which is 256"),
    "another field": ("DeepseekV3", dict(qk_rope_head_dim=63), "some of its sizes do not go together, of hidden_"),
}  # fmt: skip


@pytest.mark.parametrize("case", DO_NOT_GO_TOGETHER)
def test_sizes_that_do_not_go_together(case):
    """Name the field instead of example inputs, which the user did not pass."""
    name, sizes, message = DO_NOT_GO_TOGETHER[case]
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=4)
    for field, value in sizes.items():
        setattr(config, field, value)
    with pytest.raises(UnknownArchitecture) as caught:
        moefx.plan(config, *EIGHT)
    assert str(caught.value).startswith(f"{name}Config: {message}") and "example_inputs" not in str(caught.value)


def test_example_inputs_that_do_not_fit_are_still_blamed():
    with pytest.raises(CaptureError, match="Pass example_inputs="):
        moefx.plan(
            transformers.MixtralConfig(num_hidden_layers=1), *EIGHT, example_inputs=(torch.zeros(2, 3, 5).long(),)
        )


def test_all_invalid_sizes_are_named():
    assert list(
        _find_invalid(dict(hidden_size="big", num_experts=8, num_experts_per_tok=9, n_group=2, topk_group=3))
    ) == [
        "hidden_size is 'big', expected a whole number above 0",
        "num_experts_per_tok is 9, expected at most 8, which is num_experts",
        "topk_group is 3, expected at most 2, which is n_group",
    ]
    assert not list(_find_invalid(dict(hidden_size=2880, num_attention_heads=64, head_dim=64, num_key_value_heads=8)))
