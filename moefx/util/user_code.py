"""Tell the user's files from those of torch, Python and this package."""

from __future__ import annotations

import functools
import sysconfig

import torch
import typing_extensions

TORCH = torch.__file__.rsplit("/", 1)[0] + "/"
PYTHON = sysconfig.get_path("stdlib") + "/"
PACKAGE = __file__.rsplit("/util/", 1)[0] + "/"
_OURS = (PACKAGE, TORCH)
# Generated code and wrappers of deprecated functions are neither torch's files nor the user's. A notebook cell, also in
# brackets, is the user's.
NOBODYS = (
    "<frozen", "<string>", "<eval_with_key", "<__", typing_extensions.__file__,
)  # fmt: skip


def is_ours(file: str) -> bool:
    """Whether a file of code is of torch or of this package."""
    return file.startswith(_OURS)


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a file of code is the user's: neither torch's, nor this package's, nor Python's own, nor generated."""
    is_pythons = file.startswith(PYTHON) and "/site-packages/" not in file and "/dist-packages/" not in file
    return not is_pythons and not file.startswith((*_OURS, *NOBODYS))
