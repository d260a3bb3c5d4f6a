"""`load_pretrained` and `save_pretrained` in one process: models of transformers and plain ones, mistakes."""

from __future__ import annotations

import errno
import functools
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moefx
from moefx.checkpoints.safetensors_files import CheckpointFiles, ShardFile
from moefx.errors import InvalidCheckpoint, InvalidInput

from ..blocks import D, Gated, Loop
from ..models import hf

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip


def config_of(name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    if name == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=4, **options)
    sizes = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return transformers.Qwen3MoeConfig(**SIZES, **sizes, **options)


def build(config: Any, device: str = "cpu") -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def assert_equal_models(found: nn.Module, wanted: nn.Module) -> None:
    a, b = found.state_dict(), wanted.state_dict()
    assert list(a) == list(b)
    for name in b:
        assert torch.equal(a[name], b[name]), name
    buffers = dict(wanted.named_buffers())
    for name, value in found.named_buffers():
        assert torch.equal(value, buffers[name]), name


def from_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")


@pytest.mark.hf
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
def test_models_of_transformers_round_trip_from_meta(name, tied, tmp_path):
    config = config_of(name, tie_word_embeddings=tied)
    original = build(config)
    original.save_pretrained(tmp_path / "a", max_shard_size="10KB")
    compiled = moefx.compile(build(config, "meta"), plan=moefx.Plan(validation="symbolic"))
    assert moefx.load_pretrained(compiled, tmp_path / "a") is compiled
    assert_equal_models(compiled, original)
    assert (compiled.lm_head.weight is compiled.model.embed_tokens.weight) == tied
    assert not any(t.is_meta for t in (*compiled.parameters(), *compiled.buffers()))
    ids = torch.randint(64, (2, 7))
    torch.testing.assert_close(compiled(ids).logits, original(ids).logits)
    assert moefx.blocks(compiled)[0].fallbacks == 0
    moefx.save_pretrained(compiled, tmp_path / "b", max_shard_size="10KB")
    indices = [json.loads((tmp_path / x / "model.safetensors.index.json").read_text())["weight_map"] for x in "ab"]
    assert indices[0].keys() == indices[1].keys() and len(set(indices[1].values())) > 2
    assert any(".experts.3." in key for key in indices[1])
    assert_equal_models(from_folder(tmp_path / "b"), original)


@pytest.mark.hf
def test_the_layout_of_the_checkpoint_is_kept(tmp_path):
    original = build(config_of("qwen3"))
    original.save_pretrained(tmp_path / "a", save_original_format=False)
    model = moefx.load_pretrained(build(config_of("qwen3"), "meta"), tmp_path / "a")
    assert_equal_models(model, original)
    moefx.save_pretrained(model, tmp_path / "b")
    from safetensors import safe_open

    with safe_open(tmp_path / "b" / "model.safetensors", framework="pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in list(file.keys())
    assert_equal_models(from_folder(tmp_path / "b"), original)
    bfloat16 = moefx.load_pretrained(build(config_of("qwen3")).bfloat16(), tmp_path / "b")
    assert_equal_models(bfloat16, original.bfloat16())


@pytest.mark.hf
@pytest.mark.exhaustive  # a minute
@pytest.mark.parametrize("name", sorted(hf.CASES))
def test_every_model_of_transformers_loads_as_its_own_class_does(name, tmp_path):
    spec = hf.CASES[name]
    if not hf.INSTALLED or not hf._is_available(spec):
        pytest.skip("this release of transformers does not have it")
    cls = getattr(importlib.import_module(hf._module_of(spec, "modeling")), spec["cls"])
    original = cls(hf.make_config(name))
    hf._init(original, seed=0)
    original.save_pretrained(tmp_path / "a")
    with torch.device("meta"):
        meta = cls(hf.make_config(name))
    loaded, wanted = moefx.load_pretrained(meta, tmp_path / "a"), cls.from_pretrained(tmp_path / "a")
    assert_equal_models(loaded, wanted)
    moefx.save_pretrained(loaded, tmp_path / "b")
    found, files = (
        {key: opened.describe(key) for key in opened.keys} for opened in (CheckpointFiles(tmp_path / x) for x in "ba")
    )
    assert found == files
    assert_equal_models(cls.from_pretrained(tmp_path / "b"), wanted)


class Plain(nn.Module):
    def __init__(self, experts: int = 4, width: int = D):
        super().__init__()
        self.first, self.block = nn.Linear(width, D), Loop(Gated, num_experts=experts)
        self.last = nn.Linear(D, width, bias=False)
        self.table = Table()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return self.last(self.block(self.first(x)) * self.table.scale * self.table.gain)


class Table(nn.Module):
    """A buffer that no checkpoint holds, beside a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.empty(D), persistent=False)
        self.gain = nn.Parameter(torch.empty(D))
        self.reset_parameters()

    def reset_parameters(self):
        self.scale.copy_(torch.linspace(1, 2, D))
        nn.init.ones_(self.gain)


def test_plain_models_keep_the_names_of_their_state_dict(tmp_path):
    original = Plain()
    original.steps.fill_(7)
    nn.init.normal_(original.table.gain)
    moefx.save_pretrained(original, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with torch.device("meta"):
        meta = Plain()
    compiled = moefx.compile(meta, example_inputs=(torch.zeros(5, D, device="meta"),))
    loaded = moefx.load_pretrained(torch.compile(compiled, backend="eager"), tmp_path)
    assert_equal_models(compiled, original)
    x = torch.randn(9, D)
    torch.testing.assert_close(loaded(x), original(x))
    moefx.save_pretrained(loaded, tmp_path, max_shard_size=1000)  # removes the single file
    assert not (tmp_path / "model.safetensors").exists()
    assert_equal_models(moefx.load_pretrained(Plain(), tmp_path), original)


def test_a_single_file_goes_before_an_index(tmp_path):
    """An earlier save may have left the index: transformers reads the file and does not remove the index."""
    model = Plain()
    moefx.save_pretrained(model, tmp_path, max_shard_size="1KB")
    index = (tmp_path / "model.safetensors.index.json").read_text()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    moefx.save_pretrained(model, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert_equal_models(moefx.load_pretrained(Plain(), tmp_path), model)


class Frequencies(nn.Module):
    """A buffer that a checkpoint does not hold, computed from a config and one more argument."""

    def __init__(self, config, base=10.0, keeps_base=True):
        super().__init__()
        self.config, self.keeps_base = config, keeps_base
        if keeps_base:
            self.base = base
        self.register_buffer("inverse", base ** -torch.arange(0.0, config["width"]), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("keeps_base", [True, False])
def test_buffers_of_further_arguments_are_not_guessed(tmp_path, keeps_base):
    make = functools.partial(Frequencies, {"width": 4}, keeps_base=keeps_base)
    original = nn.Sequential(make())
    moefx.save_pretrained(original, tmp_path)
    with torch.device("meta"):
        model, other = nn.Sequential(make()), nn.Sequential(make(base=500.0))
    if keeps_base:
        assert_equal_models(moefx.load_pretrained(model, tmp_path), original)
    for unknown in (other,) if keeps_base else (model, other):
        with pytest.raises(InvalidCheckpoint, match=r"0\.inverse: a checkpoint does not hold these buffers"):
            moefx.load_pretrained(unknown, tmp_path)


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "model.bin"
    path.write_text("text")
    with pytest.raises(InvalidInput, match=r"model\.bin is a file: a checkpoint is a folder"):
        moefx.save_pretrained(Plain(), path)
    assert path.read_text() == "text"


@pytest.mark.parametrize("method", ["append", "__exit__"])  # a full disk shows when a file is written, or closed
def test_a_save_that_fails_keeps_the_earlier_checkpoint(method, tmp_path, monkeypatch):
    original, calls = Plain(), itertools.count()
    moefx.save_pretrained(original, tmp_path, max_shard_size=1000)
    names = sorted(path.name for path in tmp_path.iterdir())
    own = getattr(ShardFile, method)

    def fail(*args: Any) -> None:
        own(*args)
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardFile, method, fail)
    with pytest.raises(OSError, match="No space left"):
        moefx.save_pretrained(Plain(), tmp_path, max_shard_size=1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert_equal_models(moefx.load_pretrained(Plain(), tmp_path), original)


def test_a_checkpoint_whose_save_was_killed_is_loaded(tmp_path):
    original = Plain()
    moefx.save_pretrained(original, tmp_path / "complete-save", max_shard_size=1000)
    assert_equal_models(moefx.load_pretrained(Plain(), tmp_path), original)
    moefx.save_pretrained(original, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_dtypes_that_files_cannot_hold_raise_before_files_are_written(tmp_path):
    model = Plain()
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(InvalidCheckpoint, match=r"phases has the dtype torch\.complex128"):
        moefx.save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_checkpoints_that_do_not_fit_raise(tmp_path):
    with pytest.raises(InvalidCheckpoint, match=r"has neither model.safetensors nor .* it has no files"):
        moefx.load_pretrained(Plain(), tmp_path)
    moefx.save_pretrained(Plain(experts=5), tmp_path, max_shard_size="2KB")
    with pytest.raises(InvalidCheckpoint, match=r"3 keys are unexpected: block.experts.4.down"):
        moefx.load_pretrained(Plain(), tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"3 keys are missing: block.experts.5"):
        moefx.load_pretrained(Plain(experts=6), tmp_path)
    with pytest.raises(
        InvalidCheckpoint, match=r"first.weight has the shape .* in the model, and the checkpoint .* has"
    ):
        moefx.load_pretrained(Plain(experts=5, width=3), tmp_path)
    with torch.device("meta"):
        meta = Plain(experts=5)
    with pytest.raises(InvalidCheckpoint, match="on the meta device"):
        moefx.save_pretrained(meta, tmp_path)
    Table.reset_parameters, own = (lambda self: None), Table.reset_parameters
    try:
        with pytest.raises(InvalidCheckpoint, match=r"table.scale: a checkpoint does not hold .* Table does not say"):
            moefx.load_pretrained(meta, tmp_path)
    finally:
        Table.reset_parameters = own
    with pytest.raises(InvalidCheckpoint, match="max_shard_size='5'"):
        moefx.save_pretrained(Plain(), tmp_path, max_shard_size="5")
    next(tmp_path.glob("model-00001*")).unlink()
    with pytest.raises(InvalidCheckpoint, match="names files that"):
        moefx.load_pretrained(Plain(experts=5), tmp_path)


def test_names_of_one_parameter_have_one_value(tmp_path):
    untied, tied = Plain(width=D), Plain(width=D)
    tied.last.weight = tied.first.weight
    moefx.save_pretrained(untied, tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"last.weight and first.weight are one parameter"):
        moefx.load_pretrained(tied, tmp_path)
    moefx.save_pretrained(tied, tmp_path)
    with torch.device("meta"):
        meta = Plain(width=D)
        meta.last.weight = meta.first.weight
    moefx.load_pretrained(meta, tmp_path)
    assert meta.last.weight is meta.first.weight
    assert_equal_models(meta, tied)
