"""Files that `pip install` installs, and the time of the import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_python(*arguments: str, path: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_complete_and_runs_outside_the_checkout(tmp_path):
    pytest.importorskip("hatchling")
    run_python(
        "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), path=os.environ.get("PYTHONPATH", ""), cwd=ROOT
    )
    (wheel,) = tmp_path.glob("moefx-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {"moefx/py.typed", "moefx/demo/report_template.html", "moefx/__main__.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.startswith(("moefx/", "moefx-")) for name in names)
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "moefx").rglob("*.py")}
    assert sources <= set(names)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = run_python("-c", "import moefx; print(moefx.__file__)", path=str(tmp_path / "site"), cwd=elsewhere)
    assert where.strip().startswith(str(tmp_path / "site"))
    assert "providers" in run_python("-m", "moefx", "env", path=str(tmp_path / "site"), cwd=elsewhere)


def test_import_is_light(tmp_path):
    """Import in at most 0.3 s after torch, without the packages that are slow to import."""
    script = (
        "import sys, time, torch\n"
        "before = set(sys.modules)\n"
        "started = time.perf_counter()\n"
        "import moefx\n"
        "seconds = time.perf_counter() - started\n"
        "slow = {'triton', 'transformers', 'torch._dynamo', 'torch._inductor'}\n"
        "heavy = slow & (set(sys.modules) - before)\n"
        "print(seconds, *heavy)"
    )
    runs = [run_python("-c", script, path=str(ROOT), cwd=tmp_path).split() for _ in range(2)]
    assert not runs[0][1:]
    assert min(float(run[0]) for run in runs) < 0.3


def test_numpy_is_not_needed(tmp_path):
    assert not [p for p in (ROOT / "moefx").rglob("*.py") if "import numpy" in p.read_text(encoding="utf-8")]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"^```python[^\n]*\n(.*?)^```", readme, re.M | re.S)[0]
    script = tmp_path / "example.py"
    script.write_text(f"import sys\nsys.modules['numpy'] = None  # `import numpy` fails\n{example}", encoding="utf-8")
    assert "1 MoE block(s) rewritten" in run_python(str(script), path=str(ROOT), cwd=tmp_path)
