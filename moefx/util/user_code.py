"""Tell the user's files from those of torch, Python and this package."""

from __future__ import annotations

import functools
import sysconfig

import torch
import typing_extensions

TORCH_DIR = torch.__file__.rsplit("/", 1)[0] + "/"
PYTHON_DIR = sysconfig.get_path("stdlib") + "/"
PACKAGE_DIR = __file__.rsplit("/util/", 1)[0] + "/"
_OURS = (PACKAGE_DIR, TORCH_DIR)
# Generated code and wrappers of deprecated functions are neither torch's files nor the user's. A notebook cell, also in
# brackets, is the user's.
GENERATED = (
    "<frozen", "<string>", "<eval_with_key", "<__", typing_extensions.__file__,
)  # fmt: skip


def is_library_file(file: str) -> bool:
    """Whether a file of code is of torch or of this package."""
    return file.startswith(_OURS)


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a file of code is the user's: neither torch's, nor this package's, nor Python's own, nor generated."""
    is_pythons = file.startswith(PYTHON_DIR) and "/site-packages/" not in file and "/dist-packages/" not in file
    return not is_pythons and not file.startswith((*_OURS, *GENERATED))
