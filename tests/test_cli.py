"""Command line: targets, exit status, environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import moefx
from moefx import cli

USER_MODULE = """
import torch
from torch import nn

ready = nn.Linear(3, 3)
number = 7

def model():
    return nn.Linear(3, 3)

def model_and_tensor():
    return nn.Linear(3, 3), torch.ones(2, 3)

def model_and_kwargs():
    return nn.Linear(3, 3), {"input": torch.ones(2, 3)}

def model_and_nonsense():
    return nn.Linear(3, 3), "inputs"

def triple():
    return nn.Linear(3, 3), 1, 2

def experts():
    from tests.blocks import D, Loop
    return Loop(), torch.zeros(9, D)

def needs_size(size):
    return nn.Linear(size, size)

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Create a module `user_code` in the current directory, for `python -m moefx`."""
    (tmp_path / "user_code.py").write_text(USER_MODULE)
    (tmp_path / "user_broken.py").write_text("import torch\nimport no_such_dependency\n")
    (tmp_path / "user_raises.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("user_code", "user_broken", "user_raises"):
        sys.modules.pop(name, None)


def test_load_a_model_or_a_pair(user_module):
    assert isinstance(cli.load("user_code:model").model, nn.Linear)
    assert cli.load("user_code:model").inputs is None
    assert cli.load("user_code:ready").model is cli.load("user_code:ready").model
    (tensor,) = cli.load("user_code:model_and_tensor").inputs
    assert torch.equal(tensor, torch.ones(2, 3))
    assert list(cli.load("user_code:model_and_kwargs").inputs) == ["input"]


def test_models_are_loaded_on_meta_on_request(user_module):
    assert cli.load("user_code:model", "meta").model.weight.is_meta
    assert not cli.load("user_code:model").model.weight.is_meta


@pytest.mark.parametrize("command", [["explain"], ["plan", "--gpus", "2"]], ids=["explain", "plan"])
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (":model", "is not of the form package.module:factory"),
        ("user_code:", "'user_code:' is not of the form package.module:factory"),
        ("user_code.py:model", "user_code.py is a file, expected a module: user_code:model, where it can be imported"),
        ("./inner/code.py:model", "expected a module: inner.code:model"),
        ("no_such_module:f", "no module named 'no_such_module'"),
        ("no_such_package.inner:f", "no module named 'no_such_package'"),
        ("user_code:modle", "has no attribute 'modle'; did you mean model"),
        ("user_code:number", "is a int, expected a function that returns a model"),
        ("user_code:triple", "returned (Linear, int, int), expected an nn.Module or a pair"),
        ("user_code:model_and_nonsense", "inputs of type str"),
        ("user_code:needs_size", "user_code:needs_size failed: TypeError: needs_size() missing 1 required"),
        ("user_code:broken", "RuntimeError: no weights here"),
        (
            "user_broken:f",
            "importing user_broken failed: ModuleNotFoundError: No module named 'no_such_dependency'",
        ),
        ("user_raises:f", "importing user_raises failed: ZeroDivisionError"),
    ],
)
def test_wrong_targets_end_with_status_2_and_one_line(user_module, capsys, command, spec, message):
    """`plan` calls factories on the meta device, and its errors name that device."""
    assert cli.main([*command, spec]) == 2
    error = capsys.readouterr().err
    assert message in error.replace(" failed on the meta device: ", " failed: ")
    assert len(error.strip().splitlines()) == 1


def test_invalid_targets_are_named(user_module, capsys):
    assert cli.main(["explain", "user_code"]) == 2
    assert "'user_code' is not of the form package.module:factory" in capsys.readouterr().err
    assert cli.main(["plan", "user_code", "--gpus", "2"]) == 1
    assert "no model 'user_code' in the catalogue" in capsys.readouterr().err


def test_a_users_model_is_planned(user_module, capsys):
    asked = ["--platform", "h200", "--gpus", "2", "--batch", "4", "--no-page"]
    assert cli.main(["plan", "user_code:experts", *asked]) == 0
    assert "Loop on 2 x NVIDIA H200" in capsys.readouterr().out
    assert cli.main(["plan", "user_code:model", *asked]) == 1
    assert "Linear has no experts" in capsys.readouterr().err


def test_a_failing_factory_is_named_with_its_line(user_module, capsys):
    cli.main(["verify", "user_code:broken"])
    assert "user_code.py:31)" in capsys.readouterr().err


@pytest.mark.parametrize("plan", ["{", "[]", '{"checkpoint": "y"}', '{"no_such_field": 1}'])
def test_wrong_plans_end_with_status_2(user_module, capsys, plan):
    assert cli.main(["explain", "user_code:model", "--plan", plan]) == 2
    assert "--plan" in capsys.readouterr().err


def test_graphs_are_part_of_the_json(user_module, capsys):
    assert cli.main(["explain", "user_code:experts", "--graphs", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["matched"] and list(explained["graphs"]) == [""] and "build_pft" in explained["graphs"][""]
    assert cli.main(["explain", "user_code:experts", "--graphs"]) == 0
    printed = capsys.readouterr().out
    assert "experts     E=4, top-2" in printed and "build_pft" in printed


def test_a_model_without_experts_is_explained_with_graphs_too(user_module, capsys):
    assert cli.main(["explain", "user_code:model_and_tensor", "--graphs"]) == 1
    assert "0 MoE block(s) rewritten, 0 refused" in capsys.readouterr().out
    assert cli.main(["explain", "user_code:model_and_tensor", "--graphs", "--json"]) == 1
    explained = json.loads(capsys.readouterr().out)
    assert not explained["matched"] and explained["graphs"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "foo"], "--device foo: RuntimeError: Expected one of cpu"),
        (["--device", "meta"], "--device meta: the demo trains"),
        (["--out", "no_such_folder/report.html"], "--out no_such_folder/report.html: expected a file in a folder"),
        (["--out", "."], "--out .: expected a file"),
    ],
    ids=str,
)
def test_a_demo_that_cannot_end_does_not_begin(user_module, capsys, arguments, message):
    assert cli.main(["demo", *arguments]) == 2
    out, error = capsys.readouterr()
    assert message in error and not out


def test_env_names_versions_and_devices(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert cli.main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["providers"]


def test_torch_does_not_complain_of_a_missing_numpy():
    program = """
import sys
from pathlib import Path
sys.modules["numpy"] = None
import moefx
from moefx import cli
status = cli.main(["env"])
import torch._subclasses.functional_tensor  # with which torch notices
sys.exit(status)
"""
    checkout = os.path.dirname(os.path.dirname(cli.__file__))
    done = subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True, check=True)
    assert not done.stderr


@pytest.mark.parametrize(("arguments", "status"), [(["no-such-command"], 2), (["explain", "x"], 2)])
def test_the_module_runs_as_a_program(tmp_path, arguments, status):
    checkout = os.path.dirname(os.path.dirname(cli.__file__))
    result = subprocess.run(
        [sys.executable, "-m", "moefx", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": checkout},
        check=False,
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_is_printed_by_both_commands():
    here = Path(sys.executable).parent / "moefx"
    commands = [[sys.executable, "-m", "moefx"], *([[str(here)]] if here.exists() else [])]
    for command in commands:
        printed = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        assert printed == f"moefx {moefx.__version__}\n"
