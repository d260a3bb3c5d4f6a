"""The bytes of tensors, with and without NumPy."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moefx
from moefx.util.tensor_bytes import view_bytes

PACKAGE = Path(moefx.__file__).parent
WITHOUT_NUMPY = """
import sys
from pathlib import Path

sys.modules["numpy"] = None  # an import of numpy raises ImportError, in torch too
import torch
from torch import nn
import torch.distributed as dist
from safetensors import safe_open
from moefx.checkpoints.safetensors_files import ShardFile, TensorEntry
from moefx.distribution.pipeline_stages import _digest
from moefx.ir.expert_placement import Placement
from moefx.runtime.ranks.overwrite_detection import OverwritingWatch
from moefx.runtime.ranks.sharding import ExpertParameters

try:
    torch.ones(1).numpy()
except RuntimeError:
    pass
else:
    raise AssertionError("torch found NumPy")

folder = Path(sys.argv[1])
linear = nn.Linear(3, 4, dtype=torch.bfloat16)
path = folder / "model.safetensors"
with ShardFile(path, [TensorEntry("weight", (4, 3), torch.bfloat16)]) as file:
    file.append(linear.weight)
with safe_open(str(path), framework="pt") as file:
    assert torch.equal(file.get_tensor("weight"), linear.weight)

assert _digest(linear) != _digest(nn.Linear(3, 4, dtype=torch.bfloat16))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD.group_name
placement = Placement.in_order(4, 1, 0, axis="ep", group=group)
watch = OverwritingWatch(linear, "experts", ExpertParameters({"weight": 1}, ()), placement, 0)
assert watch._confirm_overwritten([[0]]) == []
dist.destroy_process_group()
"""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_bytes_are_in_row_major_order(dtype):
    t = (torch.arange(12) % 3).to(dtype).reshape(3, 4)
    for case in (t, t.T, t[:, 1:3], t[0, 0], t[:0], t.requires_grad_(t.is_floating_point()), t.conj()):
        plain = case.detach().resolve_conj().flatten().clone()
        assert view_bytes(case).tolist() == plain.untyped_storage().tolist()


def test_contiguous_memory_is_shared_and_kept_alive():
    t = torch.arange(4, dtype=torch.int32)
    view = view_bytes(t)
    t[0] = 7
    del t
    assert view[:4] == (7).to_bytes(4, sys.byteorder)


def test_no_module_of_the_package_asks_for_a_numpy_array():
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("numpy", "from_numpy")
    ]
    assert calls == []


def test_digests_and_checkpoints_need_no_numpy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
