"""Golden files with expected output.

`MOEFX_UPDATE_GOLDEN=1 pytest ...` rewrites them; read the diff before committing.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

_HERE = Path(__file__).parent


def check(name: str, text: str) -> None:
    """Assert that `text` equals the golden file `name`."""
    path = _HERE / name
    text = text.rstrip() + "\n"
    if os.environ.get("MOEFX_UPDATE_GOLDEN"):
        path.write_text(text)
    expected = path.read_text() if path.exists() else ""
    if text != expected:
        diff = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
        )
        raise AssertionError("\n".join(["printed text changed", *diff]))
