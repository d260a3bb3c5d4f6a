"""The page on graphs runs and prints the shown text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "backend.md").read_text(encoding="utf-8")
# the package may not be installed, only importable
REGISTER = """
import torch
from moefx.frontends.dynamo.backend import backend
if "moefx" not in torch._dynamo.list_backends():
    torch._dynamo.register_backend(backend, name="moefx")
"""


def test_the_page_runs(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    script = tmp_path / "page.py"
    script.write_text(REGISTER + block)
    trace = tmp_path / "trace"
    extra = {"PYTHONPATH": str(ROOT), "TORCH_LOGS": "+moefx", "TORCH_TRACE": str(trace)}
    done = subprocess.run([sys.executable, script], cwd=ROOT, env=os.environ | extra, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("2 MoE block(s) rewritten", "build_pft", 'keep="x"', "rewrite_block"):
        assert text in done.stdout
    traced = "".join(file.read_text(encoding="utf-8") for file in trace.iterdir())
    for artifact in ("moefx_explain", "moefx_region_1", "moefx_region_3", "moefx_graph"):
        assert f'"name": "{artifact}"' in traced and artifact in done.stderr
    assert "Mixture" in traced or "build_pft" in traced
