from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from moefx.lowering import triton
from moefx.lowering.triton import configs

CPU, SHAPE = torch.device("cpu"), (768, 2048, 1024)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(configs, "target", lambda device: "sm90")
    monkeypatch.setattr(configs, "_used", {})


def test_the_nearest_tuned_shape_and_why(hopper):
    chosen, why = configs.choice("down", CPU, torch.bfloat16, (2048, 700, 1000))
    assert why == "tuned for [768 -> 2048], 1024 rows an expert"
    assert chosen == configs.config("down", CPU, torch.bfloat16, (2048, 700, 1000))
    (line,) = triton.configurations()
    assert line == f"down bfloat16 [700 -> 2048], 1000 rows an expert: {chosen.text}; {why}"


def test_defaults_where_nothing_is_tuned(hopper, monkeypatch):
    for dtype, roles in ((torch.float16, True), (torch.float32, False)):
        chosen, why = configs.choice("up", CPU, dtype, SHAPE)
        assert chosen.roles is roles and why.startswith("the default: nothing is tuned for sm90")
    monkeypatch.setattr(configs, "target", lambda device: "gfx942")
    assert not configs.choice("up", CPU, torch.bfloat16, SHAPE)[0].roles


def test_a_triton_whose_gluon_is_not_known_gets_the_others(hopper, monkeypatch):
    monkeypatch.setattr(configs, "HAS_ROLES", False)
    for kernel in configs.KERNELS:
        chosen, why = configs.choice(kernel, CPU, torch.float16, SHAPE)
        assert not chosen.roles and "without Gluon's kernels" in why


def test_text_names_what_is_not_the_default():
    plain = configs.Config(128, 256, 64, warps=8, stages=4)
    assert plain.text == "128x256x64 warps=8 stages=4"
    assert dataclasses.replace(plain, group=4, roles=True).text == "128x256x64 warps=8 stages=4 group=4 roles"


def test_the_interpreter_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(configs, "_used", {})
    configs.config("up", CPU, torch.float32, SHAPE)
    assert not triton.configurations()


def test_gluon_is_not_imported_before_it_is_chosen():
    program = "import sys, moefx.lowering.triton.expert_mlp; print('moefx.lowering.triton.hopper' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
