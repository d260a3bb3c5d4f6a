"""Distinguish the user's files from those of torch, Python and this package."""

from __future__ import annotations

import functools
import sysconfig

import torch
import typing_extensions

TORCH_DIR = torch.__file__.rsplit("/", 1)[0] + "/"
PYTHON_DIR = sysconfig.get_path("stdlib") + "/"
PACKAGE_DIR = __file__.rsplit("/util/", 1)[0] + "/"
_LIBRARY_DIRS = (PACKAGE_DIR, TORCH_DIR)
# Prefixes of generated code and of wrappers of deprecated functions. Notebook cells, although in brackets, are the
# user's.
GENERATED = (
    "<frozen", "<string>", "<eval_with_key", "<__", typing_extensions.__file__,
)  # fmt: skip


def is_library_file(file: str) -> bool:
    """Whether a source file belongs to torch or to this package."""
    return file.startswith(_LIBRARY_DIRS)


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a source file is the user's: not of torch, this package or Python, and not generated."""
    is_stdlib = file.startswith(PYTHON_DIR) and "/site-packages/" not in file and "/dist-packages/" not in file
    return not is_stdlib and not file.startswith((*_LIBRARY_DIRS, *GENERATED))
